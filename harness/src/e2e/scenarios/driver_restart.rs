//! The driver's pods are replaced while volumes are in use, as by an upgrade.

use std::collections::BTreeSet;

use anyhow::{Context, Result};
use kube::ResourceExt;
use kube::api::{DeleteParams, PostParams};
use kube::runtime::watcher;
use testvm_cluster::api_error::api_error;
use testvm_cluster::exec::exec_ok;
use testvm_cluster::waiting::{State, until};

use super::install;
use crate::e2e::scenario::{Scenario, StepResult};
use crate::test_env::environment::TestEnv;
use crate::test_env::pods::{end, start};
use crate::test_env::sizes::Size;
use crate::test_env::workload::{FLOW_POD, Use, claim};

pub(in crate::e2e) const NAME: &str = "driver restart";

const SIZE: Size = Size::mebibytes(1);

pub(in crate::e2e) async fn run(scenario: &mut Scenario<'_>, env: &TestEnv<'_>) -> StepResult {
    scenario.step("replace the driver's pods", replace(env)).await?;
    scenario.step("the new pods serve", install::served(env)).await?;
    scenario.step("a pod that was running keeps its volumes", still_used(env)).await?;
    scenario.step("a new claim is served", served(env)).await
}

/// Deletes the driver's pods and waits until new ones are ready.
pub(in crate::e2e) async fn replace(env: &TestEnv<'_>) -> Result<()> {
    let old: BTreeSet<String> = env.live_driver_pods().await?.iter().filter_map(ResourceExt::uid).collect();
    for pod in env.live_driver_pods().await? {
        let name = pod.name_any();
        let deleted = env.driver_pods().delete(&name, &DeleteParams::default()).await;
        deleted.map_err(api_error).with_context(|| format!("delete pod {name}"))?;
    }
    let scope = watcher::Config::default().labels(env.driver.pod_labels());
    until(env.driver_pods(), scope, env.timeouts.end, |pods| {
        let remaining = pods.values().filter(|pod| pod.uid().is_some_and(|uid| old.contains(&uid))).count();
        State::when(remaining == 0 && !pods.is_empty(), format!("{remaining} of {} still exist", old.len()))
    })
    .await
    .map(drop)
}

async fn still_used(env: &TestEnv<'_>) -> Result<()> {
    exec_ok(&env.pods(), FLOW_POD, &["/volume-check", "write", "/vol/default/after-restart", "text"]).await?;
    let read =
        exec_ok(&env.pods(), FLOW_POD, &["/volume-check", "read", "/vol/default/after-restart"]).await?;
    anyhow::ensure!(read == "text", "read back {read:?}");
    Ok(())
}

async fn served(env: &TestEnv<'_>) -> Result<()> {
    let claim = claim("after-restart", &env.driver.class_name(), SIZE, "Filesystem", "ReadWriteOnce")?;
    env.claims()
        .create(&PostParams::default(), &claim)
        .await
        .map_err(api_error)
        .context("create the claim")?;
    start(env, "after-restart", "after-restart", Use::Mounted, false).await?;
    end(env, "after-restart").await
}

//! Replaces the driver's pods while volumes are in use, as an upgrade does.

use std::collections::BTreeSet;

use anyhow::Result;
use kube::ResourceExt;
use kube::runtime::watcher;
use testvm::steps::{StepResult, Steps};
use testvm_cluster::exec::exec_ok;
use testvm_cluster::objects;
use testvm_cluster::waiting::{State, until};

use super::install;
use crate::test_env::claims;
use crate::test_env::disturbances::replace_pods;
use crate::test_env::environment::TestEnv;
use crate::test_env::pods::{end, start};
use crate::test_env::sizes::Size;
use crate::test_env::workload::{FLOW_POD, VolumeMode, claim};

pub(in crate::e2e) const NAME: &str = "driver-restart";

const SIZE: Size = Size::mebibytes(1);

pub(in crate::e2e) async fn run(steps: &mut Steps<'_>, env: &TestEnv<'_>) -> StepResult {
    steps.step("replace the driver's pods", replace(env)).await?;
    steps.step("the new pods are ready and serve requests", install::served(env)).await?;
    steps.step("a pod that was running still writes to its volume", check_running_pod(env)).await?;
    steps.step("a new claim is provisioned and mounted", check_new_claim(env)).await
}

/// Deletes the driver's pods, and waits until they no longer exist and new ones do. The new ones may not be ready yet.
pub(in crate::e2e) async fn replace(env: &TestEnv<'_>) -> Result<()> {
    let old_pods = replace_pods(env).await?;
    for pod in &old_pods {
        let name = pod.name_any();
        objects::delete(&env.driver_pods(), &name).await?;
    }
    let old: BTreeSet<String> = old_pods.iter().filter_map(ResourceExt::uid).collect();
    let scope = watcher::Config::default().labels(env.driver.pod_labels());
    until(env.driver_pods(), scope, env.timeouts.end, |pods| {
        let remaining = pods.values().filter(|pod| pod.uid().is_some_and(|uid| old.contains(&uid))).count();
        let pending = format!("{remaining} of {} old pods still exist, among {}", old.len(), pods.len());
        State::ready_if(remaining == 0 && !pods.is_empty(), pending)
    })
    .await
    .map(drop)
}

async fn check_running_pod(env: &TestEnv<'_>) -> Result<()> {
    const FILE: &str = "/vol/default/after-restart";
    exec_ok(&env.pods(), FLOW_POD, &["/volume-check", "write", FILE, "text"]).await?;
    let read = exec_ok(&env.pods(), FLOW_POD, &["/volume-check", "read", FILE]).await?;
    anyhow::ensure!(read == "text", "pod {FLOW_POD} wrote \"text\" to {FILE}, but reads {read:?}");
    Ok(())
}

async fn check_new_claim(env: &TestEnv<'_>) -> Result<()> {
    let claim =
        claim("after-restart", &env.driver.class_name(), SIZE, VolumeMode::Filesystem, "ReadWriteOnce")?;
    claims::create(env, &claim).await?;
    start(env, "after-restart", "after-restart", VolumeMode::Filesystem).await?;
    end(env, "after-restart").await
}

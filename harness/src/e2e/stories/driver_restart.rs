//! Replaces the driver's pods while volumes are in use, as an upgrade does.

use std::collections::BTreeSet;

use anyhow::Result;
use kube::ResourceExt;
use kube::runtime::watcher;
use testvm::steps::{StepResult, Steps};
use testvm_cluster::objects;
use testvm_cluster::waiting::{State, until};

use super::install;
use crate::test_env::claims;
use crate::test_env::disturbances::replace_pods;
use crate::test_env::environment::TestEnv;
use crate::test_env::pods::{end, reads, start, write};
use crate::test_env::sizes::Size;
use crate::test_env::workload::{VolumeMode, claim};

pub(in crate::e2e) const NAME: &str = "driver-restart";

const SIZE: Size = Size::mebibytes(1);
/// The names of the pods and their claims.
const RUNNING: &str = "before-restart";
const NEW: &str = "after-restart";
const FILE: &str = "/vol/file";
const TEXT: &str = "after the restart";

pub(in crate::e2e) async fn run(steps: &mut Steps<'_>, env: &TestEnv<'_>) -> StepResult {
    steps.step("a pod uses a claim", start_pod(env, RUNNING)).await?;
    steps.step("replace the driver's pods", replace(env)).await?;
    steps.step("the new pods are ready and serve requests", install::served(env)).await?;
    steps.step("a pod that was running still writes to its volume", check_running_pod(env)).await?;
    steps.step("a new claim is provisioned and mounted", start_pod(env, NEW)).await?;
    let ended = async { tokio::try_join!(end(env, RUNNING), end(env, NEW)).map(drop) };
    steps.step("the pods end", ended).await
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
    write(env, RUNNING, VolumeMode::Filesystem, FILE, TEXT).await?;
    reads(env, RUNNING, FILE, TEXT).await
}

/// Starts a pod with a new claim of the same name.
async fn start_pod(env: &TestEnv<'_>, name: &str) -> Result<()> {
    let class = env.driver.class_name();
    claims::create(env, &claim(name, &class, SIZE, VolumeMode::Filesystem, "ReadWriteOnce")?).await?;
    start(env, name, name, VolumeMode::Filesystem).await
}

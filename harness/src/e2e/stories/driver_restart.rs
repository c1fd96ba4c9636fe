//! Replaces the driver's pods while volumes are in use, as an upgrade does. Then kills the driver while its disk is not mounted: pods
//! with volumes must end all the same, and the cleanup follows when the disk is mounted again.

use std::collections::BTreeSet;

use anyhow::Result;
use kube::ResourceExt;
use kube::runtime::watcher;
use testvm::steps::{StepResult, Steps};
use testvm_cluster::waiting::{State, until};
use testvm_cluster::{KubeletRoot, Node, objects};

use crate::e2e::parts::both_modes;
use crate::e2e::parts::node_without_storage::{driver_pod, mount_disk};
use crate::e2e::parts::serving;
use crate::e2e::sabotages::reject_writes;
use crate::e2e::story::{Run, Sabotage, Story, When};
use crate::nodes::DATA_DIR;
use crate::test_env::disturbances::{kill, replace_pods};
use crate::test_env::environment::{FOREIGN_NODE, TestEnv};
use crate::test_env::pods::{end, start_new};
use crate::test_env::rejected_writes::Rejected;
use crate::test_env::sizes::Size;
use crate::test_env::workload::VolumeMode;

pub(in crate::e2e) const STORY: Story = Story {
    name: "driver-restart",
    about: "the driver's pods are replaced while volumes are in use, and the driver killed while its disk is missing",
    when: When::All,
    run: Run::AnyCluster(|steps, state| Box::pin(run(steps, state.env, state.nodes.variant().kubelet_root))),
    sabotages: &[Sabotage {
        name: "restarted-driver",
        about: "The API server rejects new PersistentVolumes after the driver was replaced",
        before: "a new claim is provisioned and mounted",
        change: |env| Box::pin(reject_writes(env, Rejected::Creations)),
        repair: None,
        expected: &["pod after-restart does not run"],
    }],
};

const SIZE: Size = Size::mebibytes(1);
/// The pod with a mounted and a block volume, and the beginning of the names of its claims.
const RUNNING: &str = "before-restart";
/// A pod and its claim.
const NEW: &str = "after-restart";
const TEXT: &str = "after the restart";

const WITHOUT_DISK: &str = "pods end although the driver restarts without its disk";
const DRIVER: &str = "csi";

async fn run(steps: &mut Steps<'_>, env: &TestEnv<'_>, kubelet_root: KubeletRoot) -> StepResult {
    let started = both_modes::start_new(env, RUNNING, SIZE);
    steps.step("a pod uses a mounted and a block volume", started).await?;
    steps.step("replace the driver's pods", replace(env)).await?;
    steps.step("the new pods are ready and serve requests", serving::served(env)).await?;
    let running = async {
        both_modes::write(env, RUNNING, TEXT).await?;
        both_modes::check_text(env, RUNNING, TEXT).await
    };
    steps.step("the pod that was running still writes to its volumes", running).await?;
    let new = start_new(env, NEW, SIZE, VolumeMode::Filesystem);
    steps.step("a new claim is provisioned and mounted", new).await?;
    let reason = match (env.node, kubelet_root) {
        (Some(node), KubeletRoot::RootDisk) => return without_disk(steps, env, node).await,
        (Some(_), KubeletRoot::DataDisk) => "the kubelet has its directory on the disk",
        (None, _) => FOREIGN_NODE,
    };
    steps.skip(WITHOUT_DISK, reason);
    Ok(())
}

/// Kills the driver while its disk is not mounted, deletes the pods, and mounts the disk again.
async fn without_disk(steps: &mut Steps<'_>, env: &TestEnv<'_>, node: &Node) -> StepResult {
    steps.step("the disk is unmounted, and the driver killed", lose_disk(env, node)).await?;
    let ended = async { tokio::try_join!(end(env, RUNNING), end(env, NEW)).map(drop) };
    steps.step(WITHOUT_DISK, ended).await?;
    steps.step("the disk is mounted again", mount_disk(node)).await?;
    steps.step("the driver serves requests again", serving::served(env)).await
}

async fn lose_disk(env: &TestEnv<'_>, node: &Node) -> Result<()> {
    // The driver and the volumes have open files there.
    node.output(&["umount", "--lazy", DATA_DIR]).await?;
    kill(env, node, &driver_pod(env, node).await?, DRIVER).await.map(drop)
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

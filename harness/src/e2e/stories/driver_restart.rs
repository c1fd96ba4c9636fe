//! Replaces the driver's pods while volumes are in use, as an upgrade does. Then kills the driver while its disk is not mounted: pods
//! with volumes must end all the same, and the cleanup follows when the disk is mounted again.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::Result;
use kube::ResourceExt;
use kube::runtime::watcher;
use testvm::steps::{StepResult, Steps};
use testvm_cluster::waiting::{State, until};
use testvm_cluster::{KubeletRoot, Node, objects};

use super::{install, removal};
use crate::e2e::parts::node_without_storage::{driver_pod, mount_disk};
use crate::e2e::sabotages::reject_writes;
use crate::e2e::story::{Run, Sabotage, Story, When};
use crate::nodes::DATA_DIR;
use crate::test_env::claims;
use crate::test_env::disturbances::{kill, replace_pods};
use crate::test_env::environment::{FOREIGN_NODE, TestEnv};
use crate::test_env::inventory::Inventory;
use crate::test_env::pods::{check_text, end, start, write};
use crate::test_env::rejected_writes::{Rejected, allow};
use crate::test_env::sizes::Size;
use crate::test_env::workload::{VolumeMode, claim};

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
        repair: Some(|env| Box::pin(allow(env))),
        expected: &["pod after-restart does not run"],
    }],
};

const SIZE: Size = Size::mebibytes(1);
/// The names of the pods and their claims.
const RUNNING: &str = "before-restart";
const NEW: &str = "after-restart";
const FILE: &str = "/vol/file";
const TEXT: &str = "after the restart";

const WITHOUT_DISK: &str = "pods end although the driver restarts without its disk";
/// The pods that end while the disk is not mounted, and their claims.
const ENDING: [(&str, VolumeMode); 2] =
    [("mounted-without-disk", VolumeMode::Filesystem), ("device-without-disk", VolumeMode::Block)];
const DRIVER: &str = "csi";
const TOOL_DEADLINE: Duration = Duration::from_secs(60);

async fn run(steps: &mut Steps<'_>, env: &TestEnv<'_>, kubelet_root: KubeletRoot) -> StepResult {
    steps.step("a pod uses a claim", start_pod(env, RUNNING)).await?;
    steps.step("replace the driver's pods", replace(env)).await?;
    steps.step("the new pods are ready and serve requests", install::served(env)).await?;
    steps.step("a pod that was running still writes to its volume", check_running_pod(env)).await?;
    steps.step("a new claim is provisioned and mounted", start_pod(env, NEW)).await?;
    let ended = async { tokio::try_join!(end(env, RUNNING), end(env, NEW)).map(drop) };
    steps.step("the pods end", ended).await?;
    match (env.node, kubelet_root) {
        (Some(node), KubeletRoot::RootDisk) => without_disk(steps, env, node).await,
        (Some(_), KubeletRoot::DataDisk) => {
            steps.skip(WITHOUT_DISK, "the kubelet has its directory on the disk");
            Ok(())
        }
        (None, _) => {
            steps.skip(WITHOUT_DISK, FOREIGN_NODE);
            Ok(())
        }
    }
}

/// Kills the driver while its disk is not mounted, deletes pods, and mounts the disk again.
async fn without_disk(steps: &mut Steps<'_>, env: &TestEnv<'_>, node: &Node) -> StepResult {
    let before = steps.step("list what is on the node", Inventory::take(node)).await?;
    let [mounted, device] = ENDING.map(|(name, mode)| start_pod_on(env, node, name, mode));
    let started = async { tokio::try_join!(mounted, device).map(drop) };
    steps.step("pods use a mounted and a block volume", started).await?;
    steps.step("the disk is unmounted, and the driver killed", lose_disk(env, node)).await?;
    let [mounted, device] = ENDING.map(|(name, _)| end(env, name));
    let ended = async { tokio::try_join!(mounted, device).map(drop) };
    steps.step(WITHOUT_DISK, ended).await?;
    steps.step("the disk is mounted again", mount_disk(node)).await?;
    steps.step("the driver serves requests again", install::served(env)).await?;
    steps.step("deleted with their claims, they leave nothing", delete_claims(env, node, &before)).await
}

async fn lose_disk(env: &TestEnv<'_>, node: &Node) -> Result<()> {
    // The driver and the volumes have open files there.
    node.output(&["umount", "--lazy", DATA_DIR], TOOL_DEADLINE).await?;
    kill(env, node, &driver_pod(env, node).await?, DRIVER).await.map(drop)
}

async fn delete_claims(env: &TestEnv<'_>, node: &Node, before: &Inventory) -> Result<()> {
    for (name, _) in ENDING {
        claims::delete_with_volume(env, name).await?;
    }
    removal::nothing_left(env, node, before).await
}

/// Starts a pod on this node with a new claim of the same name.
async fn start_pod_on(env: &TestEnv<'_>, node: &Node, name: &str, mode: VolumeMode) -> Result<()> {
    let object = claim(name, &env.driver.class_name(), SIZE, mode, "ReadWriteOnce")?;
    claims::create(env, &claims::with_selected_node(object, node.name())).await?;
    start(env, name, name, mode).await
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
    write(env, RUNNING, FILE, TEXT).await?;
    check_text(env, RUNNING, FILE, TEXT).await
}

/// Starts a pod with a new claim of the same name.
async fn start_pod(env: &TestEnv<'_>, name: &str) -> Result<()> {
    let class = env.driver.class_name();
    claims::create(env, &claim(name, &class, SIZE, VolumeMode::Filesystem, "ReadWriteOnce")?).await?;
    start(env, name, name, VolumeMode::Filesystem).await
}

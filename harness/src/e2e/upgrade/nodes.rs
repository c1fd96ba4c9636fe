//! The nodes during a roll-out: which image the driver has there, a data disk that is missing, and a store of a later version.

use std::time::Duration;

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::runtime::watcher;
use testvm_cluster::Node;
use testvm_cluster::waiting::{State, until, until_event};
use testvm_cluster::workload::node_of;

pub(super) use crate::e2e::parts::node_without_storage::unused;
use crate::e2e::parts::node_without_storage::{mount_disk, reports_storage};
use crate::e2e::stories::install::serves;
use crate::nodes::DATA_DIR;
use crate::test_env::environment::TestEnv;

/// The pods of the driver: one for each node.
pub(super) const PODS: i32 = 2;

/// The content of the store's format file, and that of a version to come.
pub(super) const FORMAT: &str = "loopfs store 1";
pub(super) const LATER_FORMAT: &str = "loopfs store 2";

const TOOL_DEADLINE: Duration = Duration::from_secs(60);

/// Checks that all containers of the driver have this image.
pub(super) async fn have_image(env: &TestEnv<'_>, image: &str) -> Result<()> {
    for pod in env.live_driver_pods().await? {
        anyhow::ensure!(has_image(&pod, image), "pod {} does not have the image {image}", pod.name_any());
    }
    Ok(())
}

fn has_image(pod: &Pod, image: &str) -> bool {
    let mut containers = pod.spec.iter().flat_map(|spec| &spec.containers);
    containers.all(|container| container.image.as_deref() == Some(image))
}

/// Has the driver serve the data disk of a node, and unmounts it, as if the disk had not come up at boot: the record of its
/// file system is beside the mount point, and nothing is mounted.
pub(super) async fn lose_disk(env: &TestEnv<'_>, node: &Node) -> Result<()> {
    mount_disk(node).await?;
    serves(env, PODS).await?;
    // The driver has open files there.
    node.output(&["umount", "--lazy", DATA_DIR], TOOL_DEADLINE).await.map(drop)
}

/// Waits until the driver's new pod on the node is not Ready and an event says why, and then mounts the disk there.
pub(super) async fn waits_for_disk(env: &TestEnv<'_>, node: &Node, image: &str) -> Result<()> {
    let scope = watcher::Config::default().labels(env.driver.pod_labels());
    let new = |pod: &&Pod| node_of(pod) == Some(node.name()) && has_image(pod, image);
    let pods = until(env.driver_pods(), scope, env.timeouts.start, |pods| {
        State::ready_if(
            pods.values().any(|pod| new(&pod)),
            format!("{} has no pod with {image}", node.name()),
        )
    });
    let pods = pods.await?;
    let pod = pods.values().find(new).context("the pod was there just now")?;
    let failed = |message: &str| message.starts_with("Readiness") && message.contains("503");
    until_event(&env.client, pod, &["Unhealthy"], env.timeouts.start, failed).await?;
    reports_storage(env, node, &["nothing is mounted"]).await?;
    mount_disk(node).await
}

fn is_ready(pod: &Pod) -> bool {
    let mut statuses = pod.status.iter().flat_map(|status| status.container_statuses.iter().flatten());
    statuses.all(|status| status.ready)
}

/// Writes the format file of the node's store.
pub(super) async fn set_format(node: &Node, format: &str) -> Result<()> {
    let command = format!("echo '{format}' > {DATA_DIR}/.loopfs/format && sync");
    node.output(&["sh", "-c", &command], TOOL_DEADLINE).await.map(drop)
}

/// Waits until the driver's pod on the node is not Ready and an event names the format of the store.
pub(super) async fn reports_format(env: &TestEnv<'_>, node: &Node) -> Result<()> {
    reports_storage(env, node, &[LATER_FORMAT]).await?;
    let scope = watcher::Config::default().labels(env.driver.pod_labels());
    until(env.driver_pods(), scope, env.timeouts.start, |pods| {
        let mut here = pods
            .values()
            .filter(|pod| node_of(pod) == Some(node.name()) && pod.metadata.deletion_timestamp.is_none());
        State::ready_if(here.any(|pod| !is_ready(pod)), format!("the pod on {} is Ready", node.name()))
    })
    .await
    .map(drop)
}

//! What is done to a container behind the kubelet's back: containerd's own tool, in the node.

use std::time::Duration;

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;

use crate::cluster::Node;

const TOOL_DEADLINE: Duration = Duration::from_secs(60);

/// A running container, as containerd knows it.
#[derive(Clone, Debug)]
pub(super) struct Container {
    id: String,
}

impl Container {
    /// The container of this name that runs in a pod now.
    pub(super) fn of(pod: &Pod, container: &str) -> Result<Container> {
        let statuses = pod.status.iter().flat_map(|status| status.container_statuses.iter().flatten());
        let status = statuses.into_iter().find(|status| status.name == container);
        let id = status.and_then(|status| status.container_id.as_deref());
        let id = id.and_then(|id| id.strip_prefix("containerd://"));
        let id =
            id.with_context(|| format!("container {container} of pod {} does not run", pod.name_any()))?;
        Ok(Container { id: id.to_owned() })
    }
}

/// SIGKILL, as the kernel sends it when memory runs out.
pub(super) async fn kill(node: &Node, container: &Container) -> Result<()> {
    ctr(node, &["tasks", "kill", "--signal", "SIGKILL", &container.id]).await
}

/// Stops every process of the container where it stands.
pub(super) async fn freeze(node: &Node, container: &Container) -> Result<()> {
    ctr(node, &["tasks", "pause", &container.id]).await
}

/// Undoes [`freeze`].
pub(super) async fn thaw(node: &Node, container: &Container) -> Result<()> {
    ctr(node, &["tasks", "resume", &container.id]).await
}

async fn ctr(node: &Node, args: &[&str]) -> Result<()> {
    let argv = ["ctr", "--namespace", "k8s.io"].iter().chain(args).copied().collect::<Vec<_>>();
    node.output(&argv, TOOL_DEADLINE).await.map(drop)
}

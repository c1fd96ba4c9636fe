//! Kills, pauses and resumes containers without the kubelet, by containerd's `ctr` on the node.

use std::time::Duration;

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::{ContainerStatus, Pod};
use kube::runtime::watcher;
use kube::{Api, ResourceExt};

use super::node::Node;
use super::objects;
use super::waiting::{State, until};

/// A running container, as containerd knows it.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Container {
    id: String,
}

impl Container {
    /// Returns the running container of this name in a pod.
    ///
    /// # Errors
    /// The pod has no container of this name, or the container does not run.
    pub fn of(pod: &Pod, container: &str) -> Result<Container> {
        let running = Container::all(pod).find(|(_, status)| status.name == container);
        running
            .and_then(|(running, _)| running)
            .with_context(|| format!("container {container} of pod {} does not run", pod.name_any()))
    }

    /// Returns all containers of a pod with their status; `None` for one that does not run.
    pub fn all(pod: &Pod) -> impl Iterator<Item = (Option<Container>, &ContainerStatus)> {
        let statuses = pod.status.iter().flat_map(|status| status.container_statuses.iter().flatten());
        statuses.map(|status| {
            let runs = status.state.as_ref().is_some_and(|state| state.running.is_some());
            let id = status.container_id.as_deref().filter(|_| runs).and_then(bare);
            (id.map(|id| Container { id: id.to_owned() }), status)
        })
    }

    /// Returns the directory on the node of the container's root file system. Root can write there even if the file system is
    /// read-only in the container.
    #[must_use]
    pub fn root(&self) -> String {
        format!("/run/containerd/io.containerd.runtime.v2.task/k8s.io/{}/rootfs", self.id)
    }

    /// Returns `true` if this is the container's id in Kubernetes.
    #[must_use]
    pub fn is_named(&self, id: Option<&str>) -> bool {
        id.and_then(bare) == Some(self.id.as_str())
    }
}

/// Returns the id without the runtime's name, which Kubernetes puts before it.
fn bare(id: &str) -> Option<&str> {
    id.strip_prefix("containerd://")
}

/// Kills the container with SIGKILL, as the kernel does when memory runs out.
///
/// # Errors
/// The container does not run, or the node cannot be reached.
pub async fn kill(node: &Node, container: &Container) -> Result<()> {
    ctr(node, &["tasks", "kill", "--signal", "SIGKILL", &container.id]).await
}

/// Kills the container of this name in the first of the pods that have the labels, and returns it.
///
/// # Errors
/// No pod has the labels, its container does not run, or the node cannot be reached.
pub async fn kill_in(node: &Node, pods: &Api<Pod>, labels: &str, container: &str) -> Result<Container> {
    let selected = objects::list(pods, labels).await?;
    let pod = selected.first().with_context(|| format!("no pod has the labels {labels}"))?;
    let container = Container::of(pod, container)?;
    kill(node, &container).await?;
    Ok(container)
}

/// Freezes every process of the container.
///
/// # Errors
/// The container does not run, or the node cannot be reached.
pub async fn freeze(node: &Node, container: &Container) -> Result<()> {
    ctr(node, &["tasks", "pause", &container.id]).await
}

/// Resumes the processes of a container after [`freeze`].
///
/// # Errors
/// The container does not run, or the node cannot be reached.
pub async fn thaw(node: &Node, container: &Container) -> Result<()> {
    ctr(node, &["tasks", "resume", &container.id]).await
}

/// Waits until there are pods that `scope` selects, all their containers are ready, and none is one of those that were
/// killed.
///
/// # Errors
/// A container does not become ready in time.
pub async fn until_replaced(
    pods: Api<Pod>,
    scope: watcher::Config,
    killed: &[Container],
    within: Duration,
) -> Result<()> {
    until(pods, scope, within, |pods| {
        let statuses: Vec<_> = pods.values().flat_map(Container::all).collect();
        let missing = statuses.iter().filter(|(container, status)| {
            !status.ready || container.as_ref().is_none_or(|container| killed.contains(container))
        });
        let missing: Vec<&str> = missing.map(|(_, status)| status.name.as_str()).collect();
        State::ready_if(
            !statuses.is_empty() && missing.is_empty(),
            format!("of {} containers, these are not replaced or not ready: {missing:?}", statuses.len()),
        )
    })
    .await
    .map(drop)
}

/// Returns the directory of the container's first process below the node's `/proc`.
///
/// # Errors
/// The container does not run.
pub async fn process(node: &Node, container: &Container) -> Result<String> {
    let tasks = output(node, &["tasks", "list"]).await?;
    let pid =
        pid_of(&tasks, &container.id).with_context(|| format!("no task {} in {tasks}", container.id))?;
    Ok(format!("/proc/{pid}"))
}

/// Returns the process of a container's task. The lines are a header, and for each task its container, its
/// process and its state.
fn pid_of(tasks: &str, id: &str) -> Option<u32> {
    let mut words =
        tasks.lines().map(str::split_whitespace).find(|words| words.clone().next() == Some(id))?;
    words.nth(1)?.parse().ok()
}

async fn ctr(node: &Node, args: &[&str]) -> Result<()> {
    output(node, args).await.map(drop)
}

async fn output(node: &Node, args: &[&str]) -> Result<String> {
    let argv = ["ctr", "--namespace", "k8s.io"].iter().chain(args).copied().collect::<Vec<_>>();
    node.output(&argv).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn process_of_task_is_found() {
        let tasks = "TASK    PID     STATUS\nabc1    4321    RUNNING\nabc     1234    RUNNING\n";
        assert_eq!((pid_of(tasks, "abc"), pid_of(tasks, "ab")), (Some(1234), None));
    }
}

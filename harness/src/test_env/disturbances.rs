//! What stories do to the driver's containers and pods. Another restart of a container fails the story in which it
//! happens, so these functions declare each in [`TestEnv::caused`].

use std::time::Duration;

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::runtime::watcher;
use testvm_cluster::containers::{self, Container};
use testvm_cluster::restarts::Scope;
use testvm_cluster::workload::node_of;
use testvm_cluster::{Node, objects};
use tokio::time::timeout;

use super::environment::TestEnv;

/// The pods of snapshot-controller, as its manifests have them.
const CONTROLLER_NAMESPACE: &str = "kube-system";
const CONTROLLER_LABELS: &str = "app.kubernetes.io/name=snapshot-controller";
/// The container that serves CSI, as the manifests have it.
const CSI: &str = "csi";
/// How long it is frozen at most. The kubelet kills a container that does not respond for a minute.
const FREEZE_LIMIT: Duration = Duration::from_secs(45);
/// The limit of the last wait of a request to a frozen driver, whose error has the state.
pub(crate) const REQUEST_LIMIT: Duration = Duration::from_secs(35);

/// Returns the pods whose containers must not restart otherwise: those of the driver, and of snapshot-controller while it is
/// installed.
pub(crate) fn watched(env: &TestEnv<'_>) -> Vec<Scope> {
    let driver = Scope { pods: env.driver_pods(), labels: env.driver.pod_labels().to_owned() };
    vec![driver, snapshot_controller(env)]
}

fn snapshot_controller(env: &TestEnv<'_>) -> Scope {
    let pods = Api::namespaced(env.client.clone(), CONTROLLER_NAMESPACE);
    Scope { pods, labels: CONTROLLER_LABELS.to_owned() }
}

/// Kills a container of one of the driver's pods, and returns it.
pub(crate) async fn kill(env: &TestEnv<'_>, node: &Node, pod: &Pod, container: &str) -> Result<Container> {
    let killed = Container::of(pod, container)?;
    env.caused.kill(pod, container);
    containers::kill(node, &killed).await?;
    Ok(killed)
}

/// Kills these containers of each of the driver's pods, and returns them.
pub(crate) async fn kill_all(
    env: &TestEnv<'_>,
    node: &Node,
    pods: &[Pod],
    containers: &[&str],
) -> Result<Vec<Container>> {
    let mut killed = Vec::new();
    for pod in pods {
        for container in containers {
            killed.push(kill(env, node, pod, container).await?);
        }
    }
    Ok(killed)
}

/// Returns the processes of this container of the driver's pods, for [`kill_processes`].
pub(crate) async fn processes(env: &TestEnv<'_>, node: &Node, container: &str) -> Result<Vec<(Pod, String)>> {
    let mut found = Vec::new();
    for pod in env.live_driver_pods().await? {
        let process = containers::process(node, &Container::of(&pod, container)?).await?;
        found.push((pod, process.trim_start_matches("/proc/").to_owned()));
    }
    Ok(found)
}

/// Kills them as [`kill_all`] does, without containerd's tool, which takes longer than some stories have.
pub(crate) async fn kill_processes(
    env: &TestEnv<'_>,
    node: &Node,
    found: &[(Pod, String)],
    container: &str,
) -> Result<()> {
    found.iter().for_each(|(pod, _)| env.caused.kill(pod, container));
    let mut argv = vec!["sh", "-c", "kill -KILL \"$@\"", "sh"];
    argv.extend(found.iter().map(|(_, process)| process.as_str()));
    node.output(&argv).await.map(drop)
}

/// Freezes the driver, awaits `requested`, and kills these containers of each of its pods. So they die before the driver has responded.
/// If the driver is none of them, it goes on.
pub(crate) async fn kill_while_frozen(
    env: &TestEnv<'_>,
    node: &Node,
    requested: impl Future<Output = Result<()>>,
    containers: &[&str],
) -> Result<Vec<Container>> {
    let pods = env.live_driver_pods().await?;
    let drivers = pods.iter().map(|pod| Container::of(pod, CSI)).collect::<Result<Vec<_>>>()?;
    let killed = async {
        for driver in &drivers {
            containers::freeze(node, driver).await?;
        }
        let requested = timeout(FREEZE_LIMIT, requested).await;
        requested.context("the frozen driver would be restarted before it has the requests")??;
        kill_all(env, node, &pods, containers).await
    };
    let killed = killed.await;
    // The next story needs the driver also after a failure, whose first error has the cause.
    let dead = killed.as_deref().unwrap_or_default();
    let mut thawed = Ok(());
    for driver in drivers.iter().filter(|driver| !dead.contains(driver)) {
        thawed = thawed.and(containers::thaw(node, driver).await);
    }
    killed.and_then(|killed| thawed.map(|()| killed))
}

/// Waits until the driver's pods are ready, and none of their containers is one of those that ended.
pub(crate) async fn until_replaced(env: &TestEnv<'_>, ended: &[Container]) -> Result<()> {
    let scope = watcher::Config::default().labels(env.driver.pod_labels());
    containers::until_replaced(env.driver_pods(), scope, ended, env.timeouts.start).await
}

/// Cuts the power of a node, which is then to boot again.
pub(crate) async fn cut_power(env: &TestEnv<'_>, node: &Node) -> Result<()> {
    for Scope { pods, labels } in watched(env) {
        let on_node = |pod: &&Pod| node_of(pod) == Some(node.name());
        env.caused.reboot(objects::list(&pods, &labels).await?.iter().filter(on_node));
    }
    node.cut_power().await
}

/// Declares that the caller replaces or deletes the driver's pods that exist now, and returns them.
pub(crate) async fn replace_pods(env: &TestEnv<'_>) -> Result<Vec<Pod>> {
    let pods = env.live_driver_pods().await?;
    env.caused.replace(&pods);
    Ok(pods)
}

/// Like [`replace_pods`], if the driver may not be installed.
pub(crate) async fn replace_pods_if_any(env: &TestEnv<'_>) -> Result<()> {
    env.caused.replace(&env.driver_pods_if_any().await?);
    Ok(())
}

/// Declares that the caller deletes the pods of snapshot-controller that exist now.
pub(crate) async fn delete_snapshot_controller(env: &TestEnv<'_>) -> Result<()> {
    let Scope { pods, labels } = snapshot_controller(env);
    env.caused.replace(&objects::list(&pods, &labels).await?);
    Ok(())
}

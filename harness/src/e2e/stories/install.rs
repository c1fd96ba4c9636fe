//! The manifests are applied, the driver's pods become ready, and the node offers the driver.

use std::time::Duration;

use anyhow::{Context, Result};
use k8s_openapi::api::storage::v1::CSINode;
use kube::api::DeleteParams;
use kube::runtime::watcher;
use kube::{Api, ResourceExt};

use crate::cluster::Node;
use crate::cluster::api_error::told;
use crate::cluster::exec::last_words;
use crate::cluster::waiting::{State, until, until_one};
use crate::e2e::story::{Story, Told};
use crate::test_env::containers::{self, Container};
use crate::test_env::env::{FOREIGN_NODE, World};

pub(in crate::e2e) const NAME: &str = "install";

/// Enough of a driver's log to hold the reason why it does not serve.
const LAST_WORDS: i64 = 5;

const TOOL_DEADLINE: Duration = Duration::from_secs(60);

pub(in crate::e2e) async fn tell(story: &mut Story<'_>, world: &World<'_>) -> Told {
    story.step("apply the manifests", world.manifests.apply(&world.client)).await?;
    story.step("the driver's pods are ready", ready(world)).await?;
    story.step("every node with a driver pod offers the driver", offered(world)).await?;
    match world.node {
        Some(node) => {
            story
                .step(
                    "the provisioner cannot mount, and csi cannot read the kubelet's keys",
                    confined(world, node),
                )
                .await
        }
        None => {
            story.skip("the provisioner cannot mount, and csi cannot read the kubelet's keys", FOREIGN_NODE);
            Ok(())
        }
    }
}

/// Seccomp filters of the provisioner: that of the profile RuntimeDefault, and the two that it installs for itself. What they
/// deny is tested where they are defined.
const FILTERS: u32 = 3;
const KUBELET_DIR: &str = "/var/lib/kubelet";
/// What the csi container has of the kubelet's directory. (plugins_registry is mounted elsewhere.)
const OF_THE_KUBELET: [&str; 2] = ["plugins", "pods"];

async fn confined(world: &World<'_>, node: &Node) -> Result<()> {
    for pod in world.live_driver_pods().await? {
        let provisioner = containers::process(node, &Container::of(&pod, "provisioner")?).await?;
        let status = node.output(&["cat", &format!("{provisioner}/status")], TOOL_DEADLINE).await?;
        let filters = status.lines().find_map(|line| line.strip_prefix("Seccomp_filters:"));
        let filters = filters.and_then(|count| count.trim().parse::<u32>().ok()).unwrap_or(0);
        anyhow::ensure!(
            filters >= FILTERS,
            "the provisioner has {filters} seccomp filters instead of {FILTERS}"
        );
        let csi = containers::process(node, &Container::of(&pod, "csi")?).await?;
        let shown = node.output(&["ls", &format!("{csi}/root{KUBELET_DIR}")], TOOL_DEADLINE).await?;
        anyhow::ensure!(
            shown.split_whitespace().eq(OF_THE_KUBELET),
            "csi has {shown:?} of the kubelet's directory"
        );
    }
    Ok(())
}

/// Waits for the DaemonSet's pods.
pub(in crate::e2e) async fn ready(world: &World<'_>) -> Result<()> {
    let name = world.driver.daemon_set();
    let waited = until_one(world.daemon_sets(), name, world.patience.start, |daemon_set| {
        let Some(daemon_set) = daemon_set else { return State::Waiting(format!("no DaemonSet {name}")) };
        let Some(status) = &daemon_set.status else { return State::Waiting("no status yet".into()) };
        let (wanted, ready) = (status.desired_number_scheduled, status.number_ready);
        let seen = status.observed_generation >= daemon_set.metadata.generation;
        State::when(seen && wanted > 0 && ready == wanted, format!("{ready} of {wanted} pods are ready"))
    })
    .await;
    explained(world, waited).await
}

/// The driver's pods are ready and their nodes offer the driver.
pub(in crate::e2e) async fn served(world: &World<'_>) -> Result<()> {
    ready(world).await?;
    offered(world).await
}

async fn offered(world: &World<'_>) -> Result<()> {
    let pods = world.live_driver_pods().await?;
    let nodes: Vec<String> = pods.iter().filter_map(|pod| pod.spec.as_ref()?.node_name.clone()).collect();
    let scope = watcher::Config::default();
    let waited = until(Api::all(world.client.clone()), scope, world.patience.start, |csi_nodes| {
        let offers = |node: &CSINode| node.spec.drivers.iter().any(|driver| driver.name == world.driver.name);
        let offering: Vec<String> =
            csi_nodes.values().filter(|node| offers(node)).map(ResourceExt::name_any).collect();
        let missing: Vec<&String> = nodes.iter().filter(|node| !offering.contains(node)).collect();
        State::when(
            missing.is_empty(),
            format!("the kubelet of {missing:?} has not registered {}", world.driver.name),
        )
    })
    .await;
    explained(world, waited).await
}

/// A driver that does not serve knows best why: an error ends with what it says.
async fn explained<T>(world: &World<'_>, waited: Result<T>) -> Result<()> {
    match waited {
        Ok(_) => Ok(()),
        Err(error) => {
            let complaints = complaints(world).await;
            Err(error.context(format!("the driver does not serve\n{complaints}\nwaited in vain")))
        }
    }
}

/// The last words of every container of the driver.
pub(in crate::e2e) async fn complaints(world: &World<'_>) -> String {
    let pods = match world.live_driver_pods().await {
        Ok(pods) if pods.is_empty() => return "it has no pods".into(),
        Ok(pods) => pods,
        Err(error) => return format!("its pods cannot be listed: {error:#}"),
    };
    let mut words = Vec::new();
    for pod in &pods {
        let name = pod.name_any();
        for container in world.driver.containers() {
            let log = last_words(&world.driver_pods(), &name, container, LAST_WORDS).await;
            words.push(format!("{container} of {name} says:\n{}", log.trim_end()));
        }
    }
    words.join("\n")
}

/// Whether somebody has installed the driver already.
pub(in crate::e2e) async fn is_installed(world: &World<'_>) -> Result<bool> {
    let found = world.daemon_sets().get_opt(world.driver.daemon_set()).await.map_err(told);
    found.context("look for the driver").map(|found| found.is_some())
}

/// Takes the driver's pods away and waits until they are gone; applying the manifests brings them back.
pub(in crate::e2e) async fn stop(world: &World<'_>) -> Result<()> {
    let name = world.driver.daemon_set();
    match world.daemon_sets().delete(name, &DeleteParams::background()).await {
        Err(kube::Error::Api(status)) if status.code == 404 => {}
        result => drop(result.map_err(told).with_context(|| format!("delete DaemonSet {name}"))?),
    }
    let scope = watcher::Config::default().labels(world.driver.pod_labels());
    until(world.driver_pods(), scope, world.patience.end, |pods| {
        State::when(pods.is_empty(), format!("{:?} still exist", pods.keys().collect::<Vec<_>>()))
    })
    .await
    .context("the driver's pods do not end")
    .map(drop)
}

/// Takes all of the driver out of the cluster.
pub(in crate::e2e) async fn remove(world: &World<'_>) -> Result<()> {
    stop(world).await?;
    world.manifests.delete(&world.client).await
}

/// Waits until the driver's pods of that many nodes are ready, and their kubelets have registered the driver.
pub(super) async fn serves(world: &World<'_>, nodes: i32) -> Result<()> {
    let name = world.driver.daemon_set();
    until_one(world.daemon_sets(), name, world.patience.start, |daemon_set| {
        let status = daemon_set.and_then(|daemon_set| daemon_set.status.as_ref());
        let (wanted, ready) =
            status.map_or((0, 0), |status| (status.desired_number_scheduled, status.number_ready));
        State::when(wanted == nodes && ready == nodes, format!("{ready} of {wanted} pods are ready"))
    })
    .await?;
    served(world).await
}

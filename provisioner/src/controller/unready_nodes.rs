//! Reports volumes whose node is not ready.
//!
//! The programs of a node report the health of its volumes themselves. They cannot if the node does not run or has no network, and then
//! a pod that uses such a volume waits without a word about the reason. This duty changes nothing: the node may come back
//! with all its data.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::{Node, PersistentVolume};
use kube::api::ListParams;
use kube::{Api, ResourceExt};
use prometheus_client::metrics::gauge::Gauge;
use tokio::time::sleep;

use super::registered_nodes::RegisteredNodes;
use crate::api::cluster::Cluster;
use crate::api::events::Reason;
use crate::api::list;
use crate::error::Error;
use crate::objects::ownership;

/// When volumes of a node that is not ready are reported.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Timing {
    /// The interval of the check. One check lists all Nodes, because the API server cannot select those that are not ready.
    pub(crate) interval: Duration,
    /// How long a node may be not ready, for example while it restarts.
    pub(crate) grace: Duration,
}

impl Timing {
    /// Kubernetes evicts the pods of a node after the same time.
    pub(crate) const DEFAULT: Timing =
        Timing { interval: Duration::from_secs(300), grace: Duration::from_secs(300) };
}

/// The number of events after which a check leaves the remaining nodes to the next one. If a whole zone fails, events about all claims at once
/// would keep events about other objects waiting for hours.
const MAX_EVENTS: usize = 1000;

/// Checks until shutdown. Sets the number of volumes whose node is not ready.
pub(crate) async fn run(cluster: &Cluster, nodes: &RegisteredNodes, timing: Timing, unready_volumes: &Gauge) {
    nodes.synced.wait().await;
    let Timing { interval, grace } = timing;
    let mut check = UnreadyNodes { cluster, nodes, grace, since: BTreeMap::new(), reported: BTreeSet::new() };
    loop {
        match check.check(Instant::now()).await {
            Ok(volumes) => {
                unready_volumes.set(volumes as i64);
            }
            Err(error) => {
                tracing::warn!(%error, "could not check for nodes that are not ready; the next check is in {interval:?}");
            }
        }
        sleep(interval).await;
    }
}

struct UnreadyNodes<'a> {
    cluster: &'a Cluster,
    nodes: &'a RegisteredNodes,
    grace: Duration,
    /// When this process first saw that each node is not ready.
    since: BTreeMap<String, Instant>,
    /// The nodes whose volumes have an event about this outage.
    reported: BTreeSet<String>,
}

impl UnreadyNodes<'_> {
    /// Checks once, and returns the number of volumes whose node is not ready.
    async fn check(&mut self, now: Instant) -> Result<usize, Error> {
        let registered = self.nodes.names(now);
        let unready = |node: &Node| !is_ready(node) && registered.contains(&node.name_any());
        let nodes = Api::all(self.cluster.client.clone());
        let unready = list::selected(&nodes, ListParams::default(), unready).await;
        let unready = unready.map_err(|error| Error::api("list", "the Nodes", error))?;
        let unready: BTreeSet<_> = unready.iter().map(|node| node.name_any()).collect();
        self.since.retain(|node, _| unready.contains(node));
        self.reported.retain(|node| unready.contains(node));
        let (mut count, mut events) = (0, 0);
        for node in unready {
            let since = *self.since.entry(node.clone()).or_insert(now);
            if now < since + self.grace {
                continue;
            }
            let identity = &self.cluster.identity;
            let is_there = |volume: &PersistentVolume| ownership::is_only_on(volume, &node, identity);
            let volumes = self.cluster.list_volumes(&identity.node_selector(&node), is_there).await?;
            count += volumes.len();
            if events < MAX_EVENTS && self.reported.insert(node.clone()) {
                let note = format!(
                    "node {node:?}, which has the volume's data, is not ready; pods that use the claim cannot run on another node; repair \
                     the node, or delete the claim to give the data up"
                );
                // The owner of the data sees events on the claim.
                for claim in volumes.iter().filter_map(ownership::bound_claim) {
                    self.cluster.events.publish_about(claim, Reason::NodeNotReady, note.clone());
                    events += 1;
                }
            }
        }
        Ok(count)
    }
}

/// Returns `true` if the kubelet reports that the node is ready, and Kubernetes has heard from the kubelet recently.
fn is_ready(node: &Node) -> bool {
    let conditions = node.status.as_ref().and_then(|status| status.conditions.as_deref()).unwrap_or_default();
    conditions.iter().any(|condition| condition.type_ == "Ready" && condition.status == "True")
}

#[cfg(test)]
mod tests {
    use http::Method;
    use rstest::rstest;
    use serde_json::{Value, json};

    use super::*;
    use crate::testing::fixtures;
    use crate::testing::mock_api_server::{ExpectedRequest, TestContext, expect};

    fn node(name: &str, ready: &str) -> Value {
        let conditions =
            json!([{"type": "DiskPressure", "status": "True"}, {"type": "Ready", "status": ready}]);
        json!({"metadata": {"name": name}, "status": {"conditions": conditions}})
    }

    fn nodes(items: &[Value]) -> ExpectedRequest {
        let list = json!({"kind": "NodeList", "apiVersion": "v1", "metadata": {}, "items": items});
        expect(Method::GET, "/api/v1/nodes", None).respond(list)
    }

    fn volumes(items: &[PersistentVolume]) -> ExpectedRequest {
        let list =
            json!({"kind": "PersistentVolumeList", "apiVersion": "v1", "metadata": {}, "items": items});
        expect(Method::GET, "/api/v1/persistentvolumes", None).respond(list)
    }

    /// Checks at each of these times after the start. The driver is registered on node-a and node-b. Returns the results and the reasons of the
    /// events.
    async fn checked_at(
        seconds: &[u64],
        requests: Vec<ExpectedRequest>,
    ) -> (Vec<Result<usize, Error>>, Vec<&'static str>) {
        let test_context = TestContext::new(requests);
        let ctx = &*test_context.ctx;
        let registered = RegisteredNodes::of(&["node-a", "node-b"]);
        let (since, reported) = Default::default();
        let grace = Timing::DEFAULT.grace;
        let mut check = UnreadyNodes { cluster: &ctx.cluster, nodes: &registered, grace, since, reported };
        let start = Instant::now();
        let mut results = Vec::new();
        for time in seconds {
            results.push(check.check(start + Duration::from_secs(*time)).await);
        }
        (results, test_context.finish().await)
    }

    /// Checks, all without an error.
    async fn counted_at(seconds: &[u64], requests: Vec<ExpectedRequest>) -> (Vec<usize>, Vec<&'static str>) {
        let (results, reasons) = checked_at(seconds, requests).await;
        (results.into_iter().map(Result::unwrap).collect(), reasons)
    }

    #[tokio::test]
    async fn returned_node_has_its_grace_time() {
        let (silent, failing) =
            (|| nodes(&[node("node-b", "Unknown")]), || nodes(&[node("node-b", "False")]));
        let ready = nodes(&[node("node-b", "True")]);
        let on_it = || volumes(&[fixtures::volume_on("node-b", json!({}))]);
        let requests =
            vec![silent(), silent(), on_it(), failing(), on_it(), ready, failing(), failing(), on_it()];
        let counted = counted_at(&[0, 300, 600, 900, 1200, 1500], requests).await;
        assert_eq!(counted, (vec![0, 1, 1, 0, 0, 1], vec!["NodeNotReady", "NodeNotReady"]));
    }

    #[tokio::test]
    async fn claims_are_reported_node_by_node() {
        let unready = || nodes(&[node("node-a", "Unknown"), node("node-b", "Unknown")]);
        let many = vec![fixtures::volume_on("node-a", json!({})); MAX_EVENTS];
        let (on_a, on_b) = (|| volumes(&many), || volumes(&[fixtures::volume_on("node-b", json!({}))]));
        let requests = vec![unready(), unready(), on_a(), on_b(), unready(), on_a(), on_b()];
        let (counts, reasons) = counted_at(&[0, 300, 600], requests).await;
        assert_eq!((counts, reasons.len()), (vec![0, MAX_EVENTS + 1, MAX_EVENTS + 1], MAX_EVENTS + 1));
    }

    #[tokio::test]
    async fn node_without_the_driver_is_skipped() {
        let other = || nodes(&[node("node-c", "Unknown")]);
        assert_eq!(counted_at(&[0, 300], vec![other(), other()]).await, (vec![0, 0], vec![]));
    }

    #[rstest]
    #[case::not_bound(json!({"spec": {"claimRef": null}}), 1)]
    #[case::reserved(json!({"status": {"phase": "Available"}}), 1)]
    #[case::released(json!({"status": {"phase": "Released"}}), 1)]
    #[case::of_another_driver(json!({"spec": {"csi": {"driver": "csi.other.dev"}}}), 0)]
    #[case::reachable_from_other_nodes(json!({"spec": {"nodeAffinity": null}}), 0)]
    #[tokio::test]
    async fn no_claim_is_told_about_volume(#[case] change: Value, #[case] count: usize) {
        let unready = || nodes(&[node("node-b", "Unknown")]);
        let requests = vec![unready(), unready(), volumes(&[fixtures::volume_on("node-b", change)])];
        assert_eq!(counted_at(&[0, 300], requests).await, (vec![0, count], vec![]));
    }

    #[tokio::test]
    async fn volumes_are_reported_after_an_error() {
        let unready = || nodes(&[node("node-b", "Unknown")]);
        let refused = expect(Method::GET, "/api/v1/persistentvolumes", None).refuse(500, "InternalError");
        let on_it = [fixtures::volume_on("node-b", json!({}))];
        let requests = vec![unready(), unready(), refused, unready(), volumes(&on_it)];
        let (results, reasons) = checked_at(&[0, 300, 600], requests).await;
        assert!(matches!(results[..], [Ok(0), Err(_), Ok(1)]), "{results:?}");
        assert_eq!(reasons, ["NodeNotReady"]);
    }
}

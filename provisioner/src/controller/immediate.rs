//! Selects the node of claims whose class has the volumeBindingMode Immediate.
//!
//! For a class with WaitForFirstConsumer the scheduler selects the node. For a class with Immediate no component does, and the pod
//! is unknown: any choice among several nodes would be a guess that binds the pod. So exactly one node must be allowed, by the
//! class's `allowedTopologies` or because the driver runs on no other node. That node is written into the claim as the
//! scheduler would do it, and provisions.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};
use std::sync::Arc;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::{
    Node, PersistentVolumeClaim, TopologySelectorLabelRequirement, TopologySelectorTerm,
};
use k8s_openapi::api::storage::v1::StorageClass;
use kube::api::ListParams;
use kube::runtime::reflector::{self, ObjectRef, Store};
use kube::runtime::watcher;
use kube::{Api, ResourceExt};
use tokio::sync::{Notify, SetOnce, watch};
use tokio::time::timeout;

use super::pending_claims::{self, PendingClaims};
use super::registered_nodes::RegisteredNodes;
use crate::api::backoff::Backoff;
use crate::api::cluster::Cluster;
use crate::api::events::Reason;
use crate::api::queue;
use crate::error::Error;
use crate::objects::data_source::is_populated;
use crate::objects::identity::is_label_value;
use crate::objects::ownership;
use crate::objects::refusal::Refusal;
use crate::objects::topology::is_immediate;

/// Wait after a change, because many claims are often created together.
const DEBOUNCE: Duration = Duration::from_millis(100);

/// Selects nodes until shutdown. Sets `performs` once it has read the claims, classes and nodes.
pub(crate) async fn run(
    cluster: &Cluster,
    nodes: &RegisteredNodes,
    claims: &PendingClaims,
    performs: &watch::Sender<bool>,
) {
    let (classes, class_cache) = reflector::store();
    let (classes_synced, class_changed) = (SetOnce::new(), Notify::new());
    let driver = cluster.identity.driver().to_owned();
    let is_ours = move |class: &StorageClass| class.provisioner == driver;
    let all_classes = Api::all(cluster.client.clone());
    let class_changes = queue::watch(all_classes, watcher::Config::default(), class_cache, is_ours);
    let watching_classes = queue::follow(class_changes, &classes_synced, || class_changed.notify_one());
    let selecting = async {
        tokio::join!(claims.synced.wait(), classes_synced.wait(), nodes.synced.wait());
        performs.send_replace(true);
        let selector = Selector { cluster, nodes, claims, classes, backoff: Backoff::default() };
        let (mut node_changes, mut claim_changes) = (nodes.changes(), claims.changes());
        loop {
            let next = selector.reconcile(Instant::now()).await;
            let change = async {
                tokio::select! {
                    () = class_changed.notified() => {}
                    _ = claim_changes.changed() => {}
                    _ = node_changes.changed() => {}
                }
            };
            match next {
                Some(wait) => drop(timeout(wait, change).await),
                None => change.await,
            }
            tokio::time::sleep(DEBOUNCE).await;
        }
    };
    tokio::join!(watching_classes, selecting);
}

/// The values on which the outcome of an attempt depends: the UID of the claim, the version of the class, and a hash of the nodes.
type RetryKey = (Option<String>, Option<String>, u64);

struct Selector<'a> {
    cluster: &'a Cluster,
    nodes: &'a RegisteredNodes,
    claims: &'a PendingClaims,
    /// The classes of this driver.
    classes: Store<StorageClass>,
    backoff: Backoff<ObjectRef<PersistentVolumeClaim>, RetryKey>,
}

impl Selector<'_> {
    /// Selects the nodes of all claims that are not in back-off. Returns the time after which a claim has to be tried again.
    async fn reconcile(&self, now: Instant) -> Option<Duration> {
        let mut next: Option<Duration> = None;
        let registered = self.nodes.names(now);
        // Many claims of one class are often created together.
        let mut allowed_by_class = BTreeMap::new();
        let nodes_hash = BuildHasherDefault::<DefaultHasher>::default().hash_one(&registered);
        for claim in self.claims.cache.state() {
            // The populator's own claim needs a node, and its volume becomes that of this one.
            if ownership::selected_node(&claim).is_some() || is_populated(&claim) {
                continue;
            }
            let Some(class) = self.immediate_class_of(&claim) else { continue };
            let key = ObjectRef::from_obj(&*claim);
            let retry_key = (claim.uid(), class.resource_version(), nodes_hash);
            let wait = match self.backoff.remaining(&key, &retry_key, now) {
                Some(remaining) => remaining,
                None => match self.select(&claim, &class, &registered, &mut allowed_by_class).await {
                    Ok(()) => {
                        self.backoff.clear(&key);
                        continue;
                    }
                    Err(error) => {
                        if !error.is_conflict() {
                            self.cluster.events.publish(
                                &*claim,
                                Reason::ProvisioningFailed,
                                error.to_string(),
                            );
                        }
                        self.backoff.failed(key, retry_key, now)
                    }
                },
            };
            next = Some(next.map_or(wait, |next| next.min(wait)));
        }
        next
    }

    fn immediate_class_of(&self, claim: &PersistentVolumeClaim) -> Option<Arc<StorageClass>> {
        let class = self.classes.get(&ObjectRef::new(ownership::class_name(claim)?))?;
        is_immediate(&class).then_some(class)
    }

    async fn select(
        &self,
        claim: &PersistentVolumeClaim,
        class: &StorageClass,
        registered: &BTreeSet<String>,
        allowed_by_class: &mut BTreeMap<String, BTreeSet<String>>,
    ) -> Result<(), Error> {
        let allowed = match allowed_by_class.entry(class.name_any()) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(unknown) => unknown.insert(self.allowed(class, registered).await?),
        };
        let [node] = allowed.iter().collect::<Vec<_>>()[..] else {
            return Err(Refusal::Immediate { class: class.name_any(), nodes: allowed.len() }.into());
        };
        pending_claims::select_node(self.cluster, claim, Some(node)).await
    }

    /// Returns the nodes of the driver that a class allows, as the scheduler evaluates `allowedTopologies`.
    async fn allowed(
        &self,
        class: &StorageClass,
        registered: &BTreeSet<String>,
    ) -> Result<BTreeSet<String>, Error> {
        let terms = class.allowed_topologies.as_deref().unwrap_or_default();
        if terms.is_empty() {
            return Ok(registered.clone());
        }
        let mut allowed = BTreeSet::new();
        for term in terms {
            allowed.extend(self.matching(term, registered).await?);
        }
        Ok(allowed)
    }

    /// Returns the nodes of the driver that a term matches. Reads only Nodes that have the labels of the term, and none if the term
    /// only names nodes.
    async fn matching(
        &self,
        term: &TopologySelectorTerm,
        registered: &BTreeSet<String>,
    ) -> Result<BTreeSet<String>, Error> {
        let expressions = term.match_label_expressions.as_deref().unwrap_or_default();
        if expressions.is_empty() {
            return Ok(BTreeSet::new());
        }
        // The kubelet sets this label when the driver registers, which may be in progress.
        let own = self.cluster.identity.topology_key();
        let (named, labelled): (Vec<_>, Vec<_>) =
            expressions.iter().partition(|expression| expression.key == own);
        let is_named = |node: &&String| named.iter().all(|expression| expression.values.contains(node));
        let mut matching: BTreeSet<_> = registered.iter().filter(is_named).cloned().collect();
        let Some(selector) = selector(&labelled) else { return Ok(BTreeSet::new()) };
        if !labelled.is_empty() && !matching.is_empty() {
            let nodes: Api<Node> = Api::all(self.cluster.client.clone());
            let nodes = nodes.list_metadata(&parameters(&selector, &matching)).await;
            let nodes = nodes.map_err(|error| Error::api("list", "the Nodes", error))?;
            let nodes: BTreeSet<_> = nodes.items.iter().map(ResourceExt::name_any).collect();
            matching.retain(|node| nodes.contains(node));
        }
        Ok(matching)
    }
}

/// Returns the parameters of a list of the Nodes with these labels, of which only the `candidates` matter.
fn parameters(labels: &str, candidates: &BTreeSet<String>) -> ListParams {
    // From the API server's cache: as current as a watch, and no load on etcd.
    let parameters = ListParams::default().labels(labels).match_any();
    // All Nodes of a large cluster may have the labels. A field selector cannot name several nodes.
    match candidates.iter().collect::<Vec<_>>()[..] {
        [node] => parameters.fields(&format!("metadata.name={node}")),
        _ => parameters,
    }
}

/// Returns the label selector that all of these expressions together are, or `None` if no node can match it. The API server checks neither
/// the keys nor the values of a class, and would read a value such as `a,b` as two.
fn selector(expressions: &[&TopologySelectorLabelRequirement]) -> Option<String> {
    let each = |expression: &&TopologySelectorLabelRequirement| {
        let key = &expression.key;
        let values: Vec<_> =
            expression.values.iter().map(String::as_str).filter(|value| is_label_value(value)).collect();
        let can_match = !values.is_empty() && key.rsplit('/').next().is_some_and(is_label_value);
        can_match.then(|| format!("{key} in ({})", values.join(",")))
    };
    Some(expressions.iter().map(each).collect::<Option<Vec<_>>>()?.join(","))
}

#[cfg(test)]
mod tests {
    use http::Method;
    use rstest::rstest;
    use serde_json::{Value, json};

    use super::*;
    use crate::testing::fixtures;
    use crate::testing::mock_api_server::{ExpectedRequest, TestContext, cache, expect};

    const CLAIM: &str = "/api/v1/namespaces/shop/persistentvolumeclaims/data";
    const NODES: &str = "/api/v1/nodes";

    fn unplaced() -> PersistentVolumeClaim {
        fixtures::claim(json!({"metadata": {"annotations": {ownership::SELECTED_NODE: null}}}))
    }

    /// Reconciles a claim of a class at each of these times after the start. Returns the waits and the reasons of the events.
    async fn reconciled(
        claim: PersistentVolumeClaim,
        times: &[Duration],
        class: Value,
        nodes: &[&str],
        requests: Vec<ExpectedRequest>,
    ) -> (Vec<Option<Duration>>, Vec<&'static str>) {
        let test_context = TestContext::new(requests);
        let ctx = &*test_context.ctx;
        let selector = Selector {
            cluster: &ctx.cluster,
            nodes: &RegisteredNodes::of(nodes),
            claims: &PendingClaims::of(vec![claim]),
            classes: cache(vec![fixtures::class(class)]).0,
            backoff: Backoff::default(),
        };
        let start = Instant::now();
        let mut waits = Vec::new();
        for time in times {
            waits.push(selector.reconcile(start + *time).await);
        }
        (waits, test_context.finish().await)
    }

    fn selects(node: &str) -> ExpectedRequest {
        let claim = unplaced();
        let patch = json!({"metadata": {
            "uid": claim.metadata.uid, "resourceVersion": claim.metadata.resource_version,
            "annotations": {ownership::SELECTED_NODE: node},
        }});
        expect(Method::PATCH, CLAIM, patch)
    }

    fn term(key: &str, values: &[&str]) -> Value {
        json!({"matchLabelExpressions": [{"key": key, "values": values}]})
    }

    fn immediate(terms: Value) -> Value {
        json!({"volumeBindingMode": "Immediate", "allowedTopologies": terms})
    }

    fn labelled(names: &[&str]) -> Vec<ExpectedRequest> {
        let list = fixtures::metadata_list(names.iter().map(|name| json!({"name": name})));
        vec![expect(Method::GET, NODES, None).respond(list)]
    }

    const NODE_KEY: &str = "topology.csi.loopfs.dev/node";

    #[rstest]
    #[case::the_only_node(json!({"volumeBindingMode": "Immediate"}), &["node-b"], vec![], Some("node-b"))]
    #[case::no_mode_is_immediate(json!({"volumeBindingMode": null}), &["node-b"], vec![], Some("node-b"))]
    #[case::the_scheduler_selects(json!({}), &["node-b"], vec![], None)]
    #[case::the_class_names_it(immediate(json!([term(NODE_KEY, &["node-b"])])), &["node-a", "node-b"], vec![], Some("node-b"))]
    #[case::the_class_names_a_node_without_the_driver(
        immediate(json!([term(NODE_KEY, &["node-b", "node-x"])])), &["node-a", "node-b"], vec![], Some("node-b")
    )]
    #[case::labels(immediate(json!([term("zone", &["west"])])), &["node-a", "node-b"], labelled(&["node-b", "node-x"]), Some("node-b"))]
    #[case::labels_and_name(
        immediate(json!([{"matchLabelExpressions": [{"key": "zone", "values": ["west"]}, {"key": NODE_KEY, "values": ["node-a"]}]}])),
        &["node-a", "node-b"], labelled(&["node-a", "node-b"]), Some("node-a")
    )]
    #[tokio::test]
    async fn the_only_allowed_node_is_selected(
        #[case] class: Value,
        #[case] nodes: &[&str],
        #[case] mut requests: Vec<ExpectedRequest>,
        #[case] expected: Option<&str>,
    ) {
        requests.extend(expected.map(selects));
        let ended = reconciled(unplaced(), &[Duration::ZERO], class, nodes, requests).await;
        assert_eq!(ended, (vec![None], vec![]));
    }

    #[rstest]
    #[case::several(immediate(Value::Null), &["node-a", "node-b"], vec![])]
    #[case::several_terms(immediate(json!([term(NODE_KEY, &["node-a"]), term(NODE_KEY, &["node-b"])])), &["node-a", "node-b"], vec![])]
    #[case::none(immediate(Value::Null), &[], vec![])]
    #[case::none_of_the_named(immediate(json!([term(NODE_KEY, &["node-x"])])), &["node-a"], vec![])]
    #[case::an_empty_term(immediate(json!([{}])), &["node-a"], vec![])]
    #[case::a_value_that_no_label_has(immediate(json!([term("zone", &["west,east", "-x"])])), &["node-a"], vec![])]
    #[case::a_key_that_no_label_has(immediate(json!([term("zone notin (west),a", &["b"])])), &["node-a"], vec![])]
    #[case::none_with_the_labels(immediate(json!([term("zone", &["west"])])), &["node-a"], labelled(&[]))]
    #[tokio::test]
    async fn claim_without_one_node_is_refused(
        #[case] class: Value,
        #[case] nodes: &[&str],
        #[case] requests: Vec<ExpectedRequest>,
    ) {
        let half = Duration::from_millis(500);
        let (waits, reasons) = reconciled(unplaced(), &[Duration::ZERO, half], class, nodes, requests).await;
        assert_eq!(waits, [Some(Duration::from_secs(1)), Some(half)]);
        assert_eq!(reasons, ["ProvisioningFailed"]);
    }

    #[rstest]
    #[case::one_candidate(&["node-a"], Some("metadata.name=node-a"))]
    #[case::several_candidates(&["node-a", "node-b"], None)]
    fn one_candidate_lists_no_other_node(#[case] candidates: &[&str], #[case] expected: Option<&str>) {
        let candidates = candidates.iter().map(|&node| node.to_owned()).collect();
        let parameters = parameters("zone in (west)", &candidates);
        assert_eq!(parameters.field_selector.as_deref(), expected);
        assert_eq!(parameters.label_selector.as_deref(), Some("zone in (west)"));
    }

    #[rstest]
    #[case::has_a_node(json!({}))]
    #[case::is_left_to_a_populator(json!({
        "metadata": {"annotations": {ownership::SELECTED_NODE: null}},
        "spec": {"dataSourceRef": {"apiGroup": "x.dev", "kind": "Backup", "name": "b"}},
    }))]
    #[tokio::test]
    async fn no_node_is_selected_for(#[case] claim: Value) {
        let (claim, class) = (fixtures::claim(claim), immediate(Value::Null));
        let ended = reconciled(claim, &[Duration::ZERO], class, &["node-a"], vec![]).await;
        assert_eq!(ended, (vec![None], vec![]));
    }

    /// Another replica or the scheduler was faster.
    #[tokio::test]
    async fn changed_claim_is_no_failure() {
        let requests = vec![selects("node-a").refuse(409, "Conflict")];
        let class = immediate(Value::Null);
        let (waits, reasons) = reconciled(unplaced(), &[Duration::ZERO], class, &["node-a"], requests).await;
        assert_eq!((waits, reasons), (vec![Some(Duration::from_secs(1))], vec![]));
    }
}

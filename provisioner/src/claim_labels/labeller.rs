//! Labels claims that have no label yet with their node, and records in a ConfigMap that all claims are labelled.
//!
//! The API server labels claims by a MutatingAdmissionPolicy when a node is selected. The controller labels those that are older than
//! the policy, and those that a person bound to a volume of the driver. Once a complete list shows that no claim with a selected node is
//! left, it records the UID of the policy's binding. From then on, the nodes rely on the labels, also while no controller runs. The
//! binding owns the ConfigMap, so the garbage collector deletes the record with it.
//!
//! Users can change their claims as often as they like. A change therefore leads to requests only if the label of the claim is to be set.

use std::collections::{HashMap, HashSet};
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::{StreamExt, stream};
use k8s_openapi::api::admissionregistration::v1::{MutatingAdmissionPolicy, MutatingAdmissionPolicyBinding};
use k8s_openapi::api::core::v1::{ConfigMap, PersistentVolumeClaim};
use kube::api::{ListParams, Patch, PatchParams};
use kube::runtime::reflector::{self, Store};
use kube::runtime::watcher;
use kube::{Api, ResourceExt};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::sync::{Notify, SetOnce};
use tokio::time::timeout_at;

use super::labels::{self, BINDING_UID, LabelRecordSource, RequiredLabel};
use crate::api::cluster::Cluster;
use crate::api::{absence, list, queue};
use crate::error::Error;
use crate::objects::identity::is_label_value;
use crate::objects::ownership;

/// Time after which every API server applies a policy that one of them has stored. Each watches the policies.
const PROPAGATION_TIME: Duration = Duration::from_secs(60);
/// Interval at which the controller checks that the policy still exists.
const POLL_INTERVAL: Duration = Duration::from_secs(60);
/// Wait before the first retry. Each further wait is twice as long, up to [`POLL_INTERVAL`].
const FIRST_RETRY: Duration = Duration::from_secs(1);
/// Time after which the record is removed if the policy cannot be read. The nodes then watch all claims, so they miss none if the
/// API server labels none.
const UNREADABLE_TIME: Duration = Duration::from_secs(300);
/// Wait after a change, because many claims are often created together.
const DEBOUNCE: Duration = Duration::from_millis(100);
/// Claims labelled concurrently.
const CONCURRENCY: usize = 16;

/// Labels claims until shutdown.
pub(crate) async fn run(cluster: &Cluster, source: &LabelRecordSource) {
    run_after(PROPAGATION_TIME, cluster, source).await;
}

/// As [`run`], with the time that the API servers take to apply a policy.
pub(crate) async fn run_after(propagation_time: Duration, cluster: &Cluster, source: &LabelRecordSource) {
    let (claims, cache) = reflector::store();
    let (synced, changed) = (SetOnce::new(), Notify::new());
    let identity = cluster.identity.clone();
    let requires_label =
        move |claim: &PersistentVolumeClaim| labels::required_label(claim, &identity).is_some();
    let all = Api::all(cluster.client.clone());
    let changes = queue::watch(all, watcher::Config::default(), cache, requires_label);
    let watching = queue::follow(changes, &synced, || changed.notify_one());
    let labelling = async {
        synced.wait().await;
        let mut labeller = Labeller::new(propagation_time, cluster, source, claims);
        let mut retry = FIRST_RETRY;
        loop {
            if let Err(error) = labeller.work(Instant::now(), retry).await {
                tracing::warn!(%error, "could not label all claims with their nodes; the next attempt is in {retry:?}");
                retry = (retry * 2).min(POLL_INTERVAL);
            } else {
                retry = FIRST_RETRY;
            }
            drop(timeout_at(labeller.next_reconcile.into(), changed.notified()).await);
            tokio::time::sleep(DEBOUNCE).await;
        }
    };
    tokio::join!(watching, labelling);
}

struct Labeller<'a> {
    propagation_time: Duration,
    cluster: &'a Cluster,
    source: &'a LabelRecordSource,
    /// The claims whose label may have to be set.
    claims: Store<PersistentVolumeClaim>,
    /// The bound claims whose PersistentVolume requires no other label, by UID.
    examined: Mutex<HashMap<String, Examined>>,
    /// The PersistentVolumes of this driver that have no label of a node, until the next reconcile.
    unlabelled: Mutex<HashSet<String>>,
    /// The UID of the policy's binding, and when this process has first read it.
    binding: Option<(String, Instant)>,
    /// When the policy could not be read for the first time since it was last read.
    unreadable_since: Option<Instant>,
    /// The policy exists, or may exist.
    is_wanted: bool,
    /// When the policy and the record are read again.
    next_reconcile: Instant,
}

/// The fields of a claim that its required label depends on, and the label. A user can change only the label.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Examined {
    volume: String,
    /// It changes when a PersistentVolume appears that was named in the claim before.
    phase: Option<String>,
    label: Option<String>,
    /// The label that the claim got since, which the watch may not have delivered yet.
    given: Option<String>,
}

impl Examined {
    fn of(claim: &PersistentVolumeClaim, volume: &str, label: Option<&str>) -> Self {
        let phase = claim.status.as_ref().and_then(|status| status.phase.clone());
        let label = label.map(str::to_owned);
        Examined { volume: volume.to_owned(), phase, given: label.clone(), label }
    }
}

impl<'a> Labeller<'a> {
    fn new(
        propagation_time: Duration,
        cluster: &'a Cluster,
        source: &'a LabelRecordSource,
        claims: Store<PersistentVolumeClaim>,
    ) -> Self {
        Self {
            propagation_time,
            cluster,
            source,
            claims,
            examined: Mutex::default(),
            unlabelled: Mutex::default(),
            binding: None,
            unreadable_since: None,
            is_wanted: true,
            next_reconcile: Instant::now(),
        }
    }

    /// Reconciles if that is due, and otherwise labels the claims that have changed. A failure is retried after `retry`.
    async fn work(&mut self, now: Instant, retry: Duration) -> Result<(), Error> {
        if now < self.next_reconcile {
            let labelled = self.label_all().await;
            if labelled.is_err() {
                self.next_reconcile = self.next_reconcile.min(now + retry);
            }
            return labelled;
        }
        let reconciled = self.reconcile(now).await;
        self.next_reconcile = now + reconciled.as_ref().map_or(retry, |wait| *wait);
        reconciled.map(drop)
    }

    /// Labels all claims, and updates the record. Returns the time after which to reconcile again.
    ///
    /// # Errors
    /// When a request fails. The record is then unchanged, unless the policy could not be read for [`UNREADABLE_TIME`].
    async fn reconcile(&mut self, now: Instant) -> Result<Duration, Error> {
        self.unlabelled.lock().clear();
        let binding = match self.binding_uid().await {
            Ok(binding) => binding,
            Err(error) => {
                // Perhaps the policy was deleted, and the nodes rely on labels that the API server does not set any more.
                self.is_wanted = true;
                self.label_all().await?;
                let since = *self.unreadable_since.get_or_insert(now);
                if now - since >= UNREADABLE_TIME {
                    self.record(None).await?;
                }
                return Err(error);
            }
        };
        self.unreadable_since = None;
        self.is_wanted = binding.is_some();
        let Some(binding) = binding else {
            self.binding = None;
            self.record(None).await?;
            return Ok(POLL_INTERVAL);
        };
        self.label_all().await?;
        match self.recorded().await? {
            Some(recorded) if recorded == binding => return Ok(POLL_INTERVAL),
            // The binding was created again. In between, claims got no labels.
            Some(_) => self.record(None).await?,
            None => {}
        }
        let since = match &self.binding {
            Some((known, since)) if *known == binding => *since,
            _ => self.binding.insert((binding.clone(), now)).1,
        };
        let in_force = since + self.propagation_time;
        if now < in_force {
            return Ok(in_force - now);
        }
        // The watch may lag behind. Every claim that this list does not show yet is labelled by the API server. Claims without a selected
        // node do not count: users can bind such claims, and remove the labels, at any time before and after.
        let all = Api::all(self.cluster.client.clone());
        let lacks_node = |claim: &PersistentVolumeClaim| {
            let required = labels::required_label(claim, &self.cluster.identity);
            matches!(required, Some(RequiredLabel::Node(_)))
        };
        let left = list::selected(&all, ListParams::default(), lacks_node).await;
        let left = left.map_err(|error| Error::api("list", "the claims", error))?;
        if !left.is_empty() {
            return Ok(FIRST_RETRY);
        }
        self.record(Some(&binding)).await?;
        tracing::info!("all claims are labelled with their nodes, so that nodes watch only their own claims");
        Ok(POLL_INTERVAL)
    }

    /// Returns the UID of the policy's binding, or `None` if the policy or the binding does not exist.
    async fn binding_uid(&self) -> Result<Option<String>, Error> {
        let name = &self.source.name;
        let policies: Api<MutatingAdmissionPolicy> = Api::all(self.cluster.client.clone());
        let policy = absence::get_metadata_opt(&policies, name).await;
        let policy = policy.map_err(|error| Error::api("read MutatingAdmissionPolicy", name, error))?;
        let bindings: Api<MutatingAdmissionPolicyBinding> = Api::all(self.cluster.client.clone());
        let binding = absence::get_metadata_opt(&bindings, name).await;
        let binding =
            binding.map_err(|error| Error::api("read MutatingAdmissionPolicyBinding", name, error))?;
        Ok(policy.and(binding).and_then(|binding| binding.metadata.uid))
    }

    /// Labels all claims, unless the policy does not exist.
    async fn label_all(&self) -> Result<(), Error> {
        if !self.is_wanted {
            return Ok(());
        }
        let claims = self.claims.state();
        let uids: HashSet<_> = claims.iter().filter_map(|claim| claim.metadata.uid.as_ref()).collect();
        self.examined.lock().retain(|uid, _| uids.contains(uid));
        let results = stream::iter(claims).map(|claim| self.label(claim)).buffer_unordered(CONCURRENCY);
        let mut results = pin!(results);
        let mut failed = Ok(());
        while let Some(result) = results.next().await {
            failed = failed.and(result);
        }
        failed
    }

    /// Labels a claim, if it has not the required label. A claim that changed in the meantime is no failure: the watch delivers it again.
    async fn label(&self, claim: Arc<PersistentVolumeClaim>) -> Result<(), Error> {
        let identity = &self.cluster.identity;
        match labels::required_label(&claim, identity) {
            None => Ok(()),
            Some(RequiredLabel::Node(node)) => {
                self.patch(&claim, labels::label_patch(&claim, &node, identity)).await
            }
            Some(RequiredLabel::NodeOfVolume(volume)) => self.label_bound(&claim, &volume).await,
        }
    }

    /// Labels a claim with the node of its PersistentVolume.
    async fn label_bound(&self, claim: &PersistentVolumeClaim, volume: &str) -> Result<(), Error> {
        let identity = &self.cluster.identity;
        let Some(uid) = claim.uid() else { return Ok(()) };
        let label = labels::label_of(claim, identity);
        let mut seen = Examined::of(claim, volume, label);
        if let Some(known) = self.examined.lock().get_mut(&uid) {
            // If the label stays hidden behind many others, the claim is not patched again before it changes.
            let is_unchanged = *known == Examined { given: known.given.clone(), ..seen.clone() };
            let has_label = *known == Examined { label: known.label.clone(), ..seen.clone() };
            if has_label {
                known.label.clone_from(&known.given);
            }
            if is_unchanged || has_label {
                return Ok(());
            }
        }
        if self.unlabelled.lock().contains(volume) {
            return Ok(());
        }
        match self.node_of(volume).await? {
            NodeOfVolume::Other => {}
            // An administrator may label it without any change of the claim.
            NodeOfVolume::Unlabelled => {
                self.unlabelled.lock().insert(volume.to_owned());
                return Ok(());
            }
            NodeOfVolume::Node(node) => {
                if label != Some(node.as_str()) {
                    self.patch(claim, labels::bound_label_patch(claim, &node, identity)).await?;
                }
                seen.given = Some(node);
            }
        }
        self.examined.lock().insert(uid, seen);
        Ok(())
    }

    async fn patch(&self, claim: &PersistentVolumeClaim, patch: Value) -> Result<(), Error> {
        let name = claim.name_any();
        let api = self.cluster.claim_api(&claim.namespace().unwrap_or_default());
        match api.patch(&name, &PatchParams::default(), &Patch::Merge(patch)).await {
            Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => Ok(()),
            patched => patched.map(drop).map_err(|error| Error::api("label claim", name, error)),
        }
    }

    async fn node_of(&self, volume: &str) -> Result<NodeOfVolume, Error> {
        let Some(volume) = self.cluster.read_volume(volume).await? else {
            return Ok(NodeOfVolume::Other);
        };
        let label = self.cluster.identity.node_label();
        match volume.labels().get(&label).filter(|node| is_label_value(node)) {
            Some(node) => Ok(NodeOfVolume::Node(node.clone())),
            None if ownership::csi(&volume, &self.cluster.identity).is_some() => Ok(NodeOfVolume::Unlabelled),
            None => Ok(NodeOfVolume::Other),
        }
    }

    /// Returns the UID of the binding in the record.
    async fn recorded(&self) -> Result<Option<String>, Error> {
        let config_map = self.config_map().await?;
        Ok(config_map.as_ref().and_then(labels::recorded_binding).map(str::to_owned))
    }

    async fn config_map(&self) -> Result<Option<ConfigMap>, Error> {
        let name = &self.source.name;
        let read = absence::get_opt(&self.config_maps(), name).await;
        read.map_err(|error| Error::api("read ConfigMap", name, error))
    }

    fn config_maps(&self) -> Api<ConfigMap> {
        Api::namespaced(self.cluster.client.clone(), &self.source.namespace)
    }

    /// Records the UID of the binding, or removes the record.
    async fn record(&self, binding: Option<&str>) -> Result<(), Error> {
        let name = &self.source.name;
        let Some(config_map) = self.config_map().await? else {
            if binding.is_some() {
                tracing::warn!("ConfigMap {name} does not exist; apply the component claim-labels again");
            }
            return Ok(());
        };
        let is_up_to_date = match binding {
            Some(_) => labels::recorded_binding(&config_map) == binding,
            // No node trusts a record without its owner. It is removed nevertheless.
            None => labels::written_binding(&config_map).is_none(),
        };
        if is_up_to_date {
            return Ok(());
        }
        let patch = Patch::Merge(record_patch(&config_map, binding, name));
        let patched = self.config_maps().patch(name, &PatchParams::default(), &patch).await;
        patched.map(drop).map_err(|error| Error::api("record the labels in ConfigMap", name, error))
    }
}

/// The node of a PersistentVolume.
enum NodeOfVolume {
    Node(String),
    /// It is one of the driver, and its label names no node.
    Unlabelled,
    /// It belongs to another driver, or does not exist yet.
    Other,
}

/// Returns the merge patch that records the UID of the binding, or removes the record.
fn record_patch(config_map: &ConfigMap, binding: Option<&str>, name: &str) -> Value {
    let owner = |uid: &str| {
        json!({
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": "MutatingAdmissionPolicyBinding",
            "name": name,
            "uid": uid,
        })
    };
    json!({
        "metadata": {
            // The API server returns 409 if another replica has changed the ConfigMap since it was read.
            "resourceVersion": config_map.metadata.resource_version,
            "ownerReferences": binding.map(owner).into_iter().collect::<Vec<_>>(),
        },
        "data": {BINDING_UID: binding},
    })
}

#[cfg(test)]
mod tests {
    use http::Method;
    use kube::runtime::reflector::store::Writer;
    use rstest::rstest;

    use super::*;
    use crate::testing::fixtures;
    use crate::testing::mock_api_server::{ExpectedRequest, TestContext, cache, expect};

    const POLICY: &str = "/apis/admissionregistration.k8s.io/v1/mutatingadmissionpolicies/labels";
    const BINDING: &str = "/apis/admissionregistration.k8s.io/v1/mutatingadmissionpolicybindings/labels";
    const CONFIG_MAP: &str = "/api/v1/namespaces/system/configmaps/labels";
    const CLAIM: &str = "/api/v1/namespaces/shop/persistentvolumeclaims/data";
    const CLAIMS: &str = "/api/v1/persistentvolumeclaims";
    const PV: &str = "/api/v1/persistentvolumes/v";
    const LABEL: &str = "csi.loopfs.dev/node";

    /// Reconciles a claim at each of these times after the start, one minute after which the policy applies. Returns the waits.
    async fn reconciled_at(
        times: &[Duration],
        claim: &PersistentVolumeClaim,
        requests: Vec<ExpectedRequest>,
    ) -> Vec<Duration> {
        let test_context = TestContext::new(requests);
        let ctx = &*test_context.ctx;
        let source = source();
        let claims = cache(vec![claim.clone()]).0;
        let mut labeller = Labeller::new(PROPAGATION_TIME, &ctx.cluster, &source, claims);
        let start = Instant::now();
        let mut waits = Vec::new();
        for time in times {
            waits.push(labeller.reconcile(start + *time).await.unwrap());
        }
        test_context.finish().await;
        waits
    }

    fn source() -> LabelRecordSource {
        LabelRecordSource { namespace: "system".to_owned(), name: "labels".to_owned() }
    }

    /// Returns the requests that read the policy and its binding, and the requests that follow.
    fn with_policy<const N: usize>(following: [ExpectedRequest; N]) -> Vec<ExpectedRequest> {
        let object = || fixtures::metadata_only(json!({"name": "labels", "uid": "binding-uid"}));
        let policy = [POLICY, BINDING].map(|path| expect(Method::GET, path, None).respond(object()));
        policy.into_iter().chain(following).collect()
    }

    fn recorded(binding: Option<&str>) -> ExpectedRequest {
        let config_map = json!({
            "metadata": {
                "name": "labels", "namespace": "system", "resourceVersion": "7", "ownerReferences": owners(binding),
            },
            "data": binding.map_or(json!({}), |binding| json!({BINDING_UID: binding})),
        });
        expect(Method::GET, CONFIG_MAP, None).respond(config_map)
    }

    fn recorded_without_owner() -> ExpectedRequest {
        let config_map = json!({
            "metadata": {"name": "labels", "namespace": "system", "resourceVersion": "7"},
            "data": {BINDING_UID: "binding-uid"},
        });
        expect(Method::GET, CONFIG_MAP, None).respond(config_map)
    }

    fn owners(binding: Option<&str>) -> Value {
        let owner = |uid| {
            json!({
                "apiVersion": "admissionregistration.k8s.io/v1", "kind": "MutatingAdmissionPolicyBinding",
                "name": "labels", "uid": uid,
            })
        };
        binding.map(owner).into_iter().collect()
    }

    fn records(binding: Option<&str>) -> ExpectedRequest {
        let patch = json!({
            "metadata": {"resourceVersion": "7", "ownerReferences": owners(binding)},
            "data": {BINDING_UID: binding},
        });
        expect(Method::PATCH, CONFIG_MAP, patch)
    }

    fn lists(claims: &[&PersistentVolumeClaim]) -> ExpectedRequest {
        let list = json!({
            "kind": "PersistentVolumeClaimList", "apiVersion": "v1", "metadata": {}, "items": claims,
        });
        expect(Method::GET, CLAIMS, None).respond(list)
    }

    fn labels(node: &str) -> ExpectedRequest {
        let claim = fixtures::claim(json!({}));
        let patch = json!({"metadata": {
            "uid": claim.metadata.uid, "resourceVersion": claim.metadata.resource_version, "labels": {LABEL: node},
        }});
        expect(Method::PATCH, CLAIM, patch)
    }

    fn labels_bound(node: &str) -> ExpectedRequest {
        let patch = json!({"metadata": {"uid": fixtures::CLAIM_UID, "labels": {LABEL: node}}});
        expect(Method::PATCH, CLAIM, patch)
    }

    /// Returns a claim that a person has bound.
    fn bound(change: Value) -> PersistentVolumeClaim {
        let mut bound = json!({"metadata": {"annotations": null}, "spec": {"volumeName": "v"}, "status": {"phase": "Bound"}});
        fixtures::merge_keeping_nulls(&mut bound, change);
        fixtures::claim(bound)
    }

    fn reads_volume(change: Value) -> ExpectedRequest {
        expect(Method::GET, PV, None).respond(fixtures::volume(change))
    }

    fn of_another_driver() -> Value {
        json!({"metadata": {"labels": null}, "spec": {"csi": {"driver": "csi.other.dev"}}})
    }

    #[tokio::test]
    async fn record_is_written_once_all_labelled() {
        let claim = fixtures::claim(json!({"metadata": {"labels": {LABEL: "node-a"}}}));
        let half = PROPAGATION_TIME / 2;
        let mut requests = with_policy([recorded(None)]);
        requests.extend(with_policy([
            recorded(None),
            lists(&[&claim]),
            recorded(None),
            records(Some("binding-uid")),
        ]));
        requests.extend(with_policy([recorded(Some("binding-uid"))]));
        let waits =
            reconciled_at(&[half, half + PROPAGATION_TIME, 2 * PROPAGATION_TIME], &claim, requests).await;
        assert_eq!(waits, [PROPAGATION_TIME, POLL_INTERVAL, POLL_INTERVAL]);
    }

    /// The watch lags behind the list.
    #[tokio::test]
    async fn unlabelled_claim_delays_the_record() {
        let late = fixtures::claim(json!({"metadata": {"name": "late"}}));
        let labelled = fixtures::claim(json!({"metadata": {"labels": {LABEL: "node-a"}}}));
        let mut requests = with_policy([recorded(None)]);
        requests.extend(with_policy([recorded(None), lists(&[&labelled, &late])]));
        let waits = reconciled_at(&[Duration::ZERO, PROPAGATION_TIME], &labelled, requests).await;
        assert_eq!(waits, [PROPAGATION_TIME, FIRST_RETRY]);
    }

    /// The patch has no precondition that changes of the claim could break.
    #[rstest]
    #[case::without_label(json!({}), json!({"metadata": {"labels": {LABEL: "node-b"}}}), Some("node-b"))]
    #[case::with_a_wrong_label(json!({"metadata": {"labels": {LABEL: "node-a"}}}), json!({"metadata": {"labels": {LABEL: "node-b"}}}), Some("node-b"))]
    #[case::with_its_label(json!({"metadata": {"labels": {LABEL: "node-b"}}}), json!({"metadata": {"labels": {LABEL: "node-b"}}}), None)]
    #[case::to_a_volume_of_another_driver(json!({}), of_another_driver(), None)]
    #[case::to_a_volume_with_an_invalid_label(json!({}), json!({"metadata": {"labels": {LABEL: ""}}}), None)]
    #[tokio::test]
    async fn bound_claim_gets_its_volumes_label(
        #[case] change: Value,
        #[case] volume: Value,
        #[case] expected: Option<&str>,
    ) {
        let mut requests = with_policy([reads_volume(volume)]);
        requests.extend(expected.map(labels_bound));
        requests.push(recorded(Some("binding-uid")));
        reconciled_at(&[Duration::ZERO], &bound(change), requests).await;
    }

    /// Returns a labeller of this claim that has reconciled once, the writer of its cache, and when that was.
    async fn worked_once<'a>(
        cluster: &'a Cluster,
        source: &'a LabelRecordSource,
        claim: PersistentVolumeClaim,
    ) -> (Labeller<'a>, Writer<PersistentVolumeClaim>, Instant) {
        let (claims, watch) = cache(vec![claim]);
        let mut labeller = Labeller::new(PROPAGATION_TIME, cluster, source, claims);
        let start = labeller.next_reconcile;
        labeller.work(start, FIRST_RETRY).await.unwrap();
        (labeller, watch, start)
    }

    /// A user can change a claim ten times a second.
    #[rstest]
    #[case::to_a_volume_of_another_driver(reads_volume(of_another_driver()))]
    #[case::to_a_volume_that_does_not_exist(expect(Method::GET, PV, None).refuse(404, "NotFound"))]
    #[tokio::test]
    async fn bound_claim_changes_cause_no_request(#[case] reads_volume: ExpectedRequest) {
        let changed = bound(json!({"metadata": {"resourceVersion": "101"}}));
        let mut requests = with_policy([reads_volume, recorded(None)]);
        requests.extend(with_policy([
            recorded(None),
            lists(&[&changed]),
            recorded(None),
            records(Some("binding-uid")),
        ]));
        let test_context = TestContext::new(requests);
        let ctx = &*test_context.ctx;
        let source = source();
        let (mut labeller, mut watch, start) = worked_once(&ctx.cluster, &source, bound(json!({}))).await;
        watch.apply_watcher_event(&watcher::Event::Apply(changed));
        for tenths in 1..PROPAGATION_TIME.as_secs() * 10 {
            labeller.work(start + Duration::from_millis(100 * tenths), FIRST_RETRY).await.unwrap();
        }
        labeller.work(start + PROPAGATION_TIME, FIRST_RETRY).await.unwrap();
        test_context.finish().await;
    }

    /// A user can name the PersistentVolume in many claims. It is read once for each reconcile.
    #[tokio::test]
    async fn changes_of_claims_of_an_unlabelled_volume_cause_no_request() {
        let unlabelled = reads_volume(json!({"metadata": {"labels": {LABEL: null}}}));
        let test_context = TestContext::new(with_policy([unlabelled, recorded(None)]));
        let ctx = &*test_context.ctx;
        let source = source();
        let (mut labeller, mut watch, start) = worked_once(&ctx.cluster, &source, bound(json!({}))).await;
        for tenths in 1..PROPAGATION_TIME.as_secs() * 10 {
            let changed = bound(json!({"metadata": {"resourceVersion": (100 + tenths).to_string()}}));
            watch.apply_watcher_event(&watcher::Event::Apply(changed));
            labeller.work(start + Duration::from_millis(100 * tenths), FIRST_RETRY).await.unwrap();
        }
        test_context.finish().await;
    }

    /// A person has named the PersistentVolume in the claim before it existed.
    #[tokio::test]
    async fn claim_is_labelled_once_volume_appears() {
        let requests = with_policy([
            expect(Method::GET, PV, None).refuse(404, "NotFound"),
            recorded(None),
            reads_volume(json!({"metadata": {"labels": {LABEL: "node-b"}}})),
            labels_bound("node-b"),
        ]);
        let test_context = TestContext::new(requests);
        let ctx = &*test_context.ctx;
        let source = source();
        let (mut labeller, mut watch, start) =
            worked_once(&ctx.cluster, &source, bound(json!({"status": {"phase": "Pending"}}))).await;
        for (tenths, change) in
            [json!({}), json!({"metadata": {"labels": {LABEL: "node-b"}}})].into_iter().enumerate()
        {
            watch.apply_watcher_event(&watcher::Event::Apply(bound(change)));
            let now = start + Duration::from_millis(100 * tenths as u64);
            labeller.work(now, FIRST_RETRY).await.unwrap();
        }
        test_context.finish().await;
    }

    #[rstest]
    #[case::the_policy([404, 200], recorded(Some("binding-uid")))]
    #[case::the_binding([200, 404], recorded(Some("binding-uid")))]
    #[case::the_binding_without_a_trace([200, 404], recorded_without_owner())]
    #[case::both([404, 404], recorded_without_owner())]
    #[tokio::test]
    async fn record_is_removed_after_deletion_of(#[case] found: [u16; 2], #[case] record: ExpectedRequest) {
        let policy = [(POLICY, found[0]), (BINDING, found[1])].map(|(path, status)| {
            let read = expect(Method::GET, path, None);
            if status == 404 {
                return read.refuse(404, "NotFound");
            }
            read.respond(fixtures::metadata_only(json!({"uid": "u"})))
        });
        let requests = policy.into_iter().chain([record, records(None)]).collect();
        // Without the policy, no claim is labelled either.
        let waits = reconciled_at(&[Duration::ZERO], &fixtures::claim(json!({})), requests).await;
        assert_eq!(waits, [POLL_INTERVAL]);
    }

    #[tokio::test]
    async fn record_of_earlier_binding_is_removed() {
        let claim = fixtures::claim(json!({"metadata": {"labels": {LABEL: "node-a"}}}));
        let requests = with_policy([recorded(Some("earlier")), recorded(Some("earlier")), records(None)]);
        let waits = reconciled_at(&[Duration::ZERO], &claim, requests).await;
        assert_eq!(waits, [PROPAGATION_TIME]);
    }

    #[tokio::test]
    async fn record_without_owner_is_written_again() {
        let claim = fixtures::claim(json!({"metadata": {"labels": {LABEL: "node-a"}}}));
        let mut requests = with_policy([recorded_without_owner()]);
        requests.extend(with_policy([
            recorded_without_owner(),
            lists(&[&claim]),
            recorded_without_owner(),
            records(Some("binding-uid")),
        ]));
        let waits = reconciled_at(&[Duration::ZERO, PROPAGATION_TIME], &claim, requests).await;
        assert_eq!(waits, [PROPAGATION_TIME, POLL_INTERVAL]);
    }

    /// A status 404 of a proxy does not prove that the policy was deleted. Perhaps it was, and the nodes miss claims without a label.
    /// The controller labels the claims itself in the meantime, and removes the record later.
    #[tokio::test]
    async fn an_unreadable_policy_delays_no_label() {
        let unreadable = || expect(Method::GET, POLICY, None).refuse_by_proxy(404);
        let requests = vec![
            unreadable(),
            labels("node-a"),
            unreadable(),
            labels("node-a"),
            recorded(Some("binding-uid")),
            records(None),
        ];
        let test_context = TestContext::new(requests);
        let ctx = &*test_context.ctx;
        let source = source();
        let claims = cache(vec![fixtures::claim(json!({}))]).0;
        let mut labeller = Labeller::new(PROPAGATION_TIME, &ctx.cluster, &source, claims);
        let start = Instant::now();
        assert!(labeller.reconcile(start).await.is_err());
        assert!(labeller.reconcile(start + UNREADABLE_TIME).await.is_err());
        test_context.finish().await;
    }
}

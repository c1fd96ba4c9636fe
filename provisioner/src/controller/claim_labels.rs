//! Labels claims that have no label yet with their node, and records in a ConfigMap that all claims are labelled.
//!
//! The API server labels claims by a MutatingAdmissionPolicy when a node is selected. The controller labels those that are older than
//! the policy, and those that a person bound to a volume of the driver. Once a complete list shows that none is left, it records the
//! UID of the policy's binding. From then on, the nodes rely on the labels, also while no controller runs. The binding owns the
//! ConfigMap, so the garbage collector deletes the record with it.
//!
//! `docs/decisions/0078-claim-labels.md` gives the reasons.

use std::{
    collections::HashMap,
    pin::pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use futures::{StreamExt, stream};
use k8s_openapi::api::{
    admissionregistration::v1::{MutatingAdmissionPolicy, MutatingAdmissionPolicyBinding},
    core::v1::{ConfigMap, PersistentVolumeClaim},
};
use kube::{
    Api, ResourceExt,
    api::{ListParams, Patch, PatchParams},
    runtime::{
        reflector::{self, Store},
        watcher,
    },
};
use serde_json::{Value, json};
use tokio::{sync::Notify, time::timeout};

use crate::{
    api::{
        absence,
        cluster::Cluster,
        list,
        queue::{self, CacheChange},
        signals::SyncSignal,
    },
    error::Error,
    objects::{
        claim_labels::{self, BINDING_UID, MissingLabel, Source},
        identity::is_label_value,
    },
};

/// Time after which every API server applies a policy that one of them has stored. Each watches the policies.
const PROPAGATION_TIME: Duration = Duration::from_secs(60);
/// Interval at which the controller checks that the policy still exists.
const POLL_INTERVAL: Duration = Duration::from_secs(60);
/// Wait before the first retry. Each further wait is twice as long, up to [`POLL_INTERVAL`].
const FIRST_RETRY: Duration = Duration::from_secs(1);
/// Wait after a change, because many claims are often created together.
const DEBOUNCE: Duration = Duration::from_millis(100);
/// Claims labelled concurrently.
const CONCURRENCY: usize = 16;

/// Labels claims until shutdown.
pub(crate) async fn run(cluster: &Cluster, source: &Source) {
    run_after(PROPAGATION_TIME, cluster, source).await;
}

/// As [`run`], with the time that the API servers take to apply a policy.
pub(crate) async fn run_after(propagation_time: Duration, cluster: &Cluster, source: &Source) {
    let (claims, cache) = reflector::store();
    let (synced, changed) = (SyncSignal::default(), Notify::new());
    let identity = cluster.identity.clone();
    let lacks_label =
        move |claim: &PersistentVolumeClaim| claim_labels::missing_label(claim, &identity).is_some();
    let all = Api::all(cluster.client.clone());
    let watching = queue::watch(all, watcher::Config::default(), cache, lacks_label).for_each(|change| {
        if matches!(change, CacheChange::Listed) {
            synced.set();
        }
        changed.notify_one();
        std::future::ready(())
    });
    let labelling = async {
        synced.wait().await;
        let mut labeller = Labeller::new(propagation_time, cluster, source, claims);
        let mut retry = FIRST_RETRY;
        loop {
            let wait = match labeller.reconcile(Instant::now()).await {
                Ok(wait) => {
                    retry = FIRST_RETRY;
                    wait
                }
                Err(error) => {
                    tracing::warn!(%error, "could not label all claims with their nodes; the next attempt is in {retry:?}");
                    let wait = retry;
                    retry = (retry * 2).min(POLL_INTERVAL);
                    wait
                }
            };
            drop(timeout(wait, changed.notified()).await);
            tokio::time::sleep(DEBOUNCE).await;
        }
    };
    tokio::join!(watching, labelling);
}

struct Labeller<'a> {
    propagation_time: Duration,
    cluster: &'a Cluster,
    source: &'a Source,
    /// The claims that may lack a label.
    claims: Store<PersistentVolumeClaim>,
    /// The UIDs of claims without a label that are bound to volumes of other drivers, and their resource versions.
    foreign: Mutex<HashMap<String, String>>,
    /// The UID of the policy's binding, and when this process has first read it.
    binding: Option<(String, Instant)>,
}

impl<'a> Labeller<'a> {
    fn new(
        propagation_time: Duration,
        cluster: &'a Cluster,
        source: &'a Source,
        claims: Store<PersistentVolumeClaim>,
    ) -> Self {
        Self { propagation_time, cluster, source, claims, foreign: Mutex::default(), binding: None }
    }

    /// Labels all claims, and updates the record. Returns the time after which to check again, if no claim changes.
    ///
    /// # Errors
    /// When a request fails. The record is then unchanged.
    async fn reconcile(&mut self, now: Instant) -> Result<Duration, Error> {
        let Some(binding) = self.binding_uid().await? else {
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
        // The watch may lag behind. Every claim that this list does not show yet is labelled by the API server.
        let all = Api::all(self.cluster.client.clone());
        let left =
            list::selected(&all, ListParams::default(), |claim| self.missing_label(claim).is_some()).await;
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

    async fn label_all(&self) -> Result<(), Error> {
        let claims = self.claims.state();
        let known = |uid: &String| claims.iter().any(|claim| claim.metadata.uid.as_ref() == Some(uid));
        self.foreign().retain(|uid, _| known(uid));
        let results = stream::iter(claims).map(|claim| self.label(claim)).buffer_unordered(CONCURRENCY);
        let mut results = pin!(results);
        let mut failed = Ok(());
        while let Some(result) = results.next().await {
            failed = failed.and(result);
        }
        failed
    }

    /// Labels a claim, if it lacks the label. A claim that changed in the meantime is no failure: the watch delivers it again.
    async fn label(&self, claim: Arc<PersistentVolumeClaim>) -> Result<(), Error> {
        let node = match self.missing_label(&claim) {
            None => return Ok(()),
            Some(MissingLabel::Node(node)) => node,
            Some(MissingLabel::NodeOfVolume(volume)) => match self.node_of_volume(&volume).await? {
                Some(node) => node,
                None => {
                    self.foreign().extend(identity_of(&claim));
                    return Ok(());
                }
            },
        };
        let name = claim.name_any();
        let api = self.cluster.claim_api(&claim.namespace().unwrap_or_default());
        let patch = Patch::Merge(claim_labels::label_patch(&claim, &node, &self.cluster.identity));
        match api.patch(&name, &PatchParams::default(), &patch).await {
            Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => Ok(()),
            patched => patched.map(drop).map_err(|error| Error::api("label claim", name, error)),
        }
    }

    /// Returns the node of a PersistentVolume. Returns `None` for one of another driver.
    async fn node_of_volume(&self, volume: &str) -> Result<Option<String>, Error> {
        let read = absence::get_metadata_opt(&self.cluster.volume_api(), volume).await;
        let metadata = read.map_err(|error| Error::api("read PersistentVolume", volume, error))?;
        let label = self.cluster.identity.node_label();
        let node = metadata.and_then(|volume| volume.metadata.labels?.remove(&label));
        Ok(node.filter(|node| is_label_value(node)))
    }

    /// Returns the label that a claim lacks, unless it is known to be bound to a volume of another driver.
    fn missing_label(&self, claim: &PersistentVolumeClaim) -> Option<MissingLabel> {
        let is_foreign =
            || identity_of(claim).is_some_and(|(uid, version)| self.foreign().get(&uid) == Some(&version));
        claim_labels::missing_label(claim, &self.cluster.identity).filter(|_label| !is_foreign())
    }

    fn foreign(&self) -> MutexGuard<'_, HashMap<String, String>> {
        // Every critical section is a single map operation, so a panicked holder leaves the map whole.
        self.foreign.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the UID of the binding in the record.
    async fn recorded(&self) -> Result<Option<String>, Error> {
        let config_map = self.config_map().await?;
        Ok(config_map.as_ref().and_then(claim_labels::recorded_binding).map(str::to_owned))
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
        if claim_labels::recorded_binding(&config_map) == binding {
            return Ok(());
        }
        let patch = Patch::Merge(record_patch(&config_map, binding, name));
        let patched = self.config_maps().patch(name, &PatchParams::default(), &patch).await;
        patched.map(drop).map_err(|error| Error::api("record the labels in ConfigMap", name, error))
    }
}

/// Returns what changes whenever the claim does.
fn identity_of(claim: &PersistentVolumeClaim) -> Option<(String, String)> {
    claim.uid().zip(claim.resource_version())
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
    use loopfs::Bytes;
    use rstest::rstest;

    use super::*;
    use crate::{
        objects::ownership::SELECTED_NODE,
        testing::{
            fake_store::FakeStore,
            fixtures,
            mock_api_server::{Caches, ExpectedRequest, TestContext, cache, expect},
        },
    };

    const POLICY: &str = "/apis/admissionregistration.k8s.io/v1/mutatingadmissionpolicies/labels";
    const BINDING: &str = "/apis/admissionregistration.k8s.io/v1/mutatingadmissionpolicybindings/labels";
    const CONFIG_MAP: &str = "/api/v1/namespaces/system/configmaps/labels";
    const CLAIM: &str = "/api/v1/namespaces/shop/persistentvolumeclaims/data";
    const CLAIMS: &str = "/api/v1/persistentvolumeclaims";
    const LABEL: &str = "csi.loopfs.dev/node";

    /// Reconciles a claim at each of these times after the start, one minute after which the policy applies. Returns the waits.
    async fn reconciled_at(
        times: &[Duration],
        claim: &PersistentVolumeClaim,
        requests: Vec<ExpectedRequest>,
    ) -> Vec<Duration> {
        let test_context = TestContext::new(FakeStore::of_size(Bytes(1 << 30)), Caches::default(), requests);
        let ctx = Arc::clone(&test_context.ctx);
        let source = Source { namespace: "system".to_owned(), name: "labels".to_owned() };
        let claims = cache(vec![claim.clone()]).0;
        let mut labeller = Labeller::new(PROPAGATION_TIME, &ctx.cluster, &source, claims);
        let start = Instant::now();
        let mut waits = Vec::new();
        for time in times {
            waits.push(labeller.reconcile(start + *time).await.unwrap());
        }
        drop(labeller);
        drop(ctx);
        test_context.finish().await;
        waits
    }

    /// Returns the requests that read the policy and its binding.
    fn policy_exists() -> [ExpectedRequest; 2] {
        let object = || fixtures::metadata_only(json!({"name": "labels", "uid": "binding-uid"}));
        [POLICY, BINDING].map(|path| expect(Method::GET, path, None).respond(object()))
    }

    fn recorded(binding: Option<&str>) -> ExpectedRequest {
        let config_map = json!({
            "metadata": {"name": "labels", "namespace": "system", "resourceVersion": "7"},
            "data": binding.map_or(json!({}), |binding| json!({BINDING_UID: binding})),
        });
        expect(Method::GET, CONFIG_MAP, None).respond(config_map)
    }

    fn records(binding: Option<&str>) -> ExpectedRequest {
        let owner = json!({
            "apiVersion": "admissionregistration.k8s.io/v1", "kind": "MutatingAdmissionPolicyBinding",
            "name": "labels", "uid": binding,
        });
        let owners: Vec<_> = binding.map(|_| owner).into_iter().collect();
        let patch = json!({
            "metadata": {"resourceVersion": "7", "ownerReferences": owners}, "data": {BINDING_UID: binding},
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

    #[tokio::test]
    async fn the_record_is_written_when_the_policy_applies_and_no_claim_is_left() {
        let claim = fixtures::claim(json!({"metadata": {"labels": {LABEL: "node-a"}}}));
        let half = PROPAGATION_TIME / 2;
        let mut requests = Vec::from(policy_exists());
        requests.push(recorded(None));
        requests.extend(policy_exists());
        requests.extend([recorded(None), lists(&[&claim]), recorded(None), records(Some("binding-uid"))]);
        requests.extend(policy_exists());
        requests.push(recorded(Some("binding-uid")));
        let waits =
            reconciled_at(&[half, half + PROPAGATION_TIME, 2 * PROPAGATION_TIME], &claim, requests).await;
        assert_eq!(waits, [PROPAGATION_TIME, POLL_INTERVAL, POLL_INTERVAL]);
    }

    /// The watch lags behind the list.
    #[tokio::test]
    async fn the_record_is_not_written_while_a_claim_is_left() {
        let late = fixtures::claim(json!({"metadata": {"name": "late"}}));
        let labelled = fixtures::claim(json!({"metadata": {"labels": {LABEL: "node-a"}}}));
        let mut requests = Vec::from(policy_exists());
        requests.push(recorded(None));
        requests.extend(policy_exists());
        requests.extend([recorded(None), lists(&[&labelled, &late])]);
        let waits = reconciled_at(&[Duration::ZERO, PROPAGATION_TIME], &labelled, requests).await;
        assert_eq!(waits, [PROPAGATION_TIME, FIRST_RETRY]);
    }

    #[rstest]
    #[case::the_selected_node(json!({}), None, Some("node-a"))]
    #[case::the_node_of_its_volume(json!({"metadata": {"annotations": null}, "spec": {"volumeName": "v"}}), Some(json!({LABEL: "node-b"})), Some("node-b"))]
    #[case::a_volume_of_another_driver(json!({"metadata": {"annotations": null}, "spec": {"volumeName": "v"}}), Some(json!({})), None)]
    #[case::a_volume_with_an_invalid_label(json!({"metadata": {"annotations": null}, "spec": {"volumeName": "v"}}), Some(json!({LABEL: ""})), None)]
    #[tokio::test]
    async fn a_claim_is_labelled_with(
        #[case] change: Value,
        #[case] labels_of_volume: Option<Value>,
        #[case] expected: Option<&str>,
    ) {
        let claim = fixtures::claim(change);
        let mut requests = Vec::from(policy_exists());
        requests.extend(labels_of_volume.map(|labels| {
            let metadata = fixtures::metadata_only(json!({"name": "v", "labels": labels}));
            expect(Method::GET, "/api/v1/persistentvolumes/v", None).respond(metadata)
        }));
        requests.extend(expected.map(labels));
        requests.push(recorded(Some("binding-uid")));
        reconciled_at(&[Duration::ZERO], &claim, requests).await;
    }

    #[tokio::test]
    async fn the_volume_of_a_claim_of_another_driver_is_read_once() {
        let claim = fixtures::claim(json!({"metadata": {"annotations": null}, "spec": {"volumeName": "v"}}));
        let foreign = fixtures::metadata_only(json!({"name": "v"}));
        let mut requests = Vec::from(policy_exists());
        requests.push(expect(Method::GET, "/api/v1/persistentvolumes/v", None).respond(foreign));
        requests.push(recorded(None));
        requests.extend(policy_exists());
        requests.extend([recorded(None), lists(&[&claim]), recorded(None), records(Some("binding-uid"))]);
        reconciled_at(&[Duration::ZERO, PROPAGATION_TIME], &claim, requests).await;
    }

    #[rstest]
    #[case::the_policy(vec![expect(Method::GET, POLICY, None).refuse(404, "NotFound"), expect(Method::GET, BINDING, None).respond(fixtures::metadata_only(json!({"uid": "u"})))])]
    #[case::the_binding(vec![expect(Method::GET, POLICY, None).respond(fixtures::metadata_only(json!({"uid": "u"}))), expect(Method::GET, BINDING, None).refuse(404, "NotFound")])]
    #[tokio::test]
    async fn the_record_is_removed_if_an_administrator_deleted(#[case] mut requests: Vec<ExpectedRequest>) {
        requests.extend([recorded(Some("binding-uid")), records(None)]);
        // Without the policy, no claim is labelled either.
        let waits = reconciled_at(&[Duration::ZERO], &fixtures::claim(json!({})), requests).await;
        assert_eq!(waits, [POLL_INTERVAL]);
    }

    #[tokio::test]
    async fn the_record_of_an_earlier_binding_is_removed() {
        let claim = fixtures::claim(json!({"metadata": {"labels": {LABEL: "node-a"}}}));
        let mut requests = Vec::from(policy_exists());
        requests.extend([recorded(Some("earlier")), recorded(Some("earlier")), records(None)]);
        let waits = reconciled_at(&[Duration::ZERO], &claim, requests).await;
        assert_eq!(waits, [PROPAGATION_TIME]);
    }

    /// A status 404 of a proxy does not prove that the policy was deleted.
    #[tokio::test]
    async fn the_record_stays_while_it_is_unknown_whether_the_policy_exists() {
        let requests = vec![expect(Method::GET, POLICY, None).refuse_by_proxy(404)];
        let test_context = TestContext::new(FakeStore::of_size(Bytes(1 << 30)), Caches::default(), requests);
        let ctx = Arc::clone(&test_context.ctx);
        let source = Source { namespace: "system".to_owned(), name: "labels".to_owned() };
        let claims =
            cache(vec![fixtures::claim(json!({"metadata": {"annotations": {SELECTED_NODE: null}}}))]).0;
        let mut labeller = Labeller::new(PROPAGATION_TIME, &ctx.cluster, &source, claims);
        assert!(labeller.reconcile(Instant::now()).await.is_err());
        drop(labeller);
        drop(ctx);
        test_context.finish().await;
    }
}

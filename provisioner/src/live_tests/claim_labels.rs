//! Tests of claims with labels, with the rights and the policy of `csi/deploy/claim-labels`.

use k8s_openapi::api::admissionregistration::v1::{MutatingAdmissionPolicy, MutatingAdmissionPolicyBinding};
use k8s_openapi::api::core::v1::ConfigMap;

use super::*;
use crate::api;
use crate::api::events::Events;
use crate::claim_labels::labeller;
use crate::claim_labels::labels::{LabelRecordSource, are_complete};
use crate::objects::ownership::SELECTED_NODE;

/// The name of the policy, its binding and the ConfigMap.
const NAME: &str = "loopfs-claim-labels";
const LABEL: &str = "csi.loopfs.dev/node";

const POLICY: &str = include_str!("../../../csi/deploy/claim-labels/policy.yaml");
const CONFIG_MAP: &str = include_str!("../../../csi/deploy/claim-labels/configmap.yaml");
const RIGHTS: [&str; 2] = [
    include_str!("../../../csi/deploy/claim-labels/rbac.yaml"),
    include_str!("../../../csi/deploy/claim-labels/admission.yaml"),
];

pub(super) fn source() -> LabelRecordSource {
    LabelRecordSource { namespace: SYSTEM.to_owned(), name: NAME.to_owned() }
}

impl TestCluster {
    /// Waits until the API server labels claims: it reads new policies at intervals.
    pub(super) async fn until_labels_are_set(&self) {
        let driver = fixtures::identity().driver().to_owned();
        let annotations = json!({"volume.kubernetes.io/storage-provisioner": driver});
        let claim = self.claim_object("dry-run", json!({"metadata": {"annotations": annotations}}));
        let claim: PersistentVolumeClaim = serde_json::from_value(claim).unwrap();
        let dry_run = PostParams { dry_run: true, ..PostParams::default() };
        eventually("the API server labels claims", || async {
            let created = self.claims().create(&dry_run, &claim).await.ok()?;
            (created.labels().get(LABEL).map(String::as_str) == Some(HERE)).then_some(())
        })
        .await;
    }

    async fn provisioner_with_labels(&self) -> Provisioner {
        let options = Options { claim_labels: Some(source()), ..Options::default() };
        self.provisioner_with(options).await
    }

    /// Starts the controller's duty to label claims. It does not wait until all API servers apply the policy: there is only one.
    async fn labelling(&self) -> JoinSet<()> {
        let (client, node) = self.controller_client(&ApiTraffic::default()).await;
        let identity = Identity::new(fixtures::identity().driver(), &node).unwrap();
        let (events, _requests) = Events::new(&node);
        let cluster = api::cluster::Cluster { client, identity, events };
        let mut labelling = JoinSet::new();
        labelling.spawn(async move {
            labeller::run_after(Duration::from_secs(2), &cluster, &source()).await;
        });
        labelling
    }

    fn record(&self) -> Api<ConfigMap> {
        Api::namespaced(self.admin.clone(), SYSTEM)
    }

    async fn labelled(&self, claim: &str, node: &str) {
        let labelled =
            |claim: &PersistentVolumeClaim| claim.labels().get(LABEL).map(String::as_str) == Some(node);
        until(&self.claims(), claim, labelled).await;
    }
}

impl Provisioner {
    pub(super) async fn until_it_watches_all_claims(&self, expected: bool) {
        let line = format!("loopfs_provisioner_watches_all_claims {}", u8::from(expected));
        self.until_metrics(&[line]).await;
    }
}

/// The orders in which a policy, a record, a controller and claims may appear and disappear.
#[tokio::test]
async fn changes_of_labelling_miss_no_claim() {
    let cluster = TestCluster::connect_with(&RIGHTS).await;
    if cluster.lacks_mutating_policies().await {
        return cluster.finish([]).await;
    }
    let provisioner = cluster.provisioner_with_labels().await;
    provisioner.until_it_watches_all_claims(true).await;

    // Claims from before the policy: one of the scheduler, and one that a version without the controller has provisioned.
    cluster.claim("before", json!({})).await;
    cluster.bound("before").await;
    cluster.claim("without-node", json!({})).await;
    cluster.bound("without-node").await;
    cluster.unselect("without-node").await;
    assert_eq!(cluster.claims().get("before").await.unwrap().labels().get(LABEL), None);

    // Without a record, each node watches all claims, although the policy exists.
    cluster.opt_in(&[POLICY, CONFIG_MAP]).await;
    provisioner.until_it_watches_all_claims(true).await;
    cluster.until_labels_are_set().await;
    let labelling = cluster.labelling().await;
    cluster.labelled("before", HERE).await;
    cluster.labelled("without-node", HERE).await;
    until(&cluster.record(), NAME, are_complete).await;
    provisioner.until_it_watches_all_claims(false).await;

    // From now on no controller runs. The API server labels.
    drop(labelling);
    cluster.claim("after", json!({})).await;
    cluster.bound("after").await;
    cluster.labelled("after", HERE).await;
    for claim in ["before", "without-node", "after"] {
        cluster.expand(claim, "4Mi").await;
    }

    // A tenant writes the label before the scheduler selects a node, or changes it afterwards.
    let unselected = json!({"metadata": {"annotations": {SELECTED_NODE: null}, "labels": {LABEL: THERE}}});
    cluster.claim("label-first", unselected).await;
    cluster.select("label-first", HERE).await;
    cluster.bound("label-first").await;
    cluster.change(&cluster.claims(), "label-first", json!({"metadata": {"labels": {LABEL: THERE}}})).await;
    cluster.labelled("label-first", HERE).await;

    // The scheduler selects this node after another one could not hold the volume.
    let elsewhere = json!({"metadata": {"annotations": {SELECTED_NODE: THERE}}});
    cluster.claim("rescheduled", elsewhere).await;
    cluster.labelled("rescheduled", THERE).await;
    cluster.unselect("rescheduled").await;
    cluster.select("rescheduled", HERE).await;
    cluster.bound("rescheduled").await;

    // A claim is deleted and created again under its name.
    let volume = cluster.bound("after").await;
    cluster.delete_claim_of(&volume).await;
    cluster.claim("after", json!({})).await;
    cluster.bound("after").await;

    // A provisioner that starts now watches only its own claims from the beginning.
    provisioner.stop().await;
    cluster.claim("while-down", json!({})).await;
    let provisioner = cluster.provisioner_with_labels().await;
    cluster.bound("while-down").await;
    provisioner.until_it_watches_all_claims(false).await;

    // The policy is removed while no controller runs. The garbage collector deletes the record.
    let bindings: Api<MutatingAdmissionPolicyBinding> = Api::all(cluster.admin.clone());
    bindings.delete(NAME, &DeleteParams::default()).await.unwrap();
    provisioner.until_it_watches_all_claims(true).await;
    eventually("the API server labels no claim any more", || async {
        cluster.claim("probe", json!({})).await;
        let volume = cluster.bound("probe").await;
        let label = cluster.claims().get("probe").await.unwrap().labels().get(LABEL).cloned();
        cluster.delete_claim_of(&volume).await;
        label.is_none().then_some(())
    })
    .await;

    let claims = ["before", "without-node", "after", "label-first", "rescheduled", "while-down"];
    cluster.delete_claims(&claims).await;
    let policies: Api<MutatingAdmissionPolicy> = Api::all(cluster.admin.clone());
    policies.delete(NAME, &DeleteParams::default()).await.unwrap();
    cluster.finish([provisioner]).await;
}

//! Tests of deleted nodes and lost disks, with the rights of `csi/deploy/node-loss`.

use std::sync::atomic::{AtomicUsize, Ordering};

use k8s_openapi::api::storage::v1::CSINode;

use super::data_safety::TIMEOUTS;
use super::faulty_api_server::{Call, Fault, FaultyApiServer};
use super::{controllers, *};
use crate::api::connection::Timeouts;
use crate::controller::process::Duties;
use crate::controller::unready_nodes::Timing;
use crate::loss::NodeLoss;
use crate::objects::ownership::SELECTED_NODE;
use crate::objects::snapshot;

pub(super) const OPT_IN: [&str; 2] = [
    include_str!("../../../csi/deploy/node-loss/rbac.yaml"),
    include_str!("../../../csi/deploy/node-loss/admission.yaml"),
];

/// The node that is deleted. No provisioner runs there: the tests create its PersistentVolumes.
const LOST: &str = "node-c";
/// A disk that no remaining node has.
const OTHER_DISK: &str = "5a1e6f0c-0000-4000-8000-000000000001";

impl TestCluster {
    async fn create_node(&self, name: &str) {
        let labels = json!({"topology.csi.loopfs.dev/node": name});
        let node = json!({"metadata": {"name": name, "labels": labels}});
        create::<Node>(&Api::all(self.admin.clone()), node).await;
        let drivers = json!([{
            "name": "csi.loopfs.dev", "nodeID": name, "topologyKeys": ["topology.csi.loopfs.dev/node"],
        }]);
        let csi = json!({"metadata": {"name": name}, "spec": {"drivers": drivers}});
        create::<CSINode>(&Api::all(self.admin.clone()), csi).await;
    }

    async fn delete_node(&self, name: &str) {
        let nodes: Api<Node> = Api::all(self.admin.clone());
        nodes.delete(name, &DeleteParams::default()).await.unwrap();
        let registered: Api<CSINode> = Api::all(self.admin.clone());
        registered.delete(name, &DeleteParams::default()).await.unwrap();
    }

    async fn controller_checking_nodes(&self, mode: NodeLoss) -> Provisioner {
        self.controller(checking_nodes(mode)).await
    }

    /// Creates a claim that is bound to a PersistentVolume of a node, as the provisioner there would have created it.
    async fn claim_on(
        &self,
        node: &str,
        name: &str,
        policy: &str,
        change: Value,
    ) -> (PersistentVolumeClaim, PersistentVolume) {
        // No provisioner runs, so none serves the claim until its PersistentVolume exists.
        let selected = json!({"metadata": {"annotations": {SELECTED_NODE: node}}});
        self.claim(name, selected).await;
        let has_provisioner = |claim: &PersistentVolumeClaim| ownership::provisioner(claim).is_some();
        let claim = until(&self.claims(), name, has_provisioner).await;
        let id = format!("pvc-{}", claim.uid().unwrap());
        let mut volume = json!({
            "metadata": {
                "name": id, "uid": null, "resourceVersion": null,
                "finalizers": ["external-provisioner.volume.kubernetes.io/finalizer"],
                "annotations": {
                    "csi.loopfs.dev/on-node-loss": policy, "csi.loopfs.dev/node-loss-grace-seconds": "1",
                },
            },
            "spec": {
                "storageClassName": self.class,
                "claimRef": {"namespace": self.namespace, "name": name, "uid": claim.uid()},
                "csi": {"volumeHandle": id, "volumeAttributes": {"csi.loopfs.dev/filesystem-uuid": OTHER_DISK}},
            },
            "status": null,
        });
        fixtures::merge_keeping_nulls(&mut volume, change);
        create(&self.objects(), serde_json::to_value(fixtures::volume_on(node, volume)).unwrap()).await;
        let volume = self.bound(name).await;
        (self.claims().get(name).await.unwrap(), volume)
    }

    async fn assert_claim_stays(&self, claim: &PersistentVolumeClaim) {
        let found = self.claims().get(&claim.name_any()).await.unwrap();
        assert_eq!((found.uid(), found.metadata.deletion_timestamp), (claim.uid(), None));
    }

    async fn event_about(&self, volume: &PersistentVolume, word: &str) {
        self.event_in("default", &volume.name_any(), "NodeLost", word).await;
    }
}

fn checking_nodes(mode: NodeLoss) -> Duties {
    Duties { node_loss: controllers::checking(mode), ..controllers::ONLY_PLACEMENT }
}

#[tokio::test]
async fn deleted_nodes_claim_is_recreated_elsewhere() {
    let cluster = TestCluster::connect_with(&OPT_IN).await;
    cluster.create_node(LOST).await;
    let (claim, volume) = cluster.claim_on(LOST, "data", "deleteClaim", json!({})).await;
    // A dry run only reports.
    let dry_run = cluster.controller_checking_nodes(NodeLoss::DryRun).await;
    cluster.delete_node(LOST).await;
    cluster.event_about(&volume, "if the driver ran with --node-loss=enforce").await;
    dry_run.stop().await;
    cluster.assert_claim_stays(&claim).await;

    let running = [cluster.provisioner().await, cluster.controller_checking_nodes(NodeLoss::Enforce).await];
    let is_old = |found: Option<PersistentVolumeClaim>| found.is_some_and(|found| found.uid() == claim.uid());
    eventually("the claim is deleted", || async {
        (!is_old(cluster.claims().get_opt("data").await.unwrap())).then_some(())
    })
    .await;
    // The controller of a StatefulSet would do this.
    let recreated = cluster.claim("data", json!({})).await;
    cluster.wait_until_removed(&volume).await;
    cluster.event("data", "NodeLost").await;
    let bound = cluster.bound("data").await;
    assert_eq!(bound.labels()["csi.loopfs.dev/node"], HERE);
    assert_eq!(cluster.claims().get("data").await.unwrap().uid(), recreated.uid());

    cluster.delete_claim_of(&bound).await;
    cluster.finish(running).await;
}

#[tokio::test]
async fn claims_of_unready_node_are_reported() {
    let cluster = TestCluster::connect().await;
    // No kubelet runs there that would report that the node is ready.
    cluster.create_node(LOST).await;
    let retained =
        json!({"spec": {"persistentVolumeReclaimPolicy": "Retain"}, "metadata": {"finalizers": null}});
    let (_claim, volume) = cluster.claim_on(LOST, "data", "retain", retained).await;
    let timing = Timing { interval: Duration::from_millis(50), grace: Duration::from_millis(100) };
    let duties = Duties { unready_nodes: timing, ..controllers::ONLY_PLACEMENT };
    let controller = cluster.controller(duties).await;
    assert!(cluster.event("data", "NodeNotReady").await.contains(LOST));
    controller.until_metrics(&["loopfs_controller_volumes_on_unready_nodes 1"]).await;

    let nodes: Api<Node> = Api::all(cluster.admin.clone());
    let ready = json!({"status": {"conditions": [{"type": "Ready", "status": "True"}]}});
    nodes.patch_status(LOST, &PatchParams::default(), &Patch::Merge(ready)).await.unwrap();
    controller.until_metrics(&["loopfs_controller_volumes_on_unready_nodes 0"]).await;
    controller.stop().await;
    cluster.delete_claim("data").await;
    cluster.remove_objects(&[&volume.name_any()]).await;
    cluster.delete_node(LOST).await;
    cluster.finish([]).await;
}

/// The controller loses the API server after each of its writes, and then the node is back.
#[tokio::test]
async fn node_that_returns_keeps_its_data() {
    let cluster = TestCluster::connect_with(&OPT_IN).await;
    let is_ours = |call: &Call| {
        call.is_write() && ["persistentvolumes", "persistentvolumeclaims"].contains(&call.resource.as_str())
    };
    let here = json!({"spec": {"csi": {"volumeAttributes": {"csi.loopfs.dev/filesystem-uuid": fixtures::FILESYSTEM}}}});
    for allowed in 0..3 {
        cluster.create_node(LOST).await;
        let name = format!("data-{allowed}");
        let (_claim, volume) = cluster.claim_on(LOST, &name, "deleteClaim", here.clone()).await;
        let store = Arc::new(FakeStore::of_size(Bytes(64 * MIB)));
        let id = store.add(&volume.name_any());
        let api_server = FaultyApiServer::in_front_of(&cluster, controllers::kubeconfig().0).await;
        let writes = AtomicUsize::new(0);
        api_server.set(move |call| {
            let is_refused = is_ours(call) && writes.fetch_add(1, Ordering::Relaxed) >= allowed;
            is_refused.then_some(Fault::Silence)
        });
        let before = api_server.now();
        let enforce = checking_nodes(NodeLoss::Enforce);
        let controller = cluster.controller_through(&api_server, "only", enforce).await;
        cluster.delete_node(LOST).await;
        let stalls = |call: &Call, fault: Option<Fault>| is_ours(call) && fault == Some(Fault::Silence);
        api_server.until(before, 1, "the controller loses the API server", stalls).await;
        controller.kill().await;

        cluster.create_node(LOST).await;
        let (admin, traffic) = (cluster.admin.clone(), ApiTraffic::default());
        let pod = cluster.pod_of(HERE).await;
        let provisioner = Provisioner::start(LOST, &store, pod, Options::default(), admin, traffic).await;
        // Its turn is after that of the older PersistentVolume.
        cluster.claim("new", json!({"metadata": {"annotations": {SELECTED_NODE: LOST}}})).await;
        let new = cluster.bound("new").await;
        cluster.delete_claim_of(&new).await;
        assert!(store.state().volumes.contains_key(&id), "after {allowed} writes");
        provisioner.stop().await;
        cluster.delete_node(LOST).await;
        remove_volumes_of(&cluster.namespace, &cluster.admin).await;
    }
    cluster.finish([]).await;
}

/// The snapshotter of the node would remove the finalizer.
#[tokio::test]
async fn deleted_nodes_deleted_snapshot_is_released() {
    let cluster = TestCluster::connect().await;
    cluster.define_snapshots().await;
    // Both policies apply to the controller, if both components are there.
    let opt_in = [OPT_IN[0], OPT_IN[1], include_str!("../../../csi/deploy/snapshots/admission.yaml")];
    cluster.opt_in(&opt_in).await;
    cluster.create_node(LOST).await;
    let bound = "snapshot.storage.kubernetes.io/volumesnapshotcontent-bound-protection";
    let content = json!({
        "apiVersion": "snapshot.storage.k8s.io/v1", "kind": "VolumeSnapshotContent",
        "metadata": {
            "name": cluster.namespace, "finalizers": [bound],
            "labels": {snapshot::MANAGED_BY: LOST}, "annotations": {"csi.loopfs.dev/node-loss-grace-seconds": "1"},
        },
        "spec": {
            "driver": "csi.loopfs.dev", "deletionPolicy": "Delete", "source": {"volumeHandle": "pvc-1"},
            "volumeSnapshotRef": {"name": "s", "namespace": cluster.namespace},
        },
    });
    let contents: Api<DynamicObject> = Api::all_with(cluster.admin.clone(), &snapshot::content_resource());
    create(&contents, content).await;
    contents.delete(&cluster.namespace, &DeleteParams::default()).await.unwrap();
    cluster.delete_node(LOST).await;
    let controller = cluster.controller_checking_nodes(NodeLoss::Enforce).await;
    let (_, its_node) = controllers::kubeconfig();
    cluster.event_in("default", &its_node, "NodeLost", &cluster.namespace).await;
    assert!(contents.get_opt(&cluster.namespace).await.unwrap().is_none());
    controller.stop().await;
    opt_out(&opt_in, &cluster.admin).await;
    cluster.remove_snapshot_definitions().await;
    cluster.finish([]).await;
}

/// A controller of the cloud deletes Node objects in an outage. Their machines run.
#[tokio::test]
async fn several_missing_nodes_prevent_deletion() {
    const ALSO_LOST: &str = "node-d";
    let cluster = TestCluster::connect_with(&OPT_IN).await;
    cluster.create_node(LOST).await;
    cluster.create_node(ALSO_LOST).await;
    let (claim, volume) = cluster.claim_on(LOST, "data", "deleteClaim", json!({})).await;
    let (_, other) = cluster.claim_on(ALSO_LOST, "other", "deleteVolume", json!({})).await;
    cluster.delete_node(LOST).await;
    cluster.delete_node(ALSO_LOST).await;
    let controller = cluster.controller_checking_nodes(NodeLoss::Enforce).await;
    let (_, its_node) = controllers::kubeconfig();
    let both = format!("{LOST:?}, {ALSO_LOST:?}");
    let note = cluster.event_in("default", &its_node, "NodeLost", &both).await;
    assert!(note.contains("more than the 20 % of --node-loss-at-most"), "{note}");
    controller.until_metrics(&["loopfs_controller_volumes_on_deleted_nodes 2"]).await;

    // One of them is registered again, and the other one is really lost.
    cluster.create_node(LOST).await;
    cluster.event_about(&other, "objects of PersistentVolume").await;
    until(&cluster.objects(), &other.name_any(), |volume| volume.metadata.deletion_timestamp.is_some()).await;
    cluster.assert_claim_stays(&claim).await;
    let kept = cluster.objects().get(&volume.name_any()).await.unwrap();
    assert_eq!(kept.metadata.deletion_timestamp, None);
    controller.stop().await;
    cluster.delete_node(LOST).await;
    cluster.finish([]).await;
}

/// The administrator mounts the right disk while the provisioner deletes the objects of its volumes.
#[tokio::test]
async fn disk_that_returns_keeps_its_data() {
    let cluster = TestCluster::connect_with(&OPT_IN).await;
    let (claim, volume) = cluster.claim_on(HERE, "data", "deleteClaim", json!({})).await;
    let api_server = FaultyApiServer::before(&cluster, HERE).await;
    let marks = |call: &Call, _: Option<Fault>| call.is("delete", "persistentvolumes");
    api_server.set(move |call| marks(call, None).then_some(Fault::Late));
    let options = Options { node_loss: NodeLoss::Enforce, ..Options::default() };
    let provisioner = api_server.provisioner(&cluster, Timeouts::default(), options).await;
    cluster.event_in(&cluster.namespace, "data", "NodeLost", OTHER_DISK).await;
    api_server.until(0, 1, "the provisioner marks the PersistentVolume", marks).await;
    let id = cluster.volumes.add(&volume.name_any());
    let healed = api_server.now();
    api_server.heal();
    // After the write that was under way, the provisioner reads the objects again, and asks the store.
    let reads = |call: &Call, _: Option<Fault>| call.is("get", "persistentvolumeclaims");
    api_server.until(healed, 1, "the provisioner reads the claim again", reads).await;
    cluster.claim("new", json!({})).await;
    let new = cluster.bound("new").await;
    cluster.assert_claim_stays(&claim).await;
    let kept = cluster.objects().get(&volume.name_any()).await.unwrap();
    assert!(pv::has_finalizer(&kept));
    assert!(cluster.volumes.state().volumes.contains_key(&id));
    cluster.delete_claim_of(&new).await;
    cluster.finish([provisioner]).await;
}

/// The leader loses the API server between its decision and the deletion of a claim. The next leader deletes the claim. When the first
/// one's request arrives, the claim exists again, and stays.
#[tokio::test]
async fn leader_changes_during_a_node_loss() {
    const CLAIMS: &str = "persistentvolumeclaims";
    let cluster = TestCluster::connect_with(&OPT_IN).await;
    cluster.create_node(LOST).await;
    let (_claim, volume) = cluster.claim_on(LOST, "data", "deleteClaim", json!({})).await;
    let api_server = FaultyApiServer::in_front_of(&cluster, controllers::kubeconfig().0).await;
    let enforce = || checking_nodes(NodeLoss::Enforce);
    let first = cluster.controller_through(&api_server, "first", enforce()).await;
    first.until_it_leads().await;
    api_server.set(|call| match call {
        call if call.is("delete", CLAIMS) => Some(Fault::Late),
        call => (call.resource == "leases").then_some(Fault::Silence),
    });
    let before = api_server.now();
    cluster.delete_node(LOST).await;
    let deletes = |call: &Call, _: Option<Fault>| call.is("delete", CLAIMS);
    api_server.until(before, 1, "the first leader deletes the claim", deletes).await;
    assert!(first.leads().await);
    let second = cluster.controller_named("second", enforce()).await;
    second.until_it_leads().await;
    until_deleted(&cluster.claims(), "data").await;
    cluster.wait_until_removed(&volume).await;
    let provisioner = cluster.provisioner().await;
    let recreated = cluster.claim("data", json!({})).await;
    let bound = cluster.bound("data").await;

    let late = api_server.now();
    api_server.heal();
    let arrives = |call: &Call, fault: Option<Fault>| call.is("delete", CLAIMS) && fault.is_none();
    api_server.until(late, 1, "the first leader's request arrives", arrives).await;
    cluster.assert_claim_stays(&recreated).await;
    first.kill().await;
    cluster.delete_claim_of(&bound).await;
    cluster.finish([provisioner, second]).await;
}

#[tokio::test]
async fn no_fault_proves_a_node_deletion() {
    let cluster = TestCluster::connect_with(&OPT_IN).await;
    cluster.create_node(LOST).await;
    let (claim, volume) = cluster.claim_on(LOST, "data", "deleteClaim", json!({})).await;
    // The driver is not registered, so the controller reads the Node.
    let registered: Api<CSINode> = Api::all(cluster.admin.clone());
    registered.delete(LOST, &DeleteParams::default()).await.unwrap();
    let api_server = FaultyApiServer::in_front_of(&cluster, controllers::kubeconfig().0).await;
    let reads_node = |call: &Call, _: Option<Fault>| call.is("get", "nodes") && call.name == LOST;
    // The last fault is that of all further reads.
    let (faults, number) = (Fault::OF_READS.into_iter().rev(), AtomicUsize::new(0));
    let faults: Vec<_> = faults.collect();
    api_server.set(move |call| {
        let next = || faults[number.fetch_add(1, Ordering::Relaxed).min(faults.len() - 1)];
        reads_node(call, None).then(next)
    });
    let traffic = ApiTraffic::default();
    let client = api_server.client(TIMEOUTS, &traffic).await;
    let duties = checking_nodes(NodeLoss::Enforce);
    let controller = cluster.start_controller("only", duties, client, traffic).await;
    // A change of a CSINode makes the controller check again.
    let check = async || {
        let checked = api_server.now();
        let change = json!({"metadata": {"annotations": {"checked": checked.to_string()}}});
        cluster.change(&registered, THERE, change).await;
        api_server.until(checked, 1, "the controller reads the Node", reads_node).await;
    };
    // These checks take longer than the grace time.
    let is_last = |_: &Call, fault| fault == Some(Fault::OF_READS[0]);
    while api_server.count(0, is_last) < 5 {
        check().await;
    }
    cluster.assert_claim_stays(&claim).await;

    api_server.heal();
    check().await;
    let nodes: Api<Node> = Api::all(cluster.admin.clone());
    nodes.delete(LOST, &DeleteParams::default()).await.unwrap();
    check().await;
    until_deleted(&cluster.claims(), "data").await;
    cluster.wait_until_removed(&volume).await;
    cluster.finish([controller]).await;
}

#[tokio::test]
async fn deleted_nodes_retained_volumes_are_kept() {
    let cluster = TestCluster::connect_with(&OPT_IN).await;
    cluster.create_node(LOST).await;
    let retain =
        json!({"spec": {"persistentVolumeReclaimPolicy": "Retain"}, "metadata": {"finalizers": null}});
    let (_, kept) = cluster.claim_on(LOST, "kept", "retain", json!({})).await;
    let (_, recorded) = cluster.claim_on(LOST, "recorded", "deleteClaim", retain).await;
    let (_, bound) = cluster.claim_on(LOST, "bound", "deleteVolume", json!({})).await;
    // This volume is released before its node is deleted, and waits for its node.
    cluster.delete_claim("kept").await;
    cluster.until_in_phase(&kept.name_any(), "Released").await;

    let controller = cluster.controller_checking_nodes(NodeLoss::Enforce).await;
    cluster.delete_node(LOST).await;
    cluster.event_about(&kept, "is kept: bring").await;
    cluster.event_about(&recorded, "is deleted, so that it can be recreated on another node").await;
    cluster.event_about(&bound, "Kubernetes removes it when its claim is deleted").await;
    until_deleted(&cluster.claims(), "recorded").await;
    cluster.event_about(&recorded, "is kept: bring").await;
    let marked = cluster.objects().get(&bound.name_any()).await.unwrap();
    assert!(marked.metadata.deletion_timestamp.is_some());
    assert!(cluster.claims().get("bound").await.unwrap().metadata.deletion_timestamp.is_none());
    cluster.delete_claim_of(&bound).await;
    for volume in [&kept, &recorded] {
        let found = cluster.objects().get(&volume.name_any()).await.unwrap();
        assert!(pv::phase(&found) == Some("Released") && found.metadata.deletion_timestamp.is_none());
    }
    // An administrator gives up the data of one volume.
    let give_up = json!({"metadata": {"annotations": {"csi.loopfs.dev/on-node-loss": "deleteVolume"}}});
    cluster.change(&cluster.objects(), &kept.name_any(), give_up).await;
    controller.stop().await;
    let controller = cluster.controller_checking_nodes(NodeLoss::Enforce).await;
    cluster.wait_until_removed(&kept).await;
    cluster.finish([controller]).await;
}

#[tokio::test]
async fn another_disk_loses_the_earlier_volumes() {
    let cluster = TestCluster::connect_with(&OPT_IN).await;
    let (_, old) = cluster.claim_on(HERE, "old", "deleteClaim", json!({})).await;
    let here = json!({"spec": {"csi": {"volumeAttributes": {"csi.loopfs.dev/filesystem-uuid": fixtures::FILESYSTEM}}}});
    let (_, present) = cluster.claim_on(HERE, "present", "deleteClaim", here).await;
    let options = Options { node_loss: NodeLoss::Enforce, ..Options::default() };
    let provisioner = cluster.provisioner_with(options).await;
    until_deleted(&cluster.claims(), "old").await;
    cluster.wait_until_removed(&old).await;
    cluster.event_about(&old, OTHER_DISK).await;
    assert!(cluster.claims().get("present").await.unwrap().metadata.deletion_timestamp.is_none());
    cluster.delete_claim_of(&present).await;
    cluster.finish([provisioner]).await;
}

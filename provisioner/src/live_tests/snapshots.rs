//! Tests of claims with a VolumeSnapshot as their data source. The tests write the objects that the snapshotter would write.

use loopfs::volume_store::{SnapshotId, VolumeId, VolumeKind};

use super::*;
use crate::objects::snapshot::{GROUP, content_resource, resource};

const DEFINITIONS: [&str; 3] = [
    include_str!("../../../csi/deploy/snapshot-controller/volumesnapshotclasses.yaml"),
    include_str!("../../../csi/deploy/snapshot-controller/volumesnapshotcontents.yaml"),
    include_str!("../../../csi/deploy/snapshot-controller/volumesnapshots.yaml"),
];

impl TestCluster {
    /// Applies the definitions of the snapshot kinds, and waits until the API server serves all of them.
    pub(super) async fn define_snapshots(&self) {
        self.opt_in(&DEFINITIONS).await;
        for objects in self.snapshot_kinds() {
            eventually(&format!("the API server serves {}", objects.resource_url()), || async {
                objects.list(&ListParams::default()).await.ok()
            })
            .await;
        }
    }

    /// Removes the definitions with all objects of these kinds, and waits until the API server does not serve them.
    pub(super) async fn remove_snapshot_definitions(&self) {
        opt_out(&DEFINITIONS, &self.admin).await;
        for objects in self.snapshot_kinds() {
            eventually(&format!("the API server does not serve {}", objects.resource_url()), || async {
                let served = objects.list(&ListParams::default()).await;
                matches!(served, Err(kube::Error::Api(status)) if status.code == 404).then_some(())
            })
            .await;
        }
    }

    fn snapshot_kinds(&self) -> [Api<DynamicObject>; 3] {
        let class = resource("VolumeSnapshotClass", "volumesnapshotclasses");
        let kinds = [class, content_resource(), resource("VolumeSnapshot", "volumesnapshots")];
        kinds.map(|kind| Api::all_with(self.admin.clone(), &kind))
    }

    fn snapshots(&self) -> Api<DynamicObject> {
        let kind = resource("VolumeSnapshot", "volumesnapshots");
        Api::namespaced_with(self.admin.clone(), &self.namespace, &kind)
    }
}

/// Creates an object with its status, as a user and the snapshotter write it.
async fn create_with_status(api: &Api<DynamicObject>, name: &str, object: Value) -> DynamicObject {
    let status = json!({"status": object["status"]});
    let created = create(api, object).await;
    api.patch_status(name, &PatchParams::default(), &Patch::Merge(status)).await.unwrap();
    created
}

#[tokio::test]
async fn claim_is_copied_from_a_snapshot() {
    let cluster = TestCluster::connect().await;
    let provisioner = cluster.provisioner().await;
    let from = |snapshot: &str| json!({"spec": {"dataSource": {"apiGroup": GROUP, "kind": "VolumeSnapshot", "name": snapshot}}});
    cluster.claim("early", from("before")).await;
    cluster.event_that("early", "ProvisioningFailed", "the cluster has no VolumeSnapshots").await;

    cluster.define_snapshots().await;
    let snapshots = cluster.snapshots();
    let contents: Api<DynamicObject> = Api::all_with(cluster.admin.clone(), &content_resource());
    let handle = SnapshotId::parse(&format!("snapshot-{}", cluster.namespace)).unwrap();
    cluster.volumes.state().snapshots.insert(handle.clone(), VolumeKind::Filesystem);
    let snapshot = |name: &str| {
        json!({
            "apiVersion": "snapshot.storage.k8s.io/v1", "kind": "VolumeSnapshot", "metadata": {"name": name},
            "spec": {"source": {"persistentVolumeClaimName": "data"}},
            "status": {"boundVolumeSnapshotContentName": &cluster.namespace, "readyToUse": true, "restoreSize": "1Mi"},
        })
    };
    let before = create_with_status(&snapshots, "before", snapshot("before")).await;
    let content = json!({
        "apiVersion": "snapshot.storage.k8s.io/v1", "kind": "VolumeSnapshotContent",
        "metadata": {"name": &cluster.namespace},
        "spec": {
            "driver": fixtures::identity().driver(), "deletionPolicy": "Delete", "sourceVolumeMode": "Filesystem",
            "source": {"volumeHandle": "pvc-data"},
            "volumeSnapshotRef": {"name": "before", "namespace": &cluster.namespace, "uid": before.uid()},
        },
        "status": {"snapshotHandle": handle.as_str(), "readyToUse": true},
    });
    create_with_status(&contents, &cluster.namespace, content).await;

    cluster.claim("restored", from("before")).await;
    let restored = cluster.bound("restored").await;
    let id = VolumeId::parse(&restored.name_any()).unwrap();
    let source = cluster.volumes.state().copies.get(&id).cloned();
    assert_eq!(source, Some(format!("snapshot {handle}")));
    // The earlier claim is retried.
    cluster.bound("early").await;

    // This VolumeSnapshot of one user names the content of another user.
    create_with_status(&snapshots, "stolen", snapshot("stolen")).await;
    cluster.claim("thief", from("stolen")).await;
    cluster.event_that("thief", "ProvisioningFailed", "of another VolumeSnapshot").await;
    let mut device = from("before");
    device["spec"]["volumeMode"] = json!("Block");
    cluster.claim("device", device).await;
    cluster.event_that("device", "ProvisioningFailed", "volumeMode is \"Filesystem\"").await;

    for claim in ["thief", "device", "early", "restored"] {
        cluster.delete_claim(claim).await;
    }
    until_deleted(&cluster.objects(), id.as_str()).await;
    provisioner.stop().await;
    cluster.remove_snapshot_definitions().await;
    cluster.finish([]).await;
}

#[tokio::test]
async fn snapshot_size_is_a_quantity() {
    let cluster = TestCluster::connect().await;
    cluster.define_snapshots().await;
    let snapshots = cluster.snapshots();
    let snapshot = json!({
        "apiVersion": "snapshot.storage.k8s.io/v1", "kind": "VolumeSnapshot", "metadata": {"name": "s"},
        "spec": {"source": {"persistentVolumeClaimName": "data"}},
    });
    create(&snapshots, snapshot).await;
    let record = async |size: Value| {
        let patch = Patch::Merge(json!({"status": {"restoreSize": size}}));
        snapshots.patch_status("s", &PatchParams::default(), &patch).await
    };
    for size in [json!("1Mi"), json!("1.5e3"), json!(1 << 20)] {
        record(size).await.unwrap();
    }
    for size in [json!("large"), json!("1 Mi"), json!("1mi"), json!("")] {
        let refused = record(size.clone()).await.unwrap_err().to_string();
        assert!(refused.contains("status.restoreSize"), "{size}: {refused}");
    }
    cluster.remove_snapshot_definitions().await;
    cluster.finish([]).await;
}

//! Tests of expanding Block volumes, with and without a CSI driver that refreshes the devices.

use super::*;

#[tokio::test]
async fn refreshed_block_claim_is_resized() {
    let cluster = TestCluster::connect().await;
    cluster.volumes.state().refreshed = true;
    let provisioner = cluster.provisioner().await;
    cluster.claim("refreshed", json!({"spec": {"volumeMode": "Block"}})).await;
    cluster.bound("refreshed").await;
    let expanded = cluster.expand("refreshed", "4Mi").await;
    assert_eq!((ResizeStatus::of(&expanded), conditions(&expanded)), (None, vec![]));
    cluster.event("refreshed", "VolumeResizeSuccessful").await;
    cluster.finish([provisioner]).await;
}

#[tokio::test]
async fn kubelet_finishes_unrefreshed_block_claim() {
    let cluster = TestCluster::connect().await;
    let provisioner = cluster.provisioner().await;
    cluster.claim("disk", json!({"spec": {"volumeMode": "Block"}})).await;
    cluster.bound("disk").await;
    cluster.request_size("disk", "4Mi").await;
    let pending = |claim: &PersistentVolumeClaim| ResizeStatus::of(claim) == Some(ResizeStatus::NodePending);
    let claim = until(&cluster.claims(), "disk", pending).await;
    assert_eq!(size_of(&claim), Some(Bytes(MIB)), "only the kubelet sets this");
    assert_eq!(conditions(&claim), ["FileSystemResizePending"]);
    let volume = cluster.bound("disk").await;
    assert_eq!(recorded(volume.spec.as_ref().unwrap().capacity.as_ref()), Some(Bytes(4 * MIB)));
    cluster.event("disk", "FileSystemResizeRequired").await;

    // No pod uses the claim yet, and its request increases.
    cluster.request_size("disk", "6Mi").await;
    eventually("expanded further", || async {
        (cluster.volumes.capacity(&volume.name_any()) == Some(Bytes(6 * MIB))).then_some(())
    })
    .await;

    // A kubelet writes this once a pod uses the volume.
    until(&cluster.claims(), "disk", pending).await;
    let done = json!({"status": {
        "capacity": {"storage": "6Mi"}, "allocatedResourceStatuses": {"storage": null}, "conditions": [],
    }});
    cluster.claims().patch_status("disk", &PatchParams::default(), &Patch::Merge(done)).await.unwrap();
    cluster.delete_claim_of(&volume).await;
    cluster.finish([provisioner]).await;
}

//! Tests of the data of claims and PersistentVolumes that are deleted.

use super::*;

#[tokio::test]
async fn retained_volume_keeps_its_data() {
    let cluster = TestCluster::connect().await;
    let provisioner = cluster.provisioner().await;
    cluster.claim("kept", json!({})).await;
    let volume = cluster.bound("kept").await;
    cluster.retain(&volume.name_any()).await;
    let free =
        |volume: &PersistentVolume| volume.finalizers().iter().all(|name| name.starts_with("kubernetes.io/"));
    until(&cluster.objects(), &volume.name_any(), free).await;
    cluster.delete_claim("kept").await;
    cluster.until_in_phase(&volume.name_any(), "Released").await;
    let note = format!("volume {} on file system {}", volume.name_any(), fixtures::FILESYSTEM);
    cluster.event_in("default", &volume.name_any(), "VolumeRetained", &note).await;
    cluster.objects().delete(&volume.name_any(), &DeleteParams::default()).await.unwrap();
    cluster.wait_until_removed(&volume).await;
    assert_eq!(cluster.volumes.capacity(&volume.name_any()), Some(Bytes(MIB)));
    cluster.finish([provisioner]).await;
}

/// The class retains the data, and a second claim has it before it is deleted.
#[tokio::test]
async fn available_volume_is_deleted() {
    let cluster = TestCluster::connect().await;
    let provisioner = cluster.provisioner().await;
    let class = cluster.another_class("retaining", json!({"reclaimPolicy": "Retain"})).await;
    cluster.claim("data", json!({"spec": {"storageClassName": class}})).await;
    let volume = cluster.bound("data").await;
    assert!(!pv::has_delete_policy(&volume) && !pv::has_finalizer(&volume), "{volume:?}");
    let name = volume.name_any();
    let change = async |spec: Value| cluster.change(&cluster.objects(), &name, json!({"spec": spec})).await;
    cluster.delete_claim("data").await;
    cluster.until_in_phase(&name, "Released").await;
    change(json!({"claimRef": null})).await;
    cluster.until_in_phase(&name, "Available").await;

    // The scheduler selects no node for a claim that names its volume.
    let another = json!({
        "metadata": {"annotations": null}, "spec": {"storageClassName": class, "volumeName": name},
    });
    cluster.claim("another", another).await;
    let claim = ownership::bound_claim(&cluster.bound("another").await);
    assert_eq!(claim.and_then(|claim| claim.name).as_deref(), Some("another"));
    cluster.delete_claim("another").await;
    cluster.until_in_phase(&name, "Released").await;
    change(json!({"claimRef": null})).await;
    cluster.until_in_phase(&name, "Available").await;
    change(json!({"persistentVolumeReclaimPolicy": "Delete"})).await;
    until(&cluster.objects(), &name, pv::has_finalizer).await;
    assert_eq!(cluster.volumes.state().volumes.len(), 1);

    cluster.objects().delete(&name, &DeleteParams::default()).await.unwrap();
    until_deleted(&cluster.objects(), &name).await;
    assert!(cluster.volumes.state().volumes.is_empty());
    cluster.finish([provisioner]).await;
}

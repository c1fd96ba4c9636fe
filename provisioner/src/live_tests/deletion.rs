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
    let phase = |volume: &PersistentVolume| volume.status.as_ref()?.phase.clone();
    until(&cluster.objects(), &volume.name_any(), |volume| phase(volume).as_deref() == Some("Released"))
        .await;
    let note = format!("volume {} on file system {}", volume.name_any(), fixtures::FILESYSTEM);
    cluster.event_in("default", &volume.name_any(), "VolumeRetained", &note).await;
    cluster.objects().delete(&volume.name_any(), &DeleteParams::default()).await.unwrap();
    cluster.wait_until_deleted(&cluster.objects(), &volume.name_any()).await;
    assert_eq!(cluster.volumes.capacity(&volume.name_any()), Some(Bytes(MIB)));
    cluster.finish([provisioner]).await;
}

#[tokio::test]
async fn available_volume_is_deleted() {
    let cluster = TestCluster::connect().await;
    let provisioner = cluster.provisioner().await;
    cluster.claim("data", json!({})).await;
    let name = cluster.bound("data").await.name_any();
    let patch = async |change: Value| {
        cluster.objects().patch(&name, &PatchParams::default(), &Patch::Merge(change)).await.unwrap()
    };
    let in_phase = async |wanted: &str| {
        let phase = |volume: &PersistentVolume| volume.status.as_ref()?.phase.clone();
        until(&cluster.objects(), &name, |volume| phase(volume).as_deref() == Some(wanted)).await
    };
    patch(json!({"spec": {"persistentVolumeReclaimPolicy": "Retain"}})).await;
    cluster.delete_claim("data").await;
    in_phase("Released").await;
    patch(json!({"spec": {"claimRef": null}})).await;
    in_phase("Available").await;
    patch(json!({"spec": {"persistentVolumeReclaimPolicy": "Delete"}})).await;
    until(&cluster.objects(), &name, is_held).await;
    assert_eq!(cluster.volumes.state().volumes.len(), 1);

    cluster.objects().delete(&name, &DeleteParams::default()).await.unwrap();
    cluster.wait_until_deleted(&cluster.objects(), &name).await;
    assert!(cluster.volumes.state().volumes.is_empty());
    cluster.finish([provisioner]).await;
}

#[tokio::test]
async fn second_persistent_volume_keeps_the_data() {
    let cluster = TestCluster::connect().await;
    let provisioner = cluster.provisioner().await;
    cluster.claim("data", json!({})).await;
    let name = cluster.bound("data").await.name_any();
    // As a person creates it: without the label.
    let second = format!("second-{}", cluster.namespace);
    let object = json!({
        "metadata": {"name": second},
        "spec": {
            "accessModes": ["ReadWriteOnce"], "capacity": {"storage": "1Mi"},
            "csi": {"driver": fixtures::identity().driver(), "volumeHandle": name},
            "persistentVolumeReclaimPolicy": "Retain",
        },
    });
    create(&cluster.objects(), object).await;
    cluster.delete_claim("data").await;
    cluster.event_in("default", &name, "VolumeFailedDelete", &second).await;
    assert_eq!(cluster.volumes.state().volumes.len(), 1);

    cluster.objects().delete(&second, &DeleteParams::default()).await.unwrap();
    cluster.wait_until_deleted(&cluster.objects(), &name).await;
    assert!(cluster.volumes.state().volumes.is_empty());
    cluster.finish([provisioner]).await;
}

#[tokio::test]
async fn volume_in_use_is_not_deleted() {
    let cluster = TestCluster::connect().await;
    let provisioner = cluster.provisioner().await;
    cluster.claim("busy", json!({})).await;
    let volume = cluster.bound("busy").await;
    cluster.volumes.state().busy = true;
    cluster.delete_claim("busy").await;
    cluster.event_in("default", &volume.name_any(), "VolumeFailedDelete", "").await;
    assert_eq!(cluster.volumes.state().volumes.len(), 1);
    cluster.volumes.state().busy = false;
    cluster.wait_until_deleted(&cluster.objects(), &volume.name_any()).await;
    cluster.finish([provisioner]).await;
}

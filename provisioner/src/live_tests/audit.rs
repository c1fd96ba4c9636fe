//! Tests of the audit: it reports orphaned and missing volumes, and removes orphaned ones if that is requested.

use loopfs::volume_store::VolumeId;

use super::*;
use crate::node::audit::{AuditSettings, Collection};
use crate::restore;

pub(super) fn auditing(collect_after: Option<Duration>) -> Options {
    let collection = collect_after.map(|after| Collection { after, at_most_percent: 100 });
    let settings = AuditSettings { interval: Duration::from_millis(50), collection };
    Options { audit: Some(settings), ..Options::default() }
}

impl TestCluster {
    /// Creates a volume in the store that no PersistentVolume names.
    pub(super) fn create_orphan(&self, suffix: &str) -> VolumeId {
        self.volumes.add(&format!("pvc-{}-{suffix}", self.namespace))
    }

    /// Creates a PersistentVolume as an administrator would, without the label of this node.
    pub(super) async fn object(&self, id: &str, change: Value) -> PersistentVolume {
        let mut object = json!({
            "metadata": {"name": id},
            "spec": {
                "accessModes": ["ReadWriteOnce"], "capacity": {"storage": "1Mi"},
                "csi": {"driver": fixtures::identity().driver(), "volumeHandle": id},
                "persistentVolumeReclaimPolicy": "Retain",
            },
        });
        fixtures::merge(&mut object, change);
        create(&self.objects(), object).await
    }

    /// Waits until the metrics report these numbers of findings.
    pub(super) async fn found(&self, provisioner: &Provisioner, orphans: usize, missing: usize) {
        let line =
            |finding, count| format!("loopfs_provisioner_audit_findings{{finding=\"{finding}\"}} {count}");
        let lines = [line("volume_without_pv", orphans), line("pv_without_volume", missing)];
        provisioner.until_metrics(&lines).await;
    }

    pub(super) async fn remove_objects(&self, names: &[&str]) {
        for name in names {
            self.objects().delete(name, &DeleteParams::default()).await.unwrap();
            until_deleted(&self.objects(), name).await;
        }
    }
}

#[tokio::test]
async fn audit_reports_and_deletes_nothing() {
    let cluster = TestCluster::connect().await;
    let orphan = cluster.create_orphan("orphan");
    // Its disk was on another node before.
    let moved = cluster.create_orphan("moved");
    let label = fixtures::identity().node_label();
    let lost = format!("pvc-{}-lost", cluster.namespace);
    let theirs = format!("pvc-{}-theirs", cluster.namespace);
    cluster.object(&lost, json!({"metadata": {"labels": {&label: HERE}}})).await;
    cluster.object(&theirs, json!({"metadata": {"labels": {&label: THERE}}})).await;
    cluster.object(moved.as_str(), json!({"metadata": {"labels": {&label: THERE}}})).await;
    let provisioner = cluster.provisioner_with(auditing(None)).await;
    cluster.claim("data", json!({})).await;
    let volume = cluster.bound("data").await;

    cluster.found(&provisioner, 1, 1).await;
    assert!(cluster.event_in("default", &lost, "VolumeMissing", "there is no volume").await.contains(HERE));
    cluster.event_in("default", HERE, "OrphanedVolumes", orphan.as_str()).await;
    assert!(cluster.volumes.capacity(orphan.as_str()).is_some());

    // A PersistentVolume of another name, which an administrator created, names the volume.
    let adopted = format!("adopted-{}", cluster.namespace);
    cluster.object(&adopted, json!({"spec": {"csi": {"volumeHandle": orphan.as_str()}}})).await;
    cluster.found(&provisioner, 0, 1).await;

    // A volume that is being deleted is neither missing nor orphaned.
    cluster.delete_claim_of(&volume).await;
    cluster.remove_objects(&[&lost]).await;
    cluster.found(&provisioner, 0, 0).await;
    cluster.remove_objects(&[&theirs, &adopted, moved.as_str()]).await;
    cluster.finish([provisioner]).await;
}

/// The cluster is new: it has the claims' namespace, none of the objects, and another UID for the node.
#[tokio::test]
async fn restored_objects_bind_their_data() {
    let cluster = TestCluster::connect().await;
    let ids = [cluster.create_orphan("a"), cluster.create_orphan("b")];
    let listed = [("a", &ids[0]), ("b", &ids[1])]
        .map(|(name, id)| restore::tests::listed(id.as_str(), &cluster.namespace, name, &cluster.class));
    let (list, notes) = restore::tests::restored(&listed);
    assert_eq!(notes, Vec::<String>::new());
    cluster.volumes.state().custody = Some(CustodyRecord::of_empty_disk("earlier"));
    let provisioner = cluster.provisioner_with(auditing(Some(Duration::ZERO))).await;
    // The volumes have no objects yet.
    cluster.event_in("default", HERE, "OrphanedVolumesKept", ids[1].as_str()).await;
    for item in list["items"].as_array().unwrap() {
        match item["kind"].as_str().unwrap() {
            "PersistentVolume" => drop(create(&cluster.objects(), item.clone()).await),
            _ => drop(create(&cluster.claims(), item.clone()).await),
        }
    }
    for (name, id) in [("a", &ids[0]), ("b", &ids[1])] {
        assert_eq!(cluster.bound(name).await.name_any(), id.as_str());
    }
    cluster.delete_claim("a").await;
    cluster.event_in("default", ids[0].as_str(), "VolumeRetained", "").await;
    cluster.found(&provisioner, 0, 0).await;
    for id in &ids {
        assert!(cluster.volumes.capacity(id.as_str()).is_some(), "{id}");
    }
    cluster.delete_claim("b").await;
    provisioner.stop().await;
    cluster.remove_objects(&[ids[0].as_str(), ids[1].as_str()]).await;
    cluster.finish([]).await;
}

/// Their PersistentVolumes may have been deleted while the node was deleted, or while the disk was elsewhere.
#[tokio::test]
async fn registered_again_node_keeps_its_volumes() {
    let cluster = TestCluster::connect().await;
    let node = Api::<Node>::all(cluster.admin.clone()).get_metadata(HERE).await.unwrap();
    cluster.volumes.state().custody = Some(CustodyRecord::of_empty_disk("earlier"));
    let before = cluster.create_orphan("before");
    let provisioner = cluster.provisioner_with(auditing(Some(Duration::ZERO))).await;
    cluster.event_in("default", HERE, "OrphanedVolumesKept", before.as_str()).await;
    let record = cluster.volumes.state().custody.clone().unwrap();
    assert_eq!((Some(&record.node_uid), record.custody.keeps(&before)), (node.uid().as_ref(), true));
    let since = cluster.create_orphan("since");
    cluster.event_in("default", HERE, "VolumeDeleted", since.as_str()).await;
    assert!(cluster.volumes.capacity(before.as_str()).is_some());
    cluster.finish([provisioner]).await;
}

#[tokio::test]
async fn orphaned_volumes_are_removed_if_requested() {
    let cluster = TestCluster::connect().await;
    let (orphan, adopted) = (cluster.create_orphan("orphan"), cluster.create_orphan("adopted"));
    let foreign = cluster.volumes.add(&format!("csi-{}", cluster.namespace));
    let object = format!("adopted-{}", cluster.namespace);
    cluster.object(&object, json!({"spec": {"csi": {"volumeHandle": adopted.as_str()}}})).await;
    // A claim is being provisioned: its volume exists, its PersistentVolume does not exist yet.
    let refused = json!({"metadata": {"annotations": {ownership::SELECTED_NODE: THERE}}});
    let waiting = cluster.claim("waiting", refused).await;
    let pending = cluster.volumes.add(&format!("pvc-{}", waiting.uid().unwrap()));

    let keeps = cluster.provisioner_with(auditing(Some(TIMEOUT * 100))).await;
    cluster.found(&keeps, 3, 0).await;
    keeps.stop().await;
    assert_eq!(cluster.volumes.state().volumes.len(), 4, "the grace time has not passed");

    cluster.volumes.state().pending.insert(pending.clone(), ClaimRecord::of(&waiting));
    cluster.select("waiting", HERE).await;
    let provisioner = cluster.provisioner_with(auditing(Some(Duration::ZERO))).await;
    cluster.event_in("default", HERE, "VolumeDeleted", orphan.as_str()).await;
    assert_eq!(cluster.volumes.capacity(orphan.as_str()), None);
    assert_eq!(cluster.bound("waiting").await.name_any(), pending.as_str());
    cluster.found(&provisioner, 1, 0).await;
    for id in [&adopted, &foreign, &pending] {
        assert!(cluster.volumes.capacity(id.as_str()).is_some(), "{id}");
    }
    cluster.delete_claim("waiting").await;
    until_deleted(&cluster.objects(), pending.as_str()).await;
    cluster.remove_objects(&[&object]).await;
    cluster.finish([provisioner]).await;
}

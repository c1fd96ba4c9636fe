//! Tests of claims whose data source belongs to a volume populator. The tests do what the populator would do.

use super::audit::auditing;
use super::*;

#[tokio::test]
async fn populator_hands_its_volume_over() {
    let cluster = TestCluster::connect().await;
    let provisioner = cluster.provisioner_with(auditing(None)).await;
    let source = json!({"apiGroup": "example.com", "kind": "Backup", "name": "monday"});
    cluster.claim("data", json!({"spec": {"dataSourceRef": source}})).await;
    cluster.event_that("data", "Provisioning", "Backup \"monday\"").await;

    cluster.claim("of-the-populator", json!({})).await;
    let volume = cluster.bound("of-the-populator").await;
    let claim = cluster.claims().get("data").await.unwrap();
    let handed_over = json!({"spec": {"claimRef": {
        "namespace": cluster.namespace, "name": "data", "uid": claim.uid(), "resourceVersion": claim.resource_version(),
    }}});
    let patch = Patch::Strategic(handed_over);
    cluster.objects().patch(&volume.name_any(), &PatchParams::default(), &patch).await.unwrap();
    assert_eq!(cluster.bound("data").await.name_any(), volume.name_any());
    cluster.delete_claim("of-the-populator").await;
    until_deleted(&cluster.claims(), "of-the-populator").await;

    cluster.expand("data", "2Mi").await;
    assert_eq!(cluster.volumes.capacity(&volume.name_any()), Some(Bytes(2 * MIB)));
    // The audit finds nothing but a volume that was not handed over.
    let orphan = cluster.create_orphan("orphan");
    cluster.found(&provisioner, 1, 0).await;
    cluster.volumes.state().volumes.remove(&orphan);
    cluster.delete_claims(&["data"]).await;
    cluster.finish([provisioner]).await;
}

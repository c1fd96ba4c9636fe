//! Tests with two nodes and a real scheduler.

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::storage::v1::CSIStorageCapacity;

use super::controllers::ONLY_PLACEMENT;
use super::*;
use crate::objects::ownership::SELECTED_NODE;

fn store_of_mebibytes(mebibytes: u64) -> Arc<FakeStore> {
    Arc::new(FakeStore::of_size(Bytes(mebibytes * MIB)))
}

pub(super) fn allowing(node: &str) -> Value {
    json!([{"matchLabelExpressions": [{"key": "topology.csi.loopfs.dev/node", "values": [node]}]}])
}

fn of_size(size: &str) -> Value {
    json!({"spec": {"resources": {"requests": {"storage": size}}}})
}

fn is_rescheduled(claim: &PersistentVolumeClaim) -> bool {
    ownership::selected_node(claim).is_none()
}

fn node_of(volume: &PersistentVolume) -> String {
    volume.labels()["csi.loopfs.dev/node"].clone()
}

impl TestCluster {
    /// Starts a provisioner here, and one with its own store on the other node.
    async fn provisioners(&self, there: &Arc<FakeStore>) -> [Provisioner; 2] {
        [self.provisioner().await, self.provisioner_on(THERE, there, Options::default()).await]
    }

    /// Creates a claim without a selected node.
    pub(super) async fn unplaced(&self, name: &str, class: &str, size: &str) -> PersistentVolumeClaim {
        let mut change = of_size(size);
        fixtures::merge_keeping_nulls(
            &mut change,
            json!({"metadata": {"annotations": null}, "spec": {"storageClassName": class}}),
        );
        self.claim(name, change).await
    }

    fn pods(&self) -> Api<Pod> {
        Api::namespaced(self.admin.clone(), &self.namespace)
    }

    /// Creates a pod that uses the claim of the same name. The nodes have no kubelet, so the pod tolerates their taints.
    async fn pod(&self, name: &str) {
        let pod: Pod = serde_json::from_value(json!({
            "metadata": {"name": name},
            "spec": {
                "containers": [{"name": "c", "image": "none"}],
                "tolerations": [{"operator": "Exists"}],
                "volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": name}}],
            },
        }))
        .unwrap();
        // A new namespace gets its service account after a moment, and accepts no pods before.
        eventually("the pod is created", || async {
            self.pods().create(&PostParams::default(), &pod).await.ok()
        })
        .await;
    }

    async fn remove(&self, name: &str) {
        self.pods().delete(name, &DeleteParams::default().grace_period(0)).await.unwrap();
        self.delete_claim(name).await;
    }

    fn capacities(&self) -> Api<CSIStorageCapacity> {
        Api::namespaced(self.admin.clone(), SYSTEM)
    }

    async fn capacity(&self, node: &str) -> Option<CSIStorageCapacity> {
        let selector = ListParams::default().labels(&format!("csi.loopfs.dev/node={node}"));
        let published = self.capacities().list(&selector).await.unwrap();
        published.into_iter().find(|object| object.storage_class_name == self.class)
    }

    async fn publishes(&self, node: &str, capacity: Option<&str>) {
        eventually(&format!("{node} publishes {capacity:?}"), || async {
            let published = self.capacity(node).await.and_then(|object| object.capacity);
            (published.as_ref().map(|quantity| quantity.0.as_str()) == capacity).then_some(())
        })
        .await;
    }
}

#[tokio::test]
async fn ambiguous_immediate_claim_awaits_corrected_class() {
    let cluster = TestCluster::connect().await;
    let there = store_of_mebibytes(64);
    let provisioners = cluster.provisioners(&there).await;
    let controller = cluster.controller(ONLY_PLACEMENT).await;
    let class = cluster.another_class("any", json!({"volumeBindingMode": "Immediate"})).await;
    cluster.unplaced("torn", &class, "1Mi").await;
    cluster.event_that("torn", "ProvisioningFailed", "2 nodes may provide a volume").await;
    assert!(cluster.volumes.state().volumes.is_empty() && there.state().volumes.is_empty());

    let corrected = json!({"allowedTopologies": allowing(THERE)});
    let classes: Api<StorageClass> = Api::all(cluster.admin.clone());
    cluster.change(&classes, &class, corrected).await;
    let volume = cluster.bound("torn").await;
    assert_eq!(node_of(&volume), THERE);
    assert_eq!(there.capacity(&volume.name_any()), Some(Bytes(MIB)));
    assert!(cluster.volumes.state().volumes.is_empty());
    // The controller selected the node.
    cluster.expand("torn", "2Mi").await;
    cluster.delete_claim_of(&volume).await;
    cluster.finish(provisioners.into_iter().chain([controller])).await;
}

#[tokio::test]
async fn disallowed_node_does_not_provision() {
    let cluster = TestCluster::connect().await;
    let provisioner = cluster.provisioner().await;
    let class = cluster.another_class("there", json!({"allowedTopologies": allowing(THERE)})).await;
    cluster.claim("misplaced", json!({"spec": {"storageClassName": class}})).await;
    cluster.event_that("misplaced", "ProvisioningFailed", "do not allow node \"node-a\"").await;
    assert!(cluster.volumes.state().volumes.is_empty());
    cluster.finish([provisioner]).await;
}

#[tokio::test]
async fn too_large_claim_is_rescheduled() {
    let cluster = TestCluster::connect().await;
    let there = store_of_mebibytes(64);
    let provisioners = cluster.provisioners(&there).await;
    cluster.claim("large", of_size("100Mi")).await;
    until(&cluster.claims(), "large", is_rescheduled).await;
    let text = "67108864 available; the provisioner removed the selected node";
    cluster.event_that("large", "ProvisioningFailed", text).await;

    there.state().size = Bytes(200 * MIB);
    cluster.select("large", THERE).await;
    assert_eq!(node_of(&cluster.bound("large").await), THERE);
    // The attempt leaves nothing behind.
    until_none_pending(&cluster.volumes).await;
    assert!(cluster.volumes.state().volumes.is_empty());
    cluster.delete_claim("large").await;
    until_empty(&there).await;
    cluster.finish(provisioners).await;
}

#[tokio::test]
async fn scheduler_selects_node_with_enough_capacity() {
    let cluster = TestCluster::connect().await;
    cluster.volumes.state().size = Bytes(0);
    let there = store_of_mebibytes(64);
    let provisioners = cluster.provisioners(&there).await;
    cluster.publishes("node-a", Some("0")).await;
    cluster.publishes(THERE, Some("64Mi")).await;
    cluster.unplaced("first", &cluster.class, "60Mi").await;
    cluster.pod("first").await;
    assert_eq!(node_of(&cluster.bound("first").await), THERE);
    cluster.publishes(THERE, Some("4Mi")).await;

    // No node has enough free capacity until the first claim is deleted.
    cluster.unplaced("second", &cluster.class, "60Mi").await;
    cluster.pod("second").await;
    // Earlier events may say that the scheduler has not received the claim yet.
    cluster.event_that("second", "FailedScheduling", "enough free storage").await;
    cluster.remove("first").await;
    assert_eq!(node_of(&cluster.bound("second").await), THERE);
    cluster.remove("second").await;
    cluster.publishes(THERE, Some("64Mi")).await;
    cluster.finish(provisioners).await;
}

#[tokio::test]
async fn published_capacity_follows_free_capacity() {
    let cluster = TestCluster::connect().await;
    let provisioner = cluster.provisioner().await;
    cluster.publishes("node-a", Some("64Mi")).await;
    let object = cluster.capacity("node-a").await.unwrap();
    assert_eq!(object.owner_references()[0].kind, "Pod");
    let largest = object.maximum_volume_size.clone().unwrap();

    // A claim of exactly that size is provisioned.
    cluster.claim("all", of_size(&largest.0)).await;
    cluster.bound("all").await;
    cluster.publishes("node-a", Some("64Ki")).await;
    cluster.delete_claim("all").await;
    cluster.publishes("node-a", Some("64Mi")).await;

    let name = object.name_any();
    cluster.change(&cluster.capacities(), &name, json!({"capacity": "1Ei"})).await;
    cluster.publishes("node-a", Some("64Mi")).await;
    cluster.capacities().delete(&name, &DeleteParams::default()).await.unwrap();
    cluster.publishes("node-a", Some("64Mi")).await;

    let classes: Api<StorageClass> = Api::all(cluster.admin.clone());
    for (allowed, capacity) in [(THERE, None), (HERE, Some("64Mi"))] {
        let change = json!({"allowedTopologies": allowing(allowed)});
        cluster.change(&classes, &cluster.class, change).await;
        cluster.publishes("node-a", capacity).await;
    }
    cluster.finish([provisioner]).await;
}

#[tokio::test]
async fn claim_is_copied_beside_its_source() {
    let cluster = TestCluster::connect().await;
    let there = store_of_mebibytes(64);
    let provisioners = cluster.provisioners(&there).await;
    let copy_of = |source: &str, size: &str| {
        let source = json!({"kind": "PersistentVolumeClaim", "name": source});
        json!({"spec": {"dataSource": source, "resources": {"requests": {"storage": size}}}})
    };
    // The claim is created before its data source.
    cluster.claim("copy", copy_of("original", "2Mi")).await;
    cluster.event_that("copy", "ProvisioningFailed", "claim \"original\", does not exist").await;
    cluster.claim("original", json!({})).await;
    let original = cluster.bound("original").await;
    let copy = cluster.bound("copy").await;
    let id = |volume: &PersistentVolume| loopfs::volume_store::VolumeId::parse(&volume.name_any()).unwrap();
    let source = format!("volume {}", id(&original));
    assert_eq!(cluster.volumes.state().copies.get(&id(&copy)), Some(&source));
    assert_eq!(cluster.volumes.capacity(&copy.name_any()), Some(Bytes(2 * MIB)));

    cluster.claim("small", copy_of("copy", "1Mi")).await;
    cluster.event_that("small", "ProvisioningFailed", "at least as much").await;

    let mut misplaced = copy_of("original", "1Mi");
    misplaced["metadata"] = json!({"annotations": {SELECTED_NODE: THERE}});
    cluster.claim("misplaced", misplaced).await;
    until(&cluster.claims(), "misplaced", is_rescheduled).await;
    let text = cluster
        .event_that("misplaced", "ProvisioningFailed", "removed the selected node from the claim")
        .await;
    assert!(text.contains("on node \"node-a\""), "{text}");
    cluster.select("misplaced", HERE).await;
    assert_eq!(node_of(&cluster.bound("misplaced").await), HERE);
    assert!(there.state().volumes.is_empty());

    cluster.delete_claims(&["small", "misplaced", "copy", "original"]).await;
    cluster.finish(provisioners).await;
}

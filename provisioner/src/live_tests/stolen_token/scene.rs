//! Claims, volumes, capacities and events of this node, of another node and of another driver.

use std::collections::BTreeMap;

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::storage::v1::CSIStorageCapacity;
use loopfs::volume_store::{VolumeId, VolumeKind};

use super::super::*;
use super::request::TargetResource;
use crate::api::hash::fnv1a;
use crate::objects::loss_policy::Policy;
use crate::objects::ownership::{SELECTED_NODE, STORAGE_PROVISIONER};
use crate::objects::pv::{self, Description, ReclaimPolicy};

/// The label with the node of a PersistentVolume, a claim or a capacity.
pub(super) const NODE_LABEL: &str = "csi.loopfs.dev/node";
const NODES: [&str; 2] = ["node-a", "node-b"];
pub(super) const DRIVER: &str = "csi.loopfs.dev";
pub(super) const OTHER_DRIVER: &str = "csi.other.dev";
pub(super) const LEASE: &str = "loopfs-controller";

/// The objects in the cluster. Claims and volumes have the name of the claim as key, capacities and events that of their owner.
pub(super) struct Scene {
    /// The node that the attacker controls.
    pub(super) here: &'static str,
    pub(super) there: &'static str,
    pub(super) namespace: String,
    pub(super) class: String,
    pub(super) other_class: String,
    claims: BTreeMap<&'static str, PersistentVolumeClaim>,
    volumes: BTreeMap<&'static str, Value>,
    pub(super) capacities: BTreeMap<&'static str, Value>,
    pub(super) events: BTreeMap<&'static str, Value>,
    pub(super) lease: Value,
}

impl Scene {
    /// Creates the objects. `node` is the node that the attacker controls.
    pub(super) async fn set(cluster: &TestCluster, node: &str) -> Self {
        let other = json!({"provisioner": OTHER_DRIVER});
        let (here, there) = match NODES {
            [first, second] if first == node => (first, second),
            [first, second] => (second, first),
        };
        let mut scene = Scene {
            here,
            there,
            namespace: cluster.namespace.clone(),
            class: cluster.class.clone(),
            other_class: cluster.another_class("other", other.clone()).await,
            claims: BTreeMap::new(),
            volumes: BTreeMap::new(),
            capacities: BTreeMap::new(),
            events: BTreeMap::new(),
            lease: lease(cluster).await,
        };
        let immediate = json!({"volumeBindingMode": "Immediate"});
        let now = cluster.another_class("now", immediate.clone()).await;
        let mut other_now = other;
        fixtures::merge(&mut other_now, immediate);
        let other_now = cluster.another_class("other-now", other_now).await;
        let other = scene.other_class.clone();
        let selecting = |class: &str, node: Option<&str>| {
            json!({
                "metadata": {"annotations": {SELECTED_NODE: node}}, "spec": {"storageClassName": class},
            })
        };
        let own = scene.class.clone();
        for (name, class, node) in [
            ("waiting-own", &own, Some(here)),
            ("waiting-theirs", &own, Some(there)),
            ("waiting-other", &other, Some(here)),
            ("waiting-unplaced", &now, None),
            ("waiting-other-unplaced", &other_now, None),
        ] {
            scene.claim(cluster, name, selecting(class, node)).await;
        }
        // kube-controller-manager requests no volume for this claim from a driver.
        scene.claims.insert("without-class", cluster.claim("without-class", selecting("", None)).await);
        scene.claim(cluster, "returned", selecting(&own, Some(here))).await;
        let unselected = Patch::Merge(selecting(&own, None));
        cluster.claims().patch("returned", &PatchParams::default(), &unselected).await.unwrap();
        for (name, class, selected, driver, node) in [
            ("bound-own", &own, Some(here), DRIVER, here),
            ("bound-theirs", &own, Some(there), DRIVER, there),
            ("bound-marked", &own, Some(there), DRIVER, there),
            ("bound-unplaced", &now, None, DRIVER, there),
            ("bound-other", &other, Some(here), OTHER_DRIVER, here),
            ("bound-other-unplaced", &other_now, None, OTHER_DRIVER, there),
        ] {
            scene.claim(cluster, name, selecting(class, selected)).await;
            scene.bind(cluster, name, scene.new_volume(name, driver, node)).await;
        }
        // kube-controller-manager requests no volume for these claims from a provisioner. An administrator creates the volumes.
        for (name, class, driver) in
            [("by-hand", "", DRIVER), ("by-hand-other", other.as_str(), OTHER_DRIVER)]
        {
            scene.claims.insert(name, cluster.claim(name, selecting(class, None)).await);
            let mut volume = scene.new_volume(name, driver, there);
            let by_hand =
                json!({"metadata": {"name": format!("{name}-{}", scene.namespace), "annotations": null}});
            fixtures::merge(&mut volume, by_hand);
            scene.bind(cluster, name, volume).await;
        }
        // A resize of this claim can be recorded.
        cluster.request_size("bound-own", "2Mi").await;
        let marked = scene.volume("bound-marked")["metadata"]["name"].as_str().unwrap().to_owned();
        cluster.objects().delete(&marked, &DeleteParams::default()).await.unwrap();
        let claims = cluster.claims();
        for name in scene.claims.keys() {
            // Kubernetes 1.37 adds the condition Unused. Here, it exists in all versions, and no controller adds it later.
            let conditions = ["Unused", "Backup"].map(|kind| json!({"type": kind, "status": "True"}));
            let patch = Patch::Strategic(json!({"status": {"conditions": conditions}}));
            claims.patch_status(name, &PatchParams::default(), &patch).await.unwrap();
        }
        scene.create_capacities_and_events(cluster).await;
        // Controllers have changed the objects since they were created.
        for (name, claim) in &mut scene.claims {
            *claim = claims.get(name).await.unwrap();
        }
        for volume in scene.volumes.values_mut() {
            let name = volume["metadata"]["name"].as_str().unwrap();
            *volume = serde_json::to_value(cluster.objects().get(name).await.unwrap()).unwrap();
        }
        scene
    }

    async fn claim(&mut self, cluster: &TestCluster, name: &'static str, change: Value) {
        cluster.claim(name, change).await;
        let has_provisioner =
            |claim: &PersistentVolumeClaim| claim.annotations().contains_key(STORAGE_PROVISIONER);
        self.claims.insert(name, until(&cluster.claims(), name, has_provisioner).await);
    }

    async fn bind(&mut self, cluster: &TestCluster, name: &'static str, volume: Value) {
        self.volumes.insert(name, volume.clone());
        create(&cluster.objects(), volume).await;
        cluster.bound(name).await;
    }

    async fn create_capacities_and_events(&mut self, cluster: &TestCluster) {
        let capacities: Api<CSIStorageCapacity> = Api::namespaced(cluster.admin.clone(), SYSTEM);
        let events: Api<Event> = Api::namespaced(cluster.admin.clone(), &self.namespace);
        let (here, there) = (self.here, self.there);
        for (owner, driver, node) in
            [("own", DRIVER, here), ("theirs", DRIVER, there), ("other", OTHER_DRIVER, here)]
        {
            let mut capacity = self.new_capacity(node);
            let name = format!("{owner}-{}", self.namespace);
            let capacity_name = format!("{node}-{:016x}", fnv1a(&[driver, node, &self.namespace]));
            let topology = format!("topology.{driver}/node");
            fixtures::merge(
                &mut capacity,
                json!({
                    "metadata": {"name": capacity_name, "labels": {"csi.storage.k8s.io/drivername": driver}},
                    "nodeTopology": {"matchLabels": null},
                }),
            );
            fixtures::merge(&mut capacity, json!({"nodeTopology": {"matchLabels": {topology: node}}}));
            let created = create(&capacities, capacity).await;
            self.capacities.insert(owner, serde_json::to_value(created).unwrap());
            let mut event = self.new_event(node);
            fixtures::merge(&mut event, json!({"metadata": {"name": name}, "reportingController": driver}));
            let created = create(&events, event).await;
            self.events.insert(owner, serde_json::to_value(created).unwrap());
        }
    }

    /// Returns a claim as it is in the cluster.
    pub(super) fn claim_of(&self, name: &str) -> Value {
        serde_json::to_value(&self.claims[name]).unwrap()
    }

    /// Returns the volume of a claim as it is in the cluster.
    pub(super) fn volume(&self, claim: &str) -> &Value {
        &self.volumes[claim]
    }

    /// Returns the volume that the provisioner of a node would create for a claim.
    pub(super) fn new_volume(&self, claim: &str, driver: &str, node: &str) -> Value {
        let claim = &self.claims[claim];
        let id = VolumeId::parse(&format!("pvc-{}", claim.uid().unwrap())).unwrap();
        let description = Description {
            claim,
            id: &id,
            kind: VolumeKind::Filesystem,
            capacity: Bytes(MIB),
            filesystem_uuid: fixtures::FILESYSTEM.to_owned(),
            reclaim_policy: ReclaimPolicy::Delete,
            mount_options: Some(vec!["nosuid".to_owned()]),
            node_loss: Policy::default(),
        };
        serde_json::to_value(pv::build(description, &Identity::new(driver, node).unwrap())).unwrap()
    }

    /// Returns the capacity that the provisioner of a node would publish, without an owner.
    pub(super) fn new_capacity(&self, node: &str) -> Value {
        json!({
            "metadata": {
                "name": format!("{node}-0123456789abcdef"),
                "labels": {"csi.loopfs.dev/node": node, "csi.storage.k8s.io/drivername": DRIVER},
            },
            "storageClassName": self.class, "capacity": "1Gi",
            "nodeTopology": {"matchLabels": {"topology.csi.loopfs.dev/node": node}},
        })
    }

    /// Returns an event that the provisioner of a node would report about a claim.
    pub(super) fn new_event(&self, node: &str) -> Value {
        json!({
            "metadata": {"name": format!("new-{}", self.namespace)}, "eventTime": "2026-01-01T00:00:00.000000Z",
            "type": "Warning", "reason": "ProvisioningFailed", "action": "Provision", "note": "full",
            "reportingController": DRIVER, "reportingInstance": node,
            "regarding": {
                "apiVersion": "v1", "kind": "PersistentVolumeClaim", "namespace": self.namespace, "name": "waiting-own",
            },
        })
    }

    /// Returns an owner reference to the other node, which keeps the Node object from being deleted.
    pub(super) fn other_node(&self) -> Value {
        json!({"apiVersion": "v1", "kind": "Node", "name": self.there, "uid": "1", "blockOwnerDeletion": true})
    }

    /// Removes the objects that would outlive the namespace.
    pub(super) async fn remove(self, cluster: &TestCluster) {
        let release = Patch::Merge(json!({"metadata": {"finalizers": null}}));
        for volume in self.volumes.values() {
            let name = volume["metadata"]["name"].as_str().unwrap();
            cluster.objects().patch(name, &PatchParams::default(), &release).await.unwrap();
            // One of them is marked for deletion. It is removed with its finalizers.
            drop(cluster.objects().delete(name, &DeleteParams::default()).await);
        }
        let capacities: Api<CSIStorageCapacity> = Api::namespaced(cluster.admin.clone(), SYSTEM);
        for capacity in self.capacities.values() {
            let name = capacity["metadata"]["name"].as_str().unwrap();
            capacities.delete(name, &DeleteParams::default()).await.unwrap();
        }
        let leases: Api<Lease> = Api::namespaced(cluster.admin.clone(), SYSTEM);
        leases.delete(LEASE, &DeleteParams::default()).await.unwrap();
    }
}

/// Returns the Lease of the controller, which may exist already.
async fn lease(cluster: &TestCluster) -> Value {
    let leases: Api<Lease> = Api::namespaced(cluster.admin.clone(), SYSTEM);
    let lease = json!({
        "apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": LEASE},
        "spec": {"holderIdentity": "leader", "leaseDurationSeconds": 15},
    });
    let lease =
        leases.patch(LEASE, &PatchParams::apply("story").force(), &Patch::Apply(lease)).await.unwrap();
    serde_json::to_value(lease).unwrap()
}

pub(super) fn volumes() -> TargetResource {
    TargetResource::new("", "PersistentVolume", "persistentvolumes")
}

pub(super) fn claims(scene: &Scene) -> TargetResource {
    TargetResource::new("", "PersistentVolumeClaim", "persistentvolumeclaims").within(&scene.namespace)
}

pub(super) fn capacities() -> TargetResource {
    TargetResource::new("storage.k8s.io", "CSIStorageCapacity", "csistoragecapacities").within(SYSTEM)
}

pub(super) fn events(scene: &Scene) -> TargetResource {
    TargetResource::new("events.k8s.io", "Event", "events").within(&scene.namespace)
}

pub(super) fn leases() -> TargetResource {
    TargetResource::new("coordination.k8s.io", "Lease", "leases").within(SYSTEM)
}

pub(super) fn config_maps() -> TargetResource {
    TargetResource::new("", "ConfigMap", "configmaps").within(SYSTEM)
}

pub(super) fn mutating_policies() -> TargetResource {
    TargetResource::new(
        "admissionregistration.k8s.io",
        "MutatingAdmissionPolicy",
        "mutatingadmissionpolicies",
    )
}

pub(super) fn policy_bindings() -> TargetResource {
    let group = "admissionregistration.k8s.io";
    TargetResource::new(group, "MutatingAdmissionPolicyBinding", "mutatingadmissionpolicybindings")
}

pub(super) fn snapshots(scene: &Scene) -> TargetResource {
    TargetResource::new("snapshot.storage.k8s.io", "VolumeSnapshot", "volumesnapshots")
        .within(&scene.namespace)
}

pub(super) fn contents() -> TargetResource {
    TargetResource::new("snapshot.storage.k8s.io", "VolumeSnapshotContent", "volumesnapshotcontents")
}

pub(super) fn snapshot_classes() -> TargetResource {
    TargetResource::new("snapshot.storage.k8s.io", "VolumeSnapshotClass", "volumesnapshotclasses")
}

/// Returns the administrator's access to a resource, and an object of it.
pub(super) fn dynamic(
    cluster: &TestCluster,
    resource: &TargetResource,
    object: Value,
) -> (Api<DynamicObject>, DynamicObject) {
    let mut whole = json!({"apiVersion": resource.api_version(), "kind": resource.kind});
    fixtures::merge(&mut whole, object);
    whole["metadata"].as_object_mut().unwrap().remove("managedFields");
    let kind = GroupVersionKind::gvk(resource.group, "v1", resource.kind);
    let kind = ApiResource::from_gvk_with_plural(&kind, &resource.plural);
    let api = match &resource.namespace {
        Some(namespace) => Api::namespaced_with(cluster.admin.clone(), namespace, &kind),
        None => Api::all_with(cluster.admin.clone(), &kind),
    };
    (api, serde_json::from_value(whole).unwrap())
}

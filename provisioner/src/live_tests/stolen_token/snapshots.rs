//! Requests for the VolumeSnapshotContents to which the component snapshots gives access.
//!
//! The API server ignores the metadata and the spec in a write to the status of a custom resource, so no request changes them there.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::super::*;
use super::attempt::{Attempts, KEEP, annotation, changed, finalizers, label, name, owner, spec};
use super::request::{AttackRequest, BodyFormat, TargetResource, Verdict};
use super::scene::{DRIVER, OTHER_DRIVER, Scene, contents, dynamic, snapshot_classes};
use crate::objects::snapshot::MANAGED_BY;

const POLICY: &str = "loopfs-snapshots";
const IN_CREATION: &str = "snapshot.storage.kubernetes.io/volumesnapshot-being-created";
const IN_DELETION: &str = "snapshot.storage.kubernetes.io/volumesnapshot-being-deleted";
const SECRET: &str = "snapshot.storage.kubernetes.io/deletion-secret-name";
const BOUND: &str = "snapshot.storage.kubernetes.io/volumesnapshotcontent-bound-protection";

// Words of the rules that refuse more than one of the requests.
const SPEC: &str = "may not change the spec, labels and owners";
const ANNOTATIONS: &str = "only the annotation of a snapshot in creation";
const FINALIZER: &str = "may only remove the finalizer of a bound snapshot";
const ERROR: &str = "only errors with a message and a time in UTC";

fn status() -> TargetResource {
    contents().subresource("status")
}

fn refused(words: &'static str) -> Verdict {
    Verdict::refused(POLICY, words)
}

fn json_patch(resource: &TargetResource, object: &Value, operation: Value) -> AttackRequest {
    resource.patch(name(object), BodyFormat::Json, json!([operation]))
}

/// Returns the same change to the status in each form of a write.
fn status_writes(object: &Value, change: Value) -> Vec<AttackRequest> {
    let change = json!({"status": change});
    let mut writes = status().patches(object, &change);
    writes.push(status().update(changed(object, change)));
    writes
}

/// The VolumeSnapshotContents in the cluster.
pub(super) struct Contents {
    objects: BTreeMap<&'static str, Value>,
    prefix: String,
    here: &'static str,
    there: &'static str,
}

impl Contents {
    pub(super) async fn set(cluster: &TestCluster, scene: &Scene) -> Self {
        cluster.define_snapshots().await;
        let (here, there) = (scene.here, scene.there);
        let mut contents =
            Contents { objects: BTreeMap::new(), prefix: cluster.namespace.clone(), here, there };
        let of = |node: &str| label(MANAGED_BY, node);
        let held = |held_by: &str| finalizers(&[held_by]);
        let status = json!({"status": {
            "snapshotHandle": "snapshot-1", "readyToUse": true, "creationTime": 1, "restoreSize": 1,
        }});
        let annotated = json!({"metadata": {"annotations": {IN_CREATION: "yes", "example.com/a": "b"}}});
        let failed = json!({"status": {"error": {"message": "full", "time": "2020-01-01T02:00:00+02:00"}}});
        let other = spec(json!({"driver": OTHER_DRIVER}));
        for (object, changes) in [
            ("new", vec![of(here)]),
            ("own", vec![of(here), held(BOUND), annotated, status.clone()]),
            ("failed", vec![of(here), failed]),
            ("kept", vec![of(here), held(KEEP)]),
            ("deleted", vec![of(here), held(BOUND)]),
            // Of a snapshot that is being deleted, the rules for the node's own snapshots permit most writes.
            ("theirs", vec![of(there), held(BOUND)]),
            ("unlabelled", vec![held(BOUND)]),
            ("other", vec![of(here), held(BOUND), other]),
        ] {
            let is_deleted = ["deleted", "theirs", "unlabelled", "other"].contains(&object);
            contents.create(cluster, object, changes, is_deleted).await;
        }
        contents
    }

    async fn create(
        &mut self,
        cluster: &TestCluster,
        key: &'static str,
        changes: Vec<Value>,
        is_deleted: bool,
    ) {
        let mut object = self.new_content(key);
        changes.into_iter().for_each(|change| fixtures::merge(&mut object, change));
        let status = object.get("status").map(|status| json!({"status": status}));
        let (api, object) = dynamic(cluster, &contents(), object);
        let name = object.name_any();
        api.create(&PostParams::default(), &object).await.unwrap();
        if let Some(status) = status {
            api.patch_status(&name, &PatchParams::default(), &Patch::Merge(status)).await.unwrap();
        }
        if is_deleted {
            api.delete(&name, &DeleteParams::default()).await.unwrap();
        }
        self.objects.insert(key, serde_json::to_value(api.get(&name).await.unwrap()).unwrap());
    }

    /// Returns the content that snapshot-controller creates for a volume, without a label.
    fn new_content(&self, key: &str) -> Value {
        json!({
            "metadata": {"name": format!("{key}-{}", self.prefix)},
            "spec": {
                "driver": DRIVER, "deletionPolicy": "Delete", "sourceVolumeMode": "Filesystem",
                "volumeSnapshotClassName": "loopfs", "source": {"volumeHandle": "pvc-1"},
                "volumeSnapshotRef": {"name": "s", "namespace": self.prefix, "uid": "1"},
            },
        })
    }

    /// Removes the contents with the definitions of the snapshot kinds.
    pub(super) async fn remove(self, cluster: &TestCluster) {
        for object in self.objects.into_values() {
            let (api, object) = dynamic(cluster, &contents(), object);
            let release = Patch::Merge(json!({"metadata": {"finalizers": null}}));
            api.patch(&object.name_any(), &PatchParams::default(), &release).await.unwrap();
        }
        cluster.remove_snapshot_definitions().await;
    }

    pub(super) fn attempts(&self, attempts: &mut Attempts) {
        self.read(attempts);
        self.work(attempts);
        self.foreign(attempts);
        self.metadata(attempts);
        self.finalizers(attempts);
        self.status(attempts);
    }

    /// Adds the requests of a controller that releases the snapshots of deleted nodes.
    pub(super) fn of_deleted_nodes(&self, attempts: &mut Attempts) {
        let refused = |words| Verdict::refused("loopfs-lost-snapshots", words);
        let released = finalizers(&[]);
        attempts.allow("read all", [contents().request("list", None)]);
        for key in ["deleted", "theirs", "unlabelled"] {
            let requests = contents().patches(&self.objects[key], &released);
            attempts.allow("release a snapshot that is being deleted", requests);
        }
        let only = "may only remove the finalizer of a snapshot that is being deleted";
        for (words, title, key, change) in [
            ("only its own snapshots", "release the snapshot of another driver", "other", released.clone()),
            (only, "release a snapshot", "own", released.clone()),
            (only, "remove another's finalizer", "kept", released),
            (only, "give a snapshot to another node", "theirs", label(MANAGED_BY, self.here)),
            (only, "annotate a snapshot", "theirs", annotation(IN_CREATION, "yes")),
            (only, "retain a snapshot", "theirs", spec(json!({"deletionPolicy": "Retain"}))),
        ] {
            attempts.expect(refused(words), title, contents().patches(&self.objects[key], &change));
        }
    }

    fn read(&self, attempts: &mut Attempts) {
        for resource in [contents(), snapshot_classes()] {
            attempts.allow("read all", ["list", "watch"].map(|verb| resource.request(verb, None)));
        }
        attempts.allow("read one", [contents().request("get", Some(name(&self.objects["theirs"])))]);
    }

    /// Adds the requests of csi-snapshotter, in its order and in its form.
    fn work(&self, attempts: &mut Attempts) {
        let (new, own, deleted) = (&self.objects["new"], &self.objects["own"], &self.objects["deleted"]);
        let error = json!({"message": "full", "time": "2026-01-01T00:00:00Z"});
        let failed = json!({"readyToUse": false, "error": error});
        let replace = |path: &str, value: Value| json!({"op": "replace", "path": path, "value": value});
        let path = format!("/metadata/annotations/{}", IN_CREATION.replace('/', "~1"));
        attempts.allow(
            "begin a snapshot",
            [json_patch(&contents(), new, replace("/metadata/annotations", json!({IN_CREATION: "yes"})))],
        );
        attempts
            .allow("end a snapshot", [json_patch(&contents(), own, json!({"op": "remove", "path": path}))]);
        let recorded = &own["status"];
        attempts
            .allow("record a snapshot", [json_patch(&status(), new, replace("/status", recorded.clone()))]);
        attempts.allow("record an error", [json_patch(&status(), new, replace("/status", failed.clone()))]);
        attempts.allow("record an error", [json_patch(&status(), own, replace("/status/error", error))]);
        let cleared =
            json!({"snapshotHandle": null, "readyToUse": null, "creationTime": null, "restoreSize": null});
        attempts.allow(
            "record that a snapshot was deleted",
            [status().update(changed(own, json!({"status": cleared})))],
        );
        attempts.allow(
            "release a deleted snapshot",
            [json_patch(&contents(), deleted, replace("/metadata/finalizers", Value::Null))],
        );
        // The same writes in the other forms.
        let begun = annotation(IN_CREATION, "yes");
        attempts.allow("begin a snapshot", contents().patches(new, &begun));
        attempts.allow("record an error", status_writes(new, failed));
        attempts.allow("release a deleted snapshot", contents().patches(deleted, &finalizers(&[])));
        // An administrator wrote the error of this snapshot.
        attempts.allow("begin a snapshot that failed", contents().patches(&self.objects["failed"], &begun));
    }

    fn foreign(&self, attempts: &mut Attempts) {
        let (annotate, release) = (annotation(IN_CREATION, "yes"), finalizers(&[]));
        let record = json!({"snapshotHandle": "snapshot-2", "readyToUse": true});
        for (words, key) in [
            ("only snapshots of its own node", "theirs"),
            ("only snapshots of its own node", "unlabelled"),
            ("only snapshots of its own driver", "other"),
        ] {
            let object = &self.objects[key];
            let mut refuse = |title: String, requests| attempts.expect(refused(words), title, requests);
            refuse(format!("begin the snapshot {key}"), contents().patches(object, &annotate));
            refuse(format!("release the snapshot {key}"), contents().patches(object, &release));
            refuse(format!("record the snapshot {key}"), status_writes(object, record.clone()));
        }
        // Without a label, the name of the node is empty, as it is in this token.
        for key in ["own", "unlabelled"] {
            let object = &self.objects[key];
            let write = status_writes(object, record.clone()).remove(0);
            attempts.refuse_unbound(POLICY, format!("record the snapshot {key}"), write);
            let write = contents().patches(object, &annotate).remove(0);
            attempts.refuse_unbound(POLICY, format!("begin the snapshot {key}"), write);
        }
        let created = changed(&self.new_content("created"), label(MANAGED_BY, self.here));
        attempts.expect(Verdict::NotGranted, "create a snapshot", [contents().apply(created)]);
    }

    fn metadata(&self, attempts: &mut Attempts) {
        let own = &self.objects["own"];
        let there = json!({"apiVersion": "v1", "kind": "Node", "name": self.there, "uid": "1", "blockOwnerDeletion": true});
        let of_other = json!({"name": "s", "namespace": SYSTEM, "uid": "2"});
        for (words, title, change) in [
            (SPEC, "give its own snapshot to another node", label(MANAGED_BY, self.there)),
            (SPEC, "remove the node of its own snapshot", label(MANAGED_BY, Value::Null)),
            (SPEC, "label its own snapshot", label("a", "b")),
            (SPEC, "own its own snapshot", owner(there)),
            (SPEC, "give its own snapshot to another driver", spec(json!({"driver": OTHER_DRIVER}))),
            (SPEC, "retain its own snapshot", spec(json!({"deletionPolicy": "Retain"}))),
            (SPEC, "give its own snapshot to another user", spec(json!({"volumeSnapshotRef": of_other}))),
            (SPEC, "change the class of its snapshot", spec(json!({"volumeSnapshotClassName": "gold"}))),
            (ANNOTATIONS, "permit a deletion", annotation(IN_DELETION, "yes")),
            (ANNOTATIONS, "name a secret", annotation(SECRET, "password")),
            (ANNOTATIONS, "change an annotation", annotation("example.com/a", "c")),
            (ANNOTATIONS, "remove an annotation", annotation("example.com/a", Value::Null)),
        ] {
            attempts.expect(refused(words), title, contents().patches(own, &change));
        }
        for (title, change) in [
            ("change the volume of its own snapshot", spec(json!({"source": {"volumeHandle": "pvc-2"}}))),
            ("change the mode of its own snapshot", spec(json!({"sourceVolumeMode": "Block"}))),
        ] {
            let requests = contents().patches(own, &change);
            attempts.expect(Verdict::Invalid("is immutable".to_owned()), title, requests);
        }
    }

    fn finalizers(&self, attempts: &mut Attempts) {
        for (words, title, key, names) in [
            (FINALIZER, "keep its own snapshot from being deleted", "own", &[BOUND, KEEP][..]),
            (FINALIZER, "add the finalizer of a bound snapshot", "new", &[BOUND]),
            (FINALIZER, "remove another's finalizer", "kept", &[]),
            ("only while the snapshot is being deleted", "release its own snapshot", "own", &[]),
        ] {
            let requests = contents().patches(&self.objects[key], &finalizers(names));
            attempts.expect(refused(words), title, requests);
        }
    }

    fn status(&self, attempts: &mut Attempts) {
        let own = &self.objects["own"];
        let at = |time: &str| json!({"message": "full", "time": time});
        for error in [
            at("2020-01-01t00:00:00z"),
            at("2020-01-01T00:00:00Ztx"),
            at("2020-01-01T00:00:00+99:99"),
            at("2020-01-01T00:00:00x5Z"),
            json!({"message": "full"}),
            json!({"time": "2020-01-01T00:00:00Z"}),
            json!({}),
        ] {
            let title = format!("record the error {error}");
            attempts.expect(refused(ERROR), title, status_writes(own, json!({"error": error})));
        }
        let group = status_writes(own, json!({"volumeGroupSnapshotHandle": "group"}));
        attempts.expect(
            refused("may not add a snapshot to a group"),
            "add its own snapshot to a group",
            group,
        );
        let write = json!({"op": "add", "path": "/status/error", "value": {"message": null, "time": "2020-01-01T00:00:00Z"}});
        attempts.expect(refused(ERROR), "record an error without words", [json_patch(&status(), own, write)]);
        // Nor do programs decode these values.
        for (field, value) in [
            ("creationTime", json!(1u64 << 63)),
            ("creationTime", json!(1e30)),
            ("creationTime", json!(0.5)),
            ("restoreSize", json!(1u64 << 63)),
            ("restoreSize", json!(-1)),
            ("error", json!({"message": "full", "time": "2020-02-30T00:00:00Z"})),
            ("error", json!({"message": "full", "time": "2020-01-01T24:00:00Z"})),
        ] {
            let title = format!("record the {field} {value}");
            let add = json!({"op": "add", "path": format!("/status/{field}"), "value": value});
            attempts.expect(Verdict::Invalid("status.".to_owned()), title, [json_patch(&status(), own, add)]);
        }
    }
}

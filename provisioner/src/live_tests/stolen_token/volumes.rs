//! Requests for PersistentVolumes.

use serde_json::{Value, json};

use super::attacker::Attacker;
use super::attempt::{Attempts, KEEP, annotation, changed, finalizers, label, metadata, name, owner, spec};
use super::request::{AttackRequest, BodyFormat, Verdict};
use super::scene::{DRIVER, NODE_LABEL, OTHER_DRIVER, Scene, volumes};
use crate::objects::pv::{FINALIZER, PROVISIONED_BY};

const POLICY: &str = "loopfs-provisioner-volumes";
const PROTECTION: &str = "kubernetes.io/pv-protection";

// Words of the rules that refuse more than one of the requests.
const OWN_DRIVER: &str = "only PersistentVolumes of its own driver";
const WRITE_OWN_NODE: &str = "may write only PersistentVolumes of its own node";
const CHANGE_OWN_NODE: &str = "may change and delete only PersistentVolumes of its own node";
const AFFINITY: &str = "whose node affinity allows its own node and no other";
const NAME: &str = "the name and the handle of a PersistentVolume";
const NO_SECRETS: &str = "with secrets or with other fields";
const ANNOTATIONS: &str = "may not annotate PersistentVolumes";
const NO_OWNERS: &str = "may not create PersistentVolumes with owners";
const ONLY_CAPACITY: &str = "only the capacity in the spec";
const METADATA: &str = "may not change the labels, annotations and owners";
const FINALIZER_ONLY: &str = "only its own finalizer";

fn refused(words: &'static str) -> Verdict {
    Verdict::refused(POLICY, words)
}

fn csi(change: Value) -> Value {
    spec(json!({"csi": change}))
}

fn larger() -> Value {
    spec(json!({"capacity": {"storage": "2Mi"}}))
}

fn without_finalizer(volume: &Value, finalizer: &str) -> AttackRequest {
    let change = metadata(json!({"$deleteFromPrimitiveList/finalizers": [finalizer]}));
    volumes().patch(name(volume), BodyFormat::Strategic, change)
}

pub(super) fn create(scene: &Scene, attempts: &mut Attempts) {
    let (here, there) = (scene.here, scene.there);
    let volume = scene.new_volume("waiting-own", DRIVER, here);
    let create = |object| volumes().create(object);
    attempts.allow("create its own volume", [create(volume.clone()), volumes().apply(volume.clone())]);
    // docs/src/security.md documents this limit: a policy that checks a volume cannot read the claim.
    for claim in ["waiting-theirs", "waiting-other"] {
        let mut volume = scene.new_volume(claim, DRIVER, here);
        volume["spec"]["storageClassName"] = json!(scene.class);
        attempts.allow(format!("create a volume for the claim {claim}"), [create(volume)]);
    }
    attempts.refuse_unbound(POLICY, "create a volume", create(volume.clone()));

    let term = |operator: &str, values: &[&str]| {
        let key = "topology.csi.loopfs.dev/node";
        json!({"matchExpressions": [{"key": key, "operator": operator, "values": values}]})
    };
    let affinity = |terms: Value| spec(json!({"nodeAffinity": {"required": {"nodeSelectorTerms": terms}}}));
    let of_zone = json!({"matchExpressions": [{"key": "zone", "operator": "In", "values": [here]}]});
    let by_field = json!({"matchFields": [{"key": "metadata.name", "operator": "In", "values": [there]}]});
    let their_handle = &scene.volume("bound-theirs")["spec"]["csi"]["volumeHandle"];
    let their_uid = &scene.claim_of("waiting-theirs")["metadata"]["uid"];
    let generated = json!({"name": null, "generateName": "pvc-"});
    for (words, title, change) in [
        (OWN_DRIVER, "of another driver", csi(json!({"driver": OTHER_DRIVER}))),
        (OWN_DRIVER, "that is a path of the host", spec(json!({"csi": null, "hostPath": {"path": "/etc"}}))),
        (WRITE_OWN_NODE, "with another node's label", label(NODE_LABEL, there)),
        (WRITE_OWN_NODE, "without a label", metadata(json!({"labels": null}))),
        (AFFINITY, "without an affinity", spec(json!({"nodeAffinity": null}))),
        (AFFINITY, "of another node", affinity(json!([term("In", &[there])]))),
        (AFFINITY, "of two nodes", affinity(json!([term("In", &[here, there])]))),
        (AFFINITY, "with two terms", affinity(json!([term("In", &[here]), term("In", &[there])]))),
        (AFFINITY, "of all other nodes", affinity(json!([term("NotIn", &[here])]))),
        (AFFINITY, "of a zone", affinity(json!([of_zone]))),
        (AFFINITY, "with an empty term", affinity(json!([term("In", &[here]), {}]))),
        (AFFINITY, "with a field of another node", affinity(json!([by_field]))),
        (NAME, "with the handle of another node's volume", csi(json!({"volumeHandle": their_handle}))),
        (NAME, "whose handle is a path", csi(json!({"volumeHandle": "../../etc"}))),
        (NAME, "of another name", metadata(json!({"name": "mine"}))),
        (NAME, "of a generated name", metadata(generated)),
        (NAME, "for any claim", spec(json!({"claimRef": null}))),
        (NAME, "for any claim of a name", spec(json!({"claimRef": {"uid": null}}))),
        (NAME, "under one claim's UID for another claim", spec(json!({"claimRef": {"uid": their_uid}}))),
        (NO_SECRETS, "with an attributes class", spec(json!({"volumeAttributesClassName": "gold"}))),
        (ANNOTATIONS, "that another driver deletes", annotation(PROVISIONED_BY, OTHER_DRIVER)),
        (NO_OWNERS, "that keeps a Node from being deleted", owner(scene.other_node())),
        (NO_OWNERS, "that cannot be deleted", finalizers(&[KEEP])),
    ] {
        let title = format!("create a volume {title}");
        attempts.expect(refused(words), title, [create(changed(&volume, change))]);
    }
    for (key, value) in [
        ("pv.kubernetes.io/migrated-to", OTHER_DRIVER),
        ("pv.kubernetes.io/bound-by-controller", "yes"),
        ("volume.beta.kubernetes.io/storage-class", scene.other_class.as_str()),
    ] {
        let title = format!("create a volume with the annotation {key}");
        attempts.expect(refused(ANNOTATIONS), title, [create(changed(&volume, annotation(key, value)))]);
    }
    // The kubelet reads the secrets of the first three.
    let secret = json!({"name": "password", "namespace": "kube-system"});
    for field in
        ["nodeStageSecretRef", "nodePublishSecretRef", "nodeExpandSecretRef", "controllerPublishSecretRef"]
    {
        let created = create(changed(&volume, csi(json!({field: secret}))));
        attempts.expect(refused(NO_SECRETS), format!("create a volume with a {field}"), [created]);
    }
    // The class of this volume is that of its claim.
    attempts.expect(
        Verdict::refused("loopfs-provisioner-classes", "classes of other drivers"),
        "create a volume of another driver's class",
        [create(scene.new_volume("waiting-other", DRIVER, here))],
    );
}

pub(super) fn change(scene: &Scene, attempts: &mut Attempts) {
    let (here, there) = (scene.here, scene.there);
    let (own, theirs, other) =
        (scene.volume("bound-own"), scene.volume("bound-theirs"), scene.volume("bound-other"));
    let strategic = |change| volumes().patch(name(own), BodyFormat::Strategic, change);
    attempts.allow("expand its own volume", volumes().patches(own, &larger()));
    attempts.allow("remove the finalizer of its own volume", [without_finalizer(own, FINALIZER)]);
    attempts.allow("add the finalizer to its own volume", [strategic(finalizers(&[FINALIZER]))]);
    attempts.refuse_unbound(POLICY, "change a volume", strategic(larger()));

    let uid = &scene.claim_of("waiting-other")["metadata"]["uid"];
    let claim = json!({"name": "waiting-other", "uid": uid, "resourceVersion": null});
    let secret = json!({"name": "password", "namespace": "kube-system"});
    for (words, title, change) in [
        (ONLY_CAPACITY, "give its own volume to another tenant's claim", spec(json!({"claimRef": claim}))),
        (ONLY_CAPACITY, "offer its own volume to all claims", spec(json!({"claimRef": null}))),
        (
            ONLY_CAPACITY,
            "change the reclaim policy",
            spec(json!({"persistentVolumeReclaimPolicy": "Retain"})),
        ),
        (ONLY_CAPACITY, "change the class", spec(json!({"storageClassName": scene.other_class}))),
        (ONLY_CAPACITY, "add a mount option", spec(json!({"mountOptions": ["nosuid", "exec"]}))),
        (
            ONLY_CAPACITY,
            "add an access mode",
            spec(json!({"accessModes": ["ReadWriteOnce", "ReadWriteMany"]})),
        ),
        (ONLY_CAPACITY, "name a secret afterwards", csi(json!({"controllerExpandSecretRef": secret}))),
        (METADATA, "label its own volume", label("topology.kubernetes.io/zone", "z")),
        (METADATA, "have another driver delete its own volume", annotation(PROVISIONED_BY, OTHER_DRIVER)),
        (METADATA, "own its own volume", owner(scene.other_node())),
        (FINALIZER_ONLY, "add a finalizer", finalizers(&[FINALIZER, PROTECTION, KEEP])),
        (WRITE_OWN_NODE, "hand its own volume over to another node", label(NODE_LABEL, there)),
    ] {
        attempts.expect(refused(words), title, volumes().patches(own, &change));
    }
    let unprotect = [without_finalizer(own, PROTECTION)];
    attempts.expect(refused(FINALIZER_ONLY), "remove the finalizer of Kubernetes", unprotect);

    let expand = volumes().patches(theirs, &larger());
    attempts.expect(refused(WRITE_OWN_NODE), "expand another node's volume", expand);
    let release = [without_finalizer(theirs, FINALIZER)];
    attempts.expect(refused(WRITE_OWN_NODE), "remove the finalizer of another node's volume", release);
    let mine = label(NODE_LABEL, here);
    attempts.expect(refused(CHANGE_OWN_NODE), "take another node's volume", volumes().patches(theirs, &mine));
    attempts.expect(refused(OWN_DRIVER), "take another driver's volume", volumes().patches(other, &mine));
    attempts.allow("delete its own volume", [volumes().delete(name(own))]);
    attempts.expect(refused(OWN_DRIVER), "delete another driver's volume", [volumes().delete(name(other))]);
    attempts.refuse_unbound(POLICY, "delete a volume", volumes().delete(name(own)));
}

/// Adds requests for PersistentVolumes of other nodes, to which the component node-loss gives the controller access.
pub(super) fn of_deleted_nodes(scene: &Scene, attacker: &Attacker, attempts: &mut Attempts) {
    let (theirs, marked) = (scene.volume("bound-theirs"), scene.volume("bound-marked"));
    let (deletes, releases) = match attacker.reconciles_deleted_nodes() {
        true => (Verdict::Allowed, Verdict::Allowed),
        false => (refused(CHANGE_OWN_NODE), refused(WRITE_OWN_NODE)),
    };
    attempts.expect(deletes, "delete another node's volume", [volumes().delete(name(theirs))]);
    attempts.also(1, "settle", "lostnodes");
    let release = [without_finalizer(marked, FINALIZER)];
    attempts.expect(releases, "remove the finalizer of another node's marked volume", release);
    attempts.also(1, "settle", "lostnodes");
    for (words, title, change) in [
        (WRITE_OWN_NODE, "expand", larger()),
        (WRITE_OWN_NODE, "retain", spec(json!({"persistentVolumeReclaimPolicy": "Retain"}))),
        (WRITE_OWN_NODE, "relabel", label("a", "b")),
        (WRITE_OWN_NODE, "annotate", annotation("csi.loopfs.dev/on-node-loss", "deleteClaim")),
        (CHANGE_OWN_NODE, "take", label(NODE_LABEL, scene.here)),
    ] {
        let title = format!("{title} another node's marked volume");
        attempts.expect(refused(words), title, volumes().patches(marked, &change));
    }
    let title = "remove the finalizer of Kubernetes from another node's marked volume";
    attempts.expect(refused(WRITE_OWN_NODE), title, [without_finalizer(marked, PROTECTION)]);
}

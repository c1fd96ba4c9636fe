//! Requests for PersistentVolumes.

use serde_json::json;

use super::attacker::Attacker;
use super::attempt::{Attempts, ExpectedVerdict, changed, name};
use super::scene::{DRIVER, OTHER_DRIVER, Scene, volumes};
use crate::objects::pv::FINALIZER;

const POLICY: &str = "loopfs-provisioner-volumes";

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

fn refused(words: &'static str) -> ExpectedVerdict {
    ExpectedVerdict::Refused(POLICY, words)
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
        attempts.allow(&format!("create a volume for the claim {claim}"), [create(volume)]);
    }
    attempts.refuse_unbound(POLICY, "create a volume", create(volume.clone()));

    let topology = |operator: &str, values: &[&str]| json!({"key": "topology.csi.loopfs.dev/node", "operator": operator, "values": values});
    let own_term = || json!({"matchExpressions": [topology("In", &[here])]});
    let affinity = |terms: serde_json::Value| json!({"spec": {"nodeAffinity": {"required": {"nodeSelectorTerms": terms}}}});
    let secret = json!({"name": "password", "namespace": "kube-system"});
    let owner = scene.other_node();
    let foreign = scene.volume("bound-theirs");
    for (words, title, change) in [
        (OWN_DRIVER, "create a volume of another driver", json!({"spec": {"csi": {"driver": OTHER_DRIVER}}})),
        (
            OWN_DRIVER,
            "create a volume that is a path of the host",
            json!({"spec": {"csi": null, "hostPath": {"path": "/etc"}}}),
        ),
        (
            WRITE_OWN_NODE,
            "create a volume with another node's label",
            json!({"metadata": {"labels": {"csi.loopfs.dev/node": there}}}),
        ),
        (WRITE_OWN_NODE, "create a volume without a label", json!({"metadata": {"labels": null}})),
        (AFFINITY, "create a volume without an affinity", json!({"spec": {"nodeAffinity": null}})),
        (
            AFFINITY,
            "create a volume of another node",
            affinity(json!([{"matchExpressions": [topology("In", &[there])]}])),
        ),
        (
            AFFINITY,
            "create a volume of two nodes",
            affinity(json!([{"matchExpressions": [topology("In", &[here, there])]}])),
        ),
        (
            AFFINITY,
            "create a volume with two terms",
            affinity(json!([own_term(), {"matchExpressions": [topology("In", &[there])]}])),
        ),
        (
            AFFINITY,
            "create a volume of all other nodes",
            affinity(json!([{"matchExpressions": [topology("NotIn", &[here])]}])),
        ),
        (
            AFFINITY,
            "create a volume of a zone",
            affinity(json!([{"matchExpressions": [{"key": "zone", "operator": "In", "values": [here]}]}])),
        ),
        (AFFINITY, "create a volume with an empty term", affinity(json!([own_term(), {}]))),
        (
            AFFINITY,
            "create a volume with a field of another node",
            affinity(
                json!([{"matchFields": [{"key": "metadata.name", "operator": "In", "values": [there]}]}]),
            ),
        ),
        (
            NAME,
            "create a volume with the handle of another node's volume",
            json!({"spec": {"csi": {"volumeHandle": foreign["spec"]["csi"]["volumeHandle"]}}}),
        ),
        (
            NAME,
            "create a volume whose handle is a path",
            json!({"spec": {"csi": {"volumeHandle": "../../etc"}}}),
        ),
        (NAME, "create a volume of another name", json!({"metadata": {"name": "mine"}})),
        (
            NAME,
            "create a volume of a generated name",
            json!({"metadata": {"name": null, "generateName": "pvc-"}}),
        ),
        (NAME, "create a volume for any claim", json!({"spec": {"claimRef": null}})),
        (NAME, "create a volume for any claim of a name", json!({"spec": {"claimRef": {"uid": null}}})),
        (
            NAME,
            "create a volume under one claim's UID for another claim",
            json!({"spec": {"claimRef": {"uid": scene.claim_of("waiting-theirs")["metadata"]["uid"]}}}),
        ),
        (
            NO_SECRETS,
            "read a secret when the volume is staged",
            json!({"spec": {"csi": {"nodeStageSecretRef": secret}}}),
        ),
        (
            NO_SECRETS,
            "read a secret when the volume is published",
            json!({"spec": {"csi": {"nodePublishSecretRef": secret}}}),
        ),
        (
            NO_SECRETS,
            "read a secret when the volume is expanded",
            json!({"spec": {"csi": {"nodeExpandSecretRef": secret}}}),
        ),
        (
            NO_SECRETS,
            "name a secret for a controller",
            json!({"spec": {"csi": {"controllerPublishSecretRef": secret}}}),
        ),
        (
            NO_SECRETS,
            "keep an attributes class from being deleted",
            json!({"spec": {"volumeAttributesClassName": "gold"}}),
        ),
        (
            ANNOTATIONS,
            "have another driver's provisioner delete the handle",
            json!({"metadata": {"annotations": {"pv.kubernetes.io/provisioned-by": OTHER_DRIVER}}}),
        ),
        (
            ANNOTATIONS,
            "have another driver take the volume for a migrated one",
            json!({"metadata": {"annotations": {"pv.kubernetes.io/migrated-to": OTHER_DRIVER}}}),
        ),
        (
            ANNOTATIONS,
            "have the volume offered to other claims",
            json!({"metadata": {"annotations": {"pv.kubernetes.io/bound-by-controller": "yes"}}}),
        ),
        (
            ANNOTATIONS,
            "name another class in an annotation",
            json!({"metadata": {"annotations": {"volume.beta.kubernetes.io/storage-class": scene.other_class}}}),
        ),
        (NO_OWNERS, "keep a Node from being deleted", json!({"metadata": {"ownerReferences": [owner]}})),
        (
            NO_OWNERS,
            "create a volume that cannot be deleted",
            json!({"metadata": {"finalizers": ["example.com/keep"]}}),
        ),
    ] {
        attempts.expect(refused(words), title, [create(changed(&volume, change))]);
    }
    // The class of this volume is that of its claim.
    attempts.expect(
        ExpectedVerdict::Refused("loopfs-provisioner-classes", "classes of other drivers"),
        "create a volume of another driver's class",
        [create(scene.new_volume("waiting-other", DRIVER, here))],
    );
}

pub(super) fn change(scene: &Scene, attempts: &mut Attempts) {
    let (here, there) = (scene.here, scene.there);
    let (own, theirs, other) =
        (scene.volume("bound-own"), scene.volume("bound-theirs"), scene.volume("bound-other"));
    let larger = json!({"spec": {"capacity": {"storage": "2Mi"}}});
    let strategic =
        |object, change| [volumes().patch(name(object), super::request::BodyFormat::Strategic, change)];
    let without_finalizer = json!({"metadata": {"$deleteFromPrimitiveList/finalizers": [FINALIZER]}});
    attempts.allow("expand its own volume", volumes().patches(own, &larger));
    attempts.allow("remove the finalizer of its own volume", strategic(own, without_finalizer.clone()));
    attempts.allow(
        "add the finalizer to its own volume",
        strategic(own, json!({"metadata": {"finalizers": [FINALIZER]}})),
    );
    attempts.refuse_unbound(POLICY, "change a volume", strategic(own, larger.clone())[0].clone());

    let claim = |name| {
        let claim = scene.claim_of(name);
        json!({"spec": {"claimRef": {"name": name, "uid": claim["metadata"]["uid"], "resourceVersion": null}}})
    };
    let secret = json!({"name": "password", "namespace": "kube-system"});
    let owner = scene.other_node();
    for (words, title, change) in [
        (ONLY_CAPACITY, "give its own volume to the claim of another tenant", claim("waiting-other")),
        (ONLY_CAPACITY, "offer its own volume to all claims", json!({"spec": {"claimRef": null}})),
        (
            ONLY_CAPACITY,
            "change the reclaim policy",
            json!({"spec": {"persistentVolumeReclaimPolicy": "Retain"}}),
        ),
        (ONLY_CAPACITY, "change the class", json!({"spec": {"storageClassName": scene.other_class}})),
        (ONLY_CAPACITY, "add a mount option", json!({"spec": {"mountOptions": ["nosuid", "exec"]}})),
        (
            ONLY_CAPACITY,
            "add an access mode",
            json!({"spec": {"accessModes": ["ReadWriteOnce", "ReadWriteMany"]}}),
        ),
        (
            ONLY_CAPACITY,
            "name a secret afterwards",
            json!({"spec": {"csi": {"controllerExpandSecretRef": secret}}}),
        ),
        (
            METADATA,
            "label its own volume",
            json!({"metadata": {"labels": {"topology.kubernetes.io/zone": "z"}}}),
        ),
        (
            METADATA,
            "have another driver's provisioner delete its own volume",
            json!({"metadata": {"annotations": {"pv.kubernetes.io/provisioned-by": OTHER_DRIVER}}}),
        ),
        (METADATA, "own its own volume", json!({"metadata": {"ownerReferences": [owner]}})),
        (
            FINALIZER_ONLY,
            "add a finalizer",
            json!({"metadata": {"finalizers": [FINALIZER, "kubernetes.io/pv-protection", "example.com/keep"]}}),
        ),
        (
            WRITE_OWN_NODE,
            "hand its own volume over to another node",
            json!({"metadata": {"labels": {"csi.loopfs.dev/node": there}}}),
        ),
    ] {
        attempts.expect(refused(words), title, volumes().patches(own, &change));
    }
    let unprotect =
        json!({"metadata": {"$deleteFromPrimitiveList/finalizers": ["kubernetes.io/pv-protection"]}});
    attempts.expect(refused(FINALIZER_ONLY), "remove the finalizer of Kubernetes", strategic(own, unprotect));

    attempts.expect(
        refused(WRITE_OWN_NODE),
        "expand another node's volume",
        volumes().patches(theirs, &larger),
    );
    attempts.expect(
        refused(WRITE_OWN_NODE),
        "remove the finalizer of another node's volume",
        strategic(theirs, without_finalizer.clone()),
    );
    let mine = json!({"metadata": {"labels": {"csi.loopfs.dev/node": here}}});
    attempts.expect(refused(CHANGE_OWN_NODE), "take another node's volume", volumes().patches(theirs, &mine));
    attempts.expect(refused(OWN_DRIVER), "take another driver's volume", volumes().patches(other, &mine));
    attempts.allow("delete its own volume", [volumes().delete(name(own))]);
    attempts.expect(refused(OWN_DRIVER), "delete another driver's volume", [volumes().delete(name(other))]);
    attempts.refuse_unbound(POLICY, "delete a volume", volumes().delete(name(own)));
}

/// Adds requests for PersistentVolumes of other nodes, to which the component node-loss gives the controller access.
pub(super) fn of_deleted_nodes(scene: &Scene, attacker: &Attacker, attempts: &mut Attempts) {
    let (theirs, marked) = (scene.volume("bound-theirs"), scene.volume("bound-marked"));
    let without_finalizer = json!({"metadata": {"$deleteFromPrimitiveList/finalizers": [FINALIZER]}});
    let release = volumes().patch(name(marked), super::request::BodyFormat::Strategic, without_finalizer);
    let (deletes, releases) = match attacker.reconciles_deleted_nodes() {
        true => (ExpectedVerdict::Allowed, ExpectedVerdict::Allowed),
        false => (refused(CHANGE_OWN_NODE), refused(WRITE_OWN_NODE)),
    };
    attempts.expect(deletes, "delete another node's volume", [volumes().delete(name(theirs))]);
    attempts.also(1, "settle", "lostnodes");
    attempts.expect(releases, "remove the finalizer of another node's marked volume", [release]);
    attempts.also(1, "settle", "lostnodes");
    for (title, change) in [
        ("expand another node's marked volume", json!({"spec": {"capacity": {"storage": "2Mi"}}})),
        ("relabel another node's marked volume", json!({"metadata": {"labels": {"a": "b"}}})),
        ("annotate another node's marked volume", json!({"metadata": {"annotations": {"a": "b"}}})),
    ] {
        attempts.expect(refused(WRITE_OWN_NODE), title, volumes().patches(marked, &change));
    }
}

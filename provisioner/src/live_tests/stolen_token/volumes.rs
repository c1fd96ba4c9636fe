//! Requests for PersistentVolumes.

use serde_json::json;

use super::{
    super::HERE,
    attempt::{Attempts, Expected, changed, name},
    scene::{DRIVER, OTHER_DRIVER, Scene, THERE, volumes},
};
use crate::objects::pv::FINALIZER;

const POLICY: &str = "loopfs-provisioner-volumes";

fn refused(words: &'static str) -> Expected {
    Expected::Refused(POLICY, words)
}

pub(super) fn create(scene: &Scene, attempts: &mut Attempts) {
    let volume = scene.new_volume("waiting-own", DRIVER, HERE);
    let create = |object| volumes().create(object);
    attempts.allow("create its own volume", [create(volume.clone()), volumes().apply(volume.clone())]);
    // README.md documents this limit: a policy that checks a volume cannot read the claim.
    for claim in ["waiting-theirs", "waiting-other"] {
        let mut volume = scene.new_volume(claim, DRIVER, HERE);
        volume["spec"]["storageClassName"] = json!(scene.class);
        attempts.allow(&format!("create a volume for the claim {claim}"), [create(volume)]);
    }
    attempts.refuse_unbound(POLICY, "create a volume", create(volume.clone()));

    let topology = |operator: &str, values: &[&str]| json!({"key": "topology.csi.loopfs.dev/node", "operator": operator, "values": values});
    let here = || json!({"matchExpressions": [topology("In", &[HERE])]});
    let affinity = |terms: serde_json::Value| json!({"spec": {"nodeAffinity": {"required": {"nodeSelectorTerms": terms}}}});
    let secret = json!({"name": "password", "namespace": "kube-system"});
    let owner =
        json!({"apiVersion": "v1", "kind": "Node", "name": THERE, "uid": "1", "blockOwnerDeletion": true});
    let foreign = scene.volume("bound-theirs");
    for (words, title, change) in [
        (
            "only volumes of its own driver",
            "create a volume of another driver",
            json!({"spec": {"csi": {"driver": OTHER_DRIVER}}}),
        ),
        (
            "only volumes of its own driver",
            "create a volume that is a path of the host",
            json!({"spec": {"csi": null, "hostPath": {"path": "/etc"}}}),
        ),
        (
            "writes only volumes of its own node",
            "create a volume with another node's label",
            json!({"metadata": {"labels": {"csi.loopfs.dev/node": THERE}}}),
        ),
        (
            "writes only volumes of its own node",
            "create a volume without a label",
            json!({"metadata": {"labels": null}}),
        ),
        (
            "no other node can use",
            "create a volume without an affinity",
            json!({"spec": {"nodeAffinity": null}}),
        ),
        (
            "no other node can use",
            "create a volume of another node",
            affinity(json!([{"matchExpressions": [topology("In", &[THERE])]}])),
        ),
        (
            "no other node can use",
            "create a volume of two nodes",
            affinity(json!([{"matchExpressions": [topology("In", &[HERE, THERE])]}])),
        ),
        (
            "no other node can use",
            "create a volume with two terms",
            affinity(json!([here(), {"matchExpressions": [topology("In", &[THERE])]}])),
        ),
        (
            "no other node can use",
            "create a volume of all other nodes",
            affinity(json!([{"matchExpressions": [topology("NotIn", &[HERE])]}])),
        ),
        (
            "no other node can use",
            "create a volume of a zone",
            affinity(json!([{"matchExpressions": [{"key": "zone", "operator": "In", "values": [HERE]}]}])),
        ),
        ("no other node can use", "create a volume with an empty term", affinity(json!([here(), {}]))),
        (
            "no other node can use",
            "create a volume with a field of another node",
            affinity(
                json!([{"matchFields": [{"key": "metadata.name", "operator": "In", "values": [THERE]}]}]),
            ),
        ),
        (
            "names a volume and its data",
            "create a volume with the handle of another node's volume",
            json!({"spec": {"csi": {"volumeHandle": foreign["spec"]["csi"]["volumeHandle"]}}}),
        ),
        (
            "names a volume and its data",
            "create a volume whose handle is a path",
            json!({"spec": {"csi": {"volumeHandle": "../../etc"}}}),
        ),
        (
            "names a volume and its data",
            "create a volume of another name",
            json!({"metadata": {"name": "mine"}}),
        ),
        (
            "names a volume and its data",
            "create a volume of a generated name",
            json!({"metadata": {"name": null, "generateName": "pvc-"}}),
        ),
        ("names a volume and its data", "create a volume for any claim", json!({"spec": {"claimRef": null}})),
        (
            "names a volume and its data",
            "create a volume for any claim of a name",
            json!({"spec": {"claimRef": {"uid": null}}}),
        ),
        (
            "names a volume and its data",
            "create a volume under one claim's UID for another claim",
            json!({"spec": {"claimRef": {"uid": scene.claim_of("waiting-theirs")["metadata"]["uid"]}}}),
        ),
        (
            "without secrets",
            "read a secret when the volume is staged",
            json!({"spec": {"csi": {"nodeStageSecretRef": secret}}}),
        ),
        (
            "without secrets",
            "read a secret when the volume is published",
            json!({"spec": {"csi": {"nodePublishSecretRef": secret}}}),
        ),
        (
            "without secrets",
            "read a secret when the volume is expanded",
            json!({"spec": {"csi": {"nodeExpandSecretRef": secret}}}),
        ),
        (
            "without secrets",
            "name a secret for a controller",
            json!({"spec": {"csi": {"controllerPublishSecretRef": secret}}}),
        ),
        (
            "without secrets",
            "keep an attributes class from being deleted",
            json!({"spec": {"volumeAttributesClassName": "gold"}}),
        ),
        (
            "annotates volumes only",
            "have another driver's provisioner delete the handle",
            json!({"metadata": {"annotations": {"pv.kubernetes.io/provisioned-by": OTHER_DRIVER}}}),
        ),
        (
            "annotates volumes only",
            "have another driver take the volume for a migrated one",
            json!({"metadata": {"annotations": {"pv.kubernetes.io/migrated-to": OTHER_DRIVER}}}),
        ),
        (
            "annotates volumes only",
            "have the volume offered to other claims",
            json!({"metadata": {"annotations": {"pv.kubernetes.io/bound-by-controller": "yes"}}}),
        ),
        (
            "annotates volumes only",
            "name another class in an annotation",
            json!({"metadata": {"annotations": {"volume.beta.kubernetes.io/storage-class": scene.other_class}}}),
        ),
        (
            "without owners",
            "keep a Node from being deleted",
            json!({"metadata": {"ownerReferences": [owner]}}),
        ),
        (
            "without owners",
            "create a volume that cannot be deleted",
            json!({"metadata": {"finalizers": ["example.com/keep"]}}),
        ),
    ] {
        attempts.expect(refused(words), title, [create(changed(&volume, change))]);
    }
    // The class of this volume is that of its claim.
    attempts.expect(
        Expected::Refused("loopfs-provisioner-classes", "classes of other drivers"),
        "create a volume of another driver's class",
        [create(scene.new_volume("waiting-other", DRIVER, HERE))],
    );
}

pub(super) fn change(scene: &Scene, attempts: &mut Attempts) {
    let (own, theirs, other) =
        (scene.volume("bound-own"), scene.volume("bound-theirs"), scene.volume("bound-other"));
    let larger = json!({"spec": {"capacity": {"storage": "2Mi"}}});
    let strategic =
        |object, change| [volumes().patch(name(object), super::request::Format::Strategic, change)];
    let let_go = json!({"metadata": {"$deleteFromPrimitiveList/finalizers": [FINALIZER]}});
    attempts.allow("grow its own volume", volumes().patches(own, &larger));
    attempts.allow("let its own volume go", strategic(own, let_go.clone()));
    attempts.allow("hold its own volume", strategic(own, json!({"metadata": {"finalizers": [FINALIZER]}})));
    attempts.refuse_unbound(POLICY, "change a volume", strategic(own, larger.clone())[0].clone());

    let claim = |name| {
        let claim = scene.claim_of(name);
        json!({"spec": {"claimRef": {"name": name, "uid": claim["metadata"]["uid"], "resourceVersion": null}}})
    };
    let secret = json!({"name": "password", "namespace": "kube-system"});
    let owner =
        json!({"apiVersion": "v1", "kind": "Node", "name": THERE, "uid": "1", "blockOwnerDeletion": true});
    for (words, title, change) in [
        (
            "no field of a volume but its capacity",
            "give its own volume to a stranger's claim",
            claim("waiting-other"),
        ),
        (
            "no field of a volume but its capacity",
            "offer its own volume to all claims",
            json!({"spec": {"claimRef": null}}),
        ),
        (
            "no field of a volume but its capacity",
            "change the reclaim policy",
            json!({"spec": {"persistentVolumeReclaimPolicy": "Retain"}}),
        ),
        (
            "no field of a volume but its capacity",
            "change the class",
            json!({"spec": {"storageClassName": scene.other_class}}),
        ),
        (
            "no field of a volume but its capacity",
            "add a mount option",
            json!({"spec": {"mountOptions": ["nosuid", "exec"]}}),
        ),
        (
            "no field of a volume but its capacity",
            "add an access mode",
            json!({"spec": {"accessModes": ["ReadWriteOnce", "ReadWriteMany"]}}),
        ),
        (
            "no field of a volume but its capacity",
            "name a secret afterwards",
            json!({"spec": {"csi": {"controllerExpandSecretRef": secret}}}),
        ),
        (
            "leaves the labels, annotations and owners",
            "label its own volume",
            json!({"metadata": {"labels": {"topology.kubernetes.io/zone": "z"}}}),
        ),
        (
            "leaves the labels, annotations and owners",
            "have another driver's provisioner delete its own volume",
            json!({"metadata": {"annotations": {"pv.kubernetes.io/provisioned-by": OTHER_DRIVER}}}),
        ),
        (
            "leaves the labels, annotations and owners",
            "own its own volume",
            json!({"metadata": {"ownerReferences": [owner]}}),
        ),
        (
            "no finalizer of a volume but its own",
            "add a finalizer",
            json!({"metadata": {"finalizers": [FINALIZER, "kubernetes.io/pv-protection", "example.com/keep"]}}),
        ),
        (
            "writes only volumes of its own node",
            "hand its own volume over to another node",
            json!({"metadata": {"labels": {"csi.loopfs.dev/node": THERE}}}),
        ),
    ] {
        attempts.expect(refused(words), title, volumes().patches(own, &change));
    }
    let unprotect =
        json!({"metadata": {"$deleteFromPrimitiveList/finalizers": ["kubernetes.io/pv-protection"]}});
    attempts.expect(
        refused("no finalizer of a volume but its own"),
        "take the protection off",
        strategic(own, unprotect),
    );

    attempts.expect(
        refused("writes only volumes of its own node"),
        "grow another node's volume",
        volumes().patches(theirs, &larger),
    );
    attempts.expect(
        refused("writes only volumes of its own node"),
        "let another node's volume go",
        strategic(theirs, let_go.clone()),
    );
    let mine = json!({"metadata": {"labels": {"csi.loopfs.dev/node": HERE}}});
    attempts.expect(
        refused("changes only volumes of its own node"),
        "take another node's volume",
        volumes().patches(theirs, &mine),
    );
    attempts.expect(
        refused("only volumes of its own driver"),
        "take another driver's volume",
        volumes().patches(other, &mine),
    );
    attempts.allow("delete its own volume", [volumes().delete(name(own))]);
    attempts.expect(
        refused("only volumes of its own driver"),
        "delete another driver's volume",
        [volumes().delete(name(other))],
    );
    attempts.refuse_unbound(POLICY, "delete a volume", volumes().delete(name(own)));
}

/// Adds requests for PersistentVolumes of other nodes, to which the component node-loss gives access.
pub(super) fn settle(scene: &Scene, enforced: bool, attempts: &mut Attempts) {
    let (theirs, marked) = (scene.volume("bound-theirs"), scene.volume("bound-marked"));
    let let_go = json!({"metadata": {"$deleteFromPrimitiveList/finalizers": [FINALIZER]}});
    let release = volumes().patch(name(marked), super::request::Format::Strategic, let_go);
    let (deletes, releases) = match enforced {
        true => (Expected::Allowed, Expected::Allowed),
        false => {
            (refused("changes only volumes of its own node"), refused("writes only volumes of its own node"))
        }
    };
    attempts.expect(deletes, "delete another node's volume", [volumes().delete(name(theirs))]);
    attempts.also(1, "settle", "lostnodes");
    attempts.expect(releases, "let another node's marked volume go", [release]);
    attempts.also(1, "settle", "lostnodes");
    for (title, change) in [
        ("grow another node's marked volume", json!({"spec": {"capacity": {"storage": "2Mi"}}})),
        ("relabel another node's marked volume", json!({"metadata": {"labels": {"a": "b"}}})),
        ("annotate another node's marked volume", json!({"metadata": {"annotations": {"a": "b"}}})),
    ] {
        attempts.expect(
            refused("writes only volumes of its own node"),
            title,
            volumes().patches(marked, &change),
        );
    }
}

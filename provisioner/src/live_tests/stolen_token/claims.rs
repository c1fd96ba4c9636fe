//! Requests for PersistentVolumeClaims.

use serde_json::{Value, json};

use super::{
    attempt::{Attempts, Expected},
    scene::{DRIVER, OTHER_DRIVER, Scene, THERE, claims},
};
use crate::objects::{claim_status::NODE_EXPANSION_NOT_REQUIRED, ownership::SELECTED_NODE};

const RESCHEDULE: &str = "loopfs-provisioner-reschedule";
const STATUS: &str = "loopfs-provisioner-claims";
const DELETION: &str = "loopfs-provisioner-claim-deletion";

// Words of the rules that refuse more than one of the requests.
const OWN_NODE: &str = "own node was selected";
const OWN_DRIVER: &str = "claims of its own driver";
const SELECTED_NODE_ONLY: &str = "only the annotation of the selected node";
const ALL_ELSE: &str = "may not change the spec, labels, finalizers and owners";
const RESIZE_FIELDS: &str = "that a resize needs";
const NO_METADATA: &str = "no metadata except";

fn owner() -> Value {
    json!({"apiVersion": "v1", "kind": "Node", "name": THERE, "uid": "1", "blockOwnerDeletion": true})
}

pub(super) fn reschedule(scene: &Scene, attempts: &mut Attempts) {
    let patches = |claim: &str, change: &Value| claims(scene).patches(&scene.claim_of(claim), change);
    let reschedule = json!({"metadata": {"annotations": {SELECTED_NODE: null}}});
    attempts.allow("return its own claim to the scheduler", patches("waiting-own", &reschedule));
    let of_no_node = patches("waiting-own", &reschedule).remove(0);
    attempts.expect(Expected::Refused(RESCHEDULE, OWN_NODE), "return a claim to the scheduler", [of_no_node]);
    attempts.unbound();
    for (words, claim) in [
        (OWN_NODE, "waiting-theirs"),
        (OWN_NODE, "bound-theirs"),
        (OWN_DRIVER, "waiting-other"),
        (OWN_DRIVER, "bound-other"),
        ("claims that wait for a volume", "bound-own"),
    ] {
        let title = format!("return the claim {claim} to the scheduler");
        attempts.expect(Expected::Refused(RESCHEDULE, words), &title, patches(claim, &reschedule));
    }
    let label = json!({"metadata": {"labels": {"a": "b"}}});
    for claim in ["bound-unplaced", "bound-other-unplaced", "by-hand", "by-hand-other"] {
        let title = format!("label the claim {claim}");
        attempts.expect(Expected::Refused(RESCHEDULE, OWN_NODE), &title, patches(claim, &label));
    }
    let volume = &scene.volume("bound-own")["metadata"]["name"];
    for (words, title, metadata, spec) in [
        (
            SELECTED_NODE_ONLY,
            "send its own claim to another node",
            json!({"annotations": {SELECTED_NODE: THERE}}),
            json!({}),
        ),
        (
            SELECTED_NODE_ONLY,
            "have another driver provision its own claim",
            json!({"annotations": {"volume.kubernetes.io/storage-provisioner": OTHER_DRIVER}}),
            json!({}),
        ),
        (
            SELECTED_NODE_ONLY,
            "annotate its own claim",
            json!({"annotations": {SELECTED_NODE: null, "a": "b"}}),
            json!({}),
        ),
        (
            ALL_ELSE,
            "label its own claim",
            json!({"annotations": {SELECTED_NODE: null}, "labels": {"a": "b"}}),
            json!({}),
        ),
        (
            ALL_ELSE,
            "keep its own claim from being deleted",
            json!({"annotations": {SELECTED_NODE: null}, "finalizers": ["kubernetes.io/pvc-protection", "example.com/keep"]}),
            json!({}),
        ),
        (
            ALL_ELSE,
            "own its own claim",
            json!({"annotations": {SELECTED_NODE: null}, "ownerReferences": [owner()]}),
            json!({}),
        ),
        (
            ALL_ELSE,
            "bind its own claim to the volume of another claim",
            json!({"annotations": {SELECTED_NODE: null}}),
            json!({"volumeName": volume}),
        ),
    ] {
        let change = match spec.as_object().is_some_and(|spec| spec.is_empty()) {
            true => json!({"metadata": metadata}),
            false => json!({"metadata": metadata, "spec": spec}),
        };
        attempts.expect(Expected::Refused(RESCHEDULE, words), title, patches("waiting-own", &change));
    }
}

pub(super) fn status(scene: &Scene, attempts: &mut Attempts) {
    let resource = claims(scene).subresource("status");
    let patches = |claim: &str, change: &Value| resource.patches(&scene.claim_of(claim), change);
    // The conditions of other controllers stay.
    let resizing = |claim: &str| {
        let mut conditions = scene.claim_of(claim)["status"]["conditions"].as_array().unwrap().clone();
        conditions.push(json!({"type": "Resizing", "status": "True"}));
        conditions
    };
    let resize = json!({
        "metadata": {"annotations": {NODE_EXPANSION_NOT_REQUIRED: "true"}},
        "status": {
            "capacity": {"storage": "2Mi"}, "allocatedResources": {"storage": "2Mi"},
            "allocatedResourceStatuses": {"storage": "ControllerResizeInProgress"},
            "conditions": resizing("bound-own"),
        },
    });
    attempts.allow("record a resize of its own claim", patches("bound-own", &resize));
    // docs/src/security.md documents this limit: only the volumes of these claims name the node.
    let progress =
        |claim: &str| json!({"status": {"capacity": {"storage": "2Mi"}, "conditions": resizing(claim)}});
    for claim in ["bound-unplaced", "by-hand"] {
        attempts.allow(&format!("record a resize of the claim {claim}"), patches(claim, &progress(claim)));
    }
    attempts.refuse_unbound(STATUS, "record a resize", patches("bound-own", &resize).remove(0));
    for (policy, words, claim) in [
        (STATUS, "bound claims of its own node", "bound-theirs"),
        (STATUS, "bound claims of its own node", "waiting-own"),
        (STATUS, OWN_DRIVER, "bound-other"),
        (STATUS, OWN_DRIVER, "bound-other-unplaced"),
        ("loopfs-provisioner-classes", "classes of other drivers", "by-hand-other"),
    ] {
        let title = format!("record a resize of the claim {claim}");
        attempts.expect(Expected::Refused(policy, words), &title, patches(claim, &progress(claim)));
    }
    for (words, title, change) in [
        (RESIZE_FIELDS, "lose its own claim", json!({"phase": "Lost"})),
        (RESIZE_FIELDS, "widen the access modes", json!({"accessModes": ["ReadWriteOnce", "ReadWriteMany"]})),
        (RESIZE_FIELDS, "name an attributes class", json!({"currentVolumeAttributesClassName": "gold"})),
        (
            "only the conditions of a resize",
            "add a condition",
            json!({"conditions": [{"type": "Other", "status": "True"}]}),
        ),
        ("only the conditions of a resize", "remove a condition", json!({"conditions": []})),
    ] {
        let change = json!({"status": change});
        attempts.expect(Expected::Refused(STATUS, words), title, patches("bound-own", &change));
    }
    for claim in ["bound-own", "bound-unplaced", "by-hand"] {
        for (what, metadata) in [
            ("label", json!({"labels": {"a": "b"}})),
            ("select a node for", json!({"annotations": {SELECTED_NODE: THERE}})),
            (
                "change the driver of",
                json!({"annotations": {"volume.kubernetes.io/storage-provisioner": "csi.third.dev"}}),
            ),
            (
                "keep from being deleted",
                json!({"finalizers": ["kubernetes.io/pvc-protection", "example.com/keep"]}),
            ),
            ("unprotect", json!({"finalizers": []})),
            ("own", json!({"ownerReferences": [owner()]})),
        ] {
            let (title, change) = (format!("{what} the claim {claim}"), json!({"metadata": metadata}));
            attempts.expect(Expected::Refused(STATUS, NO_METADATA), &title, patches(claim, &change));
        }
    }
    let disown = json!({"metadata": {"annotations": {"volume.kubernetes.io/storage-provisioner": null}}});
    attempts.expect(
        Expected::Refused(STATUS, NO_METADATA),
        "remove the driver from its own claim",
        patches("bound-own", &disown),
    );
    // With the component node-loss, the token could then delete the claims.
    let adopt = json!({"metadata": {"annotations": {"volume.kubernetes.io/storage-provisioner": DRIVER}}});
    for claim in ["bound-other", "bound-other-unplaced"] {
        let title = format!("adopt the claim {claim}");
        attempts.expect(Expected::Refused(STATUS, OWN_DRIVER), &title, patches(claim, &adopt));
    }
}

/// Adds deletions of claims, which the component node-loss permits.
pub(super) fn delete(scene: &Scene, enforced: bool, attempts: &mut Attempts) {
    let delete = |claim: &str| claims(scene).delete(claim);
    let own = ["bound-own", "bound-theirs", "bound-unplaced", "waiting-own"];
    let foreign = ["bound-other", "bound-other-unplaced", "by-hand-other", "by-hand"];
    if !enforced {
        attempts.expect(Expected::NotGranted, "delete a claim", own.into_iter().chain(foreign).map(delete));
        return;
    }
    attempts.allow("delete a claim of its own driver", own.map(delete));
    attempts.expect(
        Expected::Refused(DELETION, OWN_DRIVER),
        "delete a claim of another driver or of none",
        foreign.map(delete),
    );
    attempts.refuse_unbound(DELETION, "delete a claim", delete("bound-own"));
}

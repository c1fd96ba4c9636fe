//! Requests for PersistentVolumeClaims.

use serde_json::{Value, json};

use super::attacker::Attacker;
use super::attempt::{Attempts, ExpectedVerdict};
use super::scene::{DRIVER, OTHER_DRIVER, Scene, claims};
use crate::objects::claim_status::NODE_EXPANSION_NOT_REQUIRED;
use crate::objects::ownership::SELECTED_NODE;
use crate::testing::fixtures;

/// The label with the node of a claim.
pub(super) const NODE_LABEL: &str = "csi.loopfs.dev/node";

const RESCHEDULE: &str = "loopfs-provisioner-reschedule";
const SELECTION: &str = "loopfs-controller-claims";
const CLASSES: &str = "loopfs-controller-classes";
const STATUS: &str = "loopfs-provisioner-claims";
const DELETION: &str = "loopfs-provisioner-claim-deletion";

// Words of the rules that refuse more than one of the requests.
const OWN_NODE: &str = "own node was selected";
const OWN_DRIVER: &str = "claims of its own driver";
const WAITING: &str = "claims that wait for a volume";
const ONLY_REMOVE: &str = "only the annotation of the selected node of a claim, and only remove it";
const ONLY_SELECT: &str = "only add or remove the annotation of the selected node";
const ONLY_SELECTED: &str = "label a claim only with the selected node";
const ALL_ELSE: &str = "may not change the spec, labels, finalizers and owners";
const RESIZE_FIELDS: &str = "that a resize needs";
const NO_LARGER: &str = "no larger allocated size of a claim than the requested one";
const NO_METADATA: &str = "no metadata except";

/// Adds the requests of the provisioner, which returns claims to the scheduler.
pub(super) fn reschedule(scene: &Scene, attempts: &mut Attempts) {
    let patches = |claim: &str, change: &Value| claims(scene).patches(&scene.claim_of(claim), change);
    let refused = |words| ExpectedVerdict::Refused(RESCHEDULE, words);
    let reschedule = json!({"metadata": {"annotations": {SELECTED_NODE: null}}});
    attempts.allow("return its own claim to the scheduler", patches("waiting-own", &reschedule));
    let of_no_node = patches("waiting-own", &reschedule).remove(0);
    attempts.expect(refused(OWN_NODE), "return a claim to the scheduler", [of_no_node]);
    attempts.unbound();
    for (words, claim) in [
        (OWN_NODE, "waiting-theirs"),
        (OWN_NODE, "bound-theirs"),
        (OWN_DRIVER, "waiting-other"),
        (OWN_DRIVER, "bound-other"),
        (WAITING, "bound-own"),
    ] {
        let title = format!("return the claim {claim} to the scheduler");
        attempts.expect(refused(words), &title, patches(claim, &reschedule));
    }
    let label = json!({"metadata": {"labels": {"a": "b"}}});
    for claim in ["bound-unplaced", "bound-other-unplaced", "by-hand", "by-hand-other"] {
        attempts.expect(refused(OWN_NODE), &format!("label the claim {claim}"), patches(claim, &label));
    }
    let select = |node: &str| json!({"metadata": {"annotations": {SELECTED_NODE: node}}});
    attempts.expect(
        refused(ONLY_REMOVE),
        "send its own claim to another node",
        patches("waiting-own", &select(scene.there)),
    );
    attempts.expect(
        refused(OWN_NODE),
        "select its own node for a claim",
        patches("waiting-unplaced", &select(scene.here)),
    );
    change_more(scene, "waiting-own", &Value::Null, (RESCHEDULE, ONLY_REMOVE), attempts);
}

/// Adds the requests of the controller, which selects the nodes of claims.
pub(super) fn select(scene: &Scene, attempts: &mut Attempts) {
    let patches = |claim: &str, change: &Value| claims(scene).patches(&scene.claim_of(claim), change);
    let refused = |words| ExpectedVerdict::Refused(SELECTION, words);
    let there = json!(scene.there);
    let select = json!({"metadata": {"annotations": {SELECTED_NODE: there}}});
    attempts.allow("select a node for a claim", patches("waiting-unplaced", &select));
    attempts.refuse_unbound(SELECTION, "select a node", patches("waiting-unplaced", &select).remove(0));
    for (words, claim) in
        [(OWN_DRIVER, "waiting-other-unplaced"), (OWN_DRIVER, "without-class"), (WAITING, "bound-unplaced")]
    {
        let title = format!("select a node for the claim {claim}");
        attempts.expect(refused(words), &title, patches(claim, &select));
    }
    // The provisioner returned this claim to the scheduler, which selects the next node.
    attempts.expect(
        ExpectedVerdict::Refused(CLASSES, "classes with the volumeBindingMode Immediate"),
        "select a node in place of the scheduler",
        patches("returned", &select),
    );
    change_more(scene, "waiting-unplaced", &there, (SELECTION, ONLY_SELECT), attempts);
}

/// Adds the requests of the controller that remove the selected node of a claim.
pub(super) fn unselect(scene: &Scene, attempts: &mut Attempts) {
    let patches = |claim: &str, change: &Value| claims(scene).patches(&scene.claim_of(claim), change);
    let refused = |words| ExpectedVerdict::Refused(SELECTION, words);
    let unselect = json!({"metadata": {"annotations": {SELECTED_NODE: null}}});
    // The token can remove any node, because a policy sees neither the Nodes nor the volume. docs/src/security.md documents that.
    for claim in ["waiting-own", "waiting-theirs", "bound-own"] {
        attempts.allow(&format!("remove the node of the claim {claim}"), patches(claim, &unselect));
    }
    attempts.refuse_unbound(SELECTION, "remove a node", patches("waiting-own", &unselect).remove(0));
    for (words, claim) in
        [(OWN_DRIVER, "waiting-other"), (OWN_DRIVER, "bound-other"), (WAITING, "bound-theirs")]
    {
        let title = format!("remove the node of the claim {claim}");
        attempts.expect(refused(words), &title, patches(claim, &unselect));
    }
    let select = json!({"metadata": {"annotations": {SELECTED_NODE: scene.here}}});
    let title = "send a claim to another node";
    attempts.expect(refused(ONLY_SELECT), title, patches("waiting-theirs", &select));
    change_more(scene, "waiting-own", &Value::Null, (SELECTION, ONLY_SELECT), attempts);
    // A bound claim keeps all else too.
    let mut labelled = unselect.clone();
    fixtures::merge_keeping_nulls(&mut labelled, json!({"metadata": {"labels": {"a": "b"}}}));
    attempts.expect(refused(ALL_ELSE), "remove the node and label", patches("bound-own", &labelled));
    let mut expanding = unselect;
    let expand = json!({"spec": {"resources": {"requests": {"storage": "3Mi"}}}});
    fixtures::merge_keeping_nulls(&mut expanding, expand);
    attempts.expect(refused(ALL_ELSE), "remove the node and expand", patches("bound-own", &expanding));
}

/// Adds the requests of the controller that change the label of a claim's node.
pub(super) fn label(scene: &Scene, attacker: &Attacker, attempts: &mut Attempts) {
    let patches = |claim: &str, change: &Value| claims(scene).patches(&scene.claim_of(claim), change);
    let refused = |words| ExpectedVerdict::Refused(SELECTION, words);
    let label = |node: &str| json!({"metadata": {"labels": {NODE_LABEL: node}}});
    // The token can select any node, and the label then follows.
    let mut select = label(scene.there);
    fixtures::merge(&mut select, json!({"metadata": {"annotations": {SELECTED_NODE: scene.there}}}));
    attempts.allow("select and label a node for a claim", patches("waiting-unplaced", &select));
    // Nothing names the node of this claim.
    let title = "label a claim without a selected node";
    attempts.expect(refused(ONLY_SELECTED), title, patches("waiting-unplaced", &label(scene.here)));
    for (words, claim) in [
        (OWN_DRIVER, "waiting-other"),
        (OWN_DRIVER, "waiting-other-unplaced"),
        (OWN_DRIVER, "without-class"),
        (OWN_DRIVER, "bound-other"),
        (OWN_DRIVER, "bound-other-unplaced"),
    ] {
        let title = format!("label the claim {claim}");
        attempts.expect(refused(words), &title, patches(claim, &label(scene.here)));
    }
    // The API server sets the label of the first two to the selected node, whatever the request says. docs/src/security.md documents the
    // limit of the others: only the volumes of these claims name the node.
    for (words, claim, node) in [
        (ONLY_SELECT, "waiting-own", scene.here),
        (WAITING, "bound-theirs", scene.there),
        (WAITING, "bound-unplaced", scene.here),
        (OWN_DRIVER, "by-hand", scene.here),
        (OWN_DRIVER, "by-hand-other", scene.here),
    ] {
        let expected = if attacker.labels_claims() { ExpectedVerdict::Allowed } else { refused(words) };
        let requests = patches(claim, &label(node));
        let count = requests.len();
        attempts.expect(expected, &format!("label the claim {claim} with a node"), requests);
        attempts.also(count, "set", "claimlabels");
    }
    if !attacker.labels_claims() {
        return;
    }
    attempts.refuse_unbound(SELECTION, "label a claim", patches("by-hand", &label(scene.here)).remove(0));
    for (words, title, change) in [
        (WAITING, "select a node", json!({"metadata": {"annotations": {SELECTED_NODE: scene.here}}})),
        (ALL_ELSE, "change another label", json!({"metadata": {"labels": {"a": "b"}}})),
        (
            ALL_ELSE,
            "keep from being deleted",
            json!({"metadata": {"finalizers": ["kubernetes.io/pvc-protection", "example.com/keep"]}}),
        ),
        (ALL_ELSE, "own", json!({"metadata": {"ownerReferences": [scene.other_node()]}})),
        (ALL_ELSE, "expand", json!({"spec": {"resources": {"requests": {"storage": "2Mi"}}}})),
    ] {
        let mut change = change;
        fixtures::merge(&mut change, label(scene.here));
        let title = format!("with the label, {title} a bound claim");
        attempts.expect(refused(words), &title, patches("bound-unplaced", &change));
    }
}

/// Adds requests that change more of a claim than the annotation of the selected node. `annotations` is the policy, and its rule for
/// annotations.
fn change_more(
    scene: &Scene,
    claim: &str,
    selected_node: &Value,
    annotations: (&'static str, &'static str),
    attempts: &mut Attempts,
) {
    let (policy, only_selected_node) = annotations;
    let volume = &scene.volume("bound-own")["metadata"]["name"];
    for (words, title, change) in [
        (only_selected_node, "annotate a claim", json!({"metadata": {"annotations": {"a": "b"}}})),
        (
            only_selected_node,
            "have another driver provision a claim",
            json!({"metadata": {"annotations": {"volume.kubernetes.io/storage-provisioner": OTHER_DRIVER}}}),
        ),
        (ALL_ELSE, "label a claim", json!({"metadata": {"labels": {"a": "b"}}})),
        (
            ALL_ELSE,
            "keep a claim from being deleted",
            json!({"metadata": {"finalizers": ["kubernetes.io/pvc-protection", "example.com/keep"]}}),
        ),
        (ALL_ELSE, "own a claim", json!({"metadata": {"ownerReferences": [scene.other_node()]}})),
        (ALL_ELSE, "bind a claim to the volume of another claim", json!({"spec": {"volumeName": volume}})),
    ] {
        let mut change = change;
        let selection = json!({"metadata": {"annotations": {SELECTED_NODE: selected_node}}});
        fixtures::merge_keeping_nulls(&mut change, selection);
        let requests = claims(scene).patches(&scene.claim_of(claim), &change);
        attempts.expect(ExpectedVerdict::Refused(policy, words), title, requests);
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
        attempts.expect(ExpectedVerdict::Refused(policy, words), &title, patches(claim, &progress(claim)));
    }
    for (words, title, change) in [
        (RESIZE_FIELDS, "lose its own claim", json!({"phase": "Lost"})),
        (RESIZE_FIELDS, "widen the access modes", json!({"accessModes": ["ReadWriteOnce", "ReadWriteMany"]})),
        (RESIZE_FIELDS, "name an attributes class", json!({"currentVolumeAttributesClassName": "gold"})),
        (NO_LARGER, "use up the quota", json!({"allocatedResources": {"storage": "1Ti"}})),
        (NO_LARGER, "allocate one block more", json!({"allocatedResources": {"storage": "2101248"}})),
        (
            NO_LARGER,
            "allocate another resource",
            json!({"allocatedResources": {"storage": "2Mi", "example.com/iops": "1"}}),
        ),
        (
            "only the conditions of a resize",
            "add a condition",
            json!({"conditions": [{"type": "Other", "status": "True"}]}),
        ),
        ("only the conditions of a resize", "remove a condition", json!({"conditions": []})),
    ] {
        let change = json!({"status": change});
        attempts.expect(ExpectedVerdict::Refused(STATUS, words), title, patches("bound-own", &change));
    }
    for claim in ["bound-own", "bound-unplaced", "by-hand"] {
        for (what, metadata) in [
            ("label", json!({"labels": {"a": "b"}})),
            ("select a node for", json!({"annotations": {SELECTED_NODE: scene.there}})),
            (
                "change the driver of",
                json!({"annotations": {"volume.kubernetes.io/storage-provisioner": "csi.third.dev"}}),
            ),
            (
                "keep from being deleted",
                json!({"finalizers": ["kubernetes.io/pvc-protection", "example.com/keep"]}),
            ),
            ("unprotect", json!({"finalizers": []})),
            ("own", json!({"ownerReferences": [scene.other_node()]})),
        ] {
            let (title, change) = (format!("{what} the claim {claim}"), json!({"metadata": metadata}));
            attempts.expect(ExpectedVerdict::Refused(STATUS, NO_METADATA), &title, patches(claim, &change));
        }
    }
    let disown = json!({"metadata": {"annotations": {"volume.kubernetes.io/storage-provisioner": null}}});
    attempts.expect(
        ExpectedVerdict::Refused(STATUS, NO_METADATA),
        "remove the driver from its own claim",
        patches("bound-own", &disown),
    );
    // With the component node-loss, the token could then delete the claims.
    let adopt = json!({"metadata": {"annotations": {"volume.kubernetes.io/storage-provisioner": DRIVER}}});
    for claim in ["bound-other", "bound-other-unplaced"] {
        let title = format!("adopt the claim {claim}");
        attempts.expect(ExpectedVerdict::Refused(STATUS, OWN_DRIVER), &title, patches(claim, &adopt));
    }
}

/// Adds deletions of claims, which the component node-loss permits: to the provisioner for claims of its node.
pub(super) fn delete(scene: &Scene, attacker: &Attacker, attempts: &mut Attempts) {
    let delete = |claim: &str| claims(scene).delete(claim);
    let own = ["bound-own", "waiting-own"];
    let theirs = ["bound-theirs", "waiting-theirs", "bound-unplaced", "waiting-unplaced"];
    let other = ["bound-other", "waiting-other"];
    let unplaced = ["bound-other-unplaced", "by-hand-other", "by-hand"];
    if !attacker.deletes_claims() {
        let all = own.into_iter().chain(theirs).chain(other).chain(unplaced);
        attempts.expect(ExpectedVerdict::NotGranted, "delete a claim", all.map(delete));
        return;
    }
    let refused = |words| ExpectedVerdict::Refused(DELETION, words);
    attempts.allow("delete a claim of its own node", own.map(delete));
    attempts.expect(refused(OWN_DRIVER), "delete a claim of another driver", other.map(delete));
    if attacker.is_controller() {
        attempts.allow("delete a claim of another node", theirs.map(delete));
        let title = "delete a claim of another driver or of none";
        attempts.expect(refused(OWN_DRIVER), title, unplaced.map(delete));
    } else {
        attempts.expect(refused(OWN_NODE), "delete a claim of another node", theirs.map(delete));
    }
    // The token names no node, and neither does this claim.
    attempts.refuse_unbound(DELETION, "delete a claim", delete("bound-unplaced"));
}

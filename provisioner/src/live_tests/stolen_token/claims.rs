//! Requests for PersistentVolumeClaims.

use serde_json::{Value, json};

use super::attacker::Attacker;
use super::attempt::{Attempts, KEEP, annotation, finalizers, label as set_label, owner, spec};
use super::request::{AttackRequest, Verdict};
use super::scene::{DRIVER, NODE_LABEL, OTHER_DRIVER, Scene, claims};
use crate::objects::claim_status::NODE_EXPANSION_NOT_REQUIRED;
use crate::objects::ownership::{SELECTED_NODE, STORAGE_PROVISIONER};
use crate::testing::fixtures;

const PROTECTION: &str = "kubernetes.io/pvc-protection";

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
const RESIZE_CONDITIONS: &str = "only the conditions of a resize";
const NO_METADATA: &str = "no metadata except";

/// Returns a change of a claim in each format of a patch.
fn patches(scene: &Scene, claim: &str, change: &Value) -> Vec<AttackRequest> {
    claims(scene).patches(&scene.claim_of(claim), change)
}

/// Returns a change that selects a node, or removes the selected one.
fn select_node(node: impl Into<Value>) -> Value {
    annotation(SELECTED_NODE, node)
}

fn both(mut first: Value, second: Value) -> Value {
    fixtures::merge_keeping_nulls(&mut first, second);
    first
}

fn request_size(size: &str) -> Value {
    spec(json!({"resources": {"requests": {"storage": size}}}))
}

/// Adds the requests of the provisioner, which returns claims to the scheduler.
pub(super) fn reschedule(scene: &Scene, attempts: &mut Attempts) {
    let refused = |words| Verdict::refused(RESCHEDULE, words);
    let reschedule = select_node(Value::Null);
    attempts.allow("return its own claim to the scheduler", patches(scene, "waiting-own", &reschedule));
    let of_no_node = patches(scene, "waiting-own", &reschedule).remove(0);
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
        attempts.expect(refused(words), title, patches(scene, claim, &reschedule));
    }
    for claim in ["bound-unplaced", "bound-other-unplaced", "by-hand", "by-hand-other"] {
        let requests = patches(scene, claim, &set_label("a", "b"));
        attempts.expect(refused(OWN_NODE), format!("label the claim {claim}"), requests);
    }
    let requests = patches(scene, "waiting-own", &select_node(scene.there));
    attempts.expect(refused(ONLY_REMOVE), "send its own claim to another node", requests);
    let requests = patches(scene, "waiting-unplaced", &select_node(scene.here));
    attempts.expect(refused(OWN_NODE), "select its own node for a claim", requests);
    change_more(scene, "waiting-own", &Value::Null, (RESCHEDULE, ONLY_REMOVE), attempts);
}

/// Adds the requests of the controller, which selects the nodes of claims.
pub(super) fn select(scene: &Scene, attempts: &mut Attempts) {
    let refused = |words| Verdict::refused(SELECTION, words);
    let select = |claim: &str| patches(scene, claim, &select_node(scene.there));
    attempts.allow("select a node for a claim", select("waiting-unplaced"));
    attempts.refuse_unbound(SELECTION, "select a node", select("waiting-unplaced").remove(0));
    for (words, claim) in
        [(OWN_DRIVER, "waiting-other-unplaced"), (OWN_DRIVER, "without-class"), (WAITING, "bound-unplaced")]
    {
        attempts.expect(refused(words), format!("select a node for the claim {claim}"), select(claim));
    }
    // The provisioner returned this claim to the scheduler, which selects the next node.
    attempts.expect(
        Verdict::refused(CLASSES, "classes with the volumeBindingMode Immediate"),
        "select a node in place of the scheduler",
        select("returned"),
    );
    change_more(scene, "waiting-unplaced", &json!(scene.there), (SELECTION, ONLY_SELECT), attempts);
}

/// Adds the requests of the controller that remove the selected node of a claim.
pub(super) fn unselect(scene: &Scene, attempts: &mut Attempts) {
    let refused = |words| Verdict::refused(SELECTION, words);
    let unselect = |claim: &str| patches(scene, claim, &select_node(Value::Null));
    // The token can remove any node, because a policy sees neither the Nodes nor the volume. docs/src/security.md documents that.
    for claim in ["waiting-own", "waiting-theirs", "bound-own"] {
        attempts.allow(format!("remove the node of the claim {claim}"), unselect(claim));
    }
    attempts.refuse_unbound(SELECTION, "remove a node", unselect("waiting-own").remove(0));
    for (words, claim) in
        [(OWN_DRIVER, "waiting-other"), (OWN_DRIVER, "bound-other"), (WAITING, "bound-theirs")]
    {
        attempts.expect(refused(words), format!("remove the node of the claim {claim}"), unselect(claim));
    }
    let requests = patches(scene, "waiting-theirs", &select_node(scene.here));
    attempts.expect(refused(ONLY_SELECT), "send a claim to another node", requests);
    change_more(scene, "waiting-own", &Value::Null, (SELECTION, ONLY_SELECT), attempts);
    // A bound claim keeps all else too.
    for (title, change) in [("label", set_label("a", "b")), ("expand", request_size("3Mi"))] {
        let requests = patches(scene, "bound-own", &both(select_node(Value::Null), change));
        attempts.expect(refused(ALL_ELSE), format!("remove the node and {title}"), requests);
    }
}

/// Adds the requests of the controller that change the label of a claim's node.
pub(super) fn label(scene: &Scene, attacker: &Attacker, attempts: &mut Attempts) {
    let refused = |words| Verdict::refused(SELECTION, words);
    let label = |node: &str| set_label(NODE_LABEL, node);
    // The token can select any node, and the label then follows.
    let select = both(label(scene.there), select_node(scene.there));
    attempts.allow("select and label a node for a claim", patches(scene, "waiting-unplaced", &select));
    // Nothing names the node of this claim.
    let requests = patches(scene, "waiting-unplaced", &label(scene.here));
    attempts.expect(refused(ONLY_SELECTED), "label a claim without a selected node", requests);
    for claim in
        ["waiting-other", "waiting-other-unplaced", "without-class", "bound-other", "bound-other-unplaced"]
    {
        let requests = patches(scene, claim, &label(scene.here));
        attempts.expect(refused(OWN_DRIVER), format!("label the claim {claim}"), requests);
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
        let expected = if attacker.labels_claims() { Verdict::Allowed } else { refused(words) };
        let requests = patches(scene, claim, &label(node));
        let count = requests.len();
        attempts.expect(expected, format!("label the claim {claim} with a node"), requests);
        attempts.also(count, "set", "claimlabels");
    }
    if !attacker.labels_claims() {
        return;
    }
    let unbound = patches(scene, "by-hand", &label(scene.here)).remove(0);
    attempts.refuse_unbound(SELECTION, "label a claim", unbound);
    for (words, title, change) in [
        (WAITING, "select a node", select_node(scene.here)),
        (ALL_ELSE, "change another label", set_label("a", "b")),
        (ALL_ELSE, "keep from being deleted", finalizers(&[PROTECTION, KEEP])),
        (ALL_ELSE, "own", owner(scene.other_node())),
        (ALL_ELSE, "expand", request_size("2Mi")),
    ] {
        let requests = patches(scene, "bound-unplaced", &both(change, label(scene.here)));
        attempts.expect(refused(words), format!("with the label, {title} a bound claim"), requests);
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
        (only_selected_node, "annotate a claim", annotation("a", "b")),
        (only_selected_node, "change the driver of a claim", annotation(STORAGE_PROVISIONER, OTHER_DRIVER)),
        (ALL_ELSE, "label a claim", set_label("a", "b")),
        (ALL_ELSE, "keep a claim from being deleted", finalizers(&[PROTECTION, KEEP])),
        (ALL_ELSE, "own a claim", owner(scene.other_node())),
        (ALL_ELSE, "bind a claim to the volume of another claim", spec(json!({"volumeName": volume}))),
    ] {
        let change = both(change, select_node(selected_node.clone()));
        attempts.expect(Verdict::refused(policy, words), title, patches(scene, claim, &change));
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
        attempts.allow(format!("record a resize of the claim {claim}"), patches(claim, &progress(claim)));
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
        attempts.expect(Verdict::refused(policy, words), title, patches(claim, &progress(claim)));
    }
    let more_resources = json!({"storage": "2Mi", "example.com/iops": "1"});
    let other_condition = json!({"type": "Other", "status": "True"});
    for (words, title, change) in [
        (RESIZE_FIELDS, "lose its own claim", json!({"phase": "Lost"})),
        (RESIZE_FIELDS, "widen the access modes", json!({"accessModes": ["ReadWriteOnce", "ReadWriteMany"]})),
        (RESIZE_FIELDS, "name an attributes class", json!({"currentVolumeAttributesClassName": "gold"})),
        (NO_LARGER, "use up the quota", json!({"allocatedResources": {"storage": "1Ti"}})),
        (NO_LARGER, "allocate one block more", json!({"allocatedResources": {"storage": "2101248"}})),
        (NO_LARGER, "allocate another resource", json!({"allocatedResources": more_resources})),
        (RESIZE_CONDITIONS, "add a condition", json!({"conditions": [other_condition]})),
        (RESIZE_CONDITIONS, "remove a condition", json!({"conditions": []})),
    ] {
        let change = json!({"status": change});
        attempts.expect(Verdict::refused(STATUS, words), title, patches("bound-own", &change));
    }
    for claim in ["bound-own", "bound-unplaced", "by-hand"] {
        for (what, change) in [
            ("label", set_label("a", "b")),
            ("select a node for", select_node(scene.there)),
            ("change the driver of", annotation(STORAGE_PROVISIONER, "csi.third.dev")),
            ("keep from being deleted", finalizers(&[PROTECTION, KEEP])),
            ("unprotect", finalizers(&[])),
            ("own", owner(scene.other_node())),
        ] {
            let title = format!("{what} the claim {claim}");
            attempts.expect(Verdict::refused(STATUS, NO_METADATA), title, patches(claim, &change));
        }
    }
    let disown = patches("bound-own", &annotation(STORAGE_PROVISIONER, Value::Null));
    let title = "remove the driver from its own claim";
    attempts.expect(Verdict::refused(STATUS, NO_METADATA), title, disown);
    // With the component node-loss, the token could then delete the claims.
    let adopt = annotation(STORAGE_PROVISIONER, DRIVER);
    for claim in ["bound-other", "bound-other-unplaced"] {
        let title = format!("adopt the claim {claim}");
        attempts.expect(Verdict::refused(STATUS, OWN_DRIVER), title, patches(claim, &adopt));
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
        attempts.expect(Verdict::NotGranted, "delete a claim", all.map(delete));
        return;
    }
    let refused = |words| Verdict::refused(DELETION, words);
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

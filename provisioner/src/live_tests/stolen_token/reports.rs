//! Requests for the objects in which the driver reports: CSIStorageCapacities and events.

use serde_json::{Value, json};

use super::attacker::Attacker;
use super::attempt::{Attempts, KEEP, changed, finalizers, label, metadata, name, owner};
use super::request::Verdict;
use super::scene::{NODE_LABEL, OTHER_DRIVER, Scene, capacities, events};

const CAPACITIES: &str = "loopfs-provisioner-capacities";
const EVENTS: &str = "loopfs-provisioner-events";

// Words of the rules that refuse more than one of the requests.
const OWN_CAPACITY: &str = "publish only the capacity of its own node";
const NAME: &str = "the name of a capacity";
const LABELS: &str = "a capacity must have the labels";
const OWNER: &str = "the provisioner's own pod";
const FINALIZERS: &str = "may not change the finalizers of a capacity";
const OWN_NAME: &str = "in the name of its own node";
const REGARDING: &str = "only about claims";
const BARE: &str = "may not record events with finalizers or owners";

pub(super) fn capacity(scene: &Scene, attacker: &Attacker, attempts: &mut Attempts) {
    let (here, there) = (scene.here, scene.there);
    let refused = |words| Verdict::refused(CAPACITIES, words);
    let pod = json!({"apiVersion": "v1", "kind": "Pod", "name": attacker.pod.name, "uid": attacker.pod.uid});
    let pod_with = |change: Value| owner(changed(&pod, change));
    let capacity = changed(&scene.new_capacity(here), owner(pod.clone()));
    let create = |change: Value| [capacities().create(changed(&capacity, change))];
    attempts.allow(
        "publish its own capacity",
        [capacities().create(capacity.clone()), capacities().apply(capacity.clone())],
    );
    attempts.refuse_unbound(CAPACITIES, "publish a capacity", capacities().create(capacity.clone()));
    let topology = |labels: Value| json!({"nodeTopology": {"matchLabels": labels}});
    let of_there = topology(json!({"topology.csi.loopfs.dev/node": there}));
    let named = |name: String| metadata(json!({"name": name}));
    let generated = json!({"name": null, "generateName": format!("{here}-")});
    for (words, title, change) in [
        (OWN_CAPACITY, "the capacity of another node", of_there),
        (OWN_CAPACITY, "the capacity of all nodes", topology(Value::Null)),
        (OWN_CAPACITY, "the capacity of no node", json!({"nodeTopology": null})),
        (NAME, "under the name of another node's capacity", named(format!("{there}-0123456789abcdef"))),
        (NAME, "under a name that begins as its own", named(format!("{here}-b-0123456789abcdef"))),
        (NAME, "under a generated name", metadata(generated)),
        (LABELS, "what another node's provisioner takes for its own", label(NODE_LABEL, there)),
        (
            LABELS,
            "what another driver's provisioner takes for its own",
            label("csi.storage.k8s.io/drivername", OTHER_DRIVER),
        ),
        (OWNER, "for another pod", pod_with(json!({"uid": "another"}))),
        (OWNER, "for a Node", pod_with(json!({"kind": "Node"}))),
        (OWNER, "what keeps its own pod from being deleted", pod_with(json!({"blockOwnerDeletion": true}))),
        (FINALIZERS, "what keeps the namespace from being deleted", finalizers(&[KEEP])),
    ] {
        attempts.expect(refused(words), format!("publish {title}"), create(change));
    }
    attempts.expect(
        Verdict::refused("loopfs-provisioner-classes", "classes of other drivers"),
        "publish a capacity for another driver's class",
        create(json!({"storageClassName": scene.other_class})),
    );

    let [own, theirs, other] = ["own", "theirs", "other"].map(|whose| &scene.capacities[whose]);
    let larger = json!({"capacity": "2Gi"});
    attempts.allow("change its own capacity", capacities().patches(own, &larger));
    for (words, title, change) in [
        (LABELS, "label its own capacity as another node's", label(NODE_LABEL, there)),
        (OWNER, "have a Node own its own capacity", pod_with(json!({"kind": "Node"}))),
        (FINALIZERS, "add a finalizer to its own capacity", finalizers(&[KEEP])),
    ] {
        attempts.expect(refused(words), title, capacities().patches(own, &change));
    }
    attempts.allow("delete its own capacity", [capacities().delete(name(own))]);
    for (whose, capacity) in [("node", theirs), ("driver", other)] {
        let change = capacities().patches(capacity, &larger);
        attempts.expect(refused(OWN_CAPACITY), format!("change another {whose}'s capacity"), change);
        let words = "may change and delete only the capacities";
        let delete = [capacities().delete(name(capacity))];
        attempts.expect(refused(words), format!("delete another {whose}'s capacity"), delete);
    }
}

pub(super) fn event(scene: &Scene, attempts: &mut Attempts) {
    let (here, there) = (scene.here, scene.there);
    let refused = |words| Verdict::refused(EVENTS, words);
    let event = scene.new_event(here);
    let in_default = |kind: &str, name: &str| {
        let object = json!({"apiVersion": "v1", "kind": kind, "name": name, "namespace": null});
        [events(scene).within("default").create(changed(&event, json!({"regarding": object})))]
    };
    attempts.allow(
        "report about a claim",
        [events(scene).create(event.clone()), events(scene).apply(event.clone())],
    );
    for (kind, object) in [("PersistentVolume", "pvc-1"), ("Node", here)] {
        attempts.allow(format!("report about a {kind}"), in_default(kind, object));
    }
    attempts.refuse_unbound(EVENTS, "report about a claim", events(scene).create(event.clone()));
    let pod = json!({"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": "1"});
    for (words, title, change) in [
        (OWN_NAME, "in another node's name", json!({"reportingInstance": there})),
        (OWN_NAME, "in another driver's name", json!({"reportingController": OTHER_DRIVER})),
        (OWN_NAME, "as the kubelet", json!({"reportingController": "kubelet"})),
        (REGARDING, "about a Pod", json!({"regarding": {"kind": "Pod"}})),
        (REGARDING, "about another namespace's ConfigMap", json!({"regarding": {"kind": "ConfigMap"}})),
        (BARE, "what keeps the namespace from being deleted", finalizers(&[KEEP])),
        (BARE, "for an owner", owner(pod)),
    ] {
        let title = format!("report {title}");
        attempts.expect(refused(words), title, [events(scene).create(changed(&event, change))]);
    }
    attempts.expect(refused(REGARDING), "report about another node", in_default("Node", there));

    let [own, theirs, other] = ["own", "theirs", "other"].map(|whose| &scene.events[whose]);
    let repeated = json!({"series": {"count": 2, "lastObservedTime": "2026-01-01T00:00:01.000000Z"}});
    attempts.allow("count its own event", events(scene).patches(own, &repeated));
    let keep = events(scene).patches(own, &finalizers(&[KEEP]));
    attempts.expect(refused(BARE), "add a finalizer to its own event", keep);
    for (title, event) in [("label another node's event", theirs), ("label another driver's event", other)] {
        attempts.expect(refused(OWN_NAME), title, events(scene).patches(event, &label("a", "b")));
    }
    attempts.expect(
        Verdict::Invalid("field is immutable".to_owned()),
        "take another node's event",
        events(scene).patches(theirs, &json!({"reportingInstance": here})),
    );
}

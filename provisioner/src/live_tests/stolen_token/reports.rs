//! Requests for the objects in which the driver reports: CSIStorageCapacities and events.

use serde_json::json;

use super::attacker::Attacker;
use super::attempt::{Attempts, ExpectedVerdict, changed, name};
use super::scene::{OTHER_DRIVER, Scene, capacities, events};

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
    let refused = |words| ExpectedVerdict::Refused(CAPACITIES, words);
    let owner = |change: serde_json::Value| {
        let mut owner =
            json!({"apiVersion": "v1", "kind": "Pod", "name": attacker.pod.name, "uid": attacker.pod.uid});
        crate::testing::fixtures::merge(&mut owner, change);
        json!({"metadata": {"ownerReferences": [owner]}})
    };
    let capacity = changed(&scene.new_capacity(here), owner(json!({})));
    attempts.allow(
        "publish its own capacity",
        [capacities().create(capacity.clone()), capacities().apply(capacity.clone())],
    );
    attempts.refuse_unbound(CAPACITIES, "publish a capacity", capacities().create(capacity.clone()));
    for (words, title, change) in [
        (
            OWN_CAPACITY,
            "publish the capacity of another node",
            json!({"nodeTopology": {"matchLabels": {"topology.csi.loopfs.dev/node": there}}}),
        ),
        (OWN_CAPACITY, "publish the capacity of all nodes", json!({"nodeTopology": {"matchLabels": null}})),
        (OWN_CAPACITY, "publish the capacity of no node", json!({"nodeTopology": null})),
        (
            NAME,
            "take the name of another node's capacity",
            json!({"metadata": {"name": format!("{there}-0123456789abcdef")}}),
        ),
        (
            NAME,
            "take the name of the capacity of a node whose name begins alike",
            json!({"metadata": {"name": format!("{here}-b-0123456789abcdef")}}),
        ),
        (
            NAME,
            "publish under a generated name",
            json!({"metadata": {"name": null, "generateName": format!("{here}-")}}),
        ),
        (
            LABELS,
            "publish what another node's provisioner takes for its own",
            json!({"metadata": {"labels": {"csi.loopfs.dev/node": there}}}),
        ),
        (
            LABELS,
            "publish what another driver's provisioner takes for its own",
            json!({"metadata": {"labels": {"csi.storage.k8s.io/drivername": OTHER_DRIVER}}}),
        ),
        (OWNER, "publish for another pod", owner(json!({"uid": "another"}))),
        (OWNER, "publish for a Node", owner(json!({"kind": "Node"}))),
        (OWNER, "keep its own pod from being deleted", owner(json!({"blockOwnerDeletion": true}))),
        (
            FINALIZERS,
            "keep the namespace from being deleted",
            json!({"metadata": {"finalizers": ["example.com/keep"]}}),
        ),
    ] {
        attempts.expect(refused(words), title, [capacities().create(changed(&capacity, change))]);
    }
    attempts.expect(
        ExpectedVerdict::Refused("loopfs-provisioner-classes", "classes of other drivers"),
        "publish a capacity for another driver's class",
        [capacities().create(changed(&capacity, json!({"storageClassName": scene.other_class})))],
    );

    let [own, theirs, other] = ["own", "theirs", "other"].map(|whose| &scene.capacities[whose]);
    let larger = json!({"capacity": "2Gi"});
    attempts.allow("change its own capacity", capacities().patches(own, &larger));
    for (words, title, change) in [
        (
            LABELS,
            "label its own capacity as another node's",
            json!({"metadata": {"labels": {"csi.loopfs.dev/node": there}}}),
        ),
        (OWNER, "have a Node own its own capacity", owner(json!({"kind": "Node"}))),
        (
            FINALIZERS,
            "add a finalizer to its own capacity",
            json!({"metadata": {"finalizers": ["example.com/keep"]}}),
        ),
    ] {
        attempts.expect(refused(words), title, capacities().patches(own, &change));
    }
    for (title, capacity) in
        [("change another node's capacity", theirs), ("change another driver's capacity", other)]
    {
        attempts.expect(refused(OWN_CAPACITY), title, capacities().patches(capacity, &larger));
    }
    attempts.allow("delete its own capacity", [capacities().delete(name(own))]);
    for (title, capacity) in
        [("delete another node's capacity", theirs), ("delete another driver's capacity", other)]
    {
        attempts.expect(
            refused("may change and delete only the capacities"),
            title,
            [capacities().delete(name(capacity))],
        );
    }
}

pub(super) fn event(scene: &Scene, attempts: &mut Attempts) {
    let (here, there) = (scene.here, scene.there);
    let refused = |words| ExpectedVerdict::Refused(EVENTS, words);
    let event = scene.new_event(here);
    let in_default = events(scene).within("default");
    let about = |kind: &str, name: &str| json!({"regarding": {"apiVersion": "v1", "kind": kind, "name": name, "namespace": null}});
    attempts.allow(
        "report about a claim",
        [events(scene).create(event.clone()), events(scene).apply(event.clone())],
    );
    for (kind, object) in [("PersistentVolume", "pvc-1"), ("Node", here)] {
        attempts.allow(
            &format!("report about a {kind}"),
            [in_default.create(changed(&event, about(kind, object)))],
        );
    }
    attempts.refuse_unbound(EVENTS, "report about a claim", events(scene).create(event.clone()));
    for (words, title, change) in [
        (OWN_NAME, "report in another node's name", json!({"reportingInstance": there})),
        (OWN_NAME, "report in another driver's name", json!({"reportingController": OTHER_DRIVER})),
        (OWN_NAME, "report as the kubelet", json!({"reportingController": "kubelet"})),
        (REGARDING, "report about a Pod", json!({"regarding": {"kind": "Pod"}})),
        (
            REGARDING,
            "report about a ConfigMap of another namespace",
            json!({"regarding": {"kind": "ConfigMap"}}),
        ),
        (
            BARE,
            "keep the namespace from being deleted",
            json!({"metadata": {"finalizers": ["example.com/keep"]}}),
        ),
        (
            BARE,
            "report for an owner",
            json!({"metadata": {"ownerReferences": [{"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": "1"}]}}),
        ),
    ] {
        attempts.expect(refused(words), title, [events(scene).create(changed(&event, change))]);
    }
    attempts.expect(
        refused(REGARDING),
        "report about another node",
        [in_default.create(changed(&event, about("Node", there)))],
    );

    let [own, theirs, other] = ["own", "theirs", "other"].map(|whose| &scene.events[whose]);
    let repeated = json!({"series": {"count": 2, "lastObservedTime": "2026-01-01T00:00:01.000000Z"}});
    attempts.allow("count its own event", events(scene).patches(own, &repeated));
    let keep = json!({"metadata": {"finalizers": ["example.com/keep"]}});
    attempts.expect(refused(BARE), "add a finalizer to its own event", events(scene).patches(own, &keep));
    let label = json!({"metadata": {"labels": {"a": "b"}}});
    for (words, title, event) in
        [(OWN_NAME, "label another node's event", theirs), (OWN_NAME, "label another driver's event", other)]
    {
        attempts.expect(refused(words), title, events(scene).patches(event, &label));
    }
    let mine = json!({"reportingInstance": here});
    attempts.expect(
        ExpectedVerdict::Invalid("field is immutable"),
        "take another node's event",
        events(scene).patches(theirs, &mine),
    );
}

//! Requests for the Lease, which the active replica of the controller holds.

use serde_json::json;

use super::attempt::{Attempts, KEEP, changed, finalizers, owner};
use super::request::Verdict;
use super::scene::{LEASE, Scene, leases};

const POLICY: &str = "loopfs-controller-lease";

// Words of the rules that refuse more than one of the requests.
const OWN_LEASE: &str = "only its own Lease";
const BARE: &str = "may not change the finalizers and owners";

pub(super) fn hold(scene: &Scene, attempts: &mut Attempts) {
    let lease = &scene.lease;
    let held = json!({"spec": {"holderIdentity": "thief", "leaseDurationSeconds": 3600}});
    attempts.allow("read the Lease", [leases().request("get", Some(LEASE))]);
    // The token can keep the Lease, because each replica may take it over. No replica performs the duties then.
    attempts.allow("hold the Lease", leases().patches(lease, &held));

    let new = json!({"metadata": {"name": LEASE}});
    let refused = |words| Verdict::refused(POLICY, words);
    attempts.expect(Verdict::Exists, "create the Lease", [leases().create(new.clone())]);
    for (title, metadata) in [
        ("create another Lease", json!({"name": "kube-scheduler"})),
        ("create a Lease of a generated name", json!({"name": null, "generateName": LEASE})),
    ] {
        let lease = leases().create(changed(&new, json!({"metadata": metadata})));
        attempts.expect(refused(OWN_LEASE), title, [lease]);
    }
    for (title, change) in [
        ("keep the namespace from being deleted", finalizers(&[KEEP])),
        ("keep a Node from being deleted", owner(scene.other_node())),
    ] {
        attempts.expect(refused(BARE), title, [leases().create(changed(&new, change.clone()))]);
        attempts.expect(refused(BARE), title, leases().patches(lease, &change));
    }
}

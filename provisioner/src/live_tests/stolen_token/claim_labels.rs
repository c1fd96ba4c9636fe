//! Requests for the record that all claims have labels, to which the component claim-labels gives access.

use serde_json::{Value, json};

use super::super::*;
use super::attempt::{Attempts, KEEP, annotation, changed, finalizers, label, owner};
use super::request::{BodyFormat, Verdict};
use super::scene::{Scene, config_maps, dynamic, mutating_policies, policy_bindings};

/// The name of the MutatingAdmissionPolicy, of its binding and of the ConfigMap with the record.
pub(super) const NAME: &str = "loopfs-claim-labels";

const POLICY: &str = "loopfs-controller-claim-labels";

// Words of the rules that refuse more than one of the requests.
const DATA: &str = "only the UID of the policy's binding";
const OWNER: &str = "only the policy's binding may own";
const METADATA: &str = "labels, annotations and finalizers of the ConfigMap";

/// Adds the requests of the provisioner, which watches the record.
pub(super) fn read(attempts: &mut Attempts) {
    attempts.allow("watch the record", ["list", "watch"].map(|verb| config_maps().request(verb, Some(NAME))));
}

/// The objects of the component in the cluster.
pub(super) struct ClaimLabels {
    config_map: Value,
    binding_uid: String,
}

impl ClaimLabels {
    pub(super) async fn set(cluster: &TestCluster) -> Self {
        let named = json!({"metadata": {"name": NAME}});
        let (config_maps, _) = dynamic(cluster, &config_maps(), named.clone());
        let (bindings, _) = dynamic(cluster, &policy_bindings(), named);
        ClaimLabels {
            config_map: serde_json::to_value(config_maps.get(NAME).await.unwrap()).unwrap(),
            binding_uid: bindings.get(NAME).await.unwrap().uid().unwrap(),
        }
    }

    /// Adds the requests of the controller, which writes the record.
    pub(super) fn record(&self, scene: &Scene, attempts: &mut Attempts) {
        let patches = |change: &Value| config_maps().patches(&self.config_map, change);
        let binding = json!({
            "apiVersion": "admissionregistration.k8s.io/v1", "kind": "MutatingAdmissionPolicyBinding",
            "name": NAME, "uid": self.binding_uid,
        });
        let owned = |change: Value| owner(changed(&binding, change));
        attempts.allow("read the record", [config_maps().request("get", Some(NAME))]);
        let policy =
            [mutating_policies(), policy_bindings()].map(|resource| resource.request("get", Some(NAME)));
        attempts.allow("read the policy and its binding", policy);
        // docs/src/security.md documents this limit: a policy cannot compare the record with the claims.
        let record = json!({"data": {"policy-binding-uid": self.binding_uid}});
        let complete = changed(&owner(binding.clone()), record);
        attempts.allow("record that all claims have labels", patches(&complete));
        attempts.allow("remove the record", patches(&json!({"data": null})));
        // As a JSON patch, the change would write null into the absent data.
        let removal = json!({"metadata": {"ownerReferences": []}, "data": {"policy-binding-uid": null}});
        let removed = config_maps().patch(NAME, BodyFormat::Merge, removal);
        attempts.allow("remove the record as the controller does", [removed]);
        attempts.refuse_unbound(POLICY, "record that all claims have labels", patches(&complete).remove(0));
        for (words, title, change) in [
            (DATA, "write another key", json!({"data": {"other": "text"}})),
            (DATA, "write bytes", json!({"binaryData": {"other": "dGV4dA=="}})),
            (DATA, "make the record immutable", json!({"immutable": true})),
            (OWNER, "have a Node own the record", owner(scene.other_node())),
            (OWNER, "have another binding own the record", owned(json!({"name": "another"}))),
            (OWNER, "keep the binding from being deleted", owned(json!({"blockOwnerDeletion": true}))),
            (METADATA, "label the record", label("a", "b")),
            (METADATA, "annotate the record", annotation("a", "b")),
            (METADATA, "keep the namespace from being deleted", finalizers(&[KEEP])),
        ] {
            attempts.expect(Verdict::refused(POLICY, words), title, patches(&change));
        }
    }
}

//! Tests that every pure decision accepts every object that an API server can hold: complete, incomplete and unusual ones.

use std::time::Duration;

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::StorageClass;
use k8s_openapi::jiff::Timestamp;
use loopfs::Bytes;
use proptest::prelude::*;
use proptest::sample::Index;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::loss::decision::{Decision, NodeLossState, decide};
use crate::node::resize::{self, ExpansionOutcome};
use crate::node::{delete, provision};
use crate::objects::topology::{self, CandidateNode};
use crate::objects::{claim_status, data_source, ownership, quantity};
use crate::testing::fixtures;

/// One change somewhere in an object.
#[derive(Debug, Clone)]
pub(crate) enum Damage {
    Remove(Index),
    Replace(Index, Value),
}

fn odd_value() -> impl Strategy<Value = Value> {
    prop_oneof![
        Just(json!("")),
        Just(json!("Block")),
        Just(json!("Delete")),
        Just(json!("Released")),
        Just(json!("node-b")),
        Just(json!("../..")),
        Just(json!("NodeResizePending")),
        Just(json!([])),
        Just(json!({})),
        Just(json!([{}])),
        Just(json!({"storage": "4Mi"})),
        Just(json!({"storage": "-1e99999"})),
        Just(json!("2026-01-01T00:00:00Z")),
        "\\PC{0,12}".prop_map(Value::String),
        "[0-9]{0,25}[.]?[0-9]{0,25}([KMGTPE]i?|[eE][0-9]{1,5})?".prop_map(Value::String),
    ]
}

pub(crate) fn damages() -> impl Strategy<Value = Vec<Damage>> {
    let damage = prop_oneof![
        any::<Index>().prop_map(Damage::Remove),
        (any::<Index>(), odd_value()).prop_map(|(at, value)| Damage::Replace(at, value)),
    ];
    prop::collection::vec(damage, 0..5)
}

/// Adds the JSON pointers of all values inside a value to `found`.
fn places(value: &Value, at: &str, found: &mut Vec<String>) {
    let children: Vec<(String, &Value)> = match value {
        Value::Object(fields) => fields.iter().map(|(name, value)| (name.clone(), value)).collect(),
        Value::Array(items) => {
            items.iter().enumerate().map(|(index, value)| (index.to_string(), value)).collect()
        }
        _ => Vec::new(),
    };
    for (name, child) in children {
        let pointer = format!("{at}/{}", name.replace('~', "~0").replace('/', "~1"));
        places(child, &pointer, found);
        found.push(pointer);
    }
}

/// Returns the object after the damage, or `None` if no API server could hold it.
pub(crate) fn damaged<K: Serialize + DeserializeOwned>(whole: &K, damages: &[Damage]) -> Option<K> {
    let mut value = serde_json::to_value(whole).unwrap();
    for damage in damages {
        let mut found = Vec::new();
        places(&value, "", &mut found);
        let (Damage::Remove(at) | Damage::Replace(at, _)) = damage;
        let Some(pointer) = (!found.is_empty()).then(|| at.get(&found)) else { break };
        match damage {
            Damage::Replace(_, odd) => *value.pointer_mut(pointer).unwrap() = odd.clone(),
            Damage::Remove(_) => {
                let (parent, name) = pointer.rsplit_once('/').unwrap();
                match value.pointer_mut(parent).unwrap() {
                    Value::Object(fields) => drop(fields.remove(&name.replace("~1", "/").replace("~0", "~"))),
                    Value::Array(items) => drop(items.remove(name.parse().unwrap())),
                    _ => unreachable!("only objects and arrays have children"),
                }
            }
        }
    }
    serde_json::from_value(value).ok()
}

fn claims() -> [PersistentVolumeClaim; 2] {
    let resizing = json!({
        "spec": {"resources": {"requests": {"storage": "4Mi"}}},
        "status": {
            "allocatedResourceStatuses": {"storage": "ControllerResizeInProgress"},
            "allocatedResources": {"storage": "4Mi"},
            "conditions": [{"type": "Resizing", "status": "True", "message": "m"}],
        },
    });
    [fixtures::claim(json!({})), fixtures::bound_claim(resizing)]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn every_decision_accepts_damaged_objects(
        of_claim in damages(), of_volume in damages(), of_class in damages(), bound in any::<bool>(), size in any::<u64>(),
    ) {
        let identity = fixtures::identity();
        let claim: Option<PersistentVolumeClaim> = damaged(&claims()[usize::from(bound)], &of_claim);
        let released = fixtures::volume(json!({
            "metadata": {"annotations": {
                "csi.loopfs.dev/on-node-loss": "deleteClaim", "csi.loopfs.dev/node-loss-grace-seconds": "60",
            }},
            "status": {"phase": "Released"},
        }));
        let volume: Option<PersistentVolume> = damaged(&released, &of_volume);
        let class: Option<StorageClass> = damaged(&fixtures::class(json!({
            "parameters": {"bytesPerInode": "4096"},
            "allowedTopologies": [{"matchLabelExpressions": [{"key": "zone", "values": ["east"]}]}],
        })), &of_class);
        if let Some(volume) = &volume {
            // Only a volume that certainly belongs to this node is deleted.
            if let Ok(delete::DeletionPlan::Delete(id)) = delete::plan(volume, &identity) {
                prop_assert!(ownership::is_our_volume(volume, &identity));
                prop_assert!(!id.as_str().contains('/'));
            }
        }
        if let Some(volume) = &volume {
            let state = NodeLossState { volume, node: "node-a", claim: claim.as_ref(), lost_for: Duration::from_secs(size) };
            let decision = decide(state, &identity);
            if !matches!(decision, Decision::Ignore | Decision::Wait(_)) {
                prop_assert!(ownership::is_only_on(volume, "node-a", &identity));
            }
            if matches!(decision, Decision::DeletePv | Decision::RemoveFinalizer) {
                let reclaimed = volume.spec.as_ref().and_then(|spec| spec.persistent_volume_reclaim_policy.as_deref());
                prop_assert_eq!(reclaimed, Some("Delete"));
            }
            if decision == Decision::DeleteClaim {
                prop_assert!(claim.as_ref().is_some_and(|claim| ownership::is_volume_of(volume, claim)));
            }
        }
        let Some(claim) = &claim else { return Ok(()) };
        let planned = provision::plan(claim, class.as_ref(), volume.as_ref(), None, &identity);
        drop(data_source::parse_reference(claim));
        if let Some(class) = &class {
            topology::allows(class, &CandidateNode { name: String::new(), labels: Default::default() });
        }
        if let Ok(Some(creation)) = &planned {
            prop_assert!(ownership::is_claim_to_provision(claim, &identity));
            prop_assert!(creation.capacity > Bytes(0));
        }
        if let Err(error) = planned {
            prop_assert!(!error.to_string().is_empty() && !error.reason().is_empty());
        }
        if let Some(volume) = &volume {
            if let resize::ResizePlan::Expand { target } = resize::plan(claim, volume, &identity) {
                prop_assert!(ownership::is_our_volume(volume, &identity) && ownership::is_volume_of(volume, claim));
                prop_assert_eq!(claim_status::requested(claim), Ok(Some(target)));
            }
            for outcome in [ExpansionOutcome::Expanded(Bytes(size)), ExpansionOutcome::AwaitsNode(Bytes(size)), ExpansionOutcome::NoSpace("m".into()), ExpansionOutcome::Failed(String::new())] {
                resize::record(claim, volume, &outcome, Timestamp::UNIX_EPOCH);
            }
        }
        resize::begin(claim, Bytes(size), Timestamp::UNIX_EPOCH);
        ownership::is_claim_of_interest(claim, &identity);
        prop_assert!(!quantity::format(Bytes(size)).0.is_empty());
    }
}

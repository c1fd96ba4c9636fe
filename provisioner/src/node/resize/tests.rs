//! Tests of the resize protocol as tables: every state of a claim, and the writes of each outcome.

use rstest::rstest;

use super::*;
use crate::testing::fixtures;

const NOW: Timestamp = Timestamp::UNIX_EPOCH;
const MIB: u64 = 1 << 20;

/// Returns a bound claim that requests 4Mi, in a resize state, with a recorded capacity of 1Mi.
fn claim(resize_status: Option<&str>, allocated: Option<&str>) -> PersistentVolumeClaim {
    fixtures::bound_claim(json!({
        "spec": { "resources": { "requests": { "storage": "4Mi" } } },
        "status": {
            "allocatedResourceStatuses": resize_status.map(|status| json!({ "storage": status })),
            "allocatedResources": allocated.map(|size| json!({ "storage": size })),
        },
    }))
}

fn volume(mode: &str, capacity: &str) -> PersistentVolume {
    fixtures::volume(json!({ "spec": { "volumeMode": mode, "capacity": { "storage": capacity } } }))
}

const EXPAND: ResizePlan = ResizePlan::Expand { target: Bytes(4 * MIB) };

/// The cases are every state, for both kinds, before and after the PersistentVolume has the new capacity.
#[rstest]
#[case::fresh("Filesystem", None, "1Mi", EXPAND)]
#[case::in_progress("Filesystem", Some("ControllerResizeInProgress"), "1Mi", EXPAND)]
#[case::stopped_before_the_claim("Filesystem", Some("ControllerResizeInProgress"), "4Mi", EXPAND)]
#[case::infeasible_once("Filesystem", Some("ControllerResizeInfeasible"), "1Mi", EXPAND)]
#[case::left_by_another_resizer("Filesystem", Some("NodeResizePending"), "4Mi", EXPAND)]
#[case::left_by_a_kubelet("Filesystem", Some("NodeResizeInProgress"), "4Mi", EXPAND)]
#[case::refused_by_a_kubelet("Filesystem", Some("NodeResizeInfeasible"), "4Mi", EXPAND)]
#[case::fresh_block("Block", None, "1Mi", EXPAND)]
#[case::fresh_block_expanded("Block", None, "4Mi", EXPAND)]
#[case::block_in_progress("Block", Some("ControllerResizeInProgress"), "1Mi", EXPAND)]
#[case::block_stopped_before_the_claim("Block", Some("ControllerResizeInProgress"), "4Mi", EXPAND)]
#[case::block_infeasible_once("Block", Some("ControllerResizeInfeasible"), "1Mi", EXPAND)]
#[case::node_pending("Block", Some("NodeResizePending"), "4Mi", ResizePlan::AwaitNode)]
#[case::node_pending_and_more_requested("Block", Some("NodeResizePending"), "2Mi", EXPAND)]
#[case::node_in_progress("Block", Some("NodeResizeInProgress"), "4Mi", ResizePlan::AwaitNode)]
#[case::node_in_progress_and_more_requested(
    "Block",
    Some("NodeResizeInProgress"),
    "2Mi",
    ResizePlan::AwaitNode
)]
#[case::node_infeasible("Block", Some("NodeResizeInfeasible"), "4Mi", EXPAND)]
#[case::state_of_the_future("Block", Some("ResizeByMagic"), "4Mi", EXPAND)]
fn plans(
    #[case] mode: &str,
    #[case] status: Option<&str>,
    #[case] capacity: &str,
    #[case] expected: ResizePlan,
) {
    assert_eq!(plan(&claim(status, Some("4Mi")), &volume(mode, capacity), &fixtures::identity()), expected);
}

#[rstest]
#[case::as_large_as_requested(json!({"status": {"capacity": {"storage": "4Mi"}}}), json!({}))]
#[case::larger(json!({"status": {"capacity": {"storage": "5Mi"}}}), json!({}))]
#[case::not_bound_yet(json!({"status": {"phase": "Pending"}}), json!({}))]
#[case::lost(json!({"status": {"phase": "Lost"}}), json!({}))]
#[case::no_status(json!({"status": null}), json!({}))]
#[case::other_volume(json!({"spec": {"volumeName": "other"}}), json!({}))]
#[case::no_request(json!({"spec": {"resources": null}}), json!({}))]
#[case::malformed_request(json!({"spec": {"resources": {"requests": {"storage": "much"}}}}), json!({}))]
#[case::volume_of_an_earlier_claim(json!({}), json!({"spec": {"claimRef": {"uid": "earlier"}}}))]
#[case::volume_of_another_node(json!({}), json!({"metadata": {"labels": {"csi.loopfs.dev/node": "node-b"}}}))]
fn other_claims_are_up_to_date(#[case] claim_change: Value, #[case] volume_change: Value) {
    let mut change = json!({"spec": {"resources": {"requests": {"storage": "4Mi"}}}});
    fixtures::merge_keeping_nulls(&mut change, claim_change);
    let (claim, volume) = (fixtures::bound_claim(change), fixtures::volume(volume_change));
    assert_eq!(plan(&claim, &volume, &fixtures::identity()), ResizePlan::UpToDate);
}

/// `begin` writes nothing for a retry with the same size, and otherwise always the same patch.
#[rstest]
#[case::fresh(None, None, true)]
#[case::a_smaller_request_than_before(Some("ControllerResizeInfeasible"), Some("9Mi"), true)]
#[case::retry_after_infeasible(Some("ControllerResizeInfeasible"), Some("4Mi"), false)]
#[case::resumed(Some("ControllerResizeInProgress"), Some("4Mi"), false)]
#[case::resumed_with_a_larger_size(Some("ControllerResizeInProgress"), Some("2Mi"), true)]
#[case::resumed_with_a_smaller_size(Some("ControllerResizeInProgress"), Some("9Mi"), false)]
#[case::node_infeasible(Some("NodeResizeInfeasible"), Some("4Mi"), true)]
#[case::allocated_and_no_state(None, Some("4Mi"), true)]
fn begin_writes_unless_retried(
    #[case] status: Option<&str>,
    #[case] allocated: Option<&str>,
    #[case] writes: bool,
) {
    let patch = begin(&claim(status, allocated), Bytes(4 * MIB), NOW);
    assert_eq!(patch.is_some(), writes);
    let Some(patch) = patch else { return };
    let mut after = serde_json::to_value(claim(status, allocated)).unwrap();
    fixtures::merge(&mut after, patch);
    let after: PersistentVolumeClaim = serde_json::from_value(after).unwrap();
    assert_eq!(ResizeStatus::of(&after), Some(ResizeStatus::ControllerInProgress));
    let earlier = recorded(claim(status, allocated).status.unwrap().allocated_resources.as_ref());
    let charged = earlier.unwrap_or_default().max(Bytes(4 * MIB));
    assert_eq!(recorded(after.status.as_ref().unwrap().allocated_resources.as_ref()), Some(charged));
    assert_eq!(conditions(&after), ["Resizing"]);
}

fn conditions(claim: &PersistentVolumeClaim) -> Vec<&str> {
    let conditions = claim.status.as_ref().and_then(|status| status.conditions.as_deref());
    conditions.unwrap_or_default().iter().map(|condition| condition.type_.as_str()).collect()
}

/// An administrator created the PersistentVolume of a larger volume by hand.
#[test]
fn allocation_is_the_rounded_request() {
    let mut begun = serde_json::to_value(claim(Some("ControllerResizeInProgress"), Some("4Mi"))).unwrap();
    begun["spec"]["resources"]["requests"]["storage"] = json!("4194305");
    let larger = ExpansionOutcome::Expanded(Bytes(9 * MIB));
    let patch = record(&read(&begun), &volume("Block", "1Mi"), &larger, NOW).claim.unwrap();
    fixtures::merge(&mut begun, patch);
    assert_eq!(allocated(&read(&begun)), Some(Bytes(4 * MIB + 4096)));
}

/// The volume was expanded to 6Mi, and that was not recorded. Whatever is requested in between, the quota is charged for the size that the
/// claim gets.
#[test]
fn unrecorded_expansion_is_charged() {
    let volume = volume("Filesystem", "6Mi");
    let mut before = serde_json::to_value(claim(Some("ControllerResizeInProgress"), Some("6Mi"))).unwrap();
    let no_space = ExpansionOutcome::NoSpace("no space".to_owned());
    for (request, outcome) in [(50, no_space), (2, ExpansionOutcome::Expanded(Bytes(6 * MIB)))] {
        before["spec"]["resources"]["requests"]["storage"] = json!(format!("{request}Mi"));
        let begun = merged(&before, begin(&read(&before), Bytes(request * MIB), NOW));
        before = merged(&begun, record(&read(&begun), &volume, &outcome, NOW).claim);
    }
    assert_eq!(allocated(&read(&before)), Some(Bytes(6 * MIB)));
}

const STATES: [Option<&str>; 7] = [
    None,
    Some("ControllerResizeInProgress"),
    Some("ControllerResizeInfeasible"),
    Some("NodeResizePending"),
    Some("NodeResizeInProgress"),
    Some("NodeResizeInfeasible"),
    Some("ResizeByMagic"),
];

/// Checks every state with every request and every outcome: the writes lead to a state that describes the outcome, and
/// repeating them changes nothing.
#[test]
fn every_outcome_is_recorded_consistently() {
    let outcomes = |mode: &str, target: u64| {
        let sizes = [target, target + MIB, 9 * MIB].map(Bytes);
        let failed = [
            ExpansionOutcome::NoSpace("no space".to_owned()),
            ExpansionOutcome::Infeasible("not found".to_owned()),
            ExpansionOutcome::Failed("not mounted".to_owned()),
        ];
        let pending = sizes.map(ExpansionOutcome::AwaitsNode).into_iter().filter(|_| mode == "Block");
        sizes.map(ExpansionOutcome::Expanded).into_iter().chain(pending.collect::<Vec<_>>()).chain(failed)
    };
    let mut seen = 0;
    for mode in ["Filesystem", "Block"] {
        for (state, request) in STATES.iter().flat_map(|state| [1, 2, 4, 9].map(|request| (*state, request)))
        {
            for (allocated, has) in [None, Some("2Mi"), Some("4Mi"), Some("9Mi")]
                .into_iter()
                .flat_map(|allocated| ["1Mi", "4Mi"].map(|has| (allocated, has)))
            {
                let volume = volume(mode, has);
                let mut before = serde_json::to_value(claim(state, allocated)).unwrap();
                fixtures::merge(
                    &mut before,
                    json!({
                        "spec": {"resources": {"requests": {"storage": format!("{request}Mi")}}},
                        "status": {
                            "allocatedResourceStatuses": {"example.com/iops": "NodeResizePending"},
                            "conditions": [
                                {"type": "ModifyingVolume", "status": "True"}, {"type": "NodeResizeError", "status": "True"},
                            ],
                        },
                    }),
                );
                let ResizePlan::Expand { target } = plan(&read(&before), &volume, &fixtures::identity())
                else {
                    continue;
                };
                assert_eq!(target, Bytes(request * MIB));
                for outcome in outcomes(mode, target.0) {
                    seen += 1;
                    let begun = merged(&before, begin(&read(&before), target, NOW));
                    let recorded = record(&read(&begun), &volume, &outcome, NOW);
                    let after = merged(&begun, recorded.claim);
                    check([&before, &begun, &after], target, &outcome);

                    let had = capacity(&volume);
                    let volume = merged(&serde_json::to_value(&volume).unwrap(), recorded.volume);
                    let volume: PersistentVolume = serde_json::from_value(volume).unwrap();
                    assert!(capacity(&volume) >= had, "the capacity is never lowered");
                    let again = record(&read(&after), &volume, &outcome, Timestamp::MAX);
                    assert_eq!(again, ResizeRecord::default(), "{mode} {state:?} {outcome:?}");
                    let next = match outcome {
                        ExpansionOutcome::Expanded(size) => Some((size, ResizePlan::UpToDate)),
                        ExpansionOutcome::AwaitsNode(size) => Some((size, ResizePlan::AwaitNode)),
                        _ => None,
                    };
                    // A retry that ends in the same way writes nothing.
                    if next.is_none() {
                        assert_eq!(
                            begin(&read(&after), target, Timestamp::MAX),
                            None,
                            "{mode} {state:?} {outcome:?}"
                        );
                    }
                    if let Some((size, next)) = next {
                        assert!(capacity(&volume) >= Some(size));
                        assert_eq!(plan(&read(&after), &volume, &fixtures::identity()), next);
                    }
                }
            }
        }
    }
    assert!(seen > 500, "{seen}");
}

fn merged(object: &Value, patch: Option<Value>) -> Value {
    let mut patched = object.clone();
    fixtures::merge(&mut patched, patch.unwrap_or_else(|| json!({})));
    patched
}

/// Checks the claim before the expansion, after its begin was recorded, and after its outcome was.
fn check([before, begun, after]: [&Value; 3], target: Bytes, outcome: &ExpansionOutcome) {
    let (earlier, claim) = (read(before), read(after));
    let transition = format!("{outcome:?}: {before} -> {after}");
    let size = |claim: &PersistentVolumeClaim| recorded(claim.status.as_ref().unwrap().capacity.as_ref());
    // The size of an earlier attempt stays until the volume is known to be smaller, and no more than that or the requested size is recorded.
    let attempted = target.max(allocated(&earlier).unwrap_or_default());
    let allocated = allocated(&claim);
    let conditions = conditions(&claim);
    assert!(conditions.contains(&"ModifyingVolume"), "conditions of other types stay: {transition}");
    let of_others = &after["status"]["allocatedResourceStatuses"]["example.com/iops"];
    assert_eq!(of_others, "NodeResizePending", "{transition}");
    let annotations = claim.metadata.annotations.as_ref().unwrap();
    let done = annotations.contains_key("volume.kubernetes.io/node-expansion-not-required");
    assert_eq!(done, matches!(outcome, ExpansionOutcome::Expanded(_)), "{transition}");
    match outcome {
        ExpansionOutcome::Expanded(expanded) => {
            assert_eq!((ResizeStatus::of(&claim), size(&claim)), (None, Some(*expanded)), "{transition}");
            let expected = (Some(attempted.min(*expanded)), vec!["ModifyingVolume"]);
            assert_eq!((allocated, conditions), expected, "{transition}");
        }
        ExpansionOutcome::AwaitsNode(expanded) => {
            assert_eq!(ResizeStatus::of(&claim), Some(ResizeStatus::NodePending), "{transition}");
            // Only the kubelet sets the size.
            let expected = (Some(attempted.min(*expanded)), size(&earlier));
            assert_eq!((allocated, size(&claim)), expected, "{transition}");
            assert_eq!(conditions, ["ModifyingVolume", "FileSystemResizePending"], "{transition}");
        }
        ExpansionOutcome::NoSpace(why)
        | ExpansionOutcome::Infeasible(why)
        | ExpansionOutcome::Failed(why) => {
            let status = match outcome {
                ExpansionOutcome::Failed(_) => ResizeStatus::of(&read(begun)),
                ExpansionOutcome::Infeasible(_) if attempted > target => {
                    Some(ResizeStatus::ControllerInProgress)
                }
                _ => Some(ResizeStatus::ControllerInfeasible),
            };
            assert_eq!(ResizeStatus::of(&claim), status, "{transition}");
            let charged = if matches!(outcome, ExpansionOutcome::NoSpace(_)) { target } else { attempted };
            assert_eq!((allocated, size(&claim)), (Some(charged), size(&earlier)), "{transition}");
            let recorded = claim.status.as_ref().unwrap().conditions.iter().flatten();
            let mut errors = recorded.filter(|condition| condition.type_ == "ControllerResizeError");
            let message = errors.next().and_then(|error| error.message.as_deref());
            assert_eq!(message, Some(why.as_str()), "{transition}");
        }
    }
}

fn read(claim: &Value) -> PersistentVolumeClaim {
    serde_json::from_value(claim.clone()).unwrap()
}

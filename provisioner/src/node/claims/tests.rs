//! Tests of whole reconciles of claims, with a mock API server and a fake store.

use std::sync::Arc;
use std::time::Duration;

use http::Method;
use k8s_openapi::api::core::v1::PersistentVolume;
use k8s_openapi::jiff::Timestamp;
use kube::runtime::watcher::Event;
use loopfs::volume_store::{VolumeId, VolumeKind};
use loopfs::{Bytes, ErrorKind};
use rstest::rstest;
use serde_json::{Value, json};

use super::*;
use crate::api::backoff;
use crate::objects::ownership::SELECTED_NODE;
use crate::store::claim_record::ClaimRecord;
use crate::testing::mock_api_server::{Caches, ExpectedRequest, TestContext, expect};
use crate::testing::{fake_store, fixtures};

const VOLUMES: &str = "/api/v1/persistentvolumes";
const VOLUME: &str = "/api/v1/persistentvolumes/pvc-0b6b9a6d-6d0e-4d8c-9a0c-2d1d5e3f7a11";
const CLAIM: &str = "/api/v1/namespaces/shop/persistentvolumeclaims/data";
const STATUS: &str = "/api/v1/namespaces/shop/persistentvolumeclaims/data/status";
const GIB: u64 = 1 << 30;

fn caches(volumes: Vec<PersistentVolume>) -> Caches {
    Caches { claims: vec![], volumes, classes: vec![fixtures::class(json!({}))] }
}

/// Returns the PersistentVolume in the request that creates it, without the fields that the API server and controllers add.
fn created_volume() -> Value {
    let mut created = serde_json::to_value(fixtures::volume(json!({"status": null}))).unwrap();
    fixtures::merge(
        &mut created,
        json!({"metadata": {
            "uid": null, "resourceVersion": null, "finalizers": ["external-provisioner.volume.kubernetes.io/finalizer"],
        }}),
    );
    created
}

fn expect_creation() -> ExpectedRequest {
    expect(Method::POST, VOLUMES, created_volume())
        .respond(fixtures::volume(json!({"status": {"phase": "Pending"}})))
}

/// Returns the expected request that returns the claim to the scheduler.
fn expect_rescheduling() -> ExpectedRequest {
    let patch = json!({"metadata": {
        "uid": fixtures::CLAIM_UID, "resourceVersion": "100", "annotations": {SELECTED_NODE: null},
    }});
    expect(Method::PATCH, CLAIM, patch)
        .respond(fixtures::claim(json!({"metadata": {"annotations": {SELECTED_NODE: null}}})))
}

async fn reconcile_claim(test_context: &TestContext, claim: PersistentVolumeClaim) -> Next {
    reconcile(Arc::new(claim), Arc::clone(&test_context.ctx)).await
}

/// Returns the action after the first failure. While the back-off lasts, further reconciles return the remaining time.
fn first_retry() -> Next {
    Next::After(Duration::from_secs(1))
}

/// Returns the requests of a creation whose PersistentVolume exists.
fn finds(change: Value) -> Vec<ExpectedRequest> {
    let creation = expect(Method::POST, VOLUMES, created_volume()).refuse(409, "AlreadyExists");
    vec![creation, expect(Method::GET, VOLUME, None).respond(fixtures::volume(change))]
}

fn fails() -> Vec<ExpectedRequest> {
    vec![expect(Method::POST, VOLUMES, created_volume()).refuse(500, "InternalError")]
}

/// What the store has of the volume before.
#[derive(Clone, Copy)]
enum Stored {
    Nothing,
    Empty,
    Data,
}

const SUCCEEDED: [&str; 2] = ["Provisioning", "ProvisioningSucceeded"];
const FAILED: [&str; 2] = ["Provisioning", "ProvisioningFailed"];

/// Each case has the numbers of volumes and of pending volumes afterwards.
#[rstest]
// A crash followed the creation of the volume, or of the PersistentVolume.
#[case::its_volume_exists(Stored::Empty, json!({}), vec![expect_creation()], Next::Change, (1, 0), &SUCCEEDED)]
#[case::its_persistent_volume_exists(Stored::Nothing, json!({}), finds(json!({})), Next::Change, (1, 0), &SUCCEEDED)]
#[case::its_persistent_volume_is_being_deleted(
    Stored::Nothing, json!({}), finds(json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}})), first_retry(), (1, 1), &FAILED
)]
#[case::the_name_is_taken(Stored::Nothing, json!({}), finds(json!({"spec": {"claimRef": {"uid": "someone-else"}}})), first_retry(), (1, 1), &FAILED)]
#[case::it_got_a_volume_elsewhere(Stored::Nothing, json!({}), finds(fixtures::on_another_node()), Next::Change, (0, 0), &["Provisioning", "VolumeDeleted"])]
// The claim may be deleted before the next attempt.
#[case::the_api_server_fails(Stored::Nothing, json!({}), fails(), first_retry(), (1, 1), &FAILED)]
// The API server was restored from a backup in which the claim was pending.
#[case::data_exists(Stored::Data, json!({}), vec![expect_creation()], Next::Change, (1, 0), &["Provisioning", "ExistingDataFound", "ProvisioningSucceeded"])]
// The cache lags behind, and a pod has written to the volume.
#[case::data_has_a_persistent_volume(Stored::Data, json!({}), finds(json!({})), Next::Change, (1, 0), &SUCCEEDED)]
#[case::data_exists_here_and_elsewhere(Stored::Data, json!({}), finds(fixtures::on_another_node()), Next::Change, (1, 0), &["Provisioning"])]
// The cleanup of deleted claims removes only pending volumes.
#[case::data_exists_and_the_api_server_fails(Stored::Data, json!({}), fails(), first_retry(), (1, 0), &FAILED)]
#[case::data_is_of_another_kind(Stored::Data, json!({"spec": {"volumeMode": "Block"}}), vec![], first_retry(), (1, 0), &FAILED)]
#[case::data_is_smaller(Stored::Data, json!({"spec": {"resources": {"requests": {"storage": "2Mi"}}}}), vec![], first_retry(), (1, 0), &FAILED)]
#[tokio::test]
async fn provisioning_respects_what_exists(
    #[case] stored: Stored,
    #[case] claim: Value,
    #[case] requests: Vec<ExpectedRequest>,
    #[case] next: Next,
    #[case] left: (usize, usize),
    #[case] events: &[&str],
) {
    let test_context = match stored {
        Stored::Data => context_with_data(requests),
        _ => TestContext::with(caches(vec![]), requests),
    };
    if matches!(stored, Stored::Empty) {
        test_context.volumes.add(fixtures::VOLUME);
    }
    assert_eq!(reconcile_claim(&test_context, fixtures::claim(claim)).await, next);
    let store = test_context.volumes.state().clone();
    assert_eq!((store.volumes.len(), store.pending.len()), left);
    assert_eq!(test_context.finish().await, events);
}

/// Returns a context whose store has the volume of the claim, with data.
fn context_with_data(requests: Vec<ExpectedRequest>) -> TestContext {
    let test_context = TestContext::with(caches(vec![]), requests);
    let id = test_context.volumes.add(fixtures::VOLUME);
    test_context.volumes.state().with_data.insert(id);
    test_context
}

/// A copy holds data when a crash interrupts its provisioning, and is pending.
#[tokio::test]
async fn interrupted_attempt_continues_without_event() {
    let test_context = context_with_data(vec![expect_creation()]);
    let claim = fixtures::claim(json!({}));
    let id = VolumeId::parse(fixtures::VOLUME).unwrap();
    test_context.volumes.state().pending.insert(id, ClaimRecord::of(&claim));
    reconcile_claim(&test_context, claim).await;
    assert!(test_context.volumes.state().pending.is_empty());
    assert_eq!(test_context.finish().await, ["Provisioning", "ProvisioningSucceeded"]);
}

#[tokio::test(start_paused = true)]
async fn too_large_claim_awaits_free_space() {
    let large = || fixtures::claim(json!({"spec": {"resources": {"requests": {"storage": "2Gi"}}}}));
    let creation = expect(Method::POST, VOLUMES, {
        let mut larger = created_volume();
        larger["spec"]["capacity"]["storage"] = json!("2Gi");
        larger
    });
    let creation = creation.respond(fixtures::volume(json!({"spec": {"capacity": {"storage": "2Gi"}}})));
    let requests = vec![expect_rescheduling(), creation];
    let test_context = TestContext::with(caches(vec![]), requests);
    assert_eq!(reconcile_claim(&test_context, large()).await, Next::Change);
    assert!(test_context.volumes.state().volumes.is_empty());
    // The scheduler selects this node again. A watch event of the claim does not end the back-off, but free space does.
    assert_ne!(reconcile_claim(&test_context, large()).await, Next::Change);
    test_context.volumes.state().size = Bytes(4 * GIB);
    test_context.ctx.bump_retry_generation();
    assert_eq!(reconcile_claim(&test_context, large()).await, Next::Change);
    let expected = ["Provisioning", "ProvisioningFailed", "Provisioning", "ProvisioningSucceeded"];
    assert_eq!(test_context.finish().await, expected);
}

/// The driver frees the space of the failed copy.
#[rstest]
#[case::other(ErrorKind::Other, vec![])]
#[case::no_space(ErrorKind::NoSpace, vec![expect_rescheduling_of_copy()])]
#[tokio::test(start_paused = true)]
async fn failed_copy_causes_no_retry(#[case] kind: ErrorKind, #[case] rescheduling: Vec<ExpectedRequest>) {
    let claim = || clone_named("copy", "uid");
    let requests = find_source().into_iter().chain(rescheduling).collect();
    let test_context = context_with_source(vec![claim()], requests);
    test_context.volumes.break_with(fake_store::error(kind, "not copied"));
    reconcile_claim(&test_context, claim()).await;
    test_context.ctx.bump_retry_generation();
    assert!(matches!(reconcile_claim(&test_context, claim()).await, Next::After(_)));
    assert_eq!(test_context.finish().await, FAILED);
}

fn expect_rescheduling_of_copy() -> ExpectedRequest {
    let patch = json!({"metadata": {
        "uid": "uid", "resourceVersion": "100", "annotations": {SELECTED_NODE: null},
    }});
    expect(Method::PATCH, "/api/v1/namespaces/shop/persistentvolumeclaims/copy", patch).respond(rescheduled())
}

/// Each of the two claims of a pod fits on the node alone. The scheduler selects no other node, because the first one is bound.
#[rstest]
#[case::of_this_namespace("shop", true)]
#[case::of_another_namespace("bank", false)]
#[tokio::test]
async fn event_names_claims_pinning_the_pod(#[case] namespace: &str, #[case] expected: bool) {
    let first =
        fixtures::bound_claim(json!({"metadata": {"name": "logs", "uid": "first", "namespace": namespace}}));
    let caches = Caches { claims: vec![first], ..caches(vec![]) };
    let test_context = TestContext::with(caches, vec![expect_rescheduling()]);
    let second = fixtures::claim(json!({"spec": {"resources": {"requests": {"storage": "2Gi"}}}}));
    reconcile_claim(&test_context, second).await;
    let events = test_context.events().await;
    let event = events.last().unwrap();
    assert_eq!(event.reason.as_str(), "ProvisioningFailed");
    let note = &event.note;
    assert_eq!(note.contains("(\"logs\"), the pod can run on no other: free space"), expected, "{note}");
}

#[tokio::test(start_paused = true)]
async fn deleted_persistent_volume_ends_back_off() {
    let test_context = TestContext::with(caches(vec![]), vec![expect_creation()]);
    let marked = fixtures::volume(json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}));
    let key = ObjectRef::from_obj(&marked);
    test_context.ctx.volumes.writes.remember(marked);
    assert_eq!(reconcile_claim(&test_context, fixtures::claim(json!({}))).await, first_retry());
    assert_ne!(reconcile_claim(&test_context, fixtures::claim(json!({}))).await, Next::Change);
    test_context.ctx.volumes.writes.forget(&key);
    assert_eq!(reconcile_claim(&test_context, fixtures::claim(json!({}))).await, Next::Change);
    assert_eq!(test_context.finish().await, ["ProvisioningFailed", "Provisioning", "ProvisioningSucceeded"]);
}

#[tokio::test(start_paused = true)]
async fn only_own_class_ends_back_off() {
    let invalid = fixtures::class(json!({"parameters": {"nonsense": "1"}}));
    let caches = Caches { classes: vec![invalid], ..Caches::default() };
    let mut test_context = TestContext::with(caches, vec![expect_creation()]);
    assert_eq!(reconcile_claim(&test_context, fixtures::claim(json!({}))).await, first_retry());
    test_context.class_cache.apply_watcher_event(&Event::Apply(fixtures::class(
        json!({"metadata": {"name": "other", "resourceVersion": "6"}}),
    )));
    assert_ne!(reconcile_claim(&test_context, fixtures::claim(json!({}))).await, Next::Change);
    let corrected = fixtures::class(json!({"metadata": {"resourceVersion": "7"}}));
    test_context.class_cache.apply_watcher_event(&Event::Apply(corrected));
    assert_eq!(reconcile_claim(&test_context, fixtures::claim(json!({}))).await, Next::Change);
    assert_eq!(test_context.volumes.state().volumes.len(), 1);
    test_context.finish().await;
}

/// Returns a claim with the data source [`fixtures::bound_claim`], whose volume is [`fixtures::VOLUME`].
fn clone_named(name: &str, uid: &str) -> PersistentVolumeClaim {
    let source = json!({"kind": "PersistentVolumeClaim", "name": "data"});
    fixtures::claim(json!({"metadata": {"name": name, "uid": uid}, "spec": {"dataSource": source}}))
}

/// Returns the requests that find the source of a clone.
fn find_source() -> Vec<ExpectedRequest> {
    vec![
        expect(Method::GET, CLAIM, None).respond(fixtures::bound_claim(json!({}))),
        expect(Method::GET, VOLUME, None).respond(fixtures::volume(json!({}))),
    ]
}

/// Returns a context whose store has the source of the clones.
fn context_with_source(claims: Vec<PersistentVolumeClaim>, requests: Vec<ExpectedRequest>) -> TestContext {
    let test_context = TestContext::with(Caches { claims, ..caches(vec![]) }, requests);
    test_context.volumes.add(fixtures::VOLUME);
    test_context
}

#[rstest]
#[case::deleted(vec![], Next::Change)]
#[case::created_again(vec![clone_named("copy", "another")], Next::After(backoff::CONFLICT.first))]
#[case::rescheduled(vec![rescheduled()], Next::After(backoff::CONFLICT.first))]
#[tokio::test]
async fn copy_ends_if_claim_is(#[case] claims: Vec<PersistentVolumeClaim>, #[case] next: Next) {
    let test_context = context_with_source(claims, find_source());
    // The copy does not end by itself.
    test_context.volumes.wait_for_copies(2);
    assert_eq!(reconcile_claim(&test_context, clone_named("copy", "uid")).await, next);
    assert_eq!(test_context.volumes.copies_begun(), 1);
    assert_eq!(test_context.volumes.state().volumes.len(), 1);
    assert!(test_context.volumes.state().pending.is_empty());
    assert_eq!(test_context.finish().await, ["Provisioning"]);
}

fn rescheduled() -> PersistentVolumeClaim {
    let mut claim = clone_named("copy", "uid");
    claim.metadata.annotations.as_mut().unwrap().remove(SELECTED_NODE);
    claim
}

#[tokio::test]
async fn clones_are_copied_concurrently() {
    // The mock API server expects the requests in this order. Neither claim gets a PersistentVolume: each copy waits until
    // both have begun, and then fails because the source is busy.
    let source = || expect(Method::GET, CLAIM, None).respond(fixtures::bound_claim(json!({})));
    let volume = || expect(Method::GET, VOLUME, None).respond(fixtures::volume(json!({})));
    let claims = vec![clone_named("copy-1", "uid-1"), clone_named("copy-2", "uid-2")];
    let test_context = context_with_source(claims, vec![source(), source(), volume(), volume()]);
    test_context.volumes.state().busy = true;
    test_context.volumes.wait_for_copies(2);
    tokio::join!(
        reconcile_claim(&test_context, clone_named("copy-1", "uid-1")),
        reconcile_claim(&test_context, clone_named("copy-2", "uid-2")),
    );
    assert_eq!(test_context.volumes.copies_begun(), 2);
    test_context.finish().await;
}

#[rstest]
#[case::of_a_claim(clone_named("copy", "uid"), true)]
#[case::without_source(fixtures::claim(json!({})), false)]
#[case::with_its_volume(fixtures::bound_claim(json!({"spec": {"dataSource": {"kind": "PersistentVolumeClaim", "name": "other"}}})), false)]
fn only_copies_use_the_copy_queue(#[case] claim: PersistentVolumeClaim, #[case] expected: bool) {
    assert_eq!(is_to_be_copied(&claim), expected);
}

fn requesting(size: &str) -> PersistentVolumeClaim {
    fixtures::bound_claim(json!({"spec": {"resources": {"requests": {"storage": size}}}}))
}

fn context_with_volume(mode: &str, requests: Vec<ExpectedRequest>) -> TestContext {
    let volume = fixtures::volume(json!({"spec": {"volumeMode": mode}}));
    let test_context = TestContext::with(caches(vec![volume]), requests);
    let kind = if mode == "Block" { VolumeKind::Block } else { VolumeKind::Filesystem };
    let id = VolumeId::parse(fixtures::VOLUME).unwrap();
    test_context.volumes.state().volumes.insert(id, (kind, Bytes(1 << 20)));
    test_context
}

/// Returns the claim after a patch, as the API server returns it.
fn after_patch(claim: &PersistentVolumeClaim, version: &str, change: Value) -> PersistentVolumeClaim {
    let mut claim = serde_json::to_value(claim).unwrap();
    fixtures::merge(&mut claim, change);
    fixtures::merge(&mut claim, json!({"metadata": {"resourceVersion": version}}));
    serde_json::from_value(claim).unwrap()
}

/// Returns the expected request that records the begin of an expansion to `size`, and the claim after it.
fn expect_begin(claim: &PersistentVolumeClaim, size: &str) -> (ExpectedRequest, PersistentVolumeClaim) {
    let target = claim_status::requested(claim).unwrap().unwrap();
    let patch = resize::begin(claim, target, Timestamp::UNIX_EPOCH).unwrap();
    assert_eq!(patch["status"]["allocatedResources"]["storage"], size);
    let begun = after_patch(claim, "101", patch.clone());
    (expect(Method::PATCH, STATUS, patch).respond(&begun), begun)
}

#[tokio::test]
async fn expansion_writes_persistent_volume_before_claim() {
    let (begin, begun) = expect_begin(&requesting("4Mi"), "4Mi");
    let capacity = json!({
        "metadata": {"uid": "volume-uid", "resourceVersion": "200"}, "spec": {"capacity": {"storage": "4Mi"}},
    });
    let expanded = fixtures::volume(
        json!({"metadata": {"resourceVersion": "201"}, "spec": {"capacity": {"storage": "4Mi"}}}),
    );
    let finish = json!({
        "metadata": {
            "uid": fixtures::CLAIM_UID, "resourceVersion": "101",
            "annotations": {"volume.kubernetes.io/node-expansion-not-required": "true"},
        },
        "status": {
            "capacity": {"storage": "4Mi"}, "allocatedResourceStatuses": {"storage": null}, "conditions": [],
        },
    });
    let requests = vec![
        begin,
        expect(Method::PATCH, VOLUME, capacity).respond(expanded),
        expect(Method::PATCH, STATUS, finish.clone()).respond(after_patch(&begun, "102", finish)),
    ];
    let test_context = context_with_volume("Filesystem", requests);
    assert_eq!(reconcile_claim(&test_context, requesting("4Mi")).await, Next::Change);
    assert_eq!(test_context.volumes.capacity(fixtures::VOLUME), Some(Bytes(4 << 20)));
    // The watch cache still has the claim of before. The mock API server expects no further request.
    assert_eq!(reconcile_claim(&test_context, requesting("4Mi")).await, Next::Change);
    assert_eq!(test_context.finish().await, ["Resizing", "VolumeResizeSuccessful"]);
}

#[tokio::test(start_paused = true)]
async fn conflict_is_retried_without_event() {
    let (begin, _) = expect_begin(&requesting("4Mi"), "4Mi");
    let test_context = context_with_volume("Filesystem", vec![begin.refuse(409, "Conflict")]);
    assert_eq!(reconcile_claim(&test_context, requesting("4Mi")).await, Next::After(backoff::CONFLICT.first));
    assert_ne!(reconcile_claim(&test_context, requesting("4Mi")).await, Next::Change);
    assert_eq!(
        test_context.volumes.capacity(fixtures::VOLUME),
        Some(Bytes(1 << 20)),
        "the volume is expanded only after the begin was recorded"
    );
    assert_eq!(test_context.finish().await, ["Resizing"]);
}

#[tokio::test]
async fn creation_awaits_another_call_without_event() {
    let test_context = TestContext::with(caches(vec![]), vec![]);
    test_context.volumes.state().locked = true;
    let next = reconcile_claim(&test_context, fixtures::claim(json!({}))).await;
    assert_eq!(next, Next::After(backoff::CONFLICT.first));
    assert_eq!(test_context.finish().await, ["Provisioning"]);
}

/// The status of the claim says that its expansion is in progress.
#[tokio::test]
async fn expansion_awaits_another_call_without_event() {
    let (begin, _) = expect_begin(&requesting("4Mi"), "4Mi");
    let test_context = context_with_volume("Filesystem", vec![begin]);
    test_context.volumes.state().locked = true;
    let next = reconcile_claim(&test_context, requesting("4Mi")).await;
    assert_eq!(next, Next::After(backoff::CONFLICT.first));
    assert_eq!(test_context.finish().await, ["Resizing"]);
}

#[tokio::test(start_paused = true)]
async fn own_status_write_keeps_back_off() {
    let (begin, begun) = expect_begin(&requesting("2Gi"), "2Gi");
    let why =
        "volume pvc-0b6b9a6d-6d0e-4d8c-9a0c-2d1d5e3f7a11: 2146435072 bytes requested, 1072693248 available";
    let outcome = resize::ExpansionOutcome::NoSpace(why.to_owned());
    let record = resize::record(&begun, &fixtures::volume(json!({})), &outcome, Timestamp::UNIX_EPOCH);
    let patch = record.claim.unwrap();
    let refused = after_patch(&begun, "102", patch.clone());
    let requests = vec![begin, expect(Method::PATCH, STATUS, patch).respond(&refused)];
    let test_context = context_with_volume("Filesystem", requests);
    assert_eq!(reconcile_claim(&test_context, requesting("2Gi")).await, first_retry());
    // The watch passes on what this process has written.
    for written in [begun, refused] {
        assert_ne!(reconcile_claim(&test_context, written).await, Next::Change);
    }
    assert_eq!(test_context.finish().await, ["Resizing", "VolumeResizeFailed"]);
}

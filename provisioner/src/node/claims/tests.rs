//! Tests of whole reconciles of claims, with a mock API server and a fake store.

use std::{sync::Arc, time::Duration};

use http::Method;
use k8s_openapi::{api::core::v1::PersistentVolume, jiff::Timestamp};
use kube::runtime::{controller::Action, watcher::Event};
use loopfs::volume_store::{VolumeId, VolumeKind};
use loopfs::{Bytes, ErrorKind};
use rstest::rstest;
use serde_json::{Value, json};

use super::*;
use crate::objects::ownership::SELECTED_NODE;
use crate::{
    api::backoff,
    testing::{
        fake_store::{self, FakeStore},
        fixtures,
        mock_api_server::{Caches, ExpectedRequest, TestContext, expect},
    },
};

const VOLUMES: &str = "/api/v1/persistentvolumes";
const VOLUME: &str = "/api/v1/persistentvolumes/pvc-0b6b9a6d-6d0e-4d8c-9a0c-2d1d5e3f7a11";
const CLAIM: &str = "/api/v1/namespaces/shop/persistentvolumeclaims/data";
const STATUS: &str = "/api/v1/namespaces/shop/persistentvolumeclaims/data/status";
const GIB: u64 = 1 << 30;

fn caches(volumes: Vec<PersistentVolume>) -> Caches {
    Caches { claims: vec![], volumes, classes: vec![fixtures::class(json!({}))] }
}

/// Returns the PersistentVolume as the provisioner sends it, without the fields that the API server and controllers add.
fn sent() -> Value {
    let mut sent = serde_json::to_value(fixtures::volume(json!({"status": null}))).unwrap();
    fixtures::merge(
        &mut sent,
        json!({"metadata": {
            "uid": null, "resourceVersion": null, "finalizers": ["external-provisioner.volume.kubernetes.io/finalizer"],
        }}),
    );
    sent
}

fn creates() -> ExpectedRequest {
    expect(Method::POST, VOLUMES, sent()).respond(fixtures::volume(json!({"status": {"phase": "Pending"}})))
}

async fn reconciled(test_context: &TestContext, claim: PersistentVolumeClaim) -> Action {
    reconcile(Arc::new(claim), Arc::clone(&test_context.ctx)).await
}

#[tokio::test]
async fn a_claim_gets_a_volume_with_one_write() {
    let test_context = TestContext::new(FakeStore::of_size(Bytes(GIB)), caches(vec![]), vec![creates()]);
    assert_eq!(reconciled(&test_context, fixtures::claim(json!({}))).await, Action::await_change());
    assert_eq!(test_context.volumes.capacity(fixtures::VOLUME), Some(Bytes(1 << 20)));
    assert!(test_context.ctx.intents.list().unwrap().is_empty());
    // The watch cache lags behind; nothing is done twice.
    assert_eq!(reconciled(&test_context, fixtures::claim(json!({}))).await, Action::await_change());
    assert_eq!(test_context.finish().await, ["Provisioning", "ProvisioningSucceeded"]);
}

#[tokio::test]
async fn after_a_crash_the_existing_volume_gets_its_persistent_volume() {
    let test_context = TestContext::new(FakeStore::of_size(Bytes(GIB)), caches(vec![]), vec![creates()]);
    let id = VolumeId::parse(fixtures::VOLUME).unwrap();
    test_context.volumes.state().volumes.insert(id, (VolumeKind::Filesystem, Bytes(1 << 20)));
    reconciled(&test_context, fixtures::claim(json!({}))).await;
    assert_eq!(test_context.volumes.state().volumes.len(), 1);
    test_context.finish().await;
}

#[tokio::test]
async fn after_a_crash_the_existing_persistent_volume_is_found() {
    let requests = vec![
        expect(Method::POST, VOLUMES, sent()).refuse(409, "AlreadyExists"),
        expect(Method::GET, VOLUME, None).respond(fixtures::volume(json!({}))),
    ];
    let test_context = TestContext::new(FakeStore::of_size(Bytes(GIB)), caches(vec![]), requests);
    assert_eq!(reconciled(&test_context, fixtures::claim(json!({}))).await, Action::await_change());
    assert_eq!(test_context.finish().await, ["Provisioning", "ProvisioningSucceeded"]);
}

#[tokio::test]
async fn the_record_is_kept_while_the_persistent_volume_of_that_name_is_being_deleted() {
    let deleted = fixtures::volume(json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}));
    let exchanges = vec![
        expect(Method::POST, VOLUMES, sent()).refuse(409, "AlreadyExists"),
        expect(Method::GET, VOLUME, None).respond(deleted),
    ];
    let test_context = TestContext::new(FakeStore::of_size(Bytes(GIB)), caches(vec![]), exchanges);
    assert_eq!(
        reconciled(&test_context, fixtures::claim(json!({}))).await,
        Action::requeue(Duration::from_secs(1))
    );
    assert_eq!(test_context.ctx.intents.list().unwrap().len(), 1);
    assert_eq!(test_context.finish().await, ["Provisioning", "ProvisioningFailed"]);
}

#[tokio::test]
async fn a_foreign_persistent_volume_of_that_name_is_an_error() {
    let foreign = fixtures::volume(json!({"spec": {"claimRef": {"uid": "someone-else"}}}));
    let requests = vec![
        expect(Method::POST, VOLUMES, sent()).refuse(409, "AlreadyExists"),
        expect(Method::GET, VOLUME, None).respond(foreign),
    ];
    let test_context = TestContext::new(FakeStore::of_size(Bytes(GIB)), caches(vec![]), requests);
    assert_eq!(
        reconciled(&test_context, fixtures::claim(json!({}))).await,
        Action::requeue(Duration::from_secs(1))
    );
    assert_eq!(test_context.finish().await, ["Provisioning", "ProvisioningFailed"]);
}

#[tokio::test]
async fn a_claim_that_got_its_volume_on_another_node_leaves_none_here() {
    let elsewhere = fixtures::volume(json!({"metadata": {"labels": {"csi.loopfs.dev/node": "node-b"}}}));
    let requests = vec![
        expect(Method::POST, VOLUMES, sent()).refuse(409, "AlreadyExists"),
        expect(Method::GET, VOLUME, None).respond(elsewhere),
    ];
    let test_context = TestContext::new(FakeStore::of_size(Bytes(GIB)), caches(vec![]), requests);
    assert_eq!(reconciled(&test_context, fixtures::claim(json!({}))).await, Action::await_change());
    assert!(test_context.volumes.state().volumes.is_empty());
    assert!(test_context.ctx.intents.list().unwrap().is_empty());
    assert_eq!(test_context.finish().await, ["Provisioning"]);
}

#[tokio::test]
async fn after_an_api_server_failure_the_volume_stays_for_the_next_attempt() {
    let requests = vec![expect(Method::POST, VOLUMES, sent()).refuse(500, "InternalError")];
    let test_context = TestContext::new(FakeStore::of_size(Bytes(GIB)), caches(vec![]), requests);
    assert_eq!(
        reconciled(&test_context, fixtures::claim(json!({}))).await,
        Action::requeue(Duration::from_secs(1))
    );
    assert_eq!(test_context.volumes.state().volumes.len(), 1);
    assert_eq!(
        test_context.ctx.intents.list().unwrap().len(),
        1,
        "the record stays in case the claim is deleted"
    );
    assert_eq!(test_context.finish().await, ["Provisioning", "ProvisioningFailed"]);
}

#[tokio::test]
async fn a_claim_larger_than_the_store_is_rescheduled_and_retried_when_space_is_free() {
    let large = || fixtures::claim(json!({"spec": {"resources": {"requests": {"storage": "2Gi"}}}}));
    let creation = expect(Method::POST, VOLUMES, {
        let mut larger = sent();
        larger["spec"]["capacity"]["storage"] = json!("2Gi");
        larger
    });
    let creation = creation.respond(fixtures::volume(json!({"spec": {"capacity": {"storage": "2Gi"}}})));
    let rescheduled = json!({"metadata": {
        "uid": fixtures::CLAIM_UID, "resourceVersion": "100", "annotations": {SELECTED_NODE: null},
    }});
    let rescheduling = expect(Method::PATCH, CLAIM, rescheduled)
        .respond(fixtures::claim(json!({"metadata": {"annotations": {SELECTED_NODE: null}}})));
    let test_context =
        TestContext::new(FakeStore::of_size(Bytes(GIB)), caches(vec![]), vec![rescheduling, creation]);
    assert_eq!(reconciled(&test_context, large()).await, Action::await_change());
    assert!(test_context.volumes.state().volumes.is_empty());
    // The scheduler selects this node again. Watch events of the claim do not shorten the wait, but free space does.
    assert_ne!(reconciled(&test_context, large()).await, Action::await_change());
    test_context.volumes.state().size = Bytes(4 * GIB);
    test_context.ctx.retry_generation.bump();
    assert_eq!(reconciled(&test_context, large()).await, Action::await_change());
    let expected = ["Provisioning", "ProvisioningFailed", "Provisioning", "ProvisioningSucceeded"];
    assert_eq!(test_context.finish().await, expected);
}

#[tokio::test]
async fn a_refused_claim_leaves_no_volume_and_no_record() {
    let test_context = TestContext::new(FakeStore::of_size(Bytes(GIB)), caches(vec![]), vec![]);
    let many = fixtures::claim(json!({"spec": {"accessModes": ["ReadWriteMany"]}}));
    reconciled(&test_context, many).await;
    assert!(test_context.volumes.state().volumes.is_empty());
    assert!(test_context.ctx.intents.list().unwrap().is_empty());
    assert_eq!(test_context.finish().await, ["ProvisioningFailed"]);
}

#[tokio::test]
async fn no_volume_is_created_on_a_store_that_became_unavailable() {
    let test_context = TestContext::new(FakeStore::of_size(Bytes(GIB)), caches(vec![]), vec![creates()]);
    test_context.volumes.state().broken = Some(fake_store::error(ErrorKind::NotMounted, "mount it"));
    reconciled(&test_context, fixtures::claim(json!({}))).await;
    assert!(test_context.volumes.state().volumes.is_empty());
    // Only the storage task opens the store again, so it stays unavailable here even if it is usable now.
    test_context.volumes.state().broken = None;
    test_context.ctx.retry_generation.bump();
    reconciled(&test_context, fixtures::claim(json!({}))).await;
    assert!(test_context.volumes.state().volumes.is_empty());
    test_context.ctx.storage.open(test_context.volumes.clone());
    test_context.ctx.retry_generation.bump();
    reconciled(&test_context, fixtures::claim(json!({}))).await;
    assert_eq!(test_context.volumes.state().volumes.len(), 1);
    test_context.finish().await;
}

#[tokio::test]
async fn only_a_change_of_its_own_class_ends_the_back_off_of_a_claim() {
    let bare = fixtures::class(json!({"parameters": {"nonsense": "1"}}));
    let caches = Caches { classes: vec![bare], ..Caches::default() };
    let mut test_context = TestContext::new(FakeStore::of_size(Bytes(GIB)), caches, vec![creates()]);
    let held = Action::requeue(Duration::from_secs(1));
    assert_eq!(reconciled(&test_context, fixtures::claim(json!({}))).await, held);
    test_context.class_cache.apply_watcher_event(&Event::Apply(fixtures::class(
        json!({"metadata": {"name": "other", "resourceVersion": "6"}}),
    )));
    assert_ne!(reconciled(&test_context, fixtures::claim(json!({}))).await, Action::await_change());
    let corrected = fixtures::class(json!({"metadata": {"resourceVersion": "7"}}));
    test_context.class_cache.apply_watcher_event(&Event::Apply(corrected));
    assert_eq!(reconciled(&test_context, fixtures::claim(json!({}))).await, Action::await_change());
    assert_eq!(test_context.volumes.state().volumes.len(), 1);
    test_context.finish().await;
}

/// Returns a claim with the data source [`fixtures::bound_claim`], whose volume is [`fixtures::VOLUME`].
fn clone_named(name: &str, uid: &str) -> PersistentVolumeClaim {
    let source = json!({"kind": "PersistentVolumeClaim", "name": "data"});
    fixtures::claim(json!({"metadata": {"name": name, "uid": uid}, "spec": {"dataSource": source}}))
}

#[tokio::test]
async fn clones_of_one_source_are_copied_concurrently() {
    // The mock API server expects the requests in this order. Neither claim gets its PersistentVolume, because there is no space.
    let source = || expect(Method::GET, CLAIM, None).respond(fixtures::bound_claim(json!({})));
    let volume = || expect(Method::GET, VOLUME, None).respond(fixtures::volume(json!({})));
    let test_context = TestContext::new(
        FakeStore::of_size(Bytes(GIB)),
        caches(vec![]),
        vec![source(), source(), volume(), volume()],
    );
    test_context
        .volumes
        .state()
        .volumes
        .insert(VolumeId::parse(fixtures::VOLUME).unwrap(), (VolumeKind::Filesystem, Bytes(1 << 20)));
    test_context.volumes.state().busy = true;
    test_context.volumes.wait_for_copies(2);
    tokio::join!(
        reconciled(&test_context, clone_named("copy-1", "uid-1")),
        reconciled(&test_context, clone_named("copy-2", "uid-2")),
    );
    assert_eq!(test_context.volumes.copies_begun(), 2);
    test_context.finish().await;
}

#[rstest]
#[case::of_a_claim(clone_named("copy", "uid"), true)]
#[case::without_source(fixtures::claim(json!({})), false)]
#[case::with_its_volume(fixtures::bound_claim(json!({"spec": {"dataSource": {"kind": "PersistentVolumeClaim", "name": "other"}}})), false)]
fn only_claims_that_wait_for_a_copy_use_the_copy_queue(
    #[case] claim: PersistentVolumeClaim,
    #[case] expected: bool,
) {
    assert_eq!(is_to_be_copied(&claim), expected);
}

fn requesting(size: &str) -> PersistentVolumeClaim {
    fixtures::bound_claim(json!({"spec": {"resources": {"requests": {"storage": size}}}}))
}

fn with_volume(mode: &str, requests: Vec<ExpectedRequest>) -> TestContext {
    let volume = fixtures::volume(json!({"spec": {"volumeMode": mode}}));
    let test_context = TestContext::new(FakeStore::of_size(Bytes(GIB)), caches(vec![volume]), requests);
    let kind = if mode == "Block" { VolumeKind::Block } else { VolumeKind::Filesystem };
    let id = VolumeId::parse(fixtures::VOLUME).unwrap();
    test_context.volumes.state().volumes.insert(id, (kind, Bytes(1 << 20)));
    test_context
}

/// Returns the claim after a patch, as the API server returns it.
fn after(claim: PersistentVolumeClaim, version: &str, change: Value) -> Value {
    let mut claim = serde_json::to_value(claim).unwrap();
    fixtures::merge(&mut claim, change);
    fixtures::merge(&mut claim, json!({"metadata": {"resourceVersion": version}}));
    claim
}

fn begins(claim: PersistentVolumeClaim, size: &str) -> (ExpectedRequest, Value) {
    let target = claim_status::requested(&claim).unwrap().unwrap();
    let patch = resize::begin(&claim, target, Timestamp::UNIX_EPOCH).unwrap();
    let begun = after(claim, "101", patch.clone());
    assert_eq!(begun["status"]["allocatedResources"]["storage"], size);
    (expect(Method::PATCH, STATUS, patch).respond(&begun), begun)
}

#[tokio::test]
async fn a_filesystem_claim_is_expanded_with_three_writes_the_persistent_volume_first() {
    let (begin, begun) = begins(requesting("4Mi"), "4Mi");
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
    let begun: PersistentVolumeClaim = serde_json::from_value(begun).unwrap();
    let requests = vec![
        begin,
        expect(Method::PATCH, VOLUME, capacity).respond(expanded),
        expect(Method::PATCH, STATUS, finish.clone()).respond(after(begun, "102", finish)),
    ];
    let test_context = with_volume("Filesystem", requests);
    assert_eq!(reconciled(&test_context, requesting("4Mi")).await, Action::await_change());
    assert_eq!(test_context.volumes.capacity(fixtures::VOLUME), Some(Bytes(4 << 20)));
    // Again with the old version in the watch cache.
    assert_eq!(reconciled(&test_context, requesting("4Mi")).await, Action::await_change());
    assert_eq!(test_context.finish().await, ["Resizing", "VolumeResizeSuccessful"]);
}

#[tokio::test]
async fn a_conflict_is_retried_after_back_off_without_an_event() {
    let (begin, _) = begins(requesting("4Mi"), "4Mi");
    let test_context = with_volume("Filesystem", vec![begin.refuse(409, "Conflict")]);
    assert_eq!(reconciled(&test_context, requesting("4Mi")).await, Action::requeue(backoff::CONFLICT.first));
    assert_ne!(reconciled(&test_context, requesting("4Mi")).await, Action::await_change());
    assert_eq!(
        test_context.volumes.capacity(fixtures::VOLUME),
        Some(Bytes(1 << 20)),
        "not before it is written down"
    );
    assert_eq!(test_context.finish().await, ["Resizing"]);
}

#[tokio::test]
async fn a_request_beyond_the_free_capacity_is_infeasible() {
    let (begin, begun) = begins(requesting("2Gi"), "2Gi");
    let begun: PersistentVolumeClaim = serde_json::from_value(begun).unwrap();
    let why =
        "volume pvc-0b6b9a6d-6d0e-4d8c-9a0c-2d1d5e3f7a11: 2146435072 bytes requested, 1072693248 available";
    let patch = resize::record(
        &begun,
        &fixtures::volume(json!({})),
        &resize::Outcome::Infeasible(why.to_owned()),
        Timestamp::UNIX_EPOCH,
    );
    let patch = patch.claim.unwrap();
    assert_eq!(patch["status"]["allocatedResourceStatuses"]["storage"], "ControllerResizeInfeasible");
    let refused = expect(Method::PATCH, STATUS, patch.clone()).respond(after(begun, "102", patch));
    let test_context = with_volume("Filesystem", vec![begin, refused]);
    assert_eq!(reconciled(&test_context, requesting("2Gi")).await, Action::requeue(Duration::from_secs(1)));
    // The write causes a watch event, which changes nothing.
    assert_ne!(reconciled(&test_context, requesting("2Gi")).await, Action::await_change());
    assert_eq!(test_context.finish().await, ["Resizing", "VolumeResizeFailed"]);
}

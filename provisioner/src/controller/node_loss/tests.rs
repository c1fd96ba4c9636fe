use http::Method;
use k8s_openapi::jiff::Timestamp;
use rstest::rstest;
use serde_json::{Value, json};

use super::*;
use crate::testing::fixtures;
use crate::testing::mock_api_server::{ExpectedRequest, TestContext, expect};

const NODE: &str = "/api/v1/nodes/node-b";
const VOLUMES: &str = "/api/v1/persistentvolumes";
const VOLUME: &str = "/api/v1/persistentvolumes/pvc-0b6b9a6d-6d0e-4d8c-9a0c-2d1d5e3f7a11";
const CLAIM: &str = "/api/v1/namespaces/shop/persistentvolumeclaims/data";

const GRACE: Duration = Duration::from_secs(60);
const SETTINGS: NodeLossSettings =
    NodeLossSettings { mode: NodeLoss::Enforce, at_most_percent: 20, list_interval: Duration::ZERO };

/// Returns a PersistentVolume on node-b. Its policy is to delete the claim one minute after the node was deleted.
fn volume(change: Value) -> PersistentVolume {
    let mut whole = deleting_claim();
    fixtures::merge_keeping_nulls(&mut whole, change);
    fixtures::volume_on("node-b", whole)
}

fn deleting_claim() -> Value {
    json!({"metadata": {"annotations": {
        "csi.loopfs.dev/on-node-loss": "deleteClaim", "csi.loopfs.dev/node-loss-grace-seconds": "60",
    }}})
}

fn list(items: &[PersistentVolume]) -> Value {
    json!({"kind": "PersistentVolumeList", "apiVersion": "v1", "metadata": {}, "items": items})
}

fn metadata(items: &[PersistentVolume]) -> Value {
    fixtures::metadata_list(items.iter().map(|volume| &volume.metadata))
}

fn node_exists() -> ExpectedRequest {
    expect(Method::GET, NODE, None).respond(fixtures::metadata_only(json!({"name": "node-b"})))
}

fn node_deleted() -> ExpectedRequest {
    expect(Method::GET, NODE, None).refuse(404, "NotFound")
}

/// Returns the request that lists the nodes of all PersistentVolumes.
fn suspected(volume: &PersistentVolume) -> ExpectedRequest {
    expect(Method::GET, VOLUMES, None).respond(metadata(std::slice::from_ref(volume)))
}

fn listed(volume: &PersistentVolume) -> ExpectedRequest {
    expect(Method::GET, VOLUMES, None).respond(list(std::slice::from_ref(volume)))
}

/// Returns the requests of a check that finds the volume lost.
fn lost(volume: &PersistentVolume) -> Vec<ExpectedRequest> {
    vec![suspected(volume), node_deleted(), listed(volume)]
}

/// Returns the requests of a check that finds the node there.
fn present(volume: &PersistentVolume) -> Vec<ExpectedRequest> {
    vec![suspected(volume), node_exists()]
}

fn claim_read(change: Value) -> ExpectedRequest {
    expect(Method::GET, CLAIM, None).respond(fixtures::bound_claim(change))
}

fn claim_deleted() -> ExpectedRequest {
    let claim = fixtures::bound_claim(json!({}));
    let preconditions =
        json!({"uid": claim.metadata.uid, "resourceVersion": claim.metadata.resource_version});
    expect(Method::DELETE, CLAIM, json!({"preconditions": preconditions}))
}

const MARKED: &str = "2026-01-01T00:00:00Z";

/// Returns the requests that precede each write: the objects are read again, and the node is asked for.
fn read_again(volume: &PersistentVolume) -> Vec<ExpectedRequest> {
    vec![read(volume), claim_read(json!({})), node_deleted()]
}

fn volume_marked(version: &str) -> ExpectedRequest {
    let preconditions = json!({"preconditions": {"uid": "volume-uid", "resourceVersion": version}});
    expect(Method::DELETE, VOLUME, preconditions)
}

fn finalizer_removed() -> ExpectedRequest {
    let finalizer = "external-provisioner.volume.kubernetes.io/finalizer";
    let patch =
        json!({"metadata": {"uid": "volume-uid", "$deleteFromPrimitiveList/finalizers": [finalizer]}});
    expect(Method::PATCH, VOLUME, patch)
}

fn volume_gone() -> ExpectedRequest {
    expect(Method::GET, VOLUME, None).refuse(404, "NotFound")
}

/// Returns a PersistentVolume without the driver's finalizer, of which only the claim is left to delete.
fn released_from_driver(change: Value) -> PersistentVolume {
    let mut whole =
        json!({"metadata": {"deletionTimestamp": MARKED, "finalizers": ["kubernetes.io/pv-protection"]}});
    fixtures::merge_keeping_nulls(&mut whole, change);
    volume(whole)
}

/// Reconciles at each of these times after the start. Returns the results and the reasons of the events.
async fn reconciled_at(
    times: &[Duration],
    requests: impl IntoIterator<Item = Vec<ExpectedRequest>>,
) -> (Vec<Result<NodeLossCheck, Error>>, Vec<&'static str>) {
    let test_context = TestContext::new(requests.into_iter().flatten().collect());
    let ctx = &*test_context.ctx;
    let nodes = RegisteredNodes::of(&["node-a"]);
    let mut controller = NodeLossController::new(&ctx.cluster, &nodes, SETTINGS);
    let start = Instant::now();
    let mut results = Vec::new();
    for time in times {
        results.push(controller.reconcile(start + *time).await);
    }
    (results, test_context.finish().await)
}

/// The reasons of the events with the deadline: about the PersistentVolume and its claim.
const WARNED: [&str; 2] = ["NodeLost"; 2];

fn waits(results: Vec<Result<NodeLossCheck, Error>>) -> Vec<Option<Duration>> {
    results.into_iter().map(|result| result.unwrap().next).collect()
}

/// Reconciles at the start and again after the grace time, both without an error. Returns the reasons of the events.
async fn reconciled_twice<const CHECKS: usize>(
    requests: [Vec<ExpectedRequest>; CHECKS],
) -> Vec<&'static str> {
    let (results, reasons) = reconciled_at(&[Duration::ZERO, GRACE], requests).await;
    assert!(results.iter().all(Result::is_ok), "{results:?}");
    reasons
}

/// Once the finalizer is removed, no provisioner deletes the data when the claim is deleted.
#[tokio::test]
async fn claim_is_deleted_after_the_finalizer() {
    let bound = volume(json!({}));
    let marked = volume(json!({"metadata": {"deletionTimestamp": MARKED, "resourceVersion": "201"}}));
    let rest = released_from_driver(json!({}));
    let requests = [
        lost(&bound),
        lost(&bound),
        read_again(&bound),
        vec![volume_marked("200")],
        read_again(&marked),
        vec![finalizer_removed()],
        read_again(&rest),
        vec![claim_deleted()],
    ];
    let reasons = reconciled_twice(requests).await;
    assert_eq!(reasons, ["NodeLost"; 6]);
}

fn read(volume: &PersistentVolume) -> ExpectedRequest {
    expect(Method::GET, VOLUME, None).respond(volume)
}

fn node_back(volume: &PersistentVolume) -> Vec<ExpectedRequest> {
    vec![read(volume), claim_read(json!({})), node_exists()]
}

fn retained(_listed: &PersistentVolume) -> Vec<ExpectedRequest> {
    let retained = volume(json!({"metadata": {"annotations": {"csi.loopfs.dev/on-node-loss": "retain"}}}));
    vec![read(&retained), claim_read(json!({}))]
}

fn claim_hidden_by_proxy(volume: &PersistentVolume) -> Vec<ExpectedRequest> {
    vec![read(volume), expect(Method::GET, CLAIM, None).refuse_by_proxy(404)]
}

/// The pass has listed the volume long before it reads it again.
#[rstest]
#[case::node_is_back(volume(json!({})), node_back, &WARNED)]
#[case::node_is_back_before_the_last_write(released_from_driver(json!({})), node_back, &[])]
#[case::policy_was_set(volume(json!({})), retained, &["NodeLost"; 3])]
#[case::a_404_of_a_proxy_proves_nothing(volume(json!({})), claim_hidden_by_proxy, &["NodeLost"; 3])]
#[tokio::test]
async fn nothing_is_written_after_read(
    #[case] volume: PersistentVolume,
    #[case] reads: fn(&PersistentVolume) -> Vec<ExpectedRequest>,
    #[case] events: &[&str],
) {
    let requests = [lost(&volume), lost(&volume), reads(&volume)];
    assert_eq!(reconciled_twice(requests).await, events);
}

/// If another replica or the user acted first, that is no failure.
#[rstest]
#[case::changed(409, "Conflict")]
#[case::not_found(404, "NotFound")]
#[tokio::test]
async fn conflict_or_missing_claim_is_ignored(#[case] status: u16, #[case] reason: &str) {
    let volume = released_from_driver(json!({}));
    let refused = vec![claim_deleted().refuse(status, reason)];
    let requests = [lost(&volume), lost(&volume), read_again(&volume), refused];
    assert_eq!(reconciled_twice(requests).await, [""; 0]);
}

#[tokio::test]
async fn failed_write_is_reported_and_retried() {
    let volume = released_from_driver(json!({}));
    let refused = vec![claim_deleted().refuse(403, "Forbidden")];
    let requests = [lost(&volume), lost(&volume), read_again(&volume), refused, lost(&volume)];
    let half = Duration::from_millis(500);
    let times = [Duration::ZERO, GRACE, GRACE + half];
    let (results, reasons) = reconciled_at(&times, requests).await;
    assert_eq!(waits(results)[1..], [Some(Duration::from_secs(1)), Some(half)]);
    assert_eq!(reasons, ["NodeLost"]);
}

#[tokio::test]
async fn newer_claim_of_the_name_stays() {
    let released = volume(json!({"status": {"phase": "Released"}}));
    let marked = volume(json!({
        "metadata": {"deletionTimestamp": MARKED, "resourceVersion": "201"}, "status": {"phase": "Released"},
    }));
    let read_newer = |volume: &PersistentVolume| {
        let newer = claim_read(json!({"metadata": {"uid": "another"}}));
        vec![read(volume), newer, node_deleted()]
    };
    let requests = [
        lost(&released),
        lost(&released),
        read_newer(&released),
        vec![volume_marked("200")],
        read_newer(&marked),
        vec![finalizer_removed().refuse(404, "NotFound"), volume_gone()],
    ];
    // The claim was deleted, so the warning is only about the PersistentVolume.
    assert_eq!(reconciled_twice(requests).await, ["NodeLost"; 3]);
}

#[rstest]
#[case::of_a_returned_node(present(&volume(json!({}))), true)]
#[case::of_a_failed_check(vec![expect(Method::GET, VOLUMES, None).refuse(500, "InternalError")], false)]
#[tokio::test]
async fn interruption_restarts_the_grace_time(#[case] check: Vec<ExpectedRequest>, #[case] succeeds: bool) {
    let volume = volume(json!({}));
    let requests = [lost(&volume), check, lost(&volume)];
    let times = [Duration::ZERO, GRACE / 2, GRACE];
    let (results, reasons) = reconciled_at(&times, requests).await;
    let waits: Vec<_> = results.into_iter().map(|result| result.ok().map(|check| check.next)).collect();
    assert_eq!(waits, [Some(Some(GRACE)), succeeds.then_some(None), Some(Some(GRACE))]);
    assert_eq!(reasons, ["NodeLost"; 4]);
}

#[tokio::test]
async fn announcement_names_the_deadline() {
    let test_context = TestContext::new(lost(&volume(json!({}))));
    let ctx = &*test_context.ctx;
    let nodes = RegisteredNodes::of(&["node-a"]);
    let began = Timestamp::now();
    NodeLossController::new(&ctx.cluster, &nodes, SETTINGS).reconcile(Instant::now()).await.unwrap();
    let ended = Timestamp::now();
    for event in test_context.events().await {
        let (_, rest) = event.note.split_once("; at ").unwrap();
        let deadline: Timestamp = rest.split_once(',').unwrap().0.parse().unwrap();
        // It has no fraction of a second.
        let earliest = began + GRACE - Duration::from_secs(1);
        assert!((earliest..=ended + GRACE).contains(&deadline), "{}", event.note);
    }
}

/// Another replica has not seen since when the node is missing.
#[tokio::test]
async fn another_leader_restarts_the_grace_time() {
    let volume = volume(json!({}));
    let test_context = TestContext::new([lost(&volume), lost(&volume)].into_iter().flatten().collect());
    let ctx = &*test_context.ctx;
    let nodes = RegisteredNodes::of(&["node-a"]);
    let start = Instant::now();
    for now in [start, start + GRACE] {
        let mut leader = NodeLossController::new(&ctx.cluster, &nodes, SETTINGS);
        assert_eq!(leader.reconcile(now).await.unwrap().next, Some(GRACE));
    }
    assert_eq!(test_context.finish().await, ["NodeLost"; 4]);
}

/// Its CSINode came and went between two checks.
#[tokio::test]
async fn a_sighting_restarts_the_grace_time() {
    let volume = volume(json!({}));
    let test_context = TestContext::new([lost(&volume), lost(&volume)].into_iter().flatten().collect());
    let ctx = &*test_context.ctx;
    let nodes = RegisteredNodes::of(&["node-a"]);
    let mut controller = NodeLossController::new(&ctx.cluster, &nodes, SETTINGS);
    let start = Instant::now();
    assert_eq!(controller.reconcile(start).await.unwrap().next, Some(GRACE));
    nodes.came_and_went("node-b", start + GRACE / 2);
    assert_eq!(controller.reconcile(start + GRACE).await.unwrap().next, Some(GRACE));
    assert_eq!(test_context.finish().await, ["NodeLost"; 4]);
}

/// The name of a node that was deleted long ago gets a new volume, from a backup for example.
#[tokio::test]
async fn each_volume_has_its_grace_time() {
    let kept = volume(json!({"metadata": {"annotations": {"csi.loopfs.dev/on-node-loss": "retain"}}}));
    let restored = volume(json!({"metadata": {"uid": "restored"}}));
    let both = vec![
        suspected(&kept),
        node_deleted(),
        expect(Method::GET, VOLUMES, None).respond(list(&[kept.clone(), restored])),
    ];
    let requests = [lost(&kept), both];
    let (results, reasons) = reconciled_at(&[Duration::ZERO, GRACE], requests).await;
    assert_eq!(waits(results), [Some(GRACE), Some(GRACE)]);
    // One of them about the volume that is kept.
    assert_eq!(reasons, ["NodeLost"; 3]);
}

/// The volumes of the first node are kept, so its loss is settled.
#[tokio::test]
async fn long_lost_node_does_not_count() {
    let kept = json!({"metadata": {"annotations": {"csi.loopfs.dev/on-node-loss": "retain"}}});
    let volumes = [fixtures::volume_on("node-b", kept), fixtures::volume_on("node-c", deleting_claim())];
    let nodes = |volume: &PersistentVolume| {
        expect(Method::GET, VOLUMES, None).respond(list(std::slice::from_ref(volume)))
    };
    let [b, c] = &volumes;
    let only_b = || vec![suspected(b), node_deleted(), nodes(b)];
    let deleted = || expect(Method::GET, "/api/v1/nodes/node-c", None).refuse(404, "NotFound");
    let both = || {
        let named = expect(Method::GET, VOLUMES, None).respond(metadata(&volumes));
        vec![named, node_deleted(), nodes(b), deleted(), nodes(c)]
    };
    let times = [Duration::ZERO, AT_ONCE / 2, AT_ONCE];
    let (results, reasons) = reconciled_at(&times, [only_b(), both(), both()]).await;
    assert_eq!(waits(results), [Some(Duration::from_secs(1800)), None, Some(GRACE)]);
    // Nothing is deleted at first, then the volume of the second node is announced, and that of the first one is kept.
    assert_eq!(reasons, ["NodeLost"; 3]);
}

/// Each change of a CSINode leads to a check.
#[tokio::test]
async fn volumes_are_listed_once_per_interval() {
    let volume = volume(json!({}));
    let requests = [present(&volume), vec![node_exists()], vec![node_exists()], present(&volume)];
    let test_context = TestContext::new(requests.into_iter().flatten().collect());
    let ctx = &*test_context.ctx;
    let nodes = RegisteredNodes::of(&["node-a"]);
    let settings = NodeLossSettings { list_interval: Duration::from_secs(60), ..SETTINGS };
    let mut controller = NodeLossController::new(&ctx.cluster, &nodes, settings);
    let start = Instant::now();
    let mut waits = Vec::new();
    for seconds in [0, 20, 59, 60] {
        waits.push(controller.reconcile(start + Duration::from_secs(seconds)).await.unwrap().next);
    }
    assert_eq!(waits, [None, Some(Duration::from_secs(40)), Some(Duration::from_secs(1)), None]);
    test_context.finish().await;
}

#[tokio::test]
async fn volumes_are_listed_in_pages() {
    let volume = volume(json!({}));
    let mut page = metadata(std::slice::from_ref(&volume));
    page["metadata"] = json!({"continue": "next"});
    let first = expect(Method::GET, VOLUMES, None).respond(page);
    let requests = [vec![first], present(&volume)];
    let (results, _) = reconciled_at(&[Duration::ZERO], requests).await;
    assert_eq!(waits(results), [None]);
}

/// The volumes were deleted between the two lists.
#[tokio::test]
async fn deleted_nodes_without_volumes_are_ignored() {
    let volumes = ["node-b", "node-c"].map(|node| fixtures::volume_on(node, deleting_claim()));
    let none = || expect(Method::GET, VOLUMES, None).respond(list(&[]));
    let requests = vec![
        expect(Method::GET, VOLUMES, None).respond(metadata(&volumes)),
        node_deleted(),
        none(),
        expect(Method::GET, "/api/v1/nodes/node-c", None).refuse(404, "NotFound"),
        none(),
    ];
    let (results, reasons) = reconciled_at(&[Duration::ZERO], [requests]).await;
    assert!(matches!(results[..], [Ok(NodeLossCheck { volumes: 0, next: None })]), "{results:?}");
    assert_eq!(reasons, [""; 0]);
}

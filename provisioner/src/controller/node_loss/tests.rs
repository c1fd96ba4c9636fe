use http::Method;
use rstest::rstest;
use serde_json::{Value, json};

use super::*;
use crate::testing::{
    fake_store::FakeStore,
    fixtures,
    mock_api_server::{Caches, ExpectedRequest, TestContext, expect},
};

const NODE: &str = "/api/v1/nodes/node-b";
const VOLUMES: &str = "/api/v1/persistentvolumes";
const VOLUME: &str = "/api/v1/persistentvolumes/pvc-0b6b9a6d-6d0e-4d8c-9a0c-2d1d5e3f7a11";
const CLAIM: &str = "/api/v1/namespaces/shop/persistentvolumeclaims/data";

const GRACE: Duration = Duration::from_secs(60);

/// Returns a PersistentVolume on node-b. Its policy is to delete the claim one minute after the node was deleted.
fn volume(change: Value) -> PersistentVolume {
    let mut whole = json!({"metadata": {"annotations": {
        "csi.loopfs.dev/on-node-loss": "deleteClaim", "csi.loopfs.dev/node-loss-grace-seconds": "60",
    }}});
    fixtures::merge_keeping_nulls(&mut whole, change);
    fixtures::volume_on("node-b", whole)
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

fn test_context(requests: Vec<ExpectedRequest>) -> TestContext {
    TestContext::new(FakeStore::of_size(loopfs::Bytes(1 << 30)), Caches::default(), requests)
}

/// Reconciles at each of these times after the start. Returns the results and the reasons of the events.
async fn reconciled_at(
    times: &[Duration],
    mode: NodeLoss,
    requests: impl IntoIterator<Item = Vec<ExpectedRequest>>,
) -> (Vec<Result<Option<Duration>, Error>>, Vec<&'static str>) {
    let test_context = test_context(requests.into_iter().flatten().collect());
    let ctx = Arc::clone(&test_context.ctx);
    let nodes = RegisteredNodes::of(&["node-a"]);
    let losses = LossReconciler::new(&ctx.cluster, mode);
    let mut controller = NodeLossController { cluster: &ctx.cluster, nodes: &nodes, losses };
    let start = Instant::now();
    let mut results = Vec::new();
    for time in times {
        results.push(controller.reconcile(start + *time).await);
    }
    drop(controller);
    drop(ctx);
    (results, test_context.finish().await)
}

/// Reconciles at the start and again after the grace time, both without an error. Returns the reasons of the events.
async fn reconciled_twice<const CHECKS: usize>(
    mode: NodeLoss,
    requests: [Vec<ExpectedRequest>; CHECKS],
) -> Vec<&'static str> {
    let (results, reasons) = reconciled_at(&[Duration::ZERO, GRACE], mode, requests).await;
    assert!(results.iter().all(Result::is_ok), "{results:?}");
    reasons
}

#[tokio::test]
async fn a_node_without_csinode_is_not_deleted_while_its_node_exists() {
    let volume = volume(json!({}));
    let requests = [present(&volume), present(&volume)];
    assert_eq!(reconciled_twice(NodeLoss::Enforce, requests).await, [""; 0]);
}

#[tokio::test]
async fn a_404_of_a_proxy_does_not_prove_that_a_node_is_deleted() {
    let volume = volume(json!({}));
    let hidden = vec![suspected(&volume), expect(Method::GET, NODE, None).refuse_by_proxy(404)];
    let requests = [hidden, present(&volume)];
    let (results, reasons) = reconciled_at(&[Duration::ZERO, GRACE], NodeLoss::Enforce, requests).await;
    assert!(matches!(results[..], [Err(_), Ok(None)]), "{results:?}");
    assert_eq!(reasons, [""; 0]);
}

#[tokio::test]
async fn a_404_of_a_proxy_does_not_prove_that_a_claim_is_deleted() {
    let volume = volume(json!({}));
    let hidden = vec![expect(Method::GET, CLAIM, None).refuse_by_proxy(404)];
    let requests = [lost(&volume), lost(&volume), hidden];
    assert_eq!(reconciled_twice(NodeLoss::Enforce, requests).await, ["NodeLost"]);
}

#[tokio::test]
async fn the_claim_is_deleted_after_the_grace_time() {
    let volume = volume(json!({}));
    let deletes = vec![claim_read(json!({})), node_deleted(), claim_deleted()];
    let requests = [lost(&volume), lost(&volume), deletes];
    assert_eq!(reconciled_twice(NodeLoss::Enforce, requests).await, ["NodeLost", "NodeLost"]);
}

#[tokio::test]
async fn a_dry_run_reports_and_deletes_nothing() {
    let volume = volume(json!({}));
    let requests = [lost(&volume), lost(&volume), vec![claim_read(json!({}))]];
    assert_eq!(reconciled_twice(NodeLoss::DryRun, requests).await, ["NodeLost"]);
}

#[tokio::test]
async fn a_node_that_is_back_before_the_write_keeps_its_volumes() {
    let volume = volume(json!({}));
    let back = vec![claim_read(json!({})), node_exists()];
    let requests = [lost(&volume), lost(&volume), back];
    assert_eq!(reconciled_twice(NodeLoss::Enforce, requests).await, [""; 0]);
}

/// If another replica or the user acted first, that is no failure.
#[rstest]
#[case::changed(409, "Conflict")]
#[case::not_found(404, "NotFound")]
#[tokio::test]
async fn a_conflict_or_a_missing_claim_is_no_failure(#[case] status: u16, #[case] reason: &str) {
    let volume = volume(json!({}));
    let refused = vec![claim_read(json!({})), node_deleted(), claim_deleted().refuse(status, reason)];
    let requests = [lost(&volume), lost(&volume), refused];
    assert_eq!(reconciled_twice(NodeLoss::Enforce, requests).await, [""; 0]);
}

#[tokio::test]
async fn a_failed_write_is_reported_and_retried_with_back_off() {
    let volume = volume(json!({}));
    let refused = vec![claim_read(json!({})), node_deleted(), claim_deleted().refuse(403, "Forbidden")];
    let requests = [lost(&volume), lost(&volume), refused, lost(&volume)];
    let half = Duration::from_millis(500);
    let times = [Duration::ZERO, GRACE, GRACE + half];
    let (results, reasons) = reconciled_at(&times, NodeLoss::Enforce, requests).await;
    let waits: Vec<_> = results.into_iter().map(Result::unwrap).collect();
    assert_eq!(waits[1..], [Some(Duration::from_secs(1)), Some(half)]);
    assert_eq!(reasons, ["NodeLost"]);
}

#[tokio::test]
async fn a_newer_claim_stays_and_the_persistent_volume_of_the_old_one_is_deleted() {
    let volume = volume(json!({"status": {"phase": "Released"}}));
    let preconditions = json!({"preconditions": {"uid": "volume-uid", "resourceVersion": "200"}});
    let finalizer = "external-provisioner.volume.kubernetes.io/finalizer";
    let patch =
        json!({"metadata": {"uid": "volume-uid", "$deleteFromPrimitiveList/finalizers": [finalizer]}});
    let deletes = vec![
        claim_read(json!({"metadata": {"uid": "another"}})),
        node_deleted(),
        expect(Method::DELETE, VOLUME, preconditions).respond(&volume),
        expect(Method::PATCH, VOLUME, patch).refuse(404, "NotFound"),
    ];
    let requests = [lost(&volume), lost(&volume), deletes];
    assert_eq!(reconciled_twice(NodeLoss::Enforce, requests).await, ["NodeLost"]);
}

#[tokio::test]
async fn a_node_that_came_back_gets_the_full_grace_time_again() {
    let volume = volume(json!({}));
    let requests = [lost(&volume), present(&volume), lost(&volume)];
    let times = [Duration::ZERO, GRACE / 2, GRACE];
    let (results, reasons) = reconciled_at(&times, NodeLoss::Enforce, requests).await;
    let waits: Vec<_> = results.into_iter().map(Result::unwrap).collect();
    assert_eq!(waits, [Some(GRACE), None, Some(GRACE)]);
    assert_eq!(reasons, [""; 0]);
}

//! Removes volumes whose claims were deleted, or got another PersistentVolume, before they were provisioned.

use std::sync::Arc;
use std::time::Duration;

use loopfs::volume_store::VolumeId;
use tokio::time::timeout;

use crate::api::backoff;
use crate::error::Error;
use crate::node::context::Context;
use crate::node::custody;
use crate::node::references::{self, Labelled};
use crate::node::volume_deletion;
use crate::objects::ownership;
use crate::store::claim_record::ClaimRecord;
use crate::store::driver::VolumeList;

/// Interval at which the pending volumes are checked again, even if no claim was deleted.
const ORPHANS_INTERVAL: Duration = Duration::from_secs(300);

/// Removes volumes whose claim was deleted, or got another PersistentVolume, while they were being provisioned, until shutdown.
pub(crate) async fn run(ctx: Arc<Context>) {
    let ctx = &*ctx;
    let (mut attempts, mut known_filesystem): (u32, _) = (0, None);
    loop {
        ctx.synced().await;
        let all_done = match custody::take_once(&mut known_filesystem, ctx).await {
            Ok(()) => check_pending(ctx).await,
            // An event on the node reports it already.
            Err(Error::Storage(error)) if error.is_reported() => true,
            Err(error) => {
                tracing::warn!(%error, "could not record whose volumes this disk has; the cleanup retries");
                false
            }
        };
        attempts = if all_done { 0 } else { attempts.saturating_add(1) };
        let wait = if attempts == 0 { ORPHANS_INTERVAL } else { backoff::FAILURE.after(attempts) };
        drop(timeout(wait, ctx.claims_deleted.notified()).await);
    }
}

/// Checks each pending volume. Returns `false` if one has to be checked again soon.
async fn check_pending(ctx: &Context) -> bool {
    let listing = async { ctx.storage.driver()?.list(true).await };
    let VolumeList { filesystem_uuid, pending, .. } = match listing.await {
        Ok(list) => list,
        Err(error) => {
            tracing::warn!(%error, "could not read the pending volumes; the cleanup retries");
            return false;
        }
    };
    let mut all_done = true;
    for (id, record) in pending {
        match check_volume(&id, &record, &filesystem_uuid, ctx).await {
            Ok(is_done) => all_done &= is_done,
            Err(error) => {
                tracing::warn!(volume = %id, %error, "could not check whether this volume is an orphan; the check is retried");
                all_done = false;
            }
        }
    }
    all_done
}

/// Deletes a pending volume if it is an orphan, and otherwise confirms it unless provisioning continues. Returns `false` if the volume has
/// to be checked again although no other claim is deleted: another task works on it, or its PersistentVolume is being deleted.
async fn check_volume(
    id: &VolumeId,
    record: &ClaimRecord,
    filesystem_uuid: &str,
    ctx: &Context,
) -> Result<bool, Error> {
    // The task that holds the lock may fail after the claim was deleted, and then leaves an orphan.
    let Some(_exclusive) = ctx.in_flight.enter(id) else { return Ok(false) };
    let claim = ctx.claim(&record.claim()).await?;
    let claim = claim.filter(|claim| claim.metadata.uid.as_deref() == Some(record.uid.as_str()));
    let orphaned = match claim.as_deref().map(ownership::bound_volume) {
        None => Some("the claim was deleted before it had a PersistentVolume"),
        // The claim still waits for its volume.
        Some(None) => return Ok(true),
        Some(Some(bound)) if bound == id.as_str() => None,
        // A claim keeps its volumeName.
        Some(Some(_another)) => Some("the claim got another PersistentVolume"),
    };
    let object = match ctx.volume(id.as_str()) {
        Some(ours) => Some(ours),
        None => ctx.cluster.read_volume(id.as_str()).await?.map(Arc::new),
    };
    let identity = &ctx.cluster.identity;
    let why = match object {
        // The claim was rescheduled and got its volume on another node.
        Some(object) if ownership::is_data_elsewhere(&object, filesystem_uuid, identity) => {
            Some(volume_deletion::ON_ANOTHER_NODE)
        }
        // The disk was moved here from that node, or the PersistentVolume names no disk.
        Some(object) if ownership::is_elsewhere(&object, identity) => None,
        // Its data may have been deleted before the volume was created again. The volume is an orphan once this PersistentVolume
        // no longer exists.
        Some(object) if orphaned.is_some() && object.metadata.deletion_timestamp.is_some() => {
            return Ok(false);
        }
        // The reclaim policy decides about the data.
        Some(_object) => None,
        None => orphaned,
    };
    let why = match why {
        None => None,
        Some(why) => match references::require_none(id, None, Labelled::Listed, ctx).await {
            Ok(()) => Some(why),
            // An administrator has created a PersistentVolume for the volume, whose reclaim policy decides from now on.
            Err(Error::StillReferenced { .. }) => None,
            Err(error) => return Err(error),
        },
    };
    if let Some(why) = why {
        // It may have been provisioned, used and released since it was listed. While this task has it, nothing provisions it.
        if !ctx.storage.driver()?.list(true).await?.pending.contains_key(id) {
            return Ok(true);
        }
        let custody = custody::take(ctx).await?;
        // If the volume was there before the node was registered, its PersistentVolume and claim may have been deleted in the meantime.
        if custody.keeps(id) {
            tracing::warn!(
                volume = %id, claim = %record.claim(),
                "a volume that no claim uses is kept, because it was there before this node was registered or got its disk"
            );
        } else {
            let owner = volume_deletion::owner_from(record);
            volume_deletion::delete(id, Some(&custody.filesystem_uuid), owner, why, ctx).await?;
            return Ok(true);
        }
    }
    ctx.storage.driver()?.confirm(id, filesystem_uuid).await?;
    Ok(true)
}

#[cfg(test)]
mod tests {
    use http::Method;
    use k8s_openapi::api::core::v1::PersistentVolumeClaim;
    use loopfs::Bytes;
    use rstest::rstest;
    use serde_json::{Value, json};

    use super::*;
    use crate::claim_labels::scope::ClaimScope;
    use crate::testing::fake_store::CustodyRecord;
    use crate::testing::fixtures;
    use crate::testing::mock_api_server::{
        Caches, ExpectedRequest, TestContext, expect, labelled, own_node, unlabelled,
    };

    const VOLUME: &str = "/api/v1/persistentvolumes/pvc-0b6b9a6d-6d0e-4d8c-9a0c-2d1d5e3f7a11";
    const CLAIM: &str = "/api/v1/namespaces/shop/persistentvolumeclaims/data";

    fn id() -> VolumeId {
        VolumeId::parse(fixtures::VOLUME).unwrap()
    }

    /// Returns a context with a pending volume and `claims` in the cache.
    fn with_pending_volume(
        claims: Vec<PersistentVolumeClaim>,
        requests: Vec<ExpectedRequest>,
    ) -> (TestContext, ClaimRecord) {
        let caches = Caches { claims, ..Caches::default() };
        let test_context = TestContext::with(caches, requests);
        test_context.volumes.add(fixtures::VOLUME);
        let record = ClaimRecord::of(&fixtures::claim(json!({})));
        test_context.volumes.state().pending.insert(id(), record.clone());
        // The node had its disk before.
        test_context.volumes.state().custody = Some(CustodyRecord::of_empty_disk("node"));
        (test_context, record)
    }

    /// Checks the pending volume. Returns whether the volume exists afterwards, and whether it is pending.
    async fn kept_after_processing(test_context: TestContext, record: &ClaimRecord) -> (bool, bool) {
        check_volume(&id(), record, fixtures::FILESYSTEM, &test_context.ctx).await.unwrap();
        let kept = (
            test_context.volumes.capacity(fixtures::VOLUME).is_some(),
            !test_context.volumes.state().pending.is_empty(),
        );
        test_context.finish().await;
        kept
    }

    fn absent() -> ExpectedRequest {
        expect(Method::GET, VOLUME, None).refuse(404, "NotFound")
    }

    fn reads(change: Value) -> ExpectedRequest {
        expect(Method::GET, VOLUME, None).respond(fixtures::volume(change))
    }

    /// Returns the requests of a deletion, of which the first one is given.
    fn deletes(first: ExpectedRequest) -> Vec<ExpectedRequest> {
        vec![first, unlabelled(&[]), labelled(), own_node("node")]
    }

    #[rstest]
    #[case::its_claim_was_deleted(vec![], deletes(absent()), (false, false))]
    // Its PersistentVolume and its claim were deleted while the node was deleted, and a crash had left the volume pending.
    #[case::the_node_was_registered_later(vec![], vec![absent(), unlabelled(&[]), labelled(), own_node("another")], (true, false))]
    #[case::a_newer_claim_has_the_name(vec![fixtures::claim(json!({"metadata": {"uid": "another"}}))], deletes(absent()), (false, false))]
    #[case::it_has_a_persistent_volume(vec![], vec![reads(json!({"status": {"phase": "Released"}}))], (true, false))]
    // The disk was at the other node, which created the PersistentVolume, and came back before the volume was confirmed.
    #[case::its_persistent_volume_names_this_disk(
        vec![fixtures::bound_claim(json!({}))],
        vec![reads(json!({"metadata": {"labels": {"csi.loopfs.dev/node": "node-b"}}}))],
        (true, false)
    )]
    #[case::its_claim_waits(vec![fixtures::claim(json!({}))], vec![], (true, true))]
    #[case::its_claim_is_bound(vec![fixtures::bound_claim(json!({}))], vec![reads(json!({}))], (true, false))]
    #[case::its_claim_has_a_volume_elsewhere(vec![], deletes(reads(fixtures::on_another_node())), (false, false))]
    #[case::its_claim_got_another_persistent_volume(
        vec![fixtures::bound_claim(json!({"spec": {"volumeName": "pv-1"}}))], deletes(absent()), (false, false)
    )]
    #[case::only_its_claim_exists(vec![fixtures::bound_claim(json!({}))], vec![absent()], (true, false))]
    #[case::an_administrator_created_its_persistent_volume(
        vec![],
        vec![absent(), unlabelled(&[fixtures::volume(json!({"metadata": {"name": "mine", "labels": null}}))])],
        (true, false)
    )]
    #[tokio::test]
    async fn pending_volume_is_kept_unless_orphaned(
        #[case] claims: Vec<PersistentVolumeClaim>,
        #[case] requests: Vec<ExpectedRequest>,
        #[case] expected: (bool, bool),
    ) {
        let (test_context, record) = with_pending_volume(claims, requests);
        assert_eq!(kept_after_processing(test_context, &record).await, expected);
    }

    #[tokio::test]
    async fn volume_outlives_its_marked_persistent_volume() {
        let deleted = reads(json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}));
        let requests = [deleted].into_iter().chain(deletes(absent())).collect();
        let (test_context, record) = with_pending_volume(vec![], requests);
        assert!(!check_volume(&id(), &record, fixtures::FILESYSTEM, &test_context.ctx).await.unwrap());
        assert_eq!(test_context.volumes.state().pending.len(), 1);
        assert_eq!(kept_after_processing(test_context, &record).await, (false, false));
    }

    /// A task that fails after its claim was deleted leaves a volume behind, and no event announces that.
    #[tokio::test(start_paused = true)]
    async fn a_locked_volume_is_checked_again() {
        let requests = [own_node("node")].into_iter().chain(deletes(absent())).collect();
        let (test_context, _record) = with_pending_volume(vec![], requests);
        let ctx = Arc::clone(&test_context.ctx);
        let exclusive = ctx.in_flight.enter(&id());
        let begun = tokio::time::Instant::now();
        let cleanup = tokio::spawn(run(Arc::clone(&ctx)));
        tokio::time::sleep(Duration::from_millis(10)).await;
        assert_eq!(test_context.volumes.capacity(fixtures::VOLUME), Some(Bytes(1 << 20)));
        drop(exclusive);
        while !test_context.volumes.state().pending.is_empty() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        assert!(begun.elapsed() < ORPHANS_INTERVAL, "{:?}", begun.elapsed());
        assert_eq!(test_context.volumes.capacity(fixtures::VOLUME), None);
        cleanup.abort();
        drop(cleanup.await);
        drop(ctx);
        test_context.finish().await;
    }

    /// A claim that has lost its label is not in the cache of a node that watches by labels.
    #[rstest]
    #[case::waits(expect(Method::GET, CLAIM, None).respond(fixtures::claim(json!({}))), vec![], (true, true))]
    #[case::of_another_node(
        expect(Method::GET, CLAIM, None).respond(fixtures::claim(json!({"metadata": {"annotations": {ownership::SELECTED_NODE: "node-b"}}}))),
        deletes(absent()),
        (false, false)
    )]
    #[case::does_not_exist(
        expect(Method::GET, CLAIM, None).refuse(404, "NotFound"),
        deletes(absent()),
        (false, false)
    )]
    #[tokio::test]
    async fn labelled_watch_reads_claim_before_deletion(
        #[case] reads_claim: ExpectedRequest,
        #[case] others: Vec<ExpectedRequest>,
        #[case] expected: (bool, bool),
    ) {
        let requests = std::iter::once(reads_claim).chain(others).collect();
        let (test_context, record) = with_pending_volume(vec![], requests);
        test_context.ctx.claim_scope.set(ClaimScope::Own);
        // The cache may still be that of the earlier watch.
        test_context.ctx.claim_scope.set(ClaimScope::All);
        assert_eq!(kept_after_processing(test_context, &record).await, expected);
    }

    /// Between the listing and its turn it was provisioned and used, and an administrator deleted its PersistentVolume to keep the data.
    #[tokio::test]
    async fn volume_that_was_confirmed_since_the_listing_is_kept() {
        let requests = vec![absent(), unlabelled(&[]), labelled()];
        let (test_context, record) = with_pending_volume(vec![], requests);
        test_context.volumes.state().pending.clear();
        assert_eq!(kept_after_processing(test_context, &record).await, (true, false));
    }

    /// The volume stays pending, so that the deletion is repeated.
    #[tokio::test]
    async fn failed_deletion_leaves_volume_pending() {
        let (test_context, record) = with_pending_volume(vec![], deletes(absent()));
        test_context.volumes.state().busy = true;
        assert!(check_volume(&id(), &record, fixtures::FILESYSTEM, &test_context.ctx).await.is_err());
        assert_eq!(test_context.volumes.state().pending.len(), 1);
        test_context.finish().await;
    }
}

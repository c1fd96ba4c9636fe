//! Work nobody waits for: freeing the space of deleted volumes, and undoing what was begun for claims that
//! are gone.

use std::{sync::Arc, time::Duration};

use loopfs::VolumeId;
use tokio::time::timeout;

use crate::{
    api::{absence, backoff},
    error::Error,
    node::{context::Context, references},
    objects::ownership,
    store::{intents::Intent, volumes::StorageError},
};

/// What a deleted volume leaves may be held by an open file, of which nobody tells when it is closed.
const TRASH_INTERVAL: Duration = Duration::from_secs(60);

/// The records of provisioning are read again after this, even if no claim has vanished.
const ORPHANS_INTERVAL: Duration = Duration::from_secs(300);

/// Empties the trash whenever something was put there, for ever.
pub(crate) async fn empty_trash(ctx: &Context) {
    loop {
        // At the first turn too: an earlier process may have left some.
        match ctx.storage.run_yielding(|volumes, yield_now| volumes.empty_trash(yield_now)).await {
            Ok(0) => {}
            Ok(removed) => {
                tracing::info!(volumes = removed, "the space of deleted volumes is free again");
                ctx.retry_generation.bump();
            }
            // Told on the node already; it becomes usable or not whatever this does.
            Err(StorageError::Unavailable(_)) => {}
            Err(error) => tracing::warn!(%error, "the trash could not be emptied; this is retried"),
        }
        // Whether by notification or by time makes no difference.
        drop(timeout(TRASH_INTERVAL, ctx.trash.notified()).await);
    }
}

/// Undoes provisioning whose claim is gone, whenever claims vanish, until shutdown.
pub(crate) async fn remove_orphans(ctx: &Context) {
    let mut attempts: u32 = 0;
    loop {
        ctx.synced().await;
        attempts = if settle_all(ctx).await { 0 } else { attempts.saturating_add(1) };
        let wait = if attempts == 0 { ORPHANS_INTERVAL } else { backoff::FAILURE.after(attempts) };
        drop(timeout(wait, ctx.claims_vanished.notified()).await);
    }
}

/// Brings every record to its end. Returns `false` if one has to be read again soon.
async fn settle_all(ctx: &Context) -> bool {
    let intents = ctx.intents.clone();
    let intents = match tokio::task::spawn_blocking(move || intents.list()).await {
        Ok(Ok(intents)) => intents,
        Ok(Err(error)) => {
            tracing::warn!(%error, "records of provisioning cannot be read; this is retried");
            return false;
        }
        Err(error) => {
            tracing::error!(%error, "reading records of provisioning panicked; this is retried");
            return false;
        }
    };
    let mut all_settled = true;
    for (id, intent) in intents {
        match settle(&id, &intent, ctx).await {
            Ok(is_settled) => all_settled &= is_settled,
            Err(error) => {
                tracing::warn!(volume = %id, %error, "whether this volume is an orphan is looked at again later");
                all_settled = false;
            }
        }
    }
    all_settled
}

/// Brings one record to its end, if it is there. Returns `false` if that has to be tried again, although no claim vanishes: another
/// task works on the volume, or its PersistentVolume is being deleted.
async fn settle(id: &VolumeId, intent: &Intent, ctx: &Context) -> Result<bool, Error> {
    // The task may fail after the claim has vanished, and then leaves the volume to this one.
    let Some(_exclusive) = ctx.in_flight.enter(id) else { return Ok(false) };
    let claim = ctx.claims.get(&intent.claim());
    let claim = claim.filter(|claim| claim.metadata.uid.as_deref() == Some(intent.uid.as_str()));
    let bound = claim.as_deref().map(|claim| ownership::bound_volume(claim) == Some(id.as_str()));
    if bound == Some(false) {
        // Provisioning goes on, or is going to.
        return Ok(true);
    }
    let object = match ctx.volume(id.as_str()) {
        Some(ours) => Some(ours),
        None => absence::get_opt(&ctx.cluster.volume_api(), id.as_str())
            .await
            .map_err(|error| Error::api("read PersistentVolume", id.as_str(), error))?
            .map(|object| Arc::new(object.into_inner())),
    };
    let made = match object {
        // The claim went to another node and got its volume there.
        Some(object) if ownership::is_elsewhere(&object, &ctx.cluster.identity) => false,
        // Its data may have been deleted before the volume was created again. The volume is an orphan once the object is gone.
        Some(object) if bound.is_none() && object.metadata.deletion_timestamp.is_some() => return Ok(false),
        Some(_object) => true,
        None => bound.is_some(),
    };
    if !made {
        references::require_none(id, None, ctx).await?;
    }
    let (intents, orphan) = (ctx.intents.clone(), id.clone());
    // Once it has an object, the volume is the business of its reclaim policy.
    let removed = ctx.storage.run(move |volumes| {
        let removed = !made && volumes.delete(&orphan)?;
        if let Err(error) = intents.clear(&orphan) {
            tracing::warn!(volume = %orphan, %error, "a record of provisioning cannot be removed");
        }
        Ok(removed)
    });
    if removed.await? {
        tracing::info!(volume = %id, claim = %intent.claim(), "removed a volume whose claim vanished while it was being made");
        ctx.trash.notify_one();
    }
    Ok(true)
}

/// Both, until the process ends.
pub(crate) async fn run(ctx: Arc<Context>) {
    tokio::join!(empty_trash(&ctx), remove_orphans(&ctx));
}

#[cfg(test)]
mod tests {
    use http::Method;
    use k8s_openapi::api::core::v1::PersistentVolumeClaim;
    use loopfs::{Bytes, ErrorKind, VolumeKind};
    use rstest::rstest;
    use serde_json::{Value, json};

    use super::*;
    use crate::testing::{
        fake_store::{self, FakeStore},
        fixtures,
        mock_api_server::{Caches, ExpectedRequest, TestContext, expect, unlabelled},
    };

    const VOLUME: &str = "/api/v1/persistentvolumes/pvc-0b6b9a6d-6d0e-4d8c-9a0c-2d1d5e3f7a11";

    fn id() -> VolumeId {
        VolumeId::parse(fixtures::VOLUME).unwrap()
    }

    /// A volume and the record of its provisioning, and what the caches say of its claim.
    fn recorded(claims: Vec<PersistentVolumeClaim>, requests: Vec<ExpectedRequest>) -> (TestContext, Intent) {
        let caches = Caches { claims, ..Caches::default() };
        let test_context = TestContext::new(FakeStore::of_size(Bytes(1 << 30)), caches, requests);
        test_context.volumes.state().volumes.insert(id(), (VolumeKind::Filesystem, Bytes(1 << 20)));
        let intent = Intent::of(&fixtures::claim(json!({})));
        test_context.ctx.intents.record(&id(), &intent).unwrap();
        (test_context, intent)
    }

    /// Whether the volume and the record are still there.
    async fn settled(test_context: TestContext, intent: &Intent) -> (bool, bool) {
        settle(&id(), intent, &test_context.ctx).await.unwrap();
        let kept = (
            test_context.volumes.capacity(fixtures::VOLUME).is_some(),
            !test_context.ctx.intents.list().unwrap().is_empty(),
        );
        test_context.finish().await;
        kept
    }

    #[tokio::test]
    async fn a_volume_whose_claim_vanished_before_it_had_an_object_goes() {
        let (test_context, intent) = recorded(
            vec![],
            vec![expect(Method::GET, VOLUME, None).refuse(404, "NotFound"), unlabelled(&[])],
        );
        assert_eq!(settled(test_context, &intent).await, (false, false));
    }

    #[tokio::test]
    async fn so_it_does_when_a_new_claim_has_taken_the_name() {
        let successor = fixtures::claim(json!({"metadata": {"uid": "another"}}));
        let requests = vec![expect(Method::GET, VOLUME, None).refuse(404, "NotFound"), unlabelled(&[])];
        let (test_context, intent) = recorded(vec![successor], requests);
        assert_eq!(settled(test_context, &intent).await, (false, false));
    }

    #[tokio::test]
    async fn a_volume_with_an_object_is_kept() {
        let object = fixtures::volume(json!({"status": {"phase": "Released"}}));
        let (test_context, intent) = recorded(vec![], vec![expect(Method::GET, VOLUME, None).answer(object)]);
        assert_eq!(settled(test_context, &intent).await, (true, false));
    }

    #[tokio::test]
    async fn a_volume_whose_object_is_being_deleted_goes_once_the_object_is_gone() {
        let deleted = fixtures::volume(json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}));
        let (test_context, intent) = recorded(
            vec![],
            vec![
                expect(Method::GET, VOLUME, None).answer(deleted),
                expect(Method::GET, VOLUME, None).refuse(404, "NotFound"),
                unlabelled(&[]),
            ],
        );
        assert!(!settle(&id(), &intent, &test_context.ctx).await.unwrap());
        assert_eq!(test_context.ctx.intents.list().unwrap().len(), 1);
        assert_eq!(settled(test_context, &intent).await, (false, false));
    }

    /// A task that fails after its claim has vanished leaves a volume, and no further claim need vanish.
    #[tokio::test(start_paused = true)]
    async fn a_record_that_was_in_flight_is_read_again_although_no_claim_vanishes() {
        let exchanges = vec![expect(Method::GET, VOLUME, None).refuse(404, "NotFound"), unlabelled(&[])];
        let (test_context, _intent) = recorded(vec![], exchanges);
        let ctx = Arc::clone(&test_context.ctx);
        let exclusive = ctx.in_flight.enter(&id());
        let begun = tokio::time::Instant::now();
        let janitor = tokio::spawn({
            let ctx = Arc::clone(&ctx);
            async move { remove_orphans(&ctx).await }
        });
        tokio::task::yield_now().await;
        drop(exclusive);
        while !test_context.ctx.intents.list().unwrap().is_empty() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        assert!(begun.elapsed() < ORPHANS_INTERVAL, "{:?}", begun.elapsed());
        assert_eq!(test_context.volumes.capacity(fixtures::VOLUME), None);
        janitor.abort();
        drop(janitor.await);
        drop(ctx);
        test_context.finish().await;
    }

    #[tokio::test]
    async fn provisioning_that_goes_on_is_left_alone() {
        let (test_context, intent) = recorded(vec![fixtures::claim(json!({}))], vec![]);
        assert_eq!(settled(test_context, &intent).await, (true, true));
    }

    #[tokio::test]
    async fn a_record_ends_with_the_binding() {
        let object = fixtures::volume(json!({}));
        let requests = vec![expect(Method::GET, VOLUME, None).answer(object)];
        let (test_context, intent) = recorded(vec![fixtures::bound_claim(json!({}))], requests);
        assert_eq!(settled(test_context, &intent).await, (true, false));
    }

    #[tokio::test]
    async fn a_volume_whose_claim_got_another_on_another_node_goes() {
        let object = fixtures::volume(json!({"metadata": {"labels": {"csi.loopfs.dev/node": "node-b"}}}));
        let requests = vec![expect(Method::GET, VOLUME, None).answer(object), unlabelled(&[])];
        let (test_context, intent) = recorded(vec![], requests);
        assert_eq!(settled(test_context, &intent).await, (false, false));
    }

    #[tokio::test]
    async fn the_data_of_a_bound_claim_outlives_its_object() {
        let requests = vec![expect(Method::GET, VOLUME, None).refuse(404, "NotFound")];
        let (test_context, intent) = recorded(vec![fixtures::bound_claim(json!({}))], requests);
        assert_eq!(settled(test_context, &intent).await, (true, false));
    }

    #[tokio::test]
    async fn an_attempt_that_is_under_way_is_not_disturbed() {
        let (test_context, intent) = recorded(vec![], vec![]);
        let ctx = Arc::clone(&test_context.ctx);
        let _exclusive = ctx.in_flight.enter(&id());
        assert!(
            !settle(&id(), &intent, &ctx).await.unwrap(),
            "the attempt may fail, so the record is read again"
        );
        assert_eq!(test_context.volumes.capacity(fixtures::VOLUME), Some(Bytes(1 << 20)));
    }

    #[tokio::test]
    async fn a_volume_that_an_object_of_another_name_needs_is_kept() {
        let named = fixtures::volume(json!({"metadata": {"name": "mine", "labels": null}}));
        let requests = vec![expect(Method::GET, VOLUME, None).refuse(404, "NotFound"), unlabelled(&[named])];
        let (test_context, intent) = recorded(vec![], requests);
        assert!(settle(&id(), &intent, &test_context.ctx).await.is_err());
        assert_eq!(test_context.volumes.capacity(fixtures::VOLUME), Some(Bytes(1 << 20)));
        test_context.finish().await;
    }

    #[rstest]
    #[case::text(expect(Method::GET, VOLUME, None).refuse_by_proxy(404))]
    #[case::no_details(expect(Method::GET, VOLUME, None).refuse_with(404, "NotFound", Value::Null))]
    #[case::another_object(expect(Method::GET, VOLUME, None).refuse_with(404, "NotFound", json!({"kind": "persistentvolumes", "name": "pvc-2"})))]
    #[tokio::test]
    async fn a_404_that_is_not_about_the_object_deletes_nothing(#[case] response: ExpectedRequest) {
        let (test_context, intent) = recorded(vec![], vec![response]);
        assert!(settle(&id(), &intent, &test_context.ctx).await.is_err());
        assert_eq!(test_context.volumes.capacity(fixtures::VOLUME), Some(Bytes(1 << 20)));
        assert_eq!(test_context.ctx.intents.list().unwrap().len(), 1);
        test_context.finish().await;
    }

    #[tokio::test]
    async fn without_the_store_or_the_api_server_nothing_is_forgotten() {
        let requests = vec![
            expect(Method::GET, VOLUME, None).refuse(500, "InternalError"),
            expect(Method::GET, VOLUME, None).refuse(404, "NotFound"),
            unlabelled(&[]),
        ];
        let (test_context, intent) = recorded(vec![], requests);
        assert!(settle(&id(), &intent, &test_context.ctx).await.is_err());
        test_context.volumes.state().broken = Some(fake_store::error(ErrorKind::NotMounted, "mount it"));
        assert!(settle(&id(), &intent, &test_context.ctx).await.is_err());
        assert_eq!(test_context.ctx.intents.list().unwrap().len(), 1);
        assert_eq!(test_context.volumes.capacity(fixtures::VOLUME), Some(Bytes(1 << 20)));
        test_context.finish().await;
    }
}

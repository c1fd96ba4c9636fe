//! Background cleanup: frees the space of deleted volumes, and removes volumes that were created for claims which do not exist any
//! more.

use std::{sync::Arc, time::Duration};

use loopfs::VolumeId;
use tokio::time::timeout;

use crate::{
    api::absence,
    error::Error,
    node::{context::Context, references},
    objects::ownership,
    store::{intents::Intent, volumes::StorageError},
};

/// An open file may keep the entry of a deleted volume, and no event announces when it is closed.
const TRASH_INTERVAL: Duration = Duration::from_secs(60);

/// Interval at which an orphaned volume that could not be removed is checked again.
const ORPHANS_INTERVAL: Duration = Duration::from_secs(300);

/// Empties the trash whenever an entry was moved there, until shutdown.
pub(crate) async fn empty_trash(ctx: &Context) {
    loop {
        // Also at the first turn: an earlier process may have left entries.
        match ctx.storage.run_yielding(|volumes, yield_now| volumes.empty_trash(yield_now)).await {
            Ok(0) => {}
            Ok(removed) => {
                tracing::info!(volumes = removed, "freed the space of deleted volumes");
                ctx.retry_generation.bump();
            }
            // An event on the node reports it already.
            Err(StorageError::Unavailable(_)) => {}
            Err(error) => {
                tracing::warn!(%error, "could not empty the trash; the next attempt is in {TRASH_INTERVAL:?} at the latest")
            }
        }
        // Continues after a notification or at the interval.
        drop(timeout(TRASH_INTERVAL, ctx.trash.notified()).await);
    }
}

/// Removes volumes whose claim was deleted while they were being provisioned, until shutdown.
pub(crate) async fn remove_orphans(ctx: &Context) {
    loop {
        ctx.synced().await;
        let intents = ctx.intents.clone();
        match tokio::task::spawn_blocking(move || intents.list()).await {
            Ok(Ok(intents)) => {
                for (id, intent) in intents {
                    if let Err(error) = settle(&id, &intent, ctx).await {
                        tracing::warn!(volume = %id, %error, "whether this volume is an orphan is looked at again later");
                    }
                }
            }
            Ok(Err(error)) => tracing::warn!(%error, "records of provisioning cannot be read"),
            Err(error) => tracing::error!(%error, "reading records of provisioning panicked"),
        }
        drop(timeout(ORPHANS_INTERVAL, ctx.claims_vanished.notified()).await);
    }
}

/// Brings one record to its end, if it is there.
async fn settle(id: &VolumeId, intent: &Intent, ctx: &Context) -> Result<(), Error> {
    let Some(_exclusive) = ctx.in_flight.enter(id) else { return Ok(()) };
    let claim = ctx.claims.get(&intent.claim());
    let claim = claim.filter(|claim| claim.metadata.uid.as_deref() == Some(intent.uid.as_str()));
    let bound = claim.as_deref().map(|claim| ownership::bound_volume(claim) == Some(id.as_str()));
    if bound == Some(false) {
        // Provisioning goes on, or is going to.
        return Ok(());
    }
    let made = match (ctx.volume(id.as_str()), bound) {
        (Some(_ours), _) => true,
        (None, bound) => {
            let object = absence::get_opt(&ctx.cluster.volume_api(), id.as_str()).await;
            let object = object.map_err(|error| Error::api("read PersistentVolume", id.as_str(), error))?;
            match object {
                // The claim went to another node and got its volume there.
                Some(object) => !ownership::is_elsewhere(&object, &ctx.cluster.identity),
                None => bound.is_some(),
            }
        }
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
    Ok(())
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
        settle(&id(), &intent, &ctx).await.unwrap();
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

//! Work nobody waits for: freeing the space of deleted volumes, and undoing what was begun for claims that
//! are gone.

use std::{sync::Arc, time::Duration};

use loopfs::VolumeId;
use tokio::time::timeout;

use crate::{context::Context, error::Error, intents::Intent, ownership, storage::StorageError};

/// What a deleted volume leaves may be held by an open file, of which nobody tells when it is closed.
const TRASH_EVERY: Duration = Duration::from_secs(60);

/// An orphan that could not be removed is looked at again after this.
const ORPHANS_EVERY: Duration = Duration::from_secs(300);

/// Empties the trash whenever something was put there, for ever.
pub(crate) async fn empty_trash(ctx: &Context) {
    loop {
        // At the first turn too: an earlier process may have left some.
        match ctx.storage.run(|volumes| volumes.empty_trash()).await {
            Ok(0) => {}
            Ok(removed) => {
                tracing::info!(volumes = removed, "the space of deleted volumes is free again");
                ctx.chances.improve();
            }
            // Told on the node already; it becomes usable or not whatever this does.
            Err(StorageError::Unavailable(_)) => {}
            Err(error) => tracing::warn!(%error, "the trash could not be emptied; this is retried"),
        }
        // Whether by notification or by time makes no difference.
        drop(timeout(TRASH_EVERY, ctx.trash.notified()).await);
    }
}

/// Undoes provisioning whose claim is gone, whenever claims vanish, for ever.
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
        drop(timeout(ORPHANS_EVERY, ctx.claims_vanished.notified()).await);
    }
}

/// Brings one record to its end, if it is there.
async fn settle(id: &VolumeId, intent: &Intent, ctx: &Context) -> Result<(), Error> {
    let Some(_exclusive) = ctx.in_flight.enter(id) else { return Ok(()) };
    let claim = ctx.claims.get(&intent.claim());
    let claim = claim.filter(|claim| claim.metadata.uid.as_deref() == Some(intent.uid.as_str()));
    let made = match claim.as_deref() {
        Some(claim) if ownership::bound_volume(claim) == Some(id.as_str()) => true,
        // Provisioning goes on, or is going to.
        Some(_) => return Ok(()),
        None => {
            let object = ctx.volume_api().get_opt(id.as_str()).await;
            object.map_err(|error| Error::api("read PersistentVolume", id.as_str(), error))?.is_some()
        }
    };
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

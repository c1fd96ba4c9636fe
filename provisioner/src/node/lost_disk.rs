//! Finds PersistentVolumes of this node that are on a file system which the node does not have any more, and reconciles them.
//!
//! Only the node itself knows which file system it has.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::PersistentVolume;
use tokio::time::{sleep, timeout};

use super::audit::node_volumes;
use super::context::Context;
use super::custody;
use crate::error::Error;
use crate::loss::{LossReconciler, Lost, LostStorage, NodeLoss, POLL_INTERVAL, Witness};
use crate::objects::identity::Identity;
use crate::objects::ownership;
use crate::store::driver::VolumeList;

/// Wait after a change of the store, which can open and close many times in a row.
const DEBOUNCE: Duration = Duration::from_millis(500);

/// Checks for lost disks until shutdown.
pub(crate) async fn run(ctx: Arc<Context>, mode: NodeLoss) {
    ctx.synced().await;
    ctx.storage.tried().await;
    let mut losses = LossReconciler::new(&ctx.cluster, ctx.as_ref(), mode);
    let mut storage = ctx.storage.changes();
    loop {
        let mut lost = on_other_disks(&ctx).await;
        // If the disk comes back, the record of the present one shows that it was away.
        if !lost.is_empty()
            && let Err(error) = custody::take(&ctx).await
        {
            tracing::warn!(%error, "could not record which disk this node has, so no object of a lost one is deleted");
            lost.clear();
        }
        let next = losses.reconcile(lost, Instant::now()).await;
        let wait = next.unwrap_or(POLL_INTERVAL).min(POLL_INTERVAL);
        if timeout(wait, storage.changed()).await.is_ok() {
            sleep(DEBOUNCE).await;
        }
    }
}

/// Returns the PersistentVolumes of this node that name another file system than the open store has, and whose volumes it does not
/// hold. While the store is not open, the node's file system is unknown and the result is empty.
async fn on_other_disks(ctx: &Context) -> BTreeMap<LostStorage, Lost> {
    let mut lost: BTreeMap<_, Lost> = BTreeMap::new();
    let Ok(present) = node_volumes(ctx).await else { return lost };
    for volume in ctx.volumes.cache.state() {
        if let Some(uuid) = lost_filesystem(&present, &volume, &ctx.cluster.identity) {
            let on_disk = lost.entry(LostStorage::Disk(uuid.to_owned())).or_default();
            on_disk.volumes.push(Arc::clone(&volume));
        }
    }
    lost
}

/// Returns the file system of a volume that is not on the present disk. The UUID alone does not show that: an administrator may have
/// changed it (xfs_admin(8)).
fn lost_filesystem<'a>(
    present: &VolumeList,
    volume: &'a PersistentVolume,
    identity: &Identity,
) -> Option<&'a str> {
    let uuid =
        ownership::filesystem_uuid(volume, identity).filter(|uuid| *uuid != present.filesystem_uuid)?;
    let id = ownership::volume_id(volume, identity).ok()?;
    (!present.volumes.contains(&id)).then_some(uuid)
}

impl Witness for &Context {
    async fn is_lost(&self, place: &LostStorage, volume: &PersistentVolume) -> Result<bool, Error> {
        let present = node_volumes(self).await?;
        Ok(match place {
            LostStorage::Disk(uuid) => {
                lost_filesystem(&present, volume, &self.cluster.identity) == Some(uuid.as_str())
            }
            LostStorage::Node(_) => false,
        })
    }
}

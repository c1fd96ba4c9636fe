//! The size that a volume has on this node.

use loopfs::{Bytes, Volume, VolumeId, VolumeKind};

use super::block_device::BlockVolume;
use super::publish::Volumes;
use super::volume::require_kind;
use crate::error::{Error, Result};
use crate::request::{CapacityRange, NodeExpand};
use crate::storage::Storage;

impl Volumes {
    /// Answers the size that the volume has on this node now. Growing the image or the quota is not done here: that is
    /// for whoever makes volumes.
    pub(crate) fn node_expand(&self, expand: &NodeExpand) -> Result<Bytes> {
        let storage = self.monitor.verified()?;
        let volume = storage.store.volume(&expand.volume)?;
        if let Some(access_type) = expand.access_type {
            require_kind(&volume, access_type.kind())?;
        }
        let size = match volume.kind() {
            VolumeKind::Filesystem => volume.capacity(),
            VolumeKind::Block => refresh_and_record(&volume, &storage)?,
        };
        let CapacityRange { at_least, at_most } = expand.capacity;
        match (at_least, at_most) {
            (Some(at_least), _) if size < at_least => Err(Error::Temporary(format!(
                "volume {} has {size}, {at_least} are required; the volume itself is expanded first",
                expand.volume
            ))),
            (_, Some(at_most)) if size > at_most => Err(Error::OutOfRange(format!(
                "volume {} has {size} already, above the limit of {at_most}",
                expand.volume
            ))),
            _ => Ok(size),
        }
    }

    /// Has the devices of a Block volume show that it has expanded, if it has since they were last told. Answers the size
    /// they have then.
    ///
    /// It needs no guard, and so keeps no call from being served: to show more of the image does no harm to a device that is
    /// coming or going, and one that is being attached looks at the size once more when it is.
    pub(crate) fn refresh_devices(&self, id: &VolumeId) -> Result<Option<Bytes>> {
        let storage = self.monitor.current()?;
        let volume = storage.store.volume(id)?;
        let told = volume.kind() != VolumeKind::Block
            || volume.refreshed()?.is_some_and(|known| known >= volume.capacity());
        if told { Ok(None) } else { refresh_and_record(&volume, &storage).map(Some) }
    }
}

/// Makes the devices of a Block volume as large as its image, and says so to whoever grew it.
fn refresh_and_record(volume: &Volume, storage: &Storage) -> Result<Bytes> {
    let size = BlockVolume::open(volume, &storage.loops)?.expand()?;
    volume.record_refreshed(size)?;
    Ok(size)
}

//! The node's part in the expansion of a volume: its loop devices.

use loopfs::Bytes;
use loopfs::volume_store::{Volume, VolumeId, VolumeKind};

use super::block_device::BlockVolume;
use super::publish::Volumes;
use super::stats::not_published;
use super::volume::{is_at, published_at, require_kind};
use crate::error::{Error, Result};
use crate::mounted_devices::MountedDevices;
use crate::request::{CapacityRange, NodeExpand, TargetPath};
use crate::storage::Storage;

impl Volumes {
    /// Refreshes the size of the volume's loop devices, and returns the size that the volume has on this node. Does not
    /// expand the image or the quota: ControllerExpandVolume or the provisioner does.
    pub(crate) fn node_expand(&self, expand: &NodeExpand) -> Result<Bytes> {
        let storage = self.monitor.verified()?;
        let volume = storage.store.volume(&expand.volume)?;
        if let Some(access_type) = expand.access_type {
            require_kind(&volume, access_type.kind())?;
        }
        if !expand.is_staging_path {
            self.require_published(&volume, &storage, expand.path.as_ref())?;
        }
        let size = match volume.kind() {
            VolumeKind::Filesystem => volume.capacity(),
            VolumeKind::Block => {
                // Repairing a device can change its range, so it is opened again to be refreshed.
                BlockVolume::open(&volume, &storage)?.repair()?;
                refresh_and_record(&volume, &storage)?
            }
        };
        let CapacityRange { required, limit } = expand.capacity;
        match (required, limit) {
            (Some(required), _) if size < required => Err(Error::Temporary(format!(
                "volume {} has {size} on this node, but {required} are required; expand the volume itself first",
                expand.volume
            ))),
            (_, Some(limit)) if size > limit => Err(Error::OutOfRange(format!(
                "volume {} has {size} already, which is above the limit of {limit}",
                expand.volume
            ))),
            _ => Ok(size),
        }
    }

    /// Returns an error unless the volume is published at this path, or is published and nothing is at the path.
    ///
    /// The kubelet knows one path for each Block volume, that of the pod which mapped it last. After that pod has ended, the
    /// kubelet still names its path while other pods of the node use the volume, and would repeat a call that fails.
    fn require_published(&self, volume: &Volume, storage: &Storage, path: Option<&TargetPath>) -> Result<()> {
        let refused = || not_published(volume.id(), path);
        let target = self.root.locate(path.ok_or_else(refused)?)?;
        let is_published = match target.map(|target| target.status()).transpose()?.flatten() {
            Some(status) => is_at(volume, storage, &status)?,
            None => {
                let mounts = self.root.mounts()?;
                let mounted = MountedDevices::among(&mounts)?;
                published_at(volume, storage, &mounts, &mounted)?.is_some()
            }
        };
        if is_published { Ok(()) } else { Err(refused()) }
    }

    /// Refreshes the loop devices of a Block volume, if the volume was expanded since their size was last recorded.
    /// Returns their size, or `None` if there was nothing to refresh.
    ///
    /// This needs no lock and therefore delays no call. A larger size does no harm to a device that is being attached
    /// or detached. Attaching checks the size again at its end.
    pub(crate) fn refresh_devices(&self, id: &VolumeId) -> Result<Option<Bytes>> {
        let storage = self.monitor.current()?;
        let volume = storage.store.volume(id)?;
        let up_to_date = volume.kind() != VolumeKind::Block
            || volume.device_size()?.is_some_and(|known| known >= volume.capacity());
        if up_to_date {
            return Ok(None);
        }
        if let Some(change) = BlockVolume::open(&volume, &storage)?.change()? {
            // The repair could cancel the detach of a concurrent call, so it needs the lock of the volume.
            return Err(Error::Temporary(format!(
                "a process has changed the loop device of volume {id}: {change}"
            )));
        }
        refresh_and_record(&volume, &storage).map(Some)
    }
}

/// Refreshes the capacity of a Block volume's loop devices. Records their size, for which the provisioner waits.
fn refresh_and_record(volume: &Volume, storage: &Storage) -> Result<Bytes> {
    let size = BlockVolume::open(volume, storage)?.expand()?;
    volume.record_device_size(size)?;
    Ok(size)
}

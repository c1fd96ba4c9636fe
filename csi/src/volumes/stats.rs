//! Use, capacity and condition of published volumes.

use loopfs::ErrorKind;
use loopfs::volume_store::{VolumeId, VolumeKind, VolumeStats};

use super::block_device::BlockVolume;
use super::directory::Directory;
use super::publish::Volumes;
use super::stale_device::StaleDevice;
use super::unavailable;
use super::volume::stats_including_devices;
use crate::error::{Error, Result};
use crate::request::{GetStats, TargetPath};
use crate::storage::Storage;
use crate::target::Target;

impl Volumes {
    /// Returns the use, capacity and condition of a volume that is published at the path of the request.
    ///
    /// This works while the storage is unavailable as well, because the condition tells the kubelet about that.
    pub(crate) fn stats(&self, request: &GetStats) -> Result<VolumeStats> {
        let target = match &request.path {
            Some(path) => self.root.locate(path)?,
            None => None,
        };
        let stats = match self.monitor.verified() {
            Ok(storage) => stats_at(target.as_ref(), &request.volume, &storage)?,
            Err(Error::StorageUnavailable(reason)) => match &target {
                Some(target) => unavailable::stats(&request.volume, target, self.monitor.held(), reason)?,
                None => None,
            },
            Err(error) => return Err(error),
        };
        stats.ok_or_else(|| not_published(&request.volume, request.path.as_ref()))
    }
}

/// Returns `None` if the volume is not published at `target`. If a stale device of the volume is there, its condition
/// says that the image was deleted or replaced.
fn stats_at(target: Option<&Target>, id: &VolumeId, storage: &Storage) -> Result<Option<VolumeStats>> {
    let file_status = match target {
        Some(target) => target.status()?,
        None => None,
    };
    let volume = match (storage.store.volume(id), &file_status) {
        (Ok(volume), _) => volume,
        // The volume was deleted, but its device may still be published.
        (Err(error), Some(file_status)) if error.kind() == ErrorKind::NotFound => {
            let stale = StaleDevice::at_path(storage, id, None, file_status)?;
            return Ok(Some(stale.ok_or(error)?.stats()));
        }
        (Err(error), _) => return Err(error.into()),
    };
    let Some(file_status) = file_status else { return Ok(None) };
    match volume.kind() {
        VolumeKind::Filesystem if !Directory::open(&volume)?.matches(&file_status) => return Ok(None),
        VolumeKind::Filesystem => {}
        VolumeKind::Block => {
            let block = BlockVolume::open(&volume, storage)?;
            if block.device_of(&file_status)?.is_none() {
                let stale = StaleDevice::at_path(storage, id, Some(block.image()?), &file_status)?;
                return Ok(stale.map(|stale| stale.stats()));
            }
        }
    }
    stats_including_devices(&volume, storage).map(Some)
}

/// Returns the error that a volume is not at the path of a request, which is `None` if it is not below the kubelet directory.
pub(super) fn not_published(volume: &VolumeId, path: Option<&TargetPath>) -> Error {
    let path = path.map_or_else(
        || "the requested path, which is not below the kubelet directory".to_owned(),
        TargetPath::to_string,
    );
    Error::NotPublished(format!("volume {volume} is not published at {path}"))
}

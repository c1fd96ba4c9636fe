//! Use, capacity and condition of published volumes.

use loopfs::ErrorKind;
use loopfs::volume_store::{VolumeKind, VolumeStats};

use super::block_device::BlockVolume;
use super::directory::Directory;
use super::publish::Volumes;
use super::stale_device::StaleDevice;
use super::unavailable;
use super::volume::health;
use crate::error::{Error, Result};
use crate::request::{Stats, TargetPath};

impl Volumes {
    pub(crate) fn stats(&self, stats: &Stats) -> Result<VolumeStats> {
        let target = stats.path.as_ref().map(|path| self.root.locate(path)).transpose()?.flatten();
        let storage = match self.monitor.verified() {
            Ok(storage) => storage,
            Err(Error::StorageUnavailable(reason)) => {
                let target = target.ok_or_else(|| not_published(stats))?;
                return unavailable::stats(&stats.volume, &target, reason)?
                    .ok_or_else(|| not_published(stats));
            }
            Err(error) => return Err(error),
        };
        let status = target.map(|target| target.status()).transpose()?.flatten();
        let stale = |image| match &status {
            Some(status) => StaleDevice::at_path(&storage, &stats.volume, image, status),
            None => Ok(None),
        };
        let volume = match storage.store.volume(&stats.volume) {
            Ok(volume) => volume,
            Err(error) if error.kind() == ErrorKind::NotFound => {
                let stale = stale(None)?.ok_or(error)?;
                return Ok(stale.stats());
            }
            Err(error) => return Err(error.into()),
        };
        let published = match (&status, volume.kind()) {
            (None, _) => false,
            (Some(status), VolumeKind::Filesystem) => Directory::open(&volume)?.matches(status),
            (Some(status), VolumeKind::Block) => {
                let block = BlockVolume::open(&volume, &storage.loops)?;
                let own = block.device_of(status)?.is_some();
                if !own && let Some(stale) = stale(Some(block.image()?))? {
                    return Ok(stale.stats());
                }
                own
            }
        };
        if published { health(&volume, &storage.loops) } else { Err(not_published(stats)) }
    }
}

fn not_published(stats: &Stats) -> Error {
    let path = stats.path.as_ref().map_or_else(|| "that path".to_owned(), TargetPath::to_string);
    Error::NotPublished(format!("volume {} is not published at {path}", stats.volume))
}

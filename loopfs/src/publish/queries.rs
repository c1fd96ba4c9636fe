//! Where volumes are published, and their condition.

use std::path::PathBuf;

use super::directory::Directory;
use super::publisher::Publisher;
use super::target::Target;
use crate::error::{ErrorKind, Result};
use crate::volume_store::{AbnormalReason, Condition, Volume, VolumeId, VolumeKind, VolumeStats};

impl Publisher {
    /// Returns a target at which the volume is published. That of a device may be outside of the root.
    ///
    /// # Errors
    /// Those of reading the mount table and of opening the volume.
    pub fn published_at(&self, volume: &Volume) -> Result<Option<PathBuf>> {
        match volume.kind() {
            VolumeKind::Filesystem => Ok(Directory::open(volume)?.published_at(&self.root().mounts()?, None)),
            VolumeKind::Block => self.block(volume)?.published_at(&self.root().mounted_devices()?, None),
        }
    }

    /// Returns `true` if the directory or a device of the volume is at the target, and `None` if nothing is there.
    ///
    /// # Errors
    /// Those of opening the volume and of stat(2).
    pub fn is_at(&self, volume: &Volume, target: &Target) -> Result<Option<bool>> {
        let Some(status) = target.status()? else { return Ok(None) };
        match volume.kind() {
            VolumeKind::Filesystem => Ok(Some(Directory::open(volume)?.matches(&status))),
            VolumeKind::Block => Ok(Some(self.block(volume)?.device_of(&status)?.is_some())),
        }
    }

    /// Returns the use, capacity and condition of a volume, of which that of its devices is a part.
    ///
    /// # Errors
    /// Those of [`Volume::stats`] and of opening its devices.
    pub fn stats(&self, volume: &Volume) -> Result<VolumeStats> {
        let mut stats = volume.stats()?;
        // A changed device is the doing of its user, a lack of space is not.
        let is_intact = matches!(
            &stats.condition,
            Condition::Healthy | Condition::Abnormal { reason: AbnormalReason::SpaceTaken, .. }
        );
        if volume.kind() == VolumeKind::Block
            && is_intact
            && let Some(problem) = self.block(volume)?.problem()?
        {
            stats.condition = Condition::abnormal(AbnormalReason::DeviceChanged, problem);
        }
        Ok(stats)
    }

    /// Returns the use, capacity and condition of the volume at a target, and `None` if it is not published there. If a stale device of the
    /// volume is there, its condition says that the image was deleted or replaced.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`]: there is neither such a volume nor a device of it.
    pub fn stats_at(&self, id: &VolumeId, target: Option<&Target>) -> Result<Option<VolumeStats>> {
        let status = match target {
            Some(target) => target.status()?,
            None => None,
        };
        let volume = match (self.store().volume(id), &status) {
            (Ok(volume), _) => volume,
            // The volume was deleted, but its device may still be published.
            (Err(error), Some(status)) if error.kind() == ErrorKind::NotFound => {
                let stale = self.stale_at(id, None, status)?;
                return Ok(Some(stale.ok_or(error)?.stats()));
            }
            (Err(error), _) => return Err(error),
        };
        let Some(status) = status else { return Ok(None) };
        match volume.kind() {
            VolumeKind::Filesystem if !Directory::open(&volume)?.matches(&status) => return Ok(None),
            VolumeKind::Filesystem => {}
            VolumeKind::Block => {
                let block = self.block(&volume)?;
                if block.device_of(&status)?.is_none() {
                    let stale = self.stale_at(id, Some(block.image()?), &status)?;
                    return Ok(stale.map(|stale| stale.stats()));
                }
            }
        }
        self.stats(&volume).map(Some)
    }
}

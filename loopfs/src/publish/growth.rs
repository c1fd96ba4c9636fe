//! Expanding volumes while they are published.

use super::publisher::Publisher;
use crate::Bytes;
use crate::error::{Error, ErrorKind, Result};
use crate::volume_store::{Volume, VolumeId, VolumeKind};

impl Publisher {
    /// Expands a volume and its devices, as [`VolumeStore::expand`](crate::volume_store::VolumeStore::expand) and
    /// [`refresh`](Self::refresh) do.
    ///
    /// # Errors
    /// Those of both.
    pub fn expand(&self, id: &VolumeId, capacity: Bytes) -> Result<Volume> {
        let volume = self.store().expand(id, capacity)?;
        self.refresh(&volume)?;
        Ok(volume)
    }

    /// Makes the devices of a Block volume as large as its image, and repairs what their users have changed. Returns the size that the
    /// volume has on this machine. [`VolumeStore::expand`](crate::volume_store::VolumeStore::expand) expands the volume itself.
    ///
    /// # Errors
    /// Those of opening the devices.
    pub fn refresh(&self, volume: &Volume) -> Result<Bytes> {
        let _lock = self.root().volume_locks.lock(volume.id().clone());
        if volume.kind() == VolumeKind::Filesystem {
            return Ok(volume.capacity());
        }
        // Repairing a device can change its range, so it is opened again to be refreshed.
        self.block(volume)?.repair()?;
        self.block(volume)?.expand()
    }

    /// As [`refresh`](Self::refresh), but repairs nothing, and waits for no other call: a larger size does no harm to a device that is being
    /// attached or detached. A device that is attached later has the size of the image.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`]: a user has changed a device.
    pub fn refresh_size(&self, volume: &Volume) -> Result<Bytes> {
        if volume.kind() == VolumeKind::Filesystem {
            return Ok(volume.capacity());
        }
        if let Some(change) = self.block(volume)?.change()? {
            // A repair could cancel the detach of a concurrent call, so it needs the lock of the volume.
            let detail = format!("a process has changed its loop device: {change}");
            return Err(Error::new(ErrorKind::Busy, "refresh", volume.id(), detail));
        }
        self.block(volume)?.expand()
    }

    /// Writes what the devices of a Block volume have cached.
    ///
    /// # Errors
    /// Those of opening the devices and of fsync(2).
    pub fn flush(&self, volume: &Volume) -> Result<()> {
        match volume.kind() {
            VolumeKind::Filesystem => Ok(()),
            VolumeKind::Block => self.block(volume)?.flush(),
        }
    }
}

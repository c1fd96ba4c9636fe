//! Block volumes: their image on a loop device, whose node is bind-mounted at the target.
//!
//! The node is the one of devtmpfs. A bind mount keeps the flags of the mount it was made from, so it can be opened
//! although the orchestrator's file system may be mounted nodev.

use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use loopfs::{
    Access, AttachOptions, BackingFile, BlockSize, Bytes, Detach, Image, ImageDirectIo, LoopControl,
    LoopDevice, MountFlags, Status, Volume,
};
use nix::fcntl::{OFlag, open};
use nix::sys::stat::{FileStat, Mode, SFlag, fstat};
use nix::unistd::fsync;

use super::loop_node::{is_loop_device, number_of};
use super::mounted_devices::MountedDevices;
use crate::error::{Error, Result};
use crate::target::{Target, kind_of};

/// How long a publication waits for a device of the other access to be closed, which a process of the node may have open
/// to look at it (udev).
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

/// A Block volume and the loop device of its image.
///
/// A loop device is either writable or read-only, and each has a page cache of its own: a read-only device beside a
/// writable one would return old data. So a volume has one device at a time, and [`publish`](Self::publish) refuses to
/// publish it for writing where it is published read-only, and the other way round. (No other means makes a device
/// node read-only: the kernel ignores read-only mounts where it opens a device, and whether a container may write to
/// a device is up to the container runtime.)
pub(crate) struct BlockVolume<'a> {
    volume: &'a Volume,
    loops: &'a LoopControl,
    image: OwnedFd,
    settings: Image,
}

impl<'a> BlockVolume<'a> {
    pub(crate) fn open(volume: &'a Volume, loops: &'a LoopControl) -> Result<Self> {
        let image = volume.open_image(Access::ReadOnly)?;
        let settings = volume.image()?.ok_or_else(|| Error::Defect("a device has no image".to_owned()))?;
        Ok(Self { volume, loops, image, settings })
    }

    /// Which file the volume's image is.
    pub(crate) fn image(&self) -> Result<BackingFile> {
        Ok(BackingFile::of(&self.image)?)
    }

    pub(crate) fn devices(&self) -> Result<Vec<LoopDevice>> {
        Ok(self.loops.find(self.image.as_fd())?)
    }

    /// The device with this access, attached if it was not: with the logical block size that the volume was made with and
    /// no other, for the content depends on it.
    pub(crate) fn attach(&self, access: Access) -> Result<LoopDevice> {
        if access == Access::ReadWrite {
            // What is left of it can still be read.
            self.volume.require_whole()?;
        }
        // Open for reading only: one that is open for writing would have every device of the node requested for the image.
        let image = &self.image;
        let options = AttachOptions::new(access)
            .block_size(BlockSize::Exact(self.settings.logical_block_size.bytes()))
            .direct_io(self.settings.direct_io.wish())
            .discard(self.settings.provisioning.discard())
            .label(self.volume.id().as_str());
        let device = self.loops.ensure_attached(image.as_fd(), &options)?;
        // Grown while it was being attached, when whoever tells devices of that could not find this one.
        let status = device.status()?;
        if status.size < file_size(image)? {
            device.refresh_capacity(image)?;
        }
        if let Some(problem) = self.device_problem(&device, &status)? {
            tracing::warn!(%problem, "attached with less than was wished");
        }
        Ok(device)
    }

    /// Has what was written to the devices reach the image. What a file system on them still keeps is not theirs.
    pub(crate) fn flush(&self) -> Result<()> {
        for device in self.devices()? {
            let path = device.path();
            fsync(&device).map_err(|errno| Error::Target { operation: "fsync", path, errno })?;
        }
        Ok(())
    }

    /// Shows the volume at the target.
    pub(crate) fn publish(&self, target: &Target, access: Access) -> Result<()> {
        let device = self.attach(access)?;
        let node = open_node(&device)?;
        target.ensure_file()?;
        // Read-only is the device's own doing; the flag only makes the mount table say so too.
        let read_only = access == Access::ReadOnly;
        let flags = MountFlags { read_only, nosuid: true, noexec: true, ..MountFlags::default() };
        target.bind_mount(node.as_fd(), flags)
    }

    /// Detaches a device of the other access, which staging or an ended workload may have left.
    ///
    /// # Errors
    /// [`Error::Precondition`]: the volume is published with the other access. [`Error::Temporary`]: a process has the device open.
    pub(crate) fn detach_other_access(&self, mounted: &MountedDevices, access: Access) -> Result<()> {
        let others = self.devices()?.into_iter().filter(|device| device.binding().access != access);
        for device in others {
            let number = device.device_number()?;
            if let Some(mount_point) = mounted.find(number, None) {
                return Err(self.published_with_other_access(mount_point, access));
            }
            let name = device.path();
            let Detach::Deferred(pending) = self.loops.detach(device)? else { continue };
            if let Detach::Deferred(_) = pending.wait(CLOSE_TIMEOUT)? {
                return Err(Error::Temporary(format!(
                    "publish volume {}: a process of an earlier workload still has {} open, whose page cache is not \
                     that of the device to be published",
                    self.volume.id(),
                    name.display()
                )));
            }
        }
        Ok(())
    }

    fn published_with_other_access(&self, mount_point: &Path, access: Access) -> Error {
        let (requested, present) = match access {
            Access::ReadOnly => ("read-only", "for writing"),
            Access::ReadWrite => ("for writing", "read-only"),
        };
        Error::Precondition(format!(
            "publish volume {} {requested}: it is published {present} at {}, and a read-only loop device beside a \
             writable one would return old data; unpublish it there first, or publish it {present} here too",
            self.volume.id(),
            mount_point.display()
        ))
    }

    /// Whether `target` shows this volume as requested. An error if it shows this volume otherwise, or something that is
    /// not a loop device.
    pub(crate) fn is_published(&self, target: &Target, access: Access) -> Result<bool> {
        if target.mount()?.is_none() {
            return Ok(false);
        }
        let Some(status) = target.status()?.filter(is_loop_device) else {
            return Err(target.refuse("is a mount point that shows something else; unmount it"));
        };
        let Some(device) = self.device_of(&status)? else {
            // The device was detached behind this driver's back, and its number may be another volume's by now.
            let number = number_of(&status);
            tracing::warn!(target = %target.path().display(), %number, "a loop device that is not the volume's is taken away");
            target.unmount()?;
            return Ok(false);
        };
        let present = device.binding().access;
        if present == access {
            return Ok(true);
        }
        Err(Error::PublishedDifferently(format!(
            "{} shows the volume {present:?}, and {access:?} is requested; unpublish it there first",
            target.path().display()
        )))
    }

    /// The volume's device that a path with this status shows.
    pub(crate) fn device_of(&self, status: &FileStat) -> Result<Option<LoopDevice>> {
        for device in self.devices()? {
            if device.device_number()? == number_of(status) {
                return Ok(Some(device));
            }
        }
        Ok(None)
    }

    /// Returns a mount point, other than `except`, that shows this volume.
    pub(crate) fn published_at(
        &self,
        mounted: &MountedDevices,
        except: Option<&Target>,
    ) -> Result<Option<PathBuf>> {
        for device in self.devices()? {
            if let Some(mount_point) = mounted.find(device.device_number()?, except.map(Target::path)) {
                return Ok(Some(mount_point.to_owned()));
            }
        }
        Ok(None)
    }

    /// Detaches the volume's devices. Nothing may show them: the number of a detached device is given to other volumes.
    pub(crate) fn detach(&self) -> Result<()> {
        if let Detach::Deferred(_) = self.loops.detach_all(self.image.as_fd())? {
            tracing::info!("somebody has the volume's device open; the kernel detaches it at the last close");
        }
        Ok(())
    }

    /// Makes the devices as large as the image, and answers the size that is usable now.
    pub(crate) fn expand(&self) -> Result<Bytes> {
        let mut usable = self.volume.capacity();
        for device in self.devices()? {
            usable = usable.min(device.refresh_capacity(&self.image)?);
        }
        Ok(usable)
    }

    /// What is wrong with the devices, if anything is.
    pub(crate) fn problem(&self) -> Result<Option<String>> {
        for device in self.devices()? {
            if let Some(problem) = self.device_problem(&device, &device.status()?)? {
                return Ok(Some(problem));
            }
        }
        Ok(None)
    }

    /// That a device lacks direct I/O is as was requested only of a volume that prefers it and shares blocks, which costs it.
    fn device_problem(&self, device: &LoopDevice, status: &Status) -> Result<Option<String>> {
        let preferred = self.settings.direct_io == ImageDirectIo::Preferred;
        if status.direct_io || preferred && self.volume.may_share_blocks()? {
            return Ok(None);
        }
        let name = device.path();
        Ok(Some(format!("{} has lost direct I/O; unpublish and publish the volume", name.display())))
    }
}

fn file_size(image: &OwnedFd) -> Result<Bytes> {
    let failed = |errno| Error::Defect(format!("fstat an image that is open: {errno}"));
    Ok(Bytes(u64::try_from(fstat(image).map_err(failed)?.st_size).unwrap_or_default()))
}

/// The node of a device, checked to be that device's.
fn open_node(device: &LoopDevice) -> Result<OwnedFd> {
    let path = device.path();
    let failed = |operation, errno| Error::Target { operation, path: path.clone(), errno };
    let node = open(&path, OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC, Mode::empty())
        .map_err(|errno| failed("open", errno))?;
    let status = fstat(&node).map_err(|errno| failed("fstat", errno))?;
    if kind_of(&status) != SFlag::S_IFBLK || number_of(&status) != device.device_number()? {
        return Err(Error::Precondition(format!(
            "{} is not the node of the loop device with that name; let this process see the host's /dev (devtmpfs)",
            path.display()
        )));
    }
    Ok(node)
}

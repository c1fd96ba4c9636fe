//! Block volumes: their image on a loop device, whose node is bind-mounted at the target.
//!
//! The node is the one of devtmpfs. A bind mount keeps the flags of the mount it was made from, so it can be opened
//! although the orchestrator's file system may be mounted nodev.

use std::ffi::OsStr;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;

use loopfs::{
    Access, AttachOptions, BackingFile, BlockSize, Bytes, Detach, DeviceNumber, Image, ImageDirectIo,
    LoopControl, LoopDevice, MountFlags, Status, Volume, mountinfo,
};
use nix::fcntl::{OFlag, open};
use nix::sys::stat::{FileStat, Mode, SFlag, fstat, major, minor};
use nix::unistd::fsync;

use crate::error::{Error, Result};
use crate::target::{Target, kind_of};

/// A Block volume and the loop devices of its image: at most one that takes writes and one that does not.
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
        let image = self.volume.open_image(access)?;
        let options = AttachOptions::new(access)
            .block_size(BlockSize::Exact(self.settings.logical_block_size.bytes()))
            .direct_io(self.settings.direct_io.wish())
            .discard(self.settings.provisioning.discard())
            .label(self.volume.id().as_str());
        let device = self.loops.ensure_attached(image.as_fd(), &options)?;
        // Grown while it was being attached, when whoever tells devices of that could not find this one.
        let status = device.status()?;
        if status.size < size_of(&image)? {
            device.refresh_capacity(&image)?;
        }
        if let Some(trouble) = self.trouble_of(&device, &status)? {
            tracing::warn!(%trouble, "attached with less than was wished");
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

    /// Whether `target` shows this volume as asked. An error if it shows this volume otherwise, or something that is
    /// not a loop device.
    pub(crate) fn is_published(&self, target: &Target, access: Access) -> Result<bool> {
        let Some(mount) = target.mount()? else { return Ok(false) };
        let status = target.status()?.filter(|status| kind_of(status) == SFlag::S_IFBLK);
        let (Some(status), Some(index)) = (status, loop_index(&mount)) else {
            return Err(target.refuse("is a mount point that shows something else; unmount it"));
        };
        let Some(device) = self.device_of(&status)? else {
            // The device was detached behind this driver's back, and its number may be another volume's by now.
            tracing::warn!(target = %target.path().display(), index, "a loop device that is not the volume's is taken away");
            target.unmount()?;
            return Ok(false);
        };
        let present = device.binding().access;
        if present == access {
            return Ok(true);
        }
        Err(Error::PublishedOtherwise(format!(
            "{} shows the volume {present:?}, and {access:?} is asked; unpublish it there first",
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

    /// A mount point among `mounts`, other than `except`, that shows this volume.
    pub(crate) fn published_at(
        &self,
        mounts: &[mountinfo::Mount],
        except: Option<&Target>,
    ) -> Result<Option<PathBuf>> {
        let devices: Vec<u32> = self.devices()?.iter().map(LoopDevice::index).collect();
        let showing = mounts.iter().find(|mount| {
            loop_index(mount).is_some_and(|index| devices.contains(&index))
                && except.is_none_or(|except| mount.mount_point != except.path())
        });
        Ok(showing.map(|mount| mount.mount_point.clone()))
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
    pub(crate) fn trouble(&self) -> Result<Option<String>> {
        for device in self.devices()? {
            if let Some(trouble) = self.trouble_of(&device, &device.status()?)? {
                return Ok(Some(trouble));
            }
        }
        Ok(None)
    }

    /// That a device lacks direct I/O is as was asked only of a volume that prefers it and shares blocks, which costs it.
    fn trouble_of(&self, device: &LoopDevice, status: &Status) -> Result<Option<String>> {
        let preferred = self.settings.direct_io == ImageDirectIo::Preferred;
        if status.direct_io || preferred && self.volume.may_share_blocks()? {
            return Ok(None);
        }
        let name = device.path();
        Ok(Some(format!("{} has lost direct I/O; unpublish and publish the volume", name.display())))
    }
}

fn size_of(image: &OwnedFd) -> Result<Bytes> {
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

/// Whether a path with this status is the node of a loop device.
pub(crate) fn is_loop_device(status: &FileStat) -> bool {
    const LOOP_MAJOR: u32 = 7;
    kind_of(status) == SFlag::S_IFBLK && number_of(status).major == LOOP_MAJOR
}

pub(crate) fn number_of(status: &FileStat) -> DeviceNumber {
    DeviceNumber { major: major(status.st_rdev) as u32, minor: minor(status.st_rdev) as u32 }
}

/// N, if what is mounted is a file named `loopN`: a node shown by a bind mount keeps its name as the mount's root.
pub(crate) fn loop_index(mount: &mountinfo::Mount) -> Option<u32> {
    mount.root.file_name().and_then(OsStr::to_str)?.strip_prefix("loop")?.parse().ok()
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case::node("/loop65536", Some(65536))]
    #[case::node_of_a_dev_without_devtmpfs("/dev/loop3", Some(3))]
    #[case::control("/loop-control", None)]
    #[case::other_disk("/sda", None)]
    #[case::directory("/", None)]
    #[case::node_that_was_removed("/loop3//deleted", None)]
    fn mounts_of_loop_devices(#[case] root: &str, #[case] index: Option<u32>) {
        let table = format!("50 40 0:5 {root} /target rw - devtmpfs udev rw\n");
        assert_eq!(loop_index(&mountinfo::parse(table.as_bytes()).unwrap()[0]), index);
    }
}

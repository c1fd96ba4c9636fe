//! Block volumes: the image is attached to a loop device, whose node is bind-mounted at the target.
//!
//! The node is the one in devtmpfs. A bind mount keeps the flags of the mount from which it was made. Containers can
//! therefore open the node even if the kubelet's file system is mounted nodev.

use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use loopfs::Bytes;
use loopfs::ErrorKind;
use loopfs::loop_device::{Access, AttachOptions, BackingFile, Detach, DirectIo, LoopDevice};
use loopfs::mount::MountFlags;
use loopfs::volume_store::Volume;
use nix::fcntl::{OFlag, open};
use nix::sys::stat::{FileStat, Mode, SFlag, fstat};
use nix::unistd::fsync;

use crate::error::{Error, Result};
use crate::loop_node::{is_loop_device, kind_of, number_of};
use crate::mounted_devices::MountedDevices;
use crate::storage::Storage;
use crate::target::Target;

/// The maximum time that a publish call waits until a device of the other access is closed. A process of the node may
/// have it open to examine it (udev).
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

/// The result of a cleanup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cleanup {
    Complete,
    /// The kernel detaches a device at its last close. A process that has it open can cancel that (`LOOP_SET_STATUS64`), so the cleanup
    /// is repeated.
    DetachDeferred,
}

/// A Block volume and the loop device of its image.
///
/// A loop device is either writable or read-only, and each device has a page cache of its own: a read-only device
/// beside a writable one would return old data. A volume therefore has one device at a time, and
/// [`detach_other_access`](Self::detach_other_access) refuses write access while the volume is published read-only, and
/// read-only access while it is published for writing. There is no other means to make a device node read-only: the kernel ignores read-only
/// mounts when a process opens a device, and the container runtime decides whether a container may write to a device.
pub(crate) struct BlockVolume<'a> {
    volume: &'a Volume,
    storage: &'a Storage,
    image: OwnedFd,
}

impl<'a> BlockVolume<'a> {
    pub(crate) fn open(volume: &'a Volume, storage: &'a Storage) -> Result<Self> {
        let image = volume.open_image(Access::ReadOnly)?;
        Ok(Self { volume, storage, image })
    }

    /// Returns the identity of the volume's image.
    pub(crate) fn image(&self) -> Result<BackingFile> {
        Ok(BackingFile::of(&self.image)?)
    }

    pub(crate) fn devices(&self) -> Result<Vec<LoopDevice>> {
        Ok(self.storage.loops.find(self.image.as_fd())?)
    }

    /// Returns the device with this access, and attaches it if necessary. The device gets the logical block size that
    /// was fixed at the creation of the volume, because the content depends on it.
    pub(crate) fn attach(&self, access: Access) -> Result<LoopDevice> {
        if access == Access::ReadWrite {
            // A truncated image can still be attached for reading.
            self.volume.require_whole()?;
        }
        // Opened for reading only: a descriptor that is open for writing would defeat the check by read lease, and the
        // library would query every device of the node.
        let image = &self.image;
        let options = self.options(access)?;
        let attach = || self.storage.loops.ensure_attached(image.as_fd(), &options);
        let device = match attach() {
            // A pod has changed the device.
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                self.devices()?.iter().try_for_each(|device| self.restore(device))?;
                attach()?
            }
            attached => attached?,
        };
        self.restore(&device)?;
        // The image may have been expanded while it was being attached. In that case the refresh after the expansion
        // did not find this device.
        if device.status()?.size < file_size(image)? {
            device.refresh_capacity(image)?;
        }
        if let Some(problem) = self.device_problem(&device)? {
            tracing::warn!(%problem, "the loop device was attached without a preferred property");
        }
        Ok(device)
    }

    fn options(&self, access: Access) -> Result<AttachOptions> {
        Ok(self.volume.attach_options(access)?)
    }

    fn prefers_direct_io(&self) -> Result<bool> {
        Ok(self.volume.image()?.is_some_and(|image| image.direct_io == DirectIo::Preferred))
    }

    /// Returns what a pod has changed on the device.
    fn change_of(&self, device: &LoopDevice) -> Result<Option<String>> {
        Ok(device.difference(&self.image, &self.options(device.binding().access)?)?)
    }

    /// Returns what a pod has changed on one of the devices.
    pub(crate) fn change(&self) -> Result<Option<String>> {
        let changes =
            self.devices()?.iter().map(|device| self.change_of(device)).collect::<Result<Vec<_>>>()?;
        Ok(changes.into_iter().flatten().next())
    }

    /// Repairs what a pod has changed on the device, as far as the kernel allows it. The audit reports the rest.
    fn restore(&self, device: &LoopDevice) -> Result<()> {
        let mut options = self.options(device.binding().access)?;
        if self.prefers_direct_io()? && !self.volume.may_share_blocks()? {
            options = options.direct_io(DirectIo::Required);
        }
        let Some(changed) = device.difference(&self.image, &options)? else { return Ok(()) };
        let remaining = device.restore(&self.image, &options)?;
        let name = device.path();
        tracing::warn!(volume = %self.volume.id(), device = %name.display(), %changed, ?remaining,
            "the loop device has changed since it was attached; repaired all but what remains");
        Ok(())
    }

    /// Flushes the page caches of the devices to the image. This does not flush a file system on a device, whose cached
    /// data is not part of the device.
    pub(crate) fn flush(&self) -> Result<()> {
        for device in self.devices()? {
            let path = device.path();
            fsync(&device).map_err(|errno| Error::Target { operation: "fsync", path, errno })?;
        }
        Ok(())
    }

    /// Detaches a device of the other access, which staging or an ended workload may have left attached.
    ///
    /// # Errors
    /// [`Error::Precondition`]: the volume is published with the other access. [`Error::Temporary`]: a process has the
    /// device open.
    pub(crate) fn detach_other_access(&self, mounted: &MountedDevices, access: Access) -> Result<()> {
        let others = self.devices()?.into_iter().filter(|device| device.binding().access != access);
        for device in others {
            let number = device.device_number()?;
            if let Some(mount_point) = mounted.find(number, None) {
                return Err(self.published_with_other_access(mount_point, access));
            }
            drop(self.storage.held.release(number));
            let name = device.path();
            let Detach::Deferred(pending) = self.storage.loops.detach(device)? else { continue };
            if let Detach::Deferred(_) = pending.wait(CLOSE_TIMEOUT)? {
                return Err(Error::Temporary(format!(
                    "publish volume {}: a process of an earlier workload still has {} open, and its page cache differs \
                     from that of the device to be published",
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

    /// Returns `true` if the volume is published at `target` with this access. Returns an error if it is published with
    /// the other access, or if something else than a loop device is mounted there.
    pub(crate) fn is_published(&self, target: &Target, access: Access) -> Result<bool> {
        if target.mount()?.is_none() {
            return Ok(false);
        }
        let Some(status) = target.status()?.filter(is_loop_device) else {
            return Err(target.precondition_error("is a mount point of something else; unmount it"));
        };
        let Some(device) = self.device_of(&status)? else {
            // Containers keep the node with which they were started. If it were unmounted here, the index would be used for another
            // volume while they run.
            return Err(target.precondition_error(&format!(
                "shows loop device {}, which a process has detached from the image of volume {} since; delete the pods that use \
                 the volume, after which it is unpublished",
                number_of(&status),
                self.volume.id()
            )));
        };
        let present = device.binding().access;
        if present == access {
            self.restore(&device)?;
            self.storage.held.hold(self.volume.id(), &device)?;
            return Ok(true);
        }
        Err(Error::PublishedDifferently(format!(
            "the volume is published at {} with {present:?}, but {access:?} is requested; unpublish it there first",
            target.path().display()
        )))
    }

    /// Returns the volume's device whose node is at a path with this status.
    pub(crate) fn device_of(&self, status: &FileStat) -> Result<Option<LoopDevice>> {
        for device in self.devices()? {
            if device.device_number()? == number_of(status) {
                return Ok(Some(device));
            }
        }
        Ok(None)
    }

    /// Returns a mount point of the volume, other than `except`.
    pub(crate) fn published_at(
        &self,
        mounted: &MountedDevices,
        except: Option<&Target>,
    ) -> Result<Option<PathBuf>> {
        let mut numbers = self.storage.held.numbers(Some(self.volume.id()));
        for device in self.devices()? {
            numbers.push(device.device_number()?);
        }
        let mount_point = |number| mounted.find(number, except.map(Target::path));
        Ok(numbers.into_iter().find_map(mount_point).map(Path::to_owned))
    }

    /// Detaches the volume's devices. None of them may be mounted, because the number of a detached device is reused
    /// for other volumes.
    pub(crate) fn detach(&self) -> Result<Cleanup> {
        let Storage { store, loops, held } = self.storage;
        for number in held.numbers(Some(self.volume.id())) {
            // A pod may have given a read-only device another file, so that the device is not found by the image.
            held.close(number, Some(self.volume.id()), Some(self.image()?), store, loops)?;
        }
        match loops.detach_all(self.image.as_fd())? {
            Detach::Detached => Ok(Cleanup::Complete),
            Detach::Deferred(_) => {
                tracing::info!(
                    "a process has the volume's loop device open; the kernel detaches it at the last close"
                );
                Ok(Cleanup::DetachDeferred)
            }
        }
    }

    /// Repairs the devices. The caller has the volume locked: a repair cancels a detach that the kernel has deferred.
    pub(crate) fn repair(&self) -> Result<()> {
        self.devices()?.iter().try_for_each(|device| self.restore(device))
    }

    /// Refreshes the capacity of the devices, and returns the size that all of them have.
    pub(crate) fn expand(&self) -> Result<Bytes> {
        let mut usable = self.volume.capacity();
        for device in self.devices()? {
            usable = usable.min(device.refresh_capacity(&self.image)?);
        }
        Ok(usable)
    }

    /// Returns the problem of the devices, if there is one.
    pub(crate) fn problem(&self) -> Result<Option<String>> {
        let devices = self.devices()?;
        for device in &devices {
            if let Some(problem) = self.device_problem(device)? {
                return Ok(Some(problem));
            }
        }
        let known: Vec<_> = devices.iter().flat_map(LoopDevice::device_number).collect();
        let other = self
            .storage
            .held
            .numbers(Some(self.volume.id()))
            .into_iter()
            .find(|number| !known.contains(number));
        Ok(other.map(|number| {
            format!("loop device {number}, through which the volume is published, is bound to another file; delete the pods of the volume")
        }))
    }

    /// Returns the problem of one device. A missing direct I/O is no problem if the volume prefers it and shares
    /// blocks, because sharing makes direct I/O unavailable.
    fn device_problem(&self, device: &LoopDevice) -> Result<Option<String>> {
        let status = device.status()?;
        let name = device.path();
        if let Some(changed) = self.change_of(device)? {
            return Ok(Some(format!(
                "a process has changed {}: {changed}; the next publication or expansion of the volume repairs it, or delete its pods",
                name.display()
            )));
        }
        if status.direct_io || self.prefers_direct_io()? && self.volume.may_share_blocks()? {
            return Ok(None);
        }
        Ok(Some(format!("{} has lost direct I/O; unpublish and publish the volume", name.display())))
    }
}

/// Publishes a device at the target.
pub(crate) fn publish(device: &LoopDevice, target: &Target) -> Result<()> {
    let node = open_node(device)?;
    target.ensure_file()?;
    // A device with this access is read-only itself. The flag only makes the mount table agree.
    let read_only = device.binding().access == Access::ReadOnly;
    let flags = MountFlags { read_only, nosuid: true, noexec: true, ..MountFlags::default() };
    target.bind_mount(node.as_fd(), flags)
}

fn file_size(image: &OwnedFd) -> Result<Bytes> {
    let failed = |errno| Error::Defect(format!("fstat an image that is open: {errno}"));
    Ok(Bytes(u64::try_from(fstat(image).map_err(failed)?.st_size).unwrap_or_default()))
}

/// Opens the node of a device, and checks that it is the node of that device.
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

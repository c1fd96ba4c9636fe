//! Block volumes: the image is attached to a loop device, whose node is bind-mounted at the target.
//!
//! The node is the one in devtmpfs. A bind mount keeps the flags of the mount from which it was made. Containers can
//! therefore open the node even if the kubelet's file system is mounted nodev.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::fcntl::{OFlag, open};
use nix::sys::stat::{FileStat, Mode, SFlag, fstat};
use nix::unistd::fsync;

use super::cleanup::Cleanup;
use super::devices::PublishedDevices;
use super::directory::published_differently;
use super::mounted::{MountedDevices, is_loop_device, kind_of, number_of};
use super::target::Target;
use crate::error::{Context, Error, ErrorKind, Result};
use crate::loop_device::{Access, AttachOptions, BackingFile, Detach, DirectIo, LoopDevice};
use crate::mount::MountFlags;
use crate::volume_store::Volume;
use crate::{Bytes, DeviceNumber};

/// The maximum time that a publish call waits until a device of the other access is closed. A process of the node may
/// have it open to examine it (udev).
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

/// A Block volume and the loop device of its image.
///
/// A loop device is either writable or read-only, and each device has a page cache of its own: a read-only device
/// beside a writable one would return old data. A volume therefore has one device at a time, and
/// [`detach_other_access`](Self::detach_other_access) refuses write access while the volume is published read-only, and
/// read-only access while it is published for writing. There is no other means to make a device node read-only: the kernel ignores read-only
/// mounts when a process opens a device, and the container runtime decides whether a container may write to a device.
pub(super) struct BlockVolume<'a> {
    volume: &'a Volume,
    devices: &'a PublishedDevices,
    image: OwnedFd,
}

impl<'a> BlockVolume<'a> {
    pub(super) fn open(volume: &'a Volume, devices: &'a PublishedDevices) -> Result<Self> {
        let image = volume.open_image(Access::ReadOnly)?;
        Ok(Self { volume, devices, image })
    }

    pub(super) fn image_file(&self) -> BorrowedFd<'_> {
        self.image.as_fd()
    }

    /// Returns the identity of the volume's image.
    pub(super) fn image(&self) -> Result<BackingFile> {
        BackingFile::of(&self.image)
    }

    pub(super) fn devices(&self) -> Result<Vec<LoopDevice>> {
        self.devices.loops().find(self.image.as_fd())
    }

    /// Returns the device with this access, and attaches it if necessary. The device gets the logical block size that
    /// was fixed at the creation of the volume, because the content depends on it.
    pub(super) fn attach(&self, access: Access) -> Result<LoopDevice> {
        if access == Access::ReadWrite {
            // A truncated image can still be attached for reading.
            self.volume.require_whole()?;
        }
        // Opened for reading only: a descriptor that is open for writing would defeat the check by read lease, and the
        // library would query every device of the node.
        let image = &self.image;
        let options = self.options(access)?;
        let attach = || self.devices.loops().ensure_attached(image.as_fd(), &options);
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
            self.devices.report(&format!(
                "volume {} was attached without a preferred property: {problem}",
                self.volume.id()
            ));
        }
        Ok(device)
    }

    fn options(&self, access: Access) -> Result<AttachOptions> {
        self.volume.attach_options(access)
    }

    fn prefers_direct_io(&self) -> Result<bool> {
        Ok(self.volume.image()?.is_some_and(|image| image.direct_io == DirectIo::Preferred))
    }

    /// Returns what a pod has changed on the device.
    fn change_of(&self, device: &LoopDevice) -> Result<Option<String>> {
        device.difference(&self.image, &self.options(device.binding().access)?)
    }

    /// Returns what a pod has changed on one of the devices.
    pub(super) fn change(&self) -> Result<Option<String>> {
        let changes =
            self.devices()?.iter().map(|device| self.change_of(device)).collect::<Result<Vec<_>>>()?;
        Ok(changes.into_iter().flatten().next())
    }

    /// Repairs what a pod has changed on the device, as far as the kernel allows it. The check of the condition reports the rest.
    fn restore(&self, device: &LoopDevice) -> Result<()> {
        let mut options = self.options(device.binding().access)?;
        if self.prefers_direct_io()? && !self.volume.may_share_blocks()? {
            options = options.direct_io(DirectIo::Required);
        }
        let Some(changed) = device.difference(&self.image, &options)? else { return Ok(()) };
        let remaining = device.restore(&self.image, &options)?;
        let name = device.path();
        let left = remaining.map(|remaining| format!(", except that {remaining}")).unwrap_or_default();
        self.devices.report(&format!(
            "a process has changed {} of volume {}: {changed}; repaired{left}",
            name.display(),
            self.volume.id()
        ));
        Ok(())
    }

    /// Flushes the page caches of the devices to the image. This does not flush a file system on a device, whose cached
    /// data is not part of the device.
    pub(super) fn flush(&self) -> Result<()> {
        for device in self.devices()? {
            let path = device.path();
            fsync(&device)
                .context("fsync", path.display())
                .map_err(|error| error.with_kind(ErrorKind::Other))?;
        }
        Ok(())
    }

    /// Detaches a device of the other access, which staging or an ended workload may have left attached.
    ///
    /// # Errors
    /// [`ErrorKind::Conflict`]: the volume is published with the other access. [`ErrorKind::Busy`]: a process has the
    /// device open.
    pub(super) fn detach_other_access(&self, mounted: &MountedDevices, access: Access) -> Result<()> {
        let others = self.devices()?.into_iter().filter(|device| device.binding().access != access);
        for device in others {
            let number = device.device_number()?;
            if let Some(mount_point) = mounted.find(number, None) {
                return Err(self.published_with_other_access(mount_point, access));
            }
            drop(self.devices.release(number));
            let name = device.path();
            let Detach::Deferred(pending) = self.devices.loops().detach(device)? else { continue };
            if let Detach::Deferred(_) = pending.wait(CLOSE_TIMEOUT)? {
                let cause = format!(
                    "a process of an earlier workload still has {} open, and its page cache differs from that of the device to be \
                     published",
                    name.display()
                );
                return Err(
                    Error::new(ErrorKind::Busy, "publish", self.volume.id(), cause).with_remedy("retry")
                );
            }
        }
        Ok(())
    }

    fn published_with_other_access(&self, mount_point: &Path, access: Access) -> Error {
        let (requested, present) = match access {
            Access::ReadOnly => ("read-only", "for writing"),
            Access::ReadWrite => ("for writing", "read-only"),
        };
        let cause = format!(
            "it is requested {requested}, but published {present} at {}, and a read-only loop device beside a writable one would \
             return old data",
            mount_point.display()
        );
        Error::new(ErrorKind::Conflict, "publish", self.volume.id(), cause)
            .with_remedy(format!("unpublish it there first, or publish it {present} here too"))
    }

    /// Returns `true` if the volume is published at `target` with this access. Returns an error if it is published with
    /// the other access, or if something else than a loop device is mounted there.
    pub(super) fn is_published(&self, target: &Target, access: Access) -> Result<bool> {
        if target.mount()?.is_none() {
            return Ok(false);
        }
        let Some(status) = target.status()?.filter(is_loop_device) else {
            return Err(target.conflict("it is a mount point of something else").with_remedy("unmount it"));
        };
        let Some(device) = self.device_of(&status)? else {
            let shown = self.devices.volume_of(number_of(&status)).flatten();
            if let Some(other) = shown.filter(|other| other != self.volume.id()) {
                let cause = format!("volume {other} is published there");
                return Err(target.conflict(cause).with_remedy("unpublish it first"));
            }
            // Containers keep the node with which they were started. If it were unmounted here, the index would be used for another
            // volume while they run.
            let cause = format!(
                "it shows loop device {}, which a process has detached from the image of volume {} since",
                number_of(&status),
                self.volume.id()
            );
            return Err(target
                .conflict(cause)
                .with_remedy("end the workloads that use the volume, after which it is unpublished"));
        };
        let present = device.binding().access;
        if present == access {
            self.restore(&device)?;
            self.devices.hold(self.volume.id(), &device)?;
            return Ok(true);
        }
        Err(published_differently(target, present, access))
    }

    /// Returns the volume's device whose node is at a path with this status.
    pub(super) fn device_of(&self, status: &FileStat) -> Result<Option<LoopDevice>> {
        for device in self.devices()? {
            if device.device_number()? == number_of(status) {
                return Ok(Some(device));
            }
        }
        Ok(None)
    }

    /// Returns a mount point of the volume, other than `except`.
    pub(super) fn published_at(
        &self,
        mounted: &MountedDevices,
        except: Option<&Target>,
    ) -> Result<Option<PathBuf>> {
        let numbers = self.numbers()?;
        let mount_point = |number| mounted.find(number, except.map(Target::path));
        Ok(numbers.into_iter().find_map(mount_point).map(Path::to_owned))
    }

    /// Returns the numbers of the volume's devices, and of those that are held for it.
    pub(super) fn numbers(&self) -> Result<Vec<DeviceNumber>> {
        let mut numbers = self.devices.numbers(Some(self.volume.id()));
        for device in self.devices()? {
            numbers.push(device.device_number()?);
        }
        Ok(numbers)
    }

    /// Detaches the volume's devices. None of them may be mounted, because the number of a detached device is reused
    /// for other volumes.
    pub(super) fn detach(&self) -> Result<Cleanup> {
        let mut cleanup = Cleanup::Complete;
        for number in self.devices.numbers(Some(self.volume.id())) {
            // Its user may have given a read-only device another file, so that the device is not found by the image.
            let closed =
                self.devices.close(number, Some(self.volume.id()), Some(self.image()?), &|_| true)?;
            cleanup = closed.and(cleanup);
        }
        Ok(Cleanup::from(self.devices.loops().detach_all(self.image.as_fd())?).and(cleanup))
    }

    /// Repairs the devices. The caller has the volume locked: a repair cancels a detach that the kernel has deferred.
    pub(super) fn repair(&self) -> Result<()> {
        self.devices()?.iter().try_for_each(|device| self.restore(device))
    }

    /// Refreshes the capacity of the devices, and returns the size that all of them have.
    pub(super) fn expand(&self) -> Result<Bytes> {
        let mut usable = self.volume.capacity();
        for device in self.devices()? {
            usable = usable.min(device.refresh_capacity(&self.image)?);
        }
        Ok(usable)
    }

    /// Returns the problem of the devices, if there is one.
    pub(super) fn problem(&self) -> Result<Option<String>> {
        let devices = self.devices()?;
        for device in &devices {
            if let Some(problem) = self.device_problem(device)? {
                return Ok(Some(problem));
            }
        }
        let known: Vec<_> = devices.iter().flat_map(LoopDevice::device_number).collect();
        let other =
            self.devices.numbers(Some(self.volume.id())).into_iter().find(|number| !known.contains(number));
        Ok(other.map(|number| {
            format!("loop device {number}, through which the volume is published, is bound to another file; end the workloads that use the volume")
        }))
    }

    /// Returns the problem of one device. A missing direct I/O is no problem if the volume prefers it and shares
    /// blocks, because sharing makes direct I/O unavailable.
    fn device_problem(&self, device: &LoopDevice) -> Result<Option<String>> {
        let status = device.status()?;
        let name = device.path();
        if let Some(changed) = self.change_of(device)? {
            return Ok(Some(format!(
                "a process has changed {}: {changed}; the next publication or expansion of the volume repairs it, or end its workloads",
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
pub(super) fn publish(device: &LoopDevice, target: &Target) -> Result<()> {
    let node = open_node(device)?;
    target.ensure_file()?;
    // A device with this access is read-only itself. The flag only makes the mount table agree.
    let read_only = device.binding().access == Access::ReadOnly;
    let flags = MountFlags { read_only, nosuid: true, noexec: true, ..MountFlags::default() };
    target.bind_mount(node.as_fd(), flags)
}

fn file_size(image: &OwnedFd) -> Result<Bytes> {
    let size = fstat(image).context("fstat", "an open image")?.st_size;
    Ok(Bytes(u64::try_from(size).unwrap_or_default()))
}

/// Opens the node of a device, and checks that it is the node of that device.
fn open_node(device: &LoopDevice) -> Result<OwnedFd> {
    let path = device.path();
    // The volume exists, whatever happened to the node.
    let failed = |operation, errno| Error::sys(operation, path.display(), errno).with_kind(ErrorKind::Other);
    let node = open(&path, OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC, Mode::empty())
        .map_err(|errno| failed("open", errno))?;
    let status = fstat(&node).map_err(|errno| failed("fstat", errno))?;
    if kind_of(&status) != SFlag::S_IFBLK || number_of(&status) != device.device_number()? {
        return Err(Error::new(
            ErrorKind::Conflict,
            "mount",
            path.display(),
            "it is not the node of the loop device with that name",
        )
        .with_remedy("let this process see the host's /dev (devtmpfs)"));
    }
    Ok(node)
}

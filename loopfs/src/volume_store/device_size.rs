//! The size that the loop devices of an image are known to have, recorded in an extended attribute of the image.
//!
//! The process that expands an image and the process that refreshes its devices are different ones: the first needs no
//! privileges over devices, the second has them. The first waits here for the second. The second needs no notification: to
//! expand an image changes its attribute `trusted.loopfs.capacity`, which is an event (IN_ATTRIB, inotify(7)) of the directory of
//! all volumes.

use std::collections::BTreeSet;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify, InotifyEvent};

use super::id::VolumeId;
use super::on_disk::sizes;
use super::spec::VolumeKind;
use super::store::VolumeStore;
use super::volume::Volume;
use crate::deadline::Deadline;
use crate::descriptor;
use crate::error::{Context, Error, ErrorKind, Result};
use crate::units::Bytes;

impl VolumeStore {
    /// Watches the volumes for changes of their attributes. Each expansion of an image changes one. The descriptor is readable when
    /// [`read`](VolumeWatch::read) has changes to return.
    ///
    /// # Errors
    /// Those of inotify_init1(2) and inotify_add_watch(2).
    pub fn watch(&self) -> Result<VolumeWatch> {
        VolumeWatch::of(self.layout.volumes.as_fd()).context("watch", "the volumes")
    }

    /// Waits until all loop devices of an image have a size of `capacity` bytes, for up to `within`. Returns `true` if they have. The
    /// process that refreshes the devices records that ([`Volume::record_device_size`]). If no process does, the call returns
    /// `false` after all of that time.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`], and those of fgetxattr(2), inotify_add_watch(2) and poll(2).
    pub fn wait_for_device_size(&self, id: &VolumeId, capacity: Bytes, within: Duration) -> Result<bool> {
        let deadline = Deadline::after(within);
        let volume = self.volume(id)?;
        // Before the first read of the attribute, so that no change between that and the wait is missed.
        let watch = VolumeWatch::of(volume.entry.as_fd()).context("watch volume", id)?;
        while volume.device_size()?.is_none_or(|refreshed| refreshed < capacity) {
            let left = deadline.left();
            if left.is_zero() {
                return Ok(false);
            }
            watch.wait(left).context("wait for the devices of volume", id)?;
            watch.read_events().context("wait for the devices of volume", id)?;
        }
        Ok(true)
    }
}

impl Volume {
    /// Returns the size that all loop devices of the image are known to have. Returns `None` for a Filesystem volume.
    ///
    /// # Errors
    /// Those of fgetxattr(2); [`ErrorKind::Other`]: recorded by a later version.
    pub fn device_size(&self) -> Result<Option<Bytes>> {
        if self.kind() != VolumeKind::Block {
            return Ok(None);
        }
        sizes::read_device_size(&self.entry, "read the recorded device size of volume", self.id()).map(Some)
    }

    /// Records that all loop devices of the image have `size` bytes, for the process that expanded the image. The caller prevents
    /// other processes from attaching the image during the call, because a device in creation may have read the earlier
    /// size. Writes nothing if that size is already recorded.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] for a Filesystem volume, and those of fsetxattr(2).
    pub fn record_device_size(&self, size: Bytes) -> Result<()> {
        const OPERATION: &str = "record the device size of volume";
        if self.kind() != VolumeKind::Block {
            return Err(Error::new(
                ErrorKind::InvalidInput,
                OPERATION,
                self.id(),
                "it is a Filesystem volume, which has no devices",
            ));
        }
        if self.device_size()? == Some(size) {
            return Ok(());
        }
        sizes::write_device_size(&self.entry, size).context(OPERATION, self.id())
    }
}

/// An inotify(7) watch of all volumes. It returns the volumes whose attributes changed.
#[derive(Debug)]
pub struct VolumeWatch(Inotify);

/// Changes that a [`VolumeWatch`] has seen.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Changes {
    /// Volumes with a changed attribute.
    pub volumes: BTreeSet<VolumeId>,
    /// `true` if the kernel dropped events (`fs.inotify.max_queued_events`): any volume may have changed.
    pub overflowed: bool,
    /// `true` if the directory of the volumes was removed or its file system unmounted: the watch returns no further changes.
    pub ended: bool,
}

impl VolumeWatch {
    fn of(watched: BorrowedFd<'_>) -> std::result::Result<Self, Errno> {
        let inotify = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK)?;
        inotify.add_watch(descriptor::link(watched).as_str(), AddWatchFlags::IN_ATTRIB)?;
        Ok(Self(inotify))
    }

    /// Returns the changes since the last call, without blocking.
    ///
    /// # Errors
    /// Those of read(2).
    pub fn read(&self) -> Result<Changes> {
        self.read_events().context("read", "the changes of the volumes")
    }

    fn read_events(&self) -> std::result::Result<Changes, Errno> {
        let mut changes = Changes::default();
        loop {
            match self.0.read_events() {
                Ok(events) => events.iter().for_each(|event| changes.add(event)),
                Err(Errno::EAGAIN) => return Ok(changes),
                Err(Errno::EINTR) => {}
                Err(errno) => return Err(errno),
            }
        }
    }

    /// Waits until the descriptor is readable, for up to `within`.
    fn wait(&self, within: Duration) -> std::result::Result<(), Errno> {
        // Rounded up, or the last millisecond would be spent in a busy loop.
        let milliseconds = within.as_micros().div_ceil(1000);
        let timeout = PollTimeout::try_from(milliseconds).unwrap_or(PollTimeout::MAX);
        match poll(&mut [PollFd::new(self.0.as_fd(), PollFlags::POLLIN)], timeout) {
            Ok(_) | Err(Errno::EINTR) => Ok(()),
            Err(errno) => Err(errno),
        }
    }
}

impl AsFd for VolumeWatch {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Changes {
    fn add(&mut self, event: &InotifyEvent) {
        self.overflowed |= event.mask.contains(AddWatchFlags::IN_Q_OVERFLOW);
        self.ended |= event.mask.intersects(AddWatchFlags::IN_IGNORED | AddWatchFlags::IN_UNMOUNT);
        let named = event.name.as_ref().and_then(|name| name.to_str());
        self.volumes.extend(named.and_then(|name| name.parse::<VolumeId>().ok()));
    }
}

//! How much of an image its loop devices show, in an extended attribute of it.
//!
//! Who grows an image and who may tell its devices are different processes: one needs no privileges over devices, the
//! other has them. The first waits here for the second, which needs to be told of nothing: the attribute
//! `trusted.loopfs.capacity` that growing writes is an event (IN_ATTRIB, inotify(7)) of the directory of all volumes.

use std::collections::BTreeSet;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify, InotifyEvent};

use super::id::VolumeId;
use super::on_disk::sizes;
use super::spec::VolumeKind;
use super::store::VolumeStore;
use super::volume::Volume;
use crate::error::{Context, Error, ErrorKind, Result};
use crate::units::Bytes;

impl VolumeStore {
    /// Watches the volumes for changes of their attributes, as growing an image makes one. The descriptor is readable
    /// when there is something to [`read`](VolumeWatch::read).
    ///
    /// # Errors
    /// Those of inotify_init1(2) and inotify_add_watch(2).
    pub fn watch(&self) -> Result<VolumeWatch> {
        VolumeWatch::of(self.layout.volumes.as_fd()).context("watch", "the volumes")
    }

    /// Waits until all loop devices of an image show `capacity` bytes of it, and answers whether they do. That they do is
    /// known from whoever told them ([`Volume::record_refreshed`]); if nobody does, this takes all the time it may.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`], and those of fgetxattr(2), inotify_add_watch(2) and poll(2).
    pub fn await_refreshed(&self, id: &VolumeId, capacity: Bytes, within: Duration) -> Result<bool> {
        let deadline = Instant::now() + within;
        let volume = self.volume(id)?;
        // Before the first look, so that nothing is missed between that and the wait.
        let watch = VolumeWatch::of(volume.entry.as_fd()).context("watch volume", id)?;
        while volume.refreshed()?.is_none_or(|refreshed| refreshed < capacity) {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(false);
            }
            watch.wait(left).context("wait for the devices of volume", id)?;
            watch.read().context("wait for the devices of volume", id)?;
        }
        Ok(true)
    }
}

impl Volume {
    /// How many bytes of the image all its loop devices are known to show. None of a Filesystem volume, and of an
    /// image of an earlier version.
    ///
    /// # Errors
    /// Those of fgetxattr(2); [`ErrorKind::Other`]: recorded by a later version.
    pub fn refreshed(&self) -> Result<Option<Bytes>> {
        if self.kind() != VolumeKind::Block {
            return Ok(None);
        }
        sizes::read_device_size(&self.entry, "read what the devices show of volume", self.id())
    }

    /// Records that all loop devices of the image show `size` bytes, for whoever grew it. The caller keeps others from
    /// attaching it meanwhile: a device that is being made may have looked at the size before. Nothing is written that
    /// is recorded already.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] for a Filesystem volume, and those of fsetxattr(2).
    pub fn record_refreshed(&self, size: Bytes) -> Result<()> {
        const OPERATION: &str = "record what the devices show of volume";
        if self.kind() != VolumeKind::Block {
            return Err(Error::new(ErrorKind::InvalidInput, OPERATION, self.id(), "it has no devices"));
        }
        if self.refreshed()? == Some(size) {
            return Ok(());
        }
        sizes::write_device_size(&self.entry, size).context(OPERATION, self.id())
    }
}

/// Tells which volumes had an attribute changed.
#[derive(Debug)]
pub struct VolumeWatch(Inotify);

/// What a [`VolumeWatch`] has seen.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Changes {
    /// Volumes with a changed attribute.
    pub volumes: BTreeSet<VolumeId>,
    /// More happened than the kernel keeps (`fs.inotify.max_queued_events`): any volume may have changed.
    pub overflowed: bool,
    /// The directory of the volumes, or its file system, is gone: nothing will be seen any more.
    pub ended: bool,
}

impl VolumeWatch {
    fn of(watched: BorrowedFd<'_>) -> std::result::Result<Self, Errno> {
        let inotify = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK)?;
        // The descriptor's own file, wherever its name is by now.
        let path = format!("/proc/self/fd/{}", watched.as_raw_fd());
        inotify.add_watch(path.as_str(), AddWatchFlags::IN_ATTRIB)?;
        Ok(Self(inotify))
    }

    /// What has changed since the last call; nothing, if nothing has. Blocks not.
    ///
    /// # Errors
    /// Those of read(2).
    pub fn read(&self) -> std::result::Result<Changes, Errno> {
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

    fn wait(&self, within: Duration) -> std::result::Result<(), Errno> {
        // Up, or the last millisecond would be spent without waiting.
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

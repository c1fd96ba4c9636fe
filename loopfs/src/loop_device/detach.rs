//! Detaching a device, immediately or at its last close.

use std::fmt;
use std::num::NonZeroU64;
use std::os::fd::AsFd;
use std::time::Duration;

use nix::errno::Errno;

use super::binding::Binding;
use super::device::{LoopDevice, node_name, open_device, read_binding};
use crate::deadline::Deadline;
use crate::error::{Context, Error, ErrorKind, Explanation, Result};
use crate::sys::{loop_abi as abi, loop_dev};

/// The result of a detach.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Detach {
    /// The device is detached.
    Detached,
    /// A process has the device open; the kernel detaches it at the last close. Also if this process could not open the device again to
    /// look, for example because it has too many open files: [`PendingDetach::wait`] then returns the error (EMFILE).
    Deferred(PendingDetach),
}

/// A detach that the kernel has not accepted. It has the device, which the call has not closed, so that the caller can repeat the call.
#[derive(Debug)]
pub struct DetachError {
    /// In a box, because the result of each detach would have the size of both.
    device_and_error: Box<(LoopDevice, Error)>,
}

impl DetachError {
    fn new(device: LoopDevice, error: Error) -> Self {
        Self { device_and_error: Box::new((device, error)) }
    }

    /// Returns the error.
    #[must_use]
    pub fn error(&self) -> &Error {
        &self.device_and_error.1
    }

    /// Returns the device and the error. The device is open, and as far as the error does not say otherwise, it is still attached.
    #[must_use]
    pub fn into_parts(self) -> (LoopDevice, Error) {
        *self.device_and_error
    }
}

impl fmt::Display for DetachError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error().fmt(f)
    }
}

/// It prints as its [`error`](Self::error), so there is no [`source`](std::error::Error::source) that would repeat that.
impl std::error::Error for DetachError {}

/// Closes the device.
impl From<DetachError> for Error {
    fn from(failed: DetachError) -> Self {
        failed.into_parts().1
    }
}

/// Attachments whose detach is deferred to the last close of the device.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use = "wait for it or cancel it, or drop it explicitly"]
pub struct PendingDetach {
    bindings: Vec<Binding>,
}

impl PendingDetach {
    pub(super) fn new(bindings: Vec<Binding>) -> Self {
        Self { bindings }
    }

    /// Returns the attachments.
    #[must_use]
    pub fn bindings(&self) -> &[Binding] {
        &self.bindings
    }

    /// Waits until the devices are detached, for up to `limit`. Then returns [`Detach::Deferred`] with those that are still bound.
    /// The kernel sends no event at the last close, so the call polls at intervals that double from 1 ms to 50 ms. The kernel does
    /// not report either if it could not write what programs wrote after the detach: they learn that from their fsync(2).
    ///
    /// # Errors
    /// Those of [`LoopDevice::open_binding`]; a device that is detached already is no error.
    pub fn wait(self, limit: Duration) -> Result<Detach> {
        let deadline = Deadline::after(limit);
        let mut pause = Duration::from_millis(1);
        let mut left = self.bindings;
        loop {
            let mut bound = Vec::new();
            for binding in left {
                if is_bound(&binding)? {
                    bound.push(binding);
                }
            }
            if bound.is_empty() {
                return Ok(Detach::Detached);
            }
            left = bound;
            let remaining = deadline.left();
            if remaining.is_zero() {
                return Ok(Detach::Deferred(Self { bindings: left }));
            }
            std::thread::sleep(pause.min(remaining));
            pause = (pause * 2).min(Duration::from_millis(50));
        }
    }

    /// Cancels the detach of the devices that are still bound, and returns these devices.
    ///
    /// # Errors
    /// Those of [`LoopDevice::cancel_detach`]; a device that is detached already is no error.
    pub fn cancel(self) -> Result<Vec<LoopDevice>> {
        let mut kept = Vec::new();
        for binding in &self.bindings {
            match LoopDevice::open_binding(binding).and_then(|device| device.cancel_detach().map(|()| device))
            {
                Ok(device) => kept.push(device),
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        Ok(kept)
    }
}

fn is_bound(binding: &Binding) -> Result<bool> {
    match LoopDevice::open_binding(binding) {
        Ok(_bound) => Ok(true),
        Err(error) if is_unbound(&error) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Returns `true` if a device is still the same attachment, as far as its sequence number tells.
fn has_sequence(fd: impl AsFd, binding: &Binding) -> bool {
    binding.disk_sequence.is_some_and(|sequence| loop_dev::disk_sequence(fd) == Ok(sequence.get()))
}

/// Returns `true` if an error says that a device is bound to no file.
pub(super) fn is_unbound(error: &Error) -> bool {
    // ENODEV: it was removed after it was detached.
    error.kind() == ErrorKind::NotFound || error.errno() == Some(Errno::ENODEV as i32)
}

/// Requests that the kernel detaches the device at its last close. The caller closes `fd`.
///
/// The last close first writes the page cache of the device to the file, whichever process closes it, and no process can open the
/// device in between. So no write is lost, also one that a process makes during this call. `LOOP_CLR_FD` has this effect only if it
/// finds two openers: then it sets `LO_FLAGS_AUTOCLEAR`. If it finds one, the device refuses writes immediately, those of the page
/// cache included. `LOOP_SET_STATUS64` sets the flag too, but it freezes the queue and enables discards before Linux 6.9.
///
/// `flags` are those of the status of the device, `index` its number.
///
/// # Errors
/// EIO: the kernel could not write the page cache to the file. In this case, and if the second descriptor cannot be opened (EMFILE,
/// ENFILE), the detach is not requested. ENXIO: the device is bound to no file.
pub(super) fn request_detach(fd: impl AsFd, index: u32, flags: u32, name: &str) -> Result<()> {
    // The last close returns no error, so what was written until now is written first.
    write_back(&fd, flags, name)?;
    if flags & abi::PARTITION_SCAN != 0 {
        // Each partition has a page cache. A partition without a node is not written to.
        for partition in loop_dev::partitions(index).unwrap_or_default() {
            let node = format!("/dev/{partition}");
            if let Ok(device) = loop_dev::open_partition(index, &partition) {
                write_back(&device, flags, &node)?;
            }
        }
    }
    let second = loop_dev::open_again(&fd, index).map_err(|errno| {
        let error = Error::sys("detach", name, errno);
        if errno == Errno::ENOENT {
            error.with_remedy("mount /proc, through which the device is opened again")
        } else {
            error
        }
    })?;
    loop_dev::clear(&second).context("detach", name)
}

fn write_back(fd: impl AsFd, flags: u32, name: &str) -> Result<()> {
    loop_dev::write_back(fd).map_err(|errno| {
        let consequence = if flags & abi::AUTOCLEAR == 0 {
            "the device stays attached"
        } else {
            "the kernel detaches the device at its last close, as was requested before"
        };
        let cause = format!("a write of cached data to the file has failed; {consequence}");
        // The kernel returns EIO also if the file system is full.
        let remedy = "check the free space and the disk of its file system, and that programs have written their data again, and \
                      repeat the call";
        let explanation = Explanation::from(cause).with_remedy(remedy);
        Error::sys("write the page cache of", name, errno).explain(explanation)
    })
}

/// Looks whether the kernel has detached a device, after it accepted the request and the caller closed the device. There is no error:
/// the caller has no device any more, and what cannot be seen here is left to [`PendingDetach::wait`]. Also returns the sequence number
/// as [`LoopDevice::detach_and_examine`] does.
fn examine(binding: Binding) -> (Detach, Option<NonZeroU64>) {
    let read = open_device(binding.index, false).map(|fd| (read_binding(&fd, binding.index), fd));
    match read {
        // A process has it open and has unbound it, or it was removed.
        Err(error) if is_unbound(&error) => (Detach::Detached, None),
        Ok((Err(error), fd)) if is_unbound(&error) => {
            let idle = loop_dev::unbinds_at_last_close().then(|| loop_dev::disk_sequence(&fd).ok());
            (Detach::Detached, idle.flatten().and_then(NonZeroU64::new))
        }
        Ok((Ok(now), _)) if !now.is_same(&binding) => (Detach::Detached, None),
        _ => (Detach::Deferred(PendingDetach::new(vec![binding])), None),
    }
}

impl LoopDevice {
    /// Detaches the device if it is still the attachment that this was opened as. Takes the descriptor, because the kernel detaches
    /// the device at its last close.
    ///
    /// No write is lost, also without fsync(2): the kernel writes the page cache of the device to the file before it detaches the
    /// device, also what other processes write while they have the device open. The data is then in the file, but not necessarily on
    /// its disk: sync the file if the data must survive a loss of power.
    ///
    /// # Errors
    /// The error has the device, as it was before. [`ErrorKind::NotFound`]: the attachment no longer exists. EIO: the kernel could not
    /// write the page cache to the file, for example because the file system of a thin image is full. The device stays attached,
    /// unless it is to be detached at its last close anyway ([`Lifetime::AutoClear`](super::Lifetime::AutoClear), or an earlier call),
    /// which happens when the caller drops the error. The kernel reports this once and does not repeat the write: a repeated call
    /// succeeds without the data. If a later write fails, only the fsync(2) of the process that wrote reports that. A file system that
    /// ends a write early, which tmpfs does if it is full, causes no error at all.
    #[doc(alias = "LOOP_CLR_FD")]
    #[doc(alias = "sync_file_range")]
    pub fn detach(self) -> Result<Detach, DetachError> {
        self.detach_and_examine().map(|(detach, _)| detach)
    }

    /// As [`detach`](Self::detach). Also returns the sequence number of the idle device, if no process had it open when the kernel unbound
    /// it.
    pub(super) fn detach_and_examine(self) -> Result<(Detach, Option<NonZeroU64>), DetachError> {
        if let Err(error) = self.request_detach() {
            return Err(DetachError::new(self, error));
        }
        let Self { fd, binding } = self;
        drop(fd);
        Ok(examine(binding))
    }

    fn request_detach(&self) -> Result<()> {
        let flags = match self.bound_info() {
            Ok(info) => info.lo_flags,
            // The file does not respond, so there is no status. It may have partitions.
            Err(error) if !is_unbound(&error) && has_sequence(&self.fd, &self.binding) => abi::PARTITION_SCAN,
            Err(error) => return Err(error),
        };
        let index = self.binding.index;
        match request_detach(&self.fd, index, flags, &node_name(index)) {
            // Another process detached it after the check.
            Err(error) if error.errno() == Some(Errno::ENXIO as i32) => Ok(()),
            requested => requested,
        }
    }

    /// Cancels a [`Deferred`](Detach::Deferred) detach (clears `LO_FLAGS_AUTOCLEAR`): the device stays bound after its last close.
    /// Has no effect on a device without a deferred detach. Disabled discards stay disabled
    /// ([`Discard::Disabled`](super::Discard::Disabled)), unless the process dies within this call before Linux 6.9.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`]: the device is mounted, and the kernel (Linux 6.19, no longer 7.3) changes nothing on a device that is
    /// held exclusively. [`ErrorKind::NotFound`]: the device is detached.
    #[doc(alias = "LOOP_SET_STATUS64")]
    pub fn cancel_detach(&self) -> Result<()> {
        if !self.status()?.auto_clear {
            return Ok(());
        }
        let name = node_name(self.binding.index);
        let mut info = loop_dev::status(&self.fd).context("read the status of", &name)?;
        info.lo_flags &= !abi::AUTOCLEAR;
        self.keeping_discard(|| loop_dev::set_status(&self.fd, &info).context("cancel the detach of", name))
    }
}

//! Detaching a device, immediately or at its last close.

use std::time::{Duration, Instant};

use nix::errno::Errno;

use super::binding::Binding;
use super::device::{LoopDevice, node_name};
use crate::error::{Context, Error, ErrorKind, Result};
use crate::sys::{loop_abi as abi, loop_dev};

/// The result of a detach.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Detach {
    /// The device is detached.
    Detached,
    /// A process has the device open; the kernel detaches it at the last close.
    Deferred(PendingDetach),
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
    /// The kernel sends no event at the last close, so the call polls at intervals that double from 1 ms to 50 ms.
    ///
    /// # Errors
    /// Those of [`LoopDevice::open_binding`]; a device that is detached already is no error.
    pub fn wait(self, limit: Duration) -> Result<Detach> {
        let deadline = Instant::now() + limit;
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
            let remaining = deadline.saturating_duration_since(Instant::now());
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

pub(super) fn is_bound(binding: &Binding) -> Result<bool> {
    match LoopDevice::open_binding(binding) {
        Ok(_bound) => Ok(true),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

impl LoopDevice {
    /// Detaches the device if it is still the attachment that this was opened as. Takes the descriptor, because from Linux 6.11 on
    /// the kernel always waits for the last close.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`]: the attachment no longer exists.
    #[doc(alias = "LOOP_CLR_FD")]
    pub fn detach(self) -> Result<Detach> {
        self.check_bound()?;
        let Self { fd, binding } = self;
        match loop_dev::clear(&fd) {
            // ENXIO: another process detached it after the check.
            Ok(()) | Err(Errno::ENXIO) => {}
            Err(errno) => return Err(Error::sys("detach", node_name(binding.index), errno)),
        }
        // Detached already, or (from Linux 6.11 on) detached when this descriptor is closed.
        let alone = loop_dev::status(&fd).err() == Some(Errno::ENXIO);
        drop(fd);
        // The last user may have closed it in the meantime.
        Ok(if alone || !is_bound(&binding)? {
            Detach::Detached
        } else {
            Detach::Deferred(PendingDetach::new(vec![binding]))
        })
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

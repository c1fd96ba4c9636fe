//! Unbinding a device, at once or when its last user is gone.

use std::time::{Duration, Instant};

use nix::errno::Errno;

use super::binding::Binding;
use super::device::{LoopDevice, node_name};
use crate::error::{Context, Error, ErrorKind, Result};
use crate::sys::{loop_abi as abi, loop_dev};

/// What became of a detached device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Detach {
    /// It is bound no more.
    Gone,
    /// Somebody has it open; the kernel unbinds it at the last close.
    Deferred(PendingDetach),
}

/// Attachments that go when their last users close them.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use = "wait for it, cancel it, or say why neither is needed"]
pub struct PendingDetach {
    bindings: Vec<Binding>,
}

impl PendingDetach {
    pub(super) fn new(bindings: Vec<Binding>) -> Self {
        Self { bindings }
    }

    /// The attachments.
    #[must_use]
    pub fn bindings(&self) -> &[Binding] {
        &self.bindings
    }

    /// Waits until they are gone. [`Detach::Deferred`] with those that are not when the time is
    /// up. The kernel tells nobody of a last close, so it is asked again and again, at
    /// intervals that double from 1 ms to 50 ms.
    ///
    /// # Errors
    /// Those of [`LoopDevice::open_binding`], except that one that is gone is no error.
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
                return Ok(Detach::Gone);
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

    /// Takes the detach back where it is not too late: answers the devices that stay bound.
    ///
    /// # Errors
    /// Those of [`LoopDevice::keep`], except that one that is gone is no error.
    pub fn cancel(self) -> Result<Vec<LoopDevice>> {
        let mut kept = Vec::new();
        for binding in &self.bindings {
            match LoopDevice::open_binding(binding).and_then(|device| device.keep().map(|()| device)) {
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
    /// Unbinds the device, if it still is the attachment this was opened as. From Linux 6.11 on
    /// the kernel always waits for the last close, so the descriptor goes with it.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`]: the attachment was gone already.
    #[doc(alias = "LOOP_CLR_FD")]
    pub fn detach(self) -> Result<Detach> {
        self.check_bound()?;
        let Self { fd, binding } = self;
        match loop_dev::clear(&fd) {
            // ENXIO: another process was faster between the check and here.
            Ok(()) | Err(Errno::ENXIO) => {}
            Err(errno) => return Err(Error::sys("detach", node_name(binding.index), errno)),
        }
        // Unbound already, or (from Linux 6.11 on) closed to others and unbound when this is closed.
        let alone = loop_dev::status(&fd).err() == Some(Errno::ENXIO);
        drop(fd);
        // Whoever had it open may have closed it since.
        Ok(if alone || !is_bound(&binding)? {
            Detach::Gone
        } else {
            Detach::Deferred(PendingDetach::new(vec![binding]))
        })
    }

    /// Takes back a detach that was [`Deferred`](Detach::Deferred): the device stays bound when
    /// its last user closes it. No effect on one that is not being detached. Discards stay masked if they were
    /// ([`Discard::Mask`](super::Discard::Mask)), except where the process dies within this call before Linux 6.9.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`]: it is mounted, and the kernel (Linux 6.19, no longer 7.3) changes nothing on
    /// a device that is held exclusively. [`ErrorKind::NotFound`]: gone by now.
    #[doc(alias = "LOOP_SET_STATUS64")]
    pub fn keep(&self) -> Result<()> {
        if !self.status()?.auto_clear {
            return Ok(());
        }
        let name = node_name(self.binding.index);
        let mut info = loop_dev::status(&self.fd).context("read the status of", &name)?;
        info.lo_flags &= !abi::AUTOCLEAR;
        self.keeping_discard(|| {
            loop_dev::set_status(&self.fd, &info).context("take back the detach of", name)
        })
    }
}

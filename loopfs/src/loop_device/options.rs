//! What to attach a file as.

use std::num::NonZeroU64;
use std::time::Duration;

use super::binding::{Access, Extent};
use super::device::Status;
use super::discard::Discard;
use crate::error::{Error, ErrorKind, Result};
use crate::sys::loop_abi as abi;

/// Whether I/O of the device bypasses the page cache of its file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DirectIo {
    /// It must; otherwise data is cached twice and a flush is all that bounds the loss.
    #[default]
    Require,
    /// It should, where the file system can.
    Prefer,
    /// It must not.
    Off,
}

/// Logical block size of the device, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockSize {
    /// This one: a power of two from 512 to 4096. Every program can use 512.
    Exact(u32),
    /// The smallest that the file takes direct I/O in (`STATX_DIOALIGN`, Linux 6.1; 512 before). It
    /// may differ between a file and its reflinked copy.
    MatchDirectIo,
    /// The kernel's choice, which depends on its version and on how the file was opened.
    KernelDefault,
}

/// How long the device stays bound.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Lifetime {
    /// Until it is detached or the machine stops.
    #[default]
    Persistent,
    /// Until its last user closes it: mount it before dropping the [`LoopDevice`](super::LoopDevice).
    AutoClear,
}

/// Which device to bind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum IndexPolicy {
    /// An idle one of the range that [`LoopControl`](super::LoopControl) keeps for itself.
    #[default]
    Pool,
    /// The one that `LOOP_CTL_GET_FREE` names, as other programs do it.
    Any,
    /// This one, made if need be.
    Exact(u32),
}

/// How to attach a file. Made by [`new`](Self::new), refined by the other methods.
#[derive(Clone, Debug)]
#[must_use]
pub struct AttachOptions {
    pub(super) access: Access,
    pub(super) extent: Extent,
    pub(super) direct_io: DirectIo,
    pub(super) block_size: BlockSize,
    pub(super) discard: Discard,
    pub(super) lifetime: Lifetime,
    pub(super) index: IndexPolicy,
    pub(super) label: String,
    pub(super) deadline: Duration,
}

impl AttachOptions {
    /// The whole file, direct I/O required, blocks of 512 bytes, discards let through, persistent, from the pool, ten seconds.
    pub fn new(access: Access) -> Self {
        Self {
            access,
            extent: Extent::default(),
            direct_io: DirectIo::Require,
            block_size: BlockSize::Exact(512),
            discard: Discard::Allow,
            lifetime: Lifetime::Persistent,
            index: IndexPolicy::Pool,
            label: String::new(),
            deadline: Duration::from_secs(10),
        }
    }

    /// Where the device begins in the file, in bytes: a multiple of the block size.
    pub fn offset(mut self, offset: u64) -> Self {
        self.extent.offset = offset;
        self
    }

    /// How much of the file the device shows at most, in bytes: a multiple of the block size.
    pub fn size_limit(mut self, limit: NonZeroU64) -> Self {
        self.extent.size_limit = Some(limit);
        self
    }

    /// Whether the page cache is bypassed.
    pub fn direct_io(mut self, direct_io: DirectIo) -> Self {
        self.direct_io = direct_io;
        self
    }

    /// Logical block size.
    pub fn block_size(mut self, block_size: BlockSize) -> Self {
        self.block_size = block_size;
        self
    }

    /// What becomes of discards. A device that is attached already is made to do as asked, except that some kernels keep a
    /// mask ([`LoopDevice::set_discard`](super::LoopDevice::set_discard)).
    pub fn discard(mut self, discard: Discard) -> Self {
        self.discard = discard;
        self
    }

    /// How long the device stays bound.
    pub fn lifetime(mut self, lifetime: Lifetime) -> Self {
        self.lifetime = lifetime;
        self
    }

    /// Which device to bind.
    pub fn index(mut self, index: IndexPolicy) -> Self {
        self.index = index;
        self
    }

    /// At most 63 bytes that `losetup` shows as the backing file's name: they tell people whose device
    /// it is, and mean nothing to the kernel. Longer labels are cut.
    pub fn label(mut self, label: &str) -> Self {
        let fits = label.floor_char_boundary(abi::LABEL_SIZE);
        self.label = label[..fits].to_owned();
        self
    }

    /// The time after which an attachment gives up, if other programs take the devices or hold the lock of the file.
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// Why a device that is bound does not meet these options, if it does not.
    pub(super) fn mismatch(&self, status: &Status) -> Option<String> {
        if status.binding.access != self.access {
            return Some(format!("{:?} asked, {:?} granted", self.access, status.binding.access));
        }
        if status.binding.extent != self.extent {
            return Some(format!("{:?} asked, {:?} granted", self.extent, status.binding.extent));
        }
        if let BlockSize::Exact(asked) = self.block_size
            && asked != status.block_size
        {
            return Some(format!("logical block size {asked} asked, {} granted", status.block_size));
        }
        match (self.direct_io, status.direct_io) {
            (DirectIo::Require, false) => Some("direct I/O asked, buffered I/O granted".to_owned()),
            (DirectIo::Off, true) => Some("buffered I/O asked, direct I/O granted".to_owned()),
            _ => None,
        }
    }

    pub(super) fn check(&self) -> Result<()> {
        let invalid =
            |detail: String| Err(Error::new(ErrorKind::InvalidInput, "attach", "a loop device", detail));
        let unit = match self.block_size {
            BlockSize::Exact(size) if !(512..=4096).contains(&size) || !size.is_power_of_two() => {
                return invalid(format!("block size {size} is not 512, 1024, 2048 or 4096"));
            }
            BlockSize::Exact(size) => u64::from(size),
            BlockSize::MatchDirectIo | BlockSize::KernelDefault => 512,
        };
        let limit = self.extent.size_limit.map_or(0, NonZeroU64::get);
        for (name, value) in [("offset", self.extent.offset), ("size limit", limit)] {
            // The kernel would take it, and drop direct I/O or the tail without a word.
            if !value.is_multiple_of(unit) || i64::try_from(value).is_err() {
                return invalid(format!("{name} {value} is not a multiple of {unit} that a file can have"));
            }
        }
        if self.label.contains('\0') {
            return invalid(format!("label {:?} holds a NUL", self.label));
        }
        Ok(())
    }
}

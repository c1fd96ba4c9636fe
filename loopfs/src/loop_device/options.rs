//! Options of an attachment.

use std::num::NonZeroU64;
use std::time::Duration;

use super::binding::{Access, BackingRange};
use super::device::Status;
use super::discard::Discard;
use super::label;
use crate::error::{Error, ErrorKind, Result};

/// Whether I/O of the device bypasses the page cache of its file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DirectIo {
    /// Direct I/O is required. Without it data is cached twice, and only a flush limits the loss at a crash.
    Required,
    /// Direct I/O is used if the kernel grants it. From Linux 6.15 on the kernel does not grant it for blocks of 512 bytes on a file
    /// that shares blocks with another one.
    Preferred,
    /// Buffered I/O is required.
    Off,
}

impl DirectIo {
    /// Parses the text that [`as_str`](Self::as_str) returns.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        [Self::Required, Self::Preferred, Self::Off].into_iter().find(|value| value.as_str() == text)
    }

    /// Returns `required`, `preferred` or `off`.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Required => "required",
            Self::Preferred => "preferred",
            Self::Off => "off",
        }
    }
}

/// Logical block size of the device, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockSize {
    /// This size: a power of two from 512 to 4096. Every program can use 512.
    Exact(u32),
    /// The smallest size in which the file takes direct I/O (`STATX_DIOALIGN`, Linux 6.1; 512 before). It
    /// may differ between a file and its reflinked copy.
    MatchDirectIo,
    /// The default of the kernel, which depends on its version and on how the file was opened.
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
    /// An idle device from the pool of the [`LoopControl`](super::LoopControl).
    #[default]
    Pool,
    /// The index that `LOOP_CTL_GET_FREE` returns, as other programs use it.
    Any,
    /// This index; the device is added if it does not exist.
    Exact(u32),
}

/// The options of an attachment. [`new`](Self::new) returns the defaults, which the other methods change.
#[derive(Clone, Debug)]
#[must_use]
pub struct AttachOptions {
    pub(super) access: Access,
    pub(super) range: BackingRange,
    pub(super) direct_io: DirectIo,
    pub(super) block_size: BlockSize,
    pub(super) discard: Discard,
    pub(super) lifetime: Lifetime,
    pub(super) index: IndexPolicy,
    pub(super) label: String,
    pub(super) deadline: Duration,
}

impl AttachOptions {
    /// Returns the defaults: the whole file, direct I/O required, blocks of 512 bytes, discards enabled, persistent, an index from the
    /// pool, a deadline of ten seconds.
    pub fn new(access: Access) -> Self {
        Self {
            access,
            range: BackingRange::default(),
            direct_io: DirectIo::Required,
            block_size: BlockSize::Exact(512),
            discard: Discard::Enabled,
            lifetime: Lifetime::Persistent,
            index: IndexPolicy::Pool,
            label: String::new(),
            deadline: Duration::from_secs(10),
        }
    }

    /// Sets where the device begins in the file, in bytes: a multiple of the block size.
    pub fn offset(mut self, offset: u64) -> Self {
        self.range.offset = offset;
        self
    }

    /// Sets the size limit of the device, in bytes: a multiple of the block size.
    pub fn size_limit(mut self, limit: NonZeroU64) -> Self {
        self.range.size_limit = Some(limit);
        self
    }

    /// Sets whether I/O bypasses the page cache.
    pub fn direct_io(mut self, direct_io: DirectIo) -> Self {
        self.direct_io = direct_io;
        self
    }

    /// Sets the logical block size.
    pub fn block_size(mut self, block_size: BlockSize) -> Self {
        self.block_size = block_size;
        self
    }

    /// Enables or disables discards. A device that is attached already is changed accordingly, but some kernels keep discards
    /// disabled ([`LoopDevice::set_discard`](super::LoopDevice::set_discard)).
    pub fn discard(mut self, discard: Discard) -> Self {
        self.discard = discard;
        self
    }

    /// Sets how long the device stays bound.
    pub fn lifetime(mut self, lifetime: Lifetime) -> Self {
        self.lifetime = lifetime;
        self
    }

    /// Sets which device to bind.
    pub fn index(mut self, index: IndexPolicy) -> Self {
        self.index = index;
        self
    }

    /// Sets a label of at most 63 bytes, which `losetup` shows as the name of the backing file. It tells administrators which program uses
    /// the device, and has no meaning for the kernel. Longer labels are truncated.
    pub fn label(mut self, label: &str) -> Self {
        self.label = label::fitting(label).to_owned();
        self
    }

    /// Sets the time after which the attachment fails, if other programs take the devices or hold the lock of the file.
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// Returns the label as the kernel takes it.
    pub(super) fn file_name(&self) -> [u8; 64] {
        let mut name = [0; 64];
        name[..self.label.len()].copy_from_slice(self.label.as_bytes());
        name
    }

    /// Returns how a bound device differs from these options, or `None` if it meets them.
    pub(super) fn mismatch(&self, status: &Status) -> Option<String> {
        if status.binding.access != self.access {
            return Some(format!("{:?} requested, {:?} granted", self.access, status.binding.access));
        }
        if status.binding.range != self.range {
            return Some(format!("{:?} requested, {:?} granted", self.range, status.binding.range));
        }
        if let BlockSize::Exact(requested) = self.block_size
            && requested != status.block_size
        {
            return Some(format!("logical block size {requested} requested, {} granted", status.block_size));
        }
        match (self.direct_io, status.direct_io) {
            (DirectIo::Required, false) => Some("direct I/O requested, buffered I/O granted".to_owned()),
            (DirectIo::Off, true) => Some("buffered I/O requested, direct I/O granted".to_owned()),
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
        let limit = self.range.size_limit.map_or(0, NonZeroU64::get);
        for (name, value) in [("offset", self.range.offset), ("size limit", limit)] {
            // The kernel would accept it, and silently drop direct I/O or the last bytes.
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

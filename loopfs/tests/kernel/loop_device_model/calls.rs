//! The calls that the test sends to its worker processes, and their replies.

use std::num::NonZeroU64;

use loopfs::loop_device::{
    Access, AttachOptions, BlockSize, DirectIo, Discard, IndexPolicy, Lifetime, LoopDevice,
};
use serde::{Deserialize, Serialize};

use crate::failure::Failure;

/// A descriptor of a device that a worker has open.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub(super) struct Handle {
    pub(super) worker: usize,
    pub(super) number: u64,
}

impl Handle {
    /// Returns a handle of a plan. The number selects one of the handles that the worker has at that time.
    pub(super) fn planned(number: u64) -> Self {
        Self { worker: 0, number }
    }
}

/// One call of the library. Files are numbers, which both sides know.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum Call {
    Attach {
        file: usize,
        request: Request,
        keep: Option<Handle>,
    },
    EnsureAttached {
        file: usize,
        request: Request,
        keep: Option<Handle>,
    },
    Find {
        file: usize,
    },
    List,
    DetachAll {
        file: usize,
    },
    /// Detaches a device through [`LoopControl`](loopfs::loop_device::LoopControl), which tells the pool, or without.
    Detach {
        handle: Handle,
        tells_pool: bool,
    },
    CancelDetach {
        handle: Handle,
    },
    RefreshCapacity {
        handle: Handle,
        file: usize,
    },
    Status {
        handle: Handle,
    },
    Close {
        handle: Handle,
    },
    RemoveIdle {
        keep: usize,
    },
    /// Attaches files of its own until the range of the pool is used up, and detaches them.
    UseUpRange,
}

impl Call {
    /// Returns the handle that the call uses. No other call may use it concurrently.
    pub(super) fn handle(&self) -> Option<Handle> {
        match self {
            Self::Detach { handle, .. }
            | Self::CancelDetach { handle }
            | Self::RefreshCapacity { handle, .. }
            | Self::Status { handle }
            | Self::Close { handle } => Some(*handle),
            _ => None,
        }
    }
}

/// The options of an attachment, as far as the test varies them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Request {
    pub(super) mapping: Mapping,
    /// `None` if direct I/O is only preferred. Both file systems of the test have it.
    pub(super) direct_io: Option<bool>,
    pub(super) discard: bool,
    pub(super) auto_clear: bool,
    pub(super) index: Index,
}

/// The properties that a device cannot change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Mapping {
    pub(super) read_only: bool,
    pub(super) offset: u64,
    /// 0 for none.
    pub(super) limit: u64,
    pub(super) block_size: u32,
}

impl Mapping {
    /// Returns the size of a device of a file.
    pub(super) fn size(&self, file: u64) -> u64 {
        let rest = file.saturating_sub(self.offset);
        if self.limit == 0 { rest } else { rest.min(self.limit) }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Index {
    Pool,
    Any,
    Exact(u32),
}

impl Request {
    pub(super) fn options(&self) -> AttachOptions {
        let Mapping { read_only, offset, limit, block_size } = self.mapping;
        let options = AttachOptions::new(if read_only { Access::ReadOnly } else { Access::ReadWrite })
            .offset(offset)
            .block_size(BlockSize::Exact(block_size))
            .direct_io(match self.direct_io {
                Some(true) => DirectIo::Required,
                Some(false) => DirectIo::Off,
                None => DirectIo::Preferred,
            })
            .discard(discard(self.discard))
            .lifetime(if self.auto_clear { Lifetime::AutoClear } else { Lifetime::Persistent })
            .index(match self.index {
                Index::Pool => IndexPolicy::Pool,
                Index::Any => IndexPolicy::Any,
                Index::Exact(index) => IndexPolicy::Exact(index),
            });
        match NonZeroU64::new(limit) {
            Some(limit) => options.size_limit(limit),
            None => options,
        }
    }

    /// Returns `true` if a device with these properties meets the request.
    pub(super) fn is_met_by(&self, mapping: Mapping, direct_io: bool) -> bool {
        self.mapping == mapping && self.direct_io.is_none_or(|requested| requested == direct_io)
    }
}

fn discard(enabled: bool) -> Discard {
    if enabled { Discard::Enabled } else { Discard::Disabled }
}

/// An attachment, as the library or the kernel reports it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Attachment {
    pub(super) index: u32,
    /// Differs for each attachment since boot.
    pub(super) sequence: u64,
    pub(super) inode: u64,
    pub(super) mapping: Mapping,
    pub(super) size: u64,
    pub(super) direct_io: bool,
    /// The kernel detaches the device at its last close.
    pub(super) auto_clear: bool,
    /// Discards are enabled.
    pub(super) discard: bool,
}

impl Attachment {
    /// Reads the attachment through the library.
    pub(super) fn of(device: &LoopDevice) -> loopfs::Result<Self> {
        let status = device.status()?;
        Ok(Self { discard: device.discard()? == Discard::Enabled, ..Self::of_status(&status) })
    }

    /// Returns the attachment of a status, which does not contain whether discards are enabled.
    pub(super) fn of_status(status: &loopfs::loop_device::Status) -> Self {
        let binding = &status.binding;
        Self {
            index: binding.index,
            sequence: binding.disk_sequence.map_or(0, NonZeroU64::get),
            inode: binding.backing.inode,
            mapping: Mapping {
                read_only: binding.access == Access::ReadOnly,
                offset: binding.range.offset,
                limit: binding.range.size_limit.map_or(0, NonZeroU64::get),
                block_size: status.block_size,
            },
            size: status.size.0,
            direct_io: status.direct_io,
            auto_clear: status.auto_clear,
            discard: false,
        }
    }

    /// Returns `true` if both are the same attachment.
    pub(super) fn is_same(&self, other: &Self) -> bool {
        self.identity() == other.identity()
    }

    fn identity(&self) -> (u32, u64, u64, Mapping) {
        (self.index, self.sequence, self.inode, self.mapping)
    }
}

/// The result of a call that ended.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum Reply {
    /// The device of a handle, and whether the descriptor is open for writing.
    Device {
        attachment: Attachment,
        writable: bool,
    },
    Devices(Vec<Attachment>),
    Detached,
    Deferred,
    Size(u64),
    Done,
    Removed(usize),
    /// The indices that the pool returned before it had no other.
    UsedUp(Vec<u32>),
    Failed {
        kind: Failure,
        message: String,
    },
}

impl From<loopfs::Error> for Reply {
    fn from(error: loopfs::Error) -> Self {
        Self::Failed { kind: error.kind().into(), message: format!("{:?}: {error}", error.kind()) }
    }
}

//! What a caller says of a new volume, and of a store.

use std::fmt;
use std::num::NonZeroU64;
use std::ops::RangeInclusive;
use std::time::Duration;

use super::id::VolumeId;
use crate::error::{Error, ErrorKind, Result};
use crate::flock;
use crate::loop_device::{DirectIo, Discard};
use crate::project_quota::ProjectId;
use crate::units::{Bytes, Inodes};

pub(super) const BYTES_PER_INODE: &str = "bytesPerInode";
pub(super) const DIRECT_IO: &str = "directIO";
pub(super) const LOGICAL_BLOCK_SIZE: &str = "logicalBlockSize";
pub(super) const PROVISIONING: &str = "provisioning";

/// An inode takes 512 bytes on disk, so fewer promise what the file system cannot hold; with more, a volume of
/// ordinary size could hold no files at all.
pub(super) const BYTES_PER_INODE_RANGE: std::ops::RangeInclusive<u64> = 512..=1 << 30;

/// How a volume is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum VolumeKind {
    /// A directory with a project quota.
    Filesystem,
    /// A file for a loop device, preallocated unless it is asked thin.
    Block,
}

impl std::fmt::Display for VolumeKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Filesystem => "Filesystem",
            Self::Block => "Block",
        })
    }
}

/// What a new volume shall be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VolumeSpec {
    /// Directory or image.
    pub kind: VolumeKind,
    /// At least this many bytes; rounded up to 4096.
    pub capacity: Bytes,
    /// A Filesystem volume may hold one inode for each so many bytes of capacity.
    pub bytes_per_inode: NonZeroU64,
    /// What the image of a Block volume shall be.
    pub image: ImageSpec,
}

impl VolumeSpec {
    /// One inode for each 2048 bytes.
    pub const BYTES_PER_INODE: NonZeroU64 = NonZeroU64::new(2048).expect("2048 is not 0");

    /// A volume with one inode for each 2048 bytes; a Block volume is thick and prefers direct I/O.
    #[must_use]
    pub fn new(kind: VolumeKind, capacity: Bytes) -> Self {
        Self { kind, capacity, bytes_per_inode: Self::BYTES_PER_INODE, image: ImageSpec::default() }
    }

    /// The capacity as it will be, or why it cannot be.
    pub(super) fn rounded(&self, id: &VolumeId) -> Result<Bytes> {
        rounded(self.capacity, id)
    }
}

pub(super) fn rounded(capacity: Bytes, id: &VolumeId) -> Result<Bytes> {
    let refuse = |detail: &str| Err(Error::new(ErrorKind::InvalidInput, "size volume", id, detail));
    match capacity.round_up() {
        Some(Bytes(0)) => refuse("a capacity of 0 bytes"),
        Some(rounded) => Ok(rounded),
        None => refuse("the capacity is larger than any file can be"),
    }
}

/// The directory itself is one of the inodes, so there are at least two.
pub(super) fn inodes_for(capacity: Bytes, bytes_per_inode: NonZeroU64) -> Inodes {
    Inodes((capacity.0 / bytes_per_inode).max(2))
}

/// Entries of a store, counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Census {
    /// Filesystem volumes.
    pub directories: usize,
    /// Block volumes.
    pub images: usize,
    /// Deleted volumes, and directories lifted out of them, that are not freed yet.
    pub trash: usize,
}

/// Settings of a store.
#[derive(Clone, Debug)]
pub struct StoreOptions {
    /// Project ids that belong to the store. Everything that uses project quotas on the same file
    /// system needs a range of its own: the kubelet takes ids from 1048577 upwards.
    pub project_ids: RangeInclusive<ProjectId>,
    /// How long a call waits for each lock that another call, in this process or another one, holds. After that it
    /// fails with [`ErrorKind::Busy`] and an error that names the lock file. Only a process that hangs, for example on a
    /// disk that does not respond, holds a lock for that long.
    pub lock_timeout: Duration,
}

impl Default for StoreOptions {
    /// 16,777,216 ids from 1275068416 (0x4c000000), and 60 seconds for each lock.
    fn default() -> Self {
        const FIRST: ProjectId = ProjectId::new(0x4c00_0000).expect("neither 0 nor the last");
        const LAST: ProjectId = ProjectId::new(0x4cff_ffff).expect("neither 0 nor the last");
        Self { project_ids: FIRST..=LAST, lock_timeout: flock::DEFAULT_TIMEOUT }
    }
}

/// What the device of a Block volume must have beside its size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ImageDirectIo {
    /// It is attached with direct I/O or not at all.
    Required,
    /// With direct I/O wherever the kernel grants it. It does not for blocks of 512 bytes on an image that shares blocks
    /// with a clone or a snapshot, from Linux 6.15 on.
    #[default]
    Preferred,
}

impl ImageDirectIo {
    /// What to ask for when the image is attached.
    #[must_use]
    pub fn wish(self) -> DirectIo {
        match self {
            Self::Required => DirectIo::Require,
            Self::Preferred => DirectIo::Prefer,
        }
    }

    pub(super) fn parse(text: &str) -> Option<Self> {
        [Self::Required, Self::Preferred].into_iter().find(|value| value.as_str() == text)
    }

    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Required => "required",
            Self::Preferred => "preferred",
        }
    }
}

/// Logical block size of a device: the unit that it is addressed in, which a file system or a partition table on it is
/// made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LogicalBlockSize {
    /// 512 bytes, which every program can use.
    B512,
    /// 4096 bytes.
    B4096,
}

impl LogicalBlockSize {
    /// In bytes.
    #[must_use]
    pub fn bytes(self) -> u32 {
        match self {
            Self::B512 => 512,
            Self::B4096 => 4096,
        }
    }

    /// The least that is a whole number of these units.
    pub(super) fn at_least(unit: u32) -> Self {
        if unit <= Self::B512.bytes() { Self::B512 } else { Self::B4096 }
    }

    pub(super) fn parse(text: &str) -> Option<Self> {
        match text {
            "512" => Some(Self::B512),
            "4096" => Some(Self::B4096),
            _ => None,
        }
    }
}

impl fmt::Display for LogicalBlockSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.bytes().fmt(f)
    }
}

/// When an image gets its blocks. Its whole size is promised to it either way: no other volume is made of the space
/// that it has not used yet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Provisioning {
    /// All of them when it is made, and it keeps them: its device takes no discards.
    #[default]
    Thick,
    /// A block when it is first written. A discard of the device gives it back to the file system, and 1/128 of the
    /// size and 1 MiB are promised beside the size, for the extent tree of an image that lies in many pieces.
    Thin,
}

impl Provisioning {
    /// What to ask for when the image is attached.
    #[must_use]
    pub fn discard(self) -> Discard {
        match self {
            Self::Thick => Discard::Mask,
            Self::Thin => Discard::Allow,
        }
    }

    pub(super) fn parse(text: &str) -> Option<Self> {
        [Self::Thick, Self::Thin].into_iter().find(|value| value.as_str() == text)
    }

    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Thick => "thick",
            Self::Thin => "thin",
        }
    }
}

/// What the image of a new Block volume shall be; a Filesystem volume has none, and this says nothing of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct ImageSpec {
    /// Whether its device must have direct I/O.
    pub direct_io: ImageDirectIo,
    /// Logical block size of its device. None: the least that the file system takes direct I/O in (`STATX_DIOALIGN`,
    /// Linux 6.1), found when the image is made and recorded with it; that of its source for a clone.
    pub logical_block_size: Option<LogicalBlockSize>,
    /// When it gets its blocks.
    pub provisioning: Provisioning,
}

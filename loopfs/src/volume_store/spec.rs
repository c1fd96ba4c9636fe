//! The properties of a new volume that a caller requests, and the options of a store.

use std::fmt;
use std::ops::RangeInclusive;
use std::time::Duration;

use super::id::VolumeId;
use super::on_disk::{Annotations, DirectorySpec};
use crate::error::{Error, ErrorKind, Result};
use crate::flock;
use crate::loop_device::DirectIo;
use crate::project_quota::ProjectId;
use crate::units::Bytes;

/// The kind of a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum VolumeKind {
    /// A directory with a project quota.
    Filesystem,
    /// An image file for a loop device, preallocated unless thin provisioning is requested.
    Block,
}

impl fmt::Display for VolumeKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Filesystem => "Filesystem",
            Self::Block => "Block",
        })
    }
}

/// The requested properties of a new volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeSpec {
    /// Directory or image.
    pub kind: VolumeKind,
    /// The least capacity in bytes; the store rounds it up to a multiple of 4096.
    pub capacity: Bytes,
    /// The settings of the directory of a Filesystem volume.
    pub directory: DirectorySpec,
    /// The settings of the image of a Block volume.
    pub image: ImageSpec,
    /// What the caller notes about the volume. An existing volume keeps its own.
    pub annotations: Annotations,
    /// Creates the volume as pending, until [`VolumeStore::confirm`](super::VolumeStore::confirm). An existing volume does not become
    /// pending, and a call without this confirms it.
    pub pending: bool,
}

impl VolumeSpec {
    /// Returns a specification with the default settings and without annotations.
    #[must_use]
    pub fn new(kind: VolumeKind, capacity: Bytes) -> Self {
        Self {
            kind,
            capacity,
            directory: DirectorySpec::default(),
            image: ImageSpec::default(),
            annotations: Annotations::default(),
            pending: false,
        }
    }
}

/// Returns a capacity rounded up, or an error if no volume can have it.
pub(super) fn rounded(capacity: Bytes, id: &VolumeId) -> Result<Bytes> {
    let refuse = |cause: &'static str| Err(Error::new(ErrorKind::InvalidInput, "size volume", id, cause));
    match capacity.round_up() {
        Some(Bytes(0)) => refuse("a capacity of 0 bytes"),
        Some(rounded) => Ok(rounded),
        None => refuse("the capacity is larger than any file can be"),
    }
}

/// Counts of the entries of a store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct StoreCounts {
    /// Filesystem volumes.
    pub directories: usize,
    /// Block volumes.
    pub images: usize,
    /// Entries in the trash whose space is not free yet: deleted volumes, directories moved up out of them, and project ids of
    /// directories that are still open.
    pub trash: usize,
}

/// Settings of a store.
#[derive(Clone, Debug)]
pub struct StoreOptions {
    /// Project ids that belong to the store. Each program that uses project quotas on the same file system needs a range
    /// of its own. The kubelet allocates the first unused id from 1048577 upwards. In this range, the store skips ids that
    /// another program uses, and removes the limits of ids that nothing is charged to. A store that has volumes, snapshots or a trash accepts no
    /// other range than theirs.
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

/// The logical block size of a device: its smallest addressable unit. A file system or partition table on the device depends on
/// it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LogicalBlockSize {
    /// 512 bytes, which every program can use.
    B512,
    /// 4096 bytes.
    B4096,
}

impl LogicalBlockSize {
    /// Returns the size in bytes.
    #[must_use]
    pub fn bytes(self) -> u32 {
        match self {
            Self::B512 => 512,
            Self::B4096 => 4096,
        }
    }

    /// Returns the smallest block size that is a multiple of `unit`.
    pub(super) fn at_least(unit: u32) -> Self {
        if unit <= Self::B512.bytes() { Self::B512 } else { Self::B4096 }
    }

    pub(super) fn parse(text: &str) -> Option<Self> {
        [Self::B512, Self::B4096].into_iter().find(|size| size.to_string() == text)
    }
}

impl fmt::Display for LogicalBlockSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.bytes().fmt(f)
    }
}

/// When an image gets its blocks. The store reserves the whole size either way, so no other volume gets the space that the
/// image has not used yet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Provisioning {
    /// All blocks are allocated at creation, and the image keeps them: its device rejects discards.
    #[default]
    Thick,
    /// A block is allocated when it is first written. A discard of the device returns it to the file system. The store reserves
    /// 1/128 of the size and 1 MiB more than the size, for the extent tree of a fragmented image.
    Thin,
}

impl Provisioning {
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

/// The requested settings of the image of a new Block volume. They have no effect on a Filesystem volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ImageSpec {
    /// Whether its device must have direct I/O. It cannot be off.
    pub direct_io: DirectIo,
    /// The logical block size of its device. `None` selects the smallest unit in which the file system takes direct I/O
    /// (`STATX_DIOALIGN`, Linux 6.1), or the block size of the source for a clone. It is recorded at creation.
    pub logical_block_size: Option<LogicalBlockSize>,
    /// When the image gets its blocks.
    pub provisioning: Provisioning,
}

impl Default for ImageSpec {
    /// Direct I/O preferred, the smallest unit of direct I/O, thick.
    fn default() -> Self {
        let (logical_block_size, provisioning) = (None, Provisioning::Thick);
        Self { direct_io: DirectIo::Preferred, logical_block_size, provisioning }
    }
}

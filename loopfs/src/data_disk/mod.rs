//! The disk that holds the volumes of a node: an XFS with project quotas, mounted `nodev`, `nosuid` and `noexec`.
//!
//! [`DataDisk::check`] reads what is on a disk and names each problem with its remedy. [`mount()`] mounts the disk, and expands
//! the file system if the disk has grown. [`BlankDisk::claim`] proves that a disk is empty and keeps it for its caller, which
//! then runs mkfs.xfs: the library runs no programs, and formats nothing.

mod blank;
mod block_device;
mod check;
mod log;
mod loop_backing;
mod mounting;
mod signature;
mod source;
mod superblock;

pub use blank::{BlankDisk, FormatLock, MIN_SIZE};
#[cfg(feature = "preflight")]
pub(crate) use check::feature_problems;
pub use check::{DataDisk, DataFilesystemInfo, DataMount, Problem};
pub use log::LogState;
pub use mounting::{Growth, Mounted, mount};
pub use signature::Signature;
pub use source::DiskSource;
pub use superblock::Features;

//! The disk that holds the volumes of a node: an XFS with project quotas, mounted `nodev`, `nosuid` and `noexec`.
//!
//! [`DataDisk::check`] reads what is on a disk and names each problem with its remedy. [`mount()`] mounts the disk, and expands
//! the file system if the disk has grown. [`BlankDisk::claim`] proves that a disk is empty and locks it for its caller, which
//! then runs mkfs.xfs.

mod blank;
mod block_device;
mod check;
mod edges;
mod lock;
mod mounting;
mod source;
mod superblock;

pub(crate) use blank::BlankDisk;
pub(crate) use check::{DataDisk, DataMount, Problem, all_options, feature_problems, is_mount_root};
pub(crate) use mounting::{Mounted, mount};
pub(crate) use source::DiskSource;
pub(crate) use superblock::Superblock;

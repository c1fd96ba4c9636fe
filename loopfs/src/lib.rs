//! Linux loop devices, XFS project quotas, and a store of volumes built on both.
//!
//! - [`LoopControl`] and [`LoopDevice`]: attach a file as a block device with direct I/O, find the
//!   device of a file, grow it in use, detach it.
//! - [`ProjectQuota`]: limits on the bytes and inodes of a directory tree; [`ProjectIds`] gives out ids for them.
//! - [`tag_tree`], [`audit_tree`]: a directory tree that exists is put into a project, or compared with one.
//! - [`clone_tree`]: a directory tree copied with the blocks of its files shared, and all else that it is.
//! - [`bind_mount`], [`unmount`], [`mountinfo`]: mounts that are never visible without their flags.
//! - [`VolumeStore`]: a file system full of volumes, each a directory with a quota or a
//!   preallocated image.
//!
//! Calls block. Nothing is logged, nothing is remembered that the kernel could contradict, and no thread is
//! started but one that removes surplus idle devices. The caller decides what to do with an [`Error`], which
//! names the operation, the object, the errno and, where there is one, the remedy.
//!
//! # Requirements
//! Linux 5.14 (`quotactl_fd`); 5.12 suffices for mounts and 5.8 for loop devices. `CAP_SYS_ADMIN`
//! for all of it; `CAP_FOWNER`, `CAP_DAC_OVERRIDE` and `CAP_CHOWN` as well to keep other users' directories.
//!
//! # What a quota is worth
//! The owner of a directory can change its project id and so leave its limit: for a process that
//! runs as that user in the initial user namespace, a directory's limit is cooperative. An image
//! behind a loop device is a hard limit. [`VolumeStore::stats`] reports a changed id.

#![warn(missing_docs, clippy::missing_errors_doc)]

#[cfg(feature = "bench")]
#[doc(hidden)]
pub mod baseline;
#[cfg(feature = "breakage")]
#[doc(hidden)]
pub mod breakage;
mod descriptor;
mod error;
mod flock;
mod loop_device;
mod mount;
mod project_quota;
mod project_tree;
mod reflink;
mod sys;
#[cfg(feature = "kernel-tests")]
#[doc(hidden)]
pub mod test_support;
mod units;
mod volume_store;

pub use error::{Error, ErrorKind, Result};
pub use loop_device::{
    Access, AttachOptions, BackingFile, Binding, BlockSize, Detach, DeviceCensus, DirectIo, Discard, Extent,
    IndexPolicy, Lifetime, LoopControl, LoopDevice, PendingDetach, PoolOptions, Status,
};
pub use mount::table as mountinfo;
pub use mount::{AccessTime, MountFlags, MountOptionError, bind_mount, unmount};
pub use project_quota::{
    Bounds, Enforcement, Limit, Limits, ProjectId, ProjectIds, ProjectQuota, Reclaimed, Release,
    StoredLimits, Usage, assign_project, project_of,
};
pub use project_tree::{
    CloneReport, HardLinks, LeftOut, LeftOutInode, LeftOutReason, SpecialFiles, StrayInode, TagOptions,
    TreeAudit, TreeReport, audit_tree, audit_tree_reporting, clear_tree, clone_tree, clone_tree_reporting,
    tag_tree, tag_tree_reporting,
};
pub use units::{Bytes, DeviceNumber, Inodes};
pub use volume_store::{
    AbnormalReason, Census, Changes, ChargedTo, Condition, ContentSource, FilesystemUuid, ForeignEvidence,
    ForeignFiles, Image, ImageDirectIo, ImageSpec, InodeStats, LogicalBlockSize, OwnedContentSource,
    Provisioning, Recovered, Setting, SettingError, Snapshot, SnapshotId, Space, StoreOptions, Volume,
    VolumeId, VolumeKind, VolumeSpec, VolumeStats, VolumeStore, VolumeWatch,
};

/// The README's example compiles.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

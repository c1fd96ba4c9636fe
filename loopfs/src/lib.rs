//! Linux loop devices, XFS project quotas, and a store of volumes built on both.
//!
//! The documentation of [`volume_store`] describes the states of a volume, and what a crash leaves in each.
//!
//! # Features
//! Each module has a cargo feature of its own, and each feature builds alone:
//!
//! | feature | module | what it has |
//! |---|---|---|
//! | `loop-device` | [`loop_device`] | attaches a file as a block device with direct I/O, finds the device of a file, refreshes its capacity while it is in use, and detaches it |
//! | `project-quota` | [`project_quota`] | limits the bytes and inodes of a directory tree, and allocates the project ids for it |
//! | `project-quota` | [`project_tree`] | puts an existing directory tree into a project, compares a tree with its project, and clones a tree with shared blocks and all attributes |
//! | `project-quota` | [`xfs`] | reads the geometry of an XFS, and expands it |
//! | `mount` | [`mount`] | bind mounts that are never visible without their flags, the mount table, and a check that mounts appear on the node |
//! | `volume-store` (enables all of the above) | [`volume_store`] | a file system full of volumes, each of them a directory with a quota or an image file for a loop device |
//! | `publish` (default, enables `volume-store`) | [`publish`] | volumes at paths that other programs use, which may do anything to their device |
//!
//! Calls block. The library logs nothing and remembers nothing that the kernel could contradict. It starts threads only to
//! remove surplus idle loop devices, and to query loop devices that may not respond. The caller decides what to do with an
//! [`Error`], which names the operation, the object, the errno and, where there is one, the remedy.
//!
//! The package has nine complete programs in `examples`, and describes them in `docs/cookbook.md` together with the kinds of
//! errors, the capabilities and the versions of Linux.
//!
//! # Requirements
//! Linux 5.14 (`quotactl_fd`); mounts need 5.12 and loop devices 5.8. All of it needs `CAP_SYS_ADMIN`. To keep directories
//! of other users, `CAP_FOWNER`, `CAP_DAC_OVERRIDE` and `CAP_CHOWN` are needed too.
//!
//! # What a quota guarantees
//! The owner of a directory can change its project id and so leave its limit. For a process that runs as that user in the
//! initial user namespace, the limit of a directory is therefore cooperative. An image behind a loop device is a hard
//! limit. [`VolumeStore::stats`](volume_store::VolumeStore::stats) reports a changed id.

// docs.rs, which sets `docsrs`, shows the feature of each item.
#![cfg_attr(docsrs, feature(doc_cfg))]
#![warn(missing_docs, clippy::missing_errors_doc)]
#![cfg_attr(
    not(feature = "volume-store"),
    allow(dead_code, unused_imports, reason = "the lower modules have what only the volume store uses")
)]

#[cfg(not(target_pointer_width = "64"))]
compile_error!(
    "loopfs needs a target with 64 bits: in the C library of others, file offsets and inode numbers have 32 bits"
);

#[cfg(feature = "__tests")]
#[doc(hidden)]
pub mod baseline;
#[cfg(feature = "loop-device")]
mod boot;
#[cfg(any(feature = "loop-device", feature = "project-quota"))]
mod deadline;
#[cfg(any(feature = "loop-device", feature = "project-quota"))]
mod descriptor;
mod error;
#[cfg(feature = "__tests")]
#[doc(hidden)]
pub mod fault_injection;
#[cfg(feature = "project-quota")]
mod filesystem_uuid;
#[cfg(any(feature = "loop-device", feature = "project-quota"))]
mod flock;
#[cfg(feature = "volume-store")]
mod idle_io;
#[cfg(feature = "loop-device")]
mod keyed_lock;
#[cfg(feature = "loop-device")]
pub mod loop_device;
#[cfg(feature = "mount")]
pub mod mount;
#[cfg(feature = "project-quota")]
pub mod project_quota;
#[cfg(feature = "project-quota")]
pub mod project_tree;
#[cfg(feature = "publish")]
pub mod publish;
#[cfg(feature = "project-quota")]
mod reflink;
mod sys;
#[cfg(feature = "__tests")]
#[doc(hidden)]
pub mod test_support;
mod units;
#[cfg(feature = "volume-store")]
pub mod volume_store;
#[cfg(feature = "project-quota")]
pub mod xfs;

pub use error::{Error, ErrorKind, Result, Sizes};
#[cfg(feature = "project-quota")]
pub use filesystem_uuid::FilesystemUuid;
#[cfg(feature = "volume-store")]
pub use sys::probe::probe_system_calls;
pub use units::{Bytes, DeviceNumber, Inodes, ParseBytesError};

/// The README's example compiles.
#[cfg(all(doctest, feature = "volume-store"))]
#[doc = include_str!("../README.md")]
struct Readme;

//! The system calls and ioctls that neither `std` nor `nix` wraps as the library needs them: one function for each. Those that
//! `rustix` wraps are called through it; the others are the only unsafe code of the workspace.
//! The functions contain no policy and no retries. Their only error is the kernel's errno.
//!
//! | crate | what is called through it |
//! |---|---|
//! | `nix` | all that it wraps; its `Errno` is that of the library |
//! | `rustix` | `open_tree(2)`, `move_mount(2)`, `statx(2)`, `getdents64(2)` with a buffer of the caller, extended attributes of a descriptor, flags of inodes and FICLONE, which nix does not wrap |
//! | `ioctl-sys` | `ioctl(2)`; request numbers of structures that no header crate has |
//! | `libc` | `quotactl_fd(2)`, `mount_setattr(2)`, `statmount(2)`, `file_getattr(2)`, `ioprio_set(2)`, file handles, leases and index locks, which neither wraps; types in the signatures of nix |
//! | `linux-raw-sys` | structures and numbers of kernel headers, for these ioctls and calls |
#![expect(unsafe_code, reason = "raw system calls; everything above this module is safe code")]

pub(crate) mod devtmpfs;
pub(crate) mod fiemap;
pub(crate) mod file_attr;
pub(crate) mod file_handle;
pub(crate) mod file_lease;
pub(crate) mod file_lock;
pub(crate) mod fsxattr;
pub(crate) mod generation;
pub(crate) mod getdents;
#[cfg(feature = "volume-store")]
pub(crate) mod io_priority;
mod ioctl;
pub(crate) mod kernel_version;
pub(crate) mod loop_abi;
#[cfg(not(test))]
pub(crate) mod loop_dev;
#[cfg(test)]
#[path = "loop_model.rs"]
pub(crate) mod loop_dev;
pub(crate) mod mount;
pub(crate) mod mount_ids;
#[cfg(feature = "volume-store")]
pub(crate) mod probe;
pub(crate) mod quotactl;
pub(crate) mod random;
pub(crate) mod reflink;
mod result;
pub(crate) mod statx;
#[cfg(feature = "__tests")]
pub(crate) mod test_calls;
pub(crate) mod xattr;
pub(crate) mod xfs;

pub(crate) use result::Result;

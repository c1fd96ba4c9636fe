//! Loop devices (loop(4)): files attached as block devices.
//!
//! The kernel is the source of truth. The library identifies a device by the file that it is bound to (device and inode
//! number), never by a path, and checks remembered facts before each use.
//!
//! # The states of a device
//!
//! ```text
//!           add             attach               detach, no process has it open
//! (absent) -----> idle ----------------> attached -----------------------------> idle
//!     ^            |                      |    ^
//!     |            |      detach, another |    | cancel_detach
//!     |            |   process has it open v   |
//!     +-- remove --+                deferred detach -------- last close -------> idle
//! ```
//!
//! | state | who ends it | after a crash of the process that caused it |
//! |---|---|---|
//! | absent | the pool of any process, or another program, adds the index | |
//! | idle: bound to no file | a call that attaches a file, or another program; the pool removes surplus devices | the next scan of a pool with this range finds the device. An index lock that was taken before the device is bound ends with the process |
//! | attached: bound to a file. If this library bound it, the descriptor that the kernel keeps has the index lock | a detach by any process that can open the device, also one in a container | it stays attached. The index lock leads the next call to it, which compares its properties, because the process may have died before it checked them |
//! | deferred detach: as attached, and the kernel unbinds it at the last close (`LO_FLAGS_AUTOCLEAR`). Also each device with [`Lifetime::AutoClear`] | the process that closes it last; [`LoopDevice::cancel_detach`] | the kernel closes the descriptors of a process that dies, and so completes the detach |
//!
//! After a reboot all devices are absent. Nothing about a device is on disk, except that an attribute of its file says that
//! all its devices have an index lock.

mod attach;
mod attachments;
mod binding;
mod control;
mod detach;
mod device;
mod discard;
mod exclusion;
mod index_lock;
#[cfg(test)]
mod model_tests;
mod mounted;
mod options;
mod pool;
#[cfg(test)]
mod pool_tests;
mod query;
mod restore;
pub mod unmanaged;

pub use attachments::Attachments;
pub use binding::{Access, BackingFile, BackingRange, Binding};
pub use control::{DeviceCounts, DeviceList, LoopControl};
pub use detach::{Detach, DetachError, PendingDetach};
pub use device::{LoopDevice, Status};
pub use discard::Discard;
pub(crate) use index_lock::{attached_index, mark_new_file_tracked};
pub use mounted::{MAJOR, mounted_nodes};
pub use options::{AttachOptions, BlockSize, DirectIo, IndexPolicy, Lifetime};
pub use pool::PoolOptions;
pub use query::{DeviceQueries, query_device, query_devices};

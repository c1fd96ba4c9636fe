//! Loop devices (loop(4)): files attached as block devices.
//!
//! The kernel is the source of truth. The library identifies a device by the file that it is bound to (device and inode
//! number), never by a path, and checks remembered facts before each use.

mod attach;
mod attachments;
mod binding;
mod control;
mod detach;
mod device;
mod discard;
mod exclusion;
mod index_lock;
mod label;
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
#[cfg(feature = "preflight")]
pub(crate) use control::{REMEDY as NO_DRIVER_REMEDY, require_driver};
pub use detach::{Detach, DetachError, PendingDetach};
pub use device::{LoopDevice, Status};
pub use discard::Discard;
pub use mounted::{MAJOR, mounted_nodes};
pub use options::{AttachOptions, BlockSize, DirectIo, IndexPolicy, Lifetime};
pub use pool::PoolOptions;
pub use query::{DeviceQueries, query_device, query_devices};

pub(crate) use index_lock::{attached_index, mark_new_file_tracked};

//! Bind mounts that are never visible without their flags, the mount table, and a check that mounts appear on the node.

mod bind;
mod cache;
mod isolation;
mod options;
pub mod table;

pub use bind::{bind_mount, bind_mount_at, is_mount_point, unmount};
pub use cache::{KnownMount, MountCache, RootFile};
pub use isolation::Isolation;
pub use options::{AccessTime, MountFlags, MountOptionError};

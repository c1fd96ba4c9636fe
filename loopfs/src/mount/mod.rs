//! Bind mounts that are never visible without their flags, the mount table, and whether mounts reach the node.

mod bind;
mod isolation;
mod options;
pub mod table;

pub use bind::{bind_mount, unmount};
pub use isolation::Isolation;
pub use options::{AccessTime, MountFlags, MountOptionError};

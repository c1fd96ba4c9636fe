//! Bind mounts that are never visible without their flags, the mount table, and a check that mounts appear on the node.

mod bind;
mod isolation;
mod options;
pub mod table;

pub use bind::{bind_mount, unmount};
pub use isolation::Isolation;
pub use options::{AccessTime, MountFlags, MountOptionError};

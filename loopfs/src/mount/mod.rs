//! Bind mounts that are never visible without their flags, and the mount table.

mod bind;
mod options;
pub mod table;

pub use bind::{bind_mount, unmount};
pub use options::{AccessTime, MountFlags, MountOptionError};

//! All names and extended attributes of the store on the disk: each one is written and read in one file here.

mod annotations;
pub(crate) mod attribute;
mod boot;
pub(crate) mod capacity;
mod directory;
mod filesystem;
mod foreign_record;
mod image;
pub(crate) mod layout;
pub(crate) mod made_from;
pub(crate) mod shares;
mod taken;

pub use annotations::Annotations;
pub(crate) use annotations::{is_pending, remove_pending};
pub(crate) use boot::Boot;
pub use directory::DirectorySpec;
pub(crate) use directory::{DirectoryAttributes, assigned_ids};
pub(crate) use filesystem::{DataFilesystem, classify_missing};
#[cfg(test)]
pub(crate) use foreign_record::MAX_RECORD;
pub(crate) use foreign_record::{ForeignFinding, ForeignRecord};
pub use image::Image;
pub(crate) use layout::Layout;
pub(crate) use taken::{Taken, is_snapshot};

//! All names and extended attributes of the store on the disk: each one is written and read in one file here.

mod annotations;
pub(crate) mod attribute;
mod directory;
mod filesystem;
mod foreign_record;
mod image;
pub(crate) mod layout;
pub(crate) mod made_from;

pub use annotations::Annotations;
pub(crate) use annotations::{is_pending, remove_pending};
pub use directory::DirectorySpec;
pub(crate) use directory::{DirectoryAttributes, assigned_ids, projects};
pub(crate) use filesystem::{DataFilesystem, classify_missing, explain_failure};
pub(crate) use foreign_record::ForeignRecord;
pub use image::Image;
pub(crate) use image::{mark_sharing, may_share, read_capacity, write_capacity};
pub(crate) use layout::Layout;
pub(crate) use made_from::{Taken, is_snapshot};

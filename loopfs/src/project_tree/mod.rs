//! Operations on whole directory trees: tagging an existing tree with a project id, finding inodes that have left the project,
//! and cloning a tree into another project.
//!
//! In XFS, new files inherit the id of their directory, and existing files keep theirs. A tree is therefore tagged inode by
//! inode, its root first, and files that are created in the meantime inherit the id. The owner of the tree may change it
//! concurrently and may be hostile:
//!
//! - The walk never follows symbolic links and never enters a mount in the tree.
//! - The walk opens no device, FIFO or socket. It holds a descriptor of each inode before it reads the inode's status, and
//!   changes only the inode that it holds, even if the name refers to another inode by then.
//! - The walk needs four descriptors at any depth, and no recursion. It does not follow a directory that is moved out of the
//!   tree.
//! - Each walk ends, and the number of its repetitions is bounded.
//!
//! [`clone_tree`] reads the source in the same way, and writes to a tree that no other process can reach.
//!
//! The owner of a file may change its project id at any time (see [the crate](crate)). A tree that was tagged or found clean
//! may therefore differ a moment later. Use an image for tenants who must not be able to do this.

mod check;
mod clone;
mod flags;
mod foreign;
mod hard_links;
mod inode;
mod limit;
mod skipped;
mod tag;
mod target;
mod walk;
mod xattrs;

pub use check::{StrayInode, TreeCheck, check_tree};
pub(crate) use clone::try_clone_tree;
pub use clone::{CloneReport, clone_tree};
pub(crate) use foreign::{ForeignInodes, find_foreign};
pub use limit::{LIMITED_DIRECTORIES, limit_directory, unlimit_directory};
pub use skipped::{SkipReason, Skipped, SkippedEntry};
pub use tag::{HardLinks, TreeReport, clear_tree, tag_tree};

//! Whole directory trees: put an existing one into a project, find what has left it, and clone it into another.
//!
//! In XFS new files inherit the id of their directory, and existing files keep theirs. So a tree is tagged inode by inode, its
//! root first, and files that are created in the meantime inherit the id. The tree may be its owner's to change at the
//! same time, and its owner may be hostile:
//!
//! - Symbolic links are never followed, and what is mounted in the tree is never entered.
//! - No device, FIFO or socket is opened. Every inode is held before it is looked at, and what is changed is what
//!   was looked at, whatever stands under its name by then.
//! - The walk takes four descriptors at any depth, and no stack. It does not follow a directory that is moved out
//!   of the tree to what is there.
//! - Each walk ends, and how often it is repeated is bounded.
//!
//! [`clone_tree`] reads the source in the same way, and writes to a tree that no other process can reach.
//!
//! The owner of a file may change its project id at any time (see [the crate](crate)): a tree that was tagged, or
//! found clean, may be different a moment later. Those who must not be able to need an image.

mod audit;
mod clone;
mod flags;
mod foreign;
mod hard_links;
mod inode;
mod skipped;
mod tag;
mod target;
mod walk;
mod xattrs;

pub use audit::{StrayInode, TreeAudit, audit_tree, audit_tree_reporting};
pub use clone::{CloneReport, clone_tree, clone_tree_reporting};
pub(crate) use foreign::{ForeignInodes, find_foreign};
pub use skipped::{SkipReason, Skipped, SkippedEntry, SpecialFiles};
pub use tag::{HardLinks, TagOptions, TreeReport, clear_tree, tag_tree, tag_tree_reporting};

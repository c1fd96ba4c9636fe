//! Searching a tree for inodes that are charged to another project.

use std::collections::{BTreeMap, HashSet};
use std::os::fd::BorrowedFd;
use std::path::PathBuf;

use nix::errno::Errno;

use super::inode::Inode;
use super::walk::{EntryPath, REPORT_EVERY, Visitor, WalkOutcome, walk};
use crate::error::Result;
use crate::project_quota::ProjectId;

/// Inodes of one tree that have the same project id.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ForeignInodes {
    /// Number of names of these inodes. A file with two hard links counts twice.
    pub(crate) names: u64,
    /// The path of the first one, relative to the root of the tree, which is `.`.
    pub(crate) example: PathBuf,
}

/// The result of [`find_foreign`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ForeignSearch {
    /// Inodes with one of the ids that were searched for.
    pub(crate) known: BTreeMap<ProjectId, ForeignInodes>,
    /// Inodes with any other id, or with none.
    pub(crate) other: Option<ForeignInodes>,
    /// `true` if the walk saw the whole tree: no directory was moved in the meantime, and all entries could be read.
    pub(crate) complete: bool,
}

/// Searches the tree below `root` for inodes that have another project id than `own`. The search counts inodes per id only
/// for the ids in `known`, so an owner who sets very many ids cannot exhaust its memory. It calls `progress` every 1024
/// names and changes nothing. `root` may be an `O_PATH` descriptor.
///
/// # Errors
/// As [`check_tree`](super::check_tree).
pub(crate) fn find_foreign(
    root: BorrowedFd<'_>,
    own: ProjectId,
    known: &HashSet<ProjectId>,
    progress: &mut dyn FnMut(),
) -> Result<ForeignSearch> {
    let found = ForeignSearch { complete: true, ..ForeignSearch::default() };
    let mut searching = Searching { own: own.get(), known, progress, names: 0, found };
    let outcome = walk(root, &mut searching)?;
    searching.found.complete &= outcome == WalkOutcome::Stable;
    Ok(searching.found)
}

struct Searching<'a> {
    own: u32,
    known: &'a HashSet<ProjectId>,
    progress: &'a mut dyn FnMut(),
    names: u64,
    found: ForeignSearch,
}

impl Visitor for Searching<'_> {
    fn visit(&mut self, inode: &Inode<'_>, at: &EntryPath<'_>) -> Result<()> {
        self.names += 1;
        if self.names.is_multiple_of(REPORT_EVERY) {
            (self.progress)();
        }
        let id = match inode.project() {
            Ok(Some(project)) => project.id(),
            // Before Linux 6.17 no process can change the id of a special file or a symbolic link.
            Ok(None) => return Ok(()),
            Err(_) => {
                self.found.complete = false;
                return Ok(());
            }
        };
        if id == self.own {
            return Ok(());
        }
        let first = || ForeignInodes { names: 0, example: at.path() };
        let counted = match ProjectId::new(id).filter(|id| self.known.contains(id)) {
            Some(id) => self.found.known.entry(id).or_insert_with(first),
            None => self.found.other.get_or_insert_with(first),
        };
        counted.names += 1;
        Ok(())
    }

    fn unreadable(&mut self, errno: Errno, _: &EntryPath<'_>) -> Result<()> {
        self.found.complete &= errno == Errno::EXDEV;
        Ok(())
    }
}

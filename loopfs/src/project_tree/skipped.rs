//! Entries that a walk skips, because it cannot or must not process them.

use std::convert::Infallible;
use std::path::PathBuf;

use nix::errno::Errno;

use super::inode::{Inode, InodeProject};
use super::walk::EntryPath;
use crate::error::{Error, Result};
use crate::project_quota::{Interface, explain};

/// The reason why an entry of a tree was skipped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum SkipReason {
    /// The file has several hard links, and the caller chose [`HardLinks::Skip`](super::HardLinks::Skip).
    HardLink,
    /// The entry is a mount point.
    Mount,
    /// The kernel refused the operation with this errno.
    Refused(i32),
}

/// A skipped entry of a tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SkippedEntry {
    /// The path relative to the root of the tree, which is `.`. It can contain any bytes. In a long path,
    /// `...` is in place of the components between the first ones and the last one.
    pub path: PathBuf,
    /// The reason.
    pub reason: SkipReason,
}

/// The skipped entries of a tree, in the last pass through it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Skipped {
    /// Number of names of files with several hard links that are not in the project. Some of the links may be outside the
    /// tree.
    pub hard_links: u64,
    /// Number of symbolic links, sockets, FIFOs and devices whose project id can neither be read nor set. These are all of them
    /// before Linux 6.17, which introduced the calls, and those whose file system stores no id for them. If they were created in
    /// a tagged directory, they are nevertheless in its project.
    pub special_files: u64,
    /// Number of mount points. The walk visited neither the mounted tree nor the covered one.
    pub mounts: u64,
    /// Number of entries that the kernel refused to open, read or change. A directory counts once, together with its
    /// content. EPERM: the file belongs to another user and the caller lacks `CAP_FOWNER`. EACCES: the caller may not open
    /// the file and lacks `CAP_DAC_READ_SEARCH`. EAGAIN: the file has a lease (fcntl(2), before Linux 6.17).
    pub refused: u64,
    /// The first [`EXAMPLES`](Self::EXAMPLES) skipped entries, without the special files.
    pub examples: Vec<SkippedEntry>,
}

impl Skipped {
    /// The maximum number of examples.
    pub const EXAMPLES: usize = 16;

    /// Returns `true` if no entry was skipped.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.hard_links == 0 && self.special_files == 0 && self.mounts == 0 && self.refused == 0
    }

    /// Returns the project of an inode. Returns `None` after counting the inode as skipped, if its project cannot be read.
    ///
    /// # Errors
    /// As [`refused`](Self::refused()).
    pub(super) fn project_of(
        &mut self,
        inode: &Inode<'_>,
        at: &EntryPath<'_>,
    ) -> Result<Option<InodeProject>> {
        match inode.project() {
            Ok(Some(project)) => return Ok(Some(project)),
            Ok(None) => self.special_files += 1,
            Err(errno) => self.refused("read the project id of", errno, at)?,
        }
        Ok(None)
    }

    pub(super) fn hard_link(&mut self, at: &EntryPath<'_>) {
        self.hard_links += 1;
        self.example(at, SkipReason::HardLink);
    }

    /// Counts an entry that the walk could not open. EXDEV: it is a mount point.
    ///
    /// # Errors
    /// As [`refused`](Self::refused()).
    pub(super) fn unreadable(&mut self, errno: Errno, at: &EntryPath<'_>) -> Result<()> {
        if errno != Errno::EXDEV {
            return self.refused("open", errno, at);
        }
        self.mounts += 1;
        self.example(at, SkipReason::Mount);
        Ok(())
    }

    /// Counts an error that concerns only one inode. Any other error, and every error at the root, is returned and ends the
    /// walk.
    pub(super) fn refused(
        &mut self,
        operation: &'static str,
        errno: Errno,
        at: &EntryPath<'_>,
    ) -> Result<()> {
        if self.count_refused(errno, at) { Ok(()) } else { Err(failure(operation, errno, at)) }
    }

    /// Counts an error that concerns only one inode. Returns `false` for any other error, and for every error at the root.
    pub(super) fn count_refused(&mut self, errno: Errno, at: &EntryPath<'_>) -> bool {
        let counts = !at.is_root() && concerns_one_inode(errno);
        if counts {
            self.refused += 1;
            self.example(at, SkipReason::Refused(errno as i32));
        }
        counts
    }

    fn example(&mut self, at: &EntryPath<'_>, reason: SkipReason) {
        if self.examples.len() < Self::EXAMPLES {
            self.examples.push(SkippedEntry { path: at.path(), reason });
        }
    }
}

fn failure(operation: &'static str, errno: Errno, at: &EntryPath<'_>) -> Error {
    let object = format!("{:?} of a directory tree", at.path());
    let Err(error) = explain::<Infallible>(Err(errno), Interface::Attributes, operation, object);
    error
}

fn concerns_one_inode(errno: Errno) -> bool {
    matches!(
        errno,
        Errno::EPERM
            | Errno::EACCES
            | Errno::EAGAIN
            | Errno::EBUSY
            | Errno::ETXTBSY
            | Errno::EINVAL
            | Errno::ENOTTY
            | Errno::EOPNOTSUPP
            | Errno::E2BIG
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_nonzero_count_is_not_empty() {
        assert!(Skipped::default().is_empty());
        for skipped in [
            Skipped { hard_links: 1, ..Skipped::default() },
            Skipped { special_files: 1, ..Skipped::default() },
            Skipped { mounts: 1, ..Skipped::default() },
            Skipped { refused: 1, ..Skipped::default() },
        ] {
            assert!(!skipped.is_empty(), "{skipped:?}");
        }
    }

    #[test]
    fn filesystem_errors_concern_no_single_inode() {
        for errno in [Errno::EROFS, Errno::EIO, Errno::ENOSPC, Errno::EUCLEAN, Errno::EMFILE, Errno::ENOMEM] {
            assert!(!concerns_one_inode(errno), "{errno}");
        }
        assert!(concerns_one_inode(Errno::EPERM));
    }
}

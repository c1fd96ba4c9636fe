//! Entries that a walk skips, because it cannot or must not process them.

use std::convert::Infallible;
use std::path::PathBuf;

use nix::errno::Errno;

use super::inode::Kind;
use super::walk::EntryPath;
use crate::error::{Error, Result};
use crate::project_quota::{Interface, explain};

/// Inodes that are neither directories nor regular files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SpecialFiles {
    /// Symbolic links.
    pub symlinks: u64,
    /// Sockets.
    pub sockets: u64,
    /// FIFOs.
    pub fifos: u64,
    /// Block and character devices, and an overlay's whiteouts, which are such.
    pub devices: u64,
}

impl SpecialFiles {
    /// Returns the sum.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.symlinks + self.sockets + self.fifos + self.devices
    }

    pub(super) fn count(&mut self, kind: Kind) {
        match kind {
            Kind::Symlink => self.symlinks += 1,
            Kind::Socket => self.sockets += 1,
            Kind::Fifo => self.fifos += 1,
            Kind::Device => self.devices += 1,
            Kind::Directory | Kind::File => {}
        }
    }
}

/// Why an entry of a tree was skipped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum SkipReason {
    /// The file has several hard links, by [`HardLinks::Skip`](super::HardLinks::Skip).
    HardLink,
    /// Something else is mounted there.
    Mount,
    /// The kernel refused it, with this errno.
    Refused(i32),
}

/// A skipped entry of a tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SkippedEntry {
    /// Relative to the root of the tree, which is `.`; any bytes, and as long as the tree is deep.
    pub path: PathBuf,
    /// Why it was skipped.
    pub reason: SkipReason,
}

/// The skipped entries of a tree, in the last pass through it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Skipped {
    /// Names of files with further names, which may lie outside the tree, that are not in the project.
    pub hard_links: u64,
    /// Special files whose project id can neither be read nor set: those whose file system does not keep one,
    /// and all of them before Linux 6.17, which has no call for it. Made in a tagged directory they are in its
    /// project all the same.
    pub special_files: SpecialFiles,
    /// Mount points; neither what is mounted nor what it covers was visited.
    pub mounts: u64,
    /// What the kernel refused to open, read or change: a directory counts once, with all that is in it. EPERM is
    /// a file of somebody else's without `CAP_FOWNER`, EACCES one that may not be opened without
    /// `CAP_DAC_READ_SEARCH`, EAGAIN one with a lease on it (fcntl(2), before Linux 6.17).
    pub refused: u64,
    /// The first [`EXAMPLES`](Self::EXAMPLES) of all but the special files.
    pub examples: Vec<SkippedEntry>,
}

impl Skipped {
    /// How many examples are kept.
    pub const EXAMPLES: usize = 16;

    /// Returns `true` if no entry was skipped.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.hard_links == 0 && self.special_files.total() == 0 && self.mounts == 0 && self.refused == 0
    }

    pub(super) fn special(&mut self, kind: Kind) {
        self.special_files.count(kind);
    }

    pub(super) fn hard_link(&mut self, at: &EntryPath<'_>) {
        self.hard_links += 1;
        self.example(at, SkipReason::HardLink);
    }

    pub(super) fn mount(&mut self, at: &EntryPath<'_>) {
        self.mounts += 1;
        self.example(at, SkipReason::Mount);
    }

    /// Counts what concerns one inode alone; anything else, and whatever befalls the root, ends the walk.
    pub(super) fn refused(
        &mut self,
        operation: &'static str,
        errno: Errno,
        at: &EntryPath<'_>,
    ) -> Result<()> {
        if self.count_refused(errno, at) { Ok(()) } else { Err(failure(operation, errno, at)) }
    }

    /// Counts what concerns one inode alone; false where it does not, or befell the root.
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
    fn nothing_left_out_is_nothing_of_any_sort() {
        assert!(Skipped::default().is_empty());
        let one = SpecialFiles { fifos: 1, ..SpecialFiles::default() };
        for skipped in [
            Skipped { hard_links: 1, ..Skipped::default() },
            Skipped { special_files: one, ..Skipped::default() },
            Skipped { mounts: 1, ..Skipped::default() },
            Skipped { refused: 1, ..Skipped::default() },
        ] {
            assert!(!skipped.is_empty(), "{skipped:?}");
        }
    }

    #[test]
    fn special_files_are_counted_by_their_sort() {
        let mut counted = SpecialFiles::default();
        for kind in [Kind::Symlink, Kind::Socket, Kind::Fifo, Kind::Device, Kind::File, Kind::Directory] {
            counted.count(kind);
        }
        assert_eq!(counted, SpecialFiles { symlinks: 1, sockets: 1, fifos: 1, devices: 1 });
        assert_eq!(counted.total(), 4);
    }

    #[test]
    fn what_befalls_the_file_system_is_no_matter_of_one_inode() {
        for errno in [Errno::EROFS, Errno::EIO, Errno::ENOSPC, Errno::EUCLEAN, Errno::EMFILE, Errno::ENOMEM] {
            assert!(!concerns_one_inode(errno), "{errno}");
        }
        assert!(concerns_one_inode(Errno::EPERM));
    }
}

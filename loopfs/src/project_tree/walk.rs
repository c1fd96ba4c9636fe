//! The walk: every inode of a tree, also while its owner moves its directories.
//!
//! It holds the directory it is in, and remembers of those above their names, their identity and how far their
//! lists were read. So the depth of a tree costs memory (for each level its name, and no more names out of its
//! list than one getdents64(2) answers) and no descriptor. On the way up `..` is believed only if it is the
//! directory that it went down from; if not, the tree is entered again from its root, and what is not found there
//! any more is left.
//!
//! `docs/decisions/0015-trees-of-tenants.md` gives the reasons.

use std::ffi::{CStr, CString, OsStr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::sys::stat::fstat;
use nix::unistd::{Whence, lseek};

use super::inode::{Attributes, Identity, Inode, Kind, open_directory, open_entry, open_parent};
use crate::error::{Error, Result};
use crate::sys::getdents;
use crate::sys::xfs;

/// Names between two reports of progress.
pub(super) const REPORT_EVERY: u64 = 1024;

/// Added to the number of directories that a file system of this size can have, for those that are created during the walk.
const SLACK: u64 = 1 << 16;
/// The most times that a pass enters the tree again after a concurrent move. Then the walk ends as raced.
const MOST_RETURNS: u32 = 1000;

/// Processes the inodes of a tree. An error ends the walk.
pub(super) trait Visitor {
    /// Processes an inode of the tree: the root first, and every directory before its entries.
    fn visit(&mut self, inode: &Inode<'_>, at: &EntryPath<'_>) -> Result<()>;
    /// Another mount, or a file or directory that another one covers: not entered.
    fn mount(&mut self, at: &EntryPath<'_>) -> Result<()>;
    /// An entry that could not be looked at, or a directory not listed.
    fn unreadable(&mut self, errno: Errno, at: &EntryPath<'_>) -> Result<()>;
    /// The end of a directory that was visited, the root last: all that was found in it has been visited. Not
    /// called for directories that the walk is in when it ends before its time.
    fn left(&mut self, _at: &EntryPath<'_>) -> Result<()> {
        Ok(())
    }
}

/// Where in the tree the walk is.
pub(super) struct EntryPath<'a> {
    above: &'a [Level],
    name: Option<&'a CString>,
}

impl EntryPath<'_> {
    /// Relative to the root, which is `.`.
    pub(super) fn path(&self) -> PathBuf {
        let names = self.above.iter().skip(1).map(|level| &level.name).chain(self.name);
        let path: PathBuf = names.map(|name| OsStr::from_bytes(name.as_bytes())).collect();
        if path.as_os_str().is_empty() { PathBuf::from(".") } else { path }
    }

    /// The last part of the path; None for the root.
    pub(super) fn name(&self) -> Option<&CStr> {
        self.name.map(CString::as_c_str)
    }

    pub(super) fn is_root(&self) -> bool {
        self.name.is_none() && self.above.len() <= 1
    }
}

/// A directory that the walk is in, or below.
struct Level {
    name: CString,
    identity: Identity,
    /// The position in its list of entries.
    next: i64,
    /// Names read and not yet visited.
    names: std::vec::IntoIter<getdents::Entry>,
    listed: u64,
}

impl Level {
    fn new(name: CString, directory: &OwnedFd) -> std::result::Result<Self, Errno> {
        let identity = Identity::of(directory)?;
        Ok(Self { name, identity, next: 0, names: Vec::new().into_iter(), listed: 0 })
    }

    /// The next name; None at the end.
    fn next_name(&mut self, directory: &OwnedFd) -> std::result::Result<Option<CString>, Errno> {
        loop {
            if let Some(entry) = self.names.next() {
                if matches!(entry.name.as_bytes(), b"." | b"..") {
                    continue;
                }
                self.listed += 1;
                return Ok(Some(entry.name));
            }
            let names = match getdents::read(directory) {
                Ok(names) => names,
                // It was removed.
                Err(Errno::ENOENT) => Vec::new(),
                Err(errno) => return Err(errno),
            };
            let Some(last) = names.last() else { return Ok(None) };
            self.next = last.next;
            self.names = names.into_iter();
        }
    }

    /// Returns `true` if more names were listed than a directory of this size can have: each takes at least one byte.
    /// Then names are moved ahead of the walk.
    fn is_endless(&self, directory: &OwnedFd) -> std::result::Result<bool, Errno> {
        Ok(self.listed > SLACK
            && self.listed.is_multiple_of(SLACK)
            && self.listed > fstat(directory)?.st_size as u64 + SLACK)
    }
}

/// How a pass through the tree went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WalkOutcome {
    /// Every directory was where it was found.
    Stable,
    /// Directories were moved while the walk was in them: parts may not have been seen.
    Raced,
}

/// Walks once through the tree below `root`, a directory.
pub(super) fn walk(root: BorrowedFd<'_>, visitor: &mut dyn Visitor) -> Result<WalkOutcome> {
    let failed = |errno| {
        let error = Error::sys("walk", "the root of a directory tree", errno);
        match errno {
            Errno::EACCES => error.explain("it must be readable, or the caller have CAP_DAC_READ_SEARCH"),
            Errno::ENOTDIR => error.explain("it must be a directory"),
            _ => error,
        }
    };
    let attributes = Attributes::new()?;
    let here = open_directory(root, c".").map_err(failed)?;
    let levels = vec![Level::new(c".".to_owned(), &here).map_err(failed)?];
    visitor.visit(&Inode::directory(&here), &EntryPath { above: &levels, name: None })?;
    let mut walk =
        Walk { root, here, levels, outcome: WalkOutcome::Stable, directories: Bound::new(), returns: 0 };
    while !walk.levels.is_empty() {
        if walk.has_no_end() {
            return Ok(WalkOutcome::Raced);
        }
        match walk.next_name(visitor)? {
            Some(name) => walk.enter(&attributes, name, visitor)?,
            None => walk.leave(visitor)?,
        }
    }
    Ok(walk.outcome)
}

struct Walk<'a> {
    root: BorrowedFd<'a>,
    /// The directory of the last level.
    here: OwnedFd,
    levels: Vec<Level>,
    outcome: WalkOutcome,
    directories: Bound,
    returns: u32,
}

impl Walk<'_> {
    fn next_name(&mut self, visitor: &mut dyn Visitor) -> Result<Option<CString>> {
        let Some(level) = self.levels.last_mut() else { return Ok(None) };
        match level.is_endless(&self.here) {
            Ok(true) => self.outcome = WalkOutcome::Raced,
            Ok(false) => match level.next_name(&self.here) {
                Ok(name) => return Ok(name),
                Err(errno) => {
                    visitor.unreadable(errno, &EntryPath { above: &self.levels, name: None })?;
                }
            },
            Err(errno) => visitor.unreadable(errno, &EntryPath { above: &self.levels, name: None })?,
        }
        Ok(None)
    }

    fn enter(&mut self, attributes: &Attributes, name: CString, visitor: &mut dyn Visitor) -> Result<()> {
        let entry = EntryPath { above: &self.levels, name: Some(&name) };
        let opened = open_entry(self.here.as_fd(), &name, OFlag::O_PATH)
            .and_then(|held| fstat(&held).map(|status| (held, status)));
        let (held, status) = match opened {
            Ok(opened) => opened,
            // The entry was removed in the meantime.
            Err(Errno::ENOENT) => return Ok(()),
            Err(Errno::EXDEV) => return visitor.mount(&entry),
            Err(errno) => return visitor.unreadable(errno, &entry),
        };
        if Kind::of(status.st_mode) != Kind::Directory {
            return match Inode::other(attributes, &held, &status) {
                Ok(inode) => visitor.visit(&inode, &entry),
                Err(errno) => visitor.unreadable(errno, &entry),
            };
        }
        let opened = open_directory(held.as_fd(), c".")
            .and_then(|directory| Level::new(name.clone(), &directory).map(|level| (directory, level)));
        match opened {
            Ok((directory, level)) => {
                visitor.visit(&Inode::directory(&directory), &entry)?;
                self.here = directory;
                self.levels.push(level);
                self.directories.count += 1;
                Ok(())
            }
            // Removed since it was looked at.
            Err(Errno::ENOENT) => Ok(()),
            Err(errno) => visitor.unreadable(errno, &entry),
        }
    }

    /// Back into the directory above, when the list of this one is at its end.
    fn leave(&mut self, visitor: &mut dyn Visitor) -> Result<()> {
        self.pop(visitor)?;
        let Some(level) = self.levels.last() else { return Ok(()) };
        self.here = match open_parent(&self.here) {
            Ok(parent) if Identity::of(&parent) == Ok(level.identity) => parent,
            _ => self.return_from_root(visitor)?,
        };
        let Some(level) = self.levels.last() else { return Ok(()) };
        // The directories have been read before: an error of this call would be one of the program.
        lseek(&self.here, level.next, Whence::SeekSet)
            .map(drop)
            .map_err(|errno| Error::sys("walk", format!("{:?}", self.path()), errno))
    }

    fn pop(&mut self, visitor: &mut dyn Visitor) -> Result<()> {
        visitor.left(&EntryPath { above: &self.levels, name: None })?;
        self.levels.pop();
        Ok(())
    }

    /// Descends from the root as long as the levels are unchanged, and drops the others.
    fn return_from_root(&mut self, visitor: &mut dyn Visitor) -> Result<OwnedFd> {
        self.returns += 1;
        let mut here = open_directory(self.root, c".")
            .map_err(|errno| Error::sys("walk", "the root of a directory tree", errno))?;
        for depth in 1..self.levels.len() {
            let level = &self.levels[depth];
            match open_directory(here.as_fd(), &level.name) {
                Ok(next) if Identity::of(&next) == Ok(level.identity) => here = next,
                _ => {
                    while self.levels.len() > depth {
                        self.pop(visitor)?;
                    }
                    self.outcome = WalkOutcome::Raced;
                    break;
                }
            }
        }
        Ok(here)
    }

    /// Checks the number of directories. A directory has one name, so a walk that meets more directories than the file system has
    /// inodes meets some of them again.
    fn has_no_end(&mut self) -> bool {
        self.returns > MOST_RETURNS || self.directories.is_exceeded(|| inodes_in_use(self.root))
    }

    fn path(&self) -> PathBuf {
        EntryPath { above: &self.levels, name: None }.path()
    }
}

/// A count and its bound. The bound is read again only when the count comes near it.
struct Bound {
    count: u64,
    most: u64,
}

impl Bound {
    fn new() -> Self {
        Self { count: 0, most: SLACK }
    }

    fn is_exceeded(&mut self, most: impl FnOnce() -> u64) -> bool {
        if self.count > self.most {
            self.most = most().saturating_add(SLACK);
        }
        self.count > self.most
    }
}

/// Of the whole file system: statfs(2) of a directory in a project shows the project. No bound where the file
/// system does not tell.
fn inodes_in_use(root: BorrowedFd<'_>) -> u64 {
    let Ok(directory) = open_directory(root, c".") else { return u64::MAX };
    xfs::counts(&directory).map_or(u64::MAX, |counts| counts.allocated_inodes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bound_is_looked_up_again_before_it_is_enforced() {
        let mut bound = Bound::new();
        bound.count = SLACK;
        assert!(!bound.is_exceeded(|| unreachable!("it is not near")));
        bound.count = SLACK + 1;
        assert!(!bound.is_exceeded(|| 1));
        bound.count = SLACK + 2;
        assert!(!bound.is_exceeded(|| 2), "there are more by now");
        bound.count = SLACK + 3;
        assert!(bound.is_exceeded(|| 2));
        assert!(!bound.is_exceeded(|| u64::MAX));
    }
}

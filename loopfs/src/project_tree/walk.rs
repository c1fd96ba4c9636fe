//! The walk visits every inode of a tree, even while the owner of the tree moves directories.
//!
//! The walk holds a descriptor only of the current directory. For each directory above, it stores the name, the identity and
//! the position in the list of entries. The depth of a tree therefore costs memory for its names but no descriptors. The levels
//! above also keep the names that they have read and not visited, up to a number for all of them together; the others read them
//! again. On the way up, the walk uses `..` only if it is the directory from
//! which it descended. Otherwise it descends again from the root, and drops the levels that it no longer finds there.
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

use super::inode::{
    AttributeAccess, DirectoryIdentity, Inode, InodeKind, open_directory, open_entry, open_parent,
};
use crate::error::{Error, Result};
use crate::sys::{getdents, xfs};

/// Number of names between two progress reports.
pub(super) const REPORT_EVERY: u64 = 1024;

/// Added to the number of directories that a file system of this size can have, for those that are created during the walk.
const SLACK: u64 = 1 << 16;
/// The most times that a pass enters the tree again after a concurrent move. Then the walk ends as raced.
const MAX_RETURNS: u32 = 1000;

/// The most names that the levels above keep. Each takes about 64 bytes.
const MOST_NAMES: usize = if cfg!(test) { 50 } else { 1 << 14 };
/// The longest path in a report. The owner of a tree can make paths of any length.
const MOST_PATH: usize = 512;

/// Processes the inodes of a tree. An error ends the walk.
pub(super) trait Visitor {
    /// Processes an inode of the tree: the root first, and every directory before its entries.
    fn visit(&mut self, inode: &Inode<'_>, at: &EntryPath<'_>) -> Result<()>;
    /// Processes an entry that could not be opened, or a directory that could not be listed. EXDEV: the entry is a mount point,
    /// a directory or file that a mount covers. The walk does not enter it.
    fn unreadable(&mut self, errno: Errno, at: &EntryPath<'_>) -> Result<()>;
    /// Processes the end of a directory, after all its entries were visited; the root comes last. If the walk ends early, it
    /// does not call this for the directories on its path.
    fn left(&mut self, _at: &EntryPath<'_>) -> Result<()> {
        Ok(())
    }
}

/// The path of an entry of the tree.
pub(super) struct EntryPath<'a> {
    above: &'a [Level],
    name: Option<&'a CString>,
}

impl EntryPath<'_> {
    /// Returns the path relative to the root, which is `.`, for a report. In a long path, `...` is in place of the components
    /// between the first ones and the last one.
    pub(super) fn path(&self) -> PathBuf {
        let names = self.above.iter().skip(1).map(|level| &level.name).chain(self.name);
        let mut path = PathBuf::new();
        for name in names.clone() {
            if path.as_os_str().len() + name.as_bytes().len() > MOST_PATH {
                path.push("...");
                path.extend(names.last().map(|name| OsStr::from_bytes(name.as_bytes())));
                break;
            }
            path.push(OsStr::from_bytes(name.as_bytes()));
        }
        if path.as_os_str().is_empty() { PathBuf::from(".") } else { path }
    }

    /// Returns the last component of the path, or `None` for the root.
    pub(super) fn name(&self) -> Option<&CStr> {
        self.name.map(CString::as_c_str)
    }

    pub(super) fn is_root(&self) -> bool {
        self.name.is_none() && self.above.len() <= 1
    }
}

/// A directory on the path of the walk.
struct Level {
    name: CString,
    identity: DirectoryIdentity,
    /// The position in its list of entries after the last visited one.
    visited: i64,
    /// The position after the last one that was read.
    read: i64,
    /// Names that were read but not visited yet.
    names: std::vec::IntoIter<getdents::DirectoryEntry>,
    listed: u64,
}

impl Level {
    fn new(name: CString, directory: &OwnedFd) -> std::result::Result<Self, Errno> {
        let identity = DirectoryIdentity::of(directory)?;
        Ok(Self { name, identity, visited: 0, read: 0, names: Vec::new().into_iter(), listed: 0 })
    }

    /// Returns the next name, or `None` at the end of the list.
    fn next_name(&mut self, directory: &OwnedFd) -> std::result::Result<Option<CString>, Errno> {
        loop {
            if let Some(entry) = self.names.next() {
                self.visited = entry.next;
                if matches!(entry.name.as_bytes(), b"." | b"..") {
                    continue;
                }
                self.listed += 1;
                return Ok(Some(entry.name));
            }
            let names = match getdents::read(directory) {
                Ok(names) => names,
                // The directory was removed.
                Err(Errno::ENOENT) => Vec::new(),
                Err(errno) => return Err(errno),
            };
            let Some(last) = names.last() else { return Ok(None) };
            self.read = last.next;
            self.names = names.into_iter();
        }
    }

    /// Forgets the names that were not visited. The next one is read again.
    fn forget_names(&mut self) {
        self.names = Vec::new().into_iter();
        self.read = self.visited;
    }

    /// Returns `true` if the walk listed more names than a directory of this size can have, because each name takes at least one
    /// byte. Another process then keeps moving names ahead of the walk.
    fn is_endless(&self, directory: &OwnedFd) -> std::result::Result<bool, Errno> {
        Ok(self.listed > SLACK
            && self.listed.is_multiple_of(SLACK)
            && self.listed > fstat(directory)?.st_size as u64 + SLACK)
    }
}

/// The outcome of a pass through the tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WalkOutcome {
    /// No directory was moved while the walk was in it.
    Stable,
    /// Directories were moved while the walk was in them, so it may have missed parts of the tree.
    Raced,
}

/// Walks once through the tree below `root`, a directory.
pub(super) fn walk(root: BorrowedFd<'_>, visitor: &mut dyn Visitor) -> Result<WalkOutcome> {
    let failed = |errno| {
        let error = Error::sys("walk", "the root of a directory tree", errno);
        match errno {
            Errno::EACCES => error.with_remedy("it must be readable, or the caller have CAP_DAC_READ_SEARCH"),
            Errno::ENOTDIR => error.with_remedy("it must be a directory"),
            _ => error,
        }
    };
    let attributes = AttributeAccess::new()?;
    let here = open_directory(root, c".").map_err(failed)?;
    let levels = vec![Level::new(c".".to_owned(), &here).map_err(failed)?];
    visitor.visit(&Inode::directory(&here), &EntryPath { above: &levels, name: None })?;
    let mut walk = Walk {
        root,
        here,
        levels,
        outcome: WalkOutcome::Stable,
        directories: BoundedCount::new(),
        returns: 0,
        kept: 0,
        without: 0,
    };
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
    directories: BoundedCount,
    returns: u32,
    /// Number of names that the levels above the last one keep.
    kept: usize,
    /// Number of levels from the root on that keep no names.
    without: usize,
}

impl Walk<'_> {
    fn next_name(&mut self, visitor: &mut dyn Visitor) -> Result<Option<CString>> {
        let Some(level) = self.levels.last_mut() else { return Ok(None) };
        let next = match level.is_endless(&self.here) {
            Ok(true) => {
                self.outcome = WalkOutcome::Raced;
                Ok(None)
            }
            Ok(false) => level.next_name(&self.here),
            Err(errno) => Err(errno),
        };
        next.or_else(|errno| {
            visitor.unreadable(errno, &EntryPath { above: &self.levels, name: None }).map(|()| None)
        })
    }

    fn enter(
        &mut self,
        attributes: &AttributeAccess,
        name: CString,
        visitor: &mut dyn Visitor,
    ) -> Result<()> {
        let entry = EntryPath { above: &self.levels, name: Some(&name) };
        let opened = open_entry(self.here.as_fd(), &name, OFlag::O_PATH)
            .and_then(|held| fstat(&held).map(|status| (held, status)));
        let (held, status) = match opened {
            Ok(opened) => opened,
            // The entry was removed in the meantime.
            Err(Errno::ENOENT) => return Ok(()),
            Err(errno) => return visitor.unreadable(errno, &entry),
        };
        if InodeKind::of(status.st_mode) != InodeKind::Directory {
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
                self.keep_names();
                self.levels.push(level);
                self.directories.count += 1;
                Ok(())
            }
            // The directory was removed after its status was read.
            Err(Errno::ENOENT) => Ok(()),
            Err(errno) => visitor.unreadable(errno, &entry),
        }
    }

    /// Counts the names that the last level keeps while the walk is below it, and forgets those of the first levels if there
    /// are too many: they are needed last.
    fn keep_names(&mut self) {
        self.kept += self.levels.last().map_or(0, |level| level.names.len());
        while self.kept > MOST_NAMES {
            let Some(level) = self.levels.get_mut(self.without) else { break };
            self.kept -= level.names.len();
            level.forget_names();
            self.without += 1;
        }
    }

    /// Returns to the parent directory at the end of the list of entries.
    fn leave(&mut self, visitor: &mut dyn Visitor) -> Result<()> {
        self.pop(visitor)?;
        let Some(level) = self.levels.last() else { return Ok(()) };
        self.here = match open_parent(&self.here) {
            Ok(parent) if DirectoryIdentity::of(&parent) == Ok(level.identity) => parent,
            _ => self.return_from_root(visitor)?,
        };
        let Some(level) = self.levels.last() else { return Ok(()) };
        // The position came from an earlier read of this directory, so an error here is a defect of this program.
        lseek(&self.here, level.read, Whence::SeekSet)
            .map(drop)
            .map_err(|errno| Error::sys("walk", format!("{:?}", self.path()), errno))
    }

    fn pop(&mut self, visitor: &mut dyn Visitor) -> Result<()> {
        visitor.left(&EntryPath { above: &self.levels, name: None })?;
        self.levels.pop();
        if let Some(level) = self.levels.last() {
            self.kept -= level.names.len();
            self.without = self.without.min(self.levels.len() - 1);
        }
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
                Ok(next) if DirectoryIdentity::of(&next) == Ok(level.identity) => here = next,
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

    /// Returns `true` if the walk would not end. A directory has one name. If the walk visits more directories than the file
    /// system has inodes, it visits some of them repeatedly.
    fn has_no_end(&mut self) -> bool {
        self.returns > MAX_RETURNS || self.directories.is_exceeded(|| inodes_in_use(self.root))
    }

    fn path(&self) -> PathBuf {
        EntryPath { above: &self.levels, name: None }.path()
    }
}

/// A count and its upper bound. The bound is read again only when the count exceeds it.
struct BoundedCount {
    count: u64,
    most: u64,
}

impl BoundedCount {
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

/// Returns the number of allocated inodes of the whole file system. statfs(2) cannot be used, because for a directory in a
/// project it returns the counts of the project. Returns `u64::MAX`, no bound, if the file system does not report the number.
fn inodes_in_use(root: BorrowedFd<'_>) -> u64 {
    let Ok(directory) = open_directory(root, c".") else { return u64::MAX };
    xfs::counts(&directory).map_or(u64::MAX, |counts| counts.allocated_inodes)
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};

    use super::*;

    #[derive(Default)]
    struct Counting {
        names: usize,
        longest: usize,
    }

    impl Visitor for Counting {
        fn visit(&mut self, _: &Inode<'_>, at: &EntryPath<'_>) -> Result<()> {
            self.names += 1;
            self.longest = self.longest.max(at.path().as_os_str().len());
            Ok(())
        }

        fn unreadable(&mut self, errno: Errno, at: &EntryPath<'_>) -> Result<()> {
            panic!("{:?}: {errno}", at.path())
        }
    }

    #[test]
    fn wide_and_deep_trees_are_bounded() {
        const LEVELS: usize = 30;
        const FILES: usize = 20;
        let tree = tempfile::tempdir().unwrap();
        let mut here = tree.path().to_owned();
        for _ in 0..LEVELS {
            for file in 0..FILES {
                File::create(here.join(format!("{file:0100}"))).unwrap();
            }
            here.push("d".repeat(100));
            fs::create_dir(&here).unwrap();
        }
        let mut counting = Counting::default();
        let outcome = walk(File::open(tree.path()).unwrap().as_fd(), &mut counting).unwrap();
        assert_eq!((outcome, counting.names), (WalkOutcome::Stable, 1 + LEVELS * (FILES + 1)));
        assert!((MOST_PATH..MOST_PATH + 200).contains(&counting.longest), "{}", counting.longest);
    }

    #[test]
    fn an_exceeded_bound_is_read_again() {
        let mut bound = BoundedCount::new();
        bound.count = SLACK;
        assert!(!bound.is_exceeded(|| unreachable!("the count does not exceed the bound")));
        bound.count = SLACK + 1;
        assert!(!bound.is_exceeded(|| 1));
        bound.count = SLACK + 2;
        assert!(!bound.is_exceeded(|| 2), "the bound has grown in the meantime");
        bound.count = SLACK + 3;
        assert!(bound.is_exceeded(|| 2));
        assert!(!bound.is_exceeded(|| u64::MAX));
    }
}

//! A tree copied with its files' blocks shared.

use std::os::fd::BorrowedFd;

use nix::errno::Errno;
use nix::sys::stat::{FileStat, fstat};

use super::flags::{FREEZING, Flags};
use super::hard_links::HardLinks;
use super::inode::{Inode, Kind};
use super::skipped::{Skipped, SpecialFiles};
use super::target::{OpContext, OpError, SHARE, Target};
use super::walk::{EntryPath, REPORT_EVERY, Visitor, WalkOutcome, walk};
use crate::error::{Error, ErrorKind, Result};
use crate::sys::file_handle;

/// What a clone of a tree holds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CloneReport {
    /// Names visited in the source, the root among them. A file with two names counts twice.
    pub names: u64,
    /// Directories created, and the root.
    pub directories: u64,
    /// Regular files created.
    pub files: u64,
    /// Special files and symbolic links created.
    pub special_files: SpecialFiles,
    /// Additional hard links created.
    pub hard_links: u64,
    /// Entries that are not in the clone. [`Skipped::refused`](field@Skipped::refused) counts also directories, and files with several names, that are
    /// there and lack their times or flags.
    pub skipped: Skipped,
    /// Directories were moved, or names recreated, during the walk: parts of the source may be missing.
    pub disturbed: bool,
}

impl CloneReport {
    /// Whether all of the source that its file system has is in the clone. What is mounted in it never is, nor what
    /// a mount covers; [`skipped`](Self::skipped) tells.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.skipped.is_empty() && !self.disturbed
    }
}

/// Copies the tree below `source`, a directory, into `target`, an empty directory of the same file system, with the
/// blocks of its files shared until one of the two is written. `O_PATH` is enough for both.
///
/// # What the clone is
/// Directories, regular files, symbolic links, FIFOs, sockets and device nodes, with their hard links to each other,
/// owners, modes, access and modification times, extended attributes (`user`, `security` with capabilities, POSIX
/// ACLs, and `trusted` but for this crate's own, `trusted.loopfs.*`) and flags (ioctl_xfs_fsgetxattr(2): immutable,
/// append-only, no dump, extent size hints and the rest; those of special files from Linux 6.17 on). Holes stay
/// holes; post-EOF blocks are not copied. The root gets all this too, except that it is
/// neither immutable nor append-only, so that its caller can still move and mark it. Inode numbers, the time of
/// birth and of the last change are new.
///
/// All of it is in the project that `target` hands down, whatever projects its sources are in. Each file counts with
/// all its blocks against the limits of that project, as if they were not shared.
///
/// # A tree that is in use
/// Each file is what it was at one moment between two writes, and each at another: the tree is not one moment. A
/// program that keeps several files in step (a database and its log) must be stopped, or told to hold still, while
/// it lasts. The owner of the source may change it in any way meanwhile and nothing outside it is read; whether
/// that kept parts from being seen is in [`CloneReport::disturbed`]. The source is not changed, except that the
/// access times of its symbolic links move as whenever they are read.
///
/// `target` must be out of reach of everybody else until the call is over. After an error it holds a part, and is to
/// be removed.
///
/// # Durability
/// Nothing is. Call syncfs(2) on the file system before the clone gets a name that others rely on.
///
/// # Errors
/// ENOSPC or EDQUOT, as [`ErrorKind::NoSpace`]: the limit of the target's project, or the file system, leaves no
/// room. EOPNOTSUPP, as [`ErrorKind::Unsupported`]: the file system cannot share blocks. EXDEV, as
/// [`ErrorKind::InvalidInput`]: the two are on different file systems, or before Linux 5.18 on different mounts of
/// one. [`ErrorKind::InvalidInput`]: not directories, or the target lies in the source.
/// [`ErrorKind::AlreadyExists`]: the target is not empty. [`ErrorKind::Busy`]: directories were moved ahead of the
/// walk without end. EPERM or EACCES, as [`ErrorKind::PermissionDenied`]: at the root; elsewhere it is counted in
/// [`CloneReport::skipped`], as is EAGAIN, a file on which its owner has a lease (fcntl(2)), ETXTBSY, one that is
/// swapped to, and E2BIG, one whose attributes have more names than listxattr(2) can tell. ENOENT, as
/// [`ErrorKind::NotFound`]: no proc(5) on /proc.
///
/// It needs `CAP_CHOWN`, `CAP_DAC_OVERRIDE`, `CAP_DAC_READ_SEARCH` (hard links), `CAP_FOWNER`, `CAP_FSETID`,
/// `CAP_LINUX_IMMUTABLE`, `CAP_MKNOD`, `CAP_SETFCAP` and `CAP_SYS_ADMIN` (`trusted.*`), each only for trees that have
/// what it is for. Without `CAP_SYS_ADMIN` the attributes in `trusted.*` are not seen, and not counted either.
#[doc(alias = "FICLONE")]
#[doc(alias = "reflink")]
#[doc(alias = "cp -a --reflink=always")]
pub fn clone_tree(source: BorrowedFd<'_>, target: BorrowedFd<'_>) -> Result<CloneReport> {
    clone_tree_reporting(source, target, &mut |_| {})
}

/// [`clone_tree`], reporting how far it is every 1024 names.
///
/// # Errors
/// As [`clone_tree`].
pub fn clone_tree_reporting(
    source: BorrowedFd<'_>,
    target: BorrowedFd<'_>,
    progress: &mut dyn FnMut(&CloneReport),
) -> Result<CloneReport> {
    let mut cloning = Cloning {
        target: Target::open(target)?,
        hard_links: HardLinks::default(),
        skipped: 0,
        progress,
        report: CloneReport::default(),
    };
    let outcome = walk(source, &mut cloning)?;
    cloning.end(outcome)
}

struct Cloning<'a> {
    target: Target,
    hard_links: HardLinks,
    /// Directories that the walk is in and the clone is not: one that was left out, and those below it.
    skipped: u64,
    progress: &'a mut dyn FnMut(&CloneReport),
    report: CloneReport,
}

impl Cloning<'_> {
    fn end(mut self, outcome: WalkOutcome) -> Result<CloneReport> {
        if !self.target.is_finished() {
            let detail = "directories were moved ahead of the walk without end";
            return Err(Error::new(ErrorKind::Busy, "clone", "a directory tree", detail));
        }
        for made in self.hard_links.rest().filter(|made| !made.flags.are_none()) {
            self.target.freeze(&made.handle, made.flags).map_err(|refusal| {
                Error::sys(refusal.operation, "a file with further names", refusal.errno)
            })?;
        }
        self.report.disturbed |= outcome == WalkOutcome::Raced;
        Ok(self.report)
    }

    fn enter(&mut self, source: &Inode<'_>, status: &FileStat, at: &EntryPath<'_>) -> Result<(), OpError> {
        let flags = flags_of(source)?;
        match at.name() {
            Some(name) => self.target.enter_directory(name, source, status, flags)?,
            None => self.target.enter_root(source, status, flags)?,
        }
        self.report.directories += 1;
        Ok(())
    }

    fn make(&mut self, source: &Inode<'_>, status: &FileStat, at: &EntryPath<'_>) -> Result<(), OpError> {
        let Some(name) = at.name() else { return Ok(()) };
        if source.links < 2 {
            self.target.make(name, source, status, flags_of(source)?)?;
            self.count(source.kind);
            return Ok(());
        }
        let handle = file_handle::of(source.held).during("tell apart")?;
        if let Some(made) = self.hard_links.find(&handle) {
            self.target.link(name, made)?;
            self.report.hard_links += 1;
            return match self.hard_links.met(&handle) {
                Some(made) if !made.flags.are_none() => self.target.freeze(&made.handle, made.flags),
                _ => Ok(()),
            };
        }
        let flags = flags_of(source)?;
        let made = self.target.make(name, source, status, flags.without(FREEZING))?;
        let late = if flags.has_any(FREEZING) { flags } else { Flags::default() };
        let copy = file_handle::of(&made).during("tell apart the copy of")?;
        self.hard_links.remember(handle, source.links, copy, late);
        self.count(source.kind);
        Ok(())
    }

    fn count(&mut self, kind: Kind) {
        self.report.files += u64::from(kind == Kind::File);
        self.report.special_files.count(kind);
    }

    fn refused(&mut self, refusal: OpError, at: &EntryPath<'_>) -> Result<()> {
        let concerns_all = refusal.operation == SHARE && refusal.errno == Errno::EOPNOTSUPP;
        if !concerns_all && self.report.skipped.count_refused(refusal.errno, at) {
            return Ok(());
        }
        Err(failure(refusal, at))
    }
}

impl Visitor for Cloning<'_> {
    fn visit(&mut self, inode: &Inode<'_>, at: &EntryPath<'_>) -> Result<()> {
        let directory = inode.kind == Kind::Directory;
        if self.skipped > 0 {
            self.skipped += u64::from(directory);
            return Ok(());
        }
        self.report.names += 1;
        if self.report.names.is_multiple_of(REPORT_EVERY) {
            (self.progress)(&self.report);
        }
        let status =
            fstat(inode.held).map_err(|errno| failure(OpError { operation: "look at", errno }, at))?;
        if directory && !at.is_root() && self.is_target(&status) {
            let detail = "the directory to clone into lies in it";
            return Err(Error::new(ErrorKind::InvalidInput, "clone", "a directory tree", detail));
        }
        let done = if directory { self.enter(inode, &status, at) } else { self.make(inode, &status, at) };
        let Err(refusal) = done else { return Ok(()) };
        self.skipped += u64::from(directory);
        if refusal.errno == Errno::EEXIST {
            // The list of a directory that changes can have a name twice; one of the two is in the clone.
            self.report.disturbed = true;
            return Ok(());
        }
        self.refused(refusal, at)
    }

    fn mount(&mut self, at: &EntryPath<'_>) -> Result<()> {
        if self.skipped == 0 {
            self.report.skipped.mount(at);
        }
        Ok(())
    }

    fn unreadable(&mut self, errno: Errno, at: &EntryPath<'_>) -> Result<()> {
        if self.skipped > 0 { Ok(()) } else { self.refused(OpError { operation: "open", errno }, at) }
    }

    fn left(&mut self, at: &EntryPath<'_>) -> Result<()> {
        if self.skipped > 0 {
            self.skipped -= 1;
            return Ok(());
        }
        match self.target.leave_directory() {
            Ok(()) => Ok(()),
            Err(refusal) => self.refused(refusal, at),
        }
    }
}

impl Cloning<'_> {
    fn is_target(&self, status: &FileStat) -> bool {
        self.target
            .root_status()
            .is_ok_and(|target| (target.st_dev, target.st_ino) == (status.st_dev, status.st_ino))
    }
}

fn flags_of(source: &Inode<'_>) -> Result<Flags, OpError> {
    let project = source.project().during("read the flags of")?;
    Ok(project.map_or_else(Flags::default, |project| project.flags()))
}

fn failure(refusal: OpError, at: &EntryPath<'_>) -> Error {
    let error = Error::sys(refusal.operation, format!("{:?} of a directory tree", at.path()), refusal.errno);
    match refusal.errno {
        Errno::ENOSPC | Errno::EDQUOT => error.explain(
            "the limit of the clone's project, or the file system, leaves no room; what it shares counts in full \
             against its limit: raise that to what the source uses, or free space, and clone anew",
        ),
        Errno::EOPNOTSUPP if refusal.operation == SHARE => error.explain(
            "the file system cannot share blocks between files; clones need XFS made with \
             mkfs.xfs -m reflink=1 (the default since xfsprogs 5.1)",
        ),
        Errno::EXDEV => error.explain(
            "the clone must be on the file system of its source, and before Linux 5.18 reached through the same mount",
        ),
        Errno::EPERM | Errno::EACCES => {
            error.explain("the capabilities are needed that the documentation of clone_tree names")
        }
        _ => error,
    }
}

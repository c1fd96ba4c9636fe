//! Copying a tree with shared blocks (reflink).

use std::os::fd::AsFd;

use nix::errno::Errno;
use nix::sys::stat::{FileStat, fstat};

use super::flags::{FREEZING, Flags};
use super::hard_links::HardLinkRecords;
use super::inode::{Inode, InodeKind};
use super::skipped::Skipped;
use super::target::{OpContext, OpError, RECORD_LINKS, SHARE, TargetTree};
use super::walk::{EntryPath, REPORT_EVERY, Visitor, WalkOutcome, walk};
use crate::error::{Error, ErrorKind, Explanation, Result};
use crate::reflink::NO_REFLINK;
use crate::sys::file_handle;

/// The content of a clone of a tree.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CloneReport {
    /// Number of names visited in the source, including the root. A file with two hard links counts twice.
    pub names: u64,
    /// Number of directories created, plus the root.
    pub directories: u64,
    /// Number of regular files created.
    pub files: u64,
    /// Number of symbolic links, sockets, FIFOs and devices created.
    pub special_files: u64,
    /// Number of additional hard links created.
    pub hard_links: u64,
    /// Entries that are not in the clone. [`Skipped::refused`](field@Skipped::refused) also counts directories, and files with
    /// several hard links, that are in the clone but lack their times or flags.
    pub skipped: Skipped,
    /// `true` if directories were moved or names recreated during the walk. Parts of the source may then be missing.
    pub disturbed: bool,
}

impl CloneReport {
    /// Returns `true` if the clone contains the whole source. A clone never contains mounted trees or the trees that a mount
    /// covers; [`skipped`](Self::skipped) counts them.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.skipped.is_empty() && !self.disturbed
    }
}

/// Copies the tree below `source`, a directory, into `target`, an empty directory of the same file system. The files share
/// their blocks until one of the two copies is written. Both descriptors may be `O_PATH`. The function calls `progress` with
/// the incomplete report every 1024 names.
///
/// # Content of the clone
/// The clone contains directories, regular files, symbolic links, FIFOs, sockets and device nodes, with their hard links to
/// each other. It preserves owners, modes, access and modification times, extended attributes and flags. Extended attributes
/// are `user`, `security` with capabilities, POSIX ACLs, and `trusted` except this crate's own, `trusted.loopfs.*`. Flags
/// are those of ioctl_xfs_fsgetxattr(2), such as immutable, append-only, no dump and extent size hints. The flags of special
/// files are copied from Linux 6.17 on. Holes stay holes; post-EOF blocks are not copied. The root gets the same attributes,
/// but is neither immutable nor append-only, so that the caller can still move and mark it. Inode numbers, the time of birth
/// and the time of the last status change are new.
///
/// All inodes of the clone are in the project that `target` passes on, regardless of the projects of their sources. All
/// blocks of each file count against the limits of that project, as if they were not shared.
///
/// # A tree that is in use
/// Each file is copied as it was at one moment between two writes, but different files at different moments. The clone is
/// therefore not a consistent image of the tree. A program that keeps several files consistent, such as a database and its
/// log, must be stopped or paused during the call. The owner of the source may change it in any way concurrently, and the
/// call still reads nothing outside it. [`CloneReport::disturbed`] shows whether such changes may have hidden parts of the
/// source. The call does not change the source, except for the access times of its symbolic links, which every read updates.
///
/// No other process may reach `target` until the call returns. After an error `target` contains a part of the clone, and the
/// caller must remove it.
///
/// # Durability
/// The clone is not durable when the call returns. Call syncfs(2) on the file system before the clone gets its final name.
///
/// # Errors
/// ENOSPC or EDQUOT, as [`ErrorKind::NoSpace`]: the limit of the target's project is exceeded, or the file system is full.
/// EOPNOTSUPP, as [`ErrorKind::Unsupported`]: the file system cannot share blocks. EXDEV, as [`ErrorKind::InvalidInput`]:
/// the two are on different file systems, or before Linux 5.18 on different mounts of one.
/// [`ErrorKind::InvalidInput`]: one of the two is not a directory, or the target is inside the source.
/// [`ErrorKind::AlreadyExists`]: the target is not empty. [`ErrorKind::Busy`]: another process kept moving directories ahead
/// of the walk. EPERM or EACCES, as [`ErrorKind::PermissionDenied`]: the root is not accessible. ENOENT, as
/// [`ErrorKind::NotFound`]: proc(5) is not mounted on /proc.
///
/// Below the root, EPERM and EACCES are counted in [`CloneReport::skipped`]. The same applies to EAGAIN (the owner of the
/// file has a lease on it, fcntl(2)), ETXTBSY (the file is used as swap space), and E2BIG (the file has more attribute names
/// than listxattr(2) can return).
///
/// The call needs `CAP_CHOWN`, `CAP_DAC_OVERRIDE`, `CAP_DAC_READ_SEARCH` (hard links), `CAP_FOWNER`, `CAP_FSETID`,
/// `CAP_LINUX_IMMUTABLE`, `CAP_MKNOD`, `CAP_SETFCAP` and `CAP_SYS_ADMIN` (`trusted.*`), each only if the tree has entries
/// that require it. Without `CAP_SYS_ADMIN` the kernel does not list attributes in `trusted.*`, so they are not counted
/// either.
#[doc(alias = "FICLONE")]
#[doc(alias = "reflink")]
#[doc(alias = "cp -a --reflink=always")]
pub fn clone_tree(
    source: impl AsFd,
    target: impl AsFd,
    mut progress: impl FnMut(&CloneReport),
) -> Result<CloneReport> {
    try_clone_tree(source, target, |report| {
        progress(report);
        Ok(())
    })
}

/// As [`clone_tree`]. An error of `progress` ends the call.
pub(crate) fn try_clone_tree(
    source: impl AsFd,
    target: impl AsFd,
    progress: impl FnMut(&CloneReport) -> Result<()>,
) -> Result<CloneReport> {
    let mut cloning = Cloning {
        target: TargetTree::open(target.as_fd())?,
        hard_links: None,
        skipped: 0,
        progress,
        report: CloneReport::default(),
    };
    let outcome = walk(source.as_fd(), &mut cloning)?;
    cloning.end(outcome)
}

struct Cloning<P> {
    target: TargetTree,
    /// Created for the first file with several hard links.
    hard_links: Option<HardLinkRecords>,
    /// Number of skipped directories on the path of the walk: one that could not be cloned, and those below it.
    skipped: u64,
    progress: P,
    report: CloneReport,
}

impl<P: FnMut(&CloneReport) -> Result<()>> Cloning<P> {
    fn end(mut self, outcome: WalkOutcome) -> Result<CloneReport> {
        if !self.target.is_finished() {
            let detail = "another process kept moving directories ahead of the walk";
            return Err(Error::new(ErrorKind::Busy, "clone", "a directory tree", detail));
        }
        if let Some(hard_links) = self.hard_links.take() {
            hard_links.rest(|made| self.target.freeze(&made.handle, made.flags)).map_err(|refusal| {
                Error::sys(refusal.operation, "a file with several hard links", refusal.errno)
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
        let hard_links = match &mut self.hard_links {
            Some(hard_links) => hard_links,
            none => none.insert(HardLinkRecords::new(self.target.unnamed_file()?)),
        };
        if let Some(made) = hard_links.find(status.st_ino, &handle).during(RECORD_LINKS)? {
            self.target.link(name, &made.handle)?;
            self.report.hard_links += 1;
            let (copy, flags) = (made.handle.clone(), made.flags);
            let last = hard_links.met(status.st_ino, made).during(RECORD_LINKS)?;
            return if last && !flags.are_none() { self.target.freeze(&copy, flags) } else { Ok(()) };
        }
        let flags = flags_of(source)?;
        let made = self.target.make(name, source, status, flags.without(FREEZING))?;
        let late = if flags.has_any(FREEZING) { flags } else { Flags::default() };
        let copy = file_handle::of(&made).during("tell apart the copy of")?;
        let replaced =
            hard_links.remember(status.st_ino, handle, source.links, copy, late).during(RECORD_LINKS)?;
        self.count(source.kind);
        match replaced {
            Some(replaced) if !replaced.flags.are_none() => {
                self.target.freeze(&replaced.handle, replaced.flags)
            }
            _ => Ok(()),
        }
    }

    fn count(&mut self, kind: InodeKind) {
        match kind {
            InodeKind::File => self.report.files += 1,
            _ => self.report.special_files += 1,
        }
    }

    fn refused(&mut self, refusal: OpError, at: &EntryPath<'_>) -> Result<()> {
        let concerns_all = refusal.operation == SHARE && refusal.errno == Errno::EOPNOTSUPP;
        if !concerns_all && self.report.skipped.count_refused(refusal.errno, at) {
            return Ok(());
        }
        Err(failure(refusal, at))
    }
}

impl<P: FnMut(&CloneReport) -> Result<()>> Visitor for Cloning<P> {
    fn visit(&mut self, inode: &Inode<'_>, at: &EntryPath<'_>) -> Result<()> {
        let directory = inode.kind == InodeKind::Directory;
        if self.skipped > 0 {
            self.skipped += u64::from(directory);
            return Ok(());
        }
        self.report.names += 1;
        if self.report.names.is_multiple_of(REPORT_EVERY) {
            (self.progress)(&self.report)?;
        }
        let status = fstat(inode.held)
            .map_err(|errno| failure(OpError { operation: "read the status of", errno }, at))?;
        if directory && !at.is_root() && self.target.is_root(&status) {
            let detail = "the target directory is inside it";
            return Err(Error::new(ErrorKind::InvalidInput, "clone", "a directory tree", detail));
        }
        let done = if directory { self.enter(inode, &status, at) } else { self.make(inode, &status, at) };
        let Err(refusal) = done else { return Ok(()) };
        self.skipped += u64::from(directory);
        if refusal.errno == Errno::EEXIST {
            // The list of a changing directory can contain a name twice. The clone already contains one of the two entries.
            self.report.disturbed = true;
            return Ok(());
        }
        self.refused(refusal, at)
    }

    fn unreadable(&mut self, errno: Errno, at: &EntryPath<'_>) -> Result<()> {
        match errno {
            _ if self.skipped > 0 => Ok(()),
            Errno::EXDEV => self.report.skipped.unreadable(errno, at),
            _ => self.refused(OpError { operation: "open", errno }, at),
        }
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

fn flags_of(source: &Inode<'_>) -> Result<Flags, OpError> {
    let project = source.project().during("read the flags of")?;
    Ok(project.map_or_else(Flags::default, |project| project.flags()))
}

fn failure(refusal: OpError, at: &EntryPath<'_>) -> Error {
    let error = Error::sys(refusal.operation, format!("{:?} of a directory tree", at.path()), refusal.errno);
    match refusal.errno {
        Errno::ENOSPC | Errno::EDQUOT => error.explain(Explanation::of(
            "the limit of the clone's project or the free space of the file system is too small",
            "shared blocks count in full against the limit: raise the limit to the usage of the source, or free space, and \
             clone again",
        )),
        Errno::EOPNOTSUPP if refusal.operation == SHARE => error.explain(NO_REFLINK),
        Errno::EXDEV => error.with_remedy(
            "the clone must be on the file system of its source, and before Linux 5.18 reached through the same mount",
        ),
        Errno::EPERM | Errno::EACCES => {
            error.with_remedy("the caller needs the capabilities that the documentation of clone_tree lists")
        }
        _ => error,
    }
}

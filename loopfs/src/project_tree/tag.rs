//! Putting a tree into a project, and removing it from its project.

use std::os::fd::{AsFd, BorrowedFd};

use nix::errno::Errno;

use super::inode::{Inode, InodeKind, open_directory};
use super::skipped::Skipped;
use super::walk::{EntryPath, REPORT_EVERY, Visitor, WalkOutcome, walk};
use crate::error::{Context, Error, ErrorKind, Result};
use crate::project_quota::ProjectId;
use crate::sys::fsxattr;

/// How to treat a file that has several hard links, some of which may be outside the tree.
///
/// A file has one project id for all its names. If it is tagged, it is charged to the project under all of them. A user who
/// can link another tenant's file into the tree could therefore pull it into his own project. Linux allows such a link if
/// the user may write to the file, or if `fs.protected_hardlinks` is off. XFS allows no link and no rename from another
/// project into a tagged directory, so only links that exist before the tree is tagged matter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum HardLinks {
    /// Leave the file in its project and count it ([`Skipped::hard_links`]). Nothing outside the tree changes.
    #[default]
    Skip,
    /// Put the file into the project. This is for trees without hard links from outside.
    Tag,
}

/// The maximum number of passes through the tree until a pass finds nothing to change. A tree with anything to change needs at least 2.
const MOST_PASSES: u32 = 8;

/// The result of tagging a tree.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TreeReport {
    /// Number of passes through the tree.
    pub passes: u32,
    /// Number of inodes changed in all passes.
    pub changed: u64,
    /// Number of names visited in the last pass, including the root. A file with two hard links counts twice.
    pub names: u64,
    /// Number of directories among these names.
    pub directories: u64,
    /// The skipped entries, which are not in the project.
    pub skipped: Skipped,
}

/// Puts every inode of the tree below `root`, a directory, into a project. It also sets the project inheritance flag
/// (`FS_XFLAG_PROJINHERIT`) of each directory, so that new entries inherit the project. `root` may be an `O_PATH` descriptor.
///
/// The call repeats the pass until one finds nothing to change; that pass also verifies the ids. Other attributes stay
/// unchanged. [`TreeReport::skipped`] counts the entries that the call could not or was not to change, with their paths.
/// Limits do not block a caller with `CAP_FOWNER`, so tagging can take a project over its limit. During the call, the owner
/// of the tree can get EXDEV from rename(2) and link(2) between tagged parts and parts that are not tagged yet.
///
/// The function calls `progress` with the incomplete report every 1024 names and after each pass.
///
/// Symbolic links, sockets, FIFOs and devices are tagged from Linux 6.17 on (`file_setattr(2)`). proc(5) must be
/// mounted on /proc.
///
/// # Errors
/// [`ErrorKind::Busy`]: another process kept changing ids, or moving directories, through 8 passes. EROFS, as
/// [`ErrorKind::ReadOnly`]: the mount is read-only. EPERM, as [`ErrorKind::PermissionDenied`]: the caller neither owns the root
/// nor has `CAP_FOWNER`. EACCES, as [`ErrorKind::PermissionDenied`]: the caller may not read the root. EINVAL or EPERM, as [`ErrorKind::InUserNamespace`]:
/// project ids can be changed only in the initial user namespace. ENOTTY or EOPNOTSUPP, as [`ErrorKind::Unsupported`]: the
/// file system has no project ids. ENOTDIR, as [`ErrorKind::InvalidInput`]: `root` is not a directory. ENOENT, as
/// [`ErrorKind::NotFound`]: proc(5) is not mounted on /proc. After an error, the inodes that were tagged before stay tagged,
/// and the caller can repeat the call.
#[doc(alias = "xfs_quota project -s")]
#[doc(alias = "file_setattr")]
#[doc(alias = "FS_IOC_FSSETXATTR")]
pub fn tag_tree(
    root: impl AsFd,
    id: ProjectId,
    hard_links: HardLinks,
    progress: impl FnMut(&TreeReport),
) -> Result<TreeReport> {
    Tagging { id: id.get(), inherit: true, only: None, hard_links, progress, report: TreeReport::default() }
        .run(root.as_fd())
}

/// Removes the inodes of one project below `root` from it, under all their names: sets id 0, and clears the project inheritance flag of
/// each directory. The root comes last, so after a crash it still shows the project. `root` may be an `O_PATH` descriptor.
///
/// # Errors
/// As [`tag_tree`].
#[doc(alias = "xfs_quota project -C")]
pub fn clear_tree(root: impl AsFd, id: ProjectId) -> Result<TreeReport> {
    let root = root.as_fd();
    let report = Tagging {
        id: 0,
        inherit: false,
        only: Some(id.get()),
        hard_links: HardLinks::Tag,
        progress: |_: &TreeReport| {},
        report: TreeReport::default(),
    }
    .run(root)?;
    // The caller's descriptor may be `O_PATH`, which these ioctls refuse.
    open_directory(root, c".")
        .and_then(|root| match fsxattr::get(&root)? {
            other if other.fsx_projid != id.get() => Ok(()),
            read => fsxattr::set(&root, &fsxattr::fsxattr { fsx_projid: 0, ..read }),
        })
        .context("set the project id of", "the root of a directory tree")?;
    Ok(report)
}

struct Tagging<P> {
    id: u32,
    /// If it is set, only inodes with this id are changed, and the root keeps it.
    only: Option<u32>,
    inherit: bool,
    hard_links: HardLinks,
    progress: P,
    report: TreeReport,
}

impl<P: FnMut(&TreeReport)> Tagging<P> {
    fn run(mut self, root: BorrowedFd<'_>) -> Result<TreeReport> {
        while self.report.passes < MOST_PASSES {
            let changed = self.report.changed;
            self.report = TreeReport { passes: self.report.passes + 1, changed, ..TreeReport::default() };
            let outcome = walk(root, &mut self)?;
            (self.progress)(&self.report);
            if outcome == WalkOutcome::Stable && self.report.changed == changed {
                return Ok(self.report);
            }
        }
        let cause = format!("there was still something to change after {MOST_PASSES} passes");
        Err(Error::new(ErrorKind::Busy, "tag", "a directory tree", cause)
            .with_remedy("tag it again, or stop the program that changes it"))
    }
}

impl<P: FnMut(&TreeReport)> Visitor for Tagging<P> {
    fn visit(&mut self, inode: &Inode<'_>, at: &EntryPath<'_>) -> Result<()> {
        let directory = inode.kind == InodeKind::Directory;
        self.report.names += 1;
        self.report.directories += u64::from(directory);
        if self.report.names.is_multiple_of(REPORT_EVERY) {
            (self.progress)(&self.report);
        }
        let skipped = &mut self.report.skipped;
        let Some(project) = skipped.project_of(inode, at)? else { return Ok(()) };
        if self.only.is_some_and(|only| only != project.id()) {
            return Ok(());
        }
        let id = self.only.filter(|_| at.is_root()).unwrap_or(self.id);
        if project.id() == id && (!directory || project.inherits() == self.inherit) {
            return Ok(());
        }
        if inode.links > 1 && self.hard_links == HardLinks::Skip {
            skipped.hard_link(at);
            return Ok(());
        }
        match inode.set(&project.with(id, directory && self.inherit)) {
            Ok(()) => {
                self.report.changed += 1;
                Ok(())
            }
            Err(errno) => skipped.refused("set the project id of", errno, at),
        }
    }

    fn unreadable(&mut self, errno: Errno, at: &EntryPath<'_>) -> Result<()> {
        self.report.skipped.unreadable(errno, at)
    }
}

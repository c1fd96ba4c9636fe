//! Comparing a tree with the project to which it should belong.

use std::os::fd::AsFd;
use std::path::PathBuf;

use nix::errno::Errno;

use super::inode::{Inode, InodeKind};
use super::skipped::Skipped;
use super::walk::{EntryPath, REPORT_EVERY, Visitor, WalkOutcome, walk};
use crate::error::Result;
use crate::project_quota::ProjectId;

/// An inode with another project id than its tree, or a directory without project inheritance.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StrayInode {
    /// The path relative to the root of the tree, which is `.`. It can contain any bytes. In a long path,
    /// `...` is in place of the components between the first ones and the last one.
    pub path: PathBuf,
    /// The project id of the inode, 0 for none.
    pub project: u32,
    /// `true` for a directory whose new entries inherit its id, otherwise `false`.
    pub inherits: bool,
}

/// The result of comparing a tree with a project.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TreeCheck {
    /// Number of names visited, including the root. A file with two hard links counts twice.
    pub names: u64,
    /// Number of directories among these names.
    pub directories: u64,
    /// Number of names of inodes with another project id. Their blocks and inodes are charged to another project or to none.
    pub other_project: u64,
    /// Number of directories without the project inheritance flag (`FS_XFLAG_PROJINHERIT`), with any id. New entries of such
    /// directories are in no project.
    pub not_inheriting: u64,
    /// The first [`EXAMPLES`](Self::EXAMPLES) inodes that [`other_project`](Self::other_project) or
    /// [`not_inheriting`](Self::not_inheriting) counts.
    pub strays: Vec<StrayInode>,
    /// The entries that could not be checked.
    pub skipped: Skipped,
    /// `true` if directories were moved while the walk was in them. The walk may then have missed parts of the tree.
    pub disturbed: bool,
}

impl TreeCheck {
    /// The maximum number of examples.
    pub const EXAMPLES: usize = 16;

    /// Returns `true` if every inode that could be checked is in the project. [`skipped`](Self::skipped) and
    /// [`disturbed`](Self::disturbed) show whether that is the whole tree.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        self.other_project == 0 && self.not_inheriting == 0
    }
}

/// Finds the inodes of the tree below `root`, a directory, that are not in the project, because their owner moved them to
/// another project or to none. It changes nothing. `root` may be an `O_PATH` descriptor.
///
/// The function calls `progress` with the incomplete result every 1024 names.
///
/// Symbolic links, sockets, FIFOs and devices are compared from Linux 6.17 on (`file_getattr(2)`). proc(5) must be
/// mounted on /proc.
///
/// # Errors
/// EACCES, as [`ErrorKind::PermissionDenied`](crate::ErrorKind::PermissionDenied): the caller may not read the root. ENOTTY
/// or EOPNOTSUPP, as [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported): the file system has no project ids.
/// ENOTDIR, as [`ErrorKind::InvalidInput`](crate::ErrorKind::InvalidInput): `root` is not a directory. ENOENT, as
/// [`ErrorKind::NotFound`](crate::ErrorKind::NotFound): proc(5) is not mounted on /proc. Errors of the file system such as EIO.
#[doc(alias = "xfs_quota project -c")]
#[doc(alias = "file_getattr")]
#[doc(alias = "FS_IOC_FSGETXATTR")]
pub fn check_tree(root: impl AsFd, id: ProjectId, progress: impl FnMut(&TreeCheck)) -> Result<TreeCheck> {
    let mut checking = Checking { id: id.get(), progress, check: TreeCheck::default() };
    let outcome = walk(root.as_fd(), &mut checking)?;
    Ok(TreeCheck { disturbed: outcome == WalkOutcome::Raced, ..checking.check })
}

struct Checking<P> {
    id: u32,
    progress: P,
    check: TreeCheck,
}

impl<P: FnMut(&TreeCheck)> Visitor for Checking<P> {
    fn visit(&mut self, inode: &Inode<'_>, at: &EntryPath<'_>) -> Result<()> {
        let check = &mut self.check;
        let directory = inode.kind == InodeKind::Directory;
        check.names += 1;
        check.directories += u64::from(directory);
        if check.names.is_multiple_of(REPORT_EVERY) {
            (self.progress)(check);
        }
        let Some(project) = check.skipped.project_of(inode, at)? else { return Ok(()) };
        let elsewhere = project.id() != self.id;
        let not_inheriting = directory && !project.inherits();
        check.other_project += u64::from(elsewhere);
        check.not_inheriting += u64::from(not_inheriting);
        if (elsewhere || not_inheriting) && check.strays.len() < TreeCheck::EXAMPLES {
            let inherits = directory && project.inherits();
            check.strays.push(StrayInode { path: at.path(), project: project.id(), inherits });
        }
        Ok(())
    }

    fn unreadable(&mut self, errno: Errno, at: &EntryPath<'_>) -> Result<()> {
        self.check.skipped.unreadable(errno, at)
    }
}

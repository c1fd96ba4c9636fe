//! A tree compared with the project it should be in.

use std::os::fd::BorrowedFd;
use std::path::PathBuf;

use nix::errno::Errno;

use super::inode::{Inode, Kind};
use super::skipped::Skipped;
use super::walk::{EntryPath, REPORT_EVERY, Visitor, WalkOutcome, walk};
use crate::error::Result;
use crate::project_quota::ProjectId;

/// An inode that is not in the project of its tree as it should be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StrayInode {
    /// Relative to the root of the tree, which is `.`; any bytes, and as long as the tree is deep.
    pub path: PathBuf,
    /// The project id found, 0 for none.
    pub project: u32,
    /// `true` for a directory whose new entries inherit its id; `false` for other inodes.
    pub inherits: bool,
}

/// How a tree compares with a project.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TreeAudit {
    /// Names visited, the root among them. A file with two names counts twice.
    pub names: u64,
    /// Directories among them.
    pub directories: u64,
    /// Names of inodes with another project id: their blocks and inodes are charged elsewhere, or nowhere.
    pub other_project: u64,
    /// Directories without the project inheritance flag (`FS_XFLAG_PROJINHERIT`), whatever their id is: what is made in
    /// them is in no project.
    pub not_inheriting: u64,
    /// The first [`EXAMPLES`](Self::EXAMPLES) of both.
    pub strays: Vec<StrayInode>,
    /// What could not be looked at.
    pub skipped: Skipped,
    /// Directories were moved while the walk was in them, so parts of the tree may not have been seen.
    pub disturbed: bool,
}

impl TreeAudit {
    /// How many examples are kept.
    pub const EXAMPLES: usize = 16;

    /// Whether all that could be looked at is in the project. Whether that was all: [`skipped`](Self::skipped)
    /// and [`disturbed`](Self::disturbed).
    #[must_use]
    pub fn is_clean(&self) -> bool {
        self.other_project == 0 && self.not_inheriting == 0
    }
}

/// Finds what is not in the project in the tree below `root`, a directory: what its owner moved to another
/// project, or to none. Changes nothing. `O_PATH` is enough for `root`.
///
/// Symbolic links, sockets, FIFOs and devices are compared from Linux 6.17 on (`file_getattr(2)`). proc(5) must be
/// mounted on /proc.
///
/// # Errors
/// EACCES, as [`ErrorKind::PermissionDenied`](crate::ErrorKind::PermissionDenied): the root may not be read. ENOTTY
/// or EOPNOTSUPP, as [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported): a file system without project ids.
/// ENOTDIR, as [`ErrorKind::InvalidInput`](crate::ErrorKind::InvalidInput): not a directory. ENOENT, as
/// [`ErrorKind::NotFound`](crate::ErrorKind::NotFound): no proc(5) on /proc. EIO and the like.
#[doc(alias = "xfs_quota project -c")]
#[doc(alias = "file_getattr")]
#[doc(alias = "FS_IOC_FSGETXATTR")]
pub fn audit_tree(root: BorrowedFd<'_>, id: ProjectId) -> Result<TreeAudit> {
    audit_tree_reporting(root, id, &mut |_| {})
}

/// [`audit_tree`], reporting how far it is every 1024 names.
///
/// # Errors
/// As [`audit_tree`].
pub fn audit_tree_reporting(
    root: BorrowedFd<'_>,
    id: ProjectId,
    progress: &mut dyn FnMut(&TreeAudit),
) -> Result<TreeAudit> {
    let mut auditing = Auditing { id: id.get(), progress, audit: TreeAudit::default() };
    let outcome = walk(root, &mut auditing)?;
    Ok(TreeAudit { disturbed: outcome == WalkOutcome::Raced, ..auditing.audit })
}

struct Auditing<'a> {
    id: u32,
    progress: &'a mut dyn FnMut(&TreeAudit),
    audit: TreeAudit,
}

impl Visitor for Auditing<'_> {
    fn visit(&mut self, inode: &Inode<'_>, at: &EntryPath<'_>) -> Result<()> {
        let audit = &mut self.audit;
        let directory = inode.kind == Kind::Directory;
        audit.names += 1;
        audit.directories += u64::from(directory);
        if audit.names.is_multiple_of(REPORT_EVERY) {
            (self.progress)(audit);
        }
        let project = match inode.project() {
            Ok(Some(project)) => project,
            Ok(None) => {
                audit.skipped.special(inode.kind);
                return Ok(());
            }
            Err(errno) => return audit.skipped.refused("read the project id of", errno, at),
        };
        let elsewhere = project.id() != self.id;
        let not_inheriting = directory && !project.inherits();
        audit.other_project += u64::from(elsewhere);
        audit.not_inheriting += u64::from(not_inheriting);
        if (elsewhere || not_inheriting) && audit.strays.len() < TreeAudit::EXAMPLES {
            let inherits = directory && project.inherits();
            audit.strays.push(StrayInode { path: at.path(), project: project.id(), inherits });
        }
        Ok(())
    }

    fn mount(&mut self, at: &EntryPath<'_>) -> Result<()> {
        self.audit.skipped.mount(at);
        Ok(())
    }

    fn unreadable(&mut self, errno: Errno, at: &EntryPath<'_>) -> Result<()> {
        self.audit.skipped.refused("open", errno, at)
    }
}

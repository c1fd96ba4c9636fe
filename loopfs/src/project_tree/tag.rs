//! Putting a tree into a project, and removing it from its project.

use std::os::fd::BorrowedFd;

use nix::errno::Errno;

use super::inode::{Inode, Kind};
use super::skipped::Skipped;
use super::walk::{EntryPath, REPORT_EVERY, Visitor, WalkOutcome, walk};
use crate::error::{Error, ErrorKind, Result};
use crate::project_quota::ProjectId;

/// What to do with a file that has several hard links, of which some may be outside the tree.
///
/// A file has one project id, whatever its names. Tagged, it is charged to the project under all of them; and who
/// may link another tenant's file into the tree (it may write to it, or `fs.protected_hardlinks` is off) would
/// pull it into its own project. XFS allows no link and no rename into a tagged directory from another project,
/// so this is about the names that a tree has before it is tagged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HardLinks {
    /// Leave it in its project, and count it ([`Skipped::hard_links`]): nothing outside the tree is changed.
    #[default]
    Skip,
    /// Put it into the project: for trees without hard links from outside.
    Tag,
    /// Fail with [`ErrorKind::InvalidInput`]. The tree is searched for such files before anything is changed.
    Refuse,
}

/// How a tree is tagged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TagOptions {
    /// Files with several names. [`HardLinks::Skip`] unless said otherwise.
    pub hard_links: HardLinks,
    /// How often the tree is gone through at most, until there is nothing left to change; 8 unless said
    /// otherwise, and at least 2 are needed where there is something.
    pub most_passes: u32,
}

impl Default for TagOptions {
    fn default() -> Self {
        Self { hard_links: HardLinks::default(), most_passes: 8 }
    }
}

/// What tagging a tree did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TreeReport {
    /// Number of passes through the tree.
    pub passes: u32,
    /// Inodes changed, in all passes.
    pub changed: u64,
    /// Names visited in the last pass, the root among them. A file with two names counts twice.
    pub names: u64,
    /// Directories among them.
    pub directories: u64,
    /// Entries that were skipped, and are not in the project.
    pub skipped: Skipped,
}

/// Puts every inode of the tree below `root`, a directory, into a project, and its directories so that what is made
/// in them inherits it (`FS_XFLAG_PROJINHERIT`). `O_PATH` is enough for `root`.
///
/// It is repeated until a pass finds nothing to change, which is also what reads the ids back. Other attributes
/// stay as they are. What it was not to or could not change is counted in [`TreeReport::skipped`] with its path.
/// A limit does not stand in the way of who has `CAP_FOWNER`: a project may have more than it may grow to. While
/// it lasts, the owner of the tree can see EXDEV from rename(2) and link(2) between parts that are tagged and parts
/// that are not yet.
///
/// Symbolic links, sockets, FIFOs and devices are tagged from Linux 6.17 on (`file_setattr(2)`). proc(5) must be
/// mounted on /proc.
///
/// # Errors
/// [`ErrorKind::Busy`]: another process kept changing ids, or moving directories, through
/// [`TagOptions::most_passes`]. [`ErrorKind::InvalidInput`]: a file with several names, by
/// [`HardLinks::Refuse`]. EROFS, as [`ErrorKind::ReadOnly`]: a read-only mount. EPERM, as
/// [`ErrorKind::PermissionDenied`]: the caller neither owns the root nor has `CAP_FOWNER`. EACCES, as the same: it
/// may not read the root. EINVAL or EPERM, as [`ErrorKind::InUserNamespace`]: project ids can be changed only in
/// the initial user namespace only. ENOTTY or EOPNOTSUPP, as [`ErrorKind::Unsupported`]: a file system without
/// project ids. ENOTDIR, as [`ErrorKind::InvalidInput`]: not a directory. ENOENT, as [`ErrorKind::NotFound`]: no
/// proc(5) on /proc. What was tagged before an error stays so, and the call can be repeated.
#[doc(alias = "xfs_quota project -s")]
#[doc(alias = "file_setattr")]
#[doc(alias = "FS_IOC_FSSETXATTR")]
pub fn tag_tree(root: BorrowedFd<'_>, id: ProjectId, options: &TagOptions) -> Result<TreeReport> {
    tag_tree_reporting(root, id, options, &mut |_| {})
}

/// [`tag_tree`], reporting how far it is every 1024 names and after each pass.
///
/// # Errors
/// As [`tag_tree`].
pub fn tag_tree_reporting(
    root: BorrowedFd<'_>,
    id: ProjectId,
    options: &TagOptions,
    progress: &mut dyn FnMut(&TreeReport),
) -> Result<TreeReport> {
    Tagging { id: id.get(), inherit: true, options, progress, report: TreeReport::default() }.run(root)
}

/// Removes the tree below `root` from any project: sets id 0, and clears the project inheritance flag of each directory.
///
/// # Errors
/// As [`tag_tree`].
#[doc(alias = "xfs_quota project -C")]
pub fn clear_tree(root: BorrowedFd<'_>, options: &TagOptions) -> Result<TreeReport> {
    let report = TreeReport::default();
    Tagging { id: 0, inherit: false, options, progress: &mut |_| {}, report }.run(root)
}

struct Tagging<'a> {
    id: u32,
    inherit: bool,
    options: &'a TagOptions,
    progress: &'a mut dyn FnMut(&TreeReport),
    report: TreeReport,
}

impl Tagging<'_> {
    fn run(mut self, root: BorrowedFd<'_>) -> Result<TreeReport> {
        if self.options.hard_links == HardLinks::Refuse {
            walk(root, &mut Survey { id: self.id })?;
        }
        while self.report.passes < self.options.most_passes {
            let changed = self.report.changed;
            self.report = TreeReport { passes: self.report.passes + 1, changed, ..TreeReport::default() };
            let outcome = walk(root, &mut self)?;
            (self.progress)(&self.report);
            if outcome == WalkOutcome::Stable && self.report.changed == changed {
                return Ok(self.report);
            }
        }
        let detail = format!("there was still something to change after {} passes", self.report.passes);
        Err(Error::new(ErrorKind::Busy, "tag", "a directory tree", detail))
    }
}

impl Visitor for Tagging<'_> {
    fn visit(&mut self, inode: &Inode<'_>, at: &EntryPath<'_>) -> Result<()> {
        let directory = inode.kind == Kind::Directory;
        self.report.names += 1;
        self.report.directories += u64::from(directory);
        if self.report.names.is_multiple_of(REPORT_EVERY) {
            (self.progress)(&self.report);
        }
        let skipped = &mut self.report.skipped;
        let project = match inode.project() {
            Ok(Some(project)) => project,
            Ok(None) => {
                skipped.special(inode.kind);
                return Ok(());
            }
            Err(errno) => return skipped.refused("read the project id of", errno, at),
        };
        if project.id() == self.id && (!directory || project.inherits() == self.inherit) {
            return Ok(());
        }
        if inode.links > 1 {
            match self.options.hard_links {
                HardLinks::Tag => {}
                HardLinks::Skip => {
                    skipped.hard_link(at);
                    return Ok(());
                }
                HardLinks::Refuse => return Err(has_further_names(at)),
            }
        }
        match inode.set(&project.with(self.id, directory && self.inherit)) {
            Ok(()) => {
                self.report.changed += 1;
                Ok(())
            }
            Err(errno) => skipped.refused("set the project id of", errno, at),
        }
    }

    fn mount(&mut self, at: &EntryPath<'_>) -> Result<()> {
        self.report.skipped.mount(at);
        Ok(())
    }

    fn unreadable(&mut self, errno: Errno, at: &EntryPath<'_>) -> Result<()> {
        self.report.skipped.refused("open", errno, at)
    }
}

/// Looks for files with several names that would have to be tagged, and changes nothing.
struct Survey {
    id: u32,
}

impl Visitor for Survey {
    fn visit(&mut self, inode: &Inode<'_>, at: &EntryPath<'_>) -> Result<()> {
        // One that cannot be read cannot be tagged either.
        let Ok(Some(project)) = inode.project() else { return Ok(()) };
        if inode.links > 1 && project.id() != self.id { Err(has_further_names(at)) } else { Ok(()) }
    }

    fn mount(&mut self, _: &EntryPath<'_>) -> Result<()> {
        Ok(())
    }

    fn unreadable(&mut self, _: Errno, _: &EntryPath<'_>) -> Result<()> {
        Ok(())
    }
}

fn has_further_names(at: &EntryPath<'_>) -> Error {
    let detail = "it has further names, which may lie outside the tree";
    Error::new(ErrorKind::InvalidInput, "tag", format!("{:?} of a directory tree", at.path()), detail)
}

//! Putting a tree into a project, and removing it from its project.

use std::os::fd::{AsFd, BorrowedFd};

use nix::errno::Errno;

use super::inode::{Inode, InodeKind};
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
    /// Fail with [`ErrorKind::InvalidInput`]. The call searches the tree for such files before it changes anything.
    Refuse,
}

/// Options for tagging a tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TagOptions {
    /// The treatment of files with several hard links. The default is [`HardLinks::Skip`].
    pub hard_links: HardLinks,
    /// The maximum number of passes through the tree until a pass finds nothing to change. The default is 8. A tree with
    /// anything to change needs at least 2 passes.
    pub most_passes: u32,
}

impl Default for TagOptions {
    fn default() -> Self {
        Self { hard_links: HardLinks::default(), most_passes: 8 }
    }
}

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
/// [`ErrorKind::Busy`]: another process kept changing ids, or moving directories, through
/// [`TagOptions::most_passes`]. [`ErrorKind::InvalidInput`]: that is 0, or a file has several hard
/// links, and the caller chose [`HardLinks::Refuse`]. EROFS, as [`ErrorKind::ReadOnly`]: the mount is read-only. EPERM, as
/// [`ErrorKind::PermissionDenied`]: the caller neither owns the root nor has `CAP_FOWNER`. EACCES, as
/// [`ErrorKind::PermissionDenied`]: the caller may not read the root. EINVAL or EPERM, as [`ErrorKind::InUserNamespace`]:
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
    options: &TagOptions,
    progress: impl FnMut(&TreeReport),
) -> Result<TreeReport> {
    Tagging { id: id.get(), inherit: true, only: None, options, progress, report: TreeReport::default() }
        .run(root.as_fd())
}

/// Removes the tree below `root` from any project: sets id 0, and clears the project inheritance flag of each directory.
///
/// # Errors
/// As [`tag_tree`].
#[doc(alias = "xfs_quota project -C")]
pub fn clear_tree(root: impl AsFd, options: &TagOptions) -> Result<TreeReport> {
    let report = TreeReport::default();
    Tagging { id: 0, inherit: false, only: None, options, progress: |_: &TreeReport| {}, report }
        .run(root.as_fd())
}

/// Removes the inodes of one project below `root` from it, under all their names. The root comes last, so after a crash it still shows
/// the project.
pub(super) fn clear_project(root: BorrowedFd<'_>, id: ProjectId) -> Result<()> {
    let options = TagOptions { hard_links: HardLinks::Tag, ..TagOptions::default() };
    let report = TreeReport::default();
    let only = Some(id.get());
    Tagging { id: 0, inherit: false, only, options: &options, progress: |_: &TreeReport| {}, report }
        .run(root)?;
    fsxattr::get(root)
        .and_then(|read| fsxattr::set(root, &fsxattr::fsxattr { fsx_projid: 0, ..read }))
        .context("set the project id of", "the root of a directory tree")
}

struct Tagging<'a, P> {
    id: u32,
    /// If it is set, only inodes with this id are changed, and the root keeps it.
    only: Option<u32>,
    inherit: bool,
    options: &'a TagOptions,
    progress: P,
    report: TreeReport,
}

impl<P: FnMut(&TreeReport)> Tagging<'_, P> {
    fn run(mut self, root: BorrowedFd<'_>) -> Result<TreeReport> {
        if self.options.most_passes == 0 {
            let cause = "TagOptions::most_passes is 0";
            return Err(Error::new(ErrorKind::InvalidInput, "tag", "a directory tree", cause)
                .with_remedy("allow at least 2 passes"));
        }
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
        let cause = format!("there was still something to change after {} passes", self.report.passes);
        Err(Error::new(ErrorKind::Busy, "tag", "a directory tree", cause)
            .with_remedy("tag it again, with more TagOptions::most_passes"))
    }
}

impl<P: FnMut(&TreeReport)> Visitor for Tagging<'_, P> {
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
        match inode.set(&project.with(id, directory && self.inherit)) {
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

/// A visitor that fails at a file with several hard links that would have to be tagged. It changes nothing.
struct Survey {
    id: u32,
}

impl Visitor for Survey {
    fn visit(&mut self, inode: &Inode<'_>, at: &EntryPath<'_>) -> Result<()> {
        // An inode whose id cannot be read cannot be tagged either.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_passes_are_refused() {
        let directory = tempfile::tempdir().unwrap();
        let root = std::fs::File::open(directory.path()).unwrap();
        let options = TagOptions { most_passes: 0, ..TagOptions::default() };
        let error = tag_tree(root, ProjectId::new(7).unwrap(), &options, |_| {}).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
        assert!(error.to_string().contains("most_passes"), "{error}");
    }
}

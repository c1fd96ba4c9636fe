//! Tests of trees that are put into a project and checked: their content, the neighbouring files that must
//! not change, and owners who change the tree during the walk.

mod clone;
mod clone_limits;
mod clone_moving;
mod clone_random;
mod clone_shapes;
mod moving;
mod portrait;
mod refusals;
mod shapes;
mod special_files;

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use loopfs::project_quota::{ProjectId, project_of};
use loopfs::project_tree::{HardLinks, TreeCheck, TreeReport, check_tree, tag_tree};
use nix::sys::stat::Mode;

use crate::environment::{Leaks, directory, linux_at_least, project, quota, xfs};

/// A tree on the quota file system, and beside it a directory that does not belong to its project.
struct Fixture {
    directory: tempfile::TempDir,
    id: ProjectId,
    /// Checks last that nothing of the deleted files stays charged.
    _leaks: Leaks,
}

impl Fixture {
    fn new(id: u32) -> Self {
        let fixture = Self { _leaks: Leaks::watch(), directory: directory(), id: project(id) };
        std::fs::create_dir(fixture.tree()).unwrap();
        std::fs::create_dir(fixture.outside()).unwrap();
        std::fs::write(fixture.outside().join("file"), "another tenant's").unwrap();
        std::fs::create_dir(fixture.outside().join("directory")).unwrap();
        std::fs::write(fixture.outside().join("directory/file"), "another tenant's").unwrap();
        fixture
    }

    fn tree(&self) -> PathBuf {
        self.directory.path().join("tree")
    }

    fn outside(&self) -> PathBuf {
        self.directory.path().join("outside")
    }

    fn tag(&self) -> loopfs::Result<TreeReport> {
        self.tag_with(HardLinks::Skip)
    }

    fn tag_with(&self, hard_links: HardLinks) -> loopfs::Result<TreeReport> {
        tag_tree(File::open(self.tree()).unwrap(), self.id, hard_links, |_| {})
    }

    fn check(&self) -> TreeCheck {
        check_tree(File::open(self.tree()).unwrap(), self.id, |_| {}).unwrap()
    }

    /// Returns the bytes and inodes that are charged to the project.
    fn charged(&self) -> (u64, u64) {
        let root = File::open(xfs()).unwrap();
        nix::unistd::syncfs(&root).unwrap();
        let quota = quota(&root);
        quota.finish_inactivation(self.id).unwrap();
        quota.usage(self.id).unwrap().map_or((0, 0), |usage| (usage.bytes.0, usage.inodes.0))
    }
}

/// Returns each inode of a tree with its change time, which any change of an attribute, content or name updates.
pub(crate) fn fingerprint(path: &Path) -> Vec<(PathBuf, u64, i64, i64)> {
    let status = std::fs::symlink_metadata(path).unwrap();
    let mut all = vec![(path.to_owned(), status.ino(), status.ctime(), status.ctime_nsec())];
    if status.is_dir() {
        for entry in std::fs::read_dir(path).unwrap() {
            all.extend(fingerprint(&entry.unwrap().path()));
        }
    }
    all.sort();
    all
}

fn project_at(path: &Path) -> u32 {
    project_of(File::open(path).unwrap()).unwrap()
}

fn make_fifo(path: &Path) {
    nix::unistd::mkfifo(path, Mode::S_IRWXU).unwrap();
}

/// Returns `true` if the kernel has `file_setattr(2)`, without which the project of a special file cannot be
/// changed.
fn has_file_setattr() -> bool {
    linux_at_least(6, 17)
}

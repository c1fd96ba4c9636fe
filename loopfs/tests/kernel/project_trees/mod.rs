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
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use loopfs::project_quota::{ProjectId, project_of};
use loopfs::project_tree::{HardLinks, Skipped, TreeCheck, TreeReport, check_tree, tag_tree};
use nix::sys::stat::Mode;

use crate::environment::{Leaks, directory, quota, xfs};

/// A tree on the quota file system, and beside it a directory that does not belong to its project.
struct Fixture {
    leaks: Leaks,
    directory: tempfile::TempDir,
    id: ProjectId,
}

impl Fixture {
    fn new(id: u32) -> Self {
        let fixture = Self { leaks: Leaks::watch(), directory: directory(), id: ProjectId::new(id).unwrap() };
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
        tag_tree(File::open(self.tree()).unwrap().as_fd(), self.id, hard_links, |_| {})
    }

    fn check(&self) -> TreeCheck {
        check_tree(File::open(self.tree()).unwrap().as_fd(), self.id, |_| {}).unwrap()
    }

    /// Returns the bytes and inodes that are charged to the project.
    fn charged(&self) -> (u64, u64) {
        let root = File::open(xfs()).unwrap();
        nix::unistd::syncfs(&root).unwrap();
        let quota = quota(&root);
        quota.finish_inactivation(self.id).unwrap();
        quota.usage(self.id).unwrap().map_or((0, 0), |usage| (usage.bytes.0, usage.inodes.0))
    }

    /// Removes all files. Nothing of them may stay charged.
    fn end(self) {
        self.directory.close().unwrap();
        self.leaks.check();
    }
}

/// Returns each inode below a directory with its change time, which any change of an attribute, content or
/// name updates.
fn fingerprint(directory: &Path) -> Vec<(PathBuf, u64, i64, i64)> {
    let mut all = Vec::new();
    let mut directories = vec![directory.to_owned()];
    while let Some(directory) = directories.pop() {
        let status = std::fs::symlink_metadata(&directory).unwrap();
        all.push((directory.clone(), status.ino(), status.ctime(), status.ctime_nsec()));
        for entry in std::fs::read_dir(&directory).unwrap() {
            let path = entry.unwrap().path();
            let status = std::fs::symlink_metadata(&path).unwrap();
            if status.is_dir() {
                directories.push(path);
            } else {
                all.push((path, status.ino(), status.ctime(), status.ctime_nsec()));
            }
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
    let name = nix::sys::utsname::uname().unwrap();
    let release = name.release().to_str().unwrap();
    let mut numbers = release.split(['.', '-']).map(|part| part.parse::<u32>().unwrap_or(0));
    (numbers.next().unwrap(), numbers.next().unwrap()) >= (6, 17)
}

fn nothing() -> Skipped {
    Skipped::default()
}

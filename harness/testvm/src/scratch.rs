//! The directory of a run's temporary files, and those of its children. None is left behind: a run removes its directory
//! when it ends, and the next run removes that of a run that was killed.
//!
//! A run holds a lock (flock(2)) on its directory, which the kernel releases with the process. A directory without a lock
//! therefore has no owner, whatever its age. systemd-tmpfiles(8) leaves locked directories alone, too.

use std::fs::{self, File, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use nix::fcntl::{Flock, FlockArg};

/// The beginning of the names of such directories.
const PREFIX: &str = "testvm-run-";

/// A directory that is removed with its content when this is dropped.
#[derive(Debug)]
pub struct ScratchDir {
    path: PathBuf,
    _lock: Flock<File>,
}

impl ScratchDir {
    /// Removes the directories of runs that were killed, and creates one for this process, in which tempfile and the children
    /// of this process create their temporary files from now on.
    pub fn of_this_process() -> Result<ScratchDir> {
        let parent = std::env::temp_dir();
        remove_abandoned(&parent);
        let scratch = ScratchDir::create(&parent)?;
        // A process can choose the directory only once; a second session has its files in that of the first.
        tempfile::env::override_temp_dir(&scratch.path).ok();
        Ok(scratch)
    }

    /// Creates a directory in `parent`, and leaves those of other processes alone.
    pub fn create(parent: &Path) -> Result<ScratchDir> {
        loop {
            let created = tempfile::Builder::new().prefix(PREFIX).tempdir_in(parent);
            let path = created.with_context(|| format!("create a directory in {}", parent.display()))?.keep();
            // Another run that starts may find the directory before it is locked, and remove it.
            if let Some(lock) = try_lock(&path) {
                // Programs that give up root must reach their files below it.
                fs::set_permissions(&path, Permissions::from_mode(0o711))
                    .with_context(|| format!("set the mode of {}", path.display()))?;
                return Ok(ScratchDir { path, _lock: lock });
            }
        }
    }

    /// Returns the path of the directory.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for ScratchDir {
    fn drop(&mut self) {
        remove(&self.path);
    }
}

/// Removes the directories of processes that have ended.
fn remove_abandoned(parent: &Path) {
    let Ok(entries) = fs::read_dir(parent) else { return };
    let named =
        |path: &PathBuf| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(PREFIX));
    for path in entries.flatten().map(|entry| entry.path()).filter(named) {
        let ours = fs::symlink_metadata(&path)
            .is_ok_and(|found| found.is_dir() && found.uid() == nix::unistd::geteuid().as_raw());
        if let Some(_lock) = ours.then(|| try_lock(&path)).flatten() {
            remove(&path);
        }
    }
}

/// Locks a directory. Returns `None` if it has another owner, or was removed before it could be locked.
fn try_lock(path: &Path) -> Option<Flock<File>> {
    let lock = Flock::lock(File::open(path).ok()?, FlockArg::LockExclusiveNonblock).ok()?;
    let is_same = lock.metadata().ok()?.ino() == fs::symlink_metadata(path).ok()?.ino();
    is_same.then_some(lock)
}

/// Removes a directory, unless something is mounted below it. A file that this user cannot remove stays: it is no
/// reason to fail a run.
fn remove(path: &Path) {
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    if !has_mounts(&mounts, path) {
        fs::remove_dir_all(path).ok();
    }
}

/// Returns `true` if the mount table, as in proc_pid_mountinfo(5), has a mount point at or below `path`.
fn has_mounts(mountinfo: &str, path: &Path) -> bool {
    mountinfo
        .lines()
        .filter_map(|line| line.split(' ').nth(4))
        .any(|point| Path::new(point).starts_with(path))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::Program;

    /// Other processes keep the directory while its owner lives.
    #[test]
    fn directory_is_removed_with_its_owner() {
        let parent = tempfile::tempdir().unwrap();
        let scratch = ScratchDir::create(parent.path()).unwrap();
        fs::write(scratch.path().join("file"), "").unwrap();
        remove_abandoned(parent.path());
        assert!(scratch.path().join("file").exists());
        let path = scratch.path().to_owned();
        drop(scratch);
        assert!(!path.exists());
    }

    /// The next process removes it.
    #[tokio::test]
    async fn directory_of_killed_process_is_removed() {
        let parent = tempfile::tempdir().unwrap();
        // This process cannot end without its destructors and still look.
        Program::new(std::env::current_exe().unwrap())
            .args(["--exact", "--ignored", "scratch::tests::end_without_destructors"])
            .env("TMPDIR", parent.path())
            .finish()
            .await
            .unwrap();
        let names = || {
            fs::read_dir(parent.path()).unwrap().flatten().map(|entry| entry.file_name()).collect::<Vec<_>>()
        };
        assert_eq!(names().len(), 1, "{:?}", names());
        fs::create_dir(parent.path().join("of-another-program")).unwrap();
        remove_abandoned(parent.path());
        assert_eq!(names(), ["of-another-program"]);
    }

    #[tokio::test]
    #[ignore = "the test directory_of_killed_process_is_removed runs it"]
    async fn end_without_destructors() {
        let scratch = ScratchDir::of_this_process().unwrap();
        let printed = Program::new("sh").args(["-c", "mktemp && mktemp -d"]).run().await.unwrap().stdout;
        assert!(printed.lines().all(|line| Path::new(line).starts_with(scratch.path())), "{printed}");
        nix::sys::signal::raise(nix::sys::signal::Signal::SIGKILL).unwrap();
    }

    #[test]
    fn mount_below_directory_is_detected() {
        let table = "36 35 98:0 / /tmp/testvm-run-a/tree/proc rw - proc proc rw\n";
        assert!(has_mounts(table, Path::new("/tmp/testvm-run-a")));
        assert!(!has_mounts(table, Path::new("/tmp/testvm-run-ab")));
    }
}

//! A cgroup with the rules of a device controller, as a container has.

use std::io;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use nix::mount::{MsFlags, mount, umount};

use crate::environment::scratch;

/// The time within which a group has no more tasks after they have ended.
const REMOVAL_TIMEOUT: Duration = Duration::from_secs(60);

/// A group of the devices controller of cgroup v1, which is mounted for a test. The group and the mount are removed at the end, even
/// if the test fails. Otherwise the rules would apply to later tests.
pub(crate) struct DeviceCgroup {
    directory: tempfile::TempDir,
    group: PathBuf,
}

impl DeviceCgroup {
    /// Creates a group and writes these rules, each after the name of the file that takes it.
    pub(crate) fn with_rules(rules: &[(&str, &str)]) -> Self {
        let directory = scratch();
        let options = Some("devices");
        mount(Some("none"), directory.path(), Some("cgroup"), MsFlags::empty(), options).unwrap();
        let group = directory.path().join("loopfs-test");
        let cgroup = Self { directory, group };
        std::fs::create_dir(&cgroup.group).unwrap();
        for (file, rule) in rules {
            std::fs::write(cgroup.group.join(file), rule).unwrap();
        }
        cgroup
    }

    /// Runs `work` while this thread is in the group.
    pub(crate) fn run<T>(&self, work: impl FnOnce() -> T) -> T {
        let _entered = Entered::new(self);
        work()
    }
}

impl Drop for DeviceCgroup {
    fn drop(&mut self) {
        let deadline = Instant::now() + REMOVAL_TIMEOUT;
        let removed = loop {
            match std::fs::remove_dir(&self.group) {
                // From Linux 6.19 on, a task can leave its group after its parent has waited for it.
                Err(error) if error.kind() == io::ErrorKind::ResourceBusy && Instant::now() < deadline => {
                    sleep(Duration::from_millis(10));
                }
                removed => break removed,
            }
        };
        if let Err(error) = removed {
            eprintln!("remove {}: {error}", self.group.display());
        }
        // The check for leaks reports what is left.
        umount(self.directory.path()).ok();
    }
}

/// The membership of this thread in a group, which ends when this is dropped.
struct Entered<'a>(&'a DeviceCgroup);

impl<'a> Entered<'a> {
    fn new(cgroup: &'a DeviceCgroup) -> Self {
        move_this_thread_to(&cgroup.group).unwrap();
        Self(cgroup)
    }
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        if let Err(error) = move_this_thread_to(self.0.directory.path()) {
            eprintln!("leave {}: {error}", self.0.group.display());
        }
    }
}

fn move_this_thread_to(group: &Path) -> io::Result<()> {
    // 0 is the thread that writes.
    std::fs::write(group.join("tasks"), "0")
}

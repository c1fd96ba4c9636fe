//! The second disk, for tests that break or unmount the data file system.

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use loopfs::mount::table as mountinfo;
use nix::errno::Errno;
use nix::fcntl::{OFlag, open};
use nix::mount::{MntFlags, MsFlags, mount as mount_device, umount, umount2};
use nix::sys::stat::Mode;

use crate::fixture::path_from;
use crate::support::TIMEOUT;

const STRICT: MsFlags = MsFlags::MS_NODEV.union(MsFlags::MS_NOSUID).union(MsFlags::MS_NOEXEC);

/// The second disk as a data file system that a test may damage. Dropping it restores the disk and its mount.
pub(crate) struct ScratchDisk {
    device: PathBuf,
    usually_at: PathBuf,
    pub(crate) data: PathBuf,
}

impl ScratchDisk {
    pub(crate) fn mount_at(data: PathBuf) -> Self {
        let usually_at = path_from("LOOPFS_TEST_XFS_NOQUOTA");
        let mounts = mountinfo::read().unwrap();
        let device = mounts.iter().find(|mount| mount.mount_point == usually_at).unwrap().source.clone();
        umount(&usually_at).unwrap();
        fs::create_dir(&data).unwrap();
        let disk = Self { device, usually_at, data };
        disk.mount();
        disk
    }

    pub(crate) fn mount(&self) {
        mount_device(Some(&self.device), &self.data, Some("xfs"), STRICT, Some("prjquota")).unwrap();
    }

    /// Unmounts and mounts the disk after its file system was shut down. Waits until the kernel has released the disk: while
    /// another process has a file of the old mount open, such as the driver during an attempt to open its storage, a new
    /// mount would be of the same file system instance, which stays shut down.
    pub(crate) fn restore(&self) {
        umount2(&self.data, MntFlags::MNT_DETACH).unwrap();
        let start = Instant::now();
        // A mounted file system has its disk open exclusively.
        let exclusive = OFlag::O_RDONLY | OFlag::O_EXCL | OFlag::O_CLOEXEC;
        while let Err(error) = open(&self.device, exclusive, Mode::empty()) {
            assert_eq!(error, Errno::EBUSY, "{}", self.device.display());
            assert!(
                start.elapsed() < TIMEOUT,
                "the file system on {} is still in use",
                self.device.display()
            );
            std::thread::sleep(Duration::from_millis(5));
        }
        self.mount();
    }

    pub(crate) fn remount(&self, flags: MsFlags) {
        let flags = flags | STRICT | MsFlags::MS_REMOUNT;
        let start = Instant::now();
        loop {
            match mount_device(Some(&self.device), &self.data, Some("xfs"), flags, Some("prjquota")) {
                // The driver's background work has a file open for writing for a moment.
                Err(Errno::EBUSY) if start.elapsed() < TIMEOUT => {
                    std::thread::sleep(Duration::from_millis(20));
                }
                remounted => return remounted.unwrap(),
            }
        }
    }
}

impl Drop for ScratchDisk {
    fn drop(&mut self) {
        // A failed test may have left volumes published, and a panic here would abort the tests after it.
        let how = if std::thread::panicking() { MntFlags::MNT_DETACH } else { MntFlags::empty() };
        umount2(&self.data, how).unwrap();
        self.mount();
        for name in [".loopfs", "volumes", "staging", "trash", "snapshots"] {
            fs::remove_dir_all(self.data.join(name)).ok();
        }
        umount2(&self.data, how).unwrap();
        mount_device(Some(&self.device), &self.usually_at, Some("xfs"), STRICT, None::<&str>).unwrap();
    }
}

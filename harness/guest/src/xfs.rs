//! Leaves the XFS file systems of the machine as an unmount leaves them, so that the host can check their disks: with a log in
//! which nothing is to be replayed.

use std::fs::{self, OpenOptions};
use std::io::{Read, Seek, SeekFrom};
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use nix::fcntl::OFlag;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::kernel_log;

/// The directory with one entry for each XFS in use. An entry is there until the last user of the file system is gone,
/// whatever mounts a process sees.
const IN_USE: &str = "/sys/fs/xfs";
/// The time that the kernel may need after an unmount, for example to detach a loop device whose last user was killed.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(5);
const RELEASE_POLL: Duration = Duration::from_millis(20);
/// The time to write all data and logs.
const REMOUNT_TIMEOUT: Duration = Duration::from_secs(30);
/// What the kernel logs after an emergency remount (drivers/tty/sysrq.c, fs/super.c).
const REMOUNTED: &str = "Emergency Remount complete";

/// Waits until the kernel has released every XFS, and returns the devices of those that are in use after a few seconds.
pub(super) fn wait_released() -> Vec<String> {
    let deadline = Instant::now() + RELEASE_TIMEOUT;
    loop {
        let devices = in_use(Path::new(IN_USE));
        if devices.is_empty() || Instant::now() > deadline {
            return devices;
        }
        std::thread::sleep(RELEASE_POLL);
    }
}

fn in_use(directory: &Path) -> Vec<String> {
    // The directory is missing before the module is loaded. It also has the statistics of all file systems.
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    names.filter(|name| !["stats", "debug"].contains(&name.as_str())).collect()
}

/// Makes file systems that could not be unmounted read-only, which a loop device that is still attached prevents otherwise.
pub(super) fn close() -> Result<()> {
    if wait_released().is_empty() {
        return Ok(());
    }
    let mut log = OpenOptions::new()
        .read(true)
        .custom_flags(OFlag::O_NONBLOCK.bits())
        .open(kernel_log::DEVICE)
        .context("open the kernel's log")?;
    log.seek(SeekFrom::End(0)).context("find the end of the kernel's log")?;
    fs::write("/proc/sysrq-trigger", "u").context("request an emergency remount")?;
    let deadline = Instant::now() + REMOUNT_TIMEOUT;
    let mut record = [0; 8192];
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let timeout = PollTimeout::try_from(left).context("wait for an emergency remount")?;
        let ready = poll(&mut [PollFd::new(log.as_fd(), PollFlags::POLLIN)], timeout);
        anyhow::ensure!(
            ready.context("wait for an emergency remount")? > 0,
            "an emergency remount took more than {REMOUNT_TIMEOUT:?}"
        );
        // EPIPE: records were overwritten. The next read returns the oldest one.
        let length = log.read(&mut record).unwrap_or_default();
        if String::from_utf8_lossy(&record[..length]).contains(REMOUNTED) {
            return Ok(());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stats_entry_is_no_filesystem() {
        let directory = tempfile::tempdir().unwrap();
        assert_eq!(in_use(&directory.path().join("missing")), Vec::<String>::new());
        for name in ["stats", "vda"] {
            fs::create_dir(directory.path().join(name)).unwrap();
        }
        assert_eq!(in_use(directory.path()), ["vda"]);
    }
}

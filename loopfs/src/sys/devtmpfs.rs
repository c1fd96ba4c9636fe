//! Recognises a devtmpfs, in which the kernel creates the nodes of devices.

use nix::fcntl::{OFlag, open};
use nix::sys::stat::Mode;

use super::statx;

/// Returns `true` if the directory is in a devtmpfs, or if that cannot be found out. statfs(2) does not tell it from a tmpfs.
pub(crate) fn is_devtmpfs(directory: &str) -> bool {
    type_of(directory).is_none_or(|fs_type| fs_type == "devtmpfs")
}

/// Returns the type of the file system of a directory. Reads the table of the thread, because `/proc/self` has that of the main
/// thread, which may be in another mount namespace.
fn type_of(directory: &str) -> Option<String> {
    let directory =
        open(directory, OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC, Mode::empty()).ok()?;
    let id = statx::mount_id(directory).ok()??;
    let table = std::fs::read("/proc/thread-self/mountinfo").ok()?;
    type_of_mount(&String::from_utf8_lossy(&table), id).map(str::to_owned)
}

/// Returns the type of the mount with this id. Several mounts can be at one path, and from Linux 6.8 on the table is in the order
/// of their ids, whichever covers the others.
fn type_of_mount(mountinfo: &str, id: u64) -> Option<&str> {
    let id = id.to_string();
    let line = mountinfo.lines().find(|line| line.split(' ').next() == Some(id.as_str()))?;
    line.split_once(" - ")?.1.split(' ').next()
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    /// A tmpfs that was mounted elsewhere before the devtmpfs, and then moved over it.
    const TABLE: &str = "\
20 1 0:20 / /dev rw,nosuid - tmpfs tmpfs rw,size=64k
24 1 0:6 / /dev rw - devtmpfs udev rw,size=4k
240 24 0:24 / /dev/pts rw - devpts devpts rw
";

    #[rstest]
    #[case(20, Some("tmpfs"))]
    #[case(24, Some("devtmpfs"))]
    #[case(240, Some("devpts"))]
    #[case(2, None)]
    fn the_type_belongs_to_the_mount(#[case] id: u64, #[case] fs_type: Option<&str>) {
        assert_eq!(type_of_mount(TABLE, id), fs_type);
    }

    #[test]
    fn other_filesystems_are_no_devtmpfs() {
        assert!(!is_devtmpfs("/proc"));
        assert!(is_devtmpfs("/no/such/directory"), "the safe assumption");
    }
}

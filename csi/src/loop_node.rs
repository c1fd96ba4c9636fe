//! Recognises nodes of loop devices by their file status.

use std::collections::HashSet;

use loopfs::DeviceNumber;
use loopfs::mount::{KnownMount, RootFile};
use nix::sys::stat::{FileStat, SFlag, major, minor, stat};

/// The file systems in which device nodes are, other than that of `/dev`.
const NODE_FILESYSTEMS: [&str; 2] = ["devtmpfs", "tmpfs"];

/// Returns `true` if a path with this status is the node of a loop device.
pub(crate) fn is_loop_device(status: &FileStat) -> bool {
    is_loop(kind_of(status), number_of(status))
}

/// Returns the device number of the node with this status.
pub(crate) fn number_of(status: &FileStat) -> DeviceNumber {
    device_number(status.st_rdev)
}

/// Returns the mounts of nodes of loop devices, each with the number of its device.
///
/// The name of a mounted file proves nothing. A pod can have the kubelet mount, as a subPath of its own volume, a file of any name
/// or a device node that the pod created itself. Therefore the type and the number of the mounted file are read, and its file
/// system must be one in which a driver may have found the node:
/// - a devtmpfs, or the file system of the present `/dev`.
/// - a tmpfs: the `/dev` of another container, such as that of an earlier driver. An emptyDir in memory is a tmpfs, too, but its
///   directory is in the table.
///
/// Mounts of other file systems are not examined, because a statx(2) there could hang if their server does not respond.
///
/// # Errors
/// `/dev` cannot be examined.
pub(crate) fn mounted(mounts: &[KnownMount]) -> nix::Result<Vec<(KnownMount, DeviceNumber)>> {
    let dev = device_number(stat("/dev")?.st_dev);
    let examined = mounts
        .iter()
        .filter(|mount| mount.device == dev || NODE_FILESYSTEMS.contains(&mount.fs_type.as_str()));
    // A mount without a file was unmounted or covered.
    let files: Vec<_> = examined.filter_map(|mount| Some((mount, mount.root_file()?))).collect();
    let directories = files.iter().filter(|(_, file)| file_type(file.mode) == SFlag::S_IFDIR);
    let with_directories: HashSet<_> = directories.map(|(mount, _)| mount.device).collect();
    let is_of_driver = |mount: &KnownMount| {
        mount.device == dev || mount.fs_type == "devtmpfs" || !with_directories.contains(&mount.device)
    };
    let nodes = files.into_iter().filter(|(mount, file)| is_node(file) && is_of_driver(mount));
    Ok(nodes.map(|(mount, file)| (mount.clone(), file.device)).collect())
}

fn is_node(file: &RootFile) -> bool {
    is_loop(file_type(file.mode), file.device)
}

fn is_loop(file_type: SFlag, number: DeviceNumber) -> bool {
    const LOOP_MAJOR: u32 = 7;
    file_type == SFlag::S_IFBLK && number.major == LOOP_MAJOR
}

fn device_number(raw: u64) -> DeviceNumber {
    DeviceNumber { major: major(raw) as u32, minor: minor(raw) as u32 }
}

/// Returns the file type of a status.
pub(crate) fn kind_of(status: &FileStat) -> SFlag {
    file_type(status.st_mode)
}

fn file_type(mode: u32) -> SFlag {
    SFlag::from_bits_truncate(mode & SFlag::S_IFMT.bits())
}

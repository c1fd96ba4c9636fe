//! The mounted nodes of loop devices: those that a program has made available to others, such as containers.

use std::collections::HashSet;
use std::path::Path;
use std::sync::Mutex;
#[cfg(not(test))]
use std::sync::PoisonError;

use nix::sys::stat::{SFlag, stat};

use crate::error::{Context, Result};
use crate::mount::{KnownMount, MountCache};
use crate::units::DeviceNumber;

/// The major number of loop devices (linux/major.h).
pub const MAJOR: u32 = 7;

/// The file systems in which device nodes are, other than that of `/dev`.
const NODE_FILESYSTEMS: [&str; 2] = ["devtmpfs", "tmpfs"];

/// Returns the mounts of nodes of loop devices, each with the number of its device.
///
/// The name of a mounted file proves nothing. A pod can have the kubelet mount, as a subPath of its own volume, a file of any name
/// or a device node that the pod created itself. Therefore the type and the number of the mounted file are read, and its file
/// system must be one in which a program may have found the node:
/// - a devtmpfs, or the file system of the present `/dev`.
/// - a tmpfs: the `/dev` of another container, such as that of an earlier driver. An emptyDir in memory is a tmpfs, too, but its
///   directory is in the table.
///
/// Mounts of other file systems are not examined, because a statx(2) there could hang if their server does not respond.
///
/// # Errors
/// `/dev` cannot be examined.
pub fn mounted_nodes(mounts: &[KnownMount]) -> Result<Vec<(KnownMount, DeviceNumber)>> {
    let nodes = nodes_among(mounts)?;
    // A mount without a file was unmounted or covered.
    let number = |mount: &KnownMount| {
        let file = mount.root_file()?;
        is_loop_node(file.mode, file.device).then_some(file.device)
    };
    Ok(nodes.filter_map(|mount| Some((mount.clone(), number(mount)?))).collect())
}

/// Returns the numbers of the devices whose node is mounted in the mount namespace of this thread. A mount that another one covers
/// cannot be examined, so there the name of the node counts: containers may have it. `cache` spares reading the mounts that were known
/// before. `number_of` returns the number of an index.
#[cfg(not(test))]
pub(super) fn mounted_numbers(
    cache: &Mutex<MountCache>,
    number_of: impl Fn(u32) -> DeviceNumber,
) -> Result<HashSet<DeviceNumber>> {
    // A panic leaves a cache that has too few mounts, and the next read adds them.
    let mounts = cache.lock().unwrap_or_else(PoisonError::into_inner).read().map_err(|error| {
        error.with_remedy("mount /proc; it shows which devices other programs have published")
    })?;
    Ok(nodes_among(&mounts)?.filter_map(|mount| number_or_name(mount, &number_of)).collect())
}

#[cfg(test)]
pub(super) fn mounted_numbers(
    _cache: &Mutex<MountCache>,
    number_of: impl Fn(u32) -> DeviceNumber,
) -> Result<HashSet<DeviceNumber>> {
    let mounted = crate::sys::loop_dev::mounted().context("read", "/proc/thread-self/mountinfo")?;
    Ok(mounted.into_iter().map(number_of).collect())
}

/// Returns the number of the device whose node is mounted, or that of the index in its name if the node cannot be examined.
fn number_or_name(mount: &KnownMount, number_of: impl Fn(u32) -> DeviceNumber) -> Option<DeviceNumber> {
    match mount.root_file() {
        Some(file) => is_loop_node(file.mode, file.device).then_some(file.device),
        None => named_index(&mount.root).map(number_of),
    }
}

/// Returns the mounts whose root may be a node of a program.
fn nodes_among(mounts: &[KnownMount]) -> Result<impl Iterator<Item = &KnownMount>> {
    let dev = DeviceNumber::from_raw(stat("/dev").context("stat", "/dev")?.st_dev);
    let is_node_filesystem =
        move |mount: &&KnownMount| mount.device == dev || NODE_FILESYSTEMS.contains(&mount.fs_type.as_str());
    let is_directory = |mount: &&KnownMount| {
        mount.root_file().is_some_and(|file| file.mode & SFlag::S_IFMT.bits() == SFlag::S_IFDIR.bits())
    };
    let directories = mounts.iter().filter(is_node_filesystem).filter(is_directory);
    let with_directories: HashSet<_> = directories.map(|mount| mount.device).collect();
    let is_of_program = move |mount: &&KnownMount| {
        mount.device == dev || mount.fs_type == "devtmpfs" || !with_directories.contains(&mount.device)
    };
    Ok(mounts.iter().filter(is_node_filesystem).filter(is_of_program))
}

fn is_loop_node(mode: u32, number: DeviceNumber) -> bool {
    mode & SFlag::S_IFMT.bits() == SFlag::S_IFBLK.bits() && number.major == MAJOR
}

/// Returns N if the root of a mount is named `loopN`.
fn named_index(root: &Path) -> Option<u32> {
    let root = root.to_str()?;
    // The kernel appends this if the node was removed together with its device.
    let root = root.strip_suffix("//deleted").unwrap_or(root);
    root.rsplit('/').next()?.strip_prefix("loop")?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mount::table;

    const TABLE: &[u8] = b"\
40 24 0:5 /loop65536 /absent/1 rw - devtmpfs udev rw\n\
41 24 0:5 /loop70000//deleted /absent/2 rw - devtmpfs udev rw\n\
42 24 0:31 /loop-control /absent/3 rw - tmpfs t rw\n\
43 24 0:31 /loop7p1 /absent/loop9 rw - tmpfs t rw\n\
44 24 0:31 /dev/loop8 /absent/4 rw - overlay o rw\n";

    #[test]
    fn covered_nodes_are_found_by_name() {
        let mounts: Vec<_> = table::parse(TABLE).unwrap().into_iter().map(KnownMount::from).collect();
        let number = |index| DeviceNumber { major: MAJOR, minor: index };
        let found = nodes_among(&mounts).unwrap().filter_map(|mount| number_or_name(mount, number));
        let minors: Vec<u32> = found.map(|number| number.minor).collect();
        assert_eq!(minors, [65536, 70000]);
        assert!(mounted_nodes(&mounts).unwrap().is_empty());
    }

    #[test]
    fn only_loop_devices_are_loop_nodes() {
        let [block, file] = [SFlag::S_IFBLK, SFlag::S_IFREG].map(|kind| kind.bits() | 0o600);
        assert!(is_loop_node(block, DeviceNumber { major: MAJOR, minor: 1 }));
        assert!(!is_loop_node(block, DeviceNumber { major: 8, minor: 1 }));
        assert!(!is_loop_node(file, DeviceNumber { major: MAJOR, minor: 1 }));
    }
}

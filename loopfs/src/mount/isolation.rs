//! Judges whether the mounts of a process appear on the node.
//!
//! A container has a mount namespace of its own, and so has a systemd service with settings such as `PrivateMounts=`. A mount in
//! there appears on the node only if the mount below which it is made is shared (mount_namespaces(7)) with the node's namespace.

use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::{fmt, fs, io};

use super::table::{self, Mount};

/// The mount namespace of this thread.
const OWN: &str = "/proc/thread-self/ns/mnt";
/// The inode number of the initial pid namespace (`PID_NS_INIT_INO` of linux/nsfs.h).
const INITIAL_PID_NAMESPACE: u64 = 0xEFFF_FFFC;

/// Why file systems that this process mounts below a mount do not appear on the node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Isolation {
    /// The mount is private.
    Private,
    /// The mount receives mounts of the node and propagates none (a slave mount).
    ReceivesOnly,
    /// The mount is shared, but with no mount of another mount namespace, as in a systemd service with `PrivateTmp=`.
    NoPeers,
}

impl Isolation {
    /// Returns why file systems that this process mounts below `mount` do not appear on the node. Returns `None` if they do, or if
    /// that cannot be found out.
    ///
    /// The process is compared with process 1. If both are in one mount namespace, and all processes of the machine are
    /// visible, nothing is isolated, not even a private mount: a machine whose init program makes no mount shared has those.
    #[must_use]
    pub fn of(mount: &Mount) -> Option<Self> {
        judge(mount, Namespace::of_this_thread(), has_receiver)
    }
}

impl fmt::Display for Isolation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Private => "is private",
            Self::ReceivesOnly => "receives mounts of the node and propagates none",
            Self::NoPeers => "is shared with no other mount namespace",
        })
    }
}

/// The mount namespace of this process, as far as the process can find it out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Namespace {
    /// It is that of the machine's first process.
    Machine,
    /// It is that of process 1 of a container, which may be a node in a container, or it cannot be compared.
    Unknown,
    /// It is another one than that of process 1, or this process is process 1 of a container.
    Separate {
        /// The processes of all mount namespaces of the machine are visible.
        sees_all: bool,
    },
}

impl Namespace {
    fn of_this_thread() -> Self {
        let sees_all = fs::metadata("/proc/thread-self/ns/pid")
            .is_ok_and(|namespace| namespace.ino() == INITIAL_PID_NAMESPACE);
        if std::process::id() == 1 {
            return Self::Separate { sees_all: false };
        }
        match (fs::read_link(OWN), fs::read_link("/proc/1/ns/mnt")) {
            (Ok(own), Ok(first)) if own != first => Self::Separate { sees_all },
            (Ok(_), Ok(_)) if sees_all => Self::Machine,
            _ => Self::Unknown,
        }
    }
}

/// `has_receiver` returns `true` if a mount of another namespace receives the mounts of a peer group.
fn judge(mount: &Mount, namespace: Namespace, has_receiver: impl FnOnce(&str) -> bool) -> Option<Isolation> {
    let group = |kind: &str| mount.propagation.iter().find_map(|field| field.strip_prefix(kind));
    let (shared, receives) = (group("shared:"), group("master:").is_some());
    match namespace {
        Namespace::Machine => return None,
        // A development container, whose engine makes the root a slave mount. A driver in a container of its own is process 1
        // of that container, or in another namespace than process 1.
        Namespace::Unknown if mount.mount_point == Path::new("/") => return None,
        // A node whose init program makes no mount shared.
        Namespace::Unknown if mount.root == Path::new("/") && !receives => return None,
        Namespace::Unknown | Namespace::Separate { .. } => {}
    }
    match (shared, namespace) {
        (Some(group), Namespace::Separate { sees_all: true }) if !has_receiver(group) => {
            Some(Isolation::NoPeers)
        }
        (Some(_), _) => None,
        (None, _) if receives => Some(Isolation::ReceivesOnly),
        (None, _) => Some(Isolation::Private),
    }
}

/// Looks for a mount in another mount namespace that is in the peer group or receives from it. Returns `true` also if a process
/// that has not ended cannot be examined.
fn has_receiver(group: &str) -> bool {
    let (Ok(own), Ok(processes)) = (fs::read_link(OWN), fs::read_dir("/proc")) else { return true };
    let mut examined = BTreeSet::from([own]);
    for process in processes.flatten().filter(|entry| is_process_id(entry.file_name().as_encoded_bytes())) {
        match receives_in(&process.path(), group, &mut examined) {
            Ok(false) => {}
            Ok(true) => return true,
            Err(_) if has_ended(&process.path()) => {}
            Err(_) => return true,
        }
    }
    false
}

/// Returns `true` if a process has ended, also if its parent has not waited for it. Until then its directory in `/proc` has files,
/// but the process is in no mount namespace: `ns/mnt` is ENOENT, and the kernel returns EINVAL for `mountinfo`.
fn has_ended(process: &Path) -> bool {
    let ended = |error: &io::Error| {
        error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(libc::ESRCH)
    };
    fs::read_link(process.join("ns/mnt")).as_ref().is_err_and(ended)
}

fn is_process_id(name: &[u8]) -> bool {
    name.iter().all(u8::is_ascii_digit)
}

/// Examines the mount namespace of a process, unless it is among those that were examined.
fn receives_in(process: &Path, group: &str, examined: &mut BTreeSet<PathBuf>) -> io::Result<bool> {
    let namespace = fs::read_link(process.join("ns/mnt"))?;
    if examined.contains(&namespace) {
        return Ok(false);
    }
    let table = fs::read(process.join("mountinfo"))?;
    examined.insert(namespace);
    let mounts = table::parse(&table).map_err(io::Error::other)?;
    let is_of_group =
        |field: &String| ["shared:", "master:"].iter().any(|kind| field.strip_prefix(kind) == Some(group));
    Ok(mounts.iter().any(|mount| mount.propagation.iter().any(is_of_group)))
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    const PARTIAL: Namespace = Namespace::Separate { sees_all: false };
    const FULL: Namespace = Namespace::Separate { sees_all: true };

    /// Root, mount point, options and propagation of a mount. Only the peer group 7 has a receiver.
    #[rstest]
    #[case::bind_mount(PARTIAL, "/kubelet /k rw", Some(Isolation::Private))]
    #[case::bind_mount_of_a_whole_file_system(PARTIAL, "/ /k rw", Some(Isolation::Private))]
    #[case::receiving(PARTIAL, "/kubelet /k rw master:7", Some(Isolation::ReceivesOnly))]
    #[case::receiving_a_whole_file_system(PARTIAL, "/ /k rw master:7", Some(Isolation::ReceivesOnly))]
    #[case::shared(PARTIAL, "/kubelet /k rw shared:7", None)]
    #[case::shared_and_receiving(PARTIAL, "/ /k rw shared:9 master:7", None)]
    #[case::shared_with_the_node(FULL, "/ /k rw shared:7", None)]
    #[case::shared_within_a_service(FULL, "/ / rw shared:9 master:7", Some(Isolation::NoPeers))]
    #[case::private_within_a_service(FULL, "/ / rw", Some(Isolation::Private))]
    #[case::root_of_a_container(PARTIAL, "/ / rw master:7", Some(Isolation::ReceivesOnly))]
    #[case::private_root_of_the_machine(Namespace::Machine, "/ / rw", None)]
    #[case::private_subvolume_of_the_machine(Namespace::Machine, "/@var /var rw", None)]
    #[case::private_disk_of_a_node(Namespace::Unknown, "/ /var/lib/kubelet rw", None)]
    #[case::root_of_a_development_container(Namespace::Unknown, "/ / rw master:7", None)]
    #[case::bind_mount_beside_an_init_program(Namespace::Unknown, "/kubelet /k rw", Some(Isolation::Private))]
    #[case::receiving_beside_an_init_program(
        Namespace::Unknown,
        "/ /k rw master:7",
        Some(Isolation::ReceivesOnly)
    )]
    fn propagation_and_namespace_decide(
        #[case] namespace: Namespace,
        #[case] mount: &str,
        #[case] expected: Option<Isolation>,
    ) {
        let mounts = table::parse(format!("2 1 8:1 {mount} - ext4 /dev/sda1 rw\n").as_bytes()).unwrap();
        assert_eq!(judge(&mounts[0], namespace, |group| group == "7"), expected);
    }

    #[test]
    fn processes_receive_in_their_peer_groups() {
        assert!(is_process_id(b"1") && !is_process_id(b"self"));
        let own = PathBuf::from(format!("/proc/{}", std::process::id()));
        assert!(!receives_in(&own, "0", &mut BTreeSet::new()).unwrap());
        let mounts = table::read().unwrap();
        let shared =
            mounts.iter().flat_map(|m| &m.propagation).find_map(|field| field.strip_prefix("shared:"));
        if let Some(group) = shared {
            assert!(receives_in(&own, group, &mut BTreeSet::new()).unwrap());
        }
    }
}

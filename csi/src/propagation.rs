//! Checks that mounts of the driver reach the kubelet.
//!
//! A container has a mount namespace of its own. What the driver mounts there is seen on the node only if the container
//! engine has mounted the kubelet's directories with shared propagation (`mount_namespaces(7)`). Otherwise every publish
//! call would succeed, and pods would write to the node's root disk instead of to their volumes.

use std::path::Path;

use loopfs::mount::table::Mount;

/// The directories of the kubelet below which volumes are published: the targets of all volumes, and the staging paths
/// of Block volumes.
const PUBLISHED_BELOW: [&str; 2] = ["pods", "plugins"];

/// Returns a bind mount of one of the kubelet's directories from which mounts do not propagate to the node.
///
/// A mount of a whole file system is not suspected, although it may be private: on a node whose init program makes no
/// mount shared, the kubelet and a driver outside containers share a mount namespace.
pub(crate) fn unshared<'a>(mounts: &'a [Mount], kubelet_dir: &Path) -> Option<&'a Mount> {
    PUBLISHED_BELOW
        .iter()
        .filter_map(|name| holding(mounts, &kubelet_dir.join(name)))
        .find(|mount| mount.root != Path::new("/") && !mount.propagation.iter().any(|field| is_shared(field)))
}

/// Returns the mount on which `path` is. Of mounts at one place, the last covers the others.
fn holding<'a>(mounts: &'a [Mount], path: &Path) -> Option<&'a Mount> {
    mounts
        .iter()
        .filter(|mount| path.starts_with(&mount.mount_point))
        .max_by_key(|mount| mount.mount_point.components().count())
}

fn is_shared(field: &str) -> bool {
    field.starts_with("shared:")
}

#[cfg(test)]
mod tests {
    use loopfs::mount::table;
    use rstest::rstest;

    use super::*;

    const ROOT: &str = "1 0 0:1 / / rw - overlay overlay rw\n";

    /// A container with a read-only root, in which the engine has mounted the kubelet's directory.
    #[rstest]
    #[case::shared("2 1 8:1 /var/lib/kubelet /k rw shared:7 - ext4 /dev/sda1 rw", None)]
    #[case::shared_and_receiving(
        "2 1 8:1 /var/lib/kubelet /k rw shared:7 master:3 - ext4 /dev/sda1 rw",
        None
    )]
    #[case::private("2 1 8:1 /var/lib/kubelet /k rw - ext4 /dev/sda1 rw", Some("/k"))]
    #[case::receiving("2 1 8:1 /var/lib/kubelet /k rw master:3 - ext4 /dev/sda1 rw", Some("/k"))]
    #[case::a_node_without_shared_mounts("2 1 8:1 / /k rw - ext4 /dev/sda1 rw", None)]
    #[case::of_another_directory("2 1 8:1 /var/lib/other /kubelet rw - ext4 /dev/sda1 rw", None)]
    #[case::one_of_two(
        "2 1 8:1 /l/pods /k/pods rw shared:7 - ext4 /dev/sda1 rw\n3 1 8:1 /l/plugins /k/plugins rw - ext4 /dev/sda1 rw",
        Some("/k/plugins")
    )]
    #[case::covered(
        "2 1 8:1 /l /k rw shared:7 - ext4 /dev/sda1 rw\n3 2 8:1 /l /k rw master:7 - ext4 /dev/sda1 rw",
        Some("/k")
    )]
    #[case::volumes_of_pods(
        "2 1 8:1 /l /k rw shared:7 - ext4 /dev/sda1 rw\n3 2 8:2 /d /k/pods/p rw - xfs /dev/sdb rw",
        None
    )]
    fn a_bind_mount_from_which_mounts_do_not_propagate_is_found(
        #[case] mounts: &str,
        #[case] expected: Option<&str>,
    ) {
        let mounts = table::parse(format!("{ROOT}{mounts}\n").as_bytes()).unwrap();
        let found = unshared(&mounts, Path::new("/k")).map(|mount| mount.mount_point.to_str().unwrap());
        assert_eq!(found, expected);
    }
}

//! Parameters below `csi.storage.k8s.io/`, which belong to Kubernetes and its sidecars rather than to this driver.
//!
//! external-provisioner and csi-snapshotter evaluate the file system type and the names of secrets themselves. With
//! `--extra-create-metadata` they add the names of the objects to which a request belongs. They also refuse prefixed
//! parameters that they do not know.
//!
//! The provisioner accepts the parameters that a StorageClass may have. It has a list of its own. Neither crate
//! knows the other; of the crates below both, `loopfs` must not know Kubernetes, and `monitoring` must not know
//! volumes. A test compares the two lists.

const PREFIX: &str = "csi.storage.k8s.io/";

/// The file system of all volumes.
const FILE_SYSTEM: &str = "xfs";

/// `fstype`, in the form in which errors list it.
pub(super) const FSTYPE: &str = "csi.storage.k8s.io/fstype (xfs or empty)";

const OF_A_VOLUME: [&str; 3] = ["pv/name", "pvc/name", "pvc/namespace"];
const OF_A_SNAPSHOT: [&str; 3] =
    ["volumesnapshot/name", "volumesnapshot/namespace", "volumesnapshotcontent/name"];

/// The calls that name secrets, as a prefix of `secret-name` and `secret-namespace`. The empty prefix is the default of
/// the others. This driver uses no secrets.
const SECRETS: [&str; 9] = [
    "",
    "provisioner-",
    "controller-publish-",
    "controller-expand-",
    "node-stage-",
    "node-publish-",
    "node-expand-",
    "snapshotter-",
    "snapshotter-list-",
];

/// Checks a parameter of a volume. Returns `None` if the parameter is not reserved, or if Kubernetes does not define it.
pub(super) fn of_volume(name: &str, value: &str) -> Option<Result<(), String>> {
    match name.strip_prefix(PREFIX)? {
        "fstype" if value.is_empty() || value == FILE_SYSTEM => Some(Ok(())),
        "fstype" => Some(Err(format!(
            "{name} is {value:?}: volumes are directories of the node's {FILE_SYSTEM} file system, or block devices that the \
             workload formats; leave it out"
        ))),
        rest => (OF_A_VOLUME.contains(&rest) || names_a_secret(rest)).then_some(Ok(())),
    }
}

/// Returns `true` if Kubernetes defines the parameter for a snapshot. No such parameter has an effect in this driver.
pub(super) fn is_of_snapshot(name: &str) -> bool {
    name.strip_prefix(PREFIX).is_some_and(|rest| OF_A_SNAPSHOT.contains(&rest) || names_a_secret(rest))
}

fn names_a_secret(name: &str) -> bool {
    let call = name.strip_suffix("secret-name").or_else(|| name.strip_suffix("secret-namespace"));
    call.is_some_and(|call| SECRETS.contains(&call))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A StorageClass that the provisioner accepts must not fail in the Controller service, and the other way round.
    #[test]
    fn the_provisioner_accepts_the_same_parameters_of_a_storage_class() {
        const OF_THE_PROVISIONER: &str =
            include_str!("../../../provisioner/src/objects/parameters/reserved.rs");
        let is_of_a_class = |call: &&str| !call.starts_with("snapshotter-");
        let secrets: Vec<String> =
            SECRETS.into_iter().filter(is_of_a_class).map(|call| format!("    {call:?},")).collect();
        let secrets = format!("const SECRETS: [&str; {}] = [\n{}\n];", secrets.len(), secrets.join("\n"));
        let constants = [("PREFIX", PREFIX), ("FILE_SYSTEM", FILE_SYSTEM), ("FSTYPE", FSTYPE)]
            .map(|(name, value)| format!("const {name}: &str = {value:?};"));
        for text in constants.iter().chain([&secrets]) {
            assert!(OF_THE_PROVISIONER.contains(text), "the provisioner's list has no {text}");
        }
    }
}

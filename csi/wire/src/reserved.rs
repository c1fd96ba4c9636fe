//! Parameters below `csi.storage.k8s.io/`, which belong to Kubernetes and its sidecars rather than to this driver.
//!
//! external-provisioner and csi-snapshotter evaluate the file system type and the names of secrets themselves. With
//! `--extra-create-metadata` they add the names of the objects to which a request belongs. They also refuse prefixed
//! parameters that they do not know. Classes that were written for them, or by a tool that always sets the file system type, work with
//! this driver and with its provisioner as well.

use std::collections::HashMap;

const PREFIX: &str = "csi.storage.k8s.io/";

/// The file system of all volumes.
const FILE_SYSTEM: &str = "xfs";

/// `fstype`, in the form in which refusals list it.
pub const FSTYPE: &str = "csi.storage.k8s.io/fstype (xfs or empty)";

/// The annotation of a volume with the claim that it was created for, as `NAMESPACE/NAME`. `loopfs store list` shows it.
pub const CLAIM_ANNOTATION: &str = "claim";

const OF_A_VOLUME: [&str; 3] = ["pv/name", "pvc/name", "pvc/namespace"];
const OF_A_SNAPSHOT: [&str; 3] =
    ["volumesnapshot/name", "volumesnapshot/namespace", "volumesnapshotcontent/name"];

/// The calls that name secrets, as a prefix of `secret-name` and `secret-namespace`. The empty prefix is the default of
/// the others. This driver uses no secrets.
const SECRETS_OF_A_CLASS: [&str; 7] = [
    "",
    "provisioner-",
    "controller-publish-",
    "controller-expand-",
    "node-stage-",
    "node-publish-",
    "node-expand-",
];
const SECRETS_OF_A_SNAPSHOT_CLASS: [&str; 3] = ["", "snapshotter-", "snapshotter-list-"];

/// Checks a parameter of a StorageClass. Returns `None` if the parameter is not reserved, or if Kubernetes does not define it.
#[must_use]
pub fn of_class(name: &str, value: &str) -> Option<Result<(), String>> {
    match name.strip_prefix(PREFIX)? {
        "fstype" if value.is_empty() || value == FILE_SYSTEM => Some(Ok(())),
        "fstype" => Some(Err(format!(
            "{name} is {value:?}: volumes are directories of the node's {FILE_SYSTEM} file system, or block devices that the \
             workload formats; leave it out"
        ))),
        rest => names_a_secret(rest, &SECRETS_OF_A_CLASS).then_some(Ok(())),
    }
}

/// Checks a parameter of a request for a volume: one of its class, or what external-provisioner adds.
#[must_use]
pub fn of_volume(name: &str, value: &str) -> Option<Result<(), String>> {
    match name.strip_prefix(PREFIX)? {
        added if OF_A_VOLUME.contains(&added) => Some(Ok(())),
        _ => of_class(name, value),
    }
}

/// Returns the claim of a request for a volume as `NAMESPACE/NAME`, if external-provisioner has added it.
#[must_use]
pub fn claim_of(parameters: &HashMap<String, String>) -> Option<String> {
    let value = |name: &str| parameters.get(&format!("{PREFIX}pvc/{name}"));
    Some(format!("{}/{}", value("namespace")?, value("name")?))
}

/// Returns `true` if Kubernetes defines the parameter for a snapshot. No such parameter has an effect in this driver.
#[must_use]
pub fn is_of_snapshot(name: &str) -> bool {
    name.strip_prefix(PREFIX).is_some_and(|rest| {
        OF_A_SNAPSHOT.contains(&rest) || names_a_secret(rest, &SECRETS_OF_A_SNAPSHOT_CLASS)
    })
}

fn names_a_secret(name: &str, calls: &[&str]) -> bool {
    let call = name.strip_suffix("secret-name").or_else(|| name.strip_suffix("secret-namespace"));
    call.is_some_and(|call| calls.contains(&call))
}

//! Parameters of a storage class below `csi.storage.k8s.io/`, which external-provisioner defines for all drivers.
//!
//! Classes that were written for it, or by a tool that always sets the file system type, work here as well.

const PREFIX: &str = "csi.storage.k8s.io/";

/// The file system of all volumes.
const FILE_SYSTEM: &str = "xfs";

/// `fstype`, as refusals list it.
pub(super) const FSTYPE: &str = "csi.storage.k8s.io/fstype (xfs or empty)";

/// Calls that name secrets, as a prefix of `secret-name` and `secret-namespace`. The empty one is the default of the others.
/// The driver uses no secrets.
const SECRETS: [&str; 7] = [
    "",
    "provisioner-",
    "controller-publish-",
    "controller-expand-",
    "node-stage-",
    "node-publish-",
    "node-expand-",
];

/// Checks a parameter. Returns `None` if it is not reserved, or if external-provisioner does not define it.
pub(super) fn check(name: &str, value: &str) -> Option<Result<(), String>> {
    match name.strip_prefix(PREFIX)? {
        "fstype" if value.is_empty() || value == FILE_SYSTEM => Some(Ok(())),
        "fstype" => Some(Err(format!(
            "{name} is {value:?}: volumes are directories of the node's {FILE_SYSTEM} file system, or block devices that the \
             workload formats; leave it out"
        ))),
        rest => names_a_secret(rest).then_some(Ok(())),
    }
}

fn names_a_secret(name: &str) -> bool {
    let call = name.strip_suffix("secret-name").or_else(|| name.strip_suffix("secret-namespace"));
    call.is_some_and(|call| SECRETS.contains(&call))
}

//! The objects of the stories, as a user would write them.

use anyhow::Result;
use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod};
use serde_json::json;
use testvm_cluster::workload::{self, PodProgram, typed};
pub(crate) use testvm_cluster::workload::{Held, VolumeMode, create_namespace};

use super::sizes::Size;
use crate::nodes::{SHELL, VOLUME_CHECK};

/// Returns the name of an object of a volume of this mode.
pub(crate) fn name_of(prefix: &str, mode: VolumeMode) -> String {
    format!("{prefix}-{}", mode.as_str().to_lowercase())
}

/// The command of a pod that only keeps its claims.
const HOLD: &[&str] = &["/volume-check", "hold"];

/// The path of the emptyDir in a [`scratch_pod`], whose volume has the name without the slash.
pub(crate) const SCRATCH: &str = "/scratch";

/// The claims of the main flow, as a StatefulSet names them: template name, then pod name.
pub(crate) const FLOW: &str = "flow";
pub(crate) const FLOW_POD: &str = "flow-0";
pub(crate) const FLOW_CLAIMS: [&str; 3] = ["vol-default-flow-0", "vol-readonly-flow-0", "vol-block-flow-0"];

/// The paths of the Filesystem volumes in the pod of the main flow.
pub(crate) const WRITABLE_PATH: &str = "/vol/default";
pub(crate) const READ_ONLY_PATH: &str = "/vol/readonly";

/// Returns a StatefulSet with three claims of one size: mounted, mounted read-only, and as a block device.
pub(crate) fn flow(class: &str, size: Size) -> Result<StatefulSet> {
    let template = |name: &str, mode: VolumeMode| {
        json!({
            "metadata": {"name": name},
            "spec": workload::claim_spec(class, &size.quantity(), mode, "ReadWriteOnce"),
        })
    };
    typed(json!({
        "metadata": {"name": FLOW},
        "spec": {
            "serviceName": FLOW,
            "replicas": 1,
            "selector": {"matchLabels": {"app": FLOW}},
            "template": {
                "metadata": {"labels": {"app": FLOW}},
                "spec": {
                    "terminationGracePeriodSeconds": 5,
                    "containers": [{
                        "name": "volume-check",
                        "image": VOLUME_CHECK,
                        "imagePullPolicy": "Never",
                        "command": HOLD,
                        "volumeMounts": [
                            {"name": "vol-default", "mountPath": WRITABLE_PATH},
                            {"name": "vol-readonly", "mountPath": READ_ONLY_PATH, "readOnly": true},
                        ],
                        "volumeDevices": [{"name": "vol-block", "devicePath": "/vol/block"}],
                    }],
                },
            },
            "volumeClaimTemplates": [
                template("vol-default", VolumeMode::Filesystem),
                template("vol-readonly", VolumeMode::Filesystem),
                template("vol-block", VolumeMode::Block),
            ],
        },
    }))
}

/// Returns a claim of a StorageClass.
pub(crate) fn claim(
    name: &str,
    class: &str,
    size: Size,
    mode: VolumeMode,
    access: &str,
) -> Result<PersistentVolumeClaim> {
    workload::claim(name, class, &size.quantity(), mode, access)
}

/// Returns a pod that has a claim as `/vol` and does not use it by itself.
pub(crate) fn holder(name: &str, claim: &str, mode: VolumeMode) -> Result<Pod> {
    holder_of(name, &[Held { claim, path: "/vol", mode, read_only: false }])
}

/// Returns a pod that has claims and does not use them by itself.
pub(crate) fn holder_of(name: &str, held: &[Held<'_>]) -> Result<Pod> {
    workload::pod(name, PodProgram { container: "volume-check", image: VOLUME_CHECK, command: HOLD }, held)
}

/// Returns a pod with a shell, an emptyDir at [`SCRATCH`] and claims. It does not use them by itself.
pub(crate) fn scratch_pod(name: &str, size_limit: Size, held: &[Held<'_>]) -> Result<Pod> {
    let mut pod = holder_of(name, held)?;
    let spec = pod.spec.get_or_insert_default();
    let volume_name = SCRATCH.trim_start_matches('/');
    let volume = typed(json!({"name": volume_name, "emptyDir": {"sizeLimit": size_limit.quantity()}}))?;
    spec.volumes.get_or_insert_default().push(volume);
    for container in &mut spec.containers {
        container.image = Some(SHELL.to_owned());
        container.command = Some(["/bin/sh", "-c", "exec sleep infinity"].map(str::to_owned).into());
        let mount = typed(json!({"name": volume_name, "mountPath": SCRATCH}))?;
        container.volume_mounts.get_or_insert_default().push(mount);
    }
    Ok(pod)
}

//! The objects of the stories, as a user would write them.

use anyhow::{Context, Result};
use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::StorageClass;
use serde_json::{Value, json};
use testvm_cluster::workload::{self, PodProgram};
pub(crate) use testvm_cluster::workload::{Held, VolumeMode, create_namespace};

use super::sizes::Size;
use crate::nodes::{SHELL, VOLUME_CHECK};

/// The port on which the test program serves its latest verdict.
pub(crate) const VERDICT_PORT: u16 = 8080;

/// The path of the emptyDir in a [`scratch_pod`], whose volume has the name without the slash.
pub(crate) const SCRATCH: &str = "/scratch";

/// The claims of the main flow, as a StatefulSet names them: template name, then pod name.
pub(crate) const FLOW: &str = "flow";
pub(crate) const FLOW_POD: &str = "flow-0";
pub(crate) const FLOW_CLAIMS: [&str; 3] = ["vol-default-flow-0", "vol-readonly-flow-0", "vol-block-flow-0"];

/// The paths of the Filesystem volumes in the pod of the main flow.
pub(crate) const WRITABLE_PATH: &str = "/vol/default";
pub(crate) const READ_ONLY_PATH: &str = "/vol/readonly";

/// The arguments of the main flow's test program.
pub(crate) struct FlowSpec<'a> {
    pub(crate) class: &'a StorageClass,
    pub(crate) size: Size,
    pub(crate) grown: Size,
}

/// Returns a StatefulSet with three claims of one size: mounted, mounted read-only, and as a block device.
pub(crate) fn flow(spec: &FlowSpec<'_>) -> Result<StatefulSet> {
    let class = spec.class.metadata.name.as_deref().context("the StorageClass has no name")?;
    let template = |name: &str, mode: VolumeMode| {
        json!({
            "metadata": {"name": name},
            "spec": workload::claim_spec(class, &spec.size.quantity(), mode, "ReadWriteOnce"),
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
                        "command": ["/volume-check"],
                        "args": [
                            "watch",
                            "--size", spec.size.bytes().to_string(),
                            "--grown-size", spec.grown.bytes().to_string(),
                            "--flags", enforced_flags(spec.class),
                            "--listen", VERDICT_PORT.to_string(),
                            format!("writable:{WRITABLE_PATH}"), format!("readonly:{READ_ONLY_PATH}"), "block:/vol/block",
                        ],
                        "ports": [{"containerPort": VERDICT_PORT}],
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
    let command = &["/volume-check", "hold"];
    workload::pod(name, PodProgram { container: "volume-check", image: VOLUME_CHECK, command }, held)
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

/// Returns those of the class's mount options that restrict a program and that it can see on its mount.
pub(crate) fn enforced_flags(class: &StorageClass) -> String {
    let options = class.mount_options.iter().flatten();
    let flags: Vec<&str> = options
        .map(String::as_str)
        .filter(|option| matches!(*option, "nosuid" | "nodev" | "noexec"))
        .collect();
    flags.join(",")
}

fn typed<K: serde::de::DeserializeOwned>(value: Value) -> Result<K> {
    serde_json::from_value(value).context("an object of the test is not what its type says")
}

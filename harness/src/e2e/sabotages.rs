//! Changes of the node and of objects of the API that the sabotages of several stories make.

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::{Pod, PodSpec};
use kube::core::ObjectMeta;
use testvm_cluster::{TOOLS_DIR, objects};

use crate::nodes::{DATA_DIR, LOOPFS_TOOL};
use crate::test_env::environment::{FOREIGN_NODE, TestEnv};
use crate::test_env::pods;
use crate::test_env::rejected_writes::{Rejected, reject};

/// The name of no volume, in the form of one.
const STRAY: &str = "DATA/volumes/pvc-00000000-0000-4000-8000-000000000000";

/// Runs a script on the node, in which `DATA` is the data directory and `TOOL` the tool of loopfs.
pub(super) async fn on_node(env: &TestEnv<'_>, script: impl AsRef<str>) -> Result<()> {
    let node = env.node.context(FOREIGN_NODE)?;
    let tool = format!("{TOOLS_DIR}/{LOOPFS_TOOL}");
    let script = script.as_ref().replace("DATA", DATA_DIR).replace("TOOL", &tool);
    node.output(&["sh", "-exc", &script]).await.map(drop)
}

/// Overwrites the files that the pods of the stories wrote, as a driver that mixes up volumes does.
pub(super) async fn overwrite_files(env: &TestEnv<'_>) -> Result<()> {
    on_node(env, "for file in DATA/volumes/*/file; do printf 'of another volume' > \"$file\"; done; sync")
        .await
}

/// Creates a volume that no claim has.
pub(super) async fn add_volume(env: &TestEnv<'_>) -> Result<()> {
    on_node(env, format!("mkdir {STRAY}")).await
}

pub(super) async fn remove_volume(env: &TestEnv<'_>) -> Result<()> {
    on_node(env, format!("rm -rf {STRAY}")).await
}

/// Has the API server reject these writes of PersistentVolumes, so that no claim is bound or expanded.
pub(super) async fn reject_writes(env: &TestEnv<'_>, rejected: Rejected) -> Result<()> {
    reject(env, rejected).await?;
    env.timeouts.shorten();
    Ok(())
}

/// Replaces a pod by one of the same name with a change.
pub(super) async fn replace_pod(
    env: &TestEnv<'_>,
    name: &str,
    change: impl FnOnce(&mut PodSpec),
) -> Result<()> {
    let pod = objects::read(&env.pods(), name).await?;
    pods::end(env, name).await?;
    let mut spec = pod.spec.context("the pod has no spec")?;
    change(&mut spec);
    pods::create(env, &Pod { metadata: named(name), spec: Some(spec), status: None }).await
}

/// Has the pod mount its claims writable.
pub(super) fn mount_writable(pod: &mut PodSpec) {
    for volume in pod.volumes.iter_mut().flatten() {
        if let Some(claim) = &mut volume.persistent_volume_claim {
            claim.read_only = None;
        }
    }
    let mounts = pod.containers.iter_mut().flat_map(|container| container.volume_mounts.iter_mut().flatten());
    for mount in mounts.filter(|mount| mount.mount_path.starts_with("/vol")) {
        mount.read_only = None;
    }
}

pub(super) fn named(name: &str) -> ObjectMeta {
    ObjectMeta { name: Some(name.to_owned()), ..ObjectMeta::default() }
}

//! The deletion of a VolumeSnapshot whose node was deleted does not finish, because no csi-snapshotter removes the finalizer
//! of its VolumeSnapshotContent. An administrator removes the finalizer, as the manual says.

use anyhow::Result;
use kube::ResourceExt;
use serde_json::json;
use testvm::steps::{StepResult, Steps};
use testvm_cluster::objects;

use crate::test_env::environment::TestEnv;
use crate::test_env::snapshots::{self, Existing, IN_DELETION, contents, snapshots};
use crate::test_env::workload::VolumeMode;

/// A snapshot of a node that never existed, so that no csi-snapshotter handles its objects.
const SNAPSHOT: Existing<'_> = Existing {
    name: "of-deleted-node",
    handle: "snapshot-of-deleted-node",
    mode: VolumeMode::Filesystem,
    node: "deleted-node",
};

pub(super) async fn run(steps: &mut Steps<'_>, env: &TestEnv<'_>) -> StepResult {
    steps.step("the deletion of a VolumeSnapshot of a deleted node does not finish", stays(env)).await?;
    steps.step("without its content's finalizer, the VolumeSnapshot is deleted", released(env)).await
}

async fn stays(env: &TestEnv<'_>) -> Result<()> {
    let (name, within) = (SNAPSHOT.name, env.timeouts.start);
    snapshots::import(env, SNAPSHOT).await?;
    snapshots::until(contents(env), name, within, "snapshot-controller does not bind it", |content| {
        let uid = content.data.pointer("/spec/volumeSnapshotRef/uid");
        uid.is_some() && content.metadata.finalizers.as_ref().is_some_and(|names| !names.is_empty())
    })
    .await?;
    // snapshot-controller deletes a bound content only after it has recorded the binding in both objects.
    snapshots::until(snapshots(env), name, within, "it is not bound", |snapshot| {
        let bound = snapshot.data.pointer("/status/boundVolumeSnapshotContentName");
        bound.is_some() && snapshot.finalizers().iter().any(|name| name.ends_with("-bound-protection"))
    })
    .await?;
    objects::delete(&snapshots(env), name).await?;
    snapshots::until(contents(env), name, within, "snapshot-controller does not delete it", |content| {
        content.metadata.deletion_timestamp.is_some()
            && content.metadata.annotations.as_ref().is_some_and(|names| names.contains_key(IN_DELETION))
    })
    .await?;
    snapshots::until(snapshots(env), name, within, "it was deleted", |snapshot| {
        snapshot.metadata.deletion_timestamp.is_some()
    })
    .await
}

async fn released(env: &TestEnv<'_>) -> Result<()> {
    let without_finalizers = json!({"metadata": {"finalizers": null}});
    objects::patch(&contents(env), SNAPSHOT.name, &without_finalizers).await?;
    objects::until_gone(contents(env), SNAPSHOT.name, env.timeouts.end).await?;
    objects::until_gone(snapshots(env), SNAPSHOT.name, env.timeouts.end).await
}

//! A VolumeSnapshot whose node does not exist any more stays when it is deleted, because no csi-snapshotter removes the
//! finalizer of its VolumeSnapshotContent. An administrator removes it, as the manual says.

use anyhow::Result;

use crate::e2e::scenario::{Scenario, StepResult};
use crate::test_env::environment::TestEnv;
use crate::test_env::snapshots::{self, Existing, IN_DELETION};
use crate::test_env::workload::VolumeMode;

/// A snapshot of a node that never existed: nothing handles it.
const SNAPSHOT: Existing<'_> = Existing {
    name: "of-deleted-node",
    handle: "snapshot-of-deleted-node",
    mode: VolumeMode::Filesystem,
    node: "deleted-node",
};

pub(super) async fn run(scenario: &mut Scenario<'_>, env: &TestEnv<'_>) -> StepResult {
    scenario.step("a VolumeSnapshot of a deleted node stays when it is deleted", stays(env)).await?;
    scenario.step("without the finalizer of its content, it is deleted", released(env)).await
}

async fn stays(env: &TestEnv<'_>) -> Result<()> {
    let name = SNAPSHOT.name;
    snapshots::import(env, SNAPSHOT).await?;
    snapshots::until_content(env, name, "it is not bound", |content| {
        let uid = content.data.pointer("/spec/volumeSnapshotRef/uid");
        uid.is_some() && content.metadata.finalizers.as_ref().is_some_and(|names| !names.is_empty())
    })
    .await?;
    snapshots::delete_snapshot(env, name).await?;
    snapshots::until_content(env, name, "its deletion is not requested", |content| {
        content.metadata.deletion_timestamp.is_some()
            && content.metadata.annotations.as_ref().is_some_and(|names| names.contains_key(IN_DELETION))
    })
    .await
}

async fn released(env: &TestEnv<'_>) -> Result<()> {
    snapshots::release_content(env, SNAPSHOT.name).await?;
    snapshots::content_gone(env, SNAPSHOT.name).await?;
    snapshots::snapshot_gone(env, SNAPSHOT.name).await
}

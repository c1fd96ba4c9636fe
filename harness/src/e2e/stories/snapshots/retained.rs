//! A snapshot of a class with the policy Retain outlives its objects and its volume. An administrator creates new objects
//! for the snapshot.

use anyhow::Result;
use kube::ResourceExt;
use testvm::steps::{StepResult, Steps};
use testvm_cluster::{Node, objects};

use super::names::{SIZE, snapshots_on};
use super::restored::{restored, written};
use crate::test_env::claims;
use crate::test_env::environment::TestEnv;
use crate::test_env::pods::end;
use crate::test_env::snapshots::{self, Existing, classes, contents, snapshots};
use crate::test_env::workload::{VolumeMode, name_of};

/// Classes have no namespace, so the story deletes its own.
const CLASS: &str = "loopfs-e2e-retain";

pub(super) async fn run(
    steps: &mut Steps<'_>,
    env: &TestEnv<'_>,
    node: &Node,
    mode: VolumeMode,
) -> StepResult {
    let handle = steps
        .step(
            &format!("{mode}: a retained snapshot outlives its volume and its objects"),
            retain(env, node, mode),
        )
        .await?;
    let imported = name_of("imported", mode);
    let existing = Existing { name: &imported, handle: &handle, mode, node: node.name() };
    let claim = name_of("from-imported", mode);
    let restored = async {
        snapshots::import(env, existing).await?;
        snapshots::ready(env, &imported).await?;
        restored(env, &claim, &imported, SIZE, mode).await
    };
    steps
        .step(&format!("{mode}: a claim is restored from new objects of the retained snapshot"), restored)
        .await?;
    let deleted = async {
        claims::delete(env, &claim).await?;
        objects::remove(snapshots(env), &imported, env.timeouts.end).await?;
        objects::until_gone(contents(env), &imported, env.timeouts.end).await?;
        let left = snapshots_on(node).await?;
        anyhow::ensure!(left.is_empty(), "the node still has the snapshots {left:?}");
        anyhow::Ok(())
    };
    steps.step(&format!("{mode}: the snapshot is deleted with its new objects"), deleted).await
}

/// Takes a snapshot, deletes everything but its data, and returns its handle.
async fn retain(env: &TestEnv<'_>, node: &Node, mode: VolumeMode) -> Result<String> {
    let (claim, snapshot) = (name_of("retained-source", mode), name_of("retained-snapshot", mode));
    written(env, &claim, mode).await?;
    end(env, &claim).await?;
    objects::create(&classes(env), &snapshots::retaining_class(env, CLASS)).await?;
    snapshots::request(env, &snapshot, &claim, Some(CLASS)).await?;
    let content = snapshots::ready(env, &snapshot).await?;
    let handle = snapshots::text(&content, "/status/snapshotHandle")?.to_owned();
    claims::delete_with_volume(env, &claim).await?;
    objects::remove(snapshots(env), &snapshot, env.timeouts.end).await?;
    // The VolumeSnapshotContent outlives its VolumeSnapshot, until an administrator deletes it.
    objects::remove(contents(env), &content.name_any(), env.timeouts.end).await?;
    objects::delete(&classes(env), CLASS).await?;
    let kept = snapshots_on(node).await?;
    anyhow::ensure!(kept == [handle.as_str()], "the node has the snapshots {kept:?}, not {handle}");
    Ok(handle)
}

//! A snapshot that is taken while a pod writes is restored to a volume of the same size and to a larger volume.

use std::cell::Cell;

use anyhow::Result;
use testvm::steps::{StepResult, Steps};
use testvm_cluster::objects;

use super::names::{SIZE, volume};
use crate::test_env::environment::TestEnv;
use crate::test_env::pods::{check_kept, check_new, end, start, start_new, write};
use crate::test_env::sizes::Size;
use crate::test_env::workload::{VolumeMode, name_of};
use crate::test_env::{claims, snapshots};

const LARGER: Size = Size::mebibytes(4);
/// The file of a Filesystem volume to which the pod writes while the snapshot is taken.
const LOAD: &str = "/vol/load";

pub(super) async fn run(steps: &mut Steps<'_>, env: &TestEnv<'_>, mode: VolumeMode) -> StepResult {
    let [source, snapshot, same, larger] =
        ["source", "snapshot", "restored", "larger"].map(|prefix| name_of(prefix, mode));
    steps.step(&format!("{mode}: a pod writes to a claim"), written(env, &source, mode)).await?;
    steps
        .step(
            &format!("{mode}: a snapshot is taken while the pod writes"),
            taken(env, &snapshot, &source, mode),
        )
        .await?;
    steps
        .step(&format!("{mode}: later writes of the pod change the source"), changed(env, &source, mode))
        .await?;
    steps
        .step(
            &format!("{mode}: a volume of the same size has the content of the snapshot"),
            restored(env, &same, &snapshot, SIZE, mode),
        )
        .await?;
    steps
        .step(
            &format!("{mode}: a larger volume has the content of the snapshot and the larger size"),
            restored(env, &larger, &snapshot, LARGER, mode),
        )
        .await?;
    let removed = async {
        end(env, &source).await?;
        for claim in [&source, &same, &larger] {
            claims::delete(env, claim).await?;
        }
        objects::remove(snapshots::snapshots(env), &snapshot, env.timeouts.end).await
    };
    steps.step(&format!("{mode}: claims and the snapshot are deleted"), removed).await
}

/// Creates a claim, and a pod of its name that writes to it.
pub(super) async fn written(env: &TestEnv<'_>, source: &str, mode: VolumeMode) -> Result<()> {
    start_new(env, source, SIZE, mode).await?;
    check_new(env, source, SIZE, &volume(mode)).await
}

/// Takes a snapshot of the default class while the pod writes.
async fn taken(env: &TestEnv<'_>, snapshot: &str, source: &str, mode: VolumeMode) -> Result<()> {
    let is_taken = Cell::new(false);
    let taken = async {
        snapshots::request(env, snapshot, source, None).await?;
        snapshots::ready(env, snapshot).await?;
        is_taken.set(true);
        Ok(())
    };
    tokio::try_join!(taken, write_load(env, source, mode, &is_taken)).map(drop)
}

/// Writes to the volume until the snapshot is taken, and ends with a whole write. The snapshot of a device has the content of an
/// unknown moment during the writes, so a device gets the content that it has already. In a snapshot of a directory, each
/// file has the content of a moment of its own, so the writes go to a file that no step compares.
async fn write_load(env: &TestEnv<'_>, pod: &str, mode: VolumeMode, is_taken: &Cell<bool>) -> Result<()> {
    let mut round: u64 = 0;
    while !is_taken.get() {
        round += 1;
        match mode {
            VolumeMode::Filesystem => write(env, pod, LOAD, &round.to_string()).await?,
            VolumeMode::Block => check_new(env, pod, SIZE, &volume(mode)).await?,
        }
    }
    Ok(())
}

/// Overwrites the content that the snapshot has.
async fn changed(env: &TestEnv<'_>, source: &str, mode: VolumeMode) -> Result<()> {
    let file = match mode {
        VolumeMode::Filesystem => "/vol/kept",
        VolumeMode::Block => "/vol",
    };
    write(env, source, file, "of the source").await
}

/// Creates a claim from a snapshot, and checks its volume in a pod.
pub(super) async fn restored(
    env: &TestEnv<'_>,
    claim: &str,
    snapshot: &str,
    size: Size,
    mode: VolumeMode,
) -> Result<()> {
    snapshots::restore(env, claim, snapshot, size, mode).await?;
    start(env, claim, claim, mode).await?;
    check_kept(env, claim, [SIZE, size], &volume(mode)).await?;
    end(env, claim).await
}

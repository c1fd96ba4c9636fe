//! A snapshot that is taken while a pod writes is restored to volumes of its size and of a larger one.

use std::convert::Infallible;

use anyhow::Result;

use super::names::{SIZE, name, volume};
use crate::e2e::scenario::{Scenario, StepResult};
use crate::test_env::claims;
use crate::test_env::environment::TestEnv;
use crate::test_env::pods::{check_kept, check_new, end, start, write};
use crate::test_env::sizes::Size;
use crate::test_env::snapshots;
use crate::test_env::workload::{VolumeMode, claim};

const LARGER: Size = Size::mebibytes(4);
/// A file to which the pod writes in the meantime, if the volume has files.
const LOAD: &str = "/vol/load";

pub(super) async fn run(scenario: &mut Scenario<'_>, env: &TestEnv<'_>, mode: VolumeMode) -> StepResult {
    let [source, snapshot, same, larger] =
        ["source", "snapshot", "restored", "larger"].map(|prefix| name(prefix, mode));
    scenario.step(&format!("{mode}: a pod writes to a claim"), written(env, &source, mode)).await?;
    scenario
        .step(
            &format!("{mode}: a snapshot is taken while the pod writes"),
            taken(env, &snapshot, &source, mode),
        )
        .await?;
    scenario
        .step(&format!("{mode}: later writes of the pod change the source"), changed(env, &source, mode))
        .await?;
    scenario
        .step(
            &format!("{mode}: a volume of the same size has the content of the snapshot"),
            restored(env, &same, &snapshot, SIZE, mode),
        )
        .await?;
    scenario
        .step(
            &format!("{mode}: so has a larger volume, and its pod sees the larger size"),
            restored(env, &larger, &snapshot, LARGER, mode),
        )
        .await?;
    let removed = async {
        end(env, &source).await?;
        for claim in [&source, &same, &larger] {
            claims::delete(env, claim).await?;
        }
        snapshots::delete_snapshot(env, &snapshot).await?;
        snapshots::snapshot_gone(env, &snapshot).await
    };
    scenario.step(&format!("{mode}: claims and the snapshot are deleted"), removed).await
}

/// Creates a claim, and a pod of its name that writes to it.
pub(super) async fn written(env: &TestEnv<'_>, source: &str, mode: VolumeMode) -> Result<()> {
    let object = claim(source, &env.driver.class_name(), SIZE, mode, "ReadWriteOnce")?;
    claims::create(env, &object).await?;
    start(env, source, source, mode).await?;
    check_new(env, source, SIZE, &volume(mode)).await
}

/// Takes a snapshot of the default class while the pod writes.
async fn taken(env: &TestEnv<'_>, snapshot: &str, source: &str, mode: VolumeMode) -> Result<()> {
    let taken = async {
        snapshots::request(env, snapshot, source, None).await?;
        snapshots::ready(env, snapshot).await.map(drop)
    };
    tokio::select! {
        taken = taken => taken,
        stopped = write_load(env, source, mode) => match stopped? {},
    }
}

/// Writes to the volume until it is cancelled or a write fails. A device gets the content that it has already, because its
/// snapshot has the content of one moment, whichever it is. Of a directory, each file is copied at a moment of its own.
async fn write_load(env: &TestEnv<'_>, pod: &str, mode: VolumeMode) -> Result<Infallible> {
    let mut round: u64 = 0;
    loop {
        round += 1;
        match mode {
            VolumeMode::Filesystem => write(env, pod, mode, LOAD, &round.to_string()).await?,
            VolumeMode::Block => check_new(env, pod, SIZE, &volume(mode)).await?,
        }
    }
}

/// Overwrites the content that the snapshot has.
async fn changed(env: &TestEnv<'_>, source: &str, mode: VolumeMode) -> Result<()> {
    let file = match mode {
        VolumeMode::Filesystem => "/vol/kept",
        VolumeMode::Block => "/vol",
    };
    write(env, source, mode, file, "of the source").await
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

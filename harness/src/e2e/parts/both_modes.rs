//! A Filesystem and a Block volume, and pods that have both, for what must hold for volumes of each mode.

use anyhow::Result;

use crate::test_env::environment::TestEnv;
use crate::test_env::sizes::Size;
use crate::test_env::workload::{Held, VolumeMode, holder_of, name_of};
use crate::test_env::{claims, pods};

/// The modes, and the path of each volume in a pod.
const VOLUMES: [(VolumeMode, &str); 2] =
    [(VolumeMode::Filesystem, "/vol/directory"), (VolumeMode::Block, "/vol/device")];
/// The modes, and the path of a text in each volume.
pub(in crate::e2e) const FILES: [(VolumeMode, &str); 2] =
    [(VolumeMode::Filesystem, "/vol/directory/file"), (VolumeMode::Block, "/vol/device")];

/// Returns the names of both claims.
pub(in crate::e2e) fn claims_of(name: &str) -> [String; 2] {
    VOLUMES.map(|(mode, _)| name_of(name, mode))
}

/// Starts a pod with new claims, whose names begin with its own.
pub(in crate::e2e) async fn start_new(env: &TestEnv<'_>, name: &str, size: Size) -> Result<()> {
    for (mode, _) in VOLUMES {
        claims::request(env, &name_of(name, mode), size, mode).await?;
    }
    start(env, name, name, false).await
}

/// Starts a pod with the claims whose names begin with `claims`.
pub(in crate::e2e) async fn start(env: &TestEnv<'_>, pod: &str, claims: &str, read_only: bool) -> Result<()> {
    let names = claims_of(claims);
    let held: Vec<Held<'_>> = names
        .iter()
        .zip(VOLUMES)
        .map(|(claim, (mode, path))| Held { claim, path, mode, read_only })
        .collect();
    pods::create(env, &holder_of(pod, &held)?).await
}

/// Writes a text from a pod to both volumes.
pub(in crate::e2e) async fn write(env: &TestEnv<'_>, pod: &str, text: &str) -> Result<()> {
    for (_, file) in FILES {
        pods::write(env, pod, file, text).await?;
    }
    Ok(())
}

/// Checks that a pod reads the text from both volumes.
pub(in crate::e2e) async fn check_text(env: &TestEnv<'_>, pod: &str, text: &str) -> Result<()> {
    for (_, file) in FILES {
        pods::check_text(env, pod, file, text).await?;
    }
    Ok(())
}

//! Changes of files on the node, by shell scripts.

use std::time::Duration;

use anyhow::{Context, Result};
use testvm_cluster::{KUBELET_ROOT, TOOLS_DIR};

use crate::e2e::stories::power_cut;
use crate::nodes::{DATA_DIR, LOOPFS_TOOL, LOSETUP_LINK};
use crate::test_env::claims;
use crate::test_env::environment::{FOREIGN_NODE, TestEnv};
use crate::test_env::projects::Projects;

const TOOL_DEADLINE: Duration = Duration::from_secs(60);
/// The name of no volume, in the form of one.
const STRAY: &str = "DATA/volumes/pvc-00000000-0000-4000-8000-000000000000";

/// Runs a script on the node, in which `DATA` is the data directory and `TOOL` the tool of loopfs.
pub(super) async fn on_node(env: &TestEnv<'_>, script: &str) -> Result<()> {
    let node = env.node.context(FOREIGN_NODE)?;
    let tool = format!("{TOOLS_DIR}/{LOOPFS_TOOL}");
    let script = script.replace("DATA", DATA_DIR).replace("TOOL", &tool);
    node.output(&["sh", "-exc", &script], TOOL_DEADLINE).await.map(drop)
}

/// Overwrites the files that the pods of the stories wrote, as a driver that mixes up volumes does.
pub(super) async fn overwrite_files(env: &TestEnv<'_>) -> Result<()> {
    on_node(env, "for file in DATA/volumes/*/file; do printf 'of another volume' > \"$file\"; done; sync")
        .await
}

/// Overwrites the files of volumes and snapshots that the test program wrote.
pub(super) async fn overwrite_snapshots(env: &TestEnv<'_>) -> Result<()> {
    on_node(env, "find DATA -name kept -type f -exec sh -c 'echo other > $1' sh {} \\;").await
}

/// Creates a volume that no claim has.
pub(super) async fn add_volume(env: &TestEnv<'_>) -> Result<()> {
    on_node(env, &format!("mkdir {STRAY}")).await
}

pub(super) async fn remove_volume(env: &TestEnv<'_>) -> Result<()> {
    on_node(env, &format!("rm -rf {STRAY}")).await
}

/// Doubles the limits of the volumes.
pub(super) async fn raise_limits(env: &TestEnv<'_>) -> Result<()> {
    on_node(env, "for volume in DATA/volumes/*; do TOOL quota set --bytes 2MiB \"$volume\"; done").await
}

/// Makes the files of the other tenant's volume writable for everybody.
pub(super) async fn open_other_volume(env: &TestEnv<'_>) -> Result<()> {
    let other = env.in_other_namespace("other-tenant")?;
    let volume = claims::volume_of(&other, "other-tenant").await?;
    let volume = volume.metadata.name.context("the volume has no name")?;
    on_node(env, &format!("find DATA/volumes/{volume} -type f -exec chmod 0666 {{}} +")).await
}

/// Puts the losetup of loopfs before the one of the node.
pub(super) async fn add_losetup(env: &TestEnv<'_>) -> Result<()> {
    on_node(env, &format!("ln -s TOOL {LOSETUP_LINK}")).await
}

pub(super) async fn remove_losetup(env: &TestEnv<'_>) -> Result<()> {
    on_node(env, &format!("rm {LOSETUP_LINK}")).await
}

/// Forbids programs in the directory of the kubelet.
pub(super) async fn forbid_programs(env: &TestEnv<'_>) -> Result<()> {
    on_node(env, &format!("mount -o remount,bind,nodev,nosuid,noexec {KUBELET_ROOT}")).await
}

pub(super) async fn allow_programs(env: &TestEnv<'_>) -> Result<()> {
    on_node(env, &format!("mount -o remount,bind,nodev,nosuid,exec {KUBELET_ROOT}")).await
}

/// Removes the limits from the projects of the kubelet.
pub(super) async fn remove_kubelet_limits(env: &TestEnv<'_>) -> Result<()> {
    let node = env.node.context(FOREIGN_NODE)?;
    for (id, _) in Projects::read(node).await?.records_of_kubelet() {
        on_node(env, &format!("xfs_quota -x -c 'limit -p bhard=0 bsoft=0 {id}' DATA")).await?;
    }
    Ok(())
}

/// Has the data that the pods wrote in memory only. The power cut must lose it.
pub(super) async fn unsync(env: &TestEnv<'_>) -> Result<()> {
    on_node(env, "rm -r DATA/volumes/*/*; sync").await?;
    power_cut::write_unsynced(env).await
}

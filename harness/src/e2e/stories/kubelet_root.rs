//! A node whose kubelet root directory is a directory of the data disk: its mount, and what pods find in it.

use anyhow::{Context, Result};
use testvm::steps::{StepResult, Steps};
use testvm_cluster::exec::exec_ok;
use testvm_cluster::mount_table::{Mounted, mounts};
use testvm_cluster::{KUBELET_ROOT, Node};

use crate::e2e::sabotages::on_node;
use crate::e2e::story::{Run, Sabotage, Story, When};
use crate::nodes::{DATA_DIR, KUBELET_DATA_DIR};
use crate::test_env::environment::TestEnv;
use crate::test_env::sizes::Size;
use crate::test_env::workload::{Held, SCRATCH, VolumeMode, scratch_pod};
use crate::test_env::{claims, pods};

pub(in crate::e2e) const STORY: Story = Story {
    name: "kubelet-root",
    about: "a kubelet with its directory on the data disk",
    when: When::Node,
    run: Run::KubeletOnDataDisk(|steps, state, node| Box::pin(run(steps, state.env, node))),
    sabotages: &[Sabotage {
        name: "noexec",
        about: "The directory of the kubelet forbids programs",
        before: "the kubelet's root is a mount of the data disk with nodev, nosuid and exec",
        change: |env| {
            Box::pin(on_node(env, format!("mount -o remount,bind,nodev,nosuid,noexec {KUBELET_ROOT}")))
        },
        repair: Some(|env| {
            Box::pin(on_node(env, format!("mount -o remount,bind,nodev,nosuid,exec {KUBELET_ROOT}")))
        }),
        expected: &["/var/lib/kubelet", "noexec"],
    }],
};

const SIZE: Size = Size::mebibytes(1);
/// The names of the pod and its claims.
const POD: &str = "kubelet-root";
const DIRECTORY: &str = "kubelet-root-directory";
const BLOCK: &str = "kubelet-root-block";
const DEVICE: &str = "/device";

async fn run(steps: &mut Steps<'_>, env: &TestEnv<'_>, node: &Node) -> StepResult {
    steps
        .step("the kubelet's root is a mount of the data disk with nodev, nosuid and exec", mounted(node))
        .await?;
    steps.step("a pod starts with an emptyDir, a directory and a block volume", start(env)).await?;
    steps.step("the block volume's device is opened, read and written", device(env)).await?;
    steps.step("a program in an emptyDir runs, and a device node there does not open", programs(env)).await?;
    steps.step("the data directory shows neither mounts nor files of the kubelet", hidden(node)).await
}

async fn mounted(node: &Node) -> Result<()> {
    let mounts = mounts(node).await?;
    let at = |target: &str| mounts.iter().find(|mount| mount.target == target);
    let root = at(KUBELET_ROOT).with_context(|| format!("nothing is mounted at {KUBELET_ROOT}"))?;
    let data = at(DATA_DIR).context("the data disk is not mounted")?;
    anyhow::ensure!(root.device == data.device, "{root:?} is not of the data disk: {data:?}");
    anyhow::ensure!(KUBELET_DATA_DIR.ends_with(&root.root), "{root:?} is of another directory");
    let has = |option: &str| root.options.iter().any(|found| found == option);
    anyhow::ensure!(has("nodev") && has("nosuid") && !has("noexec"), "{root:?}");
    anyhow::ensure!(root.peers.is_some() && root.peers != data.peers, "{root:?} is a peer of {data:?}");
    Ok(())
}

async fn start(env: &TestEnv<'_>) -> Result<()> {
    for (name, mode) in [(DIRECTORY, VolumeMode::Filesystem), (BLOCK, VolumeMode::Block)] {
        claims::request(env, name, SIZE, mode).await?;
    }
    let held = [
        Held { claim: DIRECTORY, path: "/vol", mode: VolumeMode::Filesystem, read_only: false },
        Held { claim: BLOCK, path: DEVICE, mode: VolumeMode::Block, read_only: false },
    ];
    pods::create(env, &scratch_pod(POD, SIZE, &held)?).await
}

/// Runs a script of busybox in the pod, which ends with the first command that fails.
async fn run_script(env: &TestEnv<'_>, script: &str) -> Result<String> {
    exec_ok(&env.pods(), POD, &["/bin/sh", "-ec", script]).await
}

async fn device(env: &TestEnv<'_>) -> Result<()> {
    let script = format!(
        "test -b {DEVICE}; echo 'on the device' | dd of={DEVICE} conv=fsync 2>/dev/null; head -c 13 {DEVICE}"
    );
    let read = run_script(env, &script).await?;
    anyhow::ensure!(read == "on the device", "the device has {read:?}");
    Ok(())
}

async fn programs(env: &TestEnv<'_>) -> Result<()> {
    let script = format!("cp /bin/sh {SCRATCH}/sh; {SCRATCH}/sh -c 'echo ran'");
    let said = run_script(env, &script).await?;
    anyhow::ensure!(said.trim() == "ran", "the program in the emptyDir printed {said:?}");
    // /dev/null, which every pod may open by its own /dev.
    let script = format!("mknod {SCRATCH}/null c 1 3; if cat {SCRATCH}/null; then echo opened; fi");
    let said = run_script(env, &script).await?;
    anyhow::ensure!(said.is_empty(), "a device node in an emptyDir was opened, although the mount has nodev");
    Ok(())
}

async fn hidden(node: &Node) -> Result<()> {
    let mounts = mounts(node).await?;
    let below = |directory: &str| -> Vec<&Mounted> {
        let directory = format!("{directory}/");
        mounts.iter().filter(|mount| mount.target.starts_with(&directory)).collect()
    };
    let copies = below(KUBELET_DATA_DIR);
    anyhow::ensure!(copies.is_empty(), "mounts also appear in the data directory: {copies:?}");
    anyhow::ensure!(!below(&format!("{KUBELET_ROOT}/pods")).is_empty(), "the node has no mount of a pod");
    // The directory is covered, so the driver's containers do not have its files.
    let seen = node.output(&["ls", "-A", KUBELET_DATA_DIR]).await?;
    anyhow::ensure!(seen.is_empty(), "the data directory shows the kubelet's files: {seen}");
    Ok(())
}

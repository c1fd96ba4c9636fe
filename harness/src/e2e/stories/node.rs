//! The kubelet and the losetup of the node are those that the run asks for, and the kubelet starts the programs that
//! follow from them.

use std::collections::BTreeSet;

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::Node as NodeObject;
use kube::Api;
use testvm::steps::{StepResult, Steps};
use testvm_cluster::started_programs::{StartedProgram, started_programs};
use testvm_cluster::{Kubelet, Node, PATCHED_SUFFIX, objects};

use crate::e2e::doctor;
use crate::e2e::parts::detached_device::{self, ATTACKER};
use crate::e2e::parts::node_debug;
use crate::e2e::sabotages::on_node;
use crate::e2e::story::{Run, Sabotage, Story, When};
use crate::node_options::{Losetup, NodeOptions};
use crate::nodes::LOSETUP_LINK;
use crate::test_env::claims;
use crate::test_env::environment::TestEnv;
use crate::test_env::pods::{check_written, end, start, start_new, start_writing};
use crate::test_env::sizes::Size;
use crate::test_env::volume_work::{KUBELET, VOLUME_PROGRAMS, by_kubelet_for_volumes, loop_devices};
use crate::test_env::workload::VolumeMode;

pub(in crate::e2e) const STORY: Story = Story {
    name: "node",
    about: "the kubelet and losetup of the node, the programs that the kubelet starts, and node-debug",
    when: When::Node,
    run: Run::OwnNode(|steps, state, _, node| Box::pin(run(steps, state.env, state.nodes, node))),
    sabotages: &[Sabotage {
        name: "losetup",
        about: "Another losetup than that of the run comes first on the node",
        before: "the node has the losetup of this run",
        change: |env| Box::pin(on_node(env, format!("ln -s TOOL {LOSETUP_LINK}"))),
        repair: Some(|env| Box::pin(on_node(env, format!("rm {LOSETUP_LINK}")))),
        expected: &["losetup --version prints", "losetup from loopfs"],
    }],
};

/// The pods. The reader has the claim of the writer, and each other one a claim of its name.
const WRITER: &str = "writer";
const READER: &str = "reader";
const NEXT: &str = "next-device";
const SIZE: Size = Size::mebibytes(2);
/// The interval of the kernel's writes in hundredths of a second, as in proc_sys_vm(5). 0 turns the periodic ones off.
const WRITEBACK: &str = "/proc/sys/vm/dirty_writeback_centisecs";

/// The losetup of util-linux in the root file system of a node.
const UTIL_LINUX_LOSETUP: &str = "/usr/sbin/losetup";

async fn run(steps: &mut Steps<'_>, env: &TestEnv<'_>, options: &NodeOptions, node: &Node) -> StepResult {
    let kubelet = options.variant().kubelet;
    steps.step("the node reports the kubelet of this run", reports(env, node, kubelet)).await?;
    let title = "the node has the losetup of this run";
    steps.step(title, has_losetup(options, node)).await?;
    steps.step("loopfs doctor finds nothing missing on the node", doctor::on_node(env, node)).await?;
    let expected = match kubelet {
        Kubelet::Stock => 2,
        Kubelet::Patched => 1,
    };
    let title = format!("loop devices of a block volume that a pod uses: {expected}");
    steps.step(&title, start_pod(env, node, expected)).await?;
    node_debug::run(steps, env, node, ATTACKER).await?;
    let title = "a pod detaches its own device, and the driver is killed";
    steps.step(title, detached_device::detach(env, node)).await?;
    steps.step("a pod writes without a sync, and ends", write_unsynced(env, node)).await?;
    let title = "the next pod reads the unsynced writes of the deleted pod";
    steps.step(title, unsynced_writes_are_kept(env)).await?;
    let title = "the pod without its device reads and overwrites none of the devices that were attached next";
    steps.step(title, detached_device::attack(env, &[READER, NEXT])).await?;
    let title = match (kubelet, options.losetup()) {
        (Kubelet::Patched, _) => {
            "since its start, the kubelet has started no program to mount, to bind or to measure"
        }
        (Kubelet::Stock, Losetup::DropIn) => {
            "since its start, the kubelet has started the losetup of loopfs only"
        }
        (Kubelet::Stock, Losetup::UtilLinux) => {
            "since its start, the kubelet has started the losetup of util-linux"
        }
    };
    steps
        .step(title, async {
            let started = started_programs(node).await?;
            check_started(&started, kubelet, options.losetup())
        })
        .await
}

/// Starts a pod with a block volume, and checks the number of its loop devices.
async fn start_pod(env: &TestEnv<'_>, node: &Node, expected: usize) -> Result<()> {
    let before = loop_devices(node).await?;
    claims::request(env, ATTACKER, SIZE, VolumeMode::Block).await?;
    detached_device::start(env).await?;
    let used: BTreeSet<_> = &loop_devices(node).await? - &before;
    anyhow::ensure!(used.len() == expected, "the pod uses the loop devices {used:?}");
    Ok(())
}

/// The kernel writes nothing by itself until the pod has ended.
async fn write_unsynced(env: &TestEnv<'_>, node: &Node) -> Result<()> {
    claims::request(env, WRITER, SIZE, VolumeMode::Block).await?;
    let before = node.output(&["cat", WRITEBACK]).await?;
    set_writeback(node, "0").await?;
    let ended = async {
        start_writing(env, WRITER, WRITER).await?;
        end(env, WRITER).await
    };
    let ended = ended.await;
    let restored = set_writeback(node, before.trim()).await;
    ended?;
    restored
}

/// Sets the interval of the kernel's writes of unsynced files.
async fn set_writeback(node: &Node, centiseconds: &str) -> Result<()> {
    let script = format!("echo {centiseconds} > {WRITEBACK}");
    node.output(&["sh", "-c", &script]).await.map(drop)
}

/// Reads the volume in another pod, while a third one attaches a further device.
async fn unsynced_writes_are_kept(env: &TestEnv<'_>) -> Result<()> {
    let reader = start(env, READER, WRITER, VolumeMode::Block);
    tokio::try_join!(reader, start_new(env, NEXT, SIZE, VolumeMode::Block))?;
    check_written(env, READER).await
}

async fn reports(env: &TestEnv<'_>, node: &Node, kubelet: Kubelet) -> Result<()> {
    let nodes: Api<NodeObject> = Api::all(env.client.clone());
    let object = objects::read(&nodes, node.name()).await?;
    let info = object.status.and_then(|status| status.node_info).context("the Node has no nodeInfo")?;
    let version = info.kubelet_version;
    anyhow::ensure!(
        version.ends_with(PATCHED_SUFFIX) == (kubelet == Kubelet::Patched),
        "the node runs the kubelet {version}, and this run is for a {kubelet:?} one"
    );
    Ok(())
}

/// Checks the losetup that a program finds on the node, or that it finds none of [`VOLUME_PROGRAMS`].
async fn has_losetup(options: &NodeOptions, node: &Node) -> Result<()> {
    if options.has_tools() {
        let version = node.output(&["losetup", "--version"]).await?;
        let expected = match options.losetup() {
            Losetup::UtilLinux => "losetup from util-linux",
            Losetup::DropIn => "losetup from loopfs",
        };
        anyhow::ensure!(version.starts_with(expected), "losetup --version prints {version:?}");
        return Ok(());
    }
    // `command -v` fails if it finds none of the names.
    let search = "for name; do command -v \"$name\"; done; true";
    let argv: Vec<&str> = ["sh", "-c", search, "sh"].into_iter().chain(VOLUME_PROGRAMS).collect();
    let found = node.output(&argv).await?;
    anyhow::ensure!(found.is_empty(), "the node has programs that it should not have: {}", found.trim());
    Ok(())
}

/// Checks what the kubelet started. That a stock kubelet starts programs shows that the trace records them.
fn check_started(started: &[StartedProgram], kubelet: Kubelet, losetup: Losetup) -> Result<()> {
    anyhow::ensure!(
        started.iter().any(|program| program.name() == KUBELET),
        "the trace does not even have the start of the kubelet"
    );
    let for_volumes: BTreeSet<&str> =
        by_kubelet_for_volumes(started).map(|program| program.path.as_str()).collect();
    let expected = match (kubelet, losetup) {
        (Kubelet::Patched, _) => {
            anyhow::ensure!(for_volumes.is_empty(), "the kubelet started {for_volumes:?}");
            return Ok(());
        }
        (Kubelet::Stock, Losetup::UtilLinux) => UTIL_LINUX_LOSETUP,
        (Kubelet::Stock, Losetup::DropIn) => LOSETUP_LINK,
    };
    let losetups: Vec<&&str> = for_volumes.iter().filter(|path| path.ends_with("/losetup")).collect();
    anyhow::ensure!(
        losetups == [&expected],
        "expected that the kubelet started {expected}, and it started {for_volumes:?}"
    );
    anyhow::ensure!(
        for_volumes.iter().any(|path| path.ends_with("/mount")),
        "a stock kubelet starts mount, and the trace has only {for_volumes:?}"
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case::stock(Kubelet::Stock, Losetup::UtilLinux, "/usr/sbin/losetup /usr/bin/mount", true)]
    #[case::stock_with_the_drop_in(
        Kubelet::Stock,
        Losetup::DropIn,
        "/usr/local/sbin/losetup /usr/bin/mount",
        true
    )]
    #[case::both_programs(
        Kubelet::Stock,
        Losetup::DropIn,
        "/usr/local/sbin/losetup /usr/sbin/losetup /bin/mount",
        false
    )]
    #[case::the_wrong_program(Kubelet::Stock, Losetup::DropIn, "/usr/sbin/losetup /usr/bin/mount", false)]
    #[case::no_trace_of_mount(Kubelet::Stock, Losetup::UtilLinux, "/usr/sbin/losetup", false)]
    #[case::patched(Kubelet::Patched, Losetup::UtilLinux, "/usr/sbin/iptables", true)]
    #[case::patched_that_unmounts(Kubelet::Patched, Losetup::UtilLinux, "/usr/bin/umount", false)]
    #[case::patched_that_measures(Kubelet::Patched, Losetup::DropIn, "/usr/bin/du", false)]
    fn the_programs_of_each_variant_are_told_apart(
        #[case] kubelet: Kubelet,
        #[case] losetup: Losetup,
        #[case] paths: &str,
        #[case] passes: bool,
    ) {
        let by = |by: &str, path: &str| StartedProgram { by: by.to_owned(), path: path.to_owned() };
        let mut started =
            vec![by("containerd-shim", "/usr/bin/umount"), by("guest-init", "/usr/sbin/losetup")];
        started.extend(paths.split(' ').map(|path| by("kubelet", path)));
        assert!(check_started(&started, kubelet, losetup).is_err(), "without the kubelet's own start");
        started.push(by("guest-init", "/opt/kubernetes/kubelet"));
        assert_eq!(check_started(&started, kubelet, losetup).is_ok(), passes);
    }
}

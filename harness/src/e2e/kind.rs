//! Runs stories on a cluster of kind, in a virtual machine with Docker. The commands of the README create the cluster and
//! install the driver there, as a user pastes them.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use kube::Client;
use testvm::cache;
use testvm::excerpt::list;
use testvm::images::shell;
use testvm::report::{Outcome, Report};
use testvm::session::Session;
use testvm::steps::{StepResult, Steps};
use testvm_cluster::kind::{KindMachine, KindParts, KindPlan};
use testvm_cluster::{ContainerImage, KubernetesMinor, client};

use super::console::Block;
use super::runner::{Plan, Runner, Selection, StoryRunner};
use super::{console, documents, host_service, state_dump};
use crate::builds::{self, ProgramProfile};
use crate::node_options::NodeOptions;
use crate::nodes;
use crate::test_env::environment::{TestEnv, Timeouts};
use crate::test_env::manifests::Manifests;

/// The name of the suite in the report.
const SUITE: &str = "kind";
/// Creates the cluster, and installs the driver.
pub(super) const CREATION: [Block; 1] = [Block {
    timeout: CREATION_TIMEOUT,
    ..Block::new("csi/deploy/README.md", "# truncate -s 10G /srv/loopfs.xfs && mkfs.xfs -q /srv/loopfs.xfs")
}];
/// The directories of the checkout that the commands read.
const CHECKED_OUT: [&str; 2] = ["csi/deploy", "csi/examples"];
/// The time that kind takes for a cluster, emulated and on a host that also builds.
const CREATION_TIMEOUT: Duration = Duration::from_secs(1800);
const LOAD_TIMEOUT: Duration = Duration::from_secs(300);

/// The poll interval of [`nothing_left`].
const POLL_INTERVAL: Duration = Duration::from_secs(2);
const TOOL_TIMEOUT: Duration = Duration::from_secs(120);

const ROLLED_OUT: &str = "kubectl --namespace loopfs-system rollout status daemonset/loopfs --timeout 20m";
/// Prints what the driver has on the machine, one line each: files, project quotas, loop devices, and mounts in the node. It fails
/// if a list lacks what each has: a row of project 0, and the root.
const INVENTORY: &str = "
find /srv/loopfs -mindepth 1 -ignore_readdir_race -printf '%y %P\\n'
xfs_quota -x -c 'report -p -n -N -b' /srv/loopfs | awk '
    $1 == \"#0\" { complete = 1; next } NF { print \"project\", $1 } END { exit !complete }'
losetup --list --noheadings --raw --output BACK-FILE
docker exec kind-control-plane cat /proc/self/mountinfo | awk '
    $5 == \"/\" { complete = 1 } /kubernetes.io.csi/ { print \"mount\", $4, $5 } END { exit !complete }'";

/// What a run does on the cluster.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stories<'a> {
    pub(super) selection: Selection<'a>,
    /// Whether the commands of the documents follow. They need the machine for themselves, and remove the cluster.
    pub(super) documents: bool,
}

/// Boots the machine, pastes the commands, runs the selected stories, and stops the machine. The logs are in `reports`.
///
/// # Errors
/// The manifests cannot be read, or the disks of the machine cannot be removed. Failed steps are in the report.
pub(super) async fn run(
    session: &Session,
    manifests: Manifests,
    namespace: &str,
    stories: Stories<'_>,
    kubernetes: KubernetesMinor,
    reports: &Path,
) -> Result<Report> {
    state_dump::clear(reports)?;
    let directory = session.workspace.target().join("kind-machine");
    let logs = reports.join("logs").join("kind");
    let mut report = Report::new();
    let machine = boot(session, &mut report, kubernetes, stories.documents, &directory, &logs).await;
    let mut tested = Ok(());
    if let Ok(machine) = machine {
        tested = test(session, &mut report, &machine, manifests, namespace, stories, reports).await;
        if !report.succeeded() {
            let stored = session.until_cancelled(machine.store_logs(&logs)).await;
            if let Err(error) = stored {
                session.progress.line(format!("store the logs of the cluster: {error:#}"));
            }
        }
        let started = Instant::now();
        let stopped = machine.stop().await;
        report.record(SUITE, "stop the machine", started.elapsed(), &stopped);
    }
    tested.and(cache::remove_dir(&directory)).map(|()| report)
}

async fn boot(
    session: &Session,
    report: &mut Report,
    kubernetes: KubernetesMinor,
    documents: bool,
    directory: &Path,
    logs: &Path,
) -> StepResult<KindMachine> {
    let mut steps = Steps::begin(session, report, SUITE);
    let parts = KindParts::build(session, plan(session, documents), kubernetes);
    let parts = steps.step("build programs, images and disks", parts).await?;
    let booted = KindMachine::boot(session, &parts, directory, logs);
    steps.step("boot a machine with Docker and kind", booted).await
}

/// Creates the cluster and runs the stories. The state of the cluster is in `reports` also after a failure.
async fn test(
    session: &Session,
    report: &mut Report,
    machine: &KindMachine,
    manifests: Manifests,
    namespace: &str,
    stories: Stories<'_>,
    reports: &Path,
) -> Result<()> {
    let Ok(client) = create_cluster(session, report, machine).await else { return Ok(()) };
    let mut env = TestEnv::new(manifests, client, None, namespace)?;
    env.reports = Some(reports.to_owned());
    if let Ok(before) = driver_is_ready(session, report, machine).await {
        let nodes = NodeOptions::default();
        let plan =
            Plan { nodes: &nodes, selection: stories.selection, sabotage: None, failures: Some(reports) };
        StoryRunner::begin(session, report, &env, plan).await.run_all().await;
        check_leaks(session, report, nothing_left(machine, &before)).await;
        if stories.documents && report.succeeded() {
            // The report has the reason of a failure.
            drop(paste_documents(session, report, machine, &env, &before).await);
        }
    }
    if !report.succeeded() || !stories.documents {
        state_dump::write(&env, reports).await;
    }
    Ok(())
}

/// Pastes the commands of the documents, runs the flow on the driver as services of the node, and removes the cluster.
async fn paste_documents(
    session: &Session,
    report: &mut Report,
    machine: &KindMachine,
    env: &TestEnv<'_>,
    before: &str,
) -> StepResult {
    documents::run(session, report, machine).await?;
    host_service::run(session, report, machine, env).await?;
    check_leaks(session, report, nothing_left(machine, before)).await;
    host_service::remove(session, report, machine).await?;
    documents::remove_cluster(session, report, machine).await
}

async fn create_cluster(session: &Session, report: &mut Report, machine: &KindMachine) -> StepResult<Client> {
    let mut steps = Steps::begin(session, report, SUITE);
    console::paste_all(&mut steps, machine, &CREATION).await?;
    let loaded = machine.shell("kind load image-archive target/images/volume-check.tar", LOAD_TIMEOUT);
    steps.step("load the image of the test pods", loaded).await?;
    let client = async { client::connect(machine.kubeconfig().await?).await };
    steps.step("reach the API server from this machine", client).await
}

/// Waits until the driver is rolled out, and returns the inventory of the machine then.
async fn driver_is_ready(
    session: &Session,
    report: &mut Report,
    machine: &KindMachine,
) -> StepResult<String> {
    let mut steps = Steps::begin(session, report, SUITE);
    let ready = machine.shell(ROLLED_OUT, CREATION_TIMEOUT);
    steps.step("the driver is rolled out", ready).await?;
    steps.step("list what is on the machine", machine.shell(INVENTORY, TOOL_TIMEOUT)).await
}

/// Runs the check for leaks, unless something has failed: the claims and the driver are then still there, and what they use
/// is no leak.
async fn check_leaks(session: &Session, report: &mut Report, nothing_left: impl Future<Output = Result<()>>) {
    let title = "files, projects, loop devices and mounts of the machine are as before";
    if report.succeeded() {
        // The report has the reason of a failure.
        drop(Steps::begin(session, report, SUITE).step(title, nothing_left).await);
    } else {
        report.push(SUITE, title, Outcome::NotRun, None);
    }
}

/// Waits until the machine has nothing that it did not have before. The driver deletes data in the background, which no event
/// announces.
async fn nothing_left(machine: &KindMachine, before: &str) -> Result<()> {
    let deadline = Instant::now() + Timeouts::FULL.end;
    loop {
        let now = machine.shell(INVENTORY, TOOL_TIMEOUT).await?;
        let more = added_since(before, &now);
        if more.is_empty() {
            return Ok(());
        }
        anyhow::ensure!(Instant::now() < deadline, "leaked {}", list(&more));
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

/// Returns the lines of `now` that `before` has not.
fn added_since<'a>(before: &str, now: &'a str) -> Vec<&'a str> {
    let known: Vec<&str> = before.lines().collect();
    now.lines().filter(|line| !known.contains(line)).collect()
}

/// Returns the contents of the machine. With the documents, they have the Debian package too.
async fn plan(session: &Session, documents: bool) -> Result<KindPlan> {
    let (guest, driver, busybox) = tokio::try_join!(
        builds::guest_programs(session),
        builds::driver_programs(session, ProgramProfile::Test),
        shell::busybox(session)
    )?;
    let (init, pause) = (guest.init.clone(), guest.pause.clone());
    let mut files = checked_out(session.workspace.root())?;
    files.push((console::TOOL.to_owned(), driver.tool.clone()));
    if documents {
        let programs = [driver.csi.clone(), driver.provisioner.clone(), driver.tool.clone()];
        files.push(package(session, &programs).await?);
    }
    let images: Vec<ContainerImage> = nodes::images(guest, driver, busybox);
    Ok(KindPlan { init, pause, images, files })
}

/// Packs programs for this machine as `cargo harness deb` does. Returns the path of the package in the checkout, and here.
async fn package(session: &Session, programs: &[PathBuf]) -> Result<(String, PathBuf)> {
    let path = session.workspace.target().join("kind-package.deb");
    let name = release::pack_for_this_machine(session, programs, &path).await?;
    Ok((format!("{}/{name}", host_service::PACKAGES), path))
}

/// Returns the files of the checkout that users apply: the path from its root, and the path here.
fn checked_out(root: &Path) -> Result<Vec<(String, PathBuf)>> {
    let mut files = Vec::new();
    let mut pending: Vec<PathBuf> = CHECKED_OUT.iter().map(PathBuf::from).collect();
    while let Some(directory) = pending.pop() {
        let path = root.join(&directory);
        for entry in std::fs::read_dir(&path).with_context(|| format!("read {}", path.display()))? {
            let entry = entry?;
            let below = directory.join(entry.file_name());
            if entry.file_type()?.is_dir() {
                pending.push(below);
            } else {
                let name = below.to_str().with_context(|| format!("{} is not UTF-8", below.display()))?;
                files.push((name.to_owned(), entry.path()));
            }
        }
    }
    files.sort();
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_added_lines_are_returned() {
        assert_eq!(added_since("d volumes\n", "d volumes\nf volumes/v\n"), ["f volumes/v"]);
        assert!(added_since("d volumes\nf gone\n", "d volumes\n").is_empty());
    }

    #[test]
    fn the_checkout_of_the_machine_has_what_users_apply() {
        let files = checked_out(Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()).unwrap();
        for file in ["csi/examples/kind.yaml", "csi/deploy/kustomization.yaml"] {
            assert!(files.iter().any(|(path, _)| path == file), "{file}");
        }
    }
}

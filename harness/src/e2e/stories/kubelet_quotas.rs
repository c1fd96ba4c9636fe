//! Project ids of the kubelet and of volumes on one file system. A kubelet with the feature gate
//! `LocalStorageCapacityIsolationFSQuotaMonitoring` measures the emptyDirs of pods with a user namespace by project quotas.

use std::time::Duration;

use anyhow::{Context, Result};
use futures::future::try_join_all;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::runtime::watcher;
use serde_json::Value;
use testvm::steps::{StepResult, Steps};
use testvm_cluster::exec::exec_ok;
use testvm_cluster::waiting::{State, until};
use testvm_cluster::{Node, objects};
use tokio::time::{Instant, sleep};

use super::{driver_restart, removal};
use crate::e2e::parts::serving;
use crate::e2e::sabotages::on_node;
use crate::e2e::story::{Run, Sabotage, Story, When};
use crate::test_env::environment::{FOREIGN_NODE, TestEnv};
use crate::test_env::projects::{FIRST_OF_KUBELET, Projects};
use crate::test_env::runtime_classes::{self, OWN_USERS, with_user_namespace};
use crate::test_env::sizes::Size;
use crate::test_env::workload::{SCRATCH, VolumeMode, scratch_pod};
use crate::test_env::{claims, pods};

pub(in crate::e2e) const STORY: Story = Story {
    name: "kubelet-quotas",
    about: "project ids of the kubelet and of volumes on one file system",
    when: When::Node,
    run: Run::KubeletOnDataDisk(|steps, state, node| Box::pin(run(steps, state.env, node))),
    sabotages: &[Sabotage {
        name: "kubelet-limits",
        about: "The projects of the kubelet have no limits",
        before: "the kubelet has given each emptyDir a project",
        change: |env| Box::pin(remove_kubelet_limits(env)),
        repair: None,
        expected: &["has no limit"],
    }],
};

const SIZE: Size = Size::mebibytes(1);
/// The size limit of an emptyDir. The kubelet sets no such limit in the file system, it compares.
const SCRATCH_SIZE: Size = Size::mebibytes(64);
/// The bytes of each of the two files that each pod has in its emptyDir. A walk through the directory finds one of them,
/// because the other one is deleted and open.
const FILE: u64 = 1 << 20;
/// Rounds of creating and deleting claims, and the number of claims in a round.
const ROUNDS: usize = 3;
const CLAIMS: usize = 50;
/// The interval at which statistics and quota records are read, whose changes nothing announces. The kubelet measures
/// volumes once a minute.
const POLL_INTERVAL: Duration = Duration::from_secs(2);
const POLL_TIMEOUT: Duration = Duration::from_secs(240);

async fn run(steps: &mut Steps<'_>, env: &TestEnv<'_>, node: &Node) -> StepResult {
    steps.step("pods with a user namespace write to emptyDirs", start(env)).await?;
    let before = steps.step("the kubelet has given each emptyDir a project", assigned(env, node)).await?;
    steps
        .step(
            "150 volumes are created and deleted beside them, and no project id is shared",
            volumes_come_and_go(env, node, &before),
        )
        .await?;
    steps.step("the driver's recovery and search leave them alone", restart(env, node, &before)).await?;
    steps.step("the kubelet's statistics have the usage of the projects", statistics(env, &before)).await?;
    steps.step("the kubelet removes its projects, and nothing else does", clear(env, node, &before)).await
}

fn pod_name(number: usize) -> String {
    format!("scratch-{number}")
}

async fn start_pod(env: &TestEnv<'_>, number: usize) -> Result<()> {
    let name = pod_name(number);
    let mut pod = with_user_namespace(scratch_pod(&name, SCRATCH_SIZE, &[])?);
    let script = format!(
        "fallocate -l {FILE} {SCRATCH}/deleted; exec 3<>{SCRATCH}/deleted; rm {SCRATCH}/deleted; mkdir {SCRATCH}/within; \
         fallocate -l {FILE} {SCRATCH}/within/file; touch {SCRATCH}/ready; exec sleep infinity"
    );
    for container in pod.spec.iter_mut().flat_map(|spec| &mut spec.containers) {
        container.command = Some(["/bin/sh", "-ec", &script].map(str::to_owned).into());
    }
    pods::create(env, &pod).await?;
    let ready = format!("until test -e {SCRATCH}/ready; do sleep 1; done");
    exec_ok(&env.pods(), &name, &["/bin/sh", "-ec", &ready]).await.map(drop)
}

async fn start(env: &TestEnv<'_>) -> Result<()> {
    runtime_classes::create(env, OWN_USERS, OWN_USERS).await?;
    for number in 0..2 {
        start_pod(env, number).await?;
    }
    Ok(())
}

async fn uid(env: &TestEnv<'_>, number: usize) -> Result<String> {
    let name = pod_name(number);
    let pod: Pod = objects::read(&env.pods(), &name).await?;
    pod.uid().with_context(|| format!("pod {name} has no uid"))
}

/// Returns the projects of the node after it has checked those of the first two pods.
async fn assigned(env: &TestEnv<'_>, node: &Node) -> Result<Projects> {
    let projects = Projects::read(node).await?;
    for number in 0..2 {
        let id = projects.of_empty_dir(&uid(env, number).await?)?;
        anyhow::ensure!(id >= FIRST_OF_KUBELET, "the emptyDir of pod {number} has project {id}");
        let record = projects.record(id)?;
        anyhow::ensure!(record.bytes >= 2 * FILE, "pod {number} has two files of {FILE} bytes: {record:?}");
        anyhow::ensure!(record.limit.is_some(), "project {id} has no limit: {record:?}");
    }
    projects.check_disjoint()?;
    Ok(projects)
}

/// Checks that the projects of `before` have their limits, usage and directories, and that no id is used twice.
async fn check(env: &TestEnv<'_>, node: &Node, before: &Projects) -> Result<Projects> {
    let now = Projects::read(node).await?;
    now.check_disjoint()?;
    for number in 0..2 {
        let uid = uid(env, number).await?;
        let (id, then) = (now.of_empty_dir(&uid)?, before.of_empty_dir(&uid)?);
        anyhow::ensure!(id == then, "the emptyDir of pod {number} had project {then}, and has {id}");
        let (now, then) = (now.record(id)?, before.record(id)?);
        anyhow::ensure!(now == then, "project {id} was {then:?}, and is {now:?}");
    }
    Ok(now)
}

async fn volumes_come_and_go(env: &TestEnv<'_>, node: &Node, before: &Projects) -> Result<()> {
    for round in 0..ROUNDS {
        create_claims(env, node, round).await?;
        // The kubelet allocates an id while volumes exist, and the next round allocates ids while that one exists.
        start_pod(env, 2 + round).await?;
        let now = check(env, node, before).await?;
        let of_volumes = now.volumes();
        anyhow::ensure!(of_volumes >= CLAIMS, "there are {of_volumes} volumes instead of {CLAIMS}");
        let id = now.of_empty_dir(&uid(env, 2 + round).await?)?;
        anyhow::ensure!(id >= FIRST_OF_KUBELET, "the emptyDir of pod {} has project {id}", 2 + round);
        delete_claims(env, round).await?;
        check(env, node, before).await?;
    }
    Ok(())
}

fn claim_name(round: usize, number: usize) -> String {
    format!("beside-{round}-{number}")
}

/// Creates the claims of one round, and waits until they are bound.
async fn create_claims(env: &TestEnv<'_>, node: &Node, round: usize) -> Result<()> {
    let create = async |number| {
        let name = claim_name(round, number);
        claims::request_on(env, node.name(), &name, SIZE, VolumeMode::Filesystem).await
    };
    try_join_all((0..CLAIMS).map(create)).await?;
    until(env.claims(), watcher::Config::default(), env.timeouts.start, |all| {
        let bound = all.values().filter(|claim| claims::is_bound(claim)).count();
        State::ready_if(bound == CLAIMS, format!("{bound} of {CLAIMS} claims are bound"))
    })
    .await
    .map(drop)
}

async fn delete_claims(env: &TestEnv<'_>, round: usize) -> Result<()> {
    try_join_all((0..CLAIMS).map(async |number| claims::delete(env, &claim_name(round, number)).await))
        .await?;
    removal::no_volumes(env).await
}

async fn restart(env: &TestEnv<'_>, node: &Node, before: &Projects) -> Result<()> {
    driver_restart::replace(env).await?;
    serving::served(env).await?;
    check(env, node, before).await.map(drop)
}

/// Waits until the kubelet's statistics of the emptyDirs are those of the quota records.
async fn statistics(env: &TestEnv<'_>, before: &Projects) -> Result<()> {
    let deadline = Instant::now() + POLL_TIMEOUT;
    let uid = uid(env, 0).await?;
    let expected = before.record(before.of_empty_dir(&uid)?)?.bytes;
    loop {
        let found = reported_usage(env, &uid).await?;
        if found == Some(expected) {
            return Ok(());
        }
        anyhow::ensure!(
            Instant::now() < deadline,
            "the quota record has {expected} bytes, and the kubelet reports {found:?}"
        );
        sleep(POLL_INTERVAL).await;
    }
}

async fn reported_usage(env: &TestEnv<'_>, uid: &str) -> Result<Option<u64>> {
    let node = env.node.context("the node is not the harness's own")?;
    let summary = node.kubelet_page("/stats/summary").await?;
    let summary: Value = serde_json::from_str(&summary).context("parse the kubelet's statistics")?;
    let pods = summary["pods"].as_array().into_iter().flatten();
    let mut volumes = pods
        .filter(|pod| pod["podRef"]["uid"] == uid)
        .flat_map(|pod| pod["volume"].as_array().into_iter().flatten());
    Ok(volumes.find(|volume| volume["name"] == "scratch").and_then(|volume| volume["usedBytes"].as_u64()))
}

/// Waits until nothing is charged to the kubelet's projects: it removes emptyDirs, and the file system frees their blocks,
/// in the background.
async fn unused(node: &Node) -> Result<Projects> {
    let deadline = Instant::now() + POLL_TIMEOUT;
    loop {
        let projects = Projects::read(node).await?;
        if projects.kubelet_uses_nothing() {
            return Ok(projects);
        }
        let records: Vec<_> = projects.records_of_kubelet().collect();
        anyhow::ensure!(
            Instant::now() < deadline,
            "the emptyDirs are gone, and the projects have {records:?}"
        );
        sleep(POLL_INTERVAL).await;
    }
}

/// Ends the pods. The kubelet of this version leaves a limit on the project of a removed emptyDir if the pod had a user
/// namespace. The driver must not remove it either, because the kubelet still lists the id.
async fn clear(env: &TestEnv<'_>, node: &Node, before: &Projects) -> Result<()> {
    try_join_all((0..2 + ROUNDS).map(async |number| pods::end(env, &pod_name(number)).await)).await?;
    let after = unused(node).await?;
    driver_restart::replace(env).await?;
    serving::served(env).await?;
    let now = Projects::read(node).await?;
    let left: Vec<_> = after.records_of_kubelet().collect();
    anyhow::ensure!(!left.is_empty(), "the kubelet left no limit on the project of a removed emptyDir");
    for (id, record) in left {
        let kept = now.record(id).ok();
        anyhow::ensure!(kept == Some(record), "project {id} was {record:?}, and is {kept:?}");
        let then = before.record(id).ok();
        anyhow::ensure!(then.is_none_or(|then| then.limit == record.limit), "{then:?} and {record:?}");
    }
    runtime_classes::delete(env, OWN_USERS).await
}

/// Removes the limits from the projects of the kubelet.
async fn remove_kubelet_limits(env: &TestEnv<'_>) -> Result<()> {
    let node = env.node.context(FOREIGN_NODE)?;
    for (id, _) in Projects::read(node).await?.records_of_kubelet() {
        on_node(env, format!("xfs_quota -x -c 'limit -p bhard=0 bsoft=0 {id}' DATA")).await?;
    }
    Ok(())
}

//! Upgrade and downgrade: Kubernetes rolls out another version of the driver while volumes are in use and incomplete.
//!
//! The cluster has a node with a data disk and one without. An earlier version of the driver ([`EarlierVersion`]) is
//! installed with its own manifests. The manifests of this checkout replace it, and then its own replace them again. The
//! volumes of both versions are checked after each roll-out.

mod capacity;
mod incomplete;
mod nodes;
mod table;

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use release::DRIVER;
use testvm::report::{Outcome, Report};
use testvm::session::Session;
use testvm::steps::{StepResult, Steps};
use testvm_cluster::{Cluster, ClusterProfile, DataDisk, KubernetesSource, Node, Parts, objects};

use self::incomplete::{IncompleteVolumes, State};
use self::nodes::PODS;
use super::own_cluster::{self, NAMESPACE, Places};
use super::parts::serving;
use super::state_dump;
use super::stories::{install, removal};
use crate::earlier::{EarlierVersion, earlier_version};
use crate::node_options::NodeOptions;
use crate::nodes::{EARLIER_DRIVER, earlier_image, plan};
use crate::test_env::environment::{FOREIGN_NODE, TestEnv};
use crate::test_env::in_use::{InUse, running};
use crate::test_env::inventory::Inventory;
use crate::test_env::manifests::{self, Manifests};
use crate::test_env::workload::{VolumeMode, create_namespace};

const INDEX_OF_SECOND: u8 = 1;

/// A replacement of one version of the driver by another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Direction {
    Upgrade,
    Downgrade,
}

impl Direction {
    /// The name of the suite with the verdicts on the volumes.
    const fn name(self) -> &'static str {
        match self {
            Direction::Upgrade => "upgrade",
            Direction::Downgrade => "downgrade",
        }
    }

    /// The name of the suite with the steps until the other version runs.
    const fn roll_out(self) -> &'static str {
        match self {
            Direction::Upgrade => "upgrade: roll-out",
            Direction::Downgrade => "downgrade: roll-out",
        }
    }

    /// The names of volumes that the version before the roll-out created.
    const fn version_before(self) -> &'static str {
        match self {
            Direction::Upgrade => "earlier",
            Direction::Downgrade => "this",
        }
    }
}

const DIRECTIONS: [Direction; 2] = [Direction::Upgrade, Direction::Downgrade];
const INSTALL: &str = "earlier version";
const LATER_STORE: &str = "store of a later version";
const REMOVAL: &str = "removal";

/// Rolls out both versions on a cluster of its own. The logs and the state of the cluster are in `reports`.
///
/// # Errors
/// The manifests cannot be read. Failed steps are in the report.
pub(crate) async fn run(session: &Session, kubernetes: &KubernetesSource, reports: &Path) -> Result<Report> {
    state_dump::clear(reports)?;
    let mut report = Report::new();
    let Ok((cluster, second, earlier)) = start(session, &mut report, kubernetes, reports).await else {
        return Ok(report);
    };
    let manifests = manifests::of_checkout(&earlier.checkout)?.with_image(EARLIER_DRIVER)?;
    test(session, &mut report, &cluster, &second, manifests, reports).await?;
    let stop = async { second.stop().await.and(cluster.stop().await) };
    report.run("cluster", "stop the nodes and the control plane", stop).await;
    Ok(report)
}

/// Replaces the versions, and prints the table.
async fn test(
    session: &Session,
    report: &mut Report,
    cluster: &Cluster,
    second: &Node,
    earlier: Manifests,
    reports: &Path,
) -> Result<()> {
    let env = |manifests| TestEnv::new(manifests, cluster.client().clone(), Some(cluster), NAMESPACE);
    let versions = Versions { earlier: env(earlier)?, this: env(manifests::of_driver(session)?)? };
    // The report has the reason of a failure.
    drop(replace_versions(session, report, &versions, second).await);
    for name in [INSTALL].into_iter().chain(DIRECTIONS.map(Direction::name)).chain([LATER_STORE, REMOVAL]) {
        if !report.cases.iter().any(|case| case.suite == name) {
            report.push(name, "all steps", Outcome::NotRun, Duration::ZERO);
        }
    }
    session.progress.line(table::table(report, &DIRECTIONS.map(Direction::name)));
    state_dump::write(&versions.this, reports).await;
    if !report.succeeded() {
        state_dump::write_bundles(session, cluster.nodes().iter().chain([second]), reports).await;
    }
    Ok(())
}

/// The driver as the manifests of each version describe it.
struct Versions<'a> {
    earlier: TestEnv<'a>,
    this: TestEnv<'a>,
}

async fn start(
    session: &Session,
    report: &mut Report,
    kubernetes: &KubernetesSource,
    reports: &Path,
) -> StepResult<(Cluster, Node, EarlierVersion)> {
    let mut steps = Steps::begin(session, report, "cluster");
    let earlier = steps.step("build the earlier version", earlier_version(session)).await?;
    session.progress.line(format!("the earlier version is commit {}", earlier.name));
    let options = NodeOptions::default();
    let plan = async {
        let mut plan = plan(session, &options, ClusterProfile::Default, &[]).await?;
        plan.images.push(earlier_image(&earlier));
        anyhow::Ok(plan)
    };
    let variant = options.variant();
    let parts = Parts::build(session, &variant, plan, kubernetes);
    let dir = session.workspace.target().join("upgrade-cluster");
    let places = Places { dir, logs: reports.join("logs"), reports };
    let cluster = own_cluster::start(session, &mut steps, parts, places).await?;
    let second = cluster.boot_node(session, INDEX_OF_SECOND, DataDisk::Unmounted);
    let second = steps.step("boot a second node without a data file system", second).await?;
    Ok((cluster, second, earlier))
}

async fn replace_versions(
    session: &Session,
    report: &mut Report,
    Versions { earlier, this }: &Versions<'_>,
    second: &Node,
) -> StepResult {
    let mut steps = Steps::begin(session, report, INSTALL);
    let node =
        steps.step("find the node with the data disk", async { earlier.node.context(FOREIGN_NODE) }).await?;
    let generation = steps.step("apply its manifests", apply(earlier)).await?;
    // The node without a disk does not register the driver.
    let rolled_out = install::rolled_out(earlier, generation, PODS);
    steps.step("its pods are available on both nodes", rolled_out).await?;
    steps.step("create a namespace", create_namespace(&earlier.client, &earlier.namespace)).await?;
    let before = steps.step("list what is on the node", Inventory::take(node)).await?;

    let mut in_use = Vec::new();
    for direction in DIRECTIONS {
        let (from, to) = match direction {
            Direction::Upgrade => (earlier, this),
            Direction::Downgrade => (this, earlier),
        };
        let mut steps = Steps::begin(session, report, direction.roll_out());
        let rolled_out = roll_out(&mut steps, direction, from, to, node, second, &mut in_use).await?;
        let mut steps = Steps::begin(session, report, direction.name());
        check(&mut steps, to, node, rolled_out, &mut in_use).await?;
    }

    let mut steps = Steps::begin(session, report, LATER_STORE);
    refuse_later_store(&mut steps, earlier, node, &in_use).await?;

    let mut steps = Steps::begin(session, report, REMOVAL);
    let title = "delete the pods and claims of both versions";
    steps.step(title, removal::delete_namespace(earlier)).await?;
    steps.step("no volume of the driver is left", removal::no_volumes(earlier)).await?;
    let title = "files, project ids, loop devices and mounts are as before";
    steps.step(title, removal::nothing_left(earlier, node, &before)).await?;
    steps.step("remove the driver", install::remove(earlier)).await
}

/// The state before a roll-out.
struct RolledOut {
    incomplete: IncompleteVolumes,
    pods: Vec<String>,
    /// The capacity that the node has to publish in the end, if nothing in use is expanded.
    capacity: u64,
}

/// Creates volumes with one version, and has Kubernetes replace it by the other.
async fn roll_out(
    steps: &mut Steps<'_>,
    direction: Direction,
    from: &TestEnv<'_>,
    to: &TestEnv<'_>,
    node: &Node,
    second: &Node,
    in_use: &mut Vec<InUse>,
) -> StepResult<RolledOut> {
    let version = direction.version_before();
    let capacity =
        steps.step("the node publishes its free capacity", capacity::published(from, node)).await?;
    let created = InUse::of(version);
    steps.step("pods use volumes of the version that runs", created.create(from)).await?;
    let capacity = capacity.saturating_sub(created.bytes());
    in_use.push(created);
    let incomplete = IncompleteVolumes::create(from, node, version);
    let incomplete = steps.step("volumes are created, expanded and deleted incompletely", incomplete).await?;
    let pods = steps.step("list the pods", running(from)).await?;
    if direction == Direction::Downgrade {
        let title = "the second node gets its data disk, and then misses it";
        steps.step(title, nodes::lose_disk(from, second)).await?;
    }
    let generation = steps.step("apply the manifests of the other version", apply(to)).await?;
    if direction == Direction::Downgrade {
        let waits = nodes::waits_for_disk(to, second, image(direction));
        steps.step("the roll-out waits for the node that misses its disk", waits).await?;
    }
    steps.step("the roll-out reaches both nodes", install::rolled_out(to, generation, PODS)).await?;
    steps.step("all pods of the driver have the new image", nodes::have_image(to, image(direction))).await?;
    if direction == Direction::Upgrade {
        let title = "the node without a disk is not registered and publishes no capacity";
        steps.step(title, nodes::unused(to, second)).await?;
    }
    steps.step("the API server accepts the writes again", incomplete.resume(to)).await?;
    Ok(RolledOut { incomplete, pods, capacity })
}

const fn image(direction: Direction) -> &'static str {
    match direction {
        Direction::Upgrade => DRIVER,
        Direction::Downgrade => EARLIER_DRIVER,
    }
}

/// Applies the manifests, and returns the generation of the DaemonSet.
async fn apply(env: &TestEnv<'_>) -> Result<Option<i64>> {
    env.manifests.apply(&env.client).await?;
    let applied = objects::read(&env.daemon_sets(), env.driver.daemon_set()).await;
    Ok(applied.context("read the DaemonSet")?.metadata.generation)
}

/// Checks the volumes of all versions with the version that runs. Each step is a row of the table.
async fn check(
    steps: &mut Steps<'_>,
    env: &TestEnv<'_>,
    node: &Node,
    RolledOut { incomplete, pods, capacity }: RolledOut,
    in_use: &mut [InUse],
) -> StepResult {
    steps
        .step("pods with volumes: no container was restarted", async {
            let now = running(env).await?;
            anyhow::ensure!(
                now == pods,
                "before the roll-out there were {pods:#?}, and now there are {now:#?}"
            );
            Ok(())
        })
        .await?;
    for mode in [VolumeMode::Filesystem, VolumeMode::Block] {
        steps
            .step(&format!("{mode} volumes in use: data, size and limit"), async {
                for volumes in &*in_use {
                    volumes.check(env, mode).await?;
                }
                Ok(())
            })
            .await?;
    }
    steps
        .step("read-only volumes in use: data and size", async {
            for volumes in &*in_use {
                volumes.check_read_only(env).await?;
            }
            Ok(())
        })
        .await?;
    let bytes = |in_use: &[InUse]| in_use.iter().map(InUse::bytes).sum::<u64>();
    let before = bytes(in_use);
    steps
        .step("volumes in use are expanded", async {
            for volumes in in_use.iter_mut() {
                volumes.expand(env).await?;
            }
            Ok(())
        })
        .await?;
    for (title, state) in [
        ("bound and never used: a pod uses the volume", State::Unpublished),
        ("volume without PersistentVolume: a pod uses it", State::Created),
        ("the same, claim deleted: the volume is deleted", State::Abandoned),
        ("expansion in progress: it ends, and a pod uses the volume", State::Expanding),
        ("deletion in progress: it ends", State::Deleting),
    ] {
        steps.step(title, incomplete.check(env, node, state)).await?;
    }
    let expanded = bytes(in_use) - before;
    steps
        .step("deleted volumes give their capacity back", async {
            incomplete.delete(env).await?;
            capacity::given_back(env, node, capacity.saturating_sub(expanded)).await
        })
        .await
}

/// Has the driver start on a store of a format that it does not know: it has to say so, and to touch no volume.
async fn refuse_later_store(
    steps: &mut Steps<'_>,
    env: &TestEnv<'_>,
    node: &Node,
    in_use: &[InUse],
) -> StepResult {
    let before = steps.step("list what is on the node", Inventory::take(node)).await?;
    steps.step("give the store a later format", nodes::set_format(node, nodes::LATER_FORMAT)).await?;
    let restarted = steps.step("restart the driver's pods", serving::restart(env)).await?;
    let title = "the driver is not Ready, and an event names the format";
    steps.step(title, nodes::reports_format(env, node)).await?;
    steps
        .step("no volume was touched, and pods still use theirs", async {
            let more = Inventory::take(node).await?;
            anyhow::ensure!(more == before, "the node had {before:?}, and now has {more:?}");
            for volumes in in_use {
                volumes.check(env, VolumeMode::Filesystem).await?;
                volumes.check(env, VolumeMode::Block).await?;
            }
            Ok(())
        })
        .await?;
    steps.step("give the store its format again", nodes::set_format(node, nodes::FORMAT)).await?;
    steps.step("the restart reaches both nodes", install::rolled_out(env, restarted, PODS)).await
}

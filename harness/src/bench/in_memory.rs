//! A provisioner with volumes in memory, as a process of this machine beside the control plane. Neither an
//! emulated processor nor a disk affects its measurements.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use kube::Client;
use testvm::process::Process;
use testvm::session::Session;
use testvm_cluster::{ClusterProfile, ControlPlane, KubernetesSource};

use super::cluster::NAMESPACE;
use super::measurement::{Environment, Machine, Row};
use crate::fake_nodes::{self, LiveTests, NODES};
use crate::test_env::workload::create_namespace;

/// The node of the provisioner.
pub(super) const NODE: &str = NODES[0];

/// Limits the shutdown of a provisioner. It completes operations in progress, and writes the events of hundreds of claims that its rate
/// limit has held back.
const STOP_GRACE: Duration = Duration::from_secs(120);

/// The place of measurements beside a control plane whose nodes are objects only.
pub(super) const WITHOUT_KUBELETS: &str = "this machine, nodes without kubelets";

/// The provisioner's program, and the directory of its log.
pub(super) struct Installation<'a> {
    tests: &'a LiveTests,
    logs: &'a Path,
}

/// A running provisioner. Dropping it kills the process.
pub(super) struct Provisioner(Process);

impl Installation<'_> {
    /// Starts the provisioner of [`NODE`]. Its log is beside those of the control plane.
    pub(super) fn start(&self) -> Result<Provisioner> {
        let program = self.tests.serving(fake_nodes::SERVE).log(self.logs.join("provisioner.log"));
        Ok(Provisioner(program.spawn()?))
    }
}

impl Provisioner {
    /// Returns the id of its process.
    pub(super) fn id(&self) -> i32 {
        self.0.id()
    }

    /// Runs `measuring`. Returns an error if the provisioner ends before it.
    pub(super) async fn during<T>(&mut self, measuring: impl Future<Output = Result<T>>) -> Result<T> {
        unless_ended(&mut self.0, measuring).await
    }

    pub(super) async fn stop(self) -> Result<()> {
        let status = self.0.stop(STOP_GRACE).await?;
        anyhow::ensure!(status.success(), "the provisioner did not exit cleanly: {status}");
        Ok(())
    }
}

/// Starts a control plane with the benchmark profile, and a provisioner of a fake node with an empty
/// [`NAMESPACE`]. Runs `measure` there with the node's name, and stops both.
pub(super) async fn measured(
    session: &Session,
    bench: &str,
    measure: impl AsyncFnOnce(&Client, &str) -> Result<Vec<Row>>,
) -> Result<Environment> {
    beside_control_plane(session, bench, async |installation, control_plane| {
        let mut provisioner = installation.start()?;
        let rows = provisioner.during(measure(control_plane.client(), NODE)).await?;
        provisioner.stop().await?;
        Ok(rows)
    })
    .await
}

/// Starts a control plane with the benchmark profile and fake nodes, with an empty [`NAMESPACE`]. Runs `measure` there with the
/// installed provisioner, which it starts itself, and stops the control plane.
pub(super) async fn beside_control_plane(
    session: &Session,
    bench: &str,
    measure: impl AsyncFnOnce(Installation<'_>, &ControlPlane) -> Result<Vec<Row>>,
) -> Result<Environment> {
    let logs = session.workspace.reports("bench").join(bench);
    let kubernetes = KubernetesSource::default();
    let rows = fake_nodes::with_live_tests(
        session,
        ClusterProfile::Benchmark,
        &kubernetes,
        &logs,
        async |tests, control_plane| {
            create_namespace(control_plane.client(), NAMESPACE).await?;
            measure(Installation { tests, logs: &logs }, control_plane).await
        },
    );
    let rows = rows.await?;
    environment("this machine, volumes in memory", &kubernetes, rows)
}

/// Runs `measuring`. Returns an error if the process ends before it.
pub(super) async fn unless_ended<T>(
    process: &mut Process,
    measuring: impl Future<Output = Result<T>>,
) -> Result<T> {
    let name = process.name().to_owned();
    tokio::select! {
        measured = measuring => measured,
        ended = process.wait() => anyhow::bail!("{name} ended with {} while it was measured", ended?),
    }
}

/// Returns rows that were measured on this machine, with its description. None of its file systems affects the measurements.
pub(super) fn environment(place: &str, kubernetes: &KubernetesSource, rows: Vec<Row>) -> Result<Environment> {
    let read = |path: &str| std::fs::read_to_string(path).with_context(|| format!("read {path}"));
    let machine = Machine::of(&read(Machine::CPUINFO)?, &read(Machine::KERNEL)?, "none");
    let machine = machine.with_kubernetes(kubernetes.minor.name());
    Ok(Environment { place: place.to_owned(), machine, rows })
}

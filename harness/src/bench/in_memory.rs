//! A provisioner with volumes in memory, as a process of this machine beside the control plane. Neither an
//! emulated processor nor a disk affects its measurements.

use std::time::Duration;

use anyhow::{Context, Result};
use kube::Client;
use testvm::process::Program;
use testvm::session::Session;
use testvm_cluster::{ClusterProfile, KubernetesSource};

use super::cluster::NAMESPACE;
use super::measurement::{Environment, Machine, Row};
use crate::fake_nodes::{self, NODES};
use crate::test_env::workload::create_namespace;

/// Limits the shutdown of a provisioner that completes operations in progress.
const STOP_GRACE: Duration = Duration::from_secs(20);

/// Starts a control plane with the benchmark profile, and a provisioner of a fake node with an empty
/// [`NAMESPACE`]. Runs `measure` there with the node's name, and stops both.
pub(super) async fn measured(
    session: &Session,
    bench: &str,
    measure: impl AsyncFnOnce(&Client, &str) -> Result<Vec<Row>>,
) -> Result<Environment> {
    let logs = session.workspace.reports("bench").join(bench);
    let kubernetes = KubernetesSource::default();
    let rows = fake_nodes::with_live_tests(
        session,
        ClusterProfile::Benchmark,
        &kubernetes,
        &logs,
        async |tests, control_plane| {
            let client = control_plane.client();
            create_namespace(client, NAMESPACE).await?;
            beside_provisioner(tests.program().log(logs.join("provisioner.log")), measure(client, NODES[0]))
                .await
        },
    );
    let rows = rows.await?;
    let machine = machine()?.with_kubernetes(kubernetes.minor.name());
    Ok(Environment { place: "this machine, volumes in memory".to_owned(), machine, rows })
}

async fn beside_provisioner(
    tests: Program,
    measuring: impl Future<Output = Result<Vec<Row>>>,
) -> Result<Vec<Row>> {
    let mut provisioner = tests.args([fake_nodes::SERVE, "--exact", "--ignored", "--nocapture"]).spawn()?;
    let rows = tokio::select! {
        rows = measuring => rows?,
        ended = provisioner.wait() => anyhow::bail!("the provisioner ended with {}", ended?),
    };
    let status = provisioner.stop(STOP_GRACE).await?;
    anyhow::ensure!(status.success(), "the provisioner did not exit cleanly: {status}");
    Ok(rows)
}

/// Returns the description of this machine, none of whose file systems affects the measurements.
pub(super) fn machine() -> Result<Machine> {
    let read = |path: &str| std::fs::read_to_string(path).with_context(|| format!("read {path}"));
    Ok(Machine::of(&read(Machine::CPUINFO)?, &read(Machine::KERNEL)?, "none"))
}

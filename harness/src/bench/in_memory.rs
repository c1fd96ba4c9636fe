//! A provisioner whose volumes are in memory, as a process of this machine beside the control plane: what neither an emulated
//! processor nor a disk has a part in.

use std::time::Duration;

use anyhow::{Context, Result};
use kube::Client;

use super::cluster::NAMESPACE;
use super::measurement::{Machine, Part, Row};
use crate::cache;
use crate::cluster::{ClusterSpec, ControlPlane, Durability, Purpose};
use crate::declared_nodes::{LiveTests, NODES};
use crate::e2e;
use crate::e2e::manifests::Manifests;
use crate::process::Program;
use crate::rust_build::Profile;
use crate::session::Session;

/// For a provisioner that finishes what is under way.
const STOP_GRACE: Duration = Duration::from_secs(20);

/// Starts a control plane for figures and a provisioner of a node that is an object only, with an empty [`NAMESPACE`], has `measure`
/// take the rows there, given the node's name, and ends both.
pub(super) async fn measured(
    session: &Session,
    bench: &str,
    measure: impl AsyncFnOnce(&Client, &str) -> Result<Vec<Row>>,
) -> Result<Part> {
    let manifests = Manifests::of_driver(session)?;
    let tests = LiveTests::build(session, Profile::Release).await?;
    let directory = tempfile::tempdir().context("make a directory")?;
    let logs = session.workspace.reports("bench").join(bench);
    // An earlier run's would be read as this one's.
    cache::remove_dir(&logs)?;
    let spec = ClusterSpec {
        dir: directory.path().to_owned(),
        logs: logs.clone(),
        durability: Durability::Unsafe,
        purpose: Purpose::Figures,
    };
    let control_plane = ControlPlane::alone(session, &spec, None).await?;
    let measured = async {
        let step = session.progress.step("install the driver on nodes that are objects only");
        let program = tests.install(&control_plane, &manifests).await?;
        e2e::create_namespace(control_plane.client(), NAMESPACE).await?;
        step.done("");
        let program = program.log(logs.join("provisioner.log"));
        beside_provisioner(program, measure(control_plane.client(), NODES[0])).await
    };
    let measured = measured.await;
    // Also when that failed: the end of the logs is worth having.
    let stopped = control_plane.stop().await;
    let rows = measured?;
    stopped?;
    Ok(Part { place: "this machine, volumes in memory".to_owned(), machine: machine()?, rows })
}

async fn beside_provisioner(
    tests: Program,
    measuring: impl Future<Output = Result<Vec<Row>>>,
) -> Result<Vec<Row>> {
    let mut provisioner = tests.args([LiveTests::SERVE, "--exact", "--ignored", "--nocapture"]).spawn()?;
    let rows = tokio::select! {
        rows = measuring => rows?,
        ended = provisioner.wait() => anyhow::bail!("the provisioner ended with {}", ended?),
    };
    let status = provisioner.stop(STOP_GRACE).await?;
    anyhow::ensure!(status.success(), "the provisioner did not end well: {status}");
    Ok(rows)
}

fn machine() -> Result<Machine> {
    let read = |path: &str| std::fs::read_to_string(path).with_context(|| format!("read {path}"));
    Ok(Machine::of(&read(Machine::CPUINFO)?, &read(Machine::KERNEL)?, "none"))
}

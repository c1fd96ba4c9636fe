//! The apiserver lane: the provisioner against a real etcd, API server, controller manager and scheduler, on volumes in memory.
//!
//! Nodes are objects that nobody answers for, so there is no virtual machine. What Kubernetes decides about a claim without a
//! kubelet is decided here in seconds; the provisioner has no rights but those of the manifests.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::libtest::Run;
use crate::cache;
use crate::cluster::{ClusterSpec, ControlPlane, Durability, Purpose};
use crate::declared_nodes::LiveTests;
use crate::e2e::manifests::Manifests;
use crate::report::Report;
use crate::rust_build::Profile;
use crate::session::Session;

const SUITE: &str = "apiserver: provisioner";

/// All tests; each awaits what it awaits for half a minute at most.
const TESTS_TIME: Duration = Duration::from_secs(900);

pub(super) async fn run(session: &Session, kubernetes_bin: Option<&Path>) -> Result<Report> {
    session.until_cancelled(prepare_and_run(session, kubernetes_bin)).await
}

async fn prepare_and_run(session: &Session, kubernetes_bin: Option<&Path>) -> Result<Report> {
    let manifests = Manifests::of_driver(session)?;
    let tests = LiveTests::build(session, Profile::Debug).await?;
    let logs = session.workspace.reports("test").join("apiserver");
    // An earlier run's would be read as this one's.
    cache::remove_dir(&logs)?;
    let directory = tempfile::tempdir().context("make a directory")?;
    let spec = ClusterSpec {
        dir: directory.path().to_owned(),
        logs: logs.clone(),
        // It does not outlive the machine's power.
        durability: Durability::Unsafe,
        purpose: Purpose::Use,
    };
    let control_plane = ControlPlane::alone(session, &spec, kubernetes_bin).await?;
    let result = test(session, &control_plane, &manifests, &tests, &logs).await;
    // Also when that failed: the end of the logs is worth having.
    let stopped = control_plane.stop().await;
    let report = result?;
    stopped?;
    Ok(report)
}

async fn test(
    session: &Session,
    control_plane: &ControlPlane,
    manifests: &Manifests,
    tests: &LiveTests,
    logs: &Path,
) -> Result<Report> {
    let step = session.progress.step("install the driver on nodes that are objects only");
    let program = tests.install(control_plane, manifests).await?;
    step.done("");

    let step = session.progress.step("run the tests of the provisioner against the API server");
    let log = logs.join("tests.log");
    // The nodes are the same for all tests, and each needs them to itself.
    let program = program.args(["--test-threads=1", LiveTests::ALL, "--skip", LiveTests::SERVE]).log(&log);
    let started = Instant::now();
    let ended = match tokio::time::timeout(TESTS_TIME, program.finish()).await {
        Ok(finished) => {
            let finished = finished?;
            if finished.status.success() { Ok(()) } else { Err(finished.failure()) }
        }
        Err(_elapsed) => Err(format!("not done within {TESTS_TIME:?}")),
    };
    let output = std::fs::read_to_string(&log).with_context(|| format!("read {}", log.display()))?;
    let mut report = Report::new();
    Run::parse(&output).report(&mut report, SUITE, ended, started.elapsed());
    if report.succeeded() {
        step.done(report.summary());
    } else {
        step.failed(report.summary());
    }
    Ok(report)
}

//! The apiserver lane: the provisioner with a real etcd, API server, controller manager and scheduler, and
//! volumes in memory.
//!
//! The nodes are fake nodes, so there is no virtual machine. Decisions of Kubernetes that need no kubelet
//! take seconds here. The provisioner has only the rights of the manifests. On the same control plane, etcd is restored from a
//! backup, and two versions of the driver run side by side. The Helm chart of the driver is tested on another one, which has nothing
//! installed.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use testvm::process::Program;
use testvm::report::Report;
use testvm::session::Session;
use testvm_cluster::{ClusterProfile, KubernetesSource};

use super::chart;
use super::libtest::Run;
use super::passes::require_pass;
use super::{restored_backup, side_by_side};
use crate::fake_nodes;

const SUITE: &str = "apiserver: provisioner";

/// The timeout of all tests together. Each wait in a test takes at most half a minute.
const TESTS_TIMEOUT: Duration = Duration::from_secs(900);

/// The prefix of the lines in which a test prints how many requests it sent and how many were denied.
const COUNTS: &str = "stolen token, ";

/// Runs all tests, or those whose names contain one of `only`. The text [`chart::NAME`] selects the checks of the Helm chart,
/// [`restored_backup::NAME`] the restoration of etcd, and [`side_by_side::NAME`] the two versions.
pub(super) async fn run(session: &Session, kubernetes: &KubernetesSource, only: &[String]) -> Result<Report> {
    let (of_chart, of_tests) = split(only, chart::NAME);
    let mut report = Report::new();
    if only.is_empty() || !of_tests.is_empty() {
        report.append(session.until_cancelled(prepare_and_run(session, kubernetes, &of_tests)).await?);
    }
    if only.is_empty() || !of_chart.is_empty() {
        report.append(session.until_cancelled(chart::run(session, kubernetes)).await?);
    }
    Ok(report)
}

/// Returns the texts that are the name of a part, and the other ones.
fn split(only: &[String], part: &str) -> (Vec<String>, Vec<String>) {
    only.iter().cloned().partition(|text| text == part)
}

async fn prepare_and_run(
    session: &Session,
    kubernetes: &KubernetesSource,
    only: &[String],
) -> Result<Report> {
    let logs = session.workspace.reports("test").join("apiserver");
    let (of_backup, of_others) = split(only, restored_backup::NAME);
    let (of_versions, of_tests) = split(&of_others, side_by_side::NAME);
    fake_nodes::with_live_tests(
        session,
        ClusterProfile::Default,
        kubernetes,
        &logs,
        async |tests, control_plane| {
            let mut report = Report::new();
            if only.is_empty() || !of_tests.is_empty() {
                report.append(test(session, tests.program(), &of_tests, &logs).await?);
            }
            if only.is_empty() || !of_backup.is_empty() {
                let restored = restored_backup::run(session, tests, control_plane, &logs).await?;
                report.append(require_pass(restored_backup::SUITE, restored));
            }
            // The last part: it replaces the rights of the nodes.
            if only.is_empty() || !of_versions.is_empty() {
                let of_both = side_by_side::run(session, tests, control_plane, &logs).await?;
                report.append(require_pass(side_by_side::SUITE, of_both));
            }
            Ok(report)
        },
    )
    .await
}

async fn test(session: &Session, tests: Program, only: &[String], logs: &Path) -> Result<Report> {
    let step = session.progress.step("run the tests of the provisioner against the API server");
    let log = logs.join("tests.log");
    // All tests use the same nodes, and each test needs them exclusively.
    let all = [fake_nodes::ALL.to_owned()];
    let selected = if only.is_empty() { &all } else { only };
    let program = tests.args(["--test-threads=1", "--skip", fake_nodes::SERVING]).args(selected).log(&log);
    let ended = match program.timeout(TESTS_TIMEOUT).finish().await {
        Ok(finished) if finished.status.success() => Ok(()),
        Ok(finished) => Err(finished.failure()),
        Err(error) => Err(format!("{error:#}")),
    };
    let output = std::fs::read_to_string(&log).with_context(|| format!("read {}", log.display()))?;
    for line in output.lines().filter(|line| line.starts_with(COUNTS)) {
        session.progress.line(line);
    }
    let mut report = Report::new();
    Run::parse(&output).report_selected(&mut report, SUITE, ended, only);
    if report.succeeded() {
        step.done(report.summary());
    } else {
        step.failed(report.summary());
    }
    Ok(report)
}

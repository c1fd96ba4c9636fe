//! The apiserver lane: the provisioner with a real etcd, API server, controller manager and scheduler, and
//! volumes in memory.
//!
//! The nodes are fake nodes, so there is no virtual machine. Decisions of Kubernetes that need no kubelet
//! take seconds here. The provisioner has only the rights of the manifests. On another control plane, etcd is restored from a
//! backup. The Helm chart of the driver is tested on one that has nothing installed. All of them run concurrently.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use futures::future::LocalBoxFuture;
use testvm::process::Program;
use testvm::report::Report;
use testvm::session::Session;
use testvm_cluster::{ClusterProfile, KubernetesMinor};

use super::libtest::Run;
use super::passes::require_pass;
use super::seed::{self, Source};
use super::{chart, checks, restored_backup};
use crate::fake_nodes;

const SUITE: &str = "apiserver: provisioner";
const PROFILE: ClusterProfile = ClusterProfile::Default;

/// The timeout of all tests of a shard together, which take five to eight minutes. Each wait in a test has its own.
const TESTS_TIMEOUT: Duration = Duration::from_secs(1800);

/// The prefix of the lines in which a test prints how many requests it sent and how many were denied.
const COUNTS: &str = "stolen token, ";

/// The number of control planes that share the tests. Each test needs the nodes of one for itself, and waits most of the time.
const SHARDS: usize = 2;

/// Runs all tests, or those whose names contain one of `only`. The text [`chart::NAME`] selects the checks of the Helm chart,
/// and [`restored_backup::NAME`] the restoration of etcd.
pub(super) async fn run(session: &Session, kubernetes: KubernetesMinor, only: &[String]) -> Result<Report> {
    let names = [chart::NAME, restored_backup::NAME];
    let (parts, tests): (Vec<&str>, Vec<&str>) =
        only.iter().map(String::as_str).partition(|text| names.contains(text));
    let selected = |part| only.is_empty() || parts.contains(&part);
    let has_tests = only.is_empty() || !tests.is_empty();
    // The chart needs no program.
    if !has_tests && !selected(restored_backup::NAME) {
        return session.until_cancelled(chart::run(session, kubernetes)).await;
    }
    let path = session.until_cancelled(fake_nodes::build_live_tests(session, PROFILE)).await?;
    let mut work: Vec<LocalBoxFuture<'_, Result<Report>>> = Vec::new();
    if has_tests {
        let seed = seed::choose(session, "apiserver", Source::Commit).await?;
        for (number, shard) in shards(&all_tests(&path).await?, &tests).into_iter().enumerate() {
            work.push(Box::pin(run_shard(session, kubernetes, &path, number + 1, seed, shard)));
        }
    }
    if selected(restored_backup::NAME) {
        work.push(Box::pin(restore_backup(session, kubernetes, &path)));
    }
    if selected(chart::NAME) {
        work.push(Box::pin(chart::run(session, kubernetes)));
    }
    let work = async { Ok(futures::future::join_all(work).await) };
    let mut report = Report::new();
    for of_part in session.until_cancelled(work).await? {
        report.append(of_part?);
    }
    Ok(report)
}

/// Returns the names of all tests of the program.
async fn all_tests(program: &Path) -> Result<Vec<String>> {
    let args = [fake_nodes::ALL, "--skip", fake_nodes::SERVING, "--list", "--format", "terse"];
    let listed = Program::new(program).named("the provisioner's tests").args(args).run().await?;
    Ok(listed.stdout.lines().filter_map(|line| line.strip_suffix(": test")).map(str::to_owned).collect())
}

/// Distributes the tests whose names contain one of `only`, or all, so that each shard has some of each module.
fn shards(all: &[String], only: &[&str]) -> Vec<Vec<String>> {
    let selected = all.iter().filter(|name| only.is_empty() || only.iter().any(|text| name.contains(text)));
    let mut shards = vec![Vec::new(); SHARDS];
    selected.enumerate().for_each(|(index, name)| shards[index % SHARDS].push(name.clone()));
    shards.retain(|shard| !shard.is_empty());
    shards
}

async fn run_shard(
    session: &Session,
    kubernetes: KubernetesMinor,
    path: &Path,
    number: usize,
    seed: u64,
    tests: Vec<String>,
) -> Result<Report> {
    let logs = session.workspace.reports("test").join(format!("apiserver-{number}"));
    fake_nodes::with_live_tests(session, path, PROFILE, kubernetes, &logs, async |program, _| {
        test(session, seed::set(program.program(), seed), number, &tests, &logs).await
    })
    .await
}

/// The restoration changes the control plane for all who use it.
async fn restore_backup(session: &Session, kubernetes: KubernetesMinor, path: &Path) -> Result<Report> {
    let logs = session.workspace.reports("test").join("apiserver");
    fake_nodes::with_live_tests(session, path, PROFILE, kubernetes, &logs, async |tests, control_plane| {
        let restored = restored_backup::run(session, tests, control_plane, &logs).await?;
        Ok(require_pass(restored_backup::SUITE, restored))
    })
    .await
}

async fn test(
    session: &Session,
    program: Program,
    number: usize,
    tests: &[String],
    logs: &Path,
) -> Result<Report> {
    let step = session.progress.step(format!("run the tests of the provisioner against API server {number}"));
    let log = logs.join("tests.log");
    // All tests use the same nodes, and each test needs them exclusively.
    let program = program.args(["--test-threads=1", "--exact"]).args(tests).log(&log);
    let finished = program.timeout(TESTS_TIMEOUT).finish().await;
    let ended = finished.map_err(|error| format!("{error:#}")).and_then(|finished| checks::ended(&finished));
    let output = std::fs::read_to_string(&log).with_context(|| format!("read {}", log.display()))?;
    for line in output.lines().filter(|line| line.starts_with(COUNTS)) {
        session.progress.line(line);
    }
    let mut report = Report::new();
    Run::parse(&output).report(&mut report, SUITE, ended, &[]);
    report.end(step);
    Ok(report)
}

#[cfg(test)]
mod tests {
    use super::shards;

    #[test]
    fn each_test_is_in_one_shard() {
        let all = ["a::1", "a::2", "b::1"].map(str::to_owned);
        assert_eq!(shards(&all, &[]), [vec!["a::1", "b::1"], vec!["a::2"]]);
        assert_eq!(shards(&all, &["b::"]), [vec!["b::1"]]);
        assert!(shards(&all, &["c::"]).is_empty());
    }
}

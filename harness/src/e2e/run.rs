//! Runs the stories on the selected cluster, and writes the report.

use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result};
use kube::config::Kubeconfig;
use testvm::report::Report;
use testvm::session::Session;
use testvm::steps::{StepResult, Steps};
use testvm::vm::report_repeated_boots;
use testvm_cluster::{
    Cluster, ClusterProfile, ClusterSpec, Durability, Node, background, client, gvisor, snapshotter,
};

use super::args::Args;
use super::runner::{NAMESPACE, Plan, Runner, Selection, StoryRunner};
use super::{kind, self_check, state_dump, stories};
use crate::node_options::NodeOptions;
use crate::nodes::{self, Additions};
use crate::test_env::environment::TestEnv;
use crate::test_env::manifests::{self, Manifests};
use crate::test_env::node_debug;

/// Runs the stories and reports every step. A cluster of the run's own is stopped after it, unless it is kept: then the
/// background process serves it.
///
/// # Errors
/// Options contradict each other, the manifests cannot be read, or the background process cannot be started. Failed
/// steps are in the report.
pub async fn run(session: &Session, args: &Args) -> Result<Report> {
    args.check()?;
    let manifests = manifests::of_driver(session)?;
    let reports = args.reports(session);
    if args.is_on_kind() {
        let stories = kind::Stories { selection: args.selection(), documents: args.names_none() };
        let kubernetes = args.kubernetes().minor_for_kind();
        return Box::pin(kind::run(session, manifests, NAMESPACE, stories, kubernetes, &reports)).await;
    }
    if let Some(kubeconfig) = &args.kubeconfig {
        let selection = args.selection();
        return Box::pin(against_any_cluster(session, manifests, kubeconfig, selection, &reports)).await;
    }
    if args.keep && !background::is_background(session) {
        let cases = background::run_again(session, args.again()).await?;
        return Ok(Report { cases, ..Report::default() });
    }
    let (dir, reports) = if args.keep {
        let dir = background::directory(&session.workspace);
        (dir.clone(), dir.join("logs"))
    } else {
        state_dump::clear(&reports)?;
        (session.workspace.target().join("e2e-cluster"), reports)
    };

    let mut report = Report::new();
    // The report has the reason of a failure.
    let cluster = Box::pin(start(session, &mut report, args, dir, &reports)).await.ok();
    if let Some(cluster) = &cluster {
        let mut env = TestEnv::new(manifests, cluster.client().clone(), Some(cluster), NAMESPACE)?;
        env.reports = Some(reports.clone());
        let failures = (!args.keep).then_some(reports.as_path());
        let plan = Plan { nodes: &args.nodes, selection: args.selection(), sabotage: args.broken, failures };
        if args.self_check {
            Box::pin(self_check::run(session, &mut report, &env, plan)).await;
        } else {
            Box::pin(StoryRunner::begin(session, &mut report, &env, plan).await.run_all()).await;
        }
        state_dump::write(&env, &reports).await;
        if !report.succeeded() {
            state_dump::write_node(session, cluster.node(), &reports).await;
        }
    }
    if args.keep {
        // This process booted the machines, and the other one prints the report.
        report_repeated_boots("virtual machines", &mut report);
        Box::pin(hand_over(session, cluster, &report)).await?;
    } else if let Some(cluster) = cluster {
        let started = Instant::now();
        // The cluster is stopped after Ctrl-C too, when no further step begins.
        let stopped = Box::pin(cluster.stop()).await;
        report.record("cluster", "stop the node and the control plane", started.elapsed(), &stopped);
    }
    Ok(report)
}

/// Gives the report to the process that waits for it, and serves the cluster, if it started.
async fn hand_over(session: &Session, cluster: Option<Cluster>, report: &Report) -> Result<()> {
    if let Some(cluster) = &cluster {
        session.progress.line(cluster.walkthrough());
        session.progress.finish();
    }
    background::hand_over(&session.workspace, cluster.as_ref(), &report.cases)?;
    match cluster {
        Some(cluster) => Box::pin(cluster.serve_until_cancelled(session)).await,
        None => Ok(()),
    }
}

/// Builds the parts of the cluster, and starts it in `dir`. If the node boots and a later step fails, the archive of `dbg bundle` is in the
/// reports.
async fn start(
    session: &Session,
    report: &mut Report,
    args: &Args,
    dir: PathBuf,
    reports: &Path,
) -> StepResult<Cluster> {
    let mut steps = Steps::begin(session, report, "cluster");
    let parts = async {
        let additions = additions(session, args.selection()).await?;
        let kubernetes = args.kubernetes().minor();
        nodes::parts(session, kubernetes, &args.nodes, ClusterProfile::Default, additions).await
    };
    let parts = steps.step("build programs, images and disks", parts).await?;
    let logs = if args.keep { reports.to_owned() } else { reports.join("logs") };
    // The cluster of a test need not survive a power cut of the machine.
    let spec = ClusterSpec { dir, logs, durability: Durability::Unsafe, profile: ClusterProfile::Default };
    let bundle = async |node: &Node| state_dump::try_write_bundle(node, reports).await;
    let started = Cluster::start_diagnosed(session, spec, parts, bundle);
    let cluster = steps.step("start a control plane and a node", started).await?;
    let granted = node_debug::grant(session, cluster.client());
    if let Err(failed) = steps.step("grant node-debug its rights", granted).await {
        state_dump::write_node(session, cluster.node(), reports).await;
        return Err(failed);
    }
    Ok(cluster)
}

/// Builds what only some stories need: each is large.
async fn additions(session: &Session, selection: Selection<'_>) -> Result<Additions> {
    let mut additions = Additions::default();
    if selection.contains_name(stories::gvisor::STORY.name) {
        additions.tools = gvisor::programs(session).await?;
    }
    if selection.contains_name(stories::snapshots::STORY.name) {
        additions.images = snapshotter::images(session).await?.into();
    }
    Ok(additions)
}

/// Runs on an existing cluster, and removes everything that the run created.
async fn against_any_cluster(
    session: &Session,
    manifests: Manifests,
    kubeconfig: &Path,
    selection: Selection<'_>,
    reports: &Path,
) -> Result<Report> {
    state_dump::clear(reports)?;
    let config =
        Kubeconfig::read_from(kubeconfig).with_context(|| format!("read {}", kubeconfig.display()))?;
    let client = client::connect(config).await?;
    let mut env = TestEnv::new(manifests, client, None, NAMESPACE)?;
    env.reports = Some(reports.to_owned());
    let installed = stories::install::is_installed(&env).await?;
    let mut report = Report::new();
    let nodes = NodeOptions::default();
    let plan = Plan { nodes: &nodes, selection, sabotage: None, failures: Some(reports) };
    StoryRunner::begin(session, &mut report, &env, plan).await.run_all().await;
    state_dump::write(&env, reports).await;
    let started = Instant::now();
    // The removal also runs if a story failed or was stopped.
    let cleaned = async {
        stories::removal::delete_namespace(&env).await?;
        if installed { Ok(()) } else { stories::install::remove(&env).await }
    };
    let cleaned = cleaned.await;
    report.record("clean-up", "remove what the run made", started.elapsed(), &cleaned);
    Ok(report)
}

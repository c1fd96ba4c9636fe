//! The part second-driver of the lane extended: local-path-provisioner on a cluster of the harness. It shows that the crates of the harness know no
//! driver, and that the checks find what a driver lacks.
//!
//! The checks of the capacity must fail, because local-path enforces no size. If one passes, the part fails.

mod flow;
mod parts;

use anyhow::Result;
use testvm::cache;
use testvm::report::Report;
use testvm::session::Session;
use testvm::steps::Steps;
use testvm_cluster::manifests::Manifests;
use testvm_cluster::{Cluster, ClusterProfile, ClusterSpec, Durability, KubernetesSource};

use self::parts::LANE;

/// Runs the flow on a cluster of its own.
pub(super) async fn run(session: &Session, kubernetes: &KubernetesSource) -> Result<Report> {
    let manifests = Manifests::read(&parts::manifests(session))?;
    let cluster = session.until_cancelled(start(session, kubernetes)).await?;
    let mut report = Report::new();
    let tested = flow::run(&mut Steps::begin(session, &mut report, LANE), &cluster, &manifests).await;
    if tested.is_err() || !report.succeeded() {
        // A log that cannot be written must not hide the failure.
        let written =
            flow::write_logs(&cluster, &session.workspace.reports(LANE).join("provisioner.log")).await;
        if let Err(error) = written {
            session.progress.line(format!("{error:#}"));
        }
    }
    // Also after a failure the cluster is stopped in order, so that the logs are complete.
    report.run(LANE, "stop the node and the control plane", cluster.stop()).await;
    Ok(report)
}

async fn start(session: &Session, kubernetes: &KubernetesSource) -> Result<Cluster> {
    let parts = parts::build(session, kubernetes).await?;
    let reports = session.workspace.reports(LANE);
    // The logs of an earlier run must not be read as those of this run.
    cache::remove_dir(&reports)?;
    let spec = ClusterSpec {
        dir: session.workspace.target().join("second-driver-cluster"),
        logs: reports.join("logs"),
        durability: Durability::Unsafe,
        profile: ClusterProfile::Default,
    };
    Cluster::start(session, spec, parts).await
}

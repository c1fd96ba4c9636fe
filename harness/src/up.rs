//! `cargo harness up` and `down`: a cluster with the driver installed, for interactive use.

use anyhow::Result;
use testvm::session::Session;
use testvm_cluster::background::{self, Owner};
use testvm_cluster::{Cluster, ClusterProfile, ClusterSpec, Durability, walkthrough};

use crate::e2e;
use crate::node_options::{KubernetesOptions, NodeOptions};
use crate::nodes::{self, Additions};
use crate::test_env::node_debug;

#[derive(Clone, Debug, clap::Args)]
pub struct UpArgs {
    #[command(flatten)]
    kubernetes: KubernetesOptions,

    #[command(flatten)]
    nodes: NodeOptions,
}

/// Starts a cluster with the driver installed and leaves it running.
///
/// # Errors
/// A program cannot be built or started. In that case, nothing is left running.
pub async fn up(session: &Session, args: UpArgs) -> Result<()> {
    if background::is_background(session) {
        return Box::pin(serve(session, args)).await;
    }
    if let Some(owner) = Owner::running(session)? {
        session.progress.finish();
        let usage = walkthrough(session.project, &owner.kubeconfig, &owner.kubectl);
        println!("a cluster is up already\n{usage}");
        return Ok(());
    }
    args.nodes.check()?;
    let text: String = background::run_again(session, std::env::args_os().skip(1).collect()).await?;
    session.progress.finish();
    println!("{text}");
    Ok(())
}

/// Stops the cluster that was left running.
///
/// # Errors
/// The cluster cannot be stopped.
pub async fn down(session: &Session) -> Result<()> {
    let Some(owner) = Owner::running(session)? else {
        // A cluster that is not up yet has no record, and its directory is locked.
        drop(background::claim(session)?);
        println!("no cluster is up");
        return Ok(());
    };
    let step = session.progress.step("stop the cluster");
    owner.stop(session).await?;
    step.done("");
    Ok(())
}

/// Serves the cluster in the background process.
async fn serve(session: &Session, args: UpArgs) -> Result<()> {
    let _lock = background::claim(session)?;
    let dir = background::directory(&session.workspace);
    let logs = dir.join("logs");
    let spec = ClusterSpec { dir, logs, durability: Durability::Sync, profile: ClusterProfile::Default };
    let started = async {
        let kubernetes = args.kubernetes.minor();
        let additions = Additions::default();
        let parts = nodes::parts(session, kubernetes, &args.nodes, spec.profile, additions).await?;
        let cluster = Cluster::start(session, spec, parts).await?;
        node_debug::grant(session, cluster.client()).await?;
        let step = session.progress.step("install the driver");
        e2e::install_driver(session, &cluster).await?;
        step.done("");
        anyhow::Ok(cluster)
    };
    let cluster = session.until_cancelled(started).await?;
    let text = cluster.walkthrough();
    background::hand_over(&session.workspace, Some(&cluster), &text)?;
    cluster.serve_until_cancelled(session).await
}

//! `cargo harness fetch`: fills the cache with what the lanes of CI download, or build once from downloads.

use anyhow::Result;
use testvm::images::kernel::Kernel;
use testvm::images::kind::Description;
use testvm::packages;
use testvm::session::Session;
use testvm_cluster::conformance::Suite;
use testvm_cluster::{ClusterProfile, KubernetesMinor, gvisor};

use crate::helm::Helm;
use crate::{lanes, nodes};

/// Downloads and builds what is missing in the cache, and prints the versions of everything in it that the lanes of CI use.
#[derive(Debug, clap::Args)]
pub struct FetchArgs {
    /// Look up the newest versions of Debian's packages, and move to them. Without this option, a machine stays with the
    /// versions that it fetched first.
    #[arg(long)]
    update: bool,
}

/// Fills the cache.
///
/// # Errors
/// A package or module cannot be fetched, or a program cannot be built.
pub async fn fetch(session: &Session, args: &FetchArgs) -> Result<()> {
    if args.update {
        session.versions.look_for_newest();
    }
    packages::ensure(session, packages::VIRTUAL_MACHINE).await?;
    for name in Kernel::names(&session.workspace)? {
        Kernel::prepare(session, Some(&name)).await?;
    }
    let kernel = Kernel::prepare(session, None).await?;
    Description::read(session)?.machine_root(session, &kernel).await?;
    lanes::fetch(session).await?;
    Helm::build(session).await?;
    gvisor::programs(session).await?;
    let kubernetes = KubernetesMinor::default();
    let suite = Suite::build(session, kubernetes).await?;
    // The nodes of this lane have all images of the others, and more.
    nodes::conformance_parts(session, kubernetes, &suite, ClusterProfile::Default).await.map(drop)
}

//! `bench node`: the tools and the kubelet of a node, of the distribution and of this project.

mod pods;
mod stats;
mod variant;

use anyhow::Result;
use testvm::session::Session;

use super::args::{Args, Part};
use super::measurement::Environment;
use super::programs;
use super::threshold::Requirement;

pub(super) async fn run(session: &Session, args: &Args) -> Result<Vec<Environment>> {
    anyhow::ensure!(
        args.kernel.is_none() || args.part == Some(Part::Losetup),
        "--kernel with the parts pods and stats: the nodes of a cluster have one kernel; add --part losetup"
    );
    let mut parts = Vec::new();
    if args.runs(Part::Losetup) {
        parts.extend(programs::losetup(session, args).await?);
    }
    if args.runs(Part::Pods) {
        parts.extend(session.until_cancelled(pods::run(session, args)).await?);
    }
    if args.runs(Part::Stats) {
        parts.extend(session.until_cancelled(stats::run(session, args)).await?);
    }
    Ok(parts)
}

pub(super) fn requirements(args: &Args) -> Vec<Requirement> {
    let parts = [
        (Part::Losetup, programs::losetup_requirements()),
        (Part::Pods, pods::requirements()),
        (Part::Stats, stats::requirements()),
    ];
    parts.into_iter().filter(|(part, _)| args.runs(*part)).flat_map(|(_, of_part)| of_part).collect()
}

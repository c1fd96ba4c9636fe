//! The parts of `bench node`.

use anyhow::Result;
use testvm::session::Session;

use super::super::outcome::{Args, Outcome, Part};
use super::{losetup, pods, stats};

pub(in crate::bench) async fn run(session: &Session, args: &Args) -> Result<Outcome> {
    let runs = |part| args.runs(part);
    anyhow::ensure!(
        args.kernel.is_none() || args.part == Some(Part::Losetup),
        "--kernel with the parts pods and stats: the nodes of a cluster have one kernel; add --part losetup"
    );
    let (scale, stats_scale) = (pods::Scale::of(args), stats::Scale::of(args));
    let mut parts = Vec::new();
    if runs(Part::Losetup) {
        parts.push(losetup::run(session, args).await?);
    }
    if runs(Part::Pods) {
        parts.extend(pods::run(session, args, scale).await?);
    }
    if runs(Part::Stats) {
        parts.extend(stats::run(session, args, stats_scale).await?);
    }
    let thresholds = |all: &_| {
        let of_losetup = runs(Part::Losetup).then(|| losetup::thresholds(all));
        let of_pods = runs(Part::Pods).then(|| pods::thresholds(all, scale));
        let of_stats = runs(Part::Stats).then(|| stats::thresholds(all, stats_scale));
        of_losetup.into_iter().chain(of_pods).chain(of_stats).flatten().collect()
    };
    Ok(Outcome::new(parts, thresholds, &[losetup::PLOT]))
}

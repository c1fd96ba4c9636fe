//! The measurements of `bench provision` and their thresholds.

use std::time::Duration;

use anyhow::Result;
use kube::Client;
use testvm::progress::Step;
use testvm::session::Session;
use testvm_cluster::{Cluster, Node};

use super::super::audit_log::AuditLog;
use super::super::batch::Batch;
use super::super::cluster::{CLASS, SharedCluster};
use super::super::measurement::{Environment, Measurements, Row};
use super::super::memory;
use super::super::outcome::{Args, Outcome};
use super::super::threshold::{self, Threshold};
use super::contender::{Contender, DRIVER_USER};
use super::peer::{self, Limits, Peer};

/// The programs of the driver's pod.
const PROGRAMS: [&str; 2] = ["/loopfs-provisioner node", "/loopfs-csi"];

/// The timeout for one claim and the start of a provisioner.
const WARM_UP_TIMEOUT: Duration = Duration::from_secs(120);
/// The timeout for all claims with a provisioner that is limited to five requests a second.
const BIND_TIMEOUT: Duration = Duration::from_secs(900);

/// The size of a run.
#[derive(Clone, Copy, Debug)]
struct Scale {
    claims: u64,
    rounds: u64,
}

const OURS: Contender<'static> = Contender { class: CLASS, user: DRIVER_USER, programs: &PROGRAMS };

/// The measurements of a batch of claims.
#[derive(Clone, Copy, Debug)]
struct Sample {
    claims_per_second: f64,
    writes_per_claim: f64,
    peak_bytes: f64,
}

/// The samples of each contender, round by round.
#[derive(Debug, Default)]
struct Samples {
    ours: Vec<Sample>,
    peer: Vec<Sample>,
    /// The samples of the peer without its own rate limits.
    unthrottled: Vec<Sample>,
}

pub(in crate::bench) async fn run(
    session: &Session,
    args: &Args,
    shared: &mut SharedCluster,
) -> Result<Outcome> {
    let scale = if args.quick { Scale { claims: 50, rounds: 2 } } else { Scale { claims: 500, rounds: 1 } };
    let part = session.until_cancelled(prepare_and_run(session, args, shared, scale)).await?;
    Ok(Outcome::new(vec![part], |all| thresholds(all, scale.claims), &[]))
}

async fn prepare_and_run(
    session: &Session,
    args: &Args,
    shared: &mut SharedCluster,
    scale: Scale,
) -> Result<Environment> {
    let tools = peer::tools(session).await?;
    let measure = async |cluster: &Cluster, node: &Node| measure(session, cluster, node, scale).await;
    let mut part = Box::pin(shared.measured(session, args, "provision", &tools, measure)).await?;
    part.place = format!("{}; peer: {}", part.place, peer::description());
    Ok(part)
}

async fn measure(session: &Session, cluster: &Cluster, node: &Node, scale: Scale) -> Result<Vec<Row>> {
    let step = session.progress.step("install the peer");
    let peer = Peer::install(cluster, node).await?;
    step.done("");

    let step = session
        .progress
        .step(format!("measure {} concurrent claims, with each contender in turn", scale.claims));
    let bench = Bench {
        client: cluster.client(),
        node,
        log: AuditLog::of(cluster.control_plane().layout()),
        claims: scale.claims,
    };
    let samples = take_turns(&bench, &peer, scale.rounds, &step).await;
    // The logs are saved also if the measurement failed.
    peer.save_logs(cluster.control_plane().layout().logs()).await?;
    let rows = samples?.rows(scale.claims);
    peer.remove().await?;
    step.done("");
    Ok(rows)
}

/// Measures the contenders in turns, so that other load on the machine affects both alike.
async fn take_turns(bench: &Bench<'_>, peer: &Peer<'_>, rounds: u64, step: &Step) -> Result<Samples> {
    let mut samples = Samples::default();
    for round in 1..=rounds {
        step.note(format!("round {round} of {rounds}: ours"));
        samples.ours.push(bench.round(OURS, &format!("ours-{round}")).await?);

        step.note(format!("round {round} of {rounds}: the peer"));
        let contender = peer.contender();
        let sidecars = peer.start(Limits::Default).await?;
        let warm_up = bench.warm_up(contender, &format!("peer-{round}-first")).await?;
        let (sample, throttled) = bench.sample(contender, &format!("peer-{round}")).await?;
        samples.peer.push(sample);
        sidecars.stop().await?;

        step.note(format!("round {round} of {rounds}: the peer without limits"));
        let sidecars = peer.start(Limits::Lifted).await?;
        // With its rate limits, the peer would take the longest part of the run.
        warm_up.delete().await?;
        throttled.delete().await?;
        samples.unthrottled.push(bench.round(contender, &format!("unthrottled-{round}")).await?);
        sidecars.stop().await?;
    }
    Ok(samples)
}

/// The parameters of every batch.
struct Bench<'a> {
    client: &'a Client,
    node: &'a Node,
    log: AuditLog,
    claims: u64,
}

impl Bench<'_> {
    /// Provisions a batch and removes it.
    async fn round(&self, contender: Contender<'_>, name: &str) -> Result<Sample> {
        let warm_up = self.warm_up(contender, &format!("{name}-first")).await?;
        let (sample, batch) = self.sample(contender, name).await?;
        batch.delete().await?;
        warm_up.delete().await?;
        Ok(sample)
    }

    /// Provisions one claim. After it is bound, the provisioner has started and filled its caches.
    async fn warm_up(&self, contender: Contender<'_>, name: &str) -> Result<Batch> {
        let batch = self.batch(contender, name, 1);
        batch.create_and_bind(WARM_UP_TIMEOUT).await?;
        Ok(batch)
    }

    async fn sample(&self, contender: Contender<'_>, name: &str) -> Result<(Sample, Batch)> {
        let batch = self.batch(contender, name, self.claims);
        let before = self.log.end()?;
        let time = batch.create_and_bind(BIND_TIMEOUT).await?;
        let writes = self.log.requests(before, contender.user)?.writes;
        let peak = memory::peak(self.node, contender.programs).await?;
        let claims = self.claims as f64;
        let sample = Sample {
            claims_per_second: claims / time.as_secs_f64(),
            writes_per_claim: writes as f64 / claims,
            peak_bytes: peak as f64,
        };
        Ok((sample, batch))
    }

    fn batch(&self, contender: Contender<'_>, name: &str, claim_count: u64) -> Batch {
        Batch {
            client: self.client.clone(),
            name: name.to_owned(),
            class: contender.class.to_owned(),
            node: self.node.name().to_owned(),
            claim_count,
        }
    }
}

impl Samples {
    fn rows(&self, claims: u64) -> Vec<Row> {
        let contenders = [("", &self.ours), ("peer_", &self.peer), ("unthrottled_peer_", &self.unthrottled)];
        let mut rows = Vec::new();
        for (prefix, samples) in contenders {
            let mut row = |name: &str, unit: &str, figure: fn(&Sample) -> f64| {
                let values = samples.iter().map(figure);
                rows.extend(Row::of(&format!("{prefix}{name}"), claims, unit, values));
            };
            row("claims_per_second", "claims/s", |sample| sample.claims_per_second);
            row("rss_bytes", "B", |sample| sample.peak_bytes);
            row("api_writes_per_claim", "writes", |sample| sample.writes_per_claim);
        }
        rows
    }
}

fn thresholds(all: &Measurements, n: u64) -> Vec<Threshold> {
    let (rate, memory) = (("claims_per_second", n), ("rss_bytes", n));
    let text = format!(
        "{n} concurrent claims: 3 times the claims per second of external-provisioner with its default limits"
    );
    let rate = threshold::at_least(all, &text, rate, 3.0, ("peer_claims_per_second", n));
    let text = "memory of provisioner and driver: sidecars and driver take at least 3 times as much";
    let memory = threshold::at_least(all, text, ("peer_rss_bytes", n), 3.0, memory);
    let text = "API writes for a claim besides events: at most 3";
    vec![rate, memory, threshold::no_more(all, text, ("api_writes_per_claim", n), 3.0)]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(claims_per_second: f64, peak_bytes: f64, writes_per_claim: f64) -> Sample {
        Sample { claims_per_second, writes_per_claim, peak_bytes }
    }

    fn claims_of(ours: Sample, peer: Sample) -> Vec<Option<bool>> {
        let samples = Samples { ours: vec![ours], peer: vec![peer], unthrottled: Vec::new() };
        let all = Measurements::of(samples.rows(50));
        thresholds(&all, 50).into_iter().map(|threshold| threshold.is_met).collect()
    }

    #[test]
    fn thresholds_are_met_up_to_their_bounds() {
        let peer = sample(5.0, 90.0, 1.0);
        assert_eq!(claims_of(sample(15.0, 30.0, 3.0), peer), [Some(true); 3]);
        assert_eq!(claims_of(sample(14.9, 30.1, 3.1), peer), [Some(false); 3]);
    }
}

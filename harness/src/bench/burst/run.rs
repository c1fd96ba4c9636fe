//! The measurements of `bench burst` and their threshold.

use std::path::Path;
use std::time::Duration;

use anyhow::Result;
use kube::Client;
use testvm::progress::Step;
use testvm::session::Session;
use testvm_cluster::ControlPlane;

use super::super::audit_log::AuditLog;
use super::super::batch::Batch;
use super::super::cluster::CLASS;
use super::super::in_memory::{self, Installation, NODE};
use super::super::measurement::{Environment, Measurements, Row, milliseconds};
use super::super::outcome::{Args, Outcome};
use super::super::processor_time;
use super::super::provision::contender::DRIVER_USER;
use super::super::provision::peer as sidecars;
use super::super::threshold::{self, Threshold};
use super::peer::{Peer, Programs};

/// The timeout for one claim and the start of a contender.
const WARM_UP_TIMEOUT: Duration = Duration::from_secs(120);
/// The timeout for all claims, on a busy machine.
const BIND_TIMEOUT: Duration = Duration::from_secs(300);

/// The size of a run.
#[derive(Clone, Copy, Debug)]
struct Scale {
    claims: u64,
    rounds: u64,
}

const FULL: Scale = Scale { claims: 500, rounds: 5 };
const QUICK: Scale = Scale { claims: 50, rounds: 3 };

/// A running contender.
#[derive(Clone, Copy, Debug)]
struct Contender<'a> {
    class: &'a str,
    /// Its user name at the API server.
    user: &'a str,
    /// The id of the process that provisions.
    process: i32,
}

/// The measurements of a batch of claims.
#[derive(Clone, Copy, Debug)]
struct Sample {
    /// Claims per second until all claims exist. No contender can be faster.
    created_per_second: f64,
    /// Claims per second until all PersistentVolumes exist.
    claims_per_second: f64,
    /// Claims per second until all claims are bound.
    bound_per_second: f64,
    /// The requests of the contender until all claims are bound.
    writes_per_claim: f64,
    events_per_claim: f64,
    reads_per_claim: f64,
    /// Milliseconds of processor time until all claims are bound.
    cpu_per_claim: f64,
    /// Milliseconds of processor time of the API server, with those for the requests of kube-controller-manager and of the bench.
    api_server_cpu_per_claim: f64,
}

/// The samples of each contender, round by round.
#[derive(Debug, Default)]
struct Samples {
    ours: Vec<Sample>,
    peer: Vec<Sample>,
}

pub(in crate::bench) async fn run(session: &Session, args: &Args) -> Result<Outcome> {
    let scale = if args.quick { QUICK } else { FULL };
    let part = session.until_cancelled(prepare_and_run(session, scale)).await?;
    Ok(Outcome::new(vec![part], |all| thresholds(all, scale.claims), &[]))
}

async fn prepare_and_run(session: &Session, scale: Scale) -> Result<Environment> {
    let programs = Programs::build(session).await?;
    let measure = async |installation: Installation<'_>, control_plane: &ControlPlane| {
        measure(session, &programs, installation, control_plane, scale).await
    };
    let mut part = Box::pin(in_memory::beside_control_plane(session, "burst", measure)).await?;
    part.place = format!("{}; peer: {} without rate limits", part.place, sidecars::provisioner());
    Ok(part)
}

async fn measure(
    session: &Session,
    programs: &Programs,
    installation: Installation<'_>,
    control_plane: &ControlPlane,
    scale: Scale,
) -> Result<Vec<Row>> {
    let layout = control_plane.layout();
    let logs: &Path = layout.logs();
    let peer = programs.install(control_plane, logs, scale.claims).await?;
    let step = session
        .progress
        .step(format!("measure {} concurrent claims, with each contender in turn", scale.claims));
    let bench = Bench { client: control_plane.client(), log: AuditLog::of(layout), claims: scale.claims };
    let samples = take_turns(&bench, &installation, &peer, scale.rounds, &step).await?;
    step.done("");
    Ok(samples.rows(scale.claims))
}

/// Measures the contenders in turns, so that other load on the machine affects both alike. Only one of them runs at a time.
async fn take_turns(
    bench: &Bench<'_>,
    installation: &Installation<'_>,
    peer: &Peer<'_>,
    rounds: u64,
    step: &Step,
) -> Result<Samples> {
    let mut samples = Samples::default();
    // Round 0 fills the caches of the control plane. It is not measured, because the contender that begins would be slower.
    for round in 0..=rounds {
        step.note(format!("round {round} of {rounds}: ours"));
        let mut ours = installation.start()?;
        let contender = Contender { class: CLASS, user: DRIVER_USER, process: ours.id() };
        let of_ours = ours.during(Box::pin(bench.round(contender, &format!("ours-{round}")))).await?;
        ours.stop().await?;

        step.note(format!("round {round} of {rounds}: the peer"));
        let mut peer = peer.start()?;
        let contender = Contender { class: sidecars::CLASS, user: sidecars::USER, process: peer.id() };
        let of_peer = peer.during(Box::pin(bench.round(contender, &format!("peer-{round}")))).await?;
        peer.stop().await?;
        if round > 0 {
            samples.ours.push(of_ours);
            samples.peer.push(of_peer);
        }
    }
    Ok(samples)
}

/// The parameters of every batch.
struct Bench<'a> {
    client: &'a Client,
    log: AuditLog,
    claims: u64,
}

impl Bench<'_> {
    /// Provisions a batch and removes it.
    async fn round(&self, contender: Contender<'_>, name: &str) -> Result<Sample> {
        // After one claim is bound, the contender has started and filled its caches.
        let warm_up = self.batch(contender, &format!("{name}-first"), 1);
        warm_up.create_and_bind(WARM_UP_TIMEOUT).await?;
        let batch = self.batch(contender, name, self.claims);
        let sample = self.sample(contender, &batch).await?;
        batch.delete().await?;
        warm_up.delete().await?;
        Ok(sample)
    }

    async fn api_server_cpu(&self) -> Result<Duration> {
        processor_time::of_api_server(&processor_time::api_server_metrics(self.client).await?)
    }

    async fn sample(&self, contender: Contender<'_>, batch: &Batch) -> Result<Sample> {
        let log_end = self.log.end()?;
        let cpu = processor_time::of_process(contender.process)?;
        let api_server_cpu = self.api_server_cpu().await?;
        let times = batch.create_and_provision(BIND_TIMEOUT).await?;
        let cpu = processor_time::of_process(contender.process)?.saturating_sub(cpu);
        let api_server_cpu = self.api_server_cpu().await?.saturating_sub(api_server_cpu);
        let requests = self.log.requests(log_end, contender.user)?;
        let claims = self.claims as f64;
        Ok(Sample {
            created_per_second: claims / times.created.as_secs_f64(),
            claims_per_second: claims / times.provisioned.as_secs_f64(),
            bound_per_second: claims / times.bound.as_secs_f64(),
            writes_per_claim: requests.writes as f64 / claims,
            events_per_claim: requests.event_writes as f64 / claims,
            reads_per_claim: requests.reads as f64 / claims,
            cpu_per_claim: milliseconds(cpu) / claims,
            api_server_cpu_per_claim: milliseconds(api_server_cpu) / claims,
        })
    }

    fn batch(&self, contender: Contender<'_>, name: &str, claim_count: u64) -> Batch {
        Batch {
            client: self.client.clone(),
            name: name.to_owned(),
            class: contender.class.to_owned(),
            node: NODE.to_owned(),
            claim_count,
        }
    }
}

impl Samples {
    fn rows(&self, claims: u64) -> Vec<Row> {
        let mut rows = Vec::new();
        for (prefix, samples) in [("", &self.ours), ("peer_", &self.peer)] {
            let mut row = |name: &str, unit: &str, value: fn(&Sample) -> f64| {
                rows.extend(Row::of(&format!("{prefix}{name}"), claims, unit, samples.iter().map(value)));
            };
            row("claims_per_second", "claims/s", |sample| sample.claims_per_second);
            row("bound_claims_per_second", "claims/s", |sample| sample.bound_per_second);
            row("created_claims_per_second", "claims/s", |sample| sample.created_per_second);
            row("api_writes_per_claim", "writes", |sample| sample.writes_per_claim);
            row("api_event_writes_per_claim", "writes", |sample| sample.events_per_claim);
            row("api_reads_per_claim", "reads", |sample| sample.reads_per_claim);
            row("cpu_per_claim", "ms", |sample| sample.cpu_per_claim);
            row("api_server_cpu_per_claim", "ms", |sample| sample.api_server_cpu_per_claim);
        }
        rows
    }
}

fn thresholds(all: &Measurements, n: u64) -> Vec<Threshold> {
    let text = format!(
        "{n} concurrent claims until all PersistentVolumes exist: 3 times the claims per second of external-provisioner without rate limits"
    );
    vec![threshold::at_least(all, &text, ("claims_per_second", n), 3.0, ("peer_claims_per_second", n))]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(claims_per_second: f64) -> Sample {
        Sample {
            created_per_second: 0.0,
            claims_per_second,
            bound_per_second: 0.0,
            writes_per_claim: 0.0,
            events_per_claim: 0.0,
            reads_per_claim: 0.0,
            cpu_per_claim: 0.0,
            api_server_cpu_per_claim: 0.0,
        }
    }

    fn is_met(ours: f64, peer: f64) -> Option<bool> {
        let samples = Samples { ours: vec![sample(ours)], peer: vec![sample(peer)] };
        thresholds(&Measurements::of(samples.rows(50)), 50)[0].is_met
    }

    #[test]
    fn the_threshold_is_met_up_to_its_bound() {
        assert_eq!(is_met(15.0, 5.0), Some(true));
        assert_eq!(is_met(14.9, 5.0), Some(false));
    }
}

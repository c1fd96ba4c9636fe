//! The measurements of `bench scale` and their thresholds.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Result;
use testvm::session::Session;
use testvm_cluster::{ClusterProfile, ControlPlane, KubernetesSource};

use super::super::cluster::NAMESPACE;
use super::super::in_memory;
use super::super::measurement::{Environment, Measurements, Row};
use super::super::outcome::{Args, Outcome};
use super::super::threshold::{self, Threshold};
use super::claims::Claims;
use super::fleet::{self, FleetScale};
use super::labels;
use super::measured_process::{Installation, MeasuredProcess};
use super::placement;
use super::provisioner::{self, Contender};
use crate::builds;
use crate::fake_nodes::{self, NODES};
use crate::test_env::manifests;
use crate::test_env::workload::create_namespace;

const START: &str = "start_bytes";
const RSS: &str = "rss_bytes";
const IDLE: &str = "idle_requests_per_minute";
const FOREIGN_CLAIM: &str = "foreign_claim_bytes";

/// The node whose provisioner is measured.
const NODE: &str = NODES[0];
/// The node that has the claims.
const OTHER_NODE: &str = NODES[1];

/// The time for which requests are counted while nothing happens.
const IDLE_TIME: Duration = Duration::from_secs(60);
/// The largest growth of a value from no claims of the other node to the largest number of them.
const MAX_GROWTH: f64 = 1.1;
/// The largest number of bytes for the life of one claim of the other node. Each event of a claim that a process watches takes more
/// than a thousand. Fewer or more bookmarks may arrive than while nothing happens.
const MAX_FOREIGN_CLAIM_BYTES: f64 = 100.0;

/// The size of a run.
#[derive(Clone, Copy, Debug)]
struct Scale {
    /// The numbers of claims of the other node before the largest one, in ascending order from 0.
    fewer_claims: &'static [u64],
    most_claims: u64,
    /// The number of claims that are created and deleted while the provisioner runs.
    lives: u64,
    /// The number of times that each provisioner is started beside each number of claims.
    rounds: u64,
}

const FULL: Scale = Scale { fewer_claims: &[0, 1000, 10_000], most_claims: 100_000, lives: 100, rounds: 3 };
const QUICK: Scale = Scale { fewer_claims: &[0, 200], most_claims: 1000, lives: 20, rounds: 1 };

/// The measurements of one process.
#[derive(Clone, Copy, Debug)]
struct Sample {
    start_bytes: f64,
    rss_bytes: f64,
    idle_requests_per_minute: f64,
    foreign_claim_bytes: f64,
}

pub(in crate::bench) async fn run(session: &Session, args: &Args) -> Result<Outcome> {
    let scale = if args.quick { QUICK } else { FULL };
    let fleets = FleetScale::of(args.quick);
    let logs = session.workspace.reports("bench").join("scale");
    let parts = async {
        let one_node = Box::pin(prepare_and_run(session, scale, logs.join("one-node"))).await?;
        let placement = Box::pin(placement::run(session, args.quick)).await?;
        let fleets = Box::pin(fleet::run(session, fleets, &logs)).await?;
        Ok(vec![one_node, placement, fleets])
    };
    let parts = session.until_cancelled(parts).await?;
    let all_thresholds = |all: &Measurements| {
        let mut thresholds = thresholds(all, scale);
        thresholds.extend(placement::thresholds(all, args.quick));
        thresholds.extend(fleet::thresholds(all, fleets));
        thresholds
    };
    Ok(Outcome::new(parts, all_thresholds, &[]))
}

async fn prepare_and_run(session: &Session, scale: Scale, logs: PathBuf) -> Result<Environment> {
    let program = builds::driver_programs(session).await?.provisioner;
    let kubernetes = KubernetesSource::default();
    let measure = async |control_plane: &ControlPlane, kubeconfigs: &Path| {
        let step = session.progress.step("install the component claim-labels");
        let client = control_plane.client();
        create_namespace(client, NAMESPACE).await?;
        labels::install(client, &manifests::of_claim_labels(session)?).await?;
        let claims = Claims::new(client, OTHER_NODE);
        claims.until_labelled().await?;
        let installation = Installation {
            program,
            node: NODE,
            pod: fake_nodes::pod_of_driver(client, NODE).await?,
            kubeconfig: fake_nodes::kubeconfig(kubeconfigs, NODE),
        };
        control_plane.stop_controller_manager().await?;
        step.done("");
        Box::pin(measure(session, &installation, claims, &logs, scale)).await
    };
    let profile = ClusterProfile::Benchmark;
    let rows = fake_nodes::with_driver(session, profile, &kubernetes, &logs, measure).await?;
    in_memory::environment(in_memory::WITHOUT_KUBELETS, &kubernetes, rows)
}

async fn measure(
    session: &Session,
    installation: &Installation<'_>,
    mut claims: Claims,
    logs: &Path,
    scale: Scale,
) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for count in scale.fewer_claims.iter().copied().chain([scale.most_claims]) {
        if count > 0 {
            let step =
                session.progress.step(format!("create claims of {OTHER_NODE} until there are {count}"));
            claims.create_up_to(count, &step).await?;
            step.done("");
        }
        let step = session.progress.step(format!("measure the provisioner of {NODE} beside {count} claims"));
        let mut samples = Contender::BOTH.map(|contender| (contender, Vec::new()));
        for round in 1..=scale.rounds {
            // In turns, so that other load on the machine affects both alike.
            for (contender, samples) in &mut samples {
                let name = contender.name();
                step.note(format!("{name}, round {round} of {}", scale.rounds));
                let log = logs.join(format!("provisioner-{name}-{count}-{round}.log"));
                let provisioner = provisioner::start(installation, *contender, &log).await?;
                samples.push(sample(&provisioner, &mut claims, scale.lives).await?);
                provisioner.stop().await?;
            }
        }
        step.done("");
        rows.extend(samples.iter().flat_map(|(contender, samples)| rows_of(*contender, count, samples)));
    }
    Ok(rows)
}

/// Measures a provisioner that has just started.
async fn sample(provisioner: &MeasuredProcess, claims: &mut Claims, lives: u64) -> Result<Sample> {
    let start_bytes = provisioner.received() as f64;
    let rss_bytes = provisioner.rss()? as f64;

    let idle = provisioner.observe_idle(IDLE_TIME).await?;

    let (before, since) = (provisioner.received(), Instant::now());
    for _ in 0..lives {
        claims.live().await?;
    }
    let received = provisioner.until_idle().await? - before;
    Ok(Sample {
        start_bytes,
        rss_bytes,
        idle_requests_per_minute: idle.requests_per_minute,
        foreign_claim_bytes: idle.without(received, since.elapsed()) / lives as f64,
    })
}

fn rows_of(contender: Contender, claims: u64, samples: &[Sample]) -> Vec<Row> {
    let mut rows = Vec::new();
    let mut row = |name: &str, unit: &str, value: fn(&Sample) -> f64| {
        let name = row_name(contender, name);
        rows.extend(Row::of(&name, claims, unit, samples.iter().map(value)));
    };
    row(START, "B", |sample| sample.start_bytes);
    row(RSS, "B", |sample| sample.rss_bytes);
    row(IDLE, "requests/min", |sample| sample.idle_requests_per_minute);
    row(FOREIGN_CLAIM, "B", |sample| sample.foreign_claim_bytes);
    rows
}

fn row_name(contender: Contender, name: &str) -> String {
    format!("{}_{name}", contender.name())
}

fn thresholds(all: &Measurements, scale: Scale) -> Vec<Threshold> {
    let most = scale.most_claims;
    let independent = |name: &str, what: &str| {
        let text = format!(
            "{what} with claim labels, beside {most} claims of another node: at most {MAX_GROWTH} times those without such claims"
        );
        let name = row_name(Contender::Labels, name);
        threshold::at_most(all, &text, (&name, most), MAX_GROWTH, (&name, 0))
    };
    let text = format!(
        "bytes that a node with claim labels receives for the life of a claim of another node: at most {MAX_FOREIGN_CLAIM_BYTES}"
    );
    let foreign_claim = row_name(Contender::Labels, FOREIGN_CLAIM);
    vec![
        independent(START, "bytes that a node receives at its start"),
        independent(RSS, "bytes of a provisioner's memory"),
        independent(IDLE, "requests of an idle provisioner"),
        threshold::no_more(all, &text, (&foreign_claim, most), MAX_FOREIGN_CLAIM_BYTES),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(bytes: f64, requests: f64, foreign: f64) -> Sample {
        Sample {
            start_bytes: bytes,
            rss_bytes: bytes,
            idle_requests_per_minute: requests,
            foreign_claim_bytes: foreign,
        }
    }

    fn verdicts(most: Sample) -> Vec<Option<bool>> {
        let rows = [(0, sample(100.0, 0.0, 0.0)), (1000, most)];
        let rows = rows.map(|(count, sample)| rows_of(Contender::Labels, count, &[sample]));
        let all = Measurements::of(rows.concat());
        thresholds(&all, QUICK).into_iter().map(|threshold| threshold.is_met).collect()
    }

    #[test]
    fn thresholds_are_met_up_to_their_bounds() {
        assert_eq!(verdicts(sample(110.0, 0.0, 100.0)), [Some(true); 4]);
        assert_eq!(verdicts(sample(110.1, 1.0, 100.1)), [Some(false); 4]);
    }

    #[test]
    fn each_contender_has_rows_of_its_own() {
        let names = Contender::BOTH.map(|contender| {
            let rows = rows_of(contender, 0, &[sample(1.0, 2.0, 3.0); 2]);
            rows.into_iter().map(|row| row.name).collect::<Vec<_>>()
        });
        assert_eq!(
            names[0],
            [
                "labels_start_bytes",
                "labels_rss_bytes",
                "labels_idle_requests_per_minute",
                "labels_foreign_claim_bytes"
            ]
        );
        assert!(names[1].iter().all(|name| name.starts_with("all_")) && names[1].len() == 4);
    }
}

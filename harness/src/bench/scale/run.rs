//! The measurements of `bench scale` and their thresholds.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Result;
use testvm::progress::Step;
use testvm::session::Session;
use testvm_cluster::{ClusterProfile, ControlPlane, KubernetesSource};

use super::super::cluster::NAMESPACE;
use super::super::in_memory;
use super::super::measurement::{Environment, Measurements, Row};
use super::super::outcome::{Args, Outcome, Part};
use super::super::plot::Plot;
use super::super::provision::peer::sidecars;
use super::super::threshold::{self, Threshold};
use super::claims::Claims;
use super::fleet::{self, FleetScale};
use super::idle::{Idle, Observed};
use super::labels;
use super::measured_process::Installation;
use super::peer::{Peer, Programs, Sidecar};
use super::placement;
use super::provisioner::{self, Contender};
use crate::builds::{self, ProgramProfile};
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
const QUICK: Scale = Scale { fewer_claims: &[0], most_claims: 1000, lives: 20, rounds: 1 };

/// The beginning of the names of the rows with the sum of the peer's programs.
const PEER: &str = "peer";

const PLOTS: [Plot; 2] = [
    Plot::new(
        "Received at the start",
        "claims of another node",
        &["labels_start_bytes", "all_start_bytes", "peer_start_bytes"],
    ),
    Plot::new("Memory", "claims of another node", &["labels_rss_bytes", "all_rss_bytes", "peer_rss_bytes"]),
];

/// The measurements of one process, or of the processes of a node together.
#[derive(Clone, Copy, Debug, Default)]
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
    let runs = |part| args.runs(part);
    let parts = async {
        let mut parts = Vec::new();
        if runs(Part::Claims) {
            parts.push(Box::pin(prepare_and_run(session, scale, logs.join("one-node"))).await?);
        }
        if runs(Part::Placement) {
            parts.push(Box::pin(placement::run(session, args.quick)).await?);
        }
        if runs(Part::Fleet) {
            parts.push(Box::pin(fleet::run(session, fleets, &logs)).await?);
        }
        Ok(parts)
    };
    let parts = session.until_cancelled(parts).await?;
    let all_thresholds = |all: &Measurements| {
        let of_claims = runs(Part::Claims).then(|| thresholds(all, scale));
        let of_placement = runs(Part::Placement).then(|| placement::thresholds(all, args.quick));
        let of_fleet = runs(Part::Fleet).then(|| fleet::thresholds(all, fleets));
        of_claims.into_iter().chain(of_placement).chain(of_fleet).flatten().collect()
    };
    Ok(Outcome::new(parts, all_thresholds, &PLOTS))
}

/// The samples beside one number of claims, round by round.
#[derive(Debug, Default)]
struct Samples {
    ours: [Vec<Sample>; Contender::BOTH.len()],
    /// A sample of each sidecar.
    peer: Vec<[Sample; Sidecar::ALL.len()]>,
}

/// The contenders, and the claims of the other node.
struct Bench<'a> {
    installation: Installation<'a>,
    peer: Peer<'a>,
    claims: Claims,
    logs: PathBuf,
    scale: Scale,
}

async fn prepare_and_run(session: &Session, scale: Scale, logs: PathBuf) -> Result<Environment> {
    let program = builds::driver_programs(session, ProgramProfile::Release).await?.provisioner;
    let programs = Programs::build(session).await?;
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
        let peer = programs.beside(control_plane, NODE);
        let bench = Bench { installation, peer, claims, logs: logs.clone(), scale };
        Box::pin(bench.measure(session)).await
    };
    let profile = ClusterProfile::Benchmark;
    let rows = fake_nodes::with_driver(session, profile, &kubernetes, &logs, measure).await?;
    let place = format!("{}; peer: {}", in_memory::WITHOUT_KUBELETS, sidecars());
    in_memory::environment(&place, &kubernetes, rows)
}

impl Bench<'_> {
    async fn measure(mut self, session: &Session) -> Result<Vec<Row>> {
        let mut rows = Vec::new();
        for count in self.scale.fewer_claims.iter().copied().chain([self.scale.most_claims]) {
            if count > 0 {
                let step =
                    session.progress.step(format!("create claims of {OTHER_NODE} until there are {count}"));
                self.claims.create_up_to(count, &step).await?;
                step.done("");
            }
            let title = format!("measure the provisioner of {NODE} and its peer beside {count} claims");
            let step = session.progress.step(title);
            rows.extend(self.take_turns(count, &step).await?.rows(count));
            step.done("");
        }
        Ok(rows)
    }

    /// Measures the contenders in turns, so that other load on the machine affects all alike. Only one of them runs at a time.
    async fn take_turns(&mut self, count: u64, step: &Step) -> Result<Samples> {
        let mut samples = Samples::default();
        let rounds = self.scale.rounds;
        for round in 1..=rounds {
            for (contender, samples) in Contender::BOTH.into_iter().zip(&mut samples.ours) {
                let name = contender.name();
                step.note(format!("{name}, round {round} of {rounds}"));
                let log = self.logs.join(format!("provisioner-{name}-{count}-{round}.log"));
                let provisioner = [provisioner::start(&self.installation, contender, &log).await?];
                samples.extend(self.sample(&provisioner).await?);
                let [provisioner] = provisioner;
                provisioner.stop().await?;
            }
            step.note(format!("{PEER}, round {round} of {rounds}"));
            let peer = self.peer.start(&self.logs, &format!("{count}-{round}")).await?;
            samples.peer.push(self.sample(&peer).await?);
            for sidecar in peer {
                sidecar.stop().await?;
            }
        }
        Ok(samples)
    }

    /// Measures the processes of a contender, which have just started.
    async fn sample<const N: usize>(&mut self, processes: &[impl Observed; N]) -> Result<[Sample; N]> {
        let mut samples = [Sample::default(); N];
        for (sample, observed) in samples.iter_mut().zip(processes) {
            sample.start_bytes = observed.process().received() as f64;
            sample.rss_bytes = observed.process().rss()? as f64;
        }

        let observe = processes.iter().map(|observed| Idle::observe(observed, IDLE_TIME));
        let idle = futures::future::try_join_all(observe).await?;

        let before = processes.each_ref().map(|observed| observed.process().received());
        let since = Instant::now();
        for _ in 0..self.scale.lives {
            self.claims.live().await?;
        }
        for (index, sample) in samples.iter_mut().enumerate() {
            let received = processes[index].process().until_idle().await? - before[index];
            sample.idle_requests_per_minute = idle[index].requests_per_minute;
            sample.foreign_claim_bytes =
                idle[index].without(received, since.elapsed()) / self.scale.lives as f64;
        }
        Ok(samples)
    }
}

impl Sample {
    /// Returns the measurements of two processes together.
    fn plus(self, other: Sample) -> Sample {
        Sample {
            start_bytes: self.start_bytes + other.start_bytes,
            rss_bytes: self.rss_bytes + other.rss_bytes,
            idle_requests_per_minute: self.idle_requests_per_minute + other.idle_requests_per_minute,
            foreign_claim_bytes: self.foreign_claim_bytes + other.foreign_claim_bytes,
        }
    }
}

impl Samples {
    fn rows(&self, claims: u64) -> Vec<Row> {
        let ours = Contender::BOTH.iter().zip(&self.ours);
        let mut rows: Vec<Row> =
            ours.flat_map(|(contender, samples)| rows_of(contender.name(), claims, samples)).collect();
        let together =
            self.peer.iter().map(|of_round| of_round.iter().copied().fold(Sample::default(), Sample::plus));
        rows.extend(rows_of(PEER, claims, &together.collect::<Vec<_>>()));
        for (index, sidecar) in Sidecar::ALL.iter().enumerate() {
            let samples: Vec<Sample> = self.peer.iter().map(|of_round| of_round[index]).collect();
            rows.extend(rows_of(sidecar.name(), claims, &samples));
        }
        rows
    }
}

/// Returns the rows of one contender, whose names begin with `contender`.
fn rows_of(contender: &str, claims: u64, samples: &[Sample]) -> Vec<Row> {
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

fn row_name(contender: &str, name: &str) -> String {
    format!("{contender}_{name}")
}

fn thresholds(all: &Measurements, scale: Scale) -> Vec<Threshold> {
    let most = scale.most_claims;
    let independent = |name: &str, what: &str| {
        let text = format!(
            "{what} with claim labels, beside {most} claims of another node: at most {MAX_GROWTH} times those without such claims"
        );
        let name = row_name(Contender::Labels.name(), name);
        threshold::at_most(all, &text, (&name, most), MAX_GROWTH, (&name, 0))
    };
    let text = format!(
        "bytes that a node with claim labels receives for the life of a claim of another node: at most {MAX_FOREIGN_CLAIM_BYTES}"
    );
    let foreign_claim = row_name(Contender::Labels.name(), FOREIGN_CLAIM);
    vec![
        independent(START, "bytes that a node receives at its start"),
        independent(RSS, "bytes of a provisioner's memory"),
        independent(IDLE, "requests of an idle provisioner"),
        threshold::no_more(all, &text, (&foreign_claim, most), MAX_FOREIGN_CLAIM_BYTES),
    ]
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn the_plots_name_rows_of_all_contenders() {
        let of_run = [Contender::Labels.name(), Contender::All.name(), PEER];
        let rows = of_run.map(|contender| rows_of(contender, 1, &[sample(1.0, 1.0, 1.0)])).concat();
        let rows: BTreeSet<_> = rows.iter().map(|row| row.name.as_str()).collect();
        for plot in &PLOTS {
            assert!(plot.names.iter().all(|name| rows.contains(name)), "{:?}", plot.names);
        }
    }

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
        let rows = rows.map(|(count, sample)| rows_of(Contender::Labels.name(), count, &[sample]));
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
        let samples =
            Samples { ours: Default::default(), peer: vec![[sample(1.0, 2.0, 3.0), sample(10.0, 0.0, 4.0)]] };
        let rows = samples.rows(7).into_iter().map(|row| (row.name, row.median));
        let expected = [
            ("peer_start_bytes", 11.0),
            ("peer_rss_bytes", 11.0),
            ("peer_idle_requests_per_minute", 2.0),
            ("peer_foreign_claim_bytes", 7.0),
            ("peer_csi_provisioner_start_bytes", 1.0),
            ("peer_csi_provisioner_rss_bytes", 1.0),
            ("peer_csi_provisioner_idle_requests_per_minute", 2.0),
            ("peer_csi_provisioner_foreign_claim_bytes", 3.0),
            ("peer_csi_resizer_start_bytes", 10.0),
            ("peer_csi_resizer_rss_bytes", 10.0),
            ("peer_csi_resizer_idle_requests_per_minute", 0.0),
            ("peer_csi_resizer_foreign_claim_bytes", 4.0),
        ];
        assert_eq!(rows.collect::<Vec<_>>(), expected.map(|(name, value)| (name.to_owned(), value)));

        let samples =
            Samples { ours: [vec![sample(1.0, 0.0, 0.0)], vec![sample(2.0, 0.0, 0.0); 2]], peer: Vec::new() };
        let rows = samples.rows(7);
        assert_eq!(
            (rows.len(), &*rows[0].name, &*rows[4].name),
            (8, "labels_start_bytes", "all_start_bytes")
        );
    }
}

//! The part `fleet`: the provisioners of many nodes beside one API server.
//!
//! Each node gets some claims. The rows say what a claim costs the API server, and how many bytes all provisioners receive for it, by
//! the number of nodes. kube-controller-manager binds the claims. The bench selects their nodes as the scheduler would.
//!
//! The claims go round the nodes, so that no two claims of a node follow each other. Each number of nodes has a control plane of its own,
//! which stores nothing of an earlier one. The bench writes the claims as an administrator, whose requests the API server does not queue.
//! Those of the provisioners share the seats of the priority level `workload-low`, because all have one account.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use kube::Client;
use testvm::session::Session;
use testvm_cluster::{ClusterProfile, ControlPlane, KubernetesSource};

use super::super::cluster::NAMESPACE;
use super::super::in_memory;
use super::super::measurement::{Environment, Measurements, Row};
use super::super::processor_time;
use super::super::threshold::{self, Threshold};
use super::claims::Claims;
use super::fleet_claims::FleetClaims;
use super::fleet_process::FleetProcess;
use super::labels;
use crate::fake_nodes;
use crate::test_env::manifests;
use crate::test_env::workload::create_namespace;

const RATE: &str = "fleet_claims_per_second";
const API_SERVER_CPU: &str = "fleet_api_server_cpu_ms_per_claim";
const EGRESS: &str = "fleet_egress_bytes_per_claim";

const PROFILE: ClusterProfile = ClusterProfile::Benchmark;
/// The largest growth of the bytes for a claim from one node to the largest number of nodes.
const MAX_EGRESS_GROWTH: f64 = 2.0;

/// A number of nodes, and the number of claims that each of them gets.
#[derive(Clone, Copy, Debug)]
struct Fleet {
    nodes: u64,
    claims_per_node: u64,
}

/// The fleets of a run: one node, and many.
#[derive(Clone, Copy, Debug)]
pub(super) struct FleetScale {
    one: Fleet,
    many: Fleet,
}

const FULL: FleetScale = FleetScale {
    one: Fleet { nodes: 1, claims_per_node: 500 },
    many: Fleet { nodes: 1000, claims_per_node: 10 },
};
const QUICK: FleetScale = FleetScale {
    one: Fleet { nodes: 1, claims_per_node: 50 },
    many: Fleet { nodes: 50, claims_per_node: 5 },
};

impl FleetScale {
    pub(super) const fn of(quick: bool) -> FleetScale {
        if quick { QUICK } else { FULL }
    }
}

/// The measurements of a fleet.
#[derive(Clone, Copy, Debug)]
struct Sample {
    claims_per_second: f64,
    api_server_cpu_ms_per_claim: f64,
    egress_bytes_per_claim: f64,
}

/// Measures each fleet on a control plane of its own, with the logs in directories below `logs`.
pub(super) async fn run(session: &Session, scale: FleetScale, logs: &Path) -> Result<Environment> {
    let tests = fake_nodes::build_live_tests(session, PROFILE).await?;
    let kubernetes = KubernetesSource::default();
    let mut rows = Vec::new();
    for fleet in [scale.one, scale.many] {
        let logs = logs.join(format!("fleet-{}", fleet.nodes));
        let nodes: Vec<String> = (1..=fleet.nodes).map(|number| format!("node-{number}")).collect();
        let measure = async |control_plane: &ControlPlane, kubeconfigs: &Path| {
            Box::pin(measure(session, control_plane, &tests, kubeconfigs, &nodes, fleet, &logs)).await
        };
        let measured =
            fake_nodes::with_driver_on(session, &nodes, PROFILE, &kubernetes, &logs, measure).await;
        let sample = measured.with_context(|| format!("fleet of {} nodes", fleet.nodes))?;
        rows.extend(rows_of(fleet.nodes, sample));
    }
    let place = "this machine, the provisioners of all nodes in one process, volumes in memory";
    in_memory::environment(place, &kubernetes, rows)
}

async fn measure(
    session: &Session,
    control_plane: &ControlPlane,
    tests: &Path,
    kubeconfigs: &Path,
    nodes: &[String],
    fleet: Fleet,
    logs: &Path,
) -> Result<Sample> {
    let client = control_plane.client();
    let step = session.progress.step("install the component claim-labels");
    create_namespace(client, NAMESPACE).await?;
    labels::install(client, &manifests::of_claim_labels(session)?).await?;
    Claims::new(client, "a-node").until_labelled().await?;
    step.done("");

    let step = session.progress.step(format!("start the provisioners of {} nodes", nodes.len()));
    let log = logs.join("provisioners.log");
    let mut process = FleetProcess::start(tests, control_plane, kubeconfigs, nodes, &log).await?;
    step.done("");

    let claims = FleetClaims::new(client, nodes, fleet.claims_per_node);
    let step = session.progress.step(format!("bind {} claims of {} nodes", claims.count(), nodes.len()));
    let before = api_server_cpu(client, &logs.join("api-server-before.metrics")).await?;
    let received_before = process.received();
    let time = process.while_it_runs(Box::pin(claims.create_and_bind(&step))).await?;
    let received = process.received() - received_before;
    let after = api_server_cpu(client, &logs.join("api-server-after.metrics")).await?;
    let sample = Sample::new(claims.count(), time, after - before, received);
    process.stop().await?;
    step.done(format!("{:.0} claims/s", sample.claims_per_second));
    Ok(sample)
}

impl Sample {
    fn new(claims: u64, time: Duration, cpu: Duration, received: u64) -> Sample {
        let claims = claims as f64;
        Sample {
            claims_per_second: claims / time.as_secs_f64(),
            api_server_cpu_ms_per_claim: cpu.as_secs_f64() * 1e3 / claims,
            egress_bytes_per_claim: received as f64 / claims,
        }
    }
}

/// Returns the processor time of the API server since its start. Saves its metrics, from which a user sees the kinds of requests.
async fn api_server_cpu(client: &Client, copy: &Path) -> Result<Duration> {
    let metrics = processor_time::api_server_metrics(client).await?;
    std::fs::write(copy, &metrics).with_context(|| format!("write {}", copy.display()))?;
    processor_time::of_api_server(&metrics)
}

fn rows_of(nodes: u64, sample: Sample) -> Vec<Row> {
    let row = |name: &str, unit: &str, value: f64| Row::of(name, nodes, unit, [value]);
    let rows = [
        row(RATE, "claims/s", sample.claims_per_second),
        row(API_SERVER_CPU, "ms", sample.api_server_cpu_ms_per_claim),
        row(EGRESS, "B", sample.egress_bytes_per_claim),
    ];
    rows.into_iter().flatten().collect()
}

pub(super) fn thresholds(all: &Measurements, scale: FleetScale) -> Vec<Threshold> {
    let (one, many) = (scale.one.nodes, scale.many.nodes);
    let text = format!(
        "bytes that the provisioners of {many} nodes receive for a claim: at most {MAX_EGRESS_GROWTH} times those with one node"
    );
    vec![threshold::at_most(all, &text, (EGRESS, many), MAX_EGRESS_GROWTH, (EGRESS, one))]
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[test]
    fn a_sample_has_the_costs_of_one_claim() {
        let sample = Sample::new(20, Duration::from_secs(4), Duration::from_millis(100), 6000);
        let values = rows_of(50, sample).into_iter().map(|row| (row.name, row.n, row.median));
        let expected = [(RATE, 5.0), (API_SERVER_CPU, 5.0), (EGRESS, 300.0)];
        assert_eq!(
            values.collect::<Vec<_>>(),
            expected.map(|(name, value)| (name.to_owned(), 50, value)).to_vec()
        );
    }

    #[rstest]
    #[case::twice_the_bytes(200.0, true)]
    #[case::more_than_twice_the_bytes(200.1, false)]
    fn the_bytes_of_a_claim_are_compared_with_those_of_one_node(#[case] bytes: f64, #[case] expected: bool) {
        let sample = |bytes| Sample {
            claims_per_second: 1.0,
            api_server_cpu_ms_per_claim: 1.0,
            egress_bytes_per_claim: bytes,
        };
        let rows = [(FULL.one, sample(100.0)), (FULL.many, sample(bytes))];
        let all = Measurements::of(rows.map(|(fleet, sample)| rows_of(fleet.nodes, sample)).concat());
        let verdicts = thresholds(&all, FULL).into_iter().map(|threshold| threshold.is_met);
        assert_eq!(verdicts.collect::<Vec<_>>(), [Some(expected)]);
    }
}

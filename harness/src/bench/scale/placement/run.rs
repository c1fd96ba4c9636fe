//! The measurements of the placement of Immediate claims, and their thresholds.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use kube::{Api, Client, ResourceExt};
use testvm::session::Session;
use testvm_cluster::waiting::{State, until_one};
use testvm_cluster::{ClusterProfile, ControlPlane, KubernetesSource};

use super::super::super::cluster::NAMESPACE;
use super::super::super::in_memory;
use super::super::super::measurement::{Environment, Measurements, Row};
use super::super::super::threshold::{self, Threshold};
use super::super::claims;
use super::super::idle::{Idle, Observed};
use super::super::measured_process::{Installation, MeasuredProcess};
use super::classes::{self, Topology};
use super::controller;
use super::declared_nodes::DeclaredNodes;
use crate::builds::{self, ProgramProfile};
use crate::fake_nodes::{self, NODES};
use crate::test_env::claims::SELECTED_NODE;
use crate::test_env::workload::create_namespace;

const START: &str = "controller_start_bytes";
const RSS: &str = "controller_rss_bytes";
const REQUESTS: &str = "requests";
const BYTES: &str = "bytes";

/// The node that the classes leave.
const NODE: &str = NODES[1];

/// The number of claims of each class that are placed one after the other.
const CLAIMS: u64 = 10;
/// The time for which the bytes of an idle controller are counted: several renewals of its Lease.
const IDLE_TIME: Duration = Duration::from_secs(30);
/// The timeout from the creation of a claim until its node is selected.
const PLACEMENT_TIMEOUT: Duration = Duration::from_secs(120);
/// The resource of the leader election, whose requests do not depend on claims.
const LEASES: &str = "leases";
/// The largest growth of the cost of a claim from the smallest number of nodes to the largest.
const MAX_GROWTH: f64 = 2.0;

/// The size of a run.
#[derive(Clone, Copy, Debug)]
struct Scale {
    fewest_nodes: u64,
    /// The further numbers of nodes before the largest one, in ascending order.
    more_nodes: &'static [u64],
    most_nodes: u64,
    /// The number of times that the controller is started beside each number of nodes.
    rounds: u64,
}

const FULL: Scale = Scale { fewest_nodes: 50, more_nodes: &[500], most_nodes: 5000, rounds: 3 };
const QUICK: Scale = Scale { fewest_nodes: 20, more_nodes: &[], most_nodes: 100, rounds: 1 };

impl Scale {
    fn of(quick: bool) -> Scale {
        if quick { QUICK } else { FULL }
    }

    fn nodes(self) -> impl Iterator<Item = u64> {
        [self.fewest_nodes].into_iter().chain(self.more_nodes.iter().copied()).chain([self.most_nodes])
    }
}

/// The measurements of one process.
#[derive(Clone, Debug)]
struct Sample {
    start_bytes: f64,
    rss_bytes: f64,
    /// The costs of a claim of each class, in the order of [`Topology::ALL`].
    placements: Vec<Placement>,
}

/// The costs of one claim.
#[derive(Clone, Copy, Debug)]
struct Placement {
    requests: f64,
    bytes: f64,
}

pub(in super::super) async fn run(session: &Session, quick: bool) -> Result<Environment> {
    let program = builds::driver_programs(session, ProgramProfile::Release).await?.provisioner;
    let logs = session.workspace.reports("bench").join("scale").join("placement");
    let kubernetes = KubernetesSource::default();
    let measure = async |control_plane: &ControlPlane, kubeconfigs: &Path| {
        let client = control_plane.client();
        create_namespace(client, NAMESPACE).await?;
        classes::create(client, NODE).await?;
        let (node, kubeconfig) = fake_nodes::kubeconfig_of_controller(kubeconfigs)?;
        let pod = fake_nodes::pod_of_controller(client, node).await?;
        let installation = Installation { program, node, pod, kubeconfig };
        control_plane.stop_controller_manager().await?;
        Box::pin(measure(session, &installation, client, &logs, Scale::of(quick))).await
    };
    let profile = ClusterProfile::Benchmark;
    let rows = fake_nodes::with_driver(session, profile, &kubernetes, &logs, measure).await?;
    in_memory::environment(in_memory::WITHOUT_KUBELETS, &kubernetes, rows)
}

async fn measure(
    session: &Session,
    installation: &Installation<'_>,
    client: &Client,
    logs: &Path,
    scale: Scale,
) -> Result<Vec<Row>> {
    let mut nodes = DeclaredNodes::new(client);
    let claims: Api<PersistentVolumeClaim> = Api::namespaced(client.clone(), NAMESPACE);
    let mut rows = Vec::new();
    for count in scale.nodes() {
        let step = session.progress.step(format!("declare nodes until there are {count}"));
        nodes.declare_up_to(count, &step).await?;
        step.done("");
        let step = session.progress.step(format!("place Immediate claims beside {count} nodes"));
        let mut samples = Vec::new();
        for round in 1..=scale.rounds {
            step.note(format!("round {round} of {}", scale.rounds));
            let log = logs.join(format!("controller-{count}-{round}.log"));
            let controller = controller::start(installation, &log).await?;
            samples.push(sample(&controller, &claims).await?);
            controller.stop().await?;
        }
        step.done("");
        rows.extend(rows_of(count, &samples));
    }
    Ok(rows)
}

/// Measures a controller that has just started.
async fn sample(controller: &MeasuredProcess, claims: &Api<PersistentVolumeClaim>) -> Result<Sample> {
    let start_bytes = controller.process().received() as f64;
    let rss_bytes = controller.process().rss()? as f64;
    let idle = Idle::observe(controller, IDLE_TIME).await?;
    let mut placements = Vec::new();
    for topology in Topology::ALL {
        placements.push(place(controller, claims, topology, &idle).await?);
    }
    Ok(Sample { start_bytes, rss_bytes, placements })
}

/// Has the controller place claims of a class, deletes them, and returns the costs of one.
async fn place(
    controller: &MeasuredProcess,
    api: &Api<PersistentVolumeClaim>,
    topology: Topology,
    idle: &Idle,
) -> Result<Placement> {
    let names: Vec<String> = (0..CLAIMS).map(|number| format!("{}-{number}", topology.class())).collect();
    let (requests, received, since) =
        (controller.requests_except(LEASES).await?, controller.process().received(), Instant::now());
    for name in &names {
        claims::create(api, &claims::claim(name, topology.class())?).await?;
        claims::annotate_with_driver(api, name).await?;
        until_one(api.clone(), name, PLACEMENT_TIMEOUT, judge)
            .await
            .with_context(|| format!("wait for the node of claim {name}"))?;
    }
    let received = controller.until_idle().await? - received;
    let bytes = idle.without(received, since.elapsed());
    let requests = controller.requests_except(LEASES).await? - requests;
    for name in &names {
        claims::delete(api, name).await?;
    }
    // The events of the deletion do not belong to the next placement.
    controller.until_idle().await?;
    Ok(Placement { requests: requests / CLAIMS as f64, bytes: bytes / CLAIMS as f64 })
}

fn judge(claim: Option<&PersistentVolumeClaim>) -> State {
    let selected = claim.and_then(|claim| claim.annotations().get(SELECTED_NODE));
    match selected.map(String::as_str) {
        None => State::Pending("no node is selected".to_owned()),
        Some(NODE) => State::Ready,
        Some(other) => State::Failed(format!("{other} is selected, but the class leaves {NODE}")),
    }
}

fn rows_of(nodes: u64, samples: &[Sample]) -> Vec<Row> {
    let mut rows = Vec::new();
    rows.extend(Row::of(START, nodes, "B", samples.iter().map(|sample| sample.start_bytes)));
    rows.extend(Row::of(RSS, nodes, "B", samples.iter().map(|sample| sample.rss_bytes)));
    for (position, topology) in Topology::ALL.into_iter().enumerate() {
        let placements = || samples.iter().filter_map(|sample| sample.placements.get(position));
        let requests = placements().map(|placement| placement.requests);
        rows.extend(Row::of(&row_name(topology, REQUESTS), nodes, "requests", requests));
        let bytes = placements().map(|placement| placement.bytes);
        rows.extend(Row::of(&row_name(topology, BYTES), nodes, "B", bytes));
    }
    rows
}

fn row_name(topology: Topology, name: &str) -> String {
    format!("{}_{name}", topology.row())
}

pub(in super::super) fn thresholds(all: &Measurements, quick: bool) -> Vec<Threshold> {
    let Scale { fewest_nodes, most_nodes, .. } = Scale::of(quick);
    let costs = Topology::ALL.into_iter().flat_map(|topology| [(topology, REQUESTS), (topology, BYTES)]);
    let thresholds = costs.map(|(topology, cost)| {
        let text = format!(
            "{cost} of the controller for an Immediate claim whose class allows {}, beside {most_nodes} nodes: at most {MAX_GROWTH} \
             times those beside {fewest_nodes}",
            topology.description()
        );
        let name = row_name(topology, cost);
        threshold::at_most(all, &text, (&name, most_nodes), MAX_GROWTH, (&name, fewest_nodes))
    });
    thresholds.collect()
}

#[cfg(test)]
mod tests {
    use rstest::rstest;
    use serde_json::json;

    use super::*;

    fn rows(nodes: u64, cost: f64) -> Vec<Row> {
        let placements = Topology::ALL.map(|_| Placement { requests: cost, bytes: cost }).to_vec();
        rows_of(nodes, &[Sample { start_bytes: 1.0, rss_bytes: 1.0, placements }])
    }

    #[rstest]
    #[case::twice_the_cost(2.0, true)]
    #[case::more_than_twice_the_cost(2.1, false)]
    fn thresholds_are_met_up_to_their_bounds(#[case] cost: f64, #[case] expected: bool) {
        let all = Measurements::of([rows(20, 1.0), rows(100, cost)].concat());
        let verdicts: Vec<_> = thresholds(&all, true).into_iter().map(|threshold| threshold.is_met).collect();
        assert_eq!(verdicts, [Some(expected); 6]);
    }

    #[test]
    fn each_topology_has_rows_of_its_own() {
        let names: Vec<_> = rows(50, 1.0).into_iter().map(|row| row.name).collect();
        assert_eq!(
            names,
            [
                "controller_start_bytes",
                "controller_rss_bytes",
                "placement_requests",
                "placement_bytes",
                "placement_by_label_requests",
                "placement_by_label_bytes",
                "placement_by_name_and_label_requests",
                "placement_by_name_and_label_bytes",
            ]
        );
    }

    #[test]
    fn the_numbers_of_nodes_are_in_ascending_order() {
        assert_eq!(FULL.nodes().collect::<Vec<_>>(), [50, 500, 5000]);
        assert_eq!(QUICK.nodes().collect::<Vec<_>>(), [20, 100]);
    }

    #[test]
    fn a_claim_with_another_node_fails_the_wait() {
        let claim = |node: &str| {
            let claim = json!({"metadata": {"annotations": {SELECTED_NODE: node}}, "spec": {}});
            serde_json::from_value::<PersistentVolumeClaim>(claim).unwrap()
        };
        assert!(matches!(judge(None), State::Pending(_)));
        assert!(matches!(judge(Some(&claim(NODE))), State::Ready));
        assert!(matches!(judge(Some(&claim("node-x"))), State::Failed(_)));
    }
}

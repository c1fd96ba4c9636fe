//! What the placement of an Immediate claim costs the controller beside many nodes.
//!
//! The controller is the program of the driver's image in its other role, with the rights of the manifests. The bench declares nodes
//! as their kubelets and provisioners would, and creates claims of classes that leave exactly one node. Each class leaves it in
//! another way: by the topology key of the driver, by a label of the Node, or by both.
//!
//! kube-controller-manager is stopped here too. It would create a pod of the driver for each declared node, and mark the nodes as not
//! ready because no kubelet renews their leases. The bench annotates the claims in its place.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use k8s_openapi::api::storage::v1::{CSIStorageCapacity, StorageClass};
use kube::{Api, Client, ResourceExt};
use serde_json::{Value, json};
use testvm::session::Session;
use testvm_cluster::waiting::{State, until_one};
use testvm_cluster::{ControlPlane, objects};

use super::super::args::Args;
use super::super::audit_log::AuditLog;
use super::super::cluster::{CLASS, NAMESPACE};
use super::super::measurement::{Environment, Samples};
use super::super::memory::CURRENT;
use super::super::process::beside_control_plane;
use super::super::threshold::{Requirement, grows_at_most};
use super::claims::{self, create_numbered};
use super::process::{DRIVER, Idle, Installation, Observed, PLACE};
use crate::builds::{self, ProgramProfile};
use crate::fake_nodes::{self, NODES, SYSTEM};
use crate::test_env::claim_labels::LABEL;
use crate::test_env::claims::SELECTED_NODE;

/// The node that the classes leave.
const NODE: &str = NODES[1];
/// The number of claims of each class that are placed one after the other.
const CLAIMS: u64 = 10;
/// The time for which the bytes of an idle controller are counted: several renewals of its Lease.
const IDLE_TIME: Duration = Duration::from_secs(30);
/// The timeout from the creation of a claim until its node is selected.
const PLACEMENT_TIMEOUT: Duration = Duration::from_secs(120);

/// A way in which the allowed topology of a class leaves one node.
struct Topology {
    /// The beginning of the names of its rows.
    row: &'static str,
    class: &'static str,
    /// The text of its requirements.
    description: &'static str,
    /// The topology keys. The value of each is the name of the node, except that all nodes have one operating system.
    keys: &'static [&'static str],
}

const TOPOLOGIES: [Topology; 3] = [
    Topology {
        row: "placement",
        class: "immediate-by-name",
        description: "the name of a node",
        keys: &[BY_NAME],
    },
    Topology {
        row: "placement_by_label",
        class: "immediate-by-label",
        description: "a label of a node",
        keys: &["kubernetes.io/hostname"],
    },
    Topology {
        row: "placement_by_name_and_label",
        class: "immediate-by-name-and-label",
        description: "the name of a node and a label of all nodes",
        keys: &[BY_NAME, OF_ALL],
    },
];
/// The topology key of the driver.
const BY_NAME: &str = "topology.csi.loopfs.dev/node";
const OF_ALL: &str = "kubernetes.io/os";

pub(super) async fn run(session: &Session, args: &Args, logs: &Path) -> Result<Environment> {
    let program = builds::driver_programs(session, ProgramProfile::Release).await?.provisioner;
    let counts: &[u64] = args.size(&[50, 500, 5000], &[20, 100]);
    let rounds = args.size(3, 1);
    let measure = async |control_plane: &ControlPlane, kubeconfigs: &Path| {
        let client = control_plane.client();
        let classes: Api<StorageClass> = Api::all(client.clone());
        for topology in &TOPOLOGIES {
            objects::create(&classes, &class(topology)?).await?;
        }
        let (node, kubeconfig) = fake_nodes::kubeconfig_of_controller(kubeconfigs)?;
        let pod = fake_nodes::pod_of_controller(client, node).await?;
        let log = AuditLog::of(control_plane.layout());
        let installation = Installation { log, program, driver: None, node, pod, kubeconfig };
        control_plane.stop_controller_manager().await?;

        let mut samples = Samples::default();
        let mut existing = NODES.len() as u64;
        for count in counts {
            let step = session.progress.step(format!("declare nodes until there are {count}"));
            create_numbered(existing..*count, "nodes", &step, |number| declare(client, number)).await?;
            existing = *count;
            step.done("");
            let step = session.progress.step(format!("place Immediate claims beside {count} nodes"));
            for round in 1..=rounds {
                step.note(format!("round {round} of {rounds}"));
                let log = logs.join(format!("controller-{count}-{round}.log"));
                let controller = Box::pin(installation.start_controller(&log)).await?;
                sample(&controller, client, *count, &mut samples).await?;
                controller.stop().await?;
            }
            step.done("");
        }
        Ok(samples)
    };
    beside_control_plane(session, logs, PLACE, measure).await
}

pub(super) fn requirements() -> Vec<Requirement> {
    let requirement = |topology: &Topology, cost: &str| {
        let text = format!(
            "{cost} of the controller for an Immediate claim whose class allows {}, beside {{n}} nodes: at most 2 times those \
             beside {{peer_n}}",
            topology.description
        );
        grows_at_most(&text, &format!("{}_{cost}", topology.row), 2.0)
    };
    TOPOLOGIES
        .iter()
        .flat_map(|topology| ["requests", "bytes"].map(|cost| requirement(topology, cost)))
        .collect()
}

/// Measures a controller that has just started.
async fn sample(controller: &Observed, client: &Client, nodes: u64, samples: &mut Samples) -> Result<()> {
    samples.add("controller_start_bytes", nodes, "B", controller.received() as f64);
    samples.add("controller_rss_bytes", nodes, "B", controller.memory(CURRENT)?);
    let idle = controller.idle(IDLE_TIME).await?;
    for topology in &TOPOLOGIES {
        let (requests, bytes) = place(controller, client, topology.class, &idle).await?;
        samples.add(format!("{}_requests", topology.row), nodes, "requests", requests);
        samples.add(format!("{}_bytes", topology.row), nodes, "B", bytes);
    }
    Ok(())
}

/// Has the controller place claims of a class, deletes them, and returns the requests and the bytes of one.
async fn place(controller: &Observed, client: &Client, class: &str, idle: &Idle) -> Result<(f64, f64)> {
    let api: Api<PersistentVolumeClaim> = Api::namespaced(client.clone(), NAMESPACE);
    let names: Vec<String> = (0..CLAIMS).map(|number| format!("{class}-{number}")).collect();
    let (requests, received, since) = (controller.requests()?, controller.received(), Instant::now());
    for name in &names {
        claims::create(&api, &claims::claim(name, class)?).await?;
        claims::annotate_with_driver(&api, name).await?;
        until_one(api.clone(), name, PLACEMENT_TIMEOUT, judge)
            .await
            .with_context(|| format!("wait for the node of claim {name}"))?;
    }
    let received = controller.until_idle().await? - received;
    let bytes = idle.without(received, since.elapsed());
    let requests = controller.requests()? - requests;
    for name in &names {
        claims::delete(&api, name).await?;
    }
    // The events of the deletion do not belong to the next placement.
    controller.until_idle().await?;
    Ok((requests / CLAIMS as f64, bytes / CLAIMS as f64))
}

fn judge(claim: Option<&PersistentVolumeClaim>) -> State {
    let selected = claim.and_then(|claim| claim.annotations().get(SELECTED_NODE));
    match selected.map(String::as_str) {
        None => State::Pending("no node is selected".to_owned()),
        Some(NODE) => State::Ready,
        Some(other) => State::Failed(format!("{other} is selected, but the class leaves {NODE}")),
    }
}

fn class(topology: &Topology) -> Result<StorageClass> {
    let value = |key: &str| if key == OF_ALL { "linux" } else { NODE };
    let expressions = topology.keys.iter().map(|key| json!({"key": key, "values": [value(key)]}));
    let class = json!({
        "metadata": {"name": topology.class},
        "provisioner": DRIVER,
        "volumeBindingMode": "Immediate",
        "allowedTopologies": [{"matchLabelExpressions": expressions.collect::<Vec<Value>>()}],
    });
    serde_json::from_value(class).context("create a StorageClass from JSON")
}

/// Creates the objects of a node: those that its kubelet publishes, and the free capacity that its provisioner publishes.
async fn declare(client: &Client, number: u64) -> Result<()> {
    let node = format!("declared-{number:05}");
    fake_nodes::register(client, &node, DRIVER).await.with_context(|| format!("declare node {node}"))?;
    let capacities: Api<CSIStorageCapacity> = Api::namespaced(client.clone(), SYSTEM);
    objects::create(&capacities, &capacity(&node, number)?).await.map(drop)
}

/// Returns the free capacity of a node for the class of the manifests. No pod owns the object, because there is none on the node.
fn capacity(node: &str, number: u64) -> Result<CSIStorageCapacity> {
    let capacity = json!({
        "metadata": {
            // The provisioner appends a hash of this length.
            "name": format!("{node}-{number:016x}"),
            "labels": {
                "csi.storage.k8s.io/drivername": DRIVER,
                "csi.storage.k8s.io/managed-by": "loopfs-provisioner",
                LABEL: node,
            },
        },
        "storageClassName": CLASS,
        "nodeTopology": {"matchLabels": {BY_NAME: node}},
        "capacity": "100Gi",
        "maximumVolumeSize": "100Gi",
    });
    serde_json::from_value(capacity).context("create a CSIStorageCapacity from JSON")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_class_allows_one_topology() {
        assert_eq!(BY_NAME, format!("topology.{DRIVER}/node"));
        let keys = TOPOLOGIES.each_ref().map(|topology| {
            let [term] = class(topology).unwrap().allowed_topologies.unwrap().try_into().unwrap();
            let expressions = term.match_label_expressions.unwrap();
            let pairs =
                expressions.into_iter().map(|mut expression| (expression.key, expression.values.remove(0)));
            pairs.collect::<Vec<_>>()
        });
        let pair = |key: &str, value: &str| (key.to_owned(), value.to_owned());
        assert_eq!(keys[0], [pair(BY_NAME, NODE)]);
        assert_eq!(keys[1], [pair("kubernetes.io/hostname", NODE)]);
        assert_eq!(keys[2], [pair(BY_NAME, NODE), pair("kubernetes.io/os", "linux")]);
    }

    #[test]
    fn capacity_names_its_node() {
        let capacity = capacity("declared-00007", 7).unwrap();
        assert_eq!(capacity.metadata.name.as_deref(), Some("declared-00007-0000000000000007"));
        assert_eq!(capacity.node_topology.unwrap().match_labels.unwrap()[BY_NAME], "declared-00007");
    }

    #[test]
    fn another_node_fails_the_wait() {
        let claim = |node: &str| {
            let claim = json!({"metadata": {"annotations": {SELECTED_NODE: node}}, "spec": {}});
            serde_json::from_value::<PersistentVolumeClaim>(claim).unwrap()
        };
        assert!(matches!(judge(None), State::Pending(_)));
        assert!(matches!(judge(Some(&claim(NODE))), State::Ready));
        assert!(matches!(judge(Some(&claim("node-x"))), State::Failed(_)));
    }
}

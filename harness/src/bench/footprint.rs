//! `bench footprint`: what the driver costs a node that only has volumes: memory, the size of its image, and its start.
//!
//! The peer is the deployment that the driver replaces: external-provisioner and external-resizer beside a CSI driver. That driver
//! is the one of this project, which registers itself, so the peer has no node-driver-registrar: its cost would come on top. The
//! memory of both is measured at the same time on one node. The claims belong to our driver, and the sidecars watch all claims and
//! volumes of the cluster, as they always do.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use k8s_openapi::api::storage::v1::CSINode;
use kube::{Api, Client};
use testvm::session::Session;
use testvm_cluster::waiting::{State, until_one};
use testvm_cluster::{Cluster, KUBELET_ROOT, Node, TOOLS_DIR};

use super::args::Args;
use super::batch::Batch;
use super::cluster::{self, CLASS, OUR_PROGRAMS};
use super::measurement::{Environment, Samples, milliseconds};
use super::memory;
use super::node_process::NodeProcess;
use super::peer::{self, Limits, NodePeer};
use super::threshold::{Requirement, at_most};
use crate::builds::{self, ProgramProfile};
use crate::node_options::NodeOptions;
use crate::nodes::{self, DATA_DIR};

/// The names of the rows of [`OUR_PROGRAMS`].
const OURS: [&str; 2] = ["loopfs_provisioner", "loopfs_csi"];
/// The programs of the peer, by the names of their rows and in the node's directory of tools.
const PEER: [(&str, &str); 3] = [
    ("peer_csi_provisioner", peer::PROVISIONER),
    ("peer_csi_resizer", peer::RESIZER),
    ("peer_driver", peer::DRIVER),
];

/// The number of times that memory is read, so that two runs can be compared.
const READS: usize = 5;
const READ_INTERVAL: Duration = Duration::from_secs(2);
/// The time that programs have to fill their caches: after their start, and after the last claim is bound.
const SETTLING_TIME: Duration = Duration::from_secs(20);
const BIND_TIMEOUT: Duration = Duration::from_secs(1800);

/// The name of the driver whose start is measured beside the pods. No other driver on the node has it.
const NAME: &str = "footprint.loopfs.dev";
/// The directory of its socket and its log on the node.
const DIR: &str = "/run/footprint";
/// The timeout until the kubelet has registered a driver, or removed it.
const REGISTRATION_TIMEOUT: Duration = Duration::from_secs(180);

pub(super) async fn run(session: &Session, args: &Args) -> Result<Environment> {
    let (claims, starts) = args.size((1000, 5), (50, 2));
    let tools = peer::tools(session).await?;
    let mut samples = image_sizes(session, &tools).await?;
    let measure = async |cluster: &Cluster, node: &Node| {
        measure(session, cluster, node, claims, starts, &mut samples).await?;
        Ok(samples)
    };
    let mut part =
        cluster::measured(session, args, "footprint", NodeOptions::default(), &tools, measure).await?;
    part.place = format!(
        "{}; peer: {} with the CSI controller of loopfs-csi, without node-driver-registrar",
        part.place,
        peer::sidecars()
    );
    Ok(part)
}

pub(super) fn requirements() -> Vec<Requirement> {
    let memory =
        "memory of the driver's containers with {n} volumes: at most that of the sidecars and a driver";
    let image = "size of the programs in the driver's image: at most that of the programs of the sidecars and a driver";
    vec![
        at_most(memory, "rss_driver", 1.0, "rss_peer").at_each_count(),
        at_most(image, "image_bytes", 1.0, "peer_image_bytes"),
    ]
}

/// Returns the size of the programs in the driver's image, uncompressed, and of those in the images of the peer. Those images also have files of their
/// base image, which are not counted.
async fn image_sizes(session: &Session, tools: &[(String, PathBuf)]) -> Result<Samples> {
    let driver = builds::driver_programs(session, ProgramProfile::Release).await?;
    let image = nodes::driver_image(driver);
    let mut samples = Samples::default();
    samples.add("image_bytes", 1, "B", size_of_all(image.files.iter().map(|(_, file)| file))?);
    samples.add("peer_image_bytes", 1, "B", size_of_all(tools.iter().map(|(_, file)| file))?);
    Ok(samples)
}

fn size_of_all<'a>(files: impl Iterator<Item = &'a PathBuf>) -> Result<f64> {
    let sizes = files.map(|file| {
        let metadata = std::fs::metadata(file).with_context(|| format!("stat {}", file.display()))?;
        Ok(metadata.len() as f64)
    });
    sizes.sum()
}

async fn measure(
    session: &Session,
    cluster: &Cluster,
    node: &Node,
    claims: u64,
    starts: usize,
    samples: &mut Samples,
) -> Result<()> {
    let step = session.progress.step("start and register the driver");
    samples.extend("start_to_registered", 1, "ms", registrations(cluster.client(), node, starts).await?);
    step.done("");

    let step = session.progress.step("start the peer");
    let peer = NodePeer::install(cluster, node).await?;
    peer.start(Limits::Default).await?;
    step.done("");

    let step = session.progress.step("read the memory without volumes");
    read_memory(node, 0, samples).await?;
    step.done("");
    let step = session.progress.step(format!("provision {claims} volumes"));
    let batch = Batch::new(cluster.client(), "footprint", CLASS, node.name(), claims);
    batch.create_and_bind(BIND_TIMEOUT).await?;
    step.done("");
    let step = session.progress.step(format!("read the memory with {claims} volumes"));
    read_memory(node, claims, samples).await?;
    step.done("");

    peer.save_logs(cluster.control_plane().layout().logs()).await
}

/// Adds the memory of each program, and the totals of the driver and of the peer.
async fn read_memory(node: &Node, volumes: u64, samples: &mut Samples) -> Result<()> {
    tokio::time::sleep(SETTLING_TIME).await;
    let peer_paths = PEER.map(|(_, name)| format!("{TOOLS_DIR}/{name}"));
    let programs: Vec<&str> = OUR_PROGRAMS.into_iter().chain(peer_paths.iter().map(String::as_str)).collect();
    let names = OURS.into_iter().chain(PEER.map(|(name, _)| name));
    for _ in 0..READS {
        let bytes = memory::of(node, memory::CURRENT, &programs).await?;
        let (ours, peer) = bytes.split_at(OURS.len());
        samples.add("rss_driver", volumes, "B", ours.iter().sum::<u64>() as f64);
        samples.add("rss_peer", volumes, "B", peer.iter().sum::<u64>() as f64);
        for (name, bytes) in names.clone().zip(&bytes) {
            samples.add(format!("rss_{name}"), volumes, "B", *bytes as f64);
        }
        tokio::time::sleep(READ_INTERVAL).await;
    }
    Ok(())
}

/// Starts and stops the driver `rounds` times. Returns the milliseconds from each start until the kubelet has registered the driver,
/// which is when pods can use volumes.
async fn registrations(client: &Client, node: &Node, rounds: usize) -> Result<Vec<f64>> {
    node.output(&["mkdir", "-p", DIR]).await?;
    let socket = format!("{DIR}/{NAME}.sock");
    let args = [
        format!("--driver-name={NAME}"),
        format!("--node-name={}", node.name()),
        format!("--data-dir={DATA_DIR}"),
        format!("--endpoint=unix://{socket}"),
        format!("--registration-dir={KUBELET_ROOT}/plugins_registry"),
        format!("--kubelet-csi-socket={socket}"),
    ];
    let mut starts = Vec::new();
    for _ in 0..rounds {
        let begun = Instant::now();
        let registered = until_listed(client, node, true);
        let (driver, ()) = tokio::try_join!(NodeProcess::start(node, DIR, peer::DRIVER, &args), registered)?;
        starts.push(milliseconds(begun.elapsed()));
        driver.stop("TERM").await?;
        until_listed(client, node, false).await?;
    }
    Ok(starts)
}

/// Waits until the node's CSINode object lists the driver, or until it does not.
async fn until_listed(client: &Client, node: &Node, is_listed: bool) -> Result<()> {
    let nodes: Api<CSINode> = Api::all(client.clone());
    until_one(nodes, node.name(), REGISTRATION_TIMEOUT, |object| {
        let mut listed = object.iter().flat_map(|object| &object.spec.drivers);
        let listed = listed.any(|driver| driver.name == NAME);
        State::ready_if(listed == is_listed, format!("driver {NAME} is listed: {listed}"))
    })
    .await
    .with_context(|| format!("CSINode {}", node.name()))
    .map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An absent file is an error.
    #[test]
    fn sizes_are_summed() {
        let directory = tempfile::tempdir().unwrap();
        let files = ["a", "b"].map(|name| directory.path().join(name));
        std::fs::write(&files[0], [0; 10]).unwrap();
        std::fs::write(&files[1], [0; 5]).unwrap();
        assert_eq!(size_of_all(files.iter()).unwrap(), 15.0);
        assert!(size_of_all([directory.path().join("absent")].iter()).is_err());
    }
}

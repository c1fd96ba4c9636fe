//! The measurements of `bench footprint` and their thresholds.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Result;
use testvm::session::Session;
use testvm_cluster::{Cluster, Node, TOOLS_DIR};

use super::super::batch::Batch;
use super::super::cluster::{CLASS, SharedCluster};
use super::super::measurement::{Environment, Measurements, Row};
use super::super::memory;
use super::super::outcome::{Args, Outcome};
use super::super::provision::peer::{self, DRIVER, Limits, PROVISIONER, Peer, RESIZER};
use super::super::threshold::{self, Threshold};
use super::{registration, sizes};
use crate::builds::{self, ProgramProfile};
use crate::nodes;

/// The programs of our driver's pod, by the names of their rows.
const OURS: [(&str, &str); 2] =
    [("loopfs_csi", "/loopfs-csi"), ("loopfs_provisioner", "/loopfs-provisioner node")];
/// The programs of the peer, by the names of their rows and in the node's directory of tools.
const PEER: [(&str, &str); 3] =
    [("peer_csi_provisioner", PROVISIONER), ("peer_csi_resizer", RESIZER), ("peer_driver", DRIVER)];
const OURS_TOTAL: &str = "driver";
const PEER_TOTAL: &str = "peer";

const RSS: &str = "rss";
const IMAGE: &str = "image_bytes";
const PEER_IMAGE: &str = "peer_image_bytes";
const START: &str = "start_to_registered";

/// The number of times that memory is read, so that two runs can be compared.
const READS: usize = 5;
const READ_INTERVAL: Duration = Duration::from_secs(2);
/// The time that programs have to fill their caches: after their start, and after the last claim is bound.
const SETTLING_TIME: Duration = Duration::from_secs(20);
const BIND_TIMEOUT: Duration = Duration::from_secs(1800);

/// The size of a run.
#[derive(Clone, Copy, Debug)]
struct Scale {
    claims: u64,
    starts: usize,
}

pub(in crate::bench) async fn run(
    session: &Session,
    args: &Args,
    shared: &mut SharedCluster,
) -> Result<Outcome> {
    let scale = if args.quick { Scale { claims: 50, starts: 2 } } else { Scale { claims: 1000, starts: 5 } };
    let part = session.until_cancelled(prepare_and_run(session, args, shared, scale)).await?;
    Ok(Outcome::new(vec![part], |all| thresholds(all, scale), &[]))
}

async fn prepare_and_run(
    session: &Session,
    args: &Args,
    shared: &mut SharedCluster,
    scale: Scale,
) -> Result<Environment> {
    let tools = peer::tools(session).await?;
    let mut rows = image_rows(session, &tools).await?;
    let measure = async |cluster: &Cluster, node: &Node| measure(session, cluster, node, scale).await;
    let measured = shared.measured(session, args, "footprint", &tools, measure);
    let mut part = Box::pin(measured).await?;
    part.place = format!("{}; peer: {}, without node-driver-registrar", part.place, peer::description());
    rows.append(&mut part.rows);
    Ok(Environment { rows, ..part })
}

/// Returns the size of the programs in the driver's image, uncompressed, and of those in the images of the peer. Those images also have files of their
/// base image, which are not counted.
async fn image_rows(session: &Session, tools: &[(String, PathBuf)]) -> Result<Vec<Row>> {
    let driver = builds::driver_programs(session, ProgramProfile::Release).await?;
    let image = nodes::driver_image(driver, builds::loopfs_tool(session, ProgramProfile::Release).await?);
    let ours = sizes::sum(image.files.iter().map(|(_, file)| file))?;
    let peer = sizes::sum(tools.iter().map(|(_, file)| file))?;
    let row = |name, bytes: u64| Row::of(name, 1, "B", [bytes as f64]);
    Ok(row(IMAGE, ours).into_iter().chain(row(PEER_IMAGE, peer)).collect())
}

async fn measure(session: &Session, cluster: &Cluster, node: &Node, scale: Scale) -> Result<Vec<Row>> {
    let step = session.progress.step("start and register the driver");
    let starts = registration::measure(cluster.client(), node, scale.starts).await?;
    step.done("");

    let step = session.progress.step("start the peer");
    let peer = Peer::install(cluster, node).await?;
    let sidecars = peer.start(Limits::Default).await?;
    step.done("");

    let step = session.progress.step("read the memory without volumes");
    let idle = read_memory(node).await?;
    step.done("");
    let step = session.progress.step(format!("provision {} volumes", scale.claims));
    let batch = Batch {
        client: cluster.client().clone(),
        name: "footprint".to_owned(),
        class: CLASS.to_owned(),
        node: node.name().to_owned(),
        claim_count: scale.claims,
    };
    batch.create_and_bind(BIND_TIMEOUT).await?;
    step.done("");
    let step = session.progress.step(format!("read the memory with {} volumes", scale.claims));
    let full = read_memory(node).await?;
    step.done("");

    // Another benchmark may use the cluster. It needs the names.
    peer.save_logs(cluster.control_plane().layout().logs()).await?;
    sidecars.stop().await?;
    peer.remove().await?;
    batch.delete().await?;
    Ok(memory_rows(0, &idle)
        .into_iter()
        .chain(memory_rows(scale.claims, &full))
        .chain(Row::of(START, 1, "ms", starts))
        .collect())
}

/// The resident memory of each program, in the order of [`OURS`] and [`PEER`].
type Reading = ([u64; OURS.len()], [u64; PEER.len()]);

async fn read_memory(node: &Node) -> Result<Vec<Reading>> {
    tokio::time::sleep(SETTLING_TIME).await;
    let peer_paths = PEER.map(|(_, name)| format!("{TOOLS_DIR}/{name}"));
    let mut readings = Vec::new();
    for _ in 0..READS {
        let ours = memory::current(node, OURS.map(|(_, path)| path)).await?;
        let peer = memory::current(node, peer_paths.each_ref().map(String::as_str)).await?;
        readings.push((ours, peer));
        tokio::time::sleep(READ_INTERVAL).await;
    }
    Ok(readings)
}

fn memory_rows(volumes: u64, readings: &[Reading]) -> Vec<Row> {
    let mut rows = Vec::new();
    let mut row = |name: &str, values: &dyn Fn(&Reading) -> u64| {
        let values = readings.iter().map(|reading| values(reading) as f64);
        rows.extend(Row::of(&format!("{RSS}_{name}"), volumes, "B", values));
    };
    row(OURS_TOTAL, &|(ours, _)| ours.iter().sum());
    row(PEER_TOTAL, &|(_, peer)| peer.iter().sum());
    for (index, (name, _)) in OURS.iter().enumerate() {
        row(name, &|(ours, _)| ours[index]);
    }
    for (index, (name, _)) in PEER.iter().enumerate() {
        row(name, &|(_, peer)| peer[index]);
    }
    rows
}

fn thresholds(all: &Measurements, scale: Scale) -> Vec<Threshold> {
    let mut thresholds = Vec::new();
    for volumes in [0, scale.claims] {
        let text = format!(
            "memory of the driver's containers with {volumes} volumes: at most that of the sidecars and a driver"
        );
        let (ours, peer) = (format!("{RSS}_{OURS_TOTAL}"), format!("{RSS}_{PEER_TOTAL}"));
        thresholds.push(threshold::at_most(all, &text, (&ours, volumes), 1.0, (&peer, volumes)));
    }
    let text = "size of the programs in the driver's image: at most that of the programs of the sidecars and a driver";
    thresholds.push(threshold::at_most(all, text, (IMAGE, 1), 1.0, (PEER_IMAGE, 1)));
    thresholds
}

#[cfg(test)]
mod tests {
    use super::*;

    const SCALE: Scale = Scale { claims: 1000, starts: 1 };

    fn rows(of_csi: u64) -> Vec<Row> {
        let reading = ([of_csi, 30], [10, 20, 20]);
        [0, SCALE.claims].into_iter().flat_map(|volumes| memory_rows(volumes, &[reading; 2])).collect()
    }

    #[test]
    fn each_program_and_both_totals_have_rows() {
        let all = Measurements::of(rows(20));
        assert_eq!(all.rows().count(), 2 * (2 + OURS.len() + PEER.len()));
        assert_eq!((all.median("rss_driver", 0), all.median("rss_peer", 1000)), (Some(50.0), Some(50.0)));
        assert_eq!(all.median("rss_peer_csi_resizer", 0), Some(20.0));
        assert_eq!(all.median("rss_loopfs_provisioner", 1000), Some(30.0));
    }

    #[test]
    fn thresholds_are_met_if_the_driver_costs_as_much_as_its_peer() {
        let verdicts = |of_csi, image: f64| -> Vec<Option<bool>> {
            let sizes =
                [(IMAGE, image), (PEER_IMAGE, 100.0)].map(|(name, bytes)| Row::of(name, 1, "B", [bytes]));
            let rows = rows(of_csi).into_iter().chain(sizes.into_iter().flatten());
            let all = Measurements::of(rows.collect());
            thresholds(&all, SCALE).into_iter().map(|threshold| threshold.is_met).collect()
        };
        assert_eq!(verdicts(20, 100.0), [Some(true); 3]);
        assert_eq!(verdicts(21, 100.1), [Some(false); 3]);
    }
}

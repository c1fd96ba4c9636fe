//! The provisioner of a node and its peer, beside claims of another node.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Result;
use futures::future::try_join_all;
use testvm::session::Session;
use testvm_cluster::ControlPlane;

use super::super::args::Args;
use super::super::measurement::{Environment, Samples};
use super::super::memory::CURRENT;
use super::super::peer::{self, HostPeer};
use super::super::process::{NODE, beside_control_plane};
use super::super::threshold::{Requirement, grows_at_most, no_more};
use super::super::turns::take_turns;
use super::claims::{self, Claims};
use super::process::{Installation, Observed, PLACE, start_sidecar};
use crate::builds::{self, ProgramProfile};
use crate::fake_nodes::NODES;
use crate::test_env::claim_labels;

const START: &str = "start_bytes";
const RSS: &str = "rss_bytes";
const IDLE: &str = "idle_requests_per_minute";
const FOREIGN_CLAIM: &str = "foreign_claim_bytes";

/// The node that has the claims.
const OTHER_NODE: &str = NODES[1];
/// The time for which requests are counted while nothing happens.
const IDLE_TIME: Duration = Duration::from_secs(60);

/// The claims that a provisioner watches, or its peer.
#[derive(Clone, Copy)]
enum Contender {
    /// Those with the label of its node, by the component claim-labels.
    Labels,
    /// All claims of the cluster.
    All,
    Peer,
}

pub(super) async fn run(session: &Session, args: &Args, logs: &Path) -> Result<Environment> {
    let program = builds::driver_programs(session, ProgramProfile::Release).await?.provisioner;
    let peer = HostPeer::build(session).await?;
    let driver = peer::memory_controller(session).await?;
    let counts: &[u64] = args.size(&[0, 1000, 10_000, 100_000], &[0, 1000]);
    let (lives, rounds) = args.size((100, 3), (20, 1));
    let measure = async |control_plane: &ControlPlane, kubeconfigs: &Path| {
        let step = session.progress.step("install the component claim-labels");
        let client = control_plane.client();
        claims::install_labels(session, client).await?;
        let claims = Claims::new(client, OTHER_NODE);
        claims.until_labelled().await?;
        let installation = Installation::of_provisioner(program, driver, control_plane, kubeconfigs).await?;
        control_plane.stop_controller_manager().await?;
        step.done("");
        let mut bench = Bench {
            installation,
            peer: &peer,
            control_plane,
            claims,
            logs,
            lives,
            samples: Samples::default(),
        };
        for count in counts {
            let step =
                session.progress.step(format!("create claims of {OTHER_NODE} until there are {count}"));
            bench.claims.create_up_to(*count, &step).await?;
            step.done("");
            let title = format!("measure the provisioner of {NODE} and its peer beside {count} claims");
            let step = session.progress.step(title);
            let contenders =
                [("labels", Contender::Labels), ("all", Contender::All), ("peer", Contender::Peer)];
            take_turns(1..=rounds, &contenders, &step, async |contender, round| {
                Box::pin(bench.turn(contender, *count, round)).await
            })
            .await?;
            step.done("");
        }
        Ok(bench.samples)
    };
    beside_control_plane(session, logs, &format!("{PLACE}; peer: {}", peer::sidecars()), measure).await
}

pub(super) fn requirements() -> Vec<Requirement> {
    let independent = |what: &str, row: &str| {
        let text = format!(
            "{what} with claim labels, beside {{n}} claims of another node: at most 1.1 times those without such claims"
        );
        grows_at_most(&text, &format!("labels_{row}"), 1.1)
    };
    vec![
        independent("bytes that a node receives at its start", START),
        independent("bytes of a provisioner's memory", RSS),
        independent("requests of an idle provisioner", IDLE),
        // Each event of a claim that a process watches takes more than a thousand bytes. Fewer or more bookmarks may arrive than
        // while nothing happens.
        no_more(
            "bytes that a node with claim labels receives for the life of a claim of another node: at most 100",
            &format!("labels_{FOREIGN_CLAIM}"),
            100.0,
        ),
    ]
}

/// The contenders, and the claims of the other node.
struct Bench<'a> {
    installation: Installation<'a>,
    peer: &'a HostPeer,
    control_plane: &'a ControlPlane,
    claims: Claims,
    logs: &'a Path,
    /// The number of claims that are created and deleted while the processes run.
    lives: u64,
    samples: Samples,
}

impl Bench<'_> {
    /// Starts a contender beside `count` claims, measures and stops it.
    async fn turn(&mut self, contender: Contender, count: u64, round: u64) -> Result<()> {
        let log = |name: &str| self.logs.join(format!("{name}-{count}-{round}.log"));
        let ours = async |labels, name: &str| {
            self.installation.start_provisioner(labels, &log(&format!("provisioner-{name}"))).await
        };
        let processes = match contender {
            Contender::Labels => vec![("labels", ours(Some(claim_labels::NAME), "labels").await?)],
            Contender::All => vec![("all", ours(None, "all").await?)],
            Contender::Peer => {
                let (log, resizer_log) = (log(peer::PROVISIONER), log(peer::RESIZER));
                let (provisioner, resizer) = tokio::try_join!(
                    start_sidecar(self.peer, self.control_plane, peer::PROVISIONER, &log),
                    start_sidecar(self.peer, self.control_plane, peer::RESIZER, &resizer_log),
                )?;
                provisioner.until_idle().await?;
                resizer.until_idle().await?;
                vec![("peer_csi_provisioner", provisioner), ("peer_csi_resizer", resizer)]
            }
        };
        self.measure(count, &processes).await?;
        for (_, process) in processes {
            process.stop().await?;
        }
        Ok(())
    }

    /// Measures the processes of a contender, which have just started.
    async fn measure(&mut self, count: u64, processes: &[(&str, Observed)]) -> Result<()> {
        let mut values = Vec::new();
        for (_, process) in processes {
            values.push((process.received() as f64, process.memory(CURRENT)?));
        }
        let idle = try_join_all(processes.iter().map(|(_, process)| process.idle(IDLE_TIME))).await?;
        let before: Vec<u64> = processes.iter().map(|(_, process)| process.received()).collect();
        let since = Instant::now();
        for _ in 0..self.lives {
            self.claims.live().await?;
        }
        let mut of_each = Vec::new();
        for (index, (name, process)) in processes.iter().enumerate() {
            let received = process.until_idle().await? - before[index];
            let foreign = idle[index].without(received, since.elapsed()) / self.lives as f64;
            let (start, rss) = values[index];
            of_each.push((*name, [start, rss, idle[index].requests_per_minute, foreign]));
        }
        add(&mut self.samples, count, &of_each);
        Ok(())
    }
}

/// Adds the values of each process, and the sums of the processes of the peer.
fn add(samples: &mut Samples, count: u64, of_each: &[(&str, [f64; 4])]) {
    let rows = [(START, "B"), (RSS, "B"), (IDLE, "requests/min"), (FOREIGN_CLAIM, "B")];
    let mut all = of_each.to_vec();
    if let [(_, one), (_, other)] = of_each {
        all.insert(0, ("peer", std::array::from_fn(|index| one[index] + other[index])));
    }
    for (name, values) in all {
        for ((row, unit), value) in rows.into_iter().zip(values) {
            samples.add(format!("{name}_{row}"), count, unit, value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_contender_has_its_own_rows() {
        let mut samples = Samples::default();
        add(&mut samples, 7, &[("labels", [1.0, 1.0, 0.0, 0.0])]);
        let of_peer =
            [("peer_csi_provisioner", [1.0, 1.5, 2.0, 3.0]), ("peer_csi_resizer", [10.0, 10.0, 0.0, 4.0])];
        add(&mut samples, 7, &of_peer);
        let rows: Vec<_> = samples.0.into_iter().map(|row| (row.median(), row.name)).collect();
        let expected = [
            (1.0, "labels_start_bytes"),
            (1.0, "labels_rss_bytes"),
            (0.0, "labels_idle_requests_per_minute"),
            (0.0, "labels_foreign_claim_bytes"),
            (11.0, "peer_start_bytes"),
            (11.5, "peer_rss_bytes"),
            (2.0, "peer_idle_requests_per_minute"),
            (7.0, "peer_foreign_claim_bytes"),
            (1.0, "peer_csi_provisioner_start_bytes"),
        ];
        assert_eq!(rows[..9], expected.map(|(value, name)| (value, name.to_owned())));
        assert_eq!(rows.len(), 16);
    }
}

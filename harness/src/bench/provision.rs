//! `bench provision`: many concurrent claims on a real cluster, compared with external-provisioner.
//!
//! The peer is external-provisioner and external-resizer with the CSI controller of this driver. The provisioner does the work of
//! both, on the same node, with the same disk and API server. Both bind through the same
//! kube-controller-manager, and take turns. They differ only in the program that turns claims into volumes.

use std::time::Duration;

use anyhow::Result;
use testvm::session::Session;
use testvm_cluster::{Cluster, Node, TOOLS_DIR};

use super::args::Args;
use super::audit_log::AuditLog;
use super::cluster::{self, OUR_PROGRAMS};
use super::measurement::{Environment, Samples};
use super::memory;
use super::peer::{self, Limits, NodePeer};
use super::threshold::{Requirement, at_least, no_more};
use super::turns::{Contender, OURS, PEER, UNTHROTTLED_PEER, take_turns};
use crate::node_options::NodeOptions;

/// The timeout for one claim and the start of a provisioner.
const WARM_UP_TIMEOUT: Duration = Duration::from_secs(120);
/// The timeout for all claims with a provisioner that is limited to five requests a second.
const BIND_TIMEOUT: Duration = Duration::from_secs(900);

pub(super) async fn run(session: &Session, args: &Args) -> Result<Environment> {
    let (claims, rounds) = args.size((500, 1), (50, 2));
    let tools = peer::tools(session).await?;
    let measure = async |cluster: &Cluster, node: &Node| {
        let step = session.progress.step("install the peer");
        let peer = NodePeer::install(cluster, node).await?;
        step.done("");
        let title = format!("measure {claims} concurrent claims, with each contender in turn");
        let step = session.progress.step(title);
        let bench = Bench { cluster, node, peer: &peer, claims };
        let mut samples = Samples::default();
        let contenders = [("ours", OURS), ("the peer", PEER), ("the peer without limits", UNTHROTTLED_PEER)];
        let measured = take_turns(1..=rounds, &contenders, &step, async |contender, round| {
            bench.turn(contender, round, &mut samples).await
        })
        .await;
        // The logs are saved also if the measurement failed.
        peer.save_logs(cluster.control_plane().layout().logs()).await?;
        measured?;
        step.done("");
        Ok(samples)
    };
    let mut part =
        cluster::measured(session, args, "provision", NodeOptions::default(), &tools, measure).await?;
    part.place = format!("{}; peer: {} with the CSI controller of loopfs-csi", part.place, peer::sidecars());
    Ok(part)
}

pub(super) fn requirements() -> Vec<Requirement> {
    vec![
        at_least(
            "{n} concurrent claims: 3 times the claims per second of external-provisioner with its default limits",
            "claims_per_second",
            3.0,
            "peer_claims_per_second",
        ),
        at_least(
            "memory of provisioner and driver: sidecars and driver take at least 3 times as much",
            "peer_rss_bytes",
            3.0,
            "rss_bytes",
        ),
        no_more("API writes for a claim besides events: at most 3", "api_writes_per_claim", 3.0),
    ]
}

struct Bench<'a> {
    cluster: &'a Cluster,
    node: &'a Node,
    peer: &'a NodePeer<'a>,
    claims: u64,
}

impl Bench<'_> {
    /// Has a contender provision a batch, and removes the batch.
    async fn turn(&self, contender: Contender, round: u64, samples: &mut Samples) -> Result<()> {
        let peer_paths =
            [peer::PROVISIONER, peer::RESIZER, peer::DRIVER].map(|name| format!("{TOOLS_DIR}/{name}"));
        let peer_paths: Vec<&str> = peer_paths.iter().map(String::as_str).collect();
        let programs = if contender == OURS { OUR_PROGRAMS.as_slice() } else { &peer_paths };
        let mut sidecars = None;
        if contender != OURS {
            let limits = if contender == PEER { Limits::Default } else { Limits::Lifted };
            sidecars = Some(self.peer.start(limits).await?);
        }
        let (client, node) = (self.cluster.client(), self.node.name());
        // After one claim is bound, the provisioner has started and filled its caches.
        let warm_up = contender.batch(client, node, "first", round, 1);
        warm_up.create_and_bind(WARM_UP_TIMEOUT).await?;

        let batch = contender.batch(client, node, "all", round, self.claims);
        let log = AuditLog::of(self.cluster.control_plane().layout());
        let log_end = log.end()?;
        let time = batch.create_and_bind(BIND_TIMEOUT).await?;
        let writes = log.requests(log_end, contender.user)?.writes;
        // Each claim takes at least one write. If there are fewer, the contender has another user name in the log.
        anyhow::ensure!(
            writes >= self.claims,
            "the audit log has {writes} writes of {} for {} claims",
            contender.user,
            self.claims
        );
        let peak: u64 = memory::of(self.node, memory::PEAK, programs).await?.iter().sum();
        let claims = self.claims as f64;
        let values = [
            ("claims_per_second", "claims/s", claims / time.as_secs_f64()),
            ("rss_bytes", "B", peak as f64),
            ("api_writes_per_claim", "writes", writes as f64 / claims),
        ];
        contender.add(samples, self.claims, &values);

        if contender == PEER {
            // With its rate limits, the deletion would take the longest part of the run.
            if let Some(limited) = sidecars.take() {
                limited.stop().await?;
            }
            sidecars = Some(self.peer.start(Limits::Lifted).await?);
        }
        batch.delete().await?;
        warm_up.delete().await?;
        match sidecars {
            Some(sidecars) => sidecars.stop().await,
            None => Ok(()),
        }
    }
}

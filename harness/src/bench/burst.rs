//! `bench burst`: many concurrent claims on one node, compared with external-provisioner without its rate limits.
//!
//! Both contenders are processes of this machine beside a control plane without nodes. Their volumes are in memory, so only the
//! programs and the API server are compared. The provisioner is that of its live tests. The peer is external-provisioner alone, beside
//! a CSI controller of which each call returns at once. They take turns, and only one of them runs at a time.
//!
//! The bench selects the node of each claim, as the scheduler does. kube-controller-manager names the provisioner of each claim before
//! its volume is created, and binds the two. It has no rate limit.
//!
//! The peer has the advantages: the administrator's rights, which the API server neither looks up nor queues, and no processor time of
//! its CSI controller is charged to it. The provisioner has the rights of the manifests.

use std::path::Path;
use std::time::Duration;

use anyhow::Result;
use testvm::session::Session;
use testvm_cluster::{ClusterProfile, ControlPlane};

use super::args::Args;
use super::audit_log::AuditLog;
use super::measurement::{Environment, Samples, milliseconds};
use super::metrics;
use super::peer::{self, HostPeer, HostSidecar, Limits};
use super::process::{self, IN_MEMORY, NODE};
use super::threshold::{self, Requirement};
use super::turns::{Contender, OURS, PEER, take_turns};
use crate::fake_nodes::{self, LiveTests};

/// The timeout for one claim and the start of a contender.
const WARM_UP_TIMEOUT: Duration = Duration::from_secs(120);
/// The timeout for all claims, on a busy machine.
const BIND_TIMEOUT: Duration = Duration::from_secs(300);

pub(super) async fn run(session: &Session, args: &Args) -> Result<Environment> {
    let (claims, rounds) = args.size((500, 5), (50, 3));
    let peer = HostPeer::build(session).await?;
    let program = fake_nodes::build_live_tests(session, ClusterProfile::Benchmark).await?;
    let logs = session.workspace.reports("bench").join("burst");
    let measure = async |control_plane: &ControlPlane, kubeconfigs: &Path| {
        peer::create_objects(control_plane.client()).await?;
        let title = format!("measure {claims} concurrent claims, with each contender in turn");
        let step = session.progress.step(title);
        let tests = LiveTests::new(program, control_plane, kubeconfigs);
        let bench = Bench { tests, peer: &peer, control_plane, logs: &logs, claims };
        let mut samples = Samples::default();
        // Round 0 fills the caches of the control plane. It is not measured, because the contender that begins would be slower.
        take_turns(0..=rounds, &[("ours", OURS), ("the peer", PEER)], &step, async |contender, round| {
            bench.turn(contender, round, (round > 0).then_some(&mut samples)).await
        })
        .await?;
        step.done("");
        Ok(samples)
    };
    let place = format!("{IN_MEMORY}; peer: {} without rate limits", peer::provisioner());
    process::beside_control_plane(session, &logs, &place, measure).await
}

pub(super) fn requirements() -> Vec<Requirement> {
    let text = "{n} concurrent claims until all PersistentVolumes exist: 3 times the claims per second of external-provisioner \
                without rate limits";
    vec![threshold::at_least(text, "claims_per_second", 3.0, "peer_claims_per_second")]
}

struct Bench<'a> {
    tests: LiveTests,
    peer: &'a HostPeer,
    control_plane: &'a ControlPlane,
    logs: &'a Path,
    claims: u64,
}

impl Bench<'_> {
    /// Starts a contender, has it provision a batch, removes the batch and stops the contender.
    async fn turn(&self, contender: Contender, round: u64, samples: Option<&mut Samples>) -> Result<()> {
        if contender == OURS {
            let mut process = process::start_provisioner(&self.tests, self.logs)?;
            let measured = self.provision(contender, process.id(), round, samples);
            process.during(Box::pin(measured)).await?;
            return process.stop(process::STOP_GRACE).await;
        }
        let workers = format!("--worker-threads={}", self.claims);
        let sidecar = HostSidecar {
            name: peer::PROVISIONER,
            caller: peer::SUBJECT,
            driver: peer::DRIVER_NAME,
            limits: Limits::Lifted,
            option: &workers,
            is_proxied: false,
        };
        let log = self.logs.join("peer-provisioner.log");
        let mut process = self.peer.start(self.control_plane, sidecar, &log).await?;
        let measured = self.provision(contender, process.id(), round, samples);
        process.during(Box::pin(measured)).await?;
        process.stop_in_any_way(peer::STOP_GRACE).await.map(drop)
    }

    async fn provision(
        &self,
        contender: Contender,
        process: i32,
        round: u64,
        samples: Option<&mut Samples>,
    ) -> Result<()> {
        let client = self.control_plane.client();
        // After one claim is bound, the contender has started and filled its caches.
        let warm_up = contender.batch(client, NODE, "first", round, 1);
        warm_up.create_and_bind(WARM_UP_TIMEOUT).await?;

        let batch = contender.batch(client, NODE, "all", round, self.claims);
        let log = AuditLog::of(self.control_plane.layout());
        let log_end = log.end()?;
        let api_server_time = async || metrics::processor_time(&metrics::of_api_server(client).await?);
        let (time, api_time) = (process::processor_time(process)?, api_server_time().await?);
        let times = batch.create_and_provision(BIND_TIMEOUT).await?;
        let time = process::processor_time(process)?.saturating_sub(time);
        // With the time for the requests of kube-controller-manager and of the bench.
        let api_time = api_server_time().await?.saturating_sub(api_time);
        let requests = log.requests(log_end, contender.user)?;
        batch.delete().await?;
        warm_up.delete().await?;

        let Some(samples) = samples else { return Ok(()) };
        let claims = self.claims as f64;
        let values = [
            ("claims_per_second", "claims/s", claims / times.provisioned.as_secs_f64()),
            ("bound_claims_per_second", "claims/s", claims / times.bound.as_secs_f64()),
            // No contender can be faster.
            ("created_claims_per_second", "claims/s", claims / times.created.as_secs_f64()),
            ("api_writes_per_claim", "writes", requests.writes as f64 / claims),
            ("api_event_writes_per_claim", "writes", requests.event_writes as f64 / claims),
            ("api_reads_per_claim", "reads", requests.reads as f64 / claims),
            ("cpu_per_claim", "ms", milliseconds(time) / claims),
            ("api_server_cpu_per_claim", "ms", milliseconds(api_time) / claims),
        ];
        contender.add(samples, self.claims, &values);
        Ok(())
    }
}

//! The tasks of the process with the role `controller`.

use futures::future::OptionFuture;
use kube::Client;
use service::{Listeners, Tasks};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::health_endpoints::{ControllerHealthEndpoints, DutyReports};
use super::pending_claims::PendingClaims;
use super::registered_nodes::RegisteredNodes;
use super::{builtin, immediate, lease, lost_snapshots, node_loss, unready_nodes, wrong_selections};
use crate::api::cluster::Cluster;
use crate::api::events::{self, Events};
use crate::api::policies::{self, Forbidden};
use crate::api::traffic::ApiTraffic;
use crate::claim_labels::labeller;
use crate::claim_labels::labels::LabelRecordSource;
use crate::loss::NodeLoss;
use crate::objects::identity::Identity;

/// The duties of a replica, once it leads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Duties {
    /// The ConfigMap that declares the built-in objects.
    pub(crate) builtin: Option<builtin::DeclarationSource>,
    /// Where to record that all claims are labelled with their nodes.
    pub(crate) claim_labels: Option<LabelRecordSource>,
    pub(crate) node_loss: node_loss::NodeLossSettings,
    pub(crate) unready_nodes: unready_nodes::Timing,
}

/// The parts that the process is created from.
pub(crate) struct ControllerProcessParts {
    pub(crate) client: Client,
    /// The driver, and the node that this replica runs on.
    pub(crate) identity: Identity,
    pub(crate) candidate: lease::Candidate,
    pub(crate) duties: Duties,
    /// The listeners for health and metrics, and what the client observes of its requests.
    pub(crate) monitoring: Option<(Listeners, ApiTraffic)>,
}

/// Spawns all tasks of the process.
pub(crate) fn spawn(parts: ControllerProcessParts, stop: CancellationToken) -> Tasks {
    let ControllerProcessParts { client, identity, candidate, duties, monitoring } = parts;
    let (events, event_requests) = Events::new(identity.node());
    let cluster = Cluster { client: client.clone(), identity: identity.clone(), events };
    let (leads, policies) = (watch::Sender::new(false), watch::Sender::new(None));
    let reports = DutyReports::default();
    let leading = leads.subscribe();

    let mut tasks = Tasks::new(stop.clone());
    if let Some((listeners, traffic)) = monitoring {
        let endpoints = ControllerHealthEndpoints {
            events: cluster.events.counter().clone(),
            traffic,
            leads: leads.subscribe(),
            reports: reports.clone(),
            policies: policies.subscribe(),
        };
        tasks.spawn("health", service::serve_health(listeners, endpoints, stop.clone()));
    }
    let forbidden = Forbidden::AnotherLease { namespace: candidate.namespace.clone() };
    let of_check = cluster.clone();
    let checking = async move { policies::check(&of_check, &forbidden, &policies).await };
    tasks.spawn_until_stop("policies", checking);
    let performing = perform_while_leading(cluster, duties, leading, reports);
    tasks.spawn_until_stop("duties", performing);
    tasks.spawn("lease", lease::compete(client.clone(), candidate, leads, stop));
    // Ends after the other tasks, when no recorder is left, so that their last events are written too.
    tasks.spawn("events", events::publish(client, identity, event_requests));
    tasks
}

/// Performs the duties whenever this replica leads. When it ceases to, the duties end between two steps, as after a crash.
async fn perform_while_leading(
    cluster: Cluster,
    duties: Duties,
    mut leads: watch::Receiver<bool>,
    reports: DutyReports,
) {
    loop {
        // An error means that the task which competes for the Lease has ended. That ends the process.
        if leads.wait_for(|leads| *leads).await.is_err() {
            return std::future::pending().await;
        }
        tracing::info!("this replica leads");
        tokio::select! {
            () = perform(&cluster, &duties, &reports) => return,
            _ = async { leads.wait_for(|leads| !*leads).await.is_ok() } => {
                reports.reset();
                tracing::info!("this replica does not lead any more");
            }
        }
    }
}

async fn perform(cluster: &Cluster, duties: &Duties, reports: &DutyReports) {
    let (nodes, node_cache) = RegisteredNodes::new();
    let (claims, claim_cache) = PendingClaims::new();
    let checking_nodes = async {
        if duties.node_loss.mode != NodeLoss::Off {
            node_loss::run(cluster, &nodes, duties.node_loss, &reports.lost_volumes).await;
        }
    };
    let releasing_snapshots = async {
        if duties.node_loss.mode == NodeLoss::Enforce {
            lost_snapshots::run(cluster, &nodes).await;
        }
    };
    // The watches do not end.
    tokio::join!(
        nodes.watch(cluster, node_cache),
        claims.watch(cluster, claim_cache),
        immediate::run(cluster, &nodes, &claims, &reports.performs),
        wrong_selections::run(cluster, &nodes, &claims),
        unready_nodes::run(cluster, &nodes, duties.unready_nodes, &reports.unready_volumes),
        checking_nodes,
        releasing_snapshots,
        OptionFuture::from(duties.builtin.as_ref().map(|source| builtin::run(cluster, source))),
        OptionFuture::from(duties.claim_labels.as_ref().map(|source| labeller::run(cluster, source))),
    );
}

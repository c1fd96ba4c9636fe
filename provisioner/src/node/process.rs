//! The tasks of the process with the role `node`.

use std::sync::Arc;

use k8s_openapi::jiff::Timestamp;
use kube::Client;
use kube::runtime::reflector;
use service::{Listeners, Tasks};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::api::cluster::Cluster;
use crate::api::events::{self, Events};
use crate::api::policies::{self, Forbidden};
use crate::api::traffic::ApiTraffic;
use crate::claim_labels::labels::LabelRecordSource;
use crate::loss::NodeLoss;
use crate::node::capacity::{self, CapacityConfig};
use crate::node::context::Context;
use crate::node::health_endpoints::NodeHealthEndpoints;
use crate::node::{audit, claims, classes, cleanup, lost_disk, persistent_volumes, storage_watch};
use crate::objects::identity::Identity;
use crate::store::driver::Driver;

/// The optional duties of a node's provisioner.
#[derive(Debug, Clone, Default)]
pub(crate) struct Options {
    /// Where to publish the capacity of this node.
    pub(crate) capacity: Option<CapacityConfig>,
    /// What to do about volumes on a disk that the node does not have any more.
    pub(crate) node_loss: NodeLoss,
    /// The record that all claims have labels, with which this node watches only its own.
    pub(crate) claim_labels: Option<LabelRecordSource>,
    /// How to audit volumes and PersistentVolumes.
    pub(crate) audit: Option<audit::AuditSettings>,
}

/// The parts that the process is created from.
pub(crate) struct NodeProcessParts {
    pub(crate) client: Client,
    pub(crate) identity: Identity,
    pub(crate) driver: Arc<dyn Driver>,
    pub(crate) options: Options,
    /// The listeners for health and metrics, and what the client observes of its requests.
    pub(crate) monitoring: Option<(Listeners, ApiTraffic)>,
}

/// Spawns all tasks of the process.
pub(crate) fn spawn(parts: NodeProcessParts, stop: CancellationToken) -> Tasks {
    let NodeProcessParts { client, identity, driver, options, monitoring } = parts;
    let (events, event_requests) = Events::new(identity.node());
    let cluster = Cluster { client: client.clone(), identity: identity.clone(), events };
    let (claims, claim_cache) = reflector::store();
    let (volumes, volume_cache) = reflector::store();
    let (classes, class_cache) = reflector::store();
    let ctx = Arc::new(Context::new(cluster, driver, claims, volumes, classes, Timestamp::now));
    let (related, claims_of_volumes) = mpsc::unbounded_channel();

    let mut tasks = Tasks::new(stop.clone());
    tasks.spawn(
        "claims",
        claims::run(Arc::clone(&ctx), claim_cache, claims_of_volumes, stop.clone().cancelled_owned()),
    );
    tasks.spawn(
        "volumes",
        persistent_volumes::run(
            Arc::clone(&ctx),
            volume_cache,
            related.clone(),
            stop.clone().cancelled_owned(),
        ),
    );
    tasks.spawn_until_stop("classes", classes::run(Arc::clone(&ctx), class_cache, related));
    tasks.spawn_until_stop("storage", storage_watch::run(Arc::clone(&ctx)));
    let of_check = Arc::clone(&ctx);
    let checking = async move {
        policies::check(&of_check.cluster, &Forbidden::VolumeOfAnotherNode, &of_check.policies).await;
    };
    tasks.spawn_until_stop("policies", checking);
    let Options { capacity: capacity_config, node_loss, claim_labels, audit } = options;
    let of_scope = Arc::clone(&ctx);
    let selecting = async move { of_scope.claim_scope.follow(&of_scope.cluster, claim_labels).await };
    tasks.spawn_until_stop("claim scope", selecting);
    if let Some(settings) = audit {
        tasks.spawn_until_stop("audit", audit::run(Arc::clone(&ctx), settings));
    }
    if node_loss != NodeLoss::Off {
        tasks.spawn_until_stop("lost disks", lost_disk::run(Arc::clone(&ctx), node_loss));
    }
    match capacity_config {
        Some(config) => {
            let (_, cache) = reflector::store();
            tasks.spawn_until_stop("capacity", capacity::run(Arc::clone(&ctx), config, cache));
        }
        None => tracing::info!("the capacity of this node is not published: no --pod-namespace is given"),
    }
    if let Some((listeners, traffic)) = monitoring {
        let endpoints = NodeHealthEndpoints { ctx: Arc::clone(&ctx), traffic };
        tasks.spawn("health", service::serve_health(listeners, endpoints, stop));
    }
    tasks.spawn_until_stop("cleanup", cleanup::run(ctx));
    // Ends after the other tasks, when no recorder is left, so that their last events are written too.
    tasks.spawn("events", events::publish(client, identity, event_requests));
    tasks
}

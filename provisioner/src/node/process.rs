//! The tasks of the process with the role `node`.

use std::sync::Arc;

use k8s_openapi::jiff::Timestamp;
use kube::{Client, runtime::reflector};
use monitoring::Listeners;
use tokio::{sync::mpsc, task::JoinSet};
use tokio_util::sync::CancellationToken;

use crate::{
    api::{
        cluster::Cluster,
        events::{self, Events},
        policies::{self, Forbidden},
        traffic::ApiTraffic,
    },
    loss::NodeLoss,
    node::{
        audit,
        capacity::{self, CapacityConfig},
        claim_scope::ClaimScope,
        claims, classes, cleanup,
        context::Context,
        health_endpoints::NodeHealthEndpoints,
        label_record, lost_disk, persistent_volumes, storage_watch,
    },
    objects::{claim_labels, identity::Identity},
    store::driver::Driver,
    tasks::{named, until},
};

/// The optional duties of a node's provisioner.
#[derive(Debug, Clone, Default)]
pub(crate) struct Options {
    /// Where to publish the capacity of this node.
    pub(crate) capacity: Option<CapacityConfig>,
    /// What to do about volumes on a disk that the node does not have any more.
    pub(crate) node_loss: NodeLoss,
    /// The record that all claims have labels, with which this node watches only its own.
    pub(crate) claim_labels: Option<claim_labels::LabelRecordSource>,
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

/// Spawns all tasks of the process. The first task to end, for whatever reason, ends the process.
pub(crate) fn spawn(parts: NodeProcessParts) -> (JoinSet<&'static str>, CancellationToken) {
    let NodeProcessParts { client, identity, driver, options, monitoring } = parts;
    let (events, event_requests) = Events::new(identity.node());
    let cluster = Cluster { client: client.clone(), identity: identity.clone(), events };
    let (claims, claim_cache) = reflector::store();
    let (volumes, volume_cache) = reflector::store();
    let (classes, class_cache) = reflector::store();
    let ctx = Arc::new(Context::new(cluster, driver, claims, volumes, classes, Timestamp::now));
    let (related, claims_of_volumes) = mpsc::unbounded_channel();
    let stop = CancellationToken::new();

    let mut tasks = JoinSet::new();
    tasks.spawn(named(
        "claims",
        claims::run(Arc::clone(&ctx), claim_cache, claims_of_volumes, stop.clone().cancelled_owned()),
    ));
    tasks.spawn(named(
        "volumes",
        persistent_volumes::run(
            Arc::clone(&ctx),
            volume_cache,
            related.clone(),
            stop.clone().cancelled_owned(),
        ),
    ));
    tasks.spawn(named("classes", until(stop.clone(), classes::run(Arc::clone(&ctx), class_cache, related))));
    tasks.spawn(named("storage", until(stop.clone(), storage_watch::run(Arc::clone(&ctx)))));
    tasks.spawn(named("policies", until(stop.clone(), check_policies(Arc::clone(&ctx)))));
    let Options { capacity: capacity_config, node_loss, claim_labels, audit } = options;
    match claim_labels {
        Some(source) => {
            let watching = label_record::run(Arc::clone(&ctx), source);
            tasks.spawn(named("label record", until(stop.clone(), watching)));
        }
        None => ctx.claim_scope.set(ClaimScope::All),
    }
    if let Some(settings) = audit {
        let auditing = audit::run(Arc::clone(&ctx), settings);
        tasks.spawn(named("audit", until(stop.clone(), auditing)));
    }
    if node_loss != NodeLoss::Off {
        let checking = lost_disk::run(Arc::clone(&ctx), node_loss);
        tasks.spawn(named("lost disks", until(stop.clone(), checking)));
    }
    match capacity_config {
        Some(config) => {
            let (_, cache) = reflector::store();
            let publishing = capacity::run(Arc::clone(&ctx), config, cache);
            tasks.spawn(named("capacity", until(stop.clone(), publishing)));
        }
        None => tracing::info!("the capacity of this node is not published: no --pod-namespace is given"),
    }
    if let Some((listeners, traffic)) = monitoring {
        let endpoints = NodeHealthEndpoints::new(Arc::clone(&ctx), traffic);
        tasks.spawn(named("monitoring", monitoring::serve(listeners, endpoints, stop.clone())));
    }
    tasks.spawn(named("cleanup", until(stop.clone(), cleanup::run(ctx))));
    // Ends after the other tasks, when no recorder is left, so that their last events are written too.
    tasks.spawn(named("events", events::publish(client, identity, event_requests)));
    (tasks, stop)
}

async fn check_policies(ctx: Arc<Context>) {
    policies::check(&ctx.cluster, &Forbidden::VolumeOfAnotherNode, &ctx.policies).await;
}

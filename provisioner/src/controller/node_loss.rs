//! Finds deleted nodes, and reconciles the PersistentVolumes whose data is on them.
//!
//! A node counts as deleted when its Node object does not exist. A node that is not ready, for however long, may come back with all
//! its data.
//!
//! The replica that leads checks. If two replicas act anyway, each deletion is conditional on the object being unchanged since
//! the decision.
//!
//! `docs/decisions/0023-deleted-nodes.md` gives the reasons.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::{Duration, Instant},
};

use k8s_openapi::api::core::v1::PersistentVolume;
use kube::api::ListParams;
use tokio::time::timeout;

use super::registered_nodes::RegisteredNodes;
use crate::{
    api::cluster::Cluster,
    error::Error,
    loss::{LossReconciler, LostStorage, NodeLoss, POLL_INTERVAL, is_node_deleted},
};

/// Wait after an error of the API server.
const RETRY_INTERVAL: Duration = Duration::from_secs(5);
/// Wait after an event of a CSINode: a change of the nodes comes as several events.
const DEBOUNCE: Duration = Duration::from_millis(500);

/// Checks for deleted nodes until shutdown.
pub(crate) async fn run(cluster: &Cluster, nodes: &RegisteredNodes, mode: NodeLoss) {
    nodes.synced.wait().await;
    let mut changes = nodes.changes();
    let losses = LossReconciler::new(cluster, mode);
    let mut controller = NodeLossController { cluster, nodes, losses };
    loop {
        let wait = match controller.reconcile(Instant::now()).await {
            Ok(next) => next.unwrap_or(POLL_INTERVAL).min(POLL_INTERVAL),
            Err(error) => {
                tracing::warn!(
                    %error,
                    "could not check for deleted nodes; the next check is in {RETRY_INTERVAL:?}"
                );
                RETRY_INTERVAL
            }
        };
        if timeout(wait, changes.changed()).await.is_ok() {
            tokio::time::sleep(DEBOUNCE).await;
        }
    }
}

struct NodeLossController<'a> {
    cluster: &'a Cluster,
    nodes: &'a RegisteredNodes,
    losses: LossReconciler<'a>,
}

impl NodeLossController<'_> {
    /// Checks once. Returns the time after which a volume has to be checked again, if no event announces that.
    ///
    /// # Errors
    /// When the nodes or the PersistentVolumes cannot be read from the API server.
    async fn reconcile(&mut self, now: Instant) -> Result<Option<Duration>, Error> {
        let mut lost: BTreeMap<LostStorage, Vec<Arc<PersistentVolume>>> = BTreeMap::new();
        for name in self.unregistered_nodes().await? {
            if is_node_deleted(self.cluster, &name).await? {
                let volumes = self.volumes_of(&name).await?;
                lost.insert(LostStorage::Node(name), volumes);
            }
        }
        Ok(self.losses.reconcile(lost, now).await)
    }

    /// Returns the nodes that PersistentVolumes of this driver are labelled with, but on which the driver is not registered.
    async fn unregistered_nodes(&self) -> Result<BTreeSet<String>, Error> {
        let label = self.cluster.identity.node_label();
        // From the API server's cache: a Node is read again before it counts as deleted.
        let labelled = ListParams::default().labels(&label).match_any();
        let volumes = self.cluster.volume_api().list_metadata(&labelled).await;
        let volumes = volumes.map_err(|error| Error::api("list", "the PersistentVolumes", error))?;
        let known = self.nodes.names(Instant::now());
        let nodes = volumes.items.into_iter().filter_map(|volume| volume.metadata.labels?.remove(&label));
        Ok(nodes.filter(|node| !known.contains(node)).collect())
    }

    async fn volumes_of(&self, node: &str) -> Result<Vec<Arc<PersistentVolume>>, Error> {
        let labelled = ListParams::default().labels(&self.cluster.identity.node_selector(node));
        let volumes = self.cluster.volume_api().list(&labelled).await;
        let volumes = volumes.map_err(|error| Error::api("list", "the PersistentVolumes", error))?;
        Ok(volumes.into_iter().map(|volume| Arc::new(volume.into_inner())).collect())
    }
}

#[cfg(test)]
mod tests;

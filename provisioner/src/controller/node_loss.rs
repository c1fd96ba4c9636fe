//! Finds deleted nodes, and reconciles the PersistentVolumes whose data is on them.
//!
//! A node counts as deleted when its Node object does not exist. A node that is not ready, for however long, may come back with all
//! its data.
//!
//! There is no leader election. A few nodes check for deleted nodes, so that the check does not depend on one of them. Their
//! names determine which nodes check, and each waits a little longer than the one before. If two nodes act anyway, each write is
//! conditional on the object being unchanged since the decision.
//!
//! `docs/decisions/0023-deleted-nodes.md` gives the reasons.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::{Duration, Instant},
};

use futures::StreamExt;
use k8s_openapi::api::{core::v1::PersistentVolume, storage::v1::CSINode};
use kube::{
    Api, ResourceExt,
    api::ListParams,
    runtime::{
        reflector::{self, Store},
        watcher,
    },
};
use tokio::{sync::Notify, time::timeout};

use crate::{
    api::{
        cluster::Cluster,
        jitter::fnv1a,
        queue::{self, CacheChange},
        signals::SyncSignal,
    },
    error::Error,
    loss::{LossReconciler, LostStorage, NodeLoss, POLL_INTERVAL, is_node_deleted},
    objects::identity::Identity,
};

/// This many nodes check for deleted nodes.
const MAX_CHECKING_NODES: usize = 3;
/// Each checking node waits this much longer than the one before.
const START_DELAY: Duration = Duration::from_secs(10);

/// Wait after an error of the API server.
const RETRY_INTERVAL: Duration = Duration::from_secs(5);
/// Wait after an event of a CSINode: a change of the nodes comes as several events.
const DEBOUNCE: Duration = Duration::from_millis(500);

/// Checks for deleted nodes until shutdown.
pub(crate) async fn run(cluster: Cluster, mode: NodeLoss) {
    let (nodes, cache) = reflector::store();
    let synced = SyncSignal::default();
    let changed = Notify::new();
    // A CSINode is written when a driver registers, and garbage collected with its Node. A Node is written all the time.
    let driver = cluster.identity.driver().to_owned();
    let runs_driver = move |node: &CSINode| node.spec.drivers.iter().any(|known| known.name == driver);
    let config = watcher::Config::default();
    let watching =
        queue::watch(Api::all(cluster.client.clone()), config, cache, runs_driver).for_each(|change| {
            if matches!(change, CacheChange::Listed) {
                synced.set();
            }
            changed.notify_one();
            std::future::ready(())
        });
    let checking = async {
        synced.wait().await;
        let losses = LossReconciler::new(&cluster, mode);
        let mut controller = NodeLossController { cluster: &cluster, nodes, losses };
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
            if timeout(wait, changed.notified()).await.is_ok() {
                tokio::time::sleep(DEBOUNCE).await;
            }
        }
    };
    tokio::join!(watching, checking);
}

struct NodeLossController<'a> {
    cluster: &'a Cluster,
    /// The nodes on which the driver is registered.
    nodes: Store<CSINode>,
    losses: LossReconciler<'a>,
}

impl NodeLossController<'_> {
    /// Checks once. Returns the time after which a volume has to be checked again, if no event announces that.
    ///
    /// # Errors
    /// When the nodes or the PersistentVolumes cannot be read from the API server.
    async fn reconcile(&mut self, now: Instant) -> Result<Option<Duration>, Error> {
        let order = check_order(&self.names(), &self.cluster.identity);
        let mut lost: BTreeMap<LostStorage, Vec<Arc<PersistentVolume>>> = BTreeMap::new();
        if order.is_some_and(|order| order < MAX_CHECKING_NODES) {
            for name in self.unregistered_nodes().await? {
                if is_node_deleted(self.cluster, &name).await? {
                    let volumes = self.volumes_of(&name).await?;
                    lost.insert(LostStorage::Node(name), volumes);
                }
            }
        }
        let start_delay = START_DELAY * u32::try_from(order.unwrap_or_default()).unwrap_or(u32::MAX);
        Ok(self.losses.reconcile(lost, start_delay, now).await)
    }

    fn names(&self) -> BTreeSet<String> {
        self.nodes.state().iter().map(|node| node.name_any()).collect()
    }

    /// Returns the nodes that PersistentVolumes of this driver are labelled with, but on which the driver is not registered.
    async fn unregistered_nodes(&self) -> Result<BTreeSet<String>, Error> {
        let label = self.cluster.identity.node_label();
        // From the API server's cache: a Node is read again before it counts as deleted.
        let labelled = ListParams::default().labels(&label).match_any();
        let volumes = self.cluster.volume_api().list_metadata(&labelled).await;
        let volumes = volumes.map_err(|error| Error::api("list", "the PersistentVolumes", error))?;
        let known = self.names();
        let nodes = volumes.items.into_iter().filter_map(|volume| volume.metadata.labels?.remove(&label));
        Ok(nodes.filter(|node| !known.contains(node) && node != self.cluster.identity.node()).collect())
    }

    async fn volumes_of(&self, node: &str) -> Result<Vec<Arc<PersistentVolume>>, Error> {
        let labelled =
            ListParams::default().labels(&format!("{}={node}", self.cluster.identity.node_label()));
        let volumes = self.cluster.volume_api().list(&labelled).await;
        let volumes = volumes.map_err(|error| Error::api("list", "the PersistentVolumes", error))?;
        Ok(volumes.into_iter().map(|volume| Arc::new(volume.into_inner())).collect())
    }
}

/// Returns the position of this node in the order in which nodes check. All nodes compute the same order. Returns `None` if
/// the driver is not registered on this node.
fn check_order(nodes: &BTreeSet<String>, identity: &Identity) -> Option<usize> {
    let mut ordered: Vec<_> = nodes.iter().map(|node| (fnv1a(&[identity.driver(), node]), node)).collect();
    ordered.sort_unstable();
    ordered.iter().position(|(_, node)| *node == identity.node())
}

#[cfg(test)]
mod tests;

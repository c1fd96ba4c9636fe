//! Finds deleted nodes, and reconciles the PersistentVolumes whose data is on them.
//!
//! A node counts as deleted when its Node object does not exist. A node that is not ready, for however long, may come back with all
//! its data.
//!
//! The replica that leads checks. If two replicas act anyway, each deletion is conditional on the object being unchanged since
//! the decision.
//!
//! `docs/decisions/0023-deleted-nodes.md` gives the reasons.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::PersistentVolume;
use kube::api::ListParams;
use prometheus_client::metrics::gauge::Gauge;
use tokio::time::timeout;

use super::registered_nodes::RegisteredNodes;
use crate::api::cluster::Cluster;
use crate::api::events::{Reason, some_names};
use crate::api::list;
use crate::error::Error;
use crate::loss::decision::begins_deletion;
use crate::loss::{LossReconciler, Lost, LostStorage, NodeLoss, POLL_INTERVAL, Witness, is_node_deleted};

/// Wait after an error of the API server.
const RETRY_INTERVAL: Duration = Duration::from_secs(5);
/// Wait after an event of a CSINode: a change of the nodes comes as several events.
const DEBOUNCE: Duration = Duration::from_millis(500);
/// Nodes that are missing for less than this time are missing at once, whatever is to become of their volumes.
const AT_ONCE: Duration = Duration::from_secs(3600);

/// When volumes of deleted nodes are reconciled, and how.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NodeLossSettings {
    pub(crate) mode: NodeLoss,
    /// If more than one node, and a larger share of the nodes with volumes, is deleted at once, nothing is deleted. It is then more likely
    /// that Node objects were deleted by mistake while their machines run.
    pub(crate) at_most_percent: u8,
    /// The shortest interval between two lists of the PersistentVolumes. A change of a CSINode leads to a check, and changes of many nodes
    /// follow each other, for example in an upgrade of the driver.
    pub(crate) list_interval: Duration,
}

/// The interval in a cluster.
pub(crate) const LIST_INTERVAL: Duration = Duration::from_secs(60);

/// Checks for deleted nodes until shutdown. Sets the number of volumes on deleted nodes.
pub(crate) async fn run(
    cluster: &Cluster,
    nodes: &RegisteredNodes,
    settings: NodeLossSettings,
    lost_volumes: &Gauge,
) {
    nodes.synced.wait().await;
    let mut changes = nodes.changes();
    let mut controller = NodeLossController::new(cluster, nodes, settings);
    loop {
        let wait = match controller.reconcile(Instant::now()).await {
            Ok(NodeLossCheck { volumes, next }) => {
                lost_volumes.set(volumes as i64);
                next.unwrap_or(POLL_INTERVAL).min(POLL_INTERVAL)
            }
            Err(error) => {
                tracing::warn!(
                    %error,
                    "could not check for deleted nodes; the next check is in {RETRY_INTERVAL:?}, and all grace times start again"
                );
                RETRY_INTERVAL
            }
        };
        if timeout(wait, changes.changed()).await.is_ok() {
            tokio::time::sleep(DEBOUNCE).await;
        }
    }
}

/// The result of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct NodeLossCheck {
    /// The number of volumes on deleted nodes.
    volumes: usize,
    /// The time after which a volume has to be checked again, if no event announces that.
    next: Option<Duration>,
}

/// The deleted nodes that a check finds.
struct DeletedNodes {
    /// The number of nodes with volumes.
    named: usize,
    lost: BTreeMap<LostStorage, Lost>,
    /// The time until the nodes with volumes are listed again, if this check did not list them.
    relisted_after: Option<Duration>,
}

impl Witness for &Cluster {
    async fn is_lost(&self, place: &LostStorage, _volume: &PersistentVolume) -> Result<bool, Error> {
        match place {
            LostStorage::Node(name) => is_node_deleted(self, name).await,
            // Only the node itself knows which disk it has.
            LostStorage::Disk(_) => Ok(false),
        }
    }
}

struct NodeLossController<'a> {
    cluster: &'a Cluster,
    nodes: &'a RegisteredNodes,
    settings: NodeLossSettings,
    /// The nodes with volumes, and when they were listed.
    named: Option<(Instant, BTreeSet<String>)>,
    /// When this process first saw that each node is missing.
    missing_since: BTreeMap<String, Instant>,
    losses: LossReconciler<'a, &'a Cluster>,
}

impl<'a> NodeLossController<'a> {
    fn new(cluster: &'a Cluster, nodes: &'a RegisteredNodes, settings: NodeLossSettings) -> Self {
        let losses = LossReconciler::new(cluster, cluster, settings.mode);
        NodeLossController { cluster, nodes, settings, named: None, missing_since: BTreeMap::new(), losses }
    }

    /// Checks once.
    ///
    /// # Errors
    /// When the nodes or the PersistentVolumes cannot be read from the API server. A node may then come back without being seen, so all
    /// grace times start again.
    async fn reconcile(&mut self, now: Instant) -> Result<NodeLossCheck, Error> {
        let found = self.find_lost(now).await;
        let DeletedNodes { named, lost, relisted_after } =
            found.inspect_err(|_error| self.losses.interrupted())?;
        let volumes = lost.values().map(|lost| lost.volumes.len()).sum();
        let next = if self.is_doubtful(&lost, named, now) {
            self.losses.interrupted();
            None
        } else {
            self.losses.reconcile(lost, now).await
        };
        // A node that has a volume only since the last list can be deleted too.
        Ok(NodeLossCheck { volumes, next: next.into_iter().chain(relisted_after).min() })
    }

    /// Lists the nodes with volumes, unless it has done so within the interval, and finds those that were deleted.
    async fn find_lost(&mut self, now: Instant) -> Result<DeletedNodes, Error> {
        let interval = self.settings.list_interval;
        let known = self.named.take().filter(|(listed, _)| now < *listed + interval);
        let relisted_after = known.as_ref().map(|(listed, _)| *listed + interval - now);
        let (listed, named) = match known {
            Some(known) => known,
            None => (now, self.named_nodes().await?),
        };
        let lost = self.deleted_nodes(&named, now).await;
        let (_, named) = self.named.insert((listed, named));
        Ok(DeletedNodes { named: named.len(), lost: lost?, relisted_after })
    }

    /// Returns the nodes that PersistentVolumes of this driver are labelled with.
    async fn named_nodes(&self) -> Result<BTreeSet<String>, Error> {
        let label = self.cluster.identity.node_label();
        let labelled = ListParams::default().labels(&label);
        let volumes = self.cluster.volume_api();
        let named = list::of_metadata(&volumes, labelled, |volume| volume.labels?.remove(&label)).await;
        named.map_err(|error| Error::api("list", "the PersistentVolumes", error))
    }

    /// Returns those of the nodes that were deleted, with their volumes.
    async fn deleted_nodes(
        &self,
        named: &BTreeSet<String>,
        now: Instant,
    ) -> Result<BTreeMap<LostStorage, Lost>, Error> {
        let known = self.nodes.names(now);
        let mut lost = BTreeMap::new();
        for name in named.difference(&known) {
            if is_node_deleted(self.cluster, name).await? {
                let selector = self.cluster.identity.node_selector(name);
                let volumes = self.cluster.list_volumes(&selector, |_volume| true).await?;
                if volumes.is_empty() {
                    // They were deleted after the list.
                    continue;
                }
                let volumes = volumes.into_iter().map(Arc::new).collect();
                let seen = self.nodes.last_seen(name);
                lost.insert(LostStorage::Node(name.clone()), Lost { volumes, seen });
            }
        }
        Ok(lost)
    }

    /// Returns `true` if more nodes are missing at once than `at_most_percent` allows, so that no object is deleted in this pass. Records an
    /// event on the node of this process that says so.
    fn is_doubtful(&mut self, lost: &BTreeMap<LostStorage, Lost>, named: usize, now: Instant) -> bool {
        let identity = &self.cluster.identity;
        let nodes = lost.iter().filter_map(|(place, lost)| match place {
            LostStorage::Node(name) => Some((name, lost)),
            LostStorage::Disk(_) => None,
        });
        let (mut missing_since, mut recent) = (BTreeMap::new(), Vec::new());
        for (name, lost) in nodes {
            let since = self.missing_since.get(name).copied().unwrap_or(now);
            missing_since.insert(name.clone(), since);
            // A node whose volumes are all kept, or given up, stays among the deleted ones for good.
            let will_delete = lost.volumes.iter().any(|volume| begins_deletion(volume, name, identity));
            if will_delete || now < since + AT_ONCE {
                recent.push(name.clone());
            }
        }
        self.missing_since = missing_since;
        let nodes = named - lost.len() + recent.len();
        if recent.len() <= 1 || recent.len() * 100 <= nodes * usize::from(self.settings.at_most_percent) {
            return false;
        }
        let note = format!(
            "the Node objects of {} of {nodes} nodes with volumes were deleted, more than the {} % of --node-loss-at-most, so no object of \
             their volumes is deleted: {}; check whether their machines run, and restart the kubelets that do, which registers \
             their nodes again; if the machines are gone, start the controller with a larger percentage",
            recent.len(),
            self.settings.at_most_percent,
            some_names(recent.iter().map(|name| format!("{name:?}"))),
        );
        self.cluster.events.publish_on_node(Reason::NodeLost, note);
        true
    }
}

#[cfg(test)]
mod tests;

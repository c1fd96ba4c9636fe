//! The nodes on which the driver is registered.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::StreamExt;
use k8s_openapi::api::storage::v1::CSINode;
use kube::runtime::reflector::store::Writer;
use kube::runtime::reflector::{self, Store};
use kube::runtime::watcher;
use kube::{Api, ResourceExt};
use parking_lot::Mutex;
use tokio::sync::{SetOnce, watch};

use crate::api::cluster::Cluster;
use crate::api::queue::{self, CacheChange};

/// How long a node counts as registered after its kubelet has removed the driver from the CSINode. That happens at each restart of the
/// driver.
pub(super) const RESTART_TIME: Duration = Duration::from_secs(10 * 60);

/// A cache of the CSINodes that name the driver.
///
/// A CSINode is written when a driver registers, and garbage collected with its Node. A Node is written all the time.
pub(crate) struct RegisteredNodes {
    cache: Store<CSINode>,
    /// The nodes whose driver ended, and when.
    ended: Mutex<HashMap<String, Instant>>,
    /// When a CSINode without the driver was last seen, or one was deleted.
    seen: Arc<Mutex<HashMap<String, Instant>>>,
    pub(crate) synced: SetOnce<()>,
    changes: watch::Sender<()>,
}

impl RegisteredNodes {
    /// Returns an empty cache, and what [`Self::watch`] needs to fill it.
    pub(crate) fn new() -> (Self, Writer<CSINode>) {
        let (cache, writer) = reflector::store();
        let nodes = RegisteredNodes {
            cache,
            ended: Mutex::default(),
            seen: Arc::default(),
            synced: SetOnce::new(),
            changes: watch::Sender::new(()),
        };
        (nodes, writer)
    }

    /// Watches the CSINodes until shutdown.
    pub(crate) async fn watch(&self, cluster: &Cluster, cache: Writer<CSINode>) {
        let driver = cluster.identity.driver().to_owned();
        let runs_driver = move |node: &CSINode| node.spec.drivers.iter().any(|known| known.name == driver);
        let nodes = Api::all(cluster.client.clone());
        let (seen, runs) = (Arc::clone(&self.seen), runs_driver.clone());
        // A kubelet creates the CSINode as soon as its node is registered, and adds the driver when that has started.
        let of_interest = move |node: &CSINode| {
            if !runs(node) {
                note(&seen, node, Instant::now());
            }
            runs(node)
        };
        let changes = queue::watch(nodes, watcher::Config::default(), cache, of_interest);
        changes
            .for_each(|change| {
                match change {
                    CacheChange::Listed => drop(self.synced.set(())),
                    CacheChange::Deleted(node) => self.removed(&node, runs_driver(&node), Instant::now()),
                    CacheChange::Applied(_) => {}
                }
                self.changes.send_replace(());
                std::future::ready(())
            })
            .await;
    }

    /// Notes that a CSINode was deleted, or does not name the driver any more.
    fn removed(&self, node: &CSINode, is_deleted: bool, now: Instant) {
        note(&self.seen, node, now);
        if is_deleted {
            self.ended.lock().remove(&node.name_any());
        } else {
            note(&self.ended, node, now);
        }
    }

    /// Returns when a node that is not registered was last seen. Times before [`RESTART_TIME`] are forgotten with the next
    /// event of any node.
    pub(crate) fn last_seen(&self, name: &str) -> Option<Instant> {
        self.seen.lock().get(name).copied()
    }

    /// Returns the nodes on which the driver is registered, or was until [`RESTART_TIME`] ago.
    pub(crate) fn names(&self, now: Instant) -> BTreeSet<String> {
        let mut names: BTreeSet<_> = self.cache.state().iter().map(|node| node.name_any()).collect();
        let ended = self.ended.lock();
        names.extend(
            ended.iter().filter(|(_, since)| now < **since + RESTART_TIME).map(|(name, _)| name.clone()),
        );
        names
    }

    /// Returns a receiver that learns of each change of a node.
    pub(crate) fn changes(&self) -> watch::Receiver<()> {
        self.changes.subscribe()
    }

    /// Notes that a node was registered and deleted again.
    #[cfg(test)]
    pub(crate) fn came_and_went(&self, name: &str, now: Instant) {
        self.removed(&node_named(name), true, now);
    }

    /// Returns a cache that has received its first list.
    #[cfg(test)]
    pub(crate) fn of(names: &[&str]) -> Self {
        let (nodes, _unused) = RegisteredNodes::new();
        let listed = names.iter().map(|name| node_named(name)).collect();
        RegisteredNodes { cache: crate::testing::mock_api_server::cache(listed).0, ..nodes }
    }
}

/// Notes the time of an event of a node, and forgets those that are older than [`RESTART_TIME`].
fn note(times: &Mutex<HashMap<String, Instant>>, node: &CSINode, now: Instant) {
    let mut times = times.lock();
    times.retain(|_, time| now < *time + RESTART_TIME);
    times.insert(node.name_any(), now);
}

#[cfg(test)]
fn node_named(name: &str) -> CSINode {
    let node = serde_json::json!({"metadata": {"name": name}, "spec": {"drivers": []}});
    serde_json::from_value(node).expect("a CSINode")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deletion_of_csinode_is_a_sighting() {
        let nodes = RegisteredNodes::of(&[]);
        let start = Instant::now();
        assert_eq!(nodes.last_seen("node-b"), None);
        nodes.came_and_went("node-b", start);
        assert_eq!(nodes.last_seen("node-b"), Some(start));
        nodes.came_and_went("node-c", start + RESTART_TIME);
        assert_eq!(nodes.last_seen("node-b"), None);
    }

    #[test]
    fn only_undeleted_node_counts_during_restart() {
        let nodes = RegisteredNodes::of(&["node-a"]);
        let other = node_named("node-b");
        let start = Instant::now();
        let names = |after| nodes.names(start + after).into_iter().collect::<Vec<_>>();
        nodes.removed(&other, false, start);
        assert_eq!(names(Duration::ZERO), ["node-a", "node-b"]);
        assert_eq!(names(RESTART_TIME), ["node-a"]);
        nodes.removed(&other, true, start);
        assert_eq!(names(Duration::ZERO), ["node-a"]);
    }
}

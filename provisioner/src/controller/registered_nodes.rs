//! The nodes on which the driver is registered.

use std::collections::BTreeSet;

use futures::StreamExt;
use k8s_openapi::api::storage::v1::CSINode;
use kube::{
    Api, ResourceExt,
    runtime::{
        reflector::{self, Store, store::Writer},
        watcher,
    },
};
use tokio::sync::watch;

use crate::api::{
    cluster::Cluster,
    queue::{self, CacheChange},
    signals::SyncSignal,
};

/// A cache of the CSINodes that name the driver.
///
/// A CSINode is written when a driver registers, and garbage collected with its Node. A Node is written all the time.
pub(crate) struct RegisteredNodes {
    cache: Store<CSINode>,
    pub(crate) synced: SyncSignal,
    changes: watch::Sender<()>,
}

impl RegisteredNodes {
    /// Returns an empty cache, and what [`Self::watch`] needs to fill it.
    pub(crate) fn new() -> (Self, Writer<CSINode>) {
        let (cache, writer) = reflector::store();
        let nodes = RegisteredNodes { cache, synced: SyncSignal::default(), changes: watch::Sender::new(()) };
        (nodes, writer)
    }

    /// Watches the CSINodes until shutdown.
    pub(crate) async fn watch(&self, cluster: &Cluster, cache: Writer<CSINode>) {
        let driver = cluster.identity.driver().to_owned();
        let runs_driver = move |node: &CSINode| node.spec.drivers.iter().any(|known| known.name == driver);
        let nodes = Api::all(cluster.client.clone());
        let changes = queue::watch(nodes, watcher::Config::default(), cache, runs_driver);
        changes
            .for_each(|change| {
                if matches!(change, CacheChange::Listed) {
                    self.synced.set();
                }
                self.changes.send_replace(());
                std::future::ready(())
            })
            .await;
    }

    pub(crate) fn names(&self) -> BTreeSet<String> {
        self.cache.state().iter().map(|node| node.name_any()).collect()
    }

    /// Returns a receiver that learns of each change of a node.
    pub(crate) fn changes(&self) -> watch::Receiver<()> {
        self.changes.subscribe()
    }

    /// Returns a cache that has received its first list.
    #[cfg(test)]
    pub(crate) fn of(names: &[&str]) -> Self {
        let (nodes, mut cache) = RegisteredNodes::new();
        cache.apply_watcher_event(&watcher::Event::Init);
        for name in names {
            let node = serde_json::json!({"metadata": {"name": name}, "spec": {"drivers": []}});
            let node = serde_json::from_value(node).expect("a CSINode");
            cache.apply_watcher_event(&watcher::Event::InitApply(node));
        }
        cache.apply_watcher_event(&watcher::Event::InitDone);
        nodes
    }
}

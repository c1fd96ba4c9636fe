//! The claims that a node watches: those with its own label, or all of the cluster. The record of the controller decides.

use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures::{Stream, StreamExt, stream};
use k8s_openapi::api::core::v1::{ConfigMap, PersistentVolumeClaim};
use kube::Api;
use kube::runtime::reflector::store::Writer;
use kube::runtime::{WatchStreamExt, reflector, watcher};
use prometheus_client::registry::Registry;
use service::Gauges;
use tokio::sync::watch;
use tokio::time::timeout;

use super::labels::{self, LabelRecordSource};
use crate::api::cluster::Cluster;
use crate::api::queue::{self, CacheChange};

/// How long a starting process waits for the ConfigMap before it watches all claims.
const FIRST_READ_TIMEOUT: Duration = Duration::from_secs(10);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ClaimScope {
    /// The claims with the label of this node.
    Own,
    /// All claims of the cluster.
    All,
}

/// The scope that holds now. It is `None` until the process has read the ConfigMap.
#[derive(Debug)]
pub(crate) struct CurrentScope {
    scope: watch::Sender<Option<ClaimScope>>,
    has_been_own: AtomicBool,
}

impl Default for CurrentScope {
    fn default() -> Self {
        CurrentScope { scope: watch::Sender::new(None), has_been_own: AtomicBool::new(false) }
    }
}

impl CurrentScope {
    /// Keeps the scope up to date until shutdown. Without the component, it is all claims.
    pub(crate) async fn follow(&self, cluster: &Cluster, source: Option<LabelRecordSource>) {
        let Some(LabelRecordSource { namespace, name }) = source else {
            self.set(ClaimScope::All);
            return std::future::pending().await;
        };
        let config_maps: Api<_> = Api::namespaced(cluster.client.clone(), &namespace);
        let (cached, cache) = reflector::store::<ConfigMap>();
        let config = watcher::Config::default().fields(&format!("metadata.name={name}"));
        let mut changes = pin!(queue::watch(config_maps, config, cache, |_config_map| true));
        let listed = async {
            while let Some(change) = changes.next().await {
                if change == CacheChange::Listed {
                    return;
                }
            }
        };
        if timeout(FIRST_READ_TIMEOUT, listed).await.is_err() {
            tracing::warn!(
                "could not read ConfigMap {namespace}/{name}; until it can be read, this node watches all claims"
            );
        }
        loop {
            let are_labelled = cached.state().iter().any(|config_map| labels::are_complete(config_map));
            self.set(if are_labelled { ClaimScope::Own } else { ClaimScope::All });
            if changes.next().await.is_none() {
                return;
            }
        }
    }

    pub(crate) fn set(&self, scope: ClaimScope) {
        self.has_been_own.fetch_or(scope == ClaimScope::Own, Ordering::Relaxed);
        let changed = self.scope.send_if_modified(|current| current.replace(scope) != Some(scope));
        match scope {
            ClaimScope::Own if changed => tracing::info!("this node watches only the claims with its label"),
            ClaimScope::All if changed => tracing::info!("this node watches all claims of the cluster"),
            _ => {}
        }
    }

    /// As [`queue::watch`], for the claims of the scope. Whenever that changes, another watch begins with a list of its own. The first one
    /// begins once there is a scope.
    pub(crate) fn watch<F: Fn(&PersistentVolumeClaim) -> bool + Send + 'static>(
        &self,
        cluster: &Cluster,
        cache: Writer<PersistentVolumeClaim>,
        of_interest: F,
    ) -> impl Stream<Item = CacheChange<PersistentVolumeClaim>> + Send + use<F> {
        let api = Api::all(cluster.client.clone());
        let own = cluster.identity.node_selector(cluster.identity.node());
        let scopes = stream::unfold(self.scope.subscribe(), |mut scope| async move {
            let current = (*scope.wait_for(Option::is_some).await.ok()?)?;
            Some(((current, scope.clone()), scope))
        });
        let events = scopes.flat_map(move |(current, mut scope)| {
            let config = match current {
                ClaimScope::Own => watcher::Config::default().labels(&own),
                ClaimScope::All => watcher::Config::default(),
            };
            let changed = async move {
                if scope.wait_for(|next| next.is_some_and(|next| next != current)).await.is_err() {
                    // No other scope follows.
                    std::future::pending::<()>().await;
                }
            };
            watcher::watcher(api.clone(), config).default_backoff().take_until(Box::pin(changed))
        });
        queue::changes(events, cache, of_interest)
    }

    /// Returns `true` if the cache may lack a claim of this node that has lost its label. After a change of the scope, the cache lags behind.
    pub(crate) fn may_hide_claims(&self) -> bool {
        self.has_been_own.load(Ordering::Relaxed)
    }

    /// Registers the metric that shows the scope, once there is one.
    pub(crate) fn register(&self, registry: &mut Registry) {
        if let Some(scope) = *self.scope.borrow() {
            registry.count(
                "watches_all_claims",
                "1 if this node watches all claims of the cluster, 0 if it watches only those with its label",
                u64::from(scope == ClaimScope::All),
            );
        }
    }
}

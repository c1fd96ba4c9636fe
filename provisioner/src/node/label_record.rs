//! Watches the record that all claims have labels, and decides by it which claims this node watches.
//!
//! With the component `claim-labels`, each claim for which a node was selected has a label with the name of that node. The controller
//! records in a ConfigMap that this holds for all claims. While the ConfigMap says so, a node watches only claims with its own label,
//! and what it receives does not grow with the cluster. Otherwise it watches all claims, and misses none.
//!
//! `docs/decisions/0078-claim-labels.md` gives the reasons.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::Api;
use kube::runtime::{reflector, watcher};
use tokio::time::timeout;

use crate::api::queue::{self, CacheChange};
use crate::node::claim_scope::ClaimScope;
use crate::node::context::Context;
use crate::objects::claim_labels;

/// How long a starting process waits for the ConfigMap before it watches all claims.
const FIRST_READ_TIMEOUT: Duration = Duration::from_secs(10);

/// Keeps the scope up to date until shutdown.
pub(crate) async fn run(ctx: Arc<Context>, source: claim_labels::LabelRecordSource) {
    let config_maps: Api<_> = Api::namespaced(ctx.cluster.client.clone(), &source.namespace);
    let (cached, cache) = reflector::store::<ConfigMap>();
    let config = watcher::Config::default().fields(&format!("metadata.name={}", source.name));
    let mut changes = pin!(queue::watch(config_maps, config, cache, |_config_map| true));
    let read_scope = || {
        let all_labelled = cached.state().iter().any(|config_map| claim_labels::are_complete(config_map));
        if all_labelled { ClaimScope::Own } else { ClaimScope::All }
    };
    let listed = async {
        while let Some(change) = changes.next().await {
            if change == CacheChange::Listed {
                return;
            }
        }
    };
    if timeout(FIRST_READ_TIMEOUT, listed).await.is_err() {
        let claim_labels::LabelRecordSource { namespace, name } = &source;
        tracing::warn!(
            "could not read ConfigMap {namespace}/{name}; until it can be read, this node watches all claims"
        );
    }
    loop {
        ctx.claim_scope.set(read_scope());
        if changes.next().await.is_none() {
            return;
        }
    }
}

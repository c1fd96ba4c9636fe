//! The claims that wait for this driver: for a volume, or for an expansion on the node that was selected for them.

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use kube::api::{Patch, PatchParams};
use kube::runtime::reflector::store::Writer;
use kube::runtime::reflector::{self, Store};
use kube::runtime::watcher;
use kube::{Api, ResourceExt};
use tokio::sync::{SetOnce, watch};

use crate::api::cluster::Cluster;
use crate::api::queue;
use crate::error::Error;
use crate::objects::{claim_status, ownership};

/// A cache of the claims, which several duties share, so that they need one watch.
pub(crate) struct PendingClaims {
    pub(crate) cache: Store<PersistentVolumeClaim>,
    pub(crate) synced: SetOnce<()>,
    changes: watch::Sender<()>,
}

impl PendingClaims {
    /// Returns an empty cache, and what [`Self::watch`] needs to fill it.
    pub(crate) fn new() -> (Self, Writer<PersistentVolumeClaim>) {
        let (cache, writer) = reflector::store();
        let claims = PendingClaims { cache, synced: SetOnce::new(), changes: watch::Sender::new(()) };
        (claims, writer)
    }

    /// Watches the claims until shutdown.
    pub(crate) async fn watch(&self, cluster: &Cluster, cache: Writer<PersistentVolumeClaim>) {
        let identity = cluster.identity.clone();
        let waits = move |claim: &PersistentVolumeClaim| {
            ownership::is_claim_to_provision(claim, &identity)
                || (ownership::is_claim_with_selection(claim, &identity)
                    && claim_status::requested_expansion(claim).is_some())
        };
        let all = Api::all(cluster.client.clone());
        let changes = queue::watch(all, watcher::Config::default(), cache, waits);
        queue::follow(changes, &self.synced, || self.changes.send_replace(())).await;
    }

    /// Returns a receiver that learns of each change of a claim.
    pub(crate) fn changes(&self) -> watch::Receiver<()> {
        self.changes.subscribe()
    }

    /// Returns a cache that has received its first list.
    #[cfg(test)]
    pub(crate) fn of(claims: Vec<PersistentVolumeClaim>) -> Self {
        let (empty, _unused) = PendingClaims::new();
        PendingClaims { cache: crate::testing::mock_api_server::cache(claims).0, ..empty }
    }
}

/// Selects the node of a claim, or removes the selected node, unless the claim changed since it was read.
pub(super) async fn select_node(
    cluster: &Cluster,
    claim: &PersistentVolumeClaim,
    node: Option<&str>,
) -> Result<(), Error> {
    let patch = Patch::Merge(ownership::selection_patch(claim, node));
    let (name, api) = (claim.name_any(), cluster.claim_api(&claim.namespace().unwrap_or_default()));
    let operation =
        if node.is_some() { "select the node of claim" } else { "remove the selected node of claim" };
    let patched = api.patch(&name, &PatchParams::default(), &patch).await;
    patched.map(drop).map_err(|error| Error::api(operation, name, error))
}

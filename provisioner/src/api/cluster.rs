//! Access to the cluster, which every duty needs: the API server, the names of the driver and the node, and the event recorder.
//!
//! The duties that concern the whole cluster get nothing else, so they cannot reach a volume store.

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use kube::{Api, Client};

use super::events::Events;
use super::pruned::Pruned;
use crate::objects::identity::Identity;

/// Access to the cluster.
#[derive(Clone)]
pub(crate) struct Cluster {
    pub(crate) client: Client,
    pub(crate) identity: Identity,
    pub(crate) events: Events,
}

impl Cluster {
    /// Returns the API of all PersistentVolumes.
    pub(crate) fn volume_api(&self) -> Api<Pruned<PersistentVolume>> {
        Api::all(self.client.clone())
    }

    /// Returns the API of the PersistentVolumeClaims of a namespace.
    pub(crate) fn claim_api(&self, namespace: &str) -> Api<Pruned<PersistentVolumeClaim>> {
        Api::namespaced(self.client.clone(), namespace)
    }
}

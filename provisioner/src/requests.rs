//! Requests that several duties send, with the errors of a reconcile.

use k8s_openapi::api::core::v1::{Node, PersistentVolume};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, Preconditions};
use kube::{Api, ResourceExt};

use crate::api::cluster::Cluster;
use crate::api::pruned::{Prune, Pruned};
use crate::api::{absence, list, queue};
use crate::error::Error;
use crate::objects::pv;

impl Cluster {
    /// Reads a PersistentVolume. Returns `None` only if the API server proves that it does not exist.
    ///
    /// # Errors
    /// When the request fails.
    pub(crate) async fn read_volume(&self, name: &str) -> Result<Option<PersistentVolume>, Error> {
        let read = absence::get_opt(&self.volume_api(), name).await;
        let volume = read.map_err(|error| Error::api("read PersistentVolume", name, error))?;
        Ok(volume.map(Pruned::into_inner))
    }

    /// Lists the PersistentVolumes with these labels that `wanted` selects.
    ///
    /// # Errors
    /// When a request fails.
    pub(crate) async fn list_volumes(
        &self,
        labels: &str,
        wanted: impl Fn(&PersistentVolume) -> bool,
    ) -> Result<Vec<PersistentVolume>, Error> {
        let labelled = ListParams::default().labels(labels);
        let volumes = list::selected(&self.volume_api(), labelled, wanted).await;
        volumes.map_err(|error| Error::api("list", "the PersistentVolumes", error))
    }

    /// Reads the metadata of a Node. Returns `None` only if the API server proves that it does not exist.
    ///
    /// # Errors
    /// When the request fails.
    pub(crate) async fn read_node(&self, name: &str) -> Result<Option<ObjectMeta>, Error> {
        let nodes: Api<Node> = Api::all(self.client.clone());
        let read = absence::get_metadata_opt(&nodes, name).await;
        let node = read.map_err(|error| Error::api("read Node", name, error))?;
        Ok(node.map(|node| node.metadata))
    }

    /// Adds or removes this driver's finalizer of a PersistentVolume. Returns the new object, or `None` if the volume does not exist any
    /// more.
    ///
    /// # Errors
    /// When the request fails.
    pub(crate) async fn set_finalizer(
        &self,
        volume: &PersistentVolume,
        has_finalizer: bool,
    ) -> Result<Option<PersistentVolume>, Error> {
        let (name, patch) = (volume.name_any(), Patch::Strategic(pv::finalizer_patch(volume, has_finalizer)));
        let patched = self.volume_api().patch(&name, &PatchParams::default(), &patch).await;
        let patched = absence::unless_absent::<PersistentVolume, _>(patched, &(), &name)
            .map_err(|error| Error::api("change the finalizers of PersistentVolume", name, error))?;
        Ok(patched.map(Pruned::into_inner))
    }
}

/// Deletes an object, unless it changed since it was read. A newer object of the same name has another UID.
///
/// # Errors
/// When the request fails, or the object changed.
pub(crate) async fn delete_unchanged<K: queue::KubernetesObject + Prune>(
    api: &Api<Pruned<K>>,
    operation: &'static str,
    object: &K,
) -> Result<(), Error> {
    let preconditions = Preconditions { uid: object.uid(), resource_version: object.resource_version() };
    let parameters = DeleteParams::default().preconditions(preconditions);
    let name = object.name_any();
    api.delete(&name, &parameters).await.map(drop).map_err(|error| Error::api(operation, name, error))
}

//! Reads of the objects that several duties need, with the errors of a reconcile.

use k8s_openapi::api::core::v1::{Node, PersistentVolume};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Api;
use kube::api::ListParams;

use crate::api::cluster::Cluster;
use crate::api::pruned::Pruned;
use crate::api::{absence, list};
use crate::error::Error;

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
}

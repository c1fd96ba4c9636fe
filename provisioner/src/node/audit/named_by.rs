//! The PersistentVolumes that may name volumes of this node.
//!
//! All but a few carry its label or no label. A PersistentVolume with the label of another node can name a volume here too: if its disk
//! was moved to this node, or a person chose the label. To find these, all PersistentVolumes of the cluster must be listed, on
//! which each node with an orphaned volume would otherwise spend as much as the cluster is large, at each audit.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::PersistentVolume;
use kube::api::ListParams;
use kube::{Api, Client};
use loopfs::volume_store::VolumeId;

use crate::api::list;
use crate::error::Error;
use crate::objects::identity::Identity;
use crate::objects::ownership;

/// The time after which the PersistentVolumes of other nodes are listed again, although the same volumes are suspected.
const MAX_AGE: Duration = Duration::from_secs(3600);

/// Returns all PersistentVolumes of this driver on all nodes, including those that a person created.
pub(super) async fn all(client: &Client, identity: &Identity) -> Result<Vec<PersistentVolume>, Error> {
    listed(client, ListParams::default(), |object| ownership::csi(object, identity).is_some()).await
}

/// Returns the PersistentVolumes of this driver with the label of this node, and those without label.
pub(super) async fn of_node(client: &Client, identity: &Identity) -> Result<Vec<PersistentVolume>, Error> {
    let of_driver = |object: &PersistentVolume| ownership::csi(object, identity).is_some();
    let label = identity.node_label();
    let labelled = ListParams::default().labels(&identity.node_selector(identity.node()));
    let unlabelled = ListParams::default().labels(&format!("!{label}"));
    let mut objects = listed(client, labelled, of_driver).await?;
    objects.extend(listed(client, unlabelled, of_driver).await?);
    Ok(objects)
}

/// The PersistentVolumes with the label of another node that name suspected volumes.
#[derive(Debug, Default)]
pub(super) struct LabelledElsewhere {
    objects: Vec<PersistentVolume>,
    /// The volumes that were suspected at the last list, and its time.
    suspects: BTreeSet<VolumeId>,
    listed: Option<Instant>,
}

impl LabelledElsewhere {
    /// Returns the PersistentVolumes that name these volumes. Lists the PersistentVolumes of the other nodes if a volume was not suspected
    /// before, if the last list is old, or if `fresh`.
    pub(super) async fn naming(
        &mut self,
        suspects: &BTreeSet<VolumeId>,
        fresh: bool,
        client: &Client,
        identity: &Identity,
    ) -> Result<&[PersistentVolume], Error> {
        let is_recent = self.listed.is_some_and(|listed| listed.elapsed() < MAX_AGE);
        if suspects.is_empty() || (!fresh && is_recent && suspects.is_subset(&self.suspects)) {
            return Ok(&self.objects);
        }
        let label = identity.node_label();
        let elsewhere = ListParams::default().labels(&format!("{label},{label}!={}", identity.node()));
        let names_one = |object: &PersistentVolume| {
            let handle = ownership::csi(object, identity).map(|csi| csi.volume_handle.as_str());
            handle.is_some_and(|handle| suspects.iter().any(|id| id.as_str() == handle))
        };
        self.objects = listed(client, elsewhere, names_one).await?;
        self.suspects = suspects.clone();
        self.listed = Some(Instant::now());
        Ok(&self.objects)
    }
}

async fn listed(
    client: &Client,
    parameters: ListParams,
    wanted: impl Fn(&PersistentVolume) -> bool,
) -> Result<Vec<PersistentVolume>, Error> {
    let objects = list::selected(&Api::all(client.clone()), parameters, wanted).await;
    objects.map_err(|error| Error::api("list", "PersistentVolumes", error))
}

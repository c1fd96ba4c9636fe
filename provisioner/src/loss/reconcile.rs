//! Acts on PersistentVolumes whose data cannot be reached any more, after the grace time of each.
//!
//! The provisioner of such a node cannot act. The controller therefore does what the PersistentVolume's policy allows. It
//! deletes objects and never data.
//!
//! Each deletion is conditional on the object being unchanged since the decision, so two processes that act at the same time do no
//! harm. The grace time is measured by the monotonic clock from the moment when this process first saw the loss: a restart
//! starts it again, and setting the clock does not change it.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use clap::ValueEnum;
use k8s_openapi::api::core::v1::{Node, PersistentVolume, PersistentVolumeClaim};
use kube::{
    Api, ResourceExt,
    api::{DeleteParams, Patch, PatchParams, Preconditions},
};

use super::decision::{Decision, NodeLossState, decide};
use crate::{
    api::{absence, backoff::Backoff, cluster::Cluster, events::Reason, pruned::Pruned, queue},
    error::Error,
    objects::{identity::Identity, pv::finalizer_patch},
};

/// Storage may have been lost before the process began, and claims may be deleted later, without an event for this duty.
pub(crate) const POLL_INTERVAL: Duration = Duration::from_secs(300);

/// The mode of the reconciliation of volumes of deleted nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum NodeLoss {
    /// Nothing checks for deleted nodes.
    #[default]
    Off,
    /// Record events that say what would be done.
    DryRun,
    /// Apply the policies of the volumes' classes.
    Enforce,
}

/// The place of data that cannot be reached.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum LostStorage {
    /// A node whose Node object was deleted.
    Node(String),
    /// A file system, by its UUID, that this node had and does not have any more.
    Disk(String),
}

/// When a volume has to be checked again.
enum NextCheck {
    /// Not before its object changes.
    OnChange,
    /// After this time.
    After(Duration),
    /// With back-off: another step must happen first, and no event announces it.
    BackOff,
}

/// Reconciles PersistentVolumes of lost storage.
pub(crate) struct LossReconciler<'a> {
    cluster: &'a Cluster,
    mode: NodeLoss,
    /// When this process first saw each loss.
    lost_since: BTreeMap<LostStorage, Instant>,
    /// PersistentVolumes to check again, by name. A new resource version ends the back-off.
    backoff: Backoff<String, Option<String>>,
}

impl<'a> LossReconciler<'a> {
    pub(crate) fn new(cluster: &'a Cluster, mode: NodeLoss) -> Self {
        LossReconciler { cluster, mode, lost_since: BTreeMap::new(), backoff: Backoff::default() }
    }

    /// Reconciles the volumes of all storage that is lost now, each of them after its grace time.
    ///
    /// Returns the time after which a volume has to be checked again, if no event announces that.
    pub(crate) async fn reconcile(
        &mut self,
        lost: BTreeMap<LostStorage, Vec<Arc<PersistentVolume>>>,
        now: Instant,
    ) -> Option<Duration> {
        // Storage that came back has its full grace time if it is lost again.
        self.lost_since.retain(|place, _| lost.contains_key(place));
        let mut next = None;
        for (place, volumes) in lost {
            let since = *self.lost_since.entry(place.clone()).or_insert(now);
            let lost_for = now.duration_since(since);
            for volume in volumes {
                let check = match self.remaining_back_off(&volume, now) {
                    Some(remaining) => Some(remaining),
                    None => match self.reconcile_volume(&volume, &place, lost_for).await {
                        Ok(NextCheck::OnChange) => None,
                        Ok(NextCheck::After(wait)) => Some(wait),
                        Ok(NextCheck::BackOff) => Some(self.back_off(&volume, now)),
                        Err(error) => {
                            if !error.is_conflict() {
                                self.cluster.events.publish(&*volume, Reason::NodeLost, error.to_string());
                            }
                            Some(self.back_off(&volume, now))
                        }
                    },
                };
                next = next.into_iter().chain(check).min();
            }
        }
        next
    }

    fn remaining_back_off(&self, volume: &PersistentVolume, now: Instant) -> Option<Duration> {
        self.backoff.remaining(&volume.name_any(), &volume.resource_version(), now)
    }

    fn back_off(&self, volume: &PersistentVolume, now: Instant) -> Duration {
        self.backoff.failed(volume.name_any(), volume.resource_version(), now)
    }

    /// Decides about one volume and acts.
    async fn reconcile_volume(
        &self,
        volume: &PersistentVolume,
        place: &LostStorage,
        lost_for: Duration,
    ) -> Result<NextCheck, Error> {
        let identity = &self.cluster.identity;
        let node = match place {
            LostStorage::Node(name) => name,
            LostStorage::Disk(_) => identity.node(),
        };
        // Before the grace time is over, the claim does not matter.
        let early = decide(NodeLossState { volume, node, claim: None, lost_for }, identity);
        let claim = match early {
            Decision::Ignore => return Ok(NextCheck::OnChange),
            Decision::Wait(wait) => return Ok(NextCheck::After(wait)),
            _ => self.claim_of(volume).await?,
        };
        let decision = decide(NodeLossState { volume, node, claim: claim.as_ref(), lost_for }, identity);
        if matches!(decision, Decision::Requeue) {
            return Ok(NextCheck::BackOff);
        }
        let Some(action) = describe(&decision, volume) else { return Ok(NextCheck::OnChange) };
        let cause = explain(place, identity);
        if decision == Decision::ReportOnly || self.mode != NodeLoss::Enforce {
            let note = match decision {
                Decision::ReportOnly => format!("{cause}; {action}"),
                _ => format!("{cause}; {action}, if the driver ran with --node-loss=enforce"),
            };
            self.cluster.events.publish(volume, Reason::NodeLost, note);
            return Ok(NextCheck::OnChange);
        }
        // The node may have come back while other volumes were reconciled.
        if let LostStorage::Node(name) = place
            && !is_node_deleted(self.cluster, name).await?
        {
            return Ok(NextCheck::BackOff);
        }
        match decision {
            Decision::DeleteClaim => {
                if let Some(claim) = &claim {
                    let namespace = claim.namespace().unwrap_or_default();
                    delete(&self.cluster.claim_api(&namespace), "delete PersistentVolumeClaim", claim)
                        .await?;
                    self.cluster.events.publish(claim, Reason::NodeLost, format!("{cause}; {action}"));
                }
            }
            _ => {
                if volume.metadata.deletion_timestamp.is_none() {
                    delete(&self.cluster.volume_api(), "delete PersistentVolume", volume).await?;
                }
                if decision == Decision::DeletePvAndFinalizer {
                    self.remove_finalizer(volume).await?;
                }
            }
        }
        self.cluster.events.publish(volume, Reason::NodeLost, format!("{cause}; {action}"));
        Ok(NextCheck::BackOff)
    }

    /// Reads the claim that has the name which the volume's `claimRef` gives. It may be a newer claim of that name.
    async fn claim_of(&self, volume: &PersistentVolume) -> Result<Option<PersistentVolumeClaim>, Error> {
        let reference = volume.spec.as_ref().and_then(|spec| spec.claim_ref.as_ref());
        let named =
            reference.and_then(|reference| reference.namespace.as_deref().zip(reference.name.as_deref()));
        let Some((namespace, name)) =
            named.filter(|(namespace, name)| !namespace.is_empty() && !name.is_empty())
        else {
            return Ok(None);
        };
        let claim = absence::get_opt(&self.cluster.claim_api(namespace), name).await;
        let claim = claim.map_err(|error| Error::api("read PersistentVolumeClaim", name, error))?;
        Ok(claim.map(Pruned::into_inner))
    }

    /// Removes this driver's finalizer. The provisioner that would remove it does not run any more.
    async fn remove_finalizer(&self, volume: &PersistentVolume) -> Result<(), Error> {
        let (name, patch) = (volume.name_any(), Patch::Strategic(finalizer_patch(volume, false)));
        let patched = self.cluster.volume_api().patch(&name, &PatchParams::default(), &patch).await;
        absence::unless_absent::<PersistentVolume, _>(patched, &(), &name)
            .map(drop)
            .map_err(|error| Error::api("change the finalizers of PersistentVolume", name, error))
    }
}

/// Returns `true` if the API server proves that it holds no Node object of this name. A node that is not ready, for however
/// long, may come back with all its data.
pub(crate) async fn is_node_deleted(cluster: &Cluster, name: &str) -> Result<bool, Error> {
    if name.is_empty() {
        return Ok(false);
    }
    let nodes: Api<Node> = Api::all(cluster.client.clone());
    let node = absence::get_metadata_opt(&nodes, name).await;
    let node = node.map_err(|error| Error::api("read Node", name, error))?;
    Ok(node.is_none())
}

/// Deletes an object, unless it changed since the decision. A newer object of the same name has another UID.
async fn delete<K: queue::Object>(
    api: &Api<Pruned<K>>,
    operation: &'static str,
    object: &K,
) -> Result<(), Error> {
    let preconditions = Preconditions { uid: object.uid(), resource_version: object.resource_version() };
    let parameters = DeleteParams::default().preconditions(preconditions);
    let name = object.name_any();
    api.delete(&name, &parameters).await.map(drop).map_err(|error| Error::api(operation, name, error))
}

/// Returns the cause, as events give it.
fn explain(place: &LostStorage, identity: &Identity) -> String {
    match place {
        LostStorage::Node(name) => {
            format!("node {name:?}, which has the volume's data, was deleted from the cluster")
        }
        LostStorage::Disk(uuid) => {
            format!(
                "the volume is on file system {uuid}, which node {:?} does not have any more",
                identity.node()
            )
        }
    }
}

/// Returns the action, as events give it, or `None` if there is none to report.
fn describe(decision: &Decision, volume: &PersistentVolume) -> Option<String> {
    let claim = volume.spec.as_ref().and_then(|spec| spec.claim_ref.as_ref());
    let part = |part: Option<&String>| part.cloned().unwrap_or_default();
    let claim =
        claim.map(|claim| format!("{}/{}", part(claim.namespace.as_ref()), part(claim.name.as_ref())));
    let pv = volume.name_any();
    Some(match decision {
        Decision::Ignore | Decision::Wait(_) | Decision::Requeue => return None,
        Decision::ReportOnly => format!(
            "PersistentVolume {pv} is kept: bring the node or its disk back; or, to give the data up, delete the claim and \
             PersistentVolume {pv}, and remove its finalizers by hand"
        ),
        Decision::DeleteClaim => {
            format!(
                "claim {:?} is deleted, so that it can be recreated on another node",
                claim.unwrap_or_default()
            )
        }
        Decision::DeletePv => {
            format!("PersistentVolume {pv} is deleted; Kubernetes removes it when its claim is deleted")
        }
        Decision::DeletePvAndFinalizer => {
            format!("PersistentVolume {pv} is deleted; data that remains on the node stays there")
        }
    })
}

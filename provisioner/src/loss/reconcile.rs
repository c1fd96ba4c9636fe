//! Acts on PersistentVolumes whose data cannot be reached any more, after the grace time of each.
//!
//! The provisioner of such a node cannot act. The controller therefore does what the PersistentVolume's policy allows. It
//! deletes objects and never data.
//!
//! Before each deletion, the objects are read again and the storage is asked for again: a pass over many volumes takes minutes, in which a
//! node or a disk comes back, and an administrator decides otherwise. Each deletion is conditional on the object being unchanged since
//! then, so two processes that act at the same time do no harm. The grace time is measured by the monotonic clock from the moment when
//! this process first saw that the volume is lost: a restart starts it again, and setting the clock does not change it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::ValueEnum;
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use kube::ResourceExt;

use super::decision::{Decision, NodeLossState, begins_deletion, decide, will_delete};
use crate::api::absence;
use crate::api::backoff::Backoff;
use crate::api::cluster::Cluster;
use crate::api::events::Reason;
use crate::api::pruned::Pruned;
use crate::error::Error;
use crate::objects::identity::Identity;
use crate::objects::loss_policy::Policy;
use crate::objects::ownership;
use crate::requests::delete_unchanged;

/// Storage may have been lost before the process began, and claims may be deleted later, without an event for this duty.
pub(crate) const POLL_INTERVAL: Duration = Duration::from_secs(300);

/// The writes for one volume in a pass. If one has no effect, the next pass repeats it, with back-off.
const MAX_WRITES: usize = 3;
/// The volumes that are announced in a pass. If a whole zone is lost, events about all of them would keep events about other objects
/// waiting for hours. The rest is announced in the next passes.
const MAX_ANNOUNCED: usize = 500;

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

impl LostStorage {
    /// Returns the node of the storage.
    fn node<'a>(&'a self, identity: &'a Identity) -> &'a str {
        match self {
            LostStorage::Node(name) => name,
            LostStorage::Disk(_) => identity.node(),
        }
    }
}

/// Lost storage, as a pass finds it.
#[derive(Debug, Default)]
pub(crate) struct Lost {
    pub(crate) volumes: Vec<Arc<PersistentVolume>>,
    /// When the storage was last seen, if that is known.
    pub(crate) seen: Option<Instant>,
}

/// What knows whether storage is lost.
pub(crate) trait Witness {
    /// Returns `true` if it is certain now that the data of this volume cannot be reached.
    fn is_lost(
        &self,
        place: &LostStorage,
        volume: &PersistentVolume,
    ) -> impl Future<Output = Result<bool, Error>> + Send;
}

/// Reconciles PersistentVolumes of lost storage.
pub(crate) struct LossReconciler<'a, W> {
    cluster: &'a Cluster,
    witness: W,
    mode: NodeLoss,
    /// When this process first saw that each volume, by its UID, is lost.
    lost_since: BTreeMap<(LostStorage, Option<String>), Instant>,
    /// The volumes whose owners have been told, by UID, and the time that they were told.
    announced: BTreeMap<Option<String>, Instant>,
    /// PersistentVolumes to check again, by name. A new resource version ends the back-off.
    backoff: Backoff<String, Option<String>>,
}

impl<'a, W: Witness> LossReconciler<'a, W> {
    pub(crate) fn new(cluster: &'a Cluster, witness: W, mode: NodeLoss) -> Self {
        let (lost_since, announced) = (BTreeMap::new(), BTreeMap::new());
        LossReconciler { cluster, witness, mode, lost_since, announced, backoff: Backoff::default() }
    }

    /// Starts all grace times again, because storage may have come back for a while without being seen.
    pub(crate) fn interrupted(&mut self) {
        self.lost_since.clear();
    }

    /// Reconciles the volumes of all storage that is lost now, each of them after its grace time.
    ///
    /// Returns the time after which a volume has to be checked again, if no event announces that.
    pub(crate) async fn reconcile(
        &mut self,
        lost: BTreeMap<LostStorage, Lost>,
        now: Instant,
    ) -> Option<Duration> {
        let (mut lost_since, mut announced) = (BTreeMap::new(), BTreeMap::new());
        let (mut next, mut events) = (None, 0);
        for (place, Lost { volumes, seen }) in &lost {
            for volume in volumes {
                let key = (place.clone(), volume.uid());
                let since = loss_began(self.lost_since.get(&key), *seen, now);
                lost_since.insert(key, since);
                // A grace time that starts again ends later than announced, so it is not announced again before that.
                let deadline = since + Policy::of(volume, &self.cluster.identity).grace;
                let told = self.announced.get(&volume.uid()).copied().filter(|told| now < *told);
                if let Some(told) = told {
                    announced.insert(volume.uid(), told);
                } else if now < deadline
                    && events < MAX_ANNOUNCED
                    && self.announce(volume, place, deadline - now)
                {
                    events += 1;
                    announced.insert(volume.uid(), deadline);
                }
                let check = match self.remaining_back_off(volume, now) {
                    Some(remaining) => Some(remaining),
                    None => {
                        let reconciled = self.reconcile_volume(volume, place, since, now).await;
                        reconciled.unwrap_or_else(|error| {
                            if !error.is_conflict() {
                                self.cluster.events.publish(&**volume, Reason::NodeLost, error.to_string());
                            }
                            Some(self.back_off(volume, now))
                        })
                    }
                };
                next = next.into_iter().chain(check).min();
            }
        }
        (self.lost_since, self.announced) = (lost_since, announced);
        next
    }

    fn remaining_back_off(&self, volume: &PersistentVolume, now: Instant) -> Option<Duration> {
        self.backoff.remaining(&volume.name_any(), &volume.resource_version(), now)
    }

    fn back_off(&self, volume: &PersistentVolume, now: Instant) -> Duration {
        self.backoff.failed(volume.name_any(), volume.resource_version(), now)
    }

    /// Records what will be deleted after this time and how to prevent that: on the PersistentVolume for administrators, and on the claim
    /// for its owner. Returns `false` if nothing will be.
    fn announce(&self, volume: &PersistentVolume, place: &LostStorage, remaining: Duration) -> bool {
        let identity = &self.cluster.identity;
        if self.mode != NodeLoss::Enforce || !begins_deletion(volume, place.node(identity), identity) {
            return false;
        }
        // A grace time is at most a year.
        let remaining = SignedDuration::try_from(remaining).unwrap_or(SignedDuration::MAX);
        let deadline = Timestamp::now().checked_add(remaining).unwrap_or(Timestamp::MAX);
        let note = format!(
            "{}; at {deadline:.0}, objects of PersistentVolume {} are deleted as its annotation {} says, unless the storage is back; to \
             keep them, set that annotation to \"retain\"",
            explain(place, identity),
            volume.name_any(),
            Policy::annotation(identity),
        );
        self.cluster.events.publish(volume, Reason::NodeLost, note.as_str());
        if let Some(claim) = ownership::bound_claim(volume) {
            self.cluster.events.publish_about(claim, Reason::NodeLost, note);
        }
        true
    }

    /// Decides about one volume and acts, until there is nothing more to do now. Returns the time after which the volume has to be checked
    /// again if its object does not change: with back-off if another step must happen first that no event announces.
    async fn reconcile_volume(
        &self,
        listed: &PersistentVolume,
        place: &LostStorage,
        since: Instant,
        now: Instant,
    ) -> Result<Option<Duration>, Error> {
        let lost_for = now.duration_since(since);
        let identity = &self.cluster.identity;
        let node = place.node(identity);
        // Before the grace time is over, and for a volume that is kept, nothing else matters.
        let early = decide(NodeLossState { volume: listed, node, claim: None, lost_for }, identity);
        match early {
            Decision::Ignore => return Ok(None),
            Decision::Wait(wait) => return Ok(Some(wait)),
            _ if !will_delete(listed, node, identity) => {
                self.report(&Decision::ReportOnly, listed, place);
                return Ok(None);
            }
            _ => {}
        }
        for _ in 0..MAX_WRITES {
            let volume = self.cluster.read_volume(&listed.name_any()).await?;
            let Some(volume) = volume.filter(|volume| volume.uid() == listed.uid()) else {
                return Ok(None);
            };
            let claim = self.claim_of(&volume).await?;
            let state = NodeLossState { volume: &volume, node, claim: claim.as_ref(), lost_for };
            let decision = decide(state, identity);
            match decision {
                Decision::Ignore => return Ok(None),
                Decision::Wait(wait) => return Ok(Some(wait)),
                Decision::Requeue => break,
                Decision::ReportOnly => {
                    self.report(&decision, &volume, place);
                    return Ok(None);
                }
                _ if self.mode != NodeLoss::Enforce => {
                    self.report(&decision, &volume, place);
                    return Ok(None);
                }
                _ if !self.witness.is_lost(place, &volume).await? => break,
                Decision::DeletePv => {
                    let volumes = self.cluster.volume_api();
                    delete_unchanged(&volumes, "delete PersistentVolume", &volume).await?;
                }
                // Its provisioner would remove it after it deleted the data.
                Decision::RemoveFinalizer => drop(self.cluster.set_finalizer(&volume, false).await?),
                Decision::DeleteClaim => {
                    let Some(claim) = &claim else { break };
                    let claims = self.cluster.claim_api(&claim.namespace().unwrap_or_default());
                    delete_unchanged(&claims, "delete PersistentVolumeClaim", claim).await?;
                    let note = self.note(&decision, &volume, place);
                    self.cluster.events.publish(claim, Reason::NodeLost, note);
                }
            }
            let note = self.note(&decision, &volume, place);
            self.cluster.events.publish(&volume, Reason::NodeLost, note);
        }
        Ok(Some(self.back_off(listed, now)))
    }

    /// Records an event that says that the volume is kept, or what would be done.
    fn report(&self, decision: &Decision, volume: &PersistentVolume, place: &LostStorage) {
        let mut note = self.note(decision, volume, place);
        if *decision != Decision::ReportOnly {
            note += ", if the driver ran with --node-loss=enforce";
        }
        self.cluster.events.publish(volume, Reason::NodeLost, note);
    }

    fn note(&self, decision: &Decision, volume: &PersistentVolume, place: &LostStorage) -> String {
        format!("{}; {}", explain(place, &self.cluster.identity), describe(decision, volume))
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
}

/// Returns when a loss began that is seen `now`, and that was seen since `before`. Storage that was `seen` in between has its full grace time
/// again.
pub(crate) fn loss_began(before: Option<&Instant>, seen: Option<Instant>, now: Instant) -> Instant {
    before.copied().filter(|before| seen.is_none_or(|seen| seen <= *before)).unwrap_or(now)
}

/// Returns `true` if the API server proves that it holds no Node object of this name. A node that is not ready, for however
/// long, may come back with all its data.
pub(crate) async fn is_node_deleted(cluster: &Cluster, name: &str) -> Result<bool, Error> {
    if name.is_empty() {
        return Ok(false);
    }
    Ok(cluster.read_node(name).await?.is_none())
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

/// Returns the action, as events give it.
fn describe(decision: &Decision, volume: &PersistentVolume) -> String {
    let pv = volume.name_any();
    match decision {
        Decision::Ignore | Decision::Wait(_) | Decision::Requeue => String::new(),
        Decision::ReportOnly => format!(
            "PersistentVolume {pv} is kept: bring the node or its disk back; or, to give the data up, delete the claim and \
             PersistentVolume {pv}, and remove its finalizers by hand"
        ),
        Decision::DeletePv => {
            format!("PersistentVolume {pv} is deleted; Kubernetes removes it when its claim is deleted")
        }
        Decision::RemoveFinalizer => {
            format!(
                "PersistentVolume {pv} is released from the driver: data that remains on the node stays there"
            )
        }
        Decision::DeleteClaim => {
            let claim = volume.spec.as_ref().and_then(|spec| spec.claim_ref.as_ref());
            let part = |part: Option<&String>| part.cloned().unwrap_or_default();
            let claim = claim
                .map(|claim| format!("{}/{}", part(claim.namespace.as_ref()), part(claim.name.as_ref())));
            format!(
                "claim {:?} is deleted, so that it can be recreated on another node",
                claim.unwrap_or_default()
            )
        }
    }
}

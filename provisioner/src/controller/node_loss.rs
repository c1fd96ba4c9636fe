//! What becomes of volumes whose node is gone, or whose node has come back with another disk.
//!
//! A node is gone when its Node object is: one that is not ready, for however long, may be coming back with all its data. What the
//! provisioner of a node would do about its volumes, those of other nodes do then, as far as the volume's policy lets them, and never
//! to data: what they delete are objects.
//!
//! Nobody leads. A few nodes look, so that it does not depend on one; which these are follows from their names, and the second waits a
//! little longer than the first. Should two act all the same, each write is under the condition that its object still is what the decision
//! was made on. The time for which a node is gone is what a process has seen of it by a clock that is not set: a provisioner that is
//! restarted begins anew, and a clock that jumps hurts nobody.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::{Duration, Instant},
};

use clap::ValueEnum;
use futures::StreamExt;
use k8s_openapi::api::{
    core::v1::{Node, PersistentVolume, PersistentVolumeClaim},
    storage::v1::CSINode,
};
use kube::{
    Api, ResourceExt,
    api::{DeleteParams, ListParams, Patch, PatchParams, Preconditions},
    runtime::{
        reflector::{self, Store},
        watcher::{self, Event},
    },
};
use tokio::{sync::Notify, time::timeout};

use crate::{
    api::{absence, backoff::Backoff, events::Reason, jitter::fnv1a, pruned::Lean, queue, signals::Gate},
    error::Error,
    loss::{Decision, Sight, decide},
    node::context::Context,
    objects::{identity::Identity, ownership, pv::finalizer_patch},
    store::storage::State,
};

/// What is done about volumes of nodes that are gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum NodeLoss {
    /// Nobody looks.
    #[default]
    Off,
    /// What would be done is told, in events, and not done.
    DryRun,
    /// What the volumes' classes say.
    Enforce,
}

/// So many nodes look after the volumes of others.
const LOOKERS: usize = 3;
/// Each waits so much longer than the one before.
const HEAD_START: Duration = Duration::from_secs(10);

/// Volumes of nodes that were gone before this process began, and such whose claims have gone since.
const LOOK_EVERY: Duration = Duration::from_secs(300);
/// When the API server does not answer.
const RETRY: Duration = Duration::from_secs(5);
/// What a change of the nodes brings about comes in several parts.
const SETTLING: Duration = Duration::from_millis(500);

/// Where a volume's data is that cannot be reached.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Lost {
    /// On a node that is gone.
    Node(String),
    /// On this file system, which this node had and has no more.
    Disk(String),
}

/// Looks, for ever.
pub(crate) async fn run(ctx: Arc<Context>, mode: NodeLoss) {
    let (nodes, cache) = reflector::store();
    let synced = Gate::default();
    let changed = Notify::new();
    // Written when a driver registers and collected with its Node, where a Node is written all the time.
    let driver = ctx.cluster.identity.driver().to_owned();
    let runs_driver = move |node: &CSINode| node.spec.drivers.iter().any(|known| known.name == driver);
    let config = watcher::Config::default();
    let watching =
        queue::watch(Api::all(ctx.cluster.client.clone()), config, cache, runs_driver).for_each(|event| {
            if matches!(event, Event::InitDone) {
                synced.open();
            }
            changed.notify_one();
            std::future::ready(())
        });
    let looking = async {
        tokio::join!(synced.passed(), ctx.synced());
        let mut looker =
            Looker { ctx: &ctx, mode, nodes, gone_since: BTreeMap::new(), backoff: Backoff::default() };
        loop {
            let wait = match looker.look(Instant::now()).await {
                Ok(next) => next.unwrap_or(LOOK_EVERY).min(LOOK_EVERY),
                Err(error) => {
                    tracing::warn!(%error, "whether nodes are gone cannot be told; this is retried");
                    RETRY
                }
            };
            if timeout(wait, changed.notified()).await.is_ok() {
                tokio::time::sleep(SETTLING).await;
            }
        }
    };
    tokio::join!(watching, looking);
}

struct Looker<'a> {
    ctx: &'a Context,
    mode: NodeLoss,
    /// Those that the driver runs on.
    nodes: Store<CSINode>,
    gone_since: BTreeMap<Lost, Instant>,
    /// Volumes that have to be looked at again, by name; in other circumstances once their object has changed.
    backoff: Backoff<String, Option<String>>,
}

/// What is left to do about a volume.
enum Left {
    Nothing,
    /// After this time.
    Due(Duration),
    /// Something else has to happen first, of which nobody tells.
    Again,
}

impl Looker<'_> {
    /// Looks once, and answers when something is due that nobody will tell of.
    async fn look(&mut self, now: Instant) -> Result<Option<Duration>, Error> {
        let mut lost: BTreeMap<Lost, Vec<Arc<PersistentVolume>>> = self.on_other_disks();
        let rank = rank(&self.names(), &self.ctx.cluster.identity).filter(|rank| *rank < LOOKERS);
        if rank.is_some() {
            for name in self.suspects().await? {
                if self.is_gone(&name).await? {
                    let volumes = self.volumes_of(&name).await?;
                    lost.insert(Lost::Node(name), volumes);
                }
            }
        }
        // One that is back begins anew should it go again.
        self.gone_since.retain(|place, _| lost.contains_key(place));
        let mut next = None;
        for (place, volumes) in lost {
            let since = *self.gone_since.entry(place.clone()).or_insert(now);
            let head_start = match place {
                Lost::Node(_) => HEAD_START * u32::try_from(rank.unwrap_or_default()).unwrap_or(u32::MAX),
                Lost::Disk(_) => Duration::ZERO,
            };
            let gone = now.duration_since(since).saturating_sub(head_start);
            for volume in volumes {
                let left = match self.held(&volume, now) {
                    Some(held) => Some(held),
                    None => match self.settle(&volume, &place, gone).await {
                        Ok(Left::Nothing) => None,
                        Ok(Left::Due(wait)) => {
                            Some(wait + head_start.saturating_sub(now.duration_since(since)))
                        }
                        Ok(Left::Again) => Some(self.hold(&volume, now)),
                        Err(error) => {
                            if !error.is_conflict() {
                                self.ctx.cluster.events.publish(
                                    &*volume,
                                    Reason::NodeLost,
                                    error.to_string(),
                                );
                            }
                            Some(self.hold(&volume, now))
                        }
                    },
                };
                next = next.into_iter().chain(left).min();
            }
        }
        Ok(next)
    }

    fn held(&self, volume: &PersistentVolume, now: Instant) -> Option<Duration> {
        self.backoff.remaining(&volume.name_any(), &volume.resource_version(), now)
    }

    fn hold(&self, volume: &PersistentVolume, now: Instant) -> Duration {
        self.backoff.failed(volume.name_any(), volume.resource_version(), now)
    }

    fn names(&self) -> BTreeSet<String> {
        self.nodes.state().iter().map(|node| node.name_any()).collect()
    }

    /// Volumes of this node that are on a file system it does not have. While it has none, nothing is known.
    fn on_other_disks(&self) -> BTreeMap<Lost, Vec<Arc<PersistentVolume>>> {
        let present = match &*self.ctx.storage.changes().borrow() {
            State::Open(volumes) => volumes.filesystem_uuid(),
            State::Untried | State::Unavailable(_) | State::Absent(_) => return BTreeMap::new(),
        };
        let mut lost: BTreeMap<_, Vec<_>> = BTreeMap::new();
        for volume in self.ctx.volumes.state() {
            if let Some(uuid) =
                ownership::filesystem_uuid(&volume, &self.ctx.cluster.identity).filter(|of| *of != present)
            {
                lost.entry(Lost::Disk(uuid.to_owned())).or_default().push(Arc::clone(&volume));
            }
        }
        lost
    }

    /// Nodes that have volumes and that the driver does not run on.
    async fn suspects(&self) -> Result<BTreeSet<String>, Error> {
        let label = self.ctx.cluster.identity.node_label();
        // From the API server's memory: whoever is suspected is asked for.
        let labelled = ListParams::default().labels(&label).match_any();
        let volumes = self.ctx.cluster.volume_api().list_metadata(&labelled).await;
        let volumes = volumes.map_err(|error| Error::api("list", "the PersistentVolumes", error))?;
        let known = self.names();
        let nodes = volumes.items.into_iter().filter_map(|volume| volume.metadata.labels?.remove(&label));
        Ok(nodes.filter(|node| !known.contains(node) && node != self.ctx.cluster.identity.node()).collect())
    }

    /// Whether there is no Node object, and not what somebody remembers of it.
    async fn is_gone(&self, name: &str) -> Result<bool, Error> {
        if name.is_empty() {
            return Ok(false);
        }
        let nodes: Api<Node> = Api::all(self.ctx.cluster.client.clone());
        let node = absence::get_metadata_opt(&nodes, name).await;
        let node = node.map_err(|error| Error::api("read Node", name, error))?;
        Ok(node.is_none())
    }

    async fn volumes_of(&self, node: &str) -> Result<Vec<Arc<PersistentVolume>>, Error> {
        let labelled =
            ListParams::default().labels(&format!("{}={node}", self.ctx.cluster.identity.node_label()));
        let volumes = self.ctx.cluster.volume_api().list(&labelled).await;
        let volumes = volumes.map_err(|error| Error::api("list", "the PersistentVolumes", error))?;
        Ok(volumes.into_iter().map(|volume| Arc::new(volume.into_inner())).collect())
    }

    /// Decides about a volume and acts, and answers what is left.
    async fn settle(&self, volume: &PersistentVolume, place: &Lost, gone: Duration) -> Result<Left, Error> {
        let identity = &self.ctx.cluster.identity;
        let node = match place {
            Lost::Node(name) => name,
            Lost::Disk(_) => identity.node(),
        };
        // Before the time has come, the claim does not matter.
        let early = decide(Sight { volume, node, claim: None, gone }, identity);
        let claim = match early {
            Decision::Leave => return Ok(Left::Nothing),
            Decision::Wait(wait) => return Ok(Left::Due(wait)),
            _ => self.claim_of(volume).await?,
        };
        let decision = decide(Sight { volume, node, claim: claim.as_ref(), gone }, identity);
        if matches!(decision, Decision::Await) {
            return Ok(Left::Again);
        }
        let Some(what) = described(&decision, volume) else { return Ok(Left::Nothing) };
        let told = explain(place, identity);
        if decision == Decision::Report || self.mode != NodeLoss::Enforce {
            let note = match decision {
                Decision::Report => format!("{told}; {what}"),
                _ => format!("{told}; {what}, if the provisioner ran with --node-loss=enforce"),
            };
            self.ctx.cluster.events.publish(volume, Reason::NodeLost, note);
            return Ok(Left::Nothing);
        }
        // It may have come back while others were settled.
        if let Lost::Node(name) = place
            && !self.is_gone(name).await?
        {
            return Ok(Left::Again);
        }
        match decision {
            Decision::DeleteClaim => {
                if let Some(claim) = &claim {
                    let namespace = claim.namespace().unwrap_or_default();
                    delete(&self.ctx.cluster.claim_api(&namespace), "delete PersistentVolumeClaim", claim)
                        .await?;
                    self.ctx.cluster.events.publish(claim, Reason::NodeLost, format!("{told}; {what}"));
                }
            }
            _ => {
                if volume.metadata.deletion_timestamp.is_none() {
                    delete(&self.ctx.cluster.volume_api(), "delete PersistentVolume", volume).await?;
                }
                if decision == Decision::LetGo {
                    self.let_go(volume).await?;
                }
            }
        }
        self.ctx.cluster.events.publish(volume, Reason::NodeLost, format!("{told}; {what}"));
        Ok(Left::Again)
    }

    /// What is under the name of the volume's claim.
    async fn claim_of(&self, volume: &PersistentVolume) -> Result<Option<PersistentVolumeClaim>, Error> {
        let reference = volume.spec.as_ref().and_then(|spec| spec.claim_ref.as_ref());
        let named =
            reference.and_then(|reference| reference.namespace.as_deref().zip(reference.name.as_deref()));
        let Some((namespace, name)) =
            named.filter(|(namespace, name)| !namespace.is_empty() && !name.is_empty())
        else {
            return Ok(None);
        };
        let claim = absence::get_opt(&self.ctx.cluster.claim_api(namespace), name).await;
        let claim = claim.map_err(|error| Error::api("read PersistentVolumeClaim", name, error))?;
        Ok(claim.map(Lean::into_inner))
    }

    /// Takes the finalizer off, which waits for a node that is not.
    async fn let_go(&self, volume: &PersistentVolume) -> Result<(), Error> {
        let (name, patch) = (volume.name_any(), Patch::Strategic(finalizer_patch(volume, false)));
        let patched = self.ctx.cluster.volume_api().patch(&name, &PatchParams::default(), &patch).await;
        absence::unless_absent::<PersistentVolume, _>(patched, &(), &name)
            .map(drop)
            .map_err(|error| Error::api("change the finalizers of PersistentVolume", name, error))
    }
}

/// The place of this node among those that look: the same to whoever reckons it.
fn rank(nodes: &BTreeSet<String>, identity: &Identity) -> Option<usize> {
    let mut ranked: Vec<_> = nodes.iter().map(|node| (fnv1a(&[identity.driver(), node]), node)).collect();
    ranked.sort_unstable();
    ranked.iter().position(|(_, node)| *node == identity.node())
}

/// Under the condition that it still is what was decided about: a claim made anew under the name is another.
async fn delete<K: queue::Object>(
    api: &Api<Lean<K>>,
    operation: &'static str,
    object: &K,
) -> Result<(), Error> {
    let preconditions = Preconditions { uid: object.uid(), resource_version: object.resource_version() };
    let parameters = DeleteParams { preconditions: Some(preconditions), ..DeleteParams::default() };
    let name = object.name_any();
    api.delete(&name, &parameters).await.map(drop).map_err(|error| Error::api(operation, name, error))
}

fn explain(place: &Lost, identity: &Identity) -> String {
    match place {
        Lost::Node(name) => format!("node {name:?}, which has the volume's data, does not exist any more"),
        Lost::Disk(uuid) => {
            format!(
                "the volume is on file system {uuid}, which node {:?} does not have any more",
                identity.node()
            )
        }
    }
}

/// What a decision is to whoever reads of it.
fn described(decision: &Decision, volume: &PersistentVolume) -> Option<String> {
    let claim = volume.spec.as_ref().and_then(|spec| spec.claim_ref.as_ref());
    let shown = |part: Option<&String>| part.cloned().unwrap_or_default();
    let claim =
        claim.map(|claim| format!("{}/{}", shown(claim.namespace.as_ref()), shown(claim.name.as_ref())));
    Some(match decision {
        Decision::Leave | Decision::Wait(_) | Decision::Await => return None,
        Decision::Report => {
            "it is kept: bring the node or its disk back; or, to give the data up, delete the claim and this \
                             object, and remove its finalizers by hand"
                .to_owned()
        }
        Decision::DeleteClaim => {
            format!("claim {:?} is deleted, to be made anew elsewhere", claim.unwrap_or_default())
        }
        Decision::DeleteVolume => "this object is deleted, and goes when its claim does".to_owned(),
        Decision::LetGo => "this object is deleted; what the node has of the data stays there".to_owned(),
    })
}

#[cfg(test)]
mod tests;

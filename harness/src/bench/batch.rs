//! A batch of claims that are created concurrently and deleted together.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use futures::{StreamExt, TryStreamExt};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use kube::api::{DeleteParams, ListParams, PostParams};
use kube::runtime::watcher;
use kube::{Api, Client, Resource, ResourceExt};
use serde::de::DeserializeOwned;
use tokio::sync::Notify;

use super::cluster::NAMESPACE;
use crate::cluster::api_error::api_error;
use crate::cluster::waiting::{State, until};
use crate::test_env::sizes::Size;
use crate::test_env::{claims, workload};

/// The label on every claim with the name of its batch.
const LABEL: &str = "bench";
/// The number of claims that are created concurrently.
const REQUESTS: usize = 32;
const SIZE: Size = Size::mebibytes(1);
const REMOVE_TIMEOUT: Duration = Duration::from_secs(600);
/// Limits the provisioning of one volume on a busy cluster.
const PROVISION_TIMEOUT: Duration = Duration::from_secs(120);

/// The times from the request to delete all claims until a claim and its volume were deleted.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct DeletionTimes {
    pub(super) claim: Duration,
    pub(super) volume: Duration,
}

impl DeletionTimes {
    /// Returns the time between the two. They come from two watches, so the volume's deletion may be seen first.
    pub(super) fn after_claim(&self) -> Duration {
        self.volume.saturating_sub(self.claim)
    }
}

#[derive(Clone)]
pub(super) struct Batch {
    pub(super) client: Client,
    pub(super) name: String,
    pub(super) class: String,
    pub(super) node: String,
    pub(super) claims: u64,
}

impl Batch {
    /// Creates the claims as the scheduler leaves them once it has chosen the node. Returns the time from the first request until the
    /// last claim is bound.
    pub(super) async fn bind(&self, within: Duration) -> Result<Duration> {
        let started = Instant::now();
        let creating = futures::stream::iter(0..self.claims)
            .map(|number| self.create(number))
            .buffer_unordered(REQUESTS)
            .try_for_each(async |_claim| Ok(()));
        let binding = async {
            let scope = watcher::Config::default().labels(&self.selector());
            let bound = until(self.api(), scope, within, |all| {
                let bound = all.values().filter(|claim| claims::is_bound(claim)).count() as u64;
                State::when(bound == self.claims, format!("{bound} of {} claims are bound", self.claims))
            });
            bound.await.map(drop).with_context(|| format!("batch {}", self.name))
        };
        tokio::try_join!(creating, binding)?;
        Ok(started.elapsed())
    }

    /// Creates one claim, and returns the time until it has a volume.
    pub(super) async fn provision(&self, number: u64) -> Result<Duration> {
        let started = Instant::now();
        let claim = self.create(number).await?;
        let volume = format!("pvc-{}", claim.uid().context("a claim has no uid")?);
        let scope = watcher::Config::default().fields(&format!("metadata.name={volume}"));
        let volumes: Api<PersistentVolume> = Api::all(self.client.clone());
        until(volumes, scope, PROVISION_TIMEOUT, |volumes| {
            State::when(!volumes.is_empty(), format!("there is no PersistentVolume {volume}"))
        })
        .await
        .with_context(|| format!("claim {}", claim.name_any()))?;
        Ok(started.elapsed())
    }

    /// Deletes the claims, and waits until they and their volumes are deleted. Returns the times of each.
    pub(super) async fn remove(&self) -> Result<Vec<DeletionTimes>> {
        let (claims, volumes) = (DeletionWatch::default(), DeletionWatch::default());
        let deleting = async {
            // The watch would miss an object that is deleted before the watch begins.
            claims.watched.notified().await;
            volumes.watched.notified().await;
            let started = Instant::now();
            let selected = ListParams::default().labels(&self.selector());
            let deleted = self.api().delete_collection(&DeleteParams::default(), &selected).await;
            deleted.map_err(api_error).context("delete the claims")?;
            Ok(started)
        };
        let scope = watcher::Config::default().labels(&self.selector());
        let claims_deleted =
            claims.until_deleted(self.api(), scope, "claims", |claim| number(&self.name, &claim.name_any()));
        let all = Api::all(self.client.clone());
        let volumes_deleted = volumes.until_deleted(all, watcher::Config::default(), "volumes", |volume| {
            number(&self.name, claim_of(volume)?)
        });
        let deleted = async { tokio::try_join!(deleting, claims_deleted, volumes_deleted) };
        let (started, claims, volumes) =
            deleted.await.with_context(|| format!("remove batch {}", self.name))?;
        Ok(deletion_times(started, &claims, &volumes))
    }

    async fn create(&self, number: u64) -> Result<PersistentVolumeClaim> {
        let name = format!("{}-{number}", self.name);
        let claim = workload::claim(&name, &self.class, SIZE, "Filesystem", "ReadWriteOnce")?;
        let mut claim = claims::on_node(claim, &self.node);
        claim.labels_mut().insert(LABEL.to_owned(), self.name.clone());
        let created = self.api().create(&PostParams::default(), &claim).await;
        created.map_err(api_error).with_context(|| format!("create claim {name}"))
    }

    fn selector(&self) -> String {
        format!("{LABEL}={}", self.name)
    }

    fn api(&self) -> Api<PersistentVolumeClaim> {
        Api::namespaced(self.client.clone(), NAMESPACE)
    }
}

/// Watches the deletion of a batch's objects.
#[derive(Default)]
struct DeletionWatch {
    /// Notified when the watch has begun.
    watched: Notify,
}

impl DeletionWatch {
    /// Waits until no object is left that `number_of` knows, and returns when each was deleted.
    async fn until_deleted<K>(
        &self,
        api: Api<K>,
        scope: watcher::Config,
        kind: &str,
        number_of: impl Fn(&K) -> Option<u64>,
    ) -> Result<BTreeMap<u64, Instant>>
    where
        K: Resource<DynamicType: Default> + Clone + Debug + DeserializeOwned + Send + 'static,
    {
        let (mut present, mut deleted) = (BTreeSet::new(), BTreeMap::new());
        until(api, scope, REMOVE_TIMEOUT, |objects| {
            self.watched.notify_one();
            let left = objects.values().filter_map(&number_of).collect();
            let now = Instant::now();
            deleted.extend(present.difference(&left).map(|number| (*number, now)));
            present = left;
            State::when(present.is_empty(), format!("{} {kind} are left", present.len()))
        })
        .await?;
        Ok(deleted)
    }
}

fn deletion_times(
    started: Instant,
    claims: &BTreeMap<u64, Instant>,
    volumes: &BTreeMap<u64, Instant>,
) -> Vec<DeletionTimes> {
    let after = |at: &Instant| at.saturating_duration_since(started);
    let both = claims.iter().filter_map(|(number, claim)| Some((claim, volumes.get(number)?)));
    both.map(|(claim, volume)| DeletionTimes { claim: after(claim), volume: after(volume) }).collect()
}

/// Returns the number of a claim in the batch, or `None` if the claim is in none or in another.
fn number(batch: &str, claim: &str) -> Option<u64> {
    claim.strip_prefix(batch)?.strip_prefix('-')?.parse().ok()
}

fn claim_of(volume: &PersistentVolume) -> Option<&str> {
    volume.spec.as_ref()?.claim_ref.as_ref()?.name.as_deref()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn claims_and_volumes_of_another_batch_are_distinguished() {
        let volume = |claim: &str| -> PersistentVolume {
            serde_json::from_value(json!({"metadata": {}, "spec": {"claimRef": {"name": claim}}})).unwrap()
        };
        let number = |claim: &str| number("peer-1", claim_of(&volume(claim)).unwrap());
        assert_eq!(number("peer-1-12"), Some(12));
        assert_eq!(number("peer-1-first-0"), None);
        assert_eq!(number("peer-12-0"), None);
        assert_eq!(claim_of(&PersistentVolume::default()), None);
    }

    #[test]
    fn a_deletion_has_the_times_of_claim_and_volume() {
        let started = Instant::now();
        let at = |milliseconds| started + Duration::from_millis(milliseconds);
        let claims = BTreeMap::from([(0, at(10)), (1, at(20)), (2, at(30))]);
        let volumes = BTreeMap::from([(0, at(15)), (2, at(25))]);
        let times = |claim, volume| DeletionTimes {
            claim: Duration::from_millis(claim),
            volume: Duration::from_millis(volume),
        };
        assert_eq!(deletion_times(started, &claims, &volumes), [times(10, 15), times(30, 25)]);
    }
}

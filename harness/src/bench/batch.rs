//! A batch of claims that are created concurrently and deleted together. Each claim has a number in its batch.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use futures::{StreamExt, TryFutureExt, TryStreamExt};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use kube::api::{DeleteParams, ListParams};
use kube::runtime::watcher;
use kube::{Api, Client, Resource, ResourceExt};
use serde::de::DeserializeOwned;
use testvm_cluster::api_error::api_error;
use testvm_cluster::objects;
use testvm_cluster::waiting::{State, until};
use tokio::sync::Notify;

use super::cluster::NAMESPACE;
use crate::test_env::sizes::Size;
use crate::test_env::{claims, workload};

/// The key of a label on every claim. Its value is the name of the claim's batch.
const BATCH_LABEL: &str = "bench";
const CLAIM_SIZE: Size = Size::mebibytes(1);
const CREATE_CONCURRENCY: usize = 32;
/// The timeout of the provisioning of one volume on a busy cluster.
const PROVISION_TIMEOUT: Duration = Duration::from_secs(120);
/// The timeout of the deletion of a whole batch.
const DELETION_TIMEOUT: Duration = Duration::from_secs(600);

pub(super) struct Batch {
    client: Client,
    name: String,
    /// The StorageClass of the claims.
    class: String,
    /// The node on which the volumes are provisioned.
    node: String,
    /// The number of claims that [`Batch::create_and_bind`] and [`Batch::create_and_provision`] create.
    claim_count: u64,
}

/// The times from the first request to create a claim of a batch until all its objects are in a state.
#[derive(Clone, Copy, Debug)]
pub(super) struct ProvisioningTimes {
    /// The claims exist.
    pub(super) created: Duration,
    /// The PersistentVolumes of the claims exist.
    pub(super) provisioned: Duration,
    /// The claims are bound.
    pub(super) bound: Duration,
}

/// The times from the request to delete a batch until one of its claims, and the PersistentVolume of that claim, were
/// deleted.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct DeletionTimes {
    pub(super) claim: Duration,
    pub(super) volume: Duration,
}

impl DeletionTimes {
    /// Returns the time from the deletion of the claim to that of its volume. Returns zero if the deletion of the volume
    /// was seen first, which happens because the two are seen by different watches.
    pub(super) fn volume_after_claim(&self) -> Duration {
        self.volume.saturating_sub(self.claim)
    }
}

impl Batch {
    pub(super) fn new(client: &Client, name: &str, class: &str, node: &str, claim_count: u64) -> Batch {
        let [name, class, node] = [name, class, node].map(str::to_owned);
        Batch { client: client.clone(), name, class, node, claim_count }
    }

    /// Creates the claims, and returns the time from the first request until all claims are bound.
    pub(super) async fn create_and_bind(&self, timeout: Duration) -> Result<Duration> {
        let start = Instant::now();
        tokio::try_join!(self.create_all(), self.until_bound(timeout))?;
        Ok(start.elapsed())
    }

    /// Creates the claims, and returns the times until they and their PersistentVolumes exist and until they are bound.
    pub(super) async fn create_and_provision(&self, timeout: Duration) -> Result<ProvisioningTimes> {
        let start = Instant::now();
        let elapsed = |()| start.elapsed();
        let (created, provisioned, bound) = tokio::try_join!(
            self.create_all().map_ok(elapsed),
            self.until_provisioned(timeout).map_ok(elapsed),
            self.until_bound(timeout).map_ok(elapsed),
        )?;
        Ok(ProvisioningTimes { created, provisioned, bound })
    }

    async fn create_all(&self) -> Result<()> {
        futures::stream::iter(0..self.claim_count)
            .map(|number| self.create(number))
            .buffer_unordered(CREATE_CONCURRENCY)
            .try_for_each(async |_claim| Ok(()))
            .await
    }

    async fn until_provisioned(&self, timeout: Duration) -> Result<()> {
        let volumes: Api<PersistentVolume> = Api::all(self.client.clone());
        let provisioned = until(volumes, watcher::Config::default(), timeout, |all| {
            let of_batch = |volume: &&PersistentVolume| {
                claim_name(volume).and_then(|claim| number_in_batch(&self.name, claim)).is_some()
            };
            let provisioned = all.values().filter(of_batch).count() as u64;
            let pending = format!("{provisioned} of {} claims have a PersistentVolume", self.claim_count);
            State::ready_if(provisioned == self.claim_count, pending)
        });
        provisioned.await.map(drop).with_context(|| format!("batch {}", self.name))
    }

    async fn until_bound(&self, timeout: Duration) -> Result<()> {
        let scope = watcher::Config::default().labels(&self.selector());
        let bound = until(self.api(), scope, timeout, |all| {
            let bound = all.values().filter(|claim| claims::is_bound(claim)).count() as u64;
            let pending = format!("{bound} of {} claims are bound", self.claim_count);
            State::ready_if(bound == self.claim_count, pending)
        });
        bound.await.map(drop).with_context(|| format!("batch {}", self.name))
    }

    /// Creates one claim, and returns the time until its PersistentVolume exists.
    pub(super) async fn provision_one(&self, number: u64) -> Result<Duration> {
        let start = Instant::now();
        let claim = self.create(number).await?;
        // The name that a provisioner gives to the volume of a claim.
        let volume = format!("pvc-{}", claim.uid().context("a claim has no uid")?);
        let scope = watcher::Config::default().fields(&format!("metadata.name={volume}"));
        let volumes: Api<PersistentVolume> = Api::all(self.client.clone());
        until(volumes, scope, PROVISION_TIMEOUT, |volumes| {
            State::ready_if(!volumes.is_empty(), format!("there is no PersistentVolume {volume}"))
        })
        .await
        .with_context(|| format!("claim {}", claim.name_any()))?;
        Ok(start.elapsed())
    }

    /// Deletes the claims, and waits until they and their volumes are deleted. Returns the times of each claim.
    pub(super) async fn delete(&self) -> Result<Vec<DeletionTimes>> {
        let (claim_watch, volume_watch) = (DeletionWatch::default(), DeletionWatch::default());
        let deleting = async {
            // A watch would miss an object that is deleted before the watch begins.
            claim_watch.started.notified().await;
            volume_watch.started.notified().await;
            let requested_at = Instant::now();
            let batch = ListParams::default().labels(&self.selector());
            let deleted = self.api().delete_collection(&DeleteParams::default(), &batch).await;
            deleted.map_err(api_error).context("delete the claims")?;
            Ok(requested_at)
        };
        let scope = watcher::Config::default().labels(&self.selector());
        let claims_deleted = claim_watch.until_all_deleted(self.api(), scope, "claims", |claim| {
            number_in_batch(&self.name, &claim.name_any())
        });
        let all_volumes = Api::all(self.client.clone());
        let scope = watcher::Config::default();
        let volumes_deleted = volume_watch.until_all_deleted(all_volumes, scope, "volumes", |volume| {
            number_in_batch(&self.name, claim_name(volume)?)
        });
        let all_deleted = async { tokio::try_join!(deleting, claims_deleted, volumes_deleted) };
        let (requested_at, claims, volumes) =
            Box::pin(all_deleted).await.with_context(|| format!("delete batch {}", self.name))?;
        Ok(deletion_times(requested_at, &claims, &volumes))
    }

    async fn create(&self, number: u64) -> Result<PersistentVolumeClaim> {
        let name = format!("{}-{number}", self.name);
        let mode = workload::VolumeMode::Filesystem;
        let claim = workload::claim(&name, &self.class, CLAIM_SIZE, mode, "ReadWriteOnce")?;
        let mut claim = claims::with_selected_node(claim, &self.node);
        claim.labels_mut().insert(BATCH_LABEL.to_owned(), self.name.clone());
        objects::create(&self.api(), &claim).await
    }

    fn selector(&self) -> String {
        format!("{BATCH_LABEL}={}", self.name)
    }

    fn api(&self) -> Api<PersistentVolumeClaim> {
        Api::namespaced(self.client.clone(), NAMESPACE)
    }
}

/// Watches the deletion of a batch's objects.
#[derive(Default)]
struct DeletionWatch {
    /// Notified when the watch has begun.
    started: Notify,
}

impl DeletionWatch {
    /// Waits until the batch has no object of the kind, and returns the time of each deletion by the number of the claim.
    ///
    /// `number_of` returns `None` for an object that does not belong to the batch. `kind` is the plural in messages.
    async fn until_all_deleted<K>(
        &self,
        api: Api<K>,
        scope: watcher::Config,
        kind: &str,
        number_of: impl Fn(&K) -> Option<u64>,
    ) -> Result<BTreeMap<u64, Instant>>
    where
        K: Resource<DynamicType: Default> + Clone + Debug + DeserializeOwned + Send + 'static,
    {
        let (mut existing, mut deleted) = (BTreeSet::new(), BTreeMap::new());
        until(api, scope, DELETION_TIMEOUT, |objects| {
            self.started.notify_one();
            let left = objects.values().filter_map(&number_of).collect();
            let now = Instant::now();
            deleted.extend(existing.difference(&left).map(|number| (*number, now)));
            existing = left;
            State::ready_if(existing.is_empty(), format!("{} {kind} are left", existing.len()))
        })
        .await?;
        Ok(deleted)
    }
}

/// Combines the times at which claims and their volumes were deleted. Omits a claim without a volume.
fn deletion_times(
    requested_at: Instant,
    claims: &BTreeMap<u64, Instant>,
    volumes: &BTreeMap<u64, Instant>,
) -> Vec<DeletionTimes> {
    let after = |at: &Instant| at.saturating_duration_since(requested_at);
    let both = claims.iter().filter_map(|(number, claim)| Some((claim, volumes.get(number)?)));
    both.map(|(claim, volume)| DeletionTimes { claim: after(claim), volume: after(volume) }).collect()
}

/// Returns the number in a claim's name, or `None` if the claim does not belong to the batch.
fn number_in_batch(batch: &str, claim: &str) -> Option<u64> {
    claim.strip_prefix(batch)?.strip_prefix('-')?.parse().ok()
}

fn claim_name(volume: &PersistentVolume) -> Option<&str> {
    volume.spec.as_ref()?.claim_ref.as_ref()?.name.as_deref()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn foreign_claim_has_no_batch_number() {
        let volume = |claim: &str| -> PersistentVolume {
            serde_json::from_value(json!({"metadata": {}, "spec": {"claimRef": {"name": claim}}})).unwrap()
        };
        let number = |claim: &str| number_in_batch("peer-1", claim_name(&volume(claim)).unwrap());
        assert_eq!(number("peer-1-12"), Some(12));
        assert_eq!(number("peer-1-first-0"), None);
        assert_eq!(number("peer-12-0"), None);
        assert_eq!(claim_name(&PersistentVolume::default()), None);
    }

    /// A claim whose volume was not deleted is omitted.
    #[test]
    fn deletion_times_need_both_events() {
        let requested_at = Instant::now();
        let at = |milliseconds| requested_at + Duration::from_millis(milliseconds);
        let claims = BTreeMap::from([(0, at(10)), (1, at(20)), (2, at(30))]);
        let volumes = BTreeMap::from([(0, at(15)), (2, at(25))]);
        let times = |claim, volume| DeletionTimes {
            claim: Duration::from_millis(claim),
            volume: Duration::from_millis(volume),
        };
        assert_eq!(deletion_times(requested_at, &claims, &volumes), [times(10, 15), times(30, 25)]);
    }
}

//! Claims that are made at once, and go together.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use futures::{StreamExt, TryStreamExt};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use kube::api::{DeleteParams, ListParams, PostParams};
use kube::runtime::watcher;
use kube::{Api, Client, ResourceExt};

use super::cluster::NAMESPACE;
use crate::cluster::api_error::told;
use crate::cluster::waiting::{State, until};
use crate::e2e::sizes::Size;
use crate::e2e::{claims, workload};

/// On every claim: the batch that it is of.
const LABEL: &str = "bench";
/// Requests at once of whoever makes the claims.
const REQUESTS: usize = 32;
const SIZE: Size = Size::mebibytes(1);
const REMOVE_TIME: Duration = Duration::from_secs(600);
/// For a volume that is made while much else is done.
const PROVISION_TIME: Duration = Duration::from_secs(120);

#[derive(Clone)]
pub(super) struct Batch {
    pub(super) client: Client,
    pub(super) name: String,
    pub(super) class: String,
    pub(super) node: String,
    pub(super) claims: u64,
}

impl Batch {
    /// Makes the claims as the scheduler leaves them once it has chosen the node, and answers how long it took from the first
    /// to the last that is bound.
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

    /// Makes one claim, and answers how long it took until it had a volume.
    pub(super) async fn provision(&self, number: u64) -> Result<Duration> {
        let started = Instant::now();
        let claim = self.create(number).await?;
        let volume = format!("pvc-{}", claim.uid().context("a claim has no uid")?);
        let scope = watcher::Config::default().fields(&format!("metadata.name={volume}"));
        let volumes: Api<PersistentVolume> = Api::all(self.client.clone());
        until(volumes, scope, PROVISION_TIME, |volumes| {
            State::when(!volumes.is_empty(), format!("there is no PersistentVolume {volume}"))
        })
        .await
        .with_context(|| format!("claim {}", claim.name_any()))?;
        Ok(started.elapsed())
    }

    /// Deletes the claims and waits until no volume of their class is left that was bound to one of them.
    pub(super) async fn remove(&self) -> Result<()> {
        let selected = ListParams::default().labels(&self.selector());
        let deleted = self.api().delete_collection(&DeleteParams::default(), &selected).await;
        deleted.map_err(told).with_context(|| format!("delete the claims of batch {}", self.name))?;
        let prefix = format!("{}-", self.name);
        let volumes: Api<PersistentVolume> = Api::all(self.client.clone());
        until(volumes, watcher::Config::default(), REMOVE_TIME, |volumes| {
            let left = volumes.values().filter(|volume| is_of(volume, &prefix)).count();
            State::when(left == 0, format!("{left} volumes are left"))
        })
        .await
        .with_context(|| format!("remove batch {}", self.name))
        .map(drop)
    }

    async fn create(&self, number: u64) -> Result<PersistentVolumeClaim> {
        let name = format!("{}-{number}", self.name);
        let claim = workload::claim(&name, &self.class, SIZE, "Filesystem", "ReadWriteOnce")?;
        let mut claim = claims::on_node(claim, &self.node);
        claim.labels_mut().insert(LABEL.to_owned(), self.name.clone());
        let created = self.api().create(&PostParams::default(), &claim).await;
        created.map_err(told).with_context(|| format!("create claim {name}"))
    }

    fn selector(&self) -> String {
        format!("{LABEL}={}", self.name)
    }

    fn api(&self) -> Api<PersistentVolumeClaim> {
        Api::namespaced(self.client.clone(), NAMESPACE)
    }
}

/// Whether the volume was made for a claim called `prefix` and a number.
fn is_of(volume: &PersistentVolume, prefix: &str) -> bool {
    let claim = volume.spec.as_ref().and_then(|spec| spec.claim_ref.as_ref()?.name.as_deref());
    let number = claim.and_then(|name| name.strip_prefix(prefix));
    number.is_some_and(|number| number.bytes().all(|byte| byte.is_ascii_digit()))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn volumes_of_another_batch_are_told_apart() {
        let volume = |claim: &str| -> PersistentVolume {
            serde_json::from_value(json!({"metadata": {}, "spec": {"claimRef": {"name": claim}}})).unwrap()
        };
        assert!(is_of(&volume("peer-1-12"), "peer-1-"));
        assert!(!is_of(&volume("peer-1-first-0"), "peer-1-"));
        assert!(!is_of(&volume("peer-12-0"), "peer-1-"));
        assert!(!is_of(&PersistentVolume::default(), "peer-1-"));
    }
}

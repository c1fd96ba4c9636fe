//! Claims of many nodes, which the provisioners of these nodes and kube-controller-manager bind.

use std::collections::BTreeSet;
use std::pin::pin;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use futures::{Stream, StreamExt, TryStreamExt};
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client, ResourceExt};
use testvm::progress::Step;
use tokio::time::timeout;

use super::super::cluster::NAMESPACE;
use super::claims::create_for_node;
use crate::test_env::claims::is_bound;

const CREATE_CONCURRENCY: usize = 32;
/// The timeout from one bound claim to the next.
const BIND_TIMEOUT: Duration = Duration::from_secs(120);
/// The number of names in the error about claims that are not bound.
const NAMED_CLAIMS: usize = 10;

/// The claims of a fleet.
pub(super) struct FleetClaims<'a> {
    api: Api<PersistentVolumeClaim>,
    nodes: &'a [String],
    per_node: u64,
}

impl<'a> FleetClaims<'a> {
    pub(super) fn new(client: &Client, nodes: &'a [String], per_node: u64) -> FleetClaims<'a> {
        FleetClaims { api: Api::namespaced(client.clone(), NAMESPACE), nodes, per_node }
    }

    /// Returns the number of all claims.
    pub(super) fn count(&self) -> u64 {
        self.nodes.len() as u64 * self.per_node
    }

    /// Creates the claims, and returns the time from the first request until all are bound.
    pub(super) async fn create_and_bind(&self, step: &Step) -> Result<Duration> {
        let started = Instant::now();
        let creating = futures::stream::iter(self.names_and_nodes())
            .map(async |(name, node)| create_for_node(&self.api, &name, node).await)
            .buffer_unordered(CREATE_CONCURRENCY)
            .try_for_each(async |()| Ok(()));
        let unbound = self.names_and_nodes().map(|(name, _)| name).collect();
        let changes = watcher(self.api.clone(), watcher::Config::default()).default_backoff();
        tokio::try_join!(creating, until_bound(changes, unbound, step))?;
        Ok(started.elapsed())
    }

    /// Returns the claims in the order of their creation, which goes round the nodes.
    fn names_and_nodes(&self) -> impl Iterator<Item = (String, &'a str)> {
        let nodes = self.nodes;
        (0..self.per_node)
            .flat_map(move |round| nodes.iter().map(move |node| (format!("{node}-{round}"), node.as_str())))
    }
}

/// Waits until all claims in `unbound` are bound. Fails if none of them becomes bound in [`BIND_TIMEOUT`].
async fn until_bound(
    changes: impl Stream<Item = watcher::Result<watcher::Event<PersistentVolumeClaim>>>,
    mut unbound: BTreeSet<String>,
    step: &Step,
) -> Result<()> {
    let (mut changes, count) = (pin!(changes), unbound.len());
    let mut last_error = None;
    while !unbound.is_empty() {
        let next_bound = async {
            loop {
                match changes.next().await {
                    Some(Ok(watcher::Event::Apply(claim) | watcher::Event::InitApply(claim)))
                        if is_bound(&claim) && unbound.contains(&claim.name_any()) =>
                    {
                        return Some(claim.name_any());
                    }
                    Some(Ok(_)) => {}
                    // The watcher retries.
                    Some(Err(error)) => last_error = Some(error),
                    None => return None,
                }
            }
        };
        let Ok(Some(name)) = timeout(BIND_TIMEOUT, next_bound).await else {
            let names: Vec<&str> = unbound.iter().take(NAMED_CLAIMS).map(String::as_str).collect();
            bail!(
                "{} of {count} claims are not bound, and none was bound in {BIND_TIMEOUT:?}; some of them are {}; \
                 the last error of the watch is {last_error:?}",
                unbound.len(),
                names.join(", ")
            );
        };
        unbound.remove(&name);
        step.note(format!("{} of {count} claims are bound", count - unbound.len()));
    }
    Ok(())
}

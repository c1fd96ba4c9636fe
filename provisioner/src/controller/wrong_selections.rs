//! Removes the selected node from a claim that this node keeps waiting.
//!
//! While a claim names a node, the scheduler selects no other one for it, and no other node serves it. Two such claims would wait for
//! ever: one that waits for a volume on a node that was deleted, and one that waits for an expansion on another node than that of its
//! volume, whose disk was moved. Without the annotation, the scheduler or the controller selects again, and the node of the
//! volume expands it.
//!
//! A claim whose node exists, but does not run the driver, keeps its node and gets an event: the driver may start again, and the volume may
//! be on that node already.
//!
//! The node of a claim that waits for its volume may provision in the meantime. Then the claim has a volume there, and nothing is lost.

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use kube::ResourceExt;
use kube::runtime::reflector::ObjectRef;
use parking_lot::Mutex;
use tokio::time::{sleep, timeout};

use super::pending_claims::{self, PendingClaims};
use super::registered_nodes::{RESTART_TIME, RegisteredNodes};
use crate::api::backoff::Backoff;
use crate::api::cluster::Cluster;
use crate::api::events::Reason;
use crate::error::Error;
use crate::loss::is_node_deleted;
use crate::objects::ownership;

/// Wait after a change. Most expansions are complete by then, and their claims need no check.
const DEBOUNCE: Duration = Duration::from_secs(1);
/// The interval of the check without a change. A node counts as registered for a while after its driver ended, and no event tells when
/// that time is over.
const POLL_INTERVAL: Duration = Duration::from_secs(60);
/// At most this number of claims gets an event about a node without the driver in each interval. A tenant can create any number of such
/// claims, and the events of all others would wait behind theirs.
const REPORTS: u32 = 100;
const REPORT_INTERVAL: Duration = Duration::from_secs(300);

/// Checks the selected nodes until shutdown.
pub(crate) async fn run(cluster: &Cluster, nodes: &RegisteredNodes, claims: &PendingClaims) {
    tokio::join!(nodes.synced.wait(), claims.synced.wait());
    let check = WrongSelections::new(cluster, nodes, claims);
    let (mut node_changes, mut claim_changes) = (nodes.changes(), claims.changes());
    loop {
        let next = check.check(Instant::now()).await.unwrap_or(POLL_INTERVAL).min(POLL_INTERVAL);
        let change = async {
            tokio::select! {
                _ = node_changes.changed() => {}
                _ = claim_changes.changed() => {}
            }
        };
        drop(timeout(next, change).await);
        sleep(DEBOUNCE).await;
    }
}

struct WrongSelections<'a> {
    cluster: &'a Cluster,
    nodes: &'a RegisteredNodes,
    claims: &'a PendingClaims,
    /// The claims that lost their node or were compared with their volume, with their UIDs. A change of a claim does not shorten the
    /// wait: its owner can change it, and the node that it names, as often as they like. Nor does its end, after which it can wait again.
    checked: Backoff<ObjectRef<PersistentVolumeClaim>, Option<String>>,
    /// The nodes that were read and exist, or could not be read.
    read: Backoff<String, ()>,
    /// When each node was first seen to exist without the driver.
    existing_since: Mutex<HashMap<String, Instant>>,
    /// The begin of the interval, and the number of events in it.
    reports: Mutex<Option<(Instant, u32)>>,
}

/// The result of reading a node that does not run the driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Unregistered {
    Deleted,
    /// It exists, and has not run the driver for [`RESTART_TIME`]. A driver registers some time after its node.
    Lasting,
    /// It exists and may run the driver soon, could not be read, or is in back-off.
    Unknown,
}

impl<'a> WrongSelections<'a> {
    fn new(cluster: &'a Cluster, nodes: &'a RegisteredNodes, claims: &'a PendingClaims) -> Self {
        WrongSelections {
            cluster,
            nodes,
            claims,
            checked: Backoff::default(),
            read: Backoff::default(),
            existing_since: Mutex::default(),
            reports: Mutex::default(),
        }
    }

    /// Checks all claims that are not in back-off. Returns the time after which a claim has to be checked again.
    async fn check(&self, now: Instant) -> Option<Duration> {
        let registered = self.nodes.names(now);
        self.read.retain(|node| !registered.contains(node));
        self.existing_since.lock().retain(|node, _| !registered.contains(node));
        let (mut read, mut next) = (BTreeMap::new(), None);
        for claim in self.claims.cache.state() {
            let Some(node) = ownership::selected_node(&claim) else { continue };
            let volume = ownership::bound_volume(&claim);
            if volume.is_none() && registered.contains(node) {
                continue;
            }
            let key = ObjectRef::from_obj(&*claim);
            let wait = match (self.checked.remaining(&key, &claim.uid(), now), volume) {
                (Some(remaining), _) => remaining,
                (None, None) => self.check_waiting(&claim, node, &mut read, now).await,
                (None, Some(volume)) => {
                    let checked = self.check_bound(&claim, node, volume).await;
                    self.checked(&claim, checked, now)
                }
            };
            next = next.into_iter().chain([wait]).min();
        }
        next
    }

    /// Returns the wait until the next check of the claim.
    fn checked(&self, claim: &PersistentVolumeClaim, checked: Result<(), Error>, now: Instant) -> Duration {
        let key = ObjectRef::from_obj(claim);
        if let Err(error) = checked
            && !error.is_conflict()
        {
            tracing::warn!(claim = %key, %error, "could not check the selected node of a claim; the check is retried");
        }
        self.checked.failed(key, claim.uid(), now)
    }

    /// Checks a claim that waits for a volume on a node without the driver. `read` has the nodes that were read in this pass. Returns
    /// the wait until the next check.
    async fn check_waiting(
        &self,
        claim: &PersistentVolumeClaim,
        node: &str,
        read: &mut BTreeMap<String, (Unregistered, Duration)>,
        now: Instant,
    ) -> Duration {
        let (state, wait) = match read.get(node) {
            Some(known) => *known,
            None => *read.entry(node.to_owned()).or_insert(self.read_node(node, now).await),
        };
        match state {
            Unregistered::Deleted => {
                let removed = self.remove_deleted(claim, node).await;
                self.checked(claim, removed, now)
            }
            Unregistered::Lasting if self.may_report(now) => {
                let note = format!(
                    "the claim waits for its volume on node {node:?}, which was selected for it and does not run driver {}; start the \
                     driver on that node (its DaemonSet says why it does not run there), or delete the claim and its pod, and keep the \
                     new pod off that node",
                    self.cluster.identity.driver()
                );
                self.cluster.events.publish(claim, Reason::DriverNotRegistered, note);
                // The other claims of the node are reported first.
                self.checked(claim, Ok(()), now).max(wait)
            }
            Unregistered::Lasting | Unregistered::Unknown => wait,
        }
    }

    /// Counts an event, unless there were too many.
    fn may_report(&self, now: Instant) -> bool {
        let mut reports = self.reports.lock();
        let (begin, count) = reports.filter(|(begin, _)| now < *begin + REPORT_INTERVAL).unwrap_or((now, 0));
        *reports = Some((begin, (count + 1).min(REPORTS)));
        count < REPORTS
    }

    /// Reads a node that does not run the driver, unless it is in back-off. Returns the wait until it is read again.
    async fn read_node(&self, node: &str, now: Instant) -> (Unregistered, Duration) {
        let key = node.to_owned();
        if let Some(remaining) = self.read.remaining(&key, &(), now) {
            return (Unregistered::Unknown, remaining);
        }
        let state = match is_node_deleted(self.cluster, node).await {
            Ok(true) => {
                self.read.clear(&key);
                self.existing_since.lock().remove(node);
                return (Unregistered::Deleted, Duration::ZERO);
            }
            Ok(false) => {
                let since = *self.existing_since.lock().entry(key.clone()).or_insert(now);
                if now < since + RESTART_TIME { Unregistered::Unknown } else { Unregistered::Lasting }
            }
            Err(error) => {
                tracing::warn!(%error, "could not read the selected node of claims; the check is retried");
                Unregistered::Unknown
            }
        };
        (state, self.read.failed(key, (), now))
    }

    /// Removes a deleted node from a claim.
    async fn remove_deleted(&self, claim: &PersistentVolumeClaim, node: &str) -> Result<(), Error> {
        pending_claims::select_node(self.cluster, claim, None).await?;
        let note = format!(
            "node {node:?}, which was selected for the claim, was deleted from the cluster; the controller removed the selected node \
             from the claim, so that another one can be selected"
        );
        self.cluster.events.publish(claim, Reason::SelectedNodeRemoved, note);
        Ok(())
    }

    /// Checks a bound claim that waits for an expansion.
    async fn check_bound(
        &self,
        claim: &PersistentVolumeClaim,
        selected: &str,
        volume: &str,
    ) -> Result<(), Error> {
        let read = self.cluster.read_volume(volume).await?;
        let identity = &self.cluster.identity;
        let Some(object) = read.filter(|object| ownership::is_volume_of(object, claim)) else {
            return Ok(());
        };
        let Some(node) = ownership::node_of(&object, identity).filter(|node| *node != selected) else {
            return Ok(());
        };
        pending_claims::select_node(self.cluster, claim, None).await?;
        let note = format!(
            "PersistentVolume {volume} of the claim is on node {node:?}, and {selected:?} was selected for the claim; the controller \
             removed the selected node, so that node {node:?} expands the volume"
        );
        self.cluster.events.publish(claim, Reason::SelectedNodeRemoved, note);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use http::Method;
    use k8s_openapi::api::core::v1::PersistentVolume;
    use rstest::rstest;
    use serde_json::{Value, json};

    use super::*;
    use crate::testing::fixtures;
    use crate::testing::mock_api_server::{ExpectedRequest, TestContext, expect};

    const NODE: &str = "/api/v1/nodes/node-b";
    const CLAIM: &str = "/api/v1/namespaces/shop/persistentvolumeclaims/data";
    const VOLUME: &str = "/api/v1/persistentvolumes/pvc-0b6b9a6d-6d0e-4d8c-9a0c-2d1d5e3f7a11";

    fn on_node_b(change: Value) -> PersistentVolumeClaim {
        let mut whole = json!({"metadata": {"annotations": {ownership::SELECTED_NODE: "node-b"}}});
        fixtures::merge_keeping_nulls(&mut whole, change);
        fixtures::claim(whole)
    }

    fn expanding() -> PersistentVolumeClaim {
        fixtures::bound_claim(json!({
            "metadata": {"annotations": {ownership::SELECTED_NODE: "node-b"}},
            "spec": {"resources": {"requests": {"storage": "2Mi"}}},
        }))
    }

    fn node_deleted() -> ExpectedRequest {
        expect(Method::GET, NODE, None).refuse(404, "NotFound")
    }

    fn reads(volume: PersistentVolume) -> ExpectedRequest {
        expect(Method::GET, VOLUME, None).respond(volume)
    }

    fn removes_selection() -> ExpectedRequest {
        let patch = json!({"metadata": {
            "uid": fixtures::CLAIM_UID, "resourceVersion": "100", "annotations": {ownership::SELECTED_NODE: null},
        }});
        expect(Method::PATCH, CLAIM, patch)
    }

    /// Checks these claims at these times after the start, with the driver on node-a. Returns the last wait and the reasons of the events.
    async fn checked<const CHECKS: usize>(
        checks: [(u64, Vec<PersistentVolumeClaim>); CHECKS],
        requests: Vec<ExpectedRequest>,
    ) -> (Option<Duration>, Vec<&'static str>) {
        let test_context = TestContext::new(requests);
        let (nodes, none) = (RegisteredNodes::of(&["node-a"]), PendingClaims::of(vec![]));
        let checks = checks.map(|(time, claims)| (time, PendingClaims::of(claims)));
        let mut check = WrongSelections::new(&test_context.ctx.cluster, &nodes, &none);
        let (start, mut wait) = (Instant::now(), None);
        for (time, claims) in &checks {
            check.claims = claims;
            wait = check.check(start + Duration::from_secs(*time)).await;
        }
        (wait, test_context.finish().await)
    }

    /// Checks the same claims at each of these times.
    async fn checked_at<const CHECKS: usize>(
        seconds: [u64; CHECKS],
        claims: Vec<PersistentVolumeClaim>,
        requests: Vec<ExpectedRequest>,
    ) -> Vec<&'static str> {
        checked(seconds.map(|time| (time, claims.clone())), requests).await.1
    }

    #[rstest]
    #[case::it_exists(|node: ExpectedRequest| node.respond(fixtures::metadata_only(json!({"name": "node-b"}))))]
    #[case::a_proxy_responds(|node: ExpectedRequest| node.refuse_by_proxy(404))]
    #[case::the_api_server_fails(|node: ExpectedRequest| node.refuse(500, "InternalError"))]
    #[tokio::test]
    async fn a_claim_keeps_its_node_if(#[case] respond: fn(ExpectedRequest) -> ExpectedRequest) {
        let requests = vec![respond(expect(Method::GET, NODE, None))];
        // The second check is in back-off.
        assert_eq!(checked_at([0, 0], vec![on_node_b(json!({}))], requests).await, [""; 0]);
    }

    fn node_exists() -> ExpectedRequest {
        expect(Method::GET, NODE, None).respond(fixtures::metadata_only(json!({"name": "node-b"})))
    }

    const RESTART: u64 = RESTART_TIME.as_secs();

    /// Its driver has not registered yet at the first check.
    #[tokio::test]
    async fn node_without_driver_causes_events() {
        let claims = ["data", "other"].map(|name| on_node_b(json!({"metadata": {"name": name}})));
        let requests = vec![node_exists(), node_exists(), node_exists()];
        let reasons = checked_at([0, 0, RESTART - 1, RESTART + 1, RESTART + 1], claims.to_vec(), requests);
        assert_eq!(reasons.await, ["DriverNotRegistered"; 2]);
    }

    #[tokio::test]
    async fn an_error_is_no_second_look() {
        let claims = vec![on_node_b(json!({}))];
        let requests = vec![expect(Method::GET, NODE, None).refuse(500, "InternalError"), node_exists()];
        assert_eq!(checked_at([0, RESTART + 1], claims, requests).await, [""; 0]);
    }

    #[tokio::test]
    async fn events_of_many_claims_are_limited() {
        let of = |number| on_node_b(json!({"metadata": {"name": format!("data-{number}")}}));
        let claims = (0..=REPORTS).map(of).collect();
        let requests = vec![node_exists(), node_exists(), node_exists()];
        let reasons = checked_at([0, RESTART, RESTART + REPORT_INTERVAL.as_secs()], claims, requests).await;
        assert_eq!(reasons.len(), 2 * REPORTS as usize, "the last one and those whose back-off is over");
    }

    /// Its owner creates one claim after the other for a node that exists.
    #[tokio::test]
    async fn new_claims_read_no_node_again() {
        let [first, second] =
            ["first", "second"].map(|name| vec![on_node_b(json!({"metadata": {"name": name, "uid": name}}))]);
        let (wait, reasons) = checked([(0, first), (0, second)], vec![node_exists()]).await;
        assert_eq!((wait, reasons), (Some(Duration::from_secs(1)), vec![]));
    }

    /// Its owner lets it wait again as soon as it was provisioned or expanded.
    #[tokio::test]
    async fn claim_waiting_again_keeps_back_off() {
        let waiting = || vec![on_node_b(json!({}))];
        let requests = vec![node_deleted(), removes_selection()];
        let (_, reasons) = checked([(0, waiting()), (0, vec![]), (0, waiting())], requests).await;
        assert_eq!(reasons, ["SelectedNodeRemoved"]);
    }

    #[rstest]
    #[case::registered(fixtures::claim(json!({})))]
    #[case::none_selected(on_node_b(json!({"metadata": {"annotations": {ownership::SELECTED_NODE: null}}})))]
    #[case::an_empty_name(on_node_b(json!({"metadata": {"annotations": {ownership::SELECTED_NODE: ""}}})))]
    #[tokio::test]
    async fn nothing_is_read_for_a_claim(#[case] claim: PersistentVolumeClaim) {
        assert_eq!(checked_at([0], vec![claim], vec![]).await, [""; 0]);
    }

    /// Its owner selects a node that does not exist, again and again.
    #[tokio::test]
    async fn changes_shorten_no_back_off() {
        let requests = vec![node_deleted(), removes_selection(), node_deleted(), removes_selection()];
        assert_eq!(checked_at([0, 0, 2, 2], vec![on_node_b(json!({}))], requests).await.len(), 2);
    }

    /// A tenant can write any text. It must not become part of the path of a request.
    #[tokio::test]
    async fn impossible_node_is_not_read() {
        let claim = on_node_b(json!({"metadata": {"annotations": {ownership::SELECTED_NODE: "?"}}}));
        assert_eq!(checked_at([0], vec![claim], vec![removes_selection()]).await, ["SelectedNodeRemoved"]);
    }

    #[tokio::test]
    async fn changed_claim_is_no_failure() {
        let requests = vec![node_deleted(), removes_selection().refuse(409, "Conflict")];
        assert_eq!(checked_at([0], vec![on_node_b(json!({}))], requests).await, [""; 0]);
    }

    #[rstest]
    #[case::the_volume_is_there(fixtures::volume_on("node-b", json!({})))]
    #[case::the_volume_has_no_label(fixtures::volume(json!({"metadata": {"labels": null}})))]
    #[case::the_volume_is_of_another_driver(fixtures::volume(json!({"spec": {"csi": {"driver": "csi.other.dev"}}})))]
    #[case::the_volume_is_of_another_claim(fixtures::volume(json!({"spec": {"claimRef": {"uid": "another"}}})))]
    #[tokio::test]
    async fn expanding_claim_keeps_its_node_if(#[case] volume: PersistentVolume) {
        assert_eq!(checked_at([0], vec![expanding()], vec![reads(volume)]).await, [""; 0]);
    }
}

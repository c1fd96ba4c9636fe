//! Releases VolumeSnapshotContents that are being deleted, and whose node was deleted.
//!
//! The snapshotter of that node would delete the snapshot and remove the finalizer. Without the snapshotter,
//! the deletion of the VolumeSnapshot and of its namespace would not end. The controller lets go only of contents whose deletion a user has
//! requested, and the data of the snapshot stays on the node.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use kube::api::{ListParams, Patch, PatchParams};
use kube::core::DynamicObject;
use kube::{Api, ResourceExt};
use serde_json::json;
use tokio::time::sleep;

use super::registered_nodes::RegisteredNodes;
use crate::api::cluster::Cluster;
use crate::api::events::{Reason, some_names};
use crate::api::list;
use crate::error::Error;
use crate::loss::{POLL_INTERVAL, is_node_deleted, loss_began};
use crate::objects::{loss_policy, snapshot};

/// The finalizer that snapshot-controller sets and the snapshotter of the node removes.
const FINALIZER: &str = "snapshot.storage.kubernetes.io/volumesnapshotcontent-bound-protection";

/// The wait after a failure.
const RETRY_INTERVAL: Duration = Duration::from_secs(30);

/// Checks until shutdown.
pub(crate) async fn run(cluster: &Cluster, nodes: &RegisteredNodes) {
    nodes.synced.wait().await;
    let mut lost_since = BTreeMap::new();
    loop {
        let wait = match check(cluster, nodes, &mut lost_since, Instant::now()).await {
            Ok(next) => next.unwrap_or(POLL_INTERVAL).min(POLL_INTERVAL),
            Err(error) => {
                tracing::warn!(
                    %error,
                    "could not check for snapshots of deleted nodes; the next check is in {RETRY_INTERVAL:?}, and all grace times start again"
                );
                lost_since.clear();
                RETRY_INTERVAL
            }
        };
        sleep(wait).await;
    }
}

/// Checks once. Returns the time until the next grace time ends, or until what failed is tried again.
///
/// # Errors
/// When the contents cannot be listed. The failure of one content does not concern the others.
async fn check(
    cluster: &Cluster,
    nodes: &RegisteredNodes,
    lost_since: &mut BTreeMap<Option<String>, Instant>,
    now: Instant,
) -> Result<Option<Duration>, Error> {
    let contents: Api<DynamicObject> = Api::all_with(cluster.client.clone(), &snapshot::content_resource());
    let labelled = ListParams::default().labels(snapshot::MANAGED_BY);
    let listed = list::of_items(&contents, labelled, |content| waits_for_its_node(content, cluster)).await;
    let waiting_contents = match listed {
        Ok(waiting) => waiting,
        // The cluster has no snapshots.
        Err(kube::Error::Api(status)) if status.code == 404 => vec![],
        Err(error) => return Err(Error::api("list", "the VolumeSnapshotContents", error)),
    };
    let (known, mut waiting, mut next) = (nodes.names(now), BTreeMap::new(), None);
    let mut released = Vec::new();
    for content in &waiting_contents {
        let node = content.labels().get(snapshot::MANAGED_BY).map(String::as_str).unwrap_or_default();
        let is_lost = match known.contains(node) {
            true => Ok(false),
            false => is_node_deleted(cluster, node).await,
        };
        match is_lost {
            Ok(true) => {}
            Ok(false) => continue,
            Err(error) => {
                tracing::warn!(%error, content = content.name_any(), "could not check whether the node of a snapshot was deleted; it is retried, and its grace time starts again");
                next = sooner(next, RETRY_INTERVAL);
                continue;
            }
        }
        let since = loss_began(lost_since.get(&content.uid()), nodes.last_seen(node), now);
        waiting.insert(content.uid(), since);
        let grace = loss_policy::grace(content.metadata.annotations.as_ref(), &cluster.identity);
        let remaining = grace.saturating_sub(now.duration_since(since));
        if remaining > Duration::ZERO {
            next = sooner(next, remaining);
            continue;
        }
        match release(content, &contents).await {
            Ok(true) => released.push(format!("{} (node {node:?})", content.name_any())),
            Ok(false) => next = sooner(next, RETRY_INTERVAL),
            Err(error) => {
                tracing::warn!(%error, "could not release a snapshot of a deleted node; it is retried");
                next = sooner(next, RETRY_INTERVAL);
            }
        }
    }
    *lost_since = waiting;
    report(&released, cluster);
    Ok(next)
}

fn sooner(next: Option<Duration>, wait: Duration) -> Option<Duration> {
    next.into_iter().chain([wait]).min()
}

/// Records an event about all contents that were released in a check.
fn report(released: &[String], cluster: &Cluster) {
    if released.is_empty() {
        return;
    }
    let note = format!(
        "{} VolumeSnapshotContents that are being deleted lost their finalizers, because the nodes with their snapshots were deleted from \
         the cluster; data that remains on the nodes stays there: {}",
        released.len(),
        some_names(released)
    );
    cluster.events.publish_on_node(Reason::NodeLost, note);
}

/// Returns `true` if only the node's snapshotter could let the content go.
fn waits_for_its_node(content: &DynamicObject, cluster: &Cluster) -> bool {
    let driver = content.data.pointer("/spec/driver").and_then(|driver| driver.as_str());
    content.metadata.deletion_timestamp.is_some()
        && driver == Some(cluster.identity.driver())
        && content.finalizers().iter().any(|finalizer| finalizer == FINALIZER)
}

/// Removes the finalizer. Returns `false` if the content changed in the meantime.
async fn release(content: &DynamicObject, contents: &Api<DynamicObject>) -> Result<bool, Error> {
    let name = content.name_any();
    let others: Vec<_> = content.finalizers().iter().filter(|finalizer| *finalizer != FINALIZER).collect();
    let patch = json!({"metadata": {
        "uid": content.metadata.uid, "resourceVersion": content.metadata.resource_version, "finalizers": others,
    }});
    match contents.patch(&name, &PatchParams::default(), &Patch::Merge(patch)).await {
        Ok(_released) => Ok(true),
        // It is gone, or another version is checked next time.
        Err(kube::Error::Api(status)) if [404, 409].contains(&status.code) => Ok(false),
        Err(error) => Err(Error::api("remove the finalizer of VolumeSnapshotContent", name, error)),
    }
}

#[cfg(test)]
mod tests {
    use http::Method;
    use rstest::rstest;
    use serde_json::Value;

    use super::*;
    use crate::testing::fixtures;
    use crate::testing::mock_api_server::{ExpectedRequest, TestContext, expect};

    const CONTENTS: &str = "/apis/snapshot.storage.k8s.io/v1/volumesnapshotcontents";
    const CONTENT: &str = "/apis/snapshot.storage.k8s.io/v1/volumesnapshotcontents/content";
    const NODE: &str = "/api/v1/nodes/node-b";
    const GRACE: Duration = Duration::from_secs(60);

    fn content(change: Value) -> Value {
        let mut content = json!({
            "apiVersion": "snapshot.storage.k8s.io/v1", "kind": "VolumeSnapshotContent",
            "metadata": {
                "name": "content", "uid": "content-uid", "resourceVersion": "7",
                "deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": [FINALIZER, "example.com/other"],
                "labels": {snapshot::MANAGED_BY: "node-b"},
                "annotations": {"csi.loopfs.dev/node-loss-grace-seconds": "60"},
            },
            "spec": {"driver": "csi.loopfs.dev"},
        });
        fixtures::merge(&mut content, change);
        content
    }

    fn listed(content: Value) -> ExpectedRequest {
        let list = json!({
            "apiVersion": "snapshot.storage.k8s.io/v1", "kind": "VolumeSnapshotContentList", "metadata": {}, "items": [content],
        });
        expect(Method::GET, CONTENTS, None).respond(list)
    }

    fn deleted() -> ExpectedRequest {
        expect(Method::GET, NODE, None).refuse(404, "NotFound")
    }

    /// Checks at each of these times after the start. Returns the waits and the reasons of the events.
    async fn checked_at<const CHECKS: usize>(
        times: [Duration; CHECKS],
        requests: Vec<ExpectedRequest>,
    ) -> (Vec<Option<Duration>>, Vec<&'static str>) {
        let test_context = TestContext::new(requests);
        let ctx = &*test_context.ctx;
        let nodes = RegisteredNodes::of(&["node-a"]);
        let (start, mut lost_since, mut waits) = (Instant::now(), BTreeMap::new(), Vec::new());
        for time in times {
            waits.push(check(&ctx.cluster, &nodes, &mut lost_since, start + time).await.unwrap());
        }
        (waits, test_context.finish().await)
    }

    #[rstest]
    #[case::released(200, &["NodeLost"], None)]
    #[case::changed_in_the_meantime(409, &[], Some(RETRY_INTERVAL))]
    #[case::refused(403, &[], Some(RETRY_INTERVAL))]
    #[tokio::test]
    async fn content_is_released_after_grace_time(
        #[case] status: u16,
        #[case] events: &[&str],
        #[case] wait: Option<Duration>,
    ) {
        let patch = json!({"metadata": {
            "uid": "content-uid", "resourceVersion": "7", "finalizers": ["example.com/other"],
        }});
        let release = expect(Method::PATCH, CONTENT, patch).respond(content(json!({})));
        let release = if status == 200 { release } else { release.refuse(status, "Conflict") };
        let requests =
            vec![listed(content(json!({}))), deleted(), listed(content(json!({}))), deleted(), release];
        let (waits, reasons) = checked_at([Duration::ZERO, GRACE], requests).await;
        assert_eq!(waits, [Some(GRACE), wait]);
        assert_eq!(reasons, events);
    }

    #[tokio::test]
    async fn unread_node_is_read_again_soon() {
        let refused = expect(Method::GET, NODE, None).refuse(403, "Forbidden");
        let checked = checked_at([Duration::ZERO], vec![listed(content(json!({}))), refused]).await;
        assert_eq!(checked, (vec![Some(RETRY_INTERVAL)], vec![]));
    }

    #[tokio::test]
    async fn existing_node_keeps_its_contents() {
        let exists =
            || expect(Method::GET, NODE, None).respond(fixtures::metadata_only(json!({"name": "node-b"})));
        let requests = vec![listed(content(json!({}))), exists(), listed(content(json!({}))), exists()];
        assert_eq!(checked_at([Duration::ZERO, GRACE], requests).await, (vec![None, None], vec![]));
    }

    #[rstest]
    #[case::not_being_deleted(json!({"metadata": {"deletionTimestamp": null}}))]
    #[case::of_another_driver(json!({"spec": {"driver": "csi.other.dev"}}))]
    #[case::of_a_registered_node(json!({"metadata": {"labels": {snapshot::MANAGED_BY: "node-a"}}}))]
    #[case::held_by_others(json!({"metadata": {"finalizers": ["example.com/other"]}}))]
    #[tokio::test]
    async fn other_contents_are_left_alone(#[case] change: Value) {
        let requests = vec![listed(content(change.clone())), listed(content(change))];
        assert_eq!(checked_at([Duration::ZERO, GRACE], requests).await, (vec![None, None], vec![]));
    }

    #[tokio::test]
    async fn cluster_without_snapshots_is_no_failure() {
        let absent = expect(Method::GET, CONTENTS, None).refuse_by_proxy(404);
        assert_eq!(checked_at([Duration::ZERO], vec![absent]).await, (vec![None], vec![]));
    }
}

//! Audits until shutdown, reports the findings, and removes orphaned volumes if the administrator requests that.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Api;
use kube::api::ListParams;
use kube::runtime::reflector::ObjectRef;
use loopfs::volume_store::VolumeId;
use tokio::time::{sleep, timeout};

use super::compare::compare;
use super::findings::AuditFindings;
use super::named_by::{self, LabelledElsewhere};
use crate::api::events::{Reason, some_names};
use crate::api::list;
use crate::error::Error;
use crate::node::context::Context;
use crate::node::custody;
use crate::node::references::{self, Labelled};
use crate::node::volume_deletion;
use crate::objects::ownership;
use crate::store::driver::{Custody, VolumeList};

/// When to audit, and what to do with orphaned volumes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct AuditSettings {
    pub(crate) interval: Duration,
    /// `None` keeps all orphaned volumes.
    pub(crate) collection: Option<Collection>,
}

/// When orphaned volumes are removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Collection {
    /// The audits must have found the volume orphaned for this time.
    pub(crate) after: Duration,
    /// If a larger share of the volumes is orphaned, none is removed. It is then more likely that the API server has lost objects.
    pub(crate) at_most_percent: u8,
}

impl Collection {
    /// Returns `true` if the grace time of a volume had passed at `now`.
    fn is_due(self, since: Instant, now: Instant) -> bool {
        now.saturating_duration_since(since) >= self.after
    }

    /// Returns `true` if an orphan that is found at `now` could be removed.
    fn may_remove(self, since: &HashMap<VolumeId, Instant>, now: Instant) -> bool {
        // An orphan that is found for the first time, too.
        self.is_due(now, now) || since.values().any(|since| self.is_due(*since, now))
    }

    fn allows(self, orphans: usize, volumes: usize) -> bool {
        orphans * 100 <= volumes * usize::from(self.at_most_percent)
    }
}

/// Compares the volumes with the caches. If there are findings, compares again with the API server's objects and then the
/// node's volumes. A volume that was being created or deleted during the first comparison is no finding in the second.
///
/// If `fresh`, the objects of other nodes are read from the API server too.
async fn find(elsewhere: &mut LabelledElsewhere, fresh: bool, ctx: &Context) -> Result<AuditFindings, Error> {
    let (client, identity) = (&ctx.cluster.client, &ctx.cluster.identity);
    let before = node_volumes(ctx).await?;
    let cached = ctx.volumes.cache.state();
    let suspected = compare(&before, cached.iter().map(|object| &**object), identity);
    if suspected.is_empty() {
        return Ok(suspected);
    }
    let objects = named_by::of_node(client, identity).await?;
    let suspected = suspected.confirmed_by(compare(&before, &objects, identity));
    let others = elsewhere.naming(&suspected.orphans, fresh, client, identity).await?;
    Ok(suspected.confirmed_by(compare(&node_volumes(ctx).await?, objects.iter().chain(others), identity)))
}

/// Returns the volumes of the node.
pub(crate) async fn node_volumes(ctx: &Context) -> Result<VolumeList, Error> {
    Ok(ctx.storage.driver()?.list(false).await?)
}

/// Audits until shutdown.
pub(crate) async fn run(ctx: Arc<Context>, settings: AuditSettings) {
    ctx.synced().await;
    let mut since = HashMap::new();
    let mut elsewhere = LabelledElsewhere::default();
    loop {
        ctx.storage.tried().await;
        let now = Instant::now();
        // A volume is removed only if no PersistentVolume at all names it.
        let fresh = settings.collection.is_some_and(|collection| collection.may_remove(&since, now));
        match find(&mut elsewhere, fresh, &ctx).await {
            Ok(findings) => {
                report_findings(&findings, &ctx);
                since = update_ages(since, &findings);
                if let Some(collection) = settings.collection.filter(|_| !since.is_empty()) {
                    match custody::take(&ctx).await {
                        Ok(custody) => collect(&since, &custody, collection, now, &ctx).await,
                        Err(error) => {
                            tracing::warn!(%error, "no orphaned volume is removed, because it is unknown whose volumes this disk has; the next audit retries");
                        }
                    }
                }
                ctx.audit.set(Some(findings));
            }
            // An event on the node reports it already.
            Err(Error::Storage(error)) if error.is_reported() => ctx.audit.set(None),
            Err(error) => {
                tracing::warn!(%error, "the audit of the volumes failed; its earlier findings stay, and the next audit retries");
            }
        }
        let mut storage = ctx.storage.changes();
        // The audit runs again after a change or at the interval, but not as often as the store may open and close.
        drop(timeout(settings.interval, storage.changed()).await);
        sleep(MIN_INTERVAL.min(settings.interval)).await;
    }
}

const MIN_INTERVAL: Duration = Duration::from_secs(1);

/// Returns since when each volume has been orphaned, as this process has seen it. A restart starts the time again, and setting
/// the clock does not change it.
fn update_ages(since: HashMap<VolumeId, Instant>, findings: &AuditFindings) -> HashMap<VolumeId, Instant> {
    let now = Instant::now();
    let of = |id: &VolumeId| (id.clone(), since.get(id).copied().unwrap_or(now));
    findings.orphans.iter().map(of).collect()
}

fn report_findings(findings: &AuditFindings, ctx: &Context) {
    for (name, why) in &findings.missing {
        let key = ObjectRef::<PersistentVolume>::new(name);
        if let Some(object) = ctx.volumes.cache.get(&key) {
            ctx.cluster.events.publish(&*object, Reason::VolumeMissing, why.as_str());
        }
    }
    if findings.orphans.is_empty() {
        return;
    }
    let note = format!(
        "{} volumes on this node have no PersistentVolume but still occupy space: {}; run `loopfs-provisioner node --audit` to list \
         all of them",
        findings.orphans.len(),
        some_names(&findings.orphans),
    );
    ctx.cluster.events.publish_on_node(Reason::OrphanedVolumes, note);
}

/// Removes the volumes that had been orphaned for the grace time at `now`, unless suspiciously many are orphaned.
async fn collect(
    since: &HashMap<VolumeId, Instant>,
    custody: &Custody,
    collection: Collection,
    now: Instant,
    ctx: &Context,
) {
    let (kept, since): (Vec<_>, Vec<_>) =
        since.iter().filter(|(id, _)| could_be_ours(id)).partition(|(id, _)| custody.keeps(id));
    if !kept.is_empty() {
        let note = format!(
            "{} volumes without a PersistentVolume are not removed: they were on the disk before node {} was registered or got this \
             disk, and may belong to PersistentVolumes that were deleted in the meantime: {}; the README of the provisioner says how to remove one",
            kept.len(),
            ctx.cluster.identity.node(),
            some_names(kept.iter().map(|(id, _)| *id)),
        );
        ctx.cluster.events.publish_on_node(Reason::OrphanedVolumesKept, note);
    }
    let orphans = since.len();
    if !since.iter().any(|(_, since)| collection.is_due(**since, now)) {
        return;
    }
    let volumes = match node_volumes(ctx).await {
        Ok(node) => node.volumes.iter().filter(|id| could_be_ours(id)).count(),
        Err(error) => {
            tracing::warn!(%error, "could not count the volumes, so no orphaned volume is removed; the next audit retries");
            return;
        }
    };
    // The volumes that are kept say nothing about the others.
    let volumes = volumes.saturating_sub(kept.len());
    if !collection.allows(orphans, volumes) {
        let note = format!(
            "{orphans} of {volumes} volumes have no PersistentVolume, more than the {} % of --collect-at-most, so none is removed; \
             check that the API server has not lost objects (restored from an old backup); if the volumes are not needed, remove \
             them with --collect-at-most=100",
            collection.at_most_percent
        );
        ctx.cluster.events.publish_on_node(Reason::OrphanedVolumesKept, note);
        return;
    }
    let claimed = match claimed_volumes(ctx).await {
        Ok(claimed) => claimed,
        Err(error) => {
            tracing::warn!(%error, "no orphaned volume is removed, because its claim could exist; the next audit retries");
            return;
        }
    };
    let due = since.iter().filter(|(_, since)| collection.is_due(**since, now));
    for (id, _) in due.filter(|(id, _)| !claimed.contains(id.as_str())) {
        match collect_one(id, collection, custody, ctx).await {
            Ok(_) => {}
            Err(error) => {
                tracing::warn!(volume = %id, %error, "could not remove an orphaned volume; the next audit retries")
            }
        }
    }
}

async fn collect_one(
    id: &VolumeId,
    collection: Collection,
    custody: &Custody,
    ctx: &Context,
) -> Result<bool, Error> {
    let Some(_exclusive) = ctx.in_flight.enter(id) else { return Ok(false) };
    // A PersistentVolume of the expected name may have been created since the audit.
    let object = ctx.cluster.read_volume(id.as_str()).await?;
    let (filesystem, identity) = (&custody.filesystem_uuid, &ctx.cluster.identity);
    if object.is_some_and(|object| !ownership::is_data_elsewhere(&object, filesystem, identity)) {
        return Ok(false);
    }
    references::require_none(id, None, Labelled::Listed, ctx).await?;
    let owner = ctx.cluster.events.own_node();
    let why = format!("it had no PersistentVolume for {} s (--collect-after)", collection.after.as_secs());
    volume_deletion::delete(id, Some(&custody.filesystem_uuid), owner, &why, ctx).await
}

/// Returns `true` if the volume has a name that a provisioner gives. The CSI driver creates volumes in the store too, with
/// other names.
fn could_be_ours(id: &VolumeId) -> bool {
    id.as_str().starts_with("pvc-")
}

/// Returns the names of the volumes of all claims, whose PersistentVolumes may be created again. The cache lacks claims that are labelled
/// with another node.
async fn claimed_volumes(ctx: &Context) -> Result<BTreeSet<String>, Error> {
    let claims: Api<PersistentVolumeClaim> = Api::all(ctx.cluster.client.clone());
    let volume = |claim: ObjectMeta| claim.uid.map(|uid| format!("pvc-{uid}"));
    let claimed = list::of_metadata(&claims, ListParams::default(), volume).await;
    claimed.map_err(|error| Error::api("list", "the PersistentVolumeClaims", error))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use http::Method;
    use rstest::rstest;
    use serde_json::json;

    use super::*;
    use crate::testing::fixtures;
    use crate::testing::mock_api_server::{ExpectedRequest, TestContext, expect, labelled, unlabelled};

    fn ids(names: &[&str]) -> BTreeSet<VolumeId> {
        names.iter().map(|name| VolumeId::parse(name).unwrap()).collect()
    }

    fn absent() -> ExpectedRequest {
        expect(Method::GET, "/api/v1/persistentvolumes/pvc-1", None).refuse(404, "NotFound")
    }

    /// Returns the requests that prove that pvc-1 is orphaned.
    fn proof() -> Vec<ExpectedRequest> {
        vec![claims_of("pvc-2"), absent(), unlabelled(&[]), labelled()]
    }

    fn named() -> PersistentVolume {
        fixtures::volume(
            json!({"metadata": {"name": "mine", "labels": null}, "spec": {"csi": {"volumeHandle": "pvc-1"}}}),
        )
    }

    #[rstest]
    #[case::too_large_a_share(&["pvc-1", "pvc-2", "csi-1"], 49, vec![], false, 5, &["OrphanedVolumesKept"])]
    // The watch of claims has only those with the label of this node.
    #[case::with_a_claim_outside_of_the_cache(&["pvc-1"], 25, vec![claims_of("pvc-1")], false, 5, &[])]
    // Its PersistentVolume may have been deleted while the node was deleted.
    #[case::from_before_the_node_was_registered(&["pvc-4"], 100, vec![], false, 5, &["OrphanedVolumesKept"])]
    // Of four volumes that a provisioner could have created, one is kept, and all of the others are orphaned.
    #[case::all_that_are_not_kept(&["pvc-1", "pvc-2", "pvc-3", "pvc-4"], 75, vec![], false, 5, &["OrphanedVolumesKept"; 2])]
    #[case::few(&["pvc-1", "csi-1"], 25, proof(), false, 4, &["VolumeDeleted"])]
    #[case::in_use(&["pvc-1"], 25, proof(), true, 5, &[])]
    #[case::named_in_the_meantime(&["pvc-1"], 25, vec![claims_of("pvc-2"), absent(), unlabelled(&[named()])], false, 5, &[])]
    #[tokio::test]
    async fn only_few_unused_orphans_are_removed(
        #[case] orphans: &[&str],
        #[case] at_most_percent: u8,
        #[case] requests: Vec<ExpectedRequest>,
        #[case] busy: bool,
        #[case] left: usize,
        #[case] events: &[&str],
    ) {
        let test_context = TestContext::new(requests);
        for id in ["pvc-1", "pvc-2", "pvc-3", "pvc-4", "csi-1"] {
            test_context.volumes.add(id);
        }
        test_context.volumes.state().busy = busy;
        let since = ids(orphans).into_iter().map(|id| (id, Instant::now())).collect();
        let collection = Collection { after: Duration::ZERO, at_most_percent };
        // These volumes were there when the node was registered.
        let found = ["pvc-4".to_owned()].into();
        let custody = Custody { filesystem_uuid: fixtures::FILESYSTEM.to_owned(), found };
        collect(&since, &custody, collection, Instant::now(), &test_context.ctx).await;
        assert_eq!(test_context.volumes.state().volumes.len(), left);
        assert_eq!(test_context.finish().await, events);
    }

    /// Returns the list of all claims, of which one has this volume.
    fn claims_of(volume: &str) -> ExpectedRequest {
        let uid = volume.strip_prefix("pvc-").unwrap();
        let claim = json!({"name": "data", "namespace": "shop", "uid": uid});
        expect(Method::GET, "/api/v1/persistentvolumeclaims", None).respond(fixtures::metadata_list([claim]))
    }

    /// Returns the responses about the PersistentVolumes of this node and without label, and those of other nodes.
    fn lists(elsewhere: Option<&[PersistentVolume]>) -> Vec<ExpectedRequest> {
        let elsewhere = elsewhere.map(unlabelled);
        [labelled(), unlabelled(&[])].into_iter().chain(elsewhere).collect()
    }

    /// Returns the orphans that two audits of a node with one volume find, the second one with or without a fresh list.
    async fn found_twice(requests: [Vec<ExpectedRequest>; 2], fresh: bool) -> [BTreeSet<VolumeId>; 2] {
        let requests = requests.into_iter().flatten().collect();
        let test_context = TestContext::new(requests);
        test_context.volumes.add(fixtures::VOLUME);
        let mut elsewhere = LabelledElsewhere::default();
        let first = find(&mut elsewhere, false, &test_context.ctx).await.unwrap();
        let second = find(&mut elsewhere, fresh, &test_context.ctx).await.unwrap();
        test_context.finish().await;
        [first.orphans, second.orphans]
    }

    #[rstest]
    #[case::only_reported(false)]
    #[case::could_be_removed(true)]
    #[tokio::test]
    async fn removable_orphan_lists_other_nodes_again(#[case] fresh: bool) {
        let requests = [lists(Some(&[])), lists(fresh.then_some(&[]))];
        let orphan = ids(&[fixtures::VOLUME]);
        assert_eq!(found_twice(requests, fresh).await, [orphan.clone(), orphan]);
    }

    #[tokio::test]
    async fn volume_of_moved_disk_is_kept() {
        let moved = fixtures::volume(json!({"metadata": {"labels": {"csi.loopfs.dev/node": "node-b"}}}));
        let requests = [lists(Some(&[moved])), lists(None)];
        assert_eq!(found_twice(requests, false).await, [ids(&[]), ids(&[])]);
    }

    #[rstest]
    #[case::no_orphan(60, &[], false)]
    #[case::a_recent_one(60, &[59], false)]
    #[case::an_older_one(60, &[1, 60], true)]
    #[case::without_grace_time(0, &[], true)]
    fn orphan_is_removable_after_grace_time(
        #[case] after: u64,
        #[case] ages: &[u64],
        #[case] expected: bool,
    ) {
        let start = Instant::now();
        let now = start + Duration::from_secs(100);
        let since = ages
            .iter()
            .map(|age| (VolumeId::parse(&format!("pvc-{age}")).unwrap(), now - Duration::from_secs(*age)));
        let collection = Collection { after: Duration::from_secs(after), at_most_percent: 100 };
        assert_eq!(collection.may_remove(&since.collect(), now), expected);
    }

    #[test]
    fn named_volume_restarts_its_grace_time() {
        let of = |orphans| AuditFindings { orphans, ..AuditFindings::default() };
        let long_ago = Instant::now().checked_sub(Duration::from_secs(1)).unwrap();
        let since: HashMap<_, _> = ids(&["a", "b"]).into_iter().map(|id| (id, long_ago)).collect();
        let since = update_ages(update_ages(since, &of(ids(&["a"]))), &of(ids(&["a", "b"])));
        let id = |name| VolumeId::parse(name).unwrap();
        assert_eq!(since[&id("a")], long_ago);
        assert!(since[&id("b")] > long_ago);
    }
}

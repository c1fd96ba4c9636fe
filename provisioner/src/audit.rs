//! Whether volumes and their objects fit together: volumes that no `PersistentVolume` names, and objects whose volume is not there.
//!
//! Both are told. A volume that nobody names is removed only where that was asked for, after a time of grace: an object may
//! have been taken away in order to bind its data anew. What an object names is never removed here, whoever made the object, and an
//! object is never removed at all.

use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
    time::{Duration, Instant},
};

use k8s_openapi::api::core::v1::PersistentVolume;
use kube::{Api, Client, ResourceExt, api::ListParams, runtime::reflector::ObjectRef};
use loopfs::VolumeId;
use tokio::time::{sleep, timeout};

use crate::{
    absence,
    context::Context,
    error::Error,
    events::Reason,
    identity::Identity,
    intents::Intents,
    metrics::Findings,
    ownership, references,
    volumes::{StorageError, Volumes},
};

mod report;

pub(crate) use report::report;

/// When to look, and what to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Settings {
    pub(crate) every: Duration,
    /// None keeps all orphans.
    pub(crate) collection: Option<Collection>,
}

/// When orphans are removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Collection {
    /// A volume is removed when the audits have found it an orphan for this time.
    pub(crate) after: Duration,
    /// No volume is removed if a larger share of the volumes are orphans. The API server has then more likely lost objects.
    pub(crate) at_most_percent: u8,
}

impl Collection {
    fn allows(self, orphans: usize, volumes: usize) -> bool {
        orphans * 100 <= volumes * usize::from(self.at_most_percent)
    }
}

/// What the node holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Held {
    volumes: BTreeSet<VolumeId>,
    /// Of these, or beside them, those that are being made.
    pending: BTreeSet<VolumeId>,
    filesystem_uuid: String,
}

impl Held {
    fn read(volumes: &dyn Volumes, intents: &Intents) -> Result<Self, crate::volumes::VolumeError> {
        Ok(Held {
            volumes: volumes.list()?.into_iter().collect(),
            // After the volumes: one whose record is gone by now has its object.
            pending: intents.list()?.into_keys().collect(),
            filesystem_uuid: volumes.filesystem_uuid(),
        })
    }
}

/// Decides.
pub(crate) fn judge<'a>(
    held: &Held,
    objects: impl IntoIterator<Item = &'a PersistentVolume>,
    identity: &Identity,
) -> Findings {
    let mut findings = Findings::default();
    let mut named = BTreeSet::new();
    for object in objects {
        named.extend(handle_here(object, held, identity));
        if let Some(why) = missing(object, held, identity) {
            findings.missing.insert(object.name_any(), why);
        }
    }
    let nobodys = |id: &&VolumeId| !named.contains(id.as_str()) && !held.pending.contains(*id);
    findings.orphans = held.volumes.iter().filter(nobodys).cloned().collect();
    findings
}

/// The volume that an object of this driver names, unless that is beyond doubt on another node.
fn handle_here<'a>(object: &'a PersistentVolume, held: &Held, identity: &Identity) -> Option<&'a str> {
    let csi = object.spec.as_ref()?.csi.as_ref().filter(|csi| csi.driver == identity.driver())?;
    let on_another_disk =
        ownership::filesystem_uuid(object, identity).is_some_and(|uuid| uuid != held.filesystem_uuid);
    let elsewhere = ownership::is_elsewhere(object, identity) && on_another_disk;
    (!elsewhere).then_some(csi.volume_handle.as_str())
}

/// Why an object of this node has no volume, if so.
fn missing(object: &PersistentVolume, held: &Held, identity: &Identity) -> Option<String> {
    if !ownership::is_our_volume(object, identity) || is_going(object) {
        return None;
    }
    let id = match ownership::volume_id(object, identity) {
        Ok(id) => id,
        Err(error) => return Some(error.to_string()),
    };
    match ownership::filesystem_uuid(object, identity) {
        Some(uuid) if uuid != held.filesystem_uuid => Some(format!(
            "volume {id} is on file system {uuid}, and node {} has {} now; bring the disk back, or delete the claim",
            identity.node(),
            held.filesystem_uuid
        )),
        _ if held.volumes.contains(&id) => None,
        _ => Some(format!(
            "there is no volume {id} on node {}; restore it from a backup, or delete the claim",
            identity.node()
        )),
    }
}

/// Whether the volume of an object is about to be deleted, or was just now.
fn is_going(object: &PersistentVolume) -> bool {
    let released = object.status.as_ref().and_then(|status| status.phase.as_deref()) == Some("Released");
    let policy = object.spec.as_ref().and_then(|spec| spec.persistent_volume_reclaim_policy.as_deref());
    object.metadata.deletion_timestamp.is_some() || released && policy == Some("Delete")
}

/// Objects are read so many at a time.
const PAGE: u32 = 500;

/// Every object of this driver, whoever made it and wherever it is.
pub(crate) async fn objects(client: &Client, identity: &Identity) -> Result<Vec<PersistentVolume>, Error> {
    let api: Api<PersistentVolume> = Api::all(client.clone());
    let mut parameters = ListParams::default().limit(PAGE);
    let mut objects = Vec::new();
    loop {
        let page = api.list(&parameters).await;
        let page = page.map_err(|error| Error::api("list", "PersistentVolumes", error))?;
        let driver = |object: &PersistentVolume| {
            object.spec.as_ref()?.csi.as_ref().map(|csi| csi.driver == identity.driver())
        };
        objects.extend(page.items.into_iter().filter(|object| driver(object) == Some(true)));
        match page.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => parameters = parameters.continue_token(&token),
            None => return Ok(objects),
        }
    }
}

/// Looks: at the caches, and where something does not fit at the API server and the node once more, in that order. What
/// was being made or deleted meanwhile fits by then.
async fn find(ctx: &Context) -> Result<Findings, Error> {
    let held_before = held(ctx).await?;
    let cached = ctx.volumes.state();
    let suspected = judge(&held_before, cached.iter().map(|object| &**object), &ctx.identity);
    if suspected.is_empty() {
        return Ok(suspected);
    }
    let objects = objects(&ctx.client, &ctx.identity).await?;
    Ok(suspected.confirmed_by(judge(&held(ctx).await?, &objects, &ctx.identity)))
}

async fn held(ctx: &Context) -> Result<Held, Error> {
    let intents = ctx.intents.clone();
    Ok(ctx.storage.run(move |volumes| Held::read(volumes, &intents)).await?)
}

/// Looks for ever.
pub(crate) async fn run(ctx: Arc<Context>, settings: Settings) {
    ctx.synced().await;
    ctx.storage.tried().await;
    let mut since = HashMap::new();
    loop {
        match find(&ctx).await {
            Ok(findings) => {
                tell(&findings, &ctx);
                since = grown_older(since, &findings);
                if let Some(collection) = settings.collection {
                    collect(&since, collection, &ctx).await;
                }
                ctx.audit.set(Some(findings));
            }
            // Told on the node already.
            Err(Error::Storage(StorageError::Unavailable(_))) => ctx.audit.set(None),
            Err(error) => {
                tracing::warn!(%error, "whether volumes and objects fit together is not known; this is retried");
                ctx.audit.set(None);
            }
        }
        let mut storage = ctx.storage.changes();
        // Whether by a change or by time makes no difference; but not as often as a store comes and goes.
        drop(timeout(settings.every, storage.changed()).await);
        sleep(AT_MOST_EVERY.min(settings.every)).await;
    }
}

const AT_MOST_EVERY: Duration = Duration::from_secs(1);

/// Since when each is nobody's, as far as this process has seen: a restart begins anew, and a clock that is set
/// changes nothing.
fn grown_older(since: HashMap<VolumeId, Instant>, findings: &Findings) -> HashMap<VolumeId, Instant> {
    let now = Instant::now();
    let of = |id: &VolumeId| (id.clone(), since.get(id).copied().unwrap_or(now));
    findings.orphans.iter().map(of).collect()
}

/// As many names as an event holds.
const NAMES: usize = 8;

fn tell(findings: &Findings, ctx: &Context) {
    for (name, why) in &findings.missing {
        let key = ObjectRef::<PersistentVolume>::new(name);
        if let Some(object) = ctx.volumes.get(&key) {
            ctx.events.publish(&*object, Reason::VolumeMissing, why.as_str());
        }
    }
    if findings.orphans.is_empty() {
        return;
    }
    let count = findings.orphans.len();
    let names: Vec<_> = findings.orphans.iter().take(NAMES).map(VolumeId::as_str).collect();
    let more = if count > NAMES { ", ..." } else { "" };
    let note = format!(
        "no PersistentVolume names {count} of this node's volumes, which take their room: {}{more}; loopfs-provisioner --audit \
         lists all",
        names.join(", ")
    );
    ctx.events.publish_on_node(&ctx.identity, Reason::OrphanedVolumes, note);
}

/// Removes the orphans that have been such for long enough, unless there are suspiciously many.
async fn collect(since: &HashMap<VolumeId, Instant>, collection: Collection, ctx: &Context) {
    let grace = collection.after;
    let orphans = since.keys().filter(|id| could_be_ours(id)).count();
    if orphans == 0 {
        return;
    }
    let volumes = match held(ctx).await {
        Ok(held) => held.volumes.iter().filter(|id| could_be_ours(id)).count(),
        Err(error) => {
            tracing::warn!(%error, "the volumes could not be counted, so no orphan is removed; this is retried");
            return;
        }
    };
    if !collection.allows(orphans, volumes) {
        let note = format!(
            "no PersistentVolume names {orphans} of {volumes} volumes, more than the {} % of --collect-at-most, so none is removed; \
             check that the API server has not lost objects (restored from an old backup), and if the volumes may go, remove \
             them with --collect-at-most=100",
            collection.at_most_percent
        );
        ctx.events.publish_on_node(&ctx.identity, Reason::OrphanedVolumesKept, note);
        return;
    }
    for (id, _) in since.iter().filter(|(_, since)| since.elapsed() >= grace) {
        match collect_one(id, ctx).await {
            Ok(true) => {
                let note = format!(
                    "removed volume {id}, which no PersistentVolume has named for {} s (--collect-after)",
                    grace.as_secs()
                );
                ctx.events.publish_on_node(&ctx.identity, Reason::OrphanedVolumeRemoved, note);
                ctx.trash.notify_one();
                ctx.chances.improve();
            }
            Ok(false) => {}
            Err(error) => tracing::warn!(volume = %id, %error, "a volume that is nobody's is kept"),
        }
    }
}

async fn collect_one(id: &VolumeId, ctx: &Context) -> Result<bool, Error> {
    if !could_be_ours(id) || has_claim(id, ctx) {
        return Ok(false);
    }
    let Some(_exclusive) = ctx.in_flight.enter(id) else { return Ok(false) };
    // An object may have come since, under the name that it would have.
    let object = absence::get_opt(&ctx.volume_api(), id.as_str()).await;
    let object = object.map_err(|error| Error::api("read PersistentVolume", id.as_str(), error))?;
    if object.is_some_and(|object| !ownership::is_elsewhere(&object, &ctx.identity)) {
        return Ok(false);
    }
    references::require_none(id, None, ctx).await?;
    let nobodys = id.clone();
    Ok(ctx.storage.run(move |volumes| volumes.delete(&nobodys)).await?)
}

/// Others make volumes in the store too, over CSI, and give them other names.
fn could_be_ours(id: &VolumeId) -> bool {
    id.as_str().starts_with("pvc-")
}

/// Whether the claim for which a volume was made is there: its object may be made again.
fn has_claim(id: &VolumeId, ctx: &Context) -> bool {
    ctx.claims.state().iter().any(|claim| ownership::volume_id_for(claim).is_ok_and(|made| made == *id))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use http::Method;
    use loopfs::{Bytes, VolumeKind};
    use rstest::rstest;
    use serde_json::{Value, json};

    use super::*;
    use crate::{
        api_server::{Bench, Caches, Exchange, expect, unlabelled},
        fixtures,
        volume_model::VolumeModel,
    };

    const OTHER_DISK: &str = "00000000-0000-4000-8000-000000000000";
    const NODE: &str = "csi.loopfs.dev/node";
    const UUID: &str = "csi.loopfs.dev/filesystem-uuid";

    fn ids(names: &[&str]) -> BTreeSet<VolumeId> {
        names.iter().map(|name| VolumeId::parse(name).unwrap()).collect()
    }

    fn held(volumes: &[&str], pending: &[&str]) -> Held {
        Held {
            volumes: ids(volumes),
            pending: ids(pending),
            filesystem_uuid: fixtures::FILESYSTEM.to_owned(),
        }
    }

    fn orphans(held: &Held, objects: &[PersistentVolume]) -> BTreeSet<VolumeId> {
        judge(held, objects, &fixtures::identity()).orphans
    }

    #[rstest]
    #[case::its_object(json!({}))]
    #[case::retained(json!({"status": {"phase": "Released"}, "spec": {"persistentVolumeReclaimPolicy": "Retain"}}))]
    #[case::being_deleted(json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}))]
    #[case::made_by_hand(json!({"metadata": {"name": "mine", "labels": null}}))]
    #[case::labelled_wrongly(json!({"metadata": {"labels": {NODE: "node-b"}}}))]
    #[case::says_no_disk_and_another_node(json!({"metadata": {"labels": {NODE: "node-b"}}, "spec": {"csi": {"volumeAttributes": null}}}))]
    #[case::of_another_disk_here(json!({"spec": {"csi": {"volumeAttributes": {UUID: OTHER_DISK}}}}))]
    fn what_an_object_names_is_somebodys(#[case] change: Value) {
        assert_eq!(orphans(&held(&[fixtures::VOLUME], &[]), &[fixtures::volume(change)]), ids(&[]));
    }

    #[rstest]
    #[case::of_another_driver(json!({"spec": {"csi": {"driver": "csi.other.dev"}}}))]
    #[case::of_another_volume(json!({"spec": {"csi": {"volumeHandle": "pvc-another"}}}))]
    #[case::elsewhere(json!({"metadata": {"labels": {NODE: "node-b"}}, "spec": {"csi": {"volumeAttributes": {UUID: OTHER_DISK}}}}))]
    fn what_no_object_names_is_nobodys(#[case] change: Value) {
        let held = held(&[fixtures::VOLUME], &[]);
        assert_eq!(orphans(&held, &[fixtures::volume(change)]), held.volumes);
    }

    #[test]
    fn what_is_being_made_is_not_nobodys() {
        assert_eq!(orphans(&held(&["pvc-1", "pvc-2"], &["pvc-1", "pvc-3"]), &[]), ids(&["pvc-2"]));
    }

    #[rstest]
    #[case::there(json!({}), &[fixtures::VOLUME], None)]
    #[case::gone(json!({}), &[], Some("there is no volume"))]
    #[case::other_disk(json!({"spec": {"csi": {"volumeAttributes": {UUID: OTHER_DISK}}}}), &[fixtures::VOLUME], Some("bring the disk back"))]
    #[case::no_handle(json!({"spec": {"csi": {"volumeHandle": "../etc"}}}), &[], Some("not a volume id"))]
    #[case::released(json!({"status": {"phase": "Released"}}), &[], None)]
    #[case::retained(json!({"status": {"phase": "Released"}, "spec": {"persistentVolumeReclaimPolicy": "Retain"}}), &[], Some("there is no volume"))]
    #[case::being_deleted(json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}), &[], None)]
    #[case::elsewhere(json!({"metadata": {"labels": {NODE: "node-b"}}}), &[], None)]
    fn objects_without_a_volume(#[case] change: Value, #[case] there: &[&str], #[case] why: Option<&str>) {
        let object = fixtures::volume(change);
        let mut found = judge(&held(there, &[]), [&object], &fixtures::identity()).missing;
        let told = found.remove(&object.name_any());
        assert_eq!(told.is_some(), why.is_some());
        assert!(told.unwrap_or_default().contains(why.unwrap_or_default()));
    }

    #[rstest]
    #[case::none(20, 0, 0, true)]
    #[case::few(20, 20, 100, true)]
    #[case::many(20, 21, 100, false)]
    #[case::the_only_one(20, 1, 1, false)]
    #[case::all_and_all_may_go(100, 7, 7, true)]
    #[case::none_may_go(0, 1, 1000, false)]
    fn collection_stops_above_a_share_of_the_volumes(
        #[case] at_most_percent: u8,
        #[case] orphans: usize,
        #[case] volumes: usize,
        #[case] expected: bool,
    ) {
        let collection = Collection { after: Duration::ZERO, at_most_percent };
        assert_eq!(collection.allows(orphans, volumes), expected);
    }

    fn bench_of(exchanges: Vec<Exchange>) -> Bench {
        let bench = Bench::new(VolumeModel::of_size(Bytes(1 << 30)), Caches::default(), exchanges);
        for id in ids(&["pvc-1", "pvc-2", "pvc-3", "pvc-4", "csi-1"]) {
            bench.volumes.state().volumes.insert(id, (VolumeKind::Filesystem, Bytes(1 << 20)));
        }
        bench
    }

    async fn collected(bench: &Bench, orphans: &[&str], at_most_percent: u8) {
        let since = ids(orphans).into_iter().map(|id| (id, Instant::now())).collect();
        collect(&since, Collection { after: Duration::ZERO, at_most_percent }, &bench.ctx).await;
    }

    fn absent() -> Exchange {
        expect(Method::GET, "/api/v1/persistentvolumes/pvc-1", None).refuse(404, "NotFound")
    }

    #[tokio::test]
    async fn many_orphans_at_once_are_kept_and_reported() {
        let bench = bench_of(vec![]);
        collected(&bench, &["pvc-1", "pvc-2", "csi-1"], 49).await;
        assert_eq!(bench.volumes.state().volumes.len(), 5);
        assert_eq!(bench.finish().await, ["OrphanedVolumesKept"]);
    }

    #[tokio::test]
    async fn few_orphans_are_removed() {
        let bench = bench_of(vec![absent(), unlabelled(&[])]);
        collected(&bench, &["pvc-1", "csi-1"], 25).await;
        assert_eq!(bench.volumes.state().volumes.len(), 4);
        assert_eq!(bench.finish().await, ["OrphanedVolumeRemoved"]);
    }

    #[tokio::test]
    async fn an_orphan_that_another_object_names_by_now_is_kept() {
        let named = fixtures::volume(
            json!({"metadata": {"name": "mine", "labels": null}, "spec": {"csi": {"volumeHandle": "pvc-1"}}}),
        );
        let bench = bench_of(vec![absent(), unlabelled(&[named])]);
        collected(&bench, &["pvc-1"], 25).await;
        assert_eq!(bench.volumes.state().volumes.len(), 5);
        assert_eq!(bench.finish().await, [""; 0]);
    }

    #[test]
    fn only_what_is_found_twice_is_told() {
        let missing = |names: &[&str]| {
            names.iter().map(|name| ((*name).to_owned(), "later".to_owned())).collect::<BTreeMap<_, _>>()
        };
        let first = Findings { orphans: ids(&["a", "b"]), missing: missing(&["x", "y"]) };
        let later = Findings { orphans: ids(&["b", "c"]), missing: missing(&["y", "z"]) };
        let confirmed = Findings { orphans: ids(&["b"]), missing: missing(&["y"]) };
        assert_eq!(first.confirmed_by(later), confirmed);
    }

    #[test]
    fn the_time_of_grace_begins_anew_for_what_was_somebodys_meanwhile() {
        let of = |orphans| Findings { orphans, ..Findings::default() };
        let long_ago = Instant::now().checked_sub(Duration::from_secs(1)).unwrap();
        let since: HashMap<_, _> = ids(&["a", "b"]).into_iter().map(|id| (id, long_ago)).collect();
        let since = grown_older(grown_older(since, &of(ids(&["a"]))), &of(ids(&["a", "b"])));
        let id = |name| VolumeId::parse(name).unwrap();
        assert_eq!(since[&id("a")], long_ago);
        assert!(since[&id("b")] > long_ago);
    }
}

//! Publishes the free capacity of this node, so that the scheduler knows it before it chooses the node: one CSIStorageCapacity for
//! each class, updated at each change.
//!
//! The pod of this process owns the objects. A node without that pod cannot provision, so the garbage collector removes them,
//! whatever ended the pod.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::Arc;
use std::time::{Duration, Instant};

use csi_wire::volumes::CapacityResponse;
use k8s_openapi::api::storage::v1::{CSIStorageCapacity, StorageClass};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta, OwnerReference};
use kube::api::{DeleteParams, Patch, PatchParams};
use kube::runtime::reflector::store::Writer;
use kube::runtime::watcher;
use kube::{Api, ResourceExt};
use loopfs::Bytes;
use service::Delays;
use tokio::sync::SetOnce;
use tokio::time::{sleep, timeout};

use crate::api::hash::fnv1a;
use crate::api::pruned::Pruned;
use crate::api::queue;
use crate::error::Error;
use crate::node::context::Context;
use crate::node::placement;
use crate::objects::identity::{Identity, MANAGER};
use crate::objects::parameters::Parameters;
use crate::objects::quantity;
use crate::objects::topology::{self, CandidateNode};
use crate::store::driver::StorageError;

/// The namespace and the owner of the objects.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct CapacityConfig {
    pub(crate) namespace: String,
    pub(crate) owner: Option<OwnerReference>,
}

/// The labels of external-provisioner's objects.
const DRIVER_LABEL: &str = "csi.storage.k8s.io/drivername";
const MANAGER_LABEL: &str = "csi.storage.k8s.io/managed-by";

/// Shortest interval between two updates. The first change is published immediately, and later ones together after this time.
const MIN_INTERVAL: Duration = Duration::from_secs(1);
/// Interval of updates without an event: other files on the disk take space, too.
const POLL_INTERVAL: Duration = Duration::from_secs(60);
/// How long the labels of this node count as current. Each read that finds the same labels doubles the time. A new node often gets its
/// labels in its first minutes.
const LABELS_LIFETIME: Delays =
    Delays { first: Duration::from_secs(60), longest: Duration::from_secs(10 * 60) };
/// Wait after a failure.
const RETRY_INTERVAL: Duration = Duration::from_secs(5);

/// Publishes the capacity until shutdown.
pub(crate) async fn run(ctx: Arc<Context>, publishing: CapacityConfig, cache: Writer<CSIStorageCapacity>) {
    let api: Api<Pruned<CSIStorageCapacity>> =
        Api::namespaced(ctx.cluster.client.clone(), &publishing.namespace);
    let identity = &ctx.cluster.identity;
    let selector =
        format!("{DRIVER_LABEL}={},{}", identity.driver(), identity.node_selector(identity.node()));
    let config = watcher::Config::default().labels(&selector);
    let published = cache.as_reader();
    let synced = SetOnce::new();
    let changes = queue::watch(api.clone(), config, cache, |_| true);
    // Another process may have changed or deleted an object of this one.
    let watching = queue::follow(changes, &synced, || ctx.capacity.notify_one());
    let publishing = async {
        tokio::join!(synced.wait(), ctx.classes_synced.wait());
        let mut generation = ctx.retry_generation.subscribe();
        let mut storage = ctx.storage.changes();
        let mut known_node = None;
        loop {
            // While the driver restarts, the capacity is the published one.
            ctx.storage.tried().await;
            let node = current_node(&mut known_node, &ctx, Instant::now());
            let wait = match publish(&ctx, &publishing, &api, node, &published.state()).await {
                Ok(0) => POLL_INTERVAL,
                Ok(_) => {
                    sleep(MIN_INTERVAL).await;
                    POLL_INTERVAL
                }
                Err(error) => {
                    tracing::warn!(%error, "could not publish the capacity of this node; the next attempt is in {RETRY_INTERVAL:?}");
                    RETRY_INTERVAL
                }
            };
            let changed = async {
                tokio::select! {
                    () = ctx.capacity.notified() => {}
                    _ = generation.changed() => {}
                    _ = storage.changed() => {}
                }
            };
            drop(timeout(wait, changed).await);
        }
    };
    tokio::join!(watching, publishing);
}

/// This node as it was last read, how many reads in a row found it so, and until when it counts as current.
type KnownNode = (CandidateNode, u32, Instant);

/// Returns this node. Reads it again if its labels may have changed.
async fn current_node<'a>(
    known: &'a mut Option<KnownNode>,
    ctx: &Context,
    now: Instant,
) -> Result<&'a CandidateNode, Error> {
    let current = match known.take() {
        Some((node, reads, until)) if now < until => (node, reads, until),
        earlier => {
            let node = placement::this_node(ctx).await?;
            let unchanged = earlier.filter(|(earlier, ..)| *earlier == node);
            let reads = unchanged.map_or(1, |(_, reads, _)| reads.saturating_add(1));
            (node, reads, now + LABELS_LIFETIME.after(reads))
        }
    };
    Ok(&known.insert(current).0)
}

/// Updates the objects. Awaits `node` only if a class does not allow all nodes. Returns how many were written.
async fn publish(
    ctx: &Context,
    publishing: &CapacityConfig,
    api: &Api<Pruned<CSIStorageCapacity>>,
    node: impl Future<Output = Result<&CandidateNode, Error>>,
    published: &[Arc<CSIStorageCapacity>],
) -> Result<usize, Error> {
    let classes: Vec<_> = ctx
        .classes
        .state()
        .into_iter()
        .filter(|class| class.provisioner == ctx.cluster.identity.driver())
        .collect();
    let restricted = classes.iter().any(|class| class.allowed_topologies.is_some());
    let node = if restricted { Some(node.await?) } else { None };
    let capacities = capacities(&classes, ctx).await?;
    let desired = desired(&classes, node, &capacities, publishing, &ctx.cluster.identity);
    let mut writes = 0;
    for object in desired.iter().filter(|object| !is_published(object, published)) {
        let name = object.name_any();
        let parameters = PatchParams::apply(MANAGER).force();
        let applied = api.patch(&name, &parameters, &Patch::Apply(object)).await;
        applied.map_err(|error| Error::api("write CSIStorageCapacity", name, error))?;
        writes += 1;
    }
    let is_desired = |name: &String| desired.iter().any(|object| object.metadata.name.as_ref() == Some(name));
    for name in published.iter().map(|object| object.name_any()).filter(|name| !is_desired(name)) {
        match api.delete(&name, &DeleteParams::default()).await {
            Err(kube::Error::Api(status)) if status.is_not_found() => {}
            deleted => {
                deleted.map_err(|error| Error::api("delete CSIStorageCapacity", name, error))?;
            }
        }
        writes += 1;
    }
    Ok(writes)
}

/// The free capacity for volumes with certain settings.
type Capacities = BTreeMap<BTreeMap<String, String>, CapacityResponse>;

/// Returns the free capacity for the volumes of each class.
async fn capacities(classes: &[Arc<StorageClass>], ctx: &Context) -> Result<Capacities, StorageError> {
    let mut capacities = Capacities::new();
    for class in classes {
        if let Entry::Vacant(entry) = capacities.entry(settings(class)) {
            let reading = async { ctx.storage.driver()?.capacity(entry.key()).await };
            let capacity = match reading.await {
                // No volume can be created here until an administrator has repaired the storage.
                Err(StorageError::Unavailable(_)) => CapacityResponse::default(),
                capacity => capacity?,
            };
            entry.insert(capacity);
        }
    }
    Ok(capacities)
}

/// Returns the settings of a class, or none if its parameters are invalid: provisioning a claim reports that.
fn settings(class: &StorageClass) -> BTreeMap<String, String> {
    let parameters = Parameters::parse(class.parameters.as_ref());
    parameters.map(|parameters| parameters.settings.pairs().clone()).unwrap_or_default()
}

/// Returns the desired objects.
fn desired(
    classes: &[Arc<StorageClass>],
    node: Option<&CandidateNode>,
    capacities: &Capacities,
    publishing: &CapacityConfig,
    identity: &Identity,
) -> Vec<CSIStorageCapacity> {
    let allowed = |class: &StorageClass| node.is_none_or(|node| topology::allows(class, node));
    classes
        .iter()
        .filter(|class| allowed(class))
        .map(|class| {
            let capacity = capacities.get(&settings(class)).copied().unwrap_or_default();
            object(class, capacity, publishing, identity)
        })
        .collect()
}

fn object(
    class: &StorageClass,
    capacity: CapacityResponse,
    publishing: &CapacityConfig,
    identity: &Identity,
) -> CSIStorageCapacity {
    let node = identity.node().to_owned();
    let class_name = class.name_any();
    CSIStorageCapacity {
        metadata: ObjectMeta {
            name: Some(name(&class_name, identity)),
            namespace: Some(publishing.namespace.clone()),
            labels: Some(BTreeMap::from([
                (DRIVER_LABEL.to_owned(), identity.driver().to_owned()),
                (MANAGER_LABEL.to_owned(), MANAGER.to_owned()),
                (identity.node_label(), node.clone()),
            ])),
            owner_references: publishing.owner.clone().map(|owner| vec![owner]),
            ..Default::default()
        },
        storage_class_name: class_name,
        node_topology: Some(LabelSelector {
            match_labels: Some(BTreeMap::from([(identity.topology_key(), node)])),
            match_expressions: None,
        }),
        capacity: Some(quantity::format(Bytes(capacity.available))),
        // The scheduler uses this field first.
        maximum_volume_size: Some(quantity::format(Bytes(capacity.largest_volume))),
    }
}

/// Returns the name of the object: the same for every process of this driver on this node, so that a restart creates no further
/// objects. Neither part may contain a NUL, and node names are short enough for the suffix.
fn name(class: &str, identity: &Identity) -> String {
    // A name has at most 253 characters, and the name of a class may already have as many.
    let hash = fnv1a(&[identity.driver(), identity.node(), class]);
    format!("{}-{hash:016x}", identity.node())
}

/// Returns `true` if the object is published with the same content.
fn is_published(desired: &CSIStorageCapacity, published: &[Arc<CSIStorageCapacity>]) -> bool {
    let found = published.iter().find(|object| object.metadata.name == desired.metadata.name);
    found.is_some_and(|found| has_same_content(found, desired))
}

fn has_same_content(published: &CSIStorageCapacity, desired: &CSIStorageCapacity) -> bool {
    let size = |quantity: &Option<_>| quantity.as_ref().map(quantity::parse);
    let label = |(key, value): (&String, &String)| {
        published.metadata.labels.as_ref().and_then(|labels| labels.get(key)) == Some(value)
    };
    size(&published.capacity) == size(&desired.capacity)
        && size(&published.maximum_volume_size) == size(&desired.maximum_volume_size)
        && published.storage_class_name == desired.storage_class_name
        && published.node_topology == desired.node_topology
        && published.metadata.owner_references == desired.metadata.owner_references
        && desired.metadata.labels.iter().flatten().all(label)
}

#[cfg(test)]
mod tests {
    use rstest::rstest;
    use serde_json::{Value, json};

    use super::*;
    use crate::store::driver::StorageState;
    use crate::testing::mock_api_server::{Caches, TestContext, expect};
    use crate::testing::{fake_store, fixtures};

    const MIB: u64 = 1 << 20;

    fn owner(uid: &str) -> OwnerReference {
        OwnerReference {
            api_version: "v1".to_owned(),
            kind: "Pod".to_owned(),
            name: "loopfs-x".to_owned(),
            uid: uid.to_owned(),
            ..Default::default()
        }
    }

    fn publishing() -> CapacityConfig {
        CapacityConfig { namespace: "loopfs-system".to_owned(), owner: Some(owner("pod-uid")) }
    }

    fn classes(changes: &[Value]) -> Vec<Arc<StorageClass>> {
        changes.iter().map(|change| Arc::new(fixtures::class(change.clone()))).collect()
    }

    fn wanted(available: u64) -> Vec<CSIStorageCapacity> {
        let capacity = CapacityResponse { available, largest_volume: available / 2 };
        let capacities = [(BTreeMap::new(), capacity)].into();
        desired(&classes(&[json!({})]), None, &capacities, &publishing(), &fixtures::identity())
    }

    #[test]
    fn the_published_object_is_complete() {
        let [object] = wanted(64 * MIB).try_into().unwrap();
        let expected = json!({
            "apiVersion": "storage.k8s.io/v1",
            "kind": "CSIStorageCapacity",
            "metadata": {
                "name": name("loopfs", &fixtures::identity()),
                "namespace": "loopfs-system",
                "labels": {
                    "csi.loopfs.dev/node": "node-a",
                    "csi.storage.k8s.io/drivername": "csi.loopfs.dev",
                    "csi.storage.k8s.io/managed-by": "loopfs-provisioner",
                },
                "ownerReferences": [{"apiVersion": "v1", "kind": "Pod", "name": "loopfs-x", "uid": "pod-uid"}],
            },
            "storageClassName": "loopfs",
            "nodeTopology": {"matchLabels": {"topology.csi.loopfs.dev/node": "node-a"}},
            "capacity": "64Mi",
            "maximumVolumeSize": "32Mi",
        });
        assert_eq!(serde_json::to_value(object).unwrap(), expected);
    }

    /// A class with invalid parameters counts as one without settings.
    #[tokio::test]
    async fn class_has_capacity_for_its_settings() {
        let class = |name: &str, provisioning: &str| json!({"metadata": {"name": name}, "parameters": {"provisioning": provisioning}});
        let classes = classes(&[class("a", "thin"), class("b", "thin"), class("c", "sparse"), json!({})]);
        let test_context = TestContext::of_size(Bytes(64 * MIB), Caches::default(), vec![]);
        let capacities = capacities(&classes, &test_context.ctx).await.unwrap();
        let thin = [("provisioning".to_owned(), "thin".to_owned())].into();
        assert_eq!(capacities.keys().collect::<Vec<_>>(), [&BTreeMap::new(), &thin], "one call for each");
        let objects = desired(&classes, None, &capacities, &publishing(), &fixtures::identity());
        let largest = objects.into_iter().map(|object| object.maximum_volume_size.unwrap().0);
        assert_eq!(largest.collect::<Vec<_>>(), ["32736Ki", "32736Ki", "65472Ki", "65472Ki"]);
        test_context.finish().await;
    }

    #[rstest]
    #[case::nothing(json!({}), true)]
    #[case::the_same_in_other_words(json!({"capacity": "67108864"}), true)]
    #[case::a_label_of_another_writer(json!({"metadata": {"labels": {"team": "x"}}}), true)]
    #[case::less(json!({"capacity": "1Mi"}), false)]
    #[case::no_largest(json!({"maximumVolumeSize": null}), false)]
    #[case::of_the_pod_before(json!({"metadata": {"ownerReferences": [{"apiVersion": "v1", "kind": "Pod", "name": "loopfs-x", "uid": "before"}]}}), false)]
    #[case::without_owner(json!({"metadata": {"ownerReferences": null}}), false)]
    #[case::malformed(json!({"capacity": "much"}), false)]
    fn only_what_differs_is_written(#[case] change: Value, #[case] same: bool) {
        let wanted = wanted(64 * MIB);
        let mut published = serde_json::to_value(&wanted[0]).unwrap();
        fixtures::merge(&mut published, change);
        let published: CSIStorageCapacity = serde_json::from_value(published).unwrap();
        assert_eq!(is_published(&wanted[0], &[Arc::new(published)]), same);
    }

    #[tokio::test]
    async fn an_unavailable_store_has_no_capacity() {
        let path =
            "/apis/storage.k8s.io/v1/namespaces/loopfs-system/csistoragecapacities/node-a-8803dfa2e07b0e9f";
        let [none] = wanted(0).try_into().unwrap();
        let requests =
            vec![expect(http::Method::PATCH, path, serde_json::to_value(&none).unwrap()).respond(&none)];
        let caches = Caches { classes: vec![fixtures::class(json!({}))], ..Caches::default() };
        let test_context = TestContext::of_size(Bytes(64 * MIB), caches, requests);
        test_context.break_with(fake_store::error(loopfs::ErrorKind::NotMounted, "mount it"));
        let api = Api::namespaced(test_context.ctx.cluster.client.clone(), "loopfs-system");
        let mut known = None;
        let node = current_node(&mut known, &test_context.ctx, Instant::now());
        assert_eq!(publish(&test_context.ctx, &publishing(), &api, node, &[]).await.unwrap(), 1);
        drop(api);
        test_context.finish().await;
    }

    #[tokio::test]
    async fn restarting_driver_keeps_its_capacity() {
        let classes = classes(&[json!({})]);
        let test_context = TestContext::new(vec![]);
        test_context.volumes.state().locked = true;
        let opening = capacities(&classes, &test_context.ctx).await.unwrap_err();
        assert!(matches!(opening, StorageError::Pending(_)), "{opening}");
        test_context.ctx.storage.set(StorageState::Untried);
        assert_eq!(capacities(&classes, &test_context.ctx).await, Err(StorageError::Untried));
        test_context.finish().await;
    }

    #[tokio::test]
    async fn unchanged_labels_are_read_less_often() {
        let read = |zone: &str| {
            let node = fixtures::metadata_only(json!({"name": "node-a", "labels": {"zone": zone}}));
            expect(http::Method::GET, "/api/v1/nodes/node-a", None).respond(node)
        };
        let test_context = TestContext::new(["west", "west", "east", "east"].map(read).into());
        let (mut known, start) = (None, Instant::now());
        let mut zones = Vec::new();
        // It is read after 0, 60, 180 and 240 s.
        for seconds in [0, 59, 60, 179, 180, 239, 240, 241] {
            let at = start + Duration::from_secs(seconds);
            let current = current_node(&mut known, &test_context.ctx, at).await.unwrap();
            zones.push(current.labels["zone"].clone());
        }
        assert_eq!(zones, ["west", "west", "west", "west", "east", "east", "east", "east"]);
        test_context.finish().await;
    }

    #[test]
    fn object_names_are_valid_and_distinct() {
        let (here, there) = (fixtures::identity(), Identity::new("csi.loopfs.dev", "node-b").unwrap());
        let other = Identity::new("csi.other.dev", "node-a").unwrap();
        let names = [name("a", &here), name("b", &here), name("a", &there), name("a", &other)];
        for (index, one) in names.iter().enumerate() {
            assert!(one.len() <= 80 && !names[..index].contains(one), "{names:?}");
        }
        assert_eq!(name(&"c".repeat(253), &here).len(), names[0].len());
    }
}

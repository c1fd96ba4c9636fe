//! Tests that no fault of the API server makes the provisioner delete data: neither responses that prove nothing, nor old lists, nor
//! changes that a silent watch hides.

use loopfs::volume_store::VolumeId;
use rstest::rstest;

use super::audit::auditing;
use super::faulty_api_server::{Call, Fault, FaultyApiServer};
use super::*;
use crate::api::connection::Timeouts;

const OBJECTS: &str = "persistentvolumes";

/// Longer than a request takes on a busy machine, and short enough for a test that waits for it.
pub(super) const TIMEOUTS: Timeouts = Timeouts {
    request: Duration::from_secs(1),
    silence: Duration::from_secs(3),
    ping: Duration::from_secs(1),
};

fn label() -> String {
    fixtures::identity().node_label()
}

fn labelled() -> Value {
    json!({"metadata": {"labels": {label(): HERE}}})
}

/// Returns the fault of a call while another API server returns old lists of PersistentVolumes, and the watch is silent.
fn hides_new_objects(call: &Call) -> Option<Fault> {
    match (call.verb, call.resource.as_str()) {
        ("list", OBJECTS) => Some(Fault::StaleList),
        ("watch", OBJECTS) => Some(Fault::Silence),
        _ => None,
    }
}

/// A volume for each fault of reading its PersistentVolume.
struct Hidden {
    volumes: Vec<(Fault, VolumeId)>,
}

impl Hidden {
    /// Creates volumes with PersistentVolumes that only a read of the single object shows.
    async fn create(cluster: &TestCluster, api_server: &FaultyApiServer) -> Self {
        // The old lists.
        let objects: Api<PersistentVolume> =
            Api::all(api_server.client(Timeouts::default(), &ApiTraffic::default()).await);
        let all = ListParams::default();
        for list in [all.clone().labels(&format!("{}={HERE}", label())), all] {
            objects.list(&list).await.unwrap();
        }
        let mut volumes = Vec::new();
        for fault in Fault::OF_READS {
            let id = cluster.create_orphan(&format!("{fault:?}").to_lowercase());
            cluster.object(id.as_str(), labelled()).await;
            volumes.push((fault, id));
        }
        Hidden { volumes }
    }

    /// Makes each read of one of the PersistentVolumes end with its fault.
    fn inject(&self, api_server: &FaultyApiServer) {
        let volumes = self.volumes.clone();
        api_server.set(move |call| {
            let named = volumes.iter().find(|(_, id)| call.is("get", OBJECTS) && call.name == id.as_str());
            named.map(|(fault, _)| *fault).or_else(|| hides_new_objects(call))
        });
    }

    /// Waits until each PersistentVolume was read after a moment, with its fault or without any.
    async fn until_read(&self, api_server: &FaultyApiServer, since: usize, with_fault: bool) {
        for (fault, id) in &self.volumes {
            let expected = with_fault.then_some(*fault);
            let read =
                |call: &Call, fault| call.is("get", OBJECTS) && call.name == id.as_str() && fault == expected;
            api_server.until(since, 1, &format!("{id} is read with {expected:?}"), read).await;
        }
    }
}

#[rstest]
#[case::cleanup(Options::default(), true)]
#[case::audit(auditing(Some(Duration::ZERO)), false)]
#[tokio::test]
async fn no_fault_makes_provisioner_delete_data(#[case] options: Options, #[case] are_pending: bool) {
    let cluster = TestCluster::connect().await;
    let api_server = FaultyApiServer::before(&cluster, HERE).await;
    let hidden = Hidden::create(&cluster, &api_server).await;
    for (_, id) in hidden.volumes.iter().filter(|_| are_pending) {
        let uid = id.as_str().trim_start_matches("pvc-").to_owned();
        let (namespace, class) = (cluster.namespace.clone(), cluster.class.clone());
        let record = ClaimRecord { namespace, name: "deleted".to_owned(), uid, class };
        cluster.volumes.state().pending.insert(id.clone(), record);
    }
    hidden.inject(&api_server);
    let provisioner = api_server.provisioner(&cluster, TIMEOUTS, options).await;
    hidden.until_read(&api_server, 0, true).await;

    let healed = api_server.now();
    api_server.set(hides_new_objects);
    hidden.until_read(&api_server, healed, false).await;
    until_none_pending(&cluster.volumes).await;
    for (fault, id) in &hidden.volumes {
        assert!(cluster.volumes.capacity(id.as_str()).is_some(), "{fault:?} deleted the data of {id}");
    }
    provisioner.stop().await;
    let names: Vec<_> = hidden.volumes.iter().map(|(_, id)| id.as_str()).collect();
    cluster.remove_objects(&names).await;
    cluster.finish([]).await;
}

/// An administrator binds the data of an orphaned volume again, and keeps the labels of its former PersistentVolume.
#[tokio::test]
async fn audit_keeps_volume_named_during_silence() {
    let cluster = TestCluster::connect().await;
    let api_server = FaultyApiServer::before(&cluster, HERE).await;
    let orphan = cluster.create_orphan("orphan");
    let (silent, read) = (orphan.to_string(), orphan.to_string());
    // The audit has found the volume orphaned, and waits for the API server before it removes the volume.
    api_server.set(move |call| match (call.verb, call.resource.as_str()) {
        ("watch", OBJECTS) => Some(Fault::Silence),
        ("get", OBJECTS) if call.name == silent => Some(Fault::TooManyRequests),
        _ => None,
    });
    let options = auditing(Some(Duration::ZERO));
    let provisioner = api_server.provisioner(&cluster, Timeouts::default(), options).await;
    let is_read = |call: &Call, _: Option<Fault>| call.is("get", OBJECTS) && call.name == read;
    api_server.until(0, 1, "the audit reads the PersistentVolume", is_read).await;
    let adopted = format!("adopted-{}", cluster.namespace);
    let mut change = labelled();
    fixtures::merge(&mut change, json!({"spec": {"csi": {"volumeHandle": orphan.as_str()}}}));
    cluster.object(&adopted, change).await;

    let named = api_server.now();
    api_server.set(|call| call.is("watch", OBJECTS).then_some(Fault::Silence));
    api_server.until(named, 1, "the audit proves that the volume is orphaned", is_read).await;
    // Both the decision and an audit list the PersistentVolumes without label, so the second list is of an audit after the decision.
    let lists = |call: &Call, _: Option<Fault>| call.is("list", OBJECTS) && call.selector.starts_with("%21");
    api_server.until(api_server.now(), 2, "the next audit", lists).await;
    assert!(cluster.volumes.capacity(orphan.as_str()).is_some(), "the audit removed the volume of {adopted}");
    provisioner.stop().await;
    cluster.remove_objects(&[&adopted]).await;
    cluster.finish([]).await;
}

impl TestCluster {
    /// Waits until the provisioner has received the newest version of a PersistentVolume.
    async fn until_received(&self, api_server: &FaultyApiServer, name: &str) {
        let version = self.objects().get(name).await.unwrap().resource_version().unwrap();
        let received = |call: &Call, _: Option<Fault>| {
            call.is("event", OBJECTS) && call.name == name && call.version == version
        };
        api_server.until(0, 1, &format!("version {version} of {name}"), received).await;
    }

    /// Creates a second PersistentVolume of a volume.
    async fn second(&self, name: &str, volume: &str, labels: Value) -> String {
        let name = format!("{name}-{}", self.namespace);
        let mut change = json!({"spec": {"csi": {"volumeHandle": volume}}});
        fixtures::merge(&mut change, labels);
        self.object(&name, change).await;
        name
    }

    pub(super) async fn retain(&self, name: &str) {
        let retain = json!({"spec": {"persistentVolumeReclaimPolicy": "Retain"}});
        self.change(&self.objects(), name, retain).await;
    }
}

/// An administrator keeps the data of volumes whose deletion has failed so far. The provisioner does not receive that.
#[tokio::test]
async fn retried_deletion_respects_hidden_changes() {
    let cluster = TestCluster::connect().await;
    let api_server = FaultyApiServer::before(&cluster, HERE).await;
    let provisioner = api_server.provisioner(&cluster, TIMEOUTS, Options::default()).await;
    let mut names = Vec::new();
    for claim in ["marked", "labelled", "unlabelled", "unmarked"] {
        cluster.claim(claim, json!({})).await;
        names.push(cluster.bound(claim).await.name_any());
    }
    let [marked, labelled_twice, unlabelled, unmarked] = &names[..] else { panic!("four volumes") };
    // This volume is not even marked for deletion.
    let holder = cluster.second("holder", unmarked, json!({})).await;
    cluster.volumes.state().busy = true;
    for claim in ["marked", "labelled", "unlabelled", "unmarked"] {
        cluster.delete_claim(claim).await;
    }
    for name in &names {
        cluster.event_in("default", name, "VolumeFailedDelete", "").await;
        cluster.until_received(&api_server, name).await;
    }

    let hidden = api_server.now();
    api_server.set(|call| call.is("watch", OBJECTS).then_some(Fault::Silence));
    let silent = |call: &Call, fault| call.is("watch", OBJECTS) && fault == Some(Fault::Silence);
    api_server.until(hidden, 1, "the watch is silent", silent).await;
    cluster.retain(marked).await;
    cluster.retain(unmarked).await;
    cluster.remove_objects(&[&holder]).await;
    let second = cluster.second("second", labelled_twice, labelled()).await;
    let third = cluster.second("third", unlabelled, json!({})).await;
    // Earlier retries may have listed the objects before these existed.
    cluster.event_in("default", labelled_twice, "VolumeFailedDelete", &second).await;
    cluster.event_in("default", unlabelled, "VolumeFailedDelete", &third).await;
    let decided = api_server.now();
    cluster.volumes.state().busy = false;

    let is_kept = || {
        for name in &names {
            assert!(cluster.volumes.capacity(name).is_some(), "the data of {name} is deleted: {names:?}");
        }
    };
    let tried =
        |name: &str| api_server.count(decided, |call, _| call.is("delete", OBJECTS) && call.name == name) > 0;
    eventually("the deletions are retried", || async {
        is_kept();
        (tried(marked) && tried(unmarked)).then_some(())
    })
    .await;
    // From now on only the deletions of the other two are retried, each after the other.
    let lists = |call: &Call, _: Option<Fault>| call.is("list", OBJECTS);
    api_server.until(api_server.now(), 4, "the other deletions are retried", lists).await;
    is_kept();

    api_server.heal();
    until_deleted(&cluster.objects(), marked).await;
    until(&cluster.objects(), unmarked, |volume| !pv::has_finalizer(volume)).await;
    cluster.remove_objects(&[&second, &third]).await;
    for name in [labelled_twice, unlabelled] {
        until_deleted(&cluster.objects(), name).await;
    }
    let mut kept = vec![marked.clone(), unmarked.clone()];
    kept.sort();
    assert_eq!(cluster.stored(), kept);
    provisioner.stop().await;
    cluster.remove_objects(&[unmarked]).await;
    cluster.finish([]).await;
}

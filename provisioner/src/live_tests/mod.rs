//! Tests of the whole process with a real API server and kube-controller-manager and a fake store.
//!
//! `cargo harness test --lane apiserver` runs them. `KUBECONFIG` names the kubeconfig of an administrator. The directory
//! `PROVISIONER_KUBECONFIGS` contains `NODE.kubeconfig` for the provisioner of each node, and `controller-NODE.kubeconfig` for each
//! replica of the controller. They give exactly the rights of the manifests in `csi/deploy`. The manifests must be applied, and the
//! nodes "node-a" and "node-b" must exist; they need no kubelet.

use std::collections::BTreeMap;
use std::fmt;
use std::future::Future;
use std::io::Write as _;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Namespace, Node, PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::api::storage::v1::StorageClass;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use k8s_openapi::jiff::Timestamp;
use kube::api::{ApiResource, DeleteParams, DynamicObject, ListParams, Patch, PatchParams, PostParams};
use kube::core::GroupVersionKind;
use kube::{Api, Client, ResourceExt};
use loopfs::Bytes;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use service::{Listeners, Tasks};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Mutex, MutexGuard};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::api::queue::KubernetesObject;
use crate::api::traffic::ApiTraffic;
use crate::node::capacity::CapacityConfig;
use crate::node::process::{NodeProcessParts, Options};
use crate::objects::claim_status::{ResizeStatus, recorded};
use crate::objects::identity::Identity;
use crate::objects::{ownership, pv, quantity};
use crate::store::claim_record::ClaimRecord;
use crate::testing::fake_store::{CustodyRecord, FakeStore};
use crate::testing::fixtures;

mod audit;
mod builtin;
mod claim_labels;
mod connections;
mod controllers;
mod data_safety;
mod deletion;
mod fault_plan;
mod faulty_api_server;
mod faulty_lives;
mod growth;
mod node_loss;
mod nodes;
mod outages;
mod populators;
mod serving;
mod snapshots;
mod stolen_token;
mod wrong_selections;

const MIB: u64 = 1 << 20;

/// The node of most tests.
const HERE: &str = "node-a";
const THERE: &str = "node-b";
/// The namespace of the driver.
const SYSTEM: &str = "loopfs-system";
/// Selects the driver's pods of all nodes.
const PODS_OF_DRIVER: &str = "app.kubernetes.io/name=loopfs";

/// Timeout of every wait. It is longer than every back-off in these tests.
const TIMEOUT: Duration = Duration::from_secs(120);

/// Serialises the tests: all use the same node, and a provisioner serves every claim of its node. Has the namespace and the component
/// of a test until that finishes, so that the next one removes what a failed one left of these.
static TEST_LOCK: Mutex<Option<(String, ComponentFiles)>> = Mutex::const_new(None);

/// The texts of the files of an optional component.
type ComponentFiles = &'static [&'static str];

struct TestCluster {
    test_lock: MutexGuard<'static, Option<(String, ComponentFiles)>>,
    admin: Client,
    namespace: String,
    class: String,
    volumes: Arc<FakeStore>,
    scratch: tempfile::TempDir,
    component: ComponentFiles,
}

struct Provisioner {
    tasks: Tasks,
    /// The address of its health and metrics endpoints.
    pages: SocketAddr,
}

impl Provisioner {
    /// Starts the provisioner of a node. `pod` is the driver's pod there.
    async fn start(
        node: &str,
        volumes: &Arc<FakeStore>,
        pod: OwnerReference,
        options: Options,
        client: Client,
        traffic: ApiTraffic,
    ) -> Provisioner {
        let identity = Identity::new(fixtures::identity().driver(), node).unwrap();
        let capacity = CapacityConfig { namespace: SYSTEM.to_owned(), owner: Some(pod) };
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let pages = listener.local_addr().unwrap();
        let parts = NodeProcessParts {
            client,
            identity,
            driver: volumes.clone(),
            options: Options { capacity: Some(capacity), ..options },
            monitoring: Some((Listeners { metrics: Some(listener), probes: None }, traffic)),
        };
        Provisioner { tasks: crate::node::process::spawn(parts, CancellationToken::new()), pages }
    }

    /// Waits until it can serve claims.
    async fn until_ready(&self) {
        eventually("ready", || async {
            self.page("/readyz").await.starts_with("HTTP/1.1 200").then_some(())
        })
        .await;
    }

    async fn until_metrics(&self, lines: &[impl AsRef<str> + fmt::Debug]) {
        eventually(&format!("the metrics {lines:?}"), || async {
            let text = self.page("/metrics").await;
            lines.iter().all(|line| text.contains(&format!("\n{}\n", line.as_ref()))).then_some(())
        })
        .await;
    }

    /// Returns the response of an endpoint, with its head.
    async fn page(&self, path: &str) -> String {
        let mut stream = TcpStream::connect(self.pages).await.unwrap();
        let request = format!("GET {path} HTTP/1.1\r\nhost: here\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut response = String::new();
        stream.read_to_string(&mut response).await.unwrap();
        response
    }

    async fn stop(self) {
        self.tasks.stop().cancel();
        self.tasks.finish(Duration::MAX).await.unwrap();
    }

    /// Ends the tasks as a SIGKILL would.
    async fn kill(self) {
        self.tasks.abort().await;
    }
}

impl TestCluster {
    async fn connect() -> Self {
        Self::connect_with(&[]).await
    }

    /// Applies the files of an optional component. [`Self::finish`] removes the objects.
    async fn connect_with(component: ComponentFiles) -> Self {
        let mut test_lock = TEST_LOCK.lock().await;
        if let Ok(level) = std::env::var("LOG_LEVEL") {
            // Only the first test of a run starts logging.
            let log = tracing_subscriber::fmt().with_env_filter(level).with_writer(std::io::stderr);
            drop(log.try_init());
        }
        let admin = administrator().await;
        let name = format!("provisioner-{:x}", Timestamp::now().as_nanosecond());
        if let Some((failed, component)) = test_lock.replace((name.clone(), component)) {
            remove_objects_of(&failed, component, &admin).await;
        }
        let namespace = json!({"metadata": {"name": name}});
        create::<Namespace>(&Api::all(admin.clone()), namespace).await;
        let class = fixtures::class(json!({"metadata": {"name": name, "resourceVersion": null}}));
        create::<StorageClass>(&Api::all(admin.clone()), serde_json::to_value(class).unwrap()).await;
        let volumes = Arc::new(FakeStore::of_size(Bytes(64 * MIB)));
        let cluster = TestCluster {
            test_lock,
            admin,
            namespace: name.clone(),
            class: name,
            volumes,
            scratch: tempfile::tempdir().unwrap(),
            component,
        };
        cluster.opt_in(component).await;
        cluster
    }

    /// Records that a node had its disk while that was empty, as a provisioner does when it starts for the first time.
    async fn take_custody(&self, node: &str, volumes: &FakeStore) {
        let node = Api::<Node>::all(self.admin.clone()).get_metadata(node).await.unwrap();
        let record = CustodyRecord::of_empty_disk(&node.uid().unwrap());
        volumes.state().custody.get_or_insert(record);
    }

    async fn provisioner(&self) -> Provisioner {
        self.provisioner_with(Options::default()).await
    }

    async fn provisioner_with(&self, options: Options) -> Provisioner {
        self.provisioner_on(HERE, &self.volumes, options).await
    }

    async fn provisioner_on(&self, node: &str, volumes: &Arc<FakeStore>, options: Options) -> Provisioner {
        let traffic = ApiTraffic::default();
        let client = self.client_of(node, &traffic).await;
        self.start(node, volumes, options, client, traffic).await
    }

    async fn start(
        &self,
        node: &str,
        volumes: &Arc<FakeStore>,
        options: Options,
        client: Client,
        traffic: ApiTraffic,
    ) -> Provisioner {
        self.take_custody(node, volumes).await;
        let pod = self.pod_of(node).await;
        Provisioner::start(node, volumes, pod, options, client, traffic).await
    }

    /// Returns a client with the rights of the provisioner of a node.
    async fn client_of(&self, node: &str, traffic: &ApiTraffic) -> Client {
        crate::api::client::connect(Some(Self::kubeconfig_of(node)), traffic).await.unwrap()
    }

    fn kubeconfig_of(node: &str) -> PathBuf {
        kubeconfigs().join(format!("{node}.kubeconfig"))
    }

    /// Returns an owner reference to the driver's pod on a node.
    async fn pod_of(&self, node: &str) -> OwnerReference {
        pods_of_driver(&self.admin).await.remove(node).expect("a pod of the driver")
    }

    /// Creates a further class: the test's own class with a change.
    async fn another_class(&self, suffix: &str, change: Value) -> String {
        let name = format!("{}-{suffix}", self.class);
        let mut class = json!({"metadata": {"name": name, "resourceVersion": null}});
        fixtures::merge_keeping_nulls(&mut class, change);
        let class = serde_json::to_value(fixtures::class(class)).unwrap();
        create::<StorageClass>(&Api::all(self.admin.clone()), class).await;
        name
    }

    fn claims(&self) -> Api<PersistentVolumeClaim> {
        Api::namespaced(self.admin.clone(), &self.namespace)
    }

    fn objects(&self) -> Api<PersistentVolume> {
        Api::all(self.admin.clone())
    }

    /// Creates a claim as the scheduler leaves it after it has selected the node.
    async fn claim(&self, name: &str, change: Value) -> PersistentVolumeClaim {
        create(&self.claims(), self.claim_object(name, change)).await
    }

    fn claim_object(&self, name: &str, change: Value) -> Value {
        let mut claim = json!({
            "metadata": {"name": name, "annotations": {ownership::SELECTED_NODE: HERE}},
            "spec": {
                "accessModes": ["ReadWriteOnce"], "storageClassName": self.class,
                "resources": {"requests": {"storage": "1Mi"}},
            },
        });
        fixtures::merge(&mut claim, change);
        claim
    }

    async fn bound(&self, name: &str) -> PersistentVolume {
        let phase = |claim: &PersistentVolumeClaim| claim.status.as_ref()?.phase.clone();
        let claim = until(&self.claims(), name, |claim| phase(claim).as_deref() == Some("Bound")).await;
        self.objects().get(&claim.spec.unwrap().volume_name.unwrap()).await.unwrap()
    }

    /// Applies a merge patch with the rights of the administrator.
    async fn change<K: KubernetesObject>(&self, api: &Api<K>, name: &str, change: Value) -> K {
        api.patch(name, &PatchParams::default(), &Patch::Merge(change)).await.unwrap()
    }

    async fn until_in_phase(&self, volume: &str, phase: &str) {
        until(&self.objects(), volume, |volume| pv::phase(volume) == Some(phase)).await;
    }

    /// Selects a node for a claim, as the scheduler does.
    async fn select(&self, claim: &str, node: &str) {
        let selected = json!({"metadata": {"annotations": {ownership::SELECTED_NODE: node}}});
        self.change(&self.claims(), claim, selected).await;
    }

    async fn unselect(&self, claim: &str) {
        let unselected = json!({"metadata": {"annotations": {ownership::SELECTED_NODE: null}}});
        self.change(&self.claims(), claim, unselected).await;
    }

    async fn request_size(&self, name: &str, size: &str) {
        let request = json!({"spec": {"resources": {"requests": {"storage": size}}}});
        self.change(&self.claims(), name, request).await;
    }

    /// Requests another size, and waits until the claim has it.
    async fn expand(&self, name: &str, size: &str) -> PersistentVolumeClaim {
        self.request_size(name, size).await;
        let wanted = quantity::parse(&Quantity(size.to_owned())).unwrap();
        until(&self.claims(), name, |claim| size_of(claim) == Some(wanted)).await
    }

    async fn delete_claim(&self, name: &str) {
        self.claims().delete(name, &DeleteParams::default()).await.unwrap();
    }

    /// Deletes a claim, and waits until its PersistentVolume does not exist any more.
    async fn delete_claim_of(&self, volume: &PersistentVolume) {
        let claim = ownership::referenced_claim(volume).unwrap();
        self.delete_claim(&claim.name.unwrap()).await;
        self.wait_until_removed(volume).await;
    }

    async fn wait_until_removed(&self, volume: &PersistentVolume) {
        until_deleted(&self.objects(), &volume.name_any()).await;
    }

    /// Deletes claims, and waits until the store has no volumes.
    async fn delete_claims(&self, names: &[&str]) {
        for name in names {
            self.delete_claim(name).await;
        }
        until_empty(&self.volumes).await;
    }

    fn stored(&self) -> Vec<String> {
        self.volumes.state().volumes.keys().map(ToString::to_string).collect()
    }

    /// Waits for an event of a reason about an object and returns its text.
    async fn event(&self, name: &str, reason: &str) -> String {
        self.event_that(name, reason, "").await
    }

    /// Waits for an event whose text contains a word. Other events of that reason may come before.
    async fn event_that(&self, name: &str, reason: &str, word: &str) -> String {
        self.event_in(&self.namespace, name, reason, word).await
    }

    /// Waits for an event in another namespace than the test's own. Events about objects without a namespace are in "default".
    async fn event_in(&self, namespace: &str, name: &str, reason: &str, word: &str) -> String {
        let events: Api<Event> = Api::namespaced(self.admin.clone(), namespace);
        eventually(&format!("event {reason} about {name} that contains {word:?}"), || async {
            let events = events.list(&ListParams::default()).await.unwrap();
            let about = |event: &Event| event.regarding.as_ref().and_then(|object| object.name.clone());
            let found = events.items.into_iter().filter(|event| {
                event.reason.as_deref() == Some(reason) && about(event).as_deref() == Some(name)
            });
            found.filter_map(|event| event.note).find(|note| note.contains(word))
        })
        .await
    }

    /// Applies the files of an optional component, as `kubectl apply` does.
    async fn opt_in(&self, files: &[&str]) {
        for (api, object) in objects_in(files, &self.admin) {
            let parameters = PatchParams::apply("story").force();
            api.patch(&object.name_any(), &parameters, &Patch::Apply(&object)).await.unwrap();
        }
    }

    /// Returns `true` if the API server does not serve MutatingAdmissionPolicy, as before Kubernetes 1.36, and reports that the calling
    /// test cannot check anything, which `harness/skips.toml` has to permit.
    #[allow(clippy::explicit_write, reason = "libtest discards the output of println! if a test passes")]
    async fn lacks_mutating_policies(&self) -> bool {
        let served = self.admin.list_api_group_resources("admissionregistration.k8s.io/v1").await.unwrap();
        let is_served = served.resources.iter().any(|resource| resource.kind == "MutatingAdmissionPolicy");
        if !is_served {
            let reason = "this API server has no MutatingAdmissionPolicy";
            writeln!(std::io::stdout(), "\nthis test is skipped: {reason}").unwrap();
        }
        !is_served
    }

    /// Stops the processes and removes the objects of the test.
    async fn finish(mut self, processes: impl IntoIterator<Item = Provisioner>) {
        for process in processes {
            process.stop().await;
        }
        remove_objects_of(&self.namespace, self.component, &self.admin).await;
        *self.test_lock = None;
    }
}

/// Removes the objects of the test with a namespace. A failed test may have removed some.
async fn remove_objects_of(namespace: &str, component: ComponentFiles, admin: &Client) {
    opt_out(component, admin).await;
    let classes: Api<StorageClass> = Api::all(admin.clone());
    for class in classes.list(&ListParams::default()).await.unwrap() {
        if class.name_any().starts_with(namespace) {
            delete_if_present(&classes, &class.name_any()).await;
        }
    }
    let namespaces = Api::<Namespace>::all(admin.clone());
    delete_if_present(&namespaces, namespace).await;
    remove_volumes_of(namespace, admin).await;
}

/// Removes the objects of an optional component.
async fn opt_out(files: &[&str], admin: &Client) {
    for (api, object) in objects_in(files, admin) {
        delete_if_present(&api, &object.name_any()).await;
    }
}

async fn delete_if_present<K: Clone + fmt::Debug + DeserializeOwned>(api: &Api<K>, name: &str) {
    match api.delete(name, &DeleteParams::default()).await {
        Err(kube::Error::Api(status)) if status.is_not_found() => {}
        deleted => drop(deleted.unwrap()),
    }
}

fn objects_in(files: &[&str], admin: &Client) -> Vec<(Api<DynamicObject>, DynamicObject)> {
    let documents = files.iter().flat_map(|text| serde_norway::Deserializer::from_str(text));
    let objects = documents.map(|document| {
        let object: DynamicObject = serde_json::from_value(Value::deserialize(document).unwrap()).unwrap();
        let kind = GroupVersionKind::try_from(object.types.as_ref().unwrap()).unwrap();
        let resource = ApiResource::from_gvk(&kind);
        let api = match object.namespace() {
            Some(namespace) => Api::namespaced_with(admin.clone(), &namespace, &resource),
            None => Api::all_with(admin.clone(), &resource),
        };
        (api, object)
    });
    objects.collect()
}

/// Returns `true` if a PersistentVolume is for a claim of the test with a namespace, or was created by the test itself.
fn is_of_test(volume: &PersistentVolume, namespace: &str) -> bool {
    let claim = ownership::referenced_claim(volume).and_then(|claim| claim.namespace);
    claim.is_some_and(|claimed| claimed == namespace) || volume.name_any().contains(namespace)
}

/// Removes the PersistentVolumes of a test that no provisioner deleted. The next test may count those of a node.
async fn remove_volumes_of(namespace: &str, admin: &Client) {
    let volumes: Api<PersistentVolume> = Api::all(admin.clone());
    let free = Patch::Merge(json!({"metadata": {"finalizers": null}}));
    let all = volumes.list(&ListParams::default()).await.unwrap();
    for volume in all.iter().filter(|volume| is_of_test(volume, namespace)) {
        let name = volume.name_any();
        // Kubernetes may remove it at the same time.
        drop(volumes.delete(&name, &DeleteParams::default()).await);
        drop(volumes.patch(&name, &PatchParams::default(), &free).await);
        until_deleted(&volumes, &name).await;
    }
}

async fn until_deleted<K: KubernetesObject>(api: &Api<K>, name: &str) {
    eventually(&format!("{name} deleted"), || async {
        api.get_opt(name).await.unwrap().is_none().then_some(())
    })
    .await;
}

async fn administrator() -> Client {
    let kubeconfig = std::env::var("KUBECONFIG").expect("KUBECONFIG").into();
    crate::api::client::connect(Some(kubeconfig), &ApiTraffic::default()).await.unwrap()
}

/// Returns the directory with the kubeconfigs of the provisioners.
fn kubeconfigs() -> PathBuf {
    std::env::var_os("PROVISIONER_KUBECONFIGS").expect("PROVISIONER_KUBECONFIGS").into()
}

/// Returns the names of all kubeconfigs, without the suffix: the name of the node, after `controller-` for one of a controller.
fn kubeconfig_names() -> Vec<String> {
    let files = std::fs::read_dir(kubeconfigs()).unwrap();
    let names = files.map(|file| file.unwrap().file_name().into_string().unwrap());
    names.filter_map(|name| name.strip_suffix(".kubeconfig").map(str::to_owned)).collect()
}

/// Returns an owner reference to the driver's pod of each node.
async fn pods_of_driver(admin: &Client) -> BTreeMap<String, OwnerReference> {
    let pods: Api<Pod> = Api::namespaced(admin.clone(), SYSTEM);
    let pods = pods.list(&ListParams::default().labels(PODS_OF_DRIVER)).await.unwrap();
    let scheduled = pods.iter().filter_map(|pod| Some((pod.spec.as_ref()?.node_name.clone()?, pod)));
    scheduled.map(|(node, pod)| (node, owner_reference(pod))).collect()
}

fn owner_reference(pod: &Pod) -> OwnerReference {
    OwnerReference {
        api_version: "v1".to_owned(),
        kind: "Pod".to_owned(),
        name: pod.name_any(),
        uid: pod.uid().unwrap(),
        ..Default::default()
    }
}

async fn create<K: Clone + fmt::Debug + Serialize + DeserializeOwned>(api: &Api<K>, object: Value) -> K {
    api.create(&PostParams::default(), &serde_json::from_value(object).unwrap()).await.unwrap()
}

async fn until<K: KubernetesObject>(api: &Api<K>, name: &str, done: impl Fn(&K) -> bool) -> K {
    eventually(name, || async { api.get(name).await.ok().filter(|object| done(object)) }).await
}

async fn until_empty(store: &FakeStore) {
    eventually("no volumes", || async { store.state().volumes.is_empty().then_some(()) }).await;
}

/// Waits until each volume of a store is confirmed.
async fn until_none_pending(store: &FakeStore) {
    eventually("no pending volume", || async { store.state().pending.is_empty().then_some(()) }).await;
}

async fn eventually<T, F: Future<Output = Option<T>>>(what: &str, mut attempt: impl FnMut() -> F) -> T {
    let deadline = tokio::time::Instant::now() + TIMEOUT;
    loop {
        if let Some(found) = attempt().await {
            return found;
        }
        assert!(tokio::time::Instant::now() < deadline, "not in time: {what}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

fn size_of(claim: &PersistentVolumeClaim) -> Option<Bytes> {
    recorded(claim.status.as_ref()?.capacity.as_ref())
}

/// Returns the conditions of a claim without that of Kubernetes 1.37 on claims that no pod uses.
fn conditions(claim: &PersistentVolumeClaim) -> Vec<String> {
    let conditions = claim.status.as_ref().and_then(|status| status.conditions.clone()).unwrap_or_default();
    conditions.into_iter().map(|condition| condition.type_).filter(|kind| kind != "Unused").collect()
}

#[tokio::test]
async fn claim_is_provisioned_expanded_and_deleted() {
    let cluster = TestCluster::connect().await;
    let provisioner = cluster.provisioner().await;
    cluster.claim("data", json!({})).await;
    let volume = cluster.bound("data").await;
    assert_eq!(cluster.volumes.capacity(&volume.name_any()), Some(Bytes(MIB)));
    cluster.event("data", "ProvisioningSucceeded").await;

    let expanded = cluster.expand("data", "4Mi").await;
    assert_eq!((ResizeStatus::of(&expanded), conditions(&expanded)), (None, vec![]));
    assert_eq!(cluster.volumes.capacity(&volume.name_any()), Some(Bytes(4 * MIB)));
    cluster.event("data", "VolumeResizeSuccessful").await;

    // More than the free capacity, then less.
    cluster.request_size("data", "1Ti").await;
    let refused =
        |claim: &PersistentVolumeClaim| ResizeStatus::of(claim) == Some(ResizeStatus::ControllerInfeasible);
    let infeasible = until(&cluster.claims(), "data", refused).await;
    assert_eq!(conditions(&infeasible), ["Resizing", "ControllerResizeError"]);
    assert!(cluster.event("data", "VolumeResizeFailed").await.contains("available"));
    let expanded = cluster.expand("data", "8Mi").await;
    assert_eq!((ResizeStatus::of(&expanded), conditions(&expanded)), (None, vec![]));

    cluster.delete_claim_of(&volume).await;
    assert!(cluster.volumes.state().volumes.is_empty());
    let lines = [
        r#"operations_total{operation="provision",result="success",reason=""} "#,
        r#"operations_total{operation="resize",result="success",reason=""} "#,
        // The count is 2 if the watch cache lags behind the write.
        r#"operations_total{operation="delete",result="success",reason=""} "#,
        r#"api_writes_total{verb="delete",resource="persistentvolumes",code="200"} "#,
        // The count is never 2.
        "api_writes_total{verb=\"create\",resource=\"persistentvolumes\",code=\"201\"} 1\n",
    ];
    eventually("all metrics are served", || async {
        let text = provisioner.page("/metrics").await;
        lines.iter().all(|line| text.contains(&format!("\nloopfs_provisioner_{line}"))).then_some(())
    })
    .await;
    cluster.finish([provisioner]).await;
}

/// The provisioner is killed many times at random moments. Every claim ends with one volume and one PersistentVolume, or none.
#[tokio::test]
async fn random_kills_leave_one_volume_each() {
    let cluster = TestCluster::connect().await;
    let mut provisioner = cluster.provisioner().await;
    let mut claims = Vec::new();
    for number in 0..24 {
        let name = format!("c{number}");
        cluster.claim(&name, json!({})).await;
        if number % 3 == 0 {
            provisioner.kill().await;
            provisioner = cluster.provisioner().await;
        }
        if number % 4 == 0 {
            cluster.delete_claim(&name).await;
        } else {
            claims.push(name);
        }
    }
    let mut names = Vec::new();
    for claim in &claims {
        names.push(cluster.bound(claim).await.name_any());
    }
    names.sort();
    eventually("no orphans", || async { (cluster.stored() == names).then_some(()) }).await;
    cluster.delete_claims(&claims.iter().map(String::as_str).collect::<Vec<_>>()).await;
    cluster.finish([provisioner]).await;
}

#[tokio::test]
async fn late_store_serves_waiting_claims() {
    let cluster = TestCluster::connect().await;
    cluster.volumes.break_with(crate::testing::fake_store::error(
        loopfs::ErrorKind::NotMounted,
        "nothing is mounted there; mount it",
    ));
    let provisioner = cluster.provisioner().await;
    cluster.claim("patient", json!({})).await;
    let text = cluster.event("patient", "ProvisioningFailed").await;
    assert!(text.contains("nothing is mounted there; mount it"), "{text}");
    cluster.volumes.break_with(None);
    // The scheduler could have selected another node. It selects this one again.
    let select = Patch::Merge(json!({"metadata": {"annotations": {ownership::SELECTED_NODE: HERE}}}));
    eventually("the claim is bound", || async {
        let claim = cluster.claims().get("patient").await.ok()?;
        if ownership::selected_node(&claim).is_none() {
            cluster.claims().patch("patient", &PatchParams::default(), &select).await.ok()?;
        }
        (claim.status?.phase.as_deref() == Some("Bound")).then_some(())
    })
    .await;
    cluster.delete_claims(&["patient"]).await;
    cluster.finish([provisioner]).await;
}

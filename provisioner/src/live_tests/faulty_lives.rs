//! Tests of the whole life of claims while the API server is faulty: each ends with one volume and one PersistentVolume, and with
//! neither after its deletion.

use loopfs::volume_store::VolumeId;

use super::audit::auditing;
use super::data_safety::TIMEOUTS;
use super::fault_plan::{Subjects, claim_of, of_each_write, seeded};
use super::faulty_api_server::{Call, Fault, FaultyApiServer};
use super::*;

const COPY: &str = "copy";
const RETAINED: &str = "retained";

/// The writes about one claim and its PersistentVolume, in a whole life with the faults of a plan. Each of about ten kinds of writes
/// fails a few times.
const MAX_WRITES: usize = 60;
/// The writes of events about one claim and its PersistentVolume. Repetitions are aggregated.
const MAX_EVENT_WRITES: usize = 40;

/// The claims of one node, and its provisioner behind a faulty API server.
struct Lives<'a> {
    cluster: &'a TestCluster,
    node: &'static str,
    volumes: Arc<FakeStore>,
    api_server: FaultyApiServer,
    subjects: Subjects,
    names: Vec<String>,
    provisioner: Provisioner,
}

impl<'a> Lives<'a> {
    async fn begin(
        cluster: &'a TestCluster,
        node: &'static str,
        names: Vec<String>,
        rule: impl FnOnce(Subjects) -> Box<dyn Fn(&Call) -> Option<Fault> + Send + Sync>,
    ) -> Self {
        let api_server = FaultyApiServer::before(cluster, node).await;
        let subjects = Subjects::default();
        api_server.set(rule(subjects.clone()));
        let volumes = Arc::new(FakeStore::of_size(Bytes(256 * MIB)));
        // The audit would remove each volume that it finds orphaned even once.
        let options = auditing(Some(Duration::ZERO));
        let traffic = ApiTraffic::default();
        let client = api_server.client(TIMEOUTS, &traffic).await;
        let provisioner = cluster.start(node, &volumes, options, client, traffic).await;
        Lives { cluster, node, volumes, api_server, subjects, names, provisioner }
    }

    /// Creates a claim. The node is selected once the plan knows the name of the PersistentVolume.
    async fn create(&self, name: &str, change: Value) {
        let mut unplaced = json!({"metadata": {"annotations": null}});
        fixtures::merge_keeping_nulls(&mut unplaced, change);
        let claim = self.cluster.claim(name, unplaced).await;
        self.subjects.insert(format!("pvc-{}", claim.uid().unwrap()), name);
        self.cluster.select(name, self.node).await;
    }

    fn all(&self) -> Vec<String> {
        self.names.iter().cloned().chain([self.name(COPY), self.name(RETAINED)]).collect()
    }

    fn name(&self, name: &str) -> String {
        format!("{name}-{}", self.node)
    }

    fn stored(&self) -> Vec<String> {
        self.volumes.state().volumes.keys().map(ToString::to_string).collect()
    }

    /// Waits until each claim has exactly one volume and one PersistentVolume. Returns their names.
    async fn one_of_each(&self) -> Vec<String> {
        let mut bound = Vec::new();
        for name in self.all() {
            bound.push(self.cluster.bound(&name).await.name_any());
        }
        bound.sort();
        eventually("one volume for each claim", || async { (self.stored() == bound).then_some(()) }).await;
        let objects = self.cluster.objects().list(&ListParams::default()).await.unwrap();
        let label = fixtures::identity().node_label();
        let here =
            objects.iter().filter(|object| object.labels().get(&label).is_some_and(|of| of == self.node));
        let mut here: Vec<_> = here.map(ResourceExt::name_any).collect();
        here.sort();
        assert_eq!(here, bound);
        bound
    }

    async fn expand(&self) {
        let refused = |claim: &PersistentVolumeClaim| {
            ResizeStatus::of(claim) == Some(ResizeStatus::ControllerInfeasible)
        };
        for name in self.all() {
            self.cluster.request_size(&name, "1Ti").await;
        }
        for name in self.all() {
            until(&self.cluster.claims(), &name, refused).await;
            self.cluster.request_size(&name, "4Mi").await;
        }
        for name in self.all() {
            let expanded = |claim: &PersistentVolumeClaim| {
                size_of(claim) == Some(Bytes(4 * MIB)) && ResizeStatus::of(claim).is_none()
            };
            let claim = until(&self.cluster.claims(), &name, expanded).await;
            assert_eq!(conditions(&claim), Vec::<String>::new(), "{name}");
            let volume = claim.spec.unwrap().volume_name.unwrap();
            assert_eq!(self.volumes.capacity(&volume), Some(Bytes(4 * MIB)), "{name}");
        }
    }

    /// Deletes all claims. Only the retained volume stays.
    async fn delete(&self, names: &[String]) {
        let retained = self.cluster.bound(&self.name(RETAINED)).await.name_any();
        self.cluster.retain(&retained).await;
        until(&self.cluster.objects(), &retained, |volume| !pv::has_finalizer(volume)).await;
        for name in self.all() {
            self.cluster.delete_claim(&name).await;
        }
        for name in names.iter().filter(|name| **name != retained) {
            until_deleted(&self.cluster.objects(), name).await;
        }
        eventually("only the retained volume is left", || async {
            (self.stored() == [retained.clone()]).then_some(())
        })
        .await;
        // The audit would delete the volume of a PersistentVolume that no longer exists.
        let (_, taken) = self.volumes.state().volumes.pop_first().unwrap();
        assert_eq!(taken.1, Bytes(4 * MIB));
        self.cluster.remove_objects(&[&retained]).await;
    }

    /// Checks that the provisioner is ready, has no work left, and has not flooded the API server.
    async fn is_at_rest(&self) {
        let gauges = ["claims_waiting 0", "expansions_waiting 0", "storage_open 1"];
        let gauges = gauges.map(|line| format!("loopfs_provisioner_{line}"));
        self.provisioner.until_metrics(&gauges).await;
        self.provisioner.until_ready().await;
        until_none_pending(&self.volumes).await;
        let claims = self.all().len();
        let writes = |resource: &'static str| {
            self.api_server.count(0, |call, _| call.is_write() && call.resource.starts_with(resource))
        };
        let (objects, events) = (writes("persistentvolume"), writes("events"));
        println!("{}: {claims} claims, {objects} writes of them, {events} of events", self.node);
        assert!(objects < claims * MAX_WRITES, "{objects} writes for {claims} claims");
        assert!(events < claims * MAX_EVENT_WRITES, "{events} writes of events for {claims} claims");
    }

    /// Lives all stages. Faults can occur in each.
    async fn live(self) {
        let first = self.names[0].clone();
        for name in self.names.iter().chain([&self.name(RETAINED)]) {
            self.create(name, json!({})).await;
        }
        let source = json!({"kind": "PersistentVolumeClaim", "name": first});
        self.create(&self.name(COPY), json!({"spec": {"dataSource": source}})).await;
        let names = self.one_of_each().await;
        let copy = VolumeId::parse(&self.cluster.bound(&self.name(COPY)).await.name_any()).unwrap();
        assert!(self.volumes.state().copies.contains_key(&copy));
        self.expand().await;
        self.delete(&names).await;
        self.is_at_rest().await;
        self.provisioner.stop().await;
    }
}

#[tokio::test]
async fn faulty_writes_leave_one_volume_each() {
    let cluster = TestCluster::connect().await;
    let names = Fault::OF_WRITES.map(claim_of).to_vec();
    let lives = Lives::begin(&cluster, HERE, names, |subjects| Box::new(of_each_write(subjects))).await;
    lives.live().await;
    cluster.finish([]).await;
}

#[tokio::test]
async fn random_faults_leave_one_volume_for_each_claim() {
    let seed = std::env::var("LOOPFS_TEST_SEED").expect("LOOPFS_TEST_SEED is set").parse().unwrap();
    println!("LOOPFS_TEST_SEED={seed}");
    let cluster = TestCluster::connect().await;
    let lives = |node, seed| {
        let names = (0..5).map(|number| format!("c{number}-{node}")).collect();
        let cluster = &cluster;
        async move {
            Lives::begin(cluster, node, names, |subjects| Box::new(seeded(seed, subjects)))
                .await
                .live()
                .await;
        }
    };
    tokio::join!(lives(HERE, seed), lives(THERE, seed.wrapping_add(1)));
    cluster.finish([]).await;
}

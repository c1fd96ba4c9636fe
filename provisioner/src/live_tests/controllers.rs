//! Tests of the controller: how its replicas take turns, and what happens without one.

use k8s_openapi::api::coordination::v1::Lease;

use super::faulty_api_server::{Call, Fault, FaultyApiServer};
use super::nodes::allowing;
use super::*;
use crate::api::connection::Timeouts;
use crate::controller::lease::Candidate;
use crate::controller::node_loss::NodeLossSettings;
use crate::controller::process::{ControllerProcessParts, Duties};
use crate::controller::unready_nodes::Timing;
use crate::loss::NodeLoss;
use crate::objects::ownership::selected_node;

/// The name of the Lease in the role of the manifests.
const LEASE: &str = "loopfs-controller";

const PATIENCE: Duration = Duration::from_secs(3600);

/// The duties that every controller has.
pub(super) const ONLY_PLACEMENT: Duties = Duties {
    builtin: None,
    claim_labels: None,
    node_loss: checking(NodeLoss::Off),
    unready_nodes: Timing::DEFAULT,
};

pub(super) const fn checking(mode: NodeLoss) -> NodeLossSettings {
    NodeLossSettings { mode, at_most_percent: 20, list_interval: Duration::ZERO }
}

/// Returns the kubeconfig of a replica, and the node in its token.
pub(super) fn kubeconfig() -> (PathBuf, String) {
    let name = kubeconfig_names().into_iter().filter(|name| name.starts_with("controller-")).min();
    let name = name.expect("a kubeconfig of the controller");
    (TestCluster::kubeconfig_of(&name), name.trim_start_matches("controller-").to_owned())
}

impl TestCluster {
    /// Returns a client with the rights of a replica, and the node in its token.
    pub(super) async fn controller_client(&self, traffic: &ApiTraffic) -> (Client, String) {
        let (path, node) = kubeconfig();
        (crate::api::client::connect(Some(path), traffic).await.unwrap(), node)
    }

    /// Starts a controller. It leads at once, unless another one runs.
    pub(super) async fn controller(&self, duties: Duties) -> Provisioner {
        self.controller_named("only", duties).await
    }

    pub(super) async fn controller_named(&self, holder: &str, duties: Duties) -> Provisioner {
        let traffic = ApiTraffic::default();
        let (client, _node) = self.controller_client(&traffic).await;
        self.start_controller(holder, duties, client, traffic).await
    }

    pub(super) async fn start_controller(
        &self,
        holder: &str,
        duties: Duties,
        client: Client,
        traffic: ApiTraffic,
    ) -> Provisioner {
        let identity = Identity::new(fixtures::identity().driver(), &kubeconfig().1).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let pages = listener.local_addr().unwrap();
        let parts = ControllerProcessParts {
            client,
            identity,
            candidate: Candidate { namespace: SYSTEM.to_owned(), holder: holder.to_owned() },
            duties,
            monitoring: Some((Listeners { metrics: Some(listener), probes: None }, traffic)),
        };
        Provisioner { tasks: crate::controller::process::spawn(parts, CancellationToken::new()), pages }
    }

    /// Starts a controller whose requests pass through a proxy. It waits for a response longer than any test takes.
    pub(super) async fn controller_through(
        &self,
        api_server: &FaultyApiServer,
        holder: &str,
        duties: Duties,
    ) -> Provisioner {
        let traffic = ApiTraffic::default();
        let timeouts = Timeouts { request: PATIENCE, silence: PATIENCE, ..Timeouts::default() };
        let client = api_server.client(timeouts, &traffic).await;
        self.start_controller(holder, duties, client, traffic).await
    }

    fn leases(&self) -> Api<Lease> {
        Api::namespaced(self.admin.clone(), SYSTEM)
    }

    async fn class_of_this_node(&self) -> String {
        let allowed = json!({"volumeBindingMode": "Immediate", "allowedTopologies": allowing(HERE)});
        self.another_class("one", allowed).await
    }
}

impl Provisioner {
    pub(super) async fn leads(&self) -> bool {
        self.page("/metrics").await.contains("\nloopfs_controller_leads 1\n")
    }

    pub(super) async fn until_it_leads(&self) {
        eventually("this replica leads", || async { self.leads().await.then_some(()) }).await;
    }
}

#[tokio::test]
async fn without_controller_only_immediate_claims_wait() {
    let cluster = TestCluster::connect().await;
    let provisioner = cluster.provisioner().await;
    let class = cluster.class_of_this_node().await;
    cluster.unplaced("now", &class, "1Mi").await;
    cluster.claim("first-consumer", json!({})).await;
    cluster.bound("first-consumer").await;
    // Kubernetes says what the claim waits for.
    cluster.event("now", "ExternalProvisioning").await;
    assert_eq!(selected_node(&cluster.claims().get("now").await.unwrap()), None);

    let controller = cluster.controller(ONLY_PLACEMENT).await;
    cluster.bound("now").await;
    assert_eq!(selected_node(&cluster.claims().get("now").await.unwrap()), Some(HERE));
    cluster.delete_claims(&["now", "first-consumer"]).await;
    cluster.finish([provisioner, controller]).await;
}

#[tokio::test]
async fn next_replica_takes_over() {
    let cluster = TestCluster::connect().await;
    let provisioner = cluster.provisioner().await;
    let class = cluster.class_of_this_node().await;
    let first = cluster.controller_named("first", ONLY_PLACEMENT).await;
    first.until_it_leads().await;
    let second = cluster.controller_named("second", ONLY_PLACEMENT).await;
    cluster.unplaced("of-the-first", &class, "1Mi").await;
    cluster.bound("of-the-first").await;
    // A replica that waits is ready.
    second.until_ready().await;
    assert!(!second.leads().await);

    // It stops in order and releases the Lease.
    first.stop().await;
    second.until_it_leads().await;
    cluster.unplaced("of-the-second", &class, "1Mi").await;
    cluster.bound("of-the-second").await;

    // It is killed. The next one leads when the Lease has ended.
    let third = cluster.controller_named("third", ONLY_PLACEMENT).await;
    second.kill().await;
    third.until_it_leads().await;
    cluster.unplaced("of-the-third", &class, "1Mi").await;
    cluster.bound("of-the-third").await;
    cluster.delete_claims(&["of-the-first", "of-the-second", "of-the-third"]).await;
    cluster.finish([provisioner, third]).await;
}

/// A Lease can name a dead holder for years, for example after the clock of a node was wrong.
#[tokio::test]
async fn replica_leads_after_lease_was_deleted() {
    let cluster = TestCluster::connect().await;
    let dead = json!({
        "apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": LEASE},
        "spec": {
            "holderIdentity": "dead", "leaseDurationSeconds": 15,
            "acquireTime": "2100-01-01T00:00:00.000000Z", "renewTime": "2100-01-01T00:00:00.000000Z",
        },
    });
    let leases = cluster.leases();
    leases.patch(LEASE, &PatchParams::apply("story").force(), &Patch::Apply(dead)).await.unwrap();
    let controller = cluster.controller_named("first", ONLY_PLACEMENT).await;
    // It is ready once it has read the Lease.
    controller.until_ready().await;
    assert!(!controller.leads().await);

    leases.delete(LEASE, &DeleteParams::default()).await.unwrap();
    controller.until_it_leads().await;

    // The leader creates the Lease again, too.
    let deleted = leases.get(LEASE).await.unwrap();
    leases.delete(LEASE, &DeleteParams::default()).await.unwrap();
    let holder = |lease: &Lease| lease.spec.as_ref().and_then(|spec| spec.holder_identity.clone());
    until(&leases, LEASE, |lease| lease.uid() != deleted.uid() && holder(lease).as_deref() == Some("first"))
        .await;
    controller.until_it_leads().await;
    cluster.finish([controller]).await;
}

/// The leader loses the API server between its decision and its write. The next leader writes, and the first one's write does no
/// harm when it arrives.
#[tokio::test]
async fn leader_changes_during_a_placement() {
    const CLAIMS: &str = "persistentvolumeclaims";
    let cluster = TestCluster::connect().await;
    let provisioner = cluster.provisioner().await;
    let class = cluster.class_of_this_node().await;
    let api_server = FaultyApiServer::in_front_of(&cluster, kubeconfig().0).await;
    let first = cluster.controller_through(&api_server, "first", ONLY_PLACEMENT).await;
    first.until_it_leads().await;
    // In the meantime, the leader neither renews the Lease nor learns that it ended.
    api_server.set(|call| match call {
        call if call.is("patch", CLAIMS) => Some(Fault::Late),
        call if call.is_write() || call.resource == "leases" => Some(Fault::Silence),
        _ => None,
    });
    let before = api_server.now();
    cluster.unplaced("now", &class, "1Mi").await;
    let writes = |call: &Call, _: Option<Fault>| call.is("patch", CLAIMS);
    api_server.until(before, 1, "the first leader writes", writes).await;
    assert!(first.leads().await);
    let second = cluster.controller_named("second", ONLY_PLACEMENT).await;
    second.until_it_leads().await;
    let volume = cluster.bound("now").await;
    let bound = cluster.claims().get("now").await.unwrap();

    let late = api_server.now();
    api_server.heal();
    let arrives = |call: &Call, fault: Option<Fault>| call.is("patch", CLAIMS) && fault.is_none();
    api_server.until(late, 1, "the first leader's write arrives", arrives).await;
    let claim = cluster.claims().get("now").await.unwrap();
    assert_eq!((claim.uid(), selected_node(&claim), &claim.spec), (bound.uid(), Some(HERE), &bound.spec));
    assert_eq!(cluster.stored(), [volume.name_any()]);
    first.kill().await;
    cluster.delete_claims(&["now"]).await;
    cluster.finish([provisioner, second]).await;
}

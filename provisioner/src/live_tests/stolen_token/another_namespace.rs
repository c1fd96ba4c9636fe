//! Accounts of the driver in another namespace than that of the manifests, to which a kustomization with `namespace` moves them.

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Node, ServiceAccount};
use k8s_openapi::api::rbac::v1::{ClusterRoleBinding, Role, RoleBinding};

use super::super::*;
use super::attacker::{Account, client_with_token};
use super::request::{AttackRequest, Verdict};
use super::scene::{DRIVER, LEASE, Scene, leases, volumes};
use crate::api::cluster::Cluster;
use crate::api::events::Events;
use crate::api::policies::{self, Forbidden};
use crate::live_tests::controllers::ONLY_PLACEMENT;

/// Creates an account in the namespace of the test, with the roles of the manifests. Returns a client with its token for a node.
async fn moved(cluster: &TestCluster, account: Account, node: &str) -> Client {
    let (namespace, name) = (&cluster.namespace, account.name());
    let role = |kind: &str| json!({"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": name});
    let subjects = json!([{"kind": "ServiceAccount", "name": name, "namespace": namespace}]);
    let accounts: Api<ServiceAccount> = Api::namespaced(cluster.admin.clone(), namespace);
    create(&accounts, json!({"metadata": {"name": name}})).await;
    let everywhere: Api<ClusterRoleBinding> = Api::all(cluster.admin.clone());
    let binding = json!({"metadata": {"name": bound_as(cluster, account)}, "roleRef": role("ClusterRole"), "subjects": subjects});
    create(&everywhere, binding).await;
    let manifests: Api<Role> = Api::namespaced(cluster.admin.clone(), SYSTEM);
    let rules = manifests.get(name).await.unwrap().rules;
    let roles: Api<Role> = Api::namespaced(cluster.admin.clone(), namespace);
    create(&roles, json!({"metadata": {"name": name}, "rules": rules})).await;
    let bindings: Api<RoleBinding> = Api::namespaced(cluster.admin.clone(), namespace);
    let binding = json!({"metadata": {"name": name}, "roleRef": role("Role"), "subjects": subjects});
    create(&bindings, binding).await;
    let nodes: Api<Node> = Api::all(cluster.admin.clone());
    let uid = nodes.get(node).await.unwrap().uid();
    let bound = json!({"apiVersion": "v1", "kind": "Node", "name": node, "uid": uid});
    client_with_token(cluster, namespace, account, json!({"audiences": [], "boundObjectRef": bound})).await
}

fn bound_as(cluster: &TestCluster, account: Account) -> String {
    format!("{}-{}", account.name(), cluster.namespace)
}

/// Sends a request until it has the verdict, because roles take a moment to be in force.
async fn has_verdict(client: &Client, request: AttackRequest, expected: impl Fn(&Verdict) -> bool) {
    let what = request.to_string();
    let latest = std::sync::Mutex::new(None);
    let attempt = || async {
        let verdict = request.send(client).await;
        let is_expected = expected(&verdict);
        *latest.lock().unwrap() = Some(verdict);
        is_expected.then_some(())
    };
    if tokio::time::timeout(TIMEOUT / 4, eventually(&what, attempt)).await.is_err() {
        panic!("{what}: {:?}", latest.lock().unwrap());
    }
}

#[tokio::test]
async fn the_policies_apply_in_any_namespace() {
    let cluster = TestCluster::connect().await;
    let scene = Scene::set(&cluster, HERE).await;
    let namespace = cluster.namespace.clone();
    let allowed = |verdict: &Verdict| *verdict == Verdict::Allowed;
    let refused_by = |expected: &'static str| move |verdict: &Verdict| matches!(verdict, Verdict::Refused { policy, .. } if policy == expected);

    let provisioner = moved(&cluster, Account::Provisioner, HERE).await;
    let volume = |node| volumes().create(scene.new_volume("waiting-own", DRIVER, node));
    has_verdict(&provisioner, volume(scene.here), allowed).await;
    has_verdict(&provisioner, volume(scene.there), refused_by("loopfs-provisioner-volumes")).await;

    let controller = moved(&cluster, Account::Controller, HERE).await;
    let lease = |name: &str| leases().within(&namespace).create(json!({"metadata": {"name": name}}));
    has_verdict(&controller, lease(LEASE), allowed).await;
    has_verdict(&controller, lease("kube-scheduler"), refused_by("loopfs-controller-lease")).await;

    let bindings: Api<ClusterRoleBinding> = Api::all(cluster.admin.clone());
    for account in Account::ALL {
        bindings.delete(&bound_as(&cluster, account), &DeleteParams::default()).await.unwrap();
    }
    scene.remove(&cluster).await;
    cluster.finish([]).await;
}

#[tokio::test]
async fn each_process_checks_its_policies() {
    let cluster = TestCluster::connect().await;
    let provisioner = cluster.provisioner().await;
    let controller = cluster.controller_named("only", ONLY_PLACEMENT).await;
    provisioner.until_metrics(&["loopfs_provisioner_policies_enforced 1"]).await;
    controller.until_metrics(&["loopfs_controller_policies_enforced 1"]).await;
    controller.stop().await;

    // Without a binding, nothing refuses the dry runs.
    let (controllers_client, node) = cluster.controller_client(&ApiTraffic::default()).await;
    let provisioners_client = cluster.client_of(HERE, &ApiTraffic::default()).await;
    let lease = Forbidden::AnotherLease { namespace: SYSTEM.to_owned() };
    let bindings: Api<k8s_openapi::api::admissionregistration::v1::ValidatingAdmissionPolicyBinding> =
        Api::all(cluster.admin.clone());
    for (client, node, forbidden) in [
        (provisioners_client, HERE.to_owned(), Forbidden::VolumeOfAnotherNode),
        (controllers_client, node, lease),
    ] {
        let access =
            Cluster { client, identity: Identity::new(DRIVER, &node).unwrap(), events: Events::new(&node).0 };
        let enforced = async || policies::enforced(&forbidden.send(&access).await, forbidden.policy());
        assert_eq!(enforced().await, Some(true));
        bindings.delete(forbidden.policy(), &DeleteParams::default()).await.unwrap();
        eventually("the dry run is allowed", || async { (enforced().await == Some(false)).then_some(()) })
            .await;
        cluster.opt_in(&[include_str!("../../../../csi/deploy/admission.yaml")]).await;
        eventually("the dry run is refused", || async { (enforced().await == Some(true)).then_some(()) })
            .await;
    }
    // No object was created.
    let leases: Api<Lease> = Api::namespaced(cluster.admin.clone(), SYSTEM);
    assert!(leases.get_opt(policies::NAME).await.unwrap().is_none());
    assert!(cluster.objects().get_opt(policies::NAME).await.unwrap().is_none());
    cluster.finish([provisioner]).await;
}

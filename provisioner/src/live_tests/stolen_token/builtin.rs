//! Requests for the kinds of objects to which the component builtin-objects gives access.

use serde_json::{Value, json};

use super::super::*;
use super::attacker::Account;
use super::attempt::{Attempts, KEEP, changed, finalizers, label, metadata, owner};
use super::request::{AttackRequest, TargetResource, Verdict};
use super::scene::{DRIVER, OTHER_DRIVER, Scene, config_maps, dynamic};

const POLICY: &str = "loopfs-provisioner-builtin-objects";
const RBAC: &str = "rbac.authorization.k8s.io";
/// A driver that is not installed.
const FOREIGN_DRIVER: &str = "csi.foreign.example";

// Words of the rules.
const WRITE_LABELLED: &str = "may write only objects with the labels";
const CHANGE_LABELLED: &str = "may change only objects that have the labels";
const OWN_CLASSES: &str = "only StorageClasses of its own driver";
const OWN_CSI_DRIVER: &str = "only the CSIDriver";
const OWN_PRIORITIES: &str = "only PriorityClasses whose names begin with loopfs";
const NO_DEFAULT: &str = "default of all pods";
const OWN_ROLES: &str = "roles and bindings whose names";
const OWN_ACCOUNT: &str = "only to the account of the provisioner";
const GROUPS: &str = "only roles for the API groups";
const ROLE_LABELS: &str = "may add to roles only labels of app.kubernetes.io";
const BARE: &str = "may not change finalizers and owners";

fn refused(words: &'static str) -> Verdict {
    Verdict::refused(POLICY, words)
}

fn labels() -> Value {
    json!({"app.kubernetes.io/managed-by": "loopfs-provisioner", "app.kubernetes.io/instance": DRIVER})
}

fn subject(account: Account) -> Value {
    json!({"kind": "ServiceAccount", "name": account.name(), "namespace": SYSTEM})
}

/// Returns the kinds, each with the fields of an object.
fn kinds() -> [(TargetResource, Value); 7] {
    let cluster = |group, kind, plural, fields| (TargetResource::new(group, kind, plural), fields);
    let system = |kind, plural, fields| (TargetResource::new(RBAC, kind, plural).within(SYSTEM), fields);
    let rules = json!({"rules": [{"apiGroups": ["storage.k8s.io"], "resources": ["csistoragecapacities"], "verbs": ["list"]}]});
    let everywhere = json!({"rules": [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["get"]}]});
    // The role has the name of the account.
    let provisioner = Account::Provisioner.name();
    let binding = |kind: &str| json!({"roleRef": {"apiGroup": RBAC, "kind": kind, "name": provisioner}, "subjects": [subject(Account::Provisioner)]});
    [
        cluster("storage.k8s.io", "CSIDriver", "csidrivers", json!({"spec": {"attachRequired": false}})),
        cluster("storage.k8s.io", "StorageClass", "storageclasses", json!({"provisioner": DRIVER})),
        cluster("scheduling.k8s.io", "PriorityClass", "priorityclasses", json!({"value": 1})),
        cluster(RBAC, "ClusterRole", "clusterroles", everywhere),
        cluster(RBAC, "ClusterRoleBinding", "clusterrolebindings", binding("ClusterRole")),
        system("Role", "roles", rules),
        system("RoleBinding", "rolebindings", binding("Role")),
    ]
}

/// For each kind, an object with the labels of the driver and one without.
pub(super) struct BuiltIn {
    objects: Vec<(TargetResource, Value, Value)>,
    prefix: String,
}

impl BuiltIn {
    pub(super) async fn set(cluster: &TestCluster) -> Self {
        let prefix = format!("loopfs-{}", cluster.namespace);
        let mut objects = Vec::new();
        for (resource, fields) in kinds() {
            let (mut own, mut foreign) = (fields.clone(), fields);
            own["metadata"] = json!({"name": format!("{prefix}-own"), "labels": labels()});
            foreign["metadata"] = json!({"name": format!("{prefix}-foreign")});
            if resource.kind == "CSIDriver" {
                // The driver has only one CSIDriver.
                own["metadata"]["name"] = json!(DRIVER);
                foreign["metadata"]["name"] = json!(FOREIGN_DRIVER);
            }
            for object in [&mut own, &mut foreign] {
                let (api, applied) = dynamic(cluster, &resource, object.clone());
                let parameters = PatchParams::apply("story").force();
                let applied = api.patch(&applied.name_any(), &parameters, &Patch::Apply(&applied)).await;
                *object = serde_json::to_value(applied.unwrap()).unwrap();
            }
            objects.push((resource, own, foreign));
        }
        BuiltIn { objects, prefix }
    }

    pub(super) async fn remove(self, cluster: &TestCluster) {
        for (resource, own, foreign) in self.objects {
            for object in [own, foreign] {
                let (api, object) = dynamic(cluster, &resource, object);
                if object.name_any() == DRIVER {
                    // The manifests have no labels here.
                    let bare = json!({"metadata": {"labels": null}});
                    api.patch(DRIVER, &PatchParams::default(), &Patch::Merge(bare)).await.unwrap();
                } else {
                    api.delete(&object.name_any(), &DeleteParams::default()).await.unwrap();
                }
            }
        }
    }

    fn own(&self, kind: &str) -> (&TargetResource, &Value) {
        let (resource, own, _) = self.objects.iter().find(|(known, ..)| known.kind == kind).unwrap();
        (resource, own)
    }

    /// Returns a request that creates an object like the driver's own one, with a change.
    fn create(&self, kind: &str, change: Value) -> AttackRequest {
        let (resource, own) = self.own(kind);
        let bare = metadata(json!({
            "name": format!("{}-new", self.prefix), "uid": null, "resourceVersion": null, "managedFields": null,
            "creationTimestamp": null, "generation": null,
        }));
        resource.create(changed(&changed(own, bare), change))
    }

    pub(super) fn attempts(&self, scene: &Scene, attempts: &mut Attempts) {
        for (resource, own, foreign) in &self.objects {
            self.of_kind(resource, own, foreign, attempts);
        }
        self.create_refused(scene, attempts);
        self.bind_refused(scene, attempts);
        self.escalate(attempts);
        for (kind, right) in [("ClusterRoleBinding", "clusterroles"), ("RoleBinding", "roles")] {
            attempts.allow("bind a role of the provisioner", [self.create(kind, json!({}))]);
            attempts.also(1, "bind", right);
        }
        attempts.refuse_unbound(POLICY, "bind a role", self.create("ClusterRoleBinding", json!({})));
        let (map, declaration) = (config_maps(), Some("loopfs-objects"));
        attempts.expect(Verdict::Absent, "read the declaration", [map.request("get", declaration)]);
        attempts.allow("read the declaration", ["list", "watch"].map(|verb| map.request(verb, declaration)));
        let another = [map.request("get", Some("kube-root-ca.crt"))];
        attempts.expect(Verdict::NotGranted, "read another ConfigMap", another);
    }

    /// Adds the requests for each kind. The driver has only one CSIDriver, which the controller never deletes.
    fn of_kind(&self, resource: &TargetResource, own: &Value, foreign: &Value, attempts: &mut Attempts) {
        let (kind, is_driver) = (resource.kind, resource.kind == "CSIDriver");
        let (own_name, foreign_name) = (super::attempt::name(own), super::attempt::name(foreign));
        for verb in ["get", "list", "watch"] {
            let object = (verb == "get").then_some(own_name);
            attempts.allow(format!("read a {kind}"), [resource.request(verb, object)]);
        }
        let named = if is_driver { metadata(json!({"name": DRIVER})) } else { json!({}) };
        let created = if is_driver { Verdict::Exists } else { Verdict::Allowed };
        attempts.expect(created, format!("create a {kind}"), [self.create(kind, named.clone())]);
        let mut unlabelled = named;
        fixtures::merge_keeping_nulls(&mut unlabelled, metadata(json!({"labels": null})));
        let unlabelled = [self.create(kind, unlabelled)];
        attempts.expect(refused(WRITE_LABELLED), format!("create a {kind} without labels"), unlabelled);
        attempts.allow(format!("update its own {kind}"), [resource.update(own.clone())]);
        let adopt = [resource.update(changed(foreign, metadata(json!({"labels": labels()}))))];
        attempts.expect(refused(CHANGE_LABELLED), format!("adopt another's {kind}"), adopt);
        let (own_deleted, foreign_deleted) = match is_driver {
            true => (Verdict::NotGranted, Verdict::NotGranted),
            false => (Verdict::Allowed, refused(CHANGE_LABELLED)),
        };
        let delete_foreign = [resource.delete(foreign_name)];
        attempts.expect(foreign_deleted, format!("delete another's {kind}"), delete_foreign);
        attempts.expect(own_deleted, format!("delete its own {kind}"), [resource.delete(own_name)]);
    }

    fn create_refused(&self, scene: &Scene, attempts: &mut Attempts) {
        let named = |name: &str| metadata(json!({"name": name}));
        let role = |group: &str, resource: &str, verb: &str| json!({"rules": [{"apiGroups": [group], "resources": [resource], "verbs": [verb]}]});
        let aggregated = label("rbac.authorization.k8s.io/aggregate-to-view", "true");
        for (words, title, kind, change) in [
            (
                OWN_CLASSES,
                "create another driver's class",
                "StorageClass",
                json!({"provisioner": OTHER_DRIVER}),
            ),
            (OWN_CSI_DRIVER, "create another CSIDriver", "CSIDriver", named("csi.third.dev")),
            (OWN_PRIORITIES, "create a PriorityClass of any name", "PriorityClass", named("urgent")),
            (NO_DEFAULT, "make all pods urgent", "PriorityClass", json!({"globalDefault": true})),
            (OWN_ROLES, "create a role of any name", "ClusterRole", named("prometheus")),
            (OWN_ROLES, "create a role of any name", "Role", named("prometheus")),
            (OWN_ROLES, "create a binding of any name", "ClusterRoleBinding", named("prometheus")),
            (OWN_ROLES, "create a binding of any name", "RoleBinding", named("prometheus")),
            (GROUPS, "allow changes of roles", "ClusterRole", role(RBAC, "clusterroles", "update")),
            (GROUPS, "allow new bindings", "Role", role(RBAC, "rolebindings", "create")),
            (GROUPS, "allow new Leases", "Role", role("coordination.k8s.io", "leases", "create")),
            (ROLE_LABELS, "have the role view take its rights in", "ClusterRole", aggregated.clone()),
            (ROLE_LABELS, "have the role view take its rights in", "Role", aggregated),
            (BARE, "keep a Node from being deleted", "StorageClass", finalizers(&[KEEP])),
            (BARE, "keep a Node from being deleted", "StorageClass", owner(scene.other_node())),
        ] {
            attempts.expect(refused(words), title, [self.create(kind, change)]);
        }
    }

    fn bind_refused(&self, scene: &Scene, attempts: &mut Attempts) {
        let account = |name: &str, namespace: &str| json!({"kind": "ServiceAccount", "name": name, "namespace": namespace});
        let kubelet =
            json!({"kind": "User", "apiGroup": RBAC, "name": format!("system:node:{}", scene.here)});
        let all_users = json!({"kind": "Group", "apiGroup": RBAC, "name": "system:authenticated"});
        for (title, further) in [
            ("itself", subject(Account::Controller)),
            ("another account", account("default", SYSTEM)),
            ("a namesake in another namespace", account(Account::Provisioner.name(), &scene.namespace)),
            ("the kubelet of its node", kubelet),
            ("all users", all_users),
        ] {
            for kind in ["ClusterRoleBinding", "RoleBinding"] {
                let subjects = json!({"subjects": [subject(Account::Provisioner), further]});
                let title = format!("give the provisioner's rights to {title}");
                attempts.expect(refused(OWN_ACCOUNT), title, [self.create(kind, subjects)]);
            }
        }
        for (kind, role) in [
            ("ClusterRoleBinding", "loopfs-builtin-objects"),
            ("RoleBinding", "loopfs-builtin-objects"),
            ("RoleBinding", "loopfs-controller"),
        ] {
            let request = self.create(kind, json!({"roleRef": {"name": role}}));
            let title = format!("give the provisioner the role {role}");
            attempts.expect(refused("may bind only the roles of the provisioner"), title, [request]);
        }
    }

    /// Adds requests that grant rights which the account does not have.
    fn escalate(&self, attempts: &mut Attempts) {
        let secrets = json!({"rules": [{"apiGroups": [""], "resources": ["secrets"], "verbs": ["get"]}]});
        let all = json!({"aggregationRule": {"clusterRoleSelectors": [{}]}});
        let administrator = json!({"roleRef": {"kind": "ClusterRole", "name": "cluster-admin"}});
        for (title, kind, change) in [
            ("create a role that reads secrets", "ClusterRole", &secrets),
            ("create a role that reads secrets", "Role", &secrets),
            ("create a role that takes all others in", "ClusterRole", &all),
            ("become an administrator", "ClusterRoleBinding", &administrator),
            ("become an administrator of its namespace", "RoleBinding", &administrator),
        ] {
            attempts.expect(Verdict::Escalation, title, [self.create(kind, change.clone())]);
        }
    }
}

//! Requests for the kinds of objects to which the component builtin-objects gives access.

use serde_json::{Value, json};

use super::super::*;
use super::attacker::Account;
use super::attempt::{Attempts, ExpectedVerdict, changed};
use super::request::TargetResource;
use super::scene::{DRIVER, OTHER_DRIVER, Scene, config_maps, dynamic};

const POLICY: &str = "loopfs-provisioner-builtin-objects";
const RBAC: &str = "rbac.authorization.k8s.io";
/// A driver that is not installed.
const FOREIGN_DRIVER: &str = "csi.foreign.example";

fn labels() -> Value {
    json!({"app.kubernetes.io/managed-by": "loopfs-provisioner", "app.kubernetes.io/instance": DRIVER})
}

/// Returns the subject of a binding to an account of the driver.
fn subject(account: Account) -> Value {
    json!({"kind": "ServiceAccount", "name": account.name(), "namespace": SYSTEM})
}

/// A kind of object and the fields of one.
struct BuiltInKind {
    resource: TargetResource,
    fields: Value,
}

fn kinds() -> Vec<BuiltInKind> {
    let cluster = |group, kind, plural, fields| BuiltInKind {
        resource: TargetResource::new(group, kind, plural),
        fields,
    };
    let system = |kind, plural, fields| BuiltInKind {
        resource: TargetResource::new(RBAC, kind, plural).within(SYSTEM),
        fields,
    };
    let rules = json!({"rules": [{"apiGroups": ["storage.k8s.io"], "resources": ["csistoragecapacities"], "verbs": ["list"]}]});
    let everywhere = json!({"rules": [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["get"]}]});
    // The role has the name of the account.
    let provisioner = Account::Provisioner.name();
    let binding = |kind: &str| json!({"roleRef": {"apiGroup": RBAC, "kind": kind, "name": provisioner}, "subjects": [subject(Account::Provisioner)]});
    vec![
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
    objects: Vec<(BuiltInKind, Value, Value)>,
    prefix: String,
}

impl BuiltIn {
    pub(super) async fn set(cluster: &TestCluster) -> Self {
        let prefix = format!("loopfs-{}", cluster.namespace);
        let mut objects = Vec::new();
        for kind in kinds() {
            let (mut own, mut foreign) = (kind.fields.clone(), kind.fields.clone());
            fixtures::merge(
                &mut own,
                json!({"metadata": {"name": format!("{prefix}-own"), "labels": labels()}}),
            );
            fixtures::merge(&mut foreign, json!({"metadata": {"name": format!("{prefix}-foreign")}}));
            if kind.resource.kind == "CSIDriver" {
                // The driver has only one CSIDriver.
                own["metadata"]["name"] = json!(DRIVER);
                foreign["metadata"]["name"] = json!(FOREIGN_DRIVER);
            }
            let mut made = Vec::new();
            for object in [own, foreign] {
                let (api, object) = dynamic(cluster, &kind.resource, object);
                let parameters = PatchParams::apply("story").force();
                let applied =
                    api.patch(&object.name_any(), &parameters, &Patch::Apply(&object)).await.unwrap();
                made.push(serde_json::to_value(applied).unwrap());
            }
            let foreign = made.pop().unwrap();
            objects.push((kind, made.pop().unwrap(), foreign));
        }
        BuiltIn { objects, prefix }
    }

    pub(super) async fn remove(self, cluster: &TestCluster) {
        for (kind, own, foreign) in self.objects {
            for object in [own, foreign] {
                let (api, object) = dynamic(cluster, &kind.resource, object);
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
        let found = self.objects.iter().find(|(known, ..)| known.resource.kind == kind).unwrap();
        (&found.0.resource, &found.1)
    }

    pub(super) fn attempts(&self, scene: &Scene, attempts: &mut Attempts) {
        let refused = |words| ExpectedVerdict::Refused(POLICY, words);
        let new = |own: &Value, change| {
            let bare = json!({"metadata": {
                "name": format!("{}-new", self.prefix), "uid": null, "resourceVersion": null, "managedFields": null,
                "creationTimestamp": null, "generation": null,
            }});
            changed(&changed(own, bare), change)
        };
        for (BuiltInKind { resource, .. }, own, foreign) in &self.objects {
            let (own_name, foreign_name) = (super::attempt::name(own), super::attempt::name(foreign));
            let what = resource.kind;
            for verb in ["get", "list", "watch"] {
                let object = (verb == "get").then_some(own_name);
                attempts.allow(&format!("read a {what}"), [resource.request(verb, object)]);
            }
            let driver = json!({"metadata": {"name": DRIVER}});
            let (created, change) = match what {
                "CSIDriver" => (ExpectedVerdict::Exists, driver),
                _ => (ExpectedVerdict::Allowed, json!({})),
            };
            attempts.expect(
                created,
                &format!("create a {what}"),
                [resource.create(new(own, change.clone()))],
            );
            let mut unlabelled = change;
            fixtures::merge_keeping_nulls(&mut unlabelled, json!({"metadata": {"labels": null}}));
            let unlabelled = resource.create(new(own, unlabelled));
            attempts.expect(
                refused("may write only objects with the labels"),
                &format!("create a {what} without labels"),
                [unlabelled],
            );
            attempts.allow(&format!("update its own {what}"), [resource.update(own.clone())]);
            let adopted = changed(foreign, json!({"metadata": {"labels": labels()}}));
            let only_labelled = refused("may change only objects that have the labels");
            attempts.expect(
                only_labelled.clone(),
                &format!("adopt another's {what}"),
                [resource.update(adopted)],
            );
            // The controller never deletes a CSIDriver.
            let (own_deleted, foreign_deleted) = match what {
                "CSIDriver" => (ExpectedVerdict::NotGranted, ExpectedVerdict::NotGranted),
                _ => (ExpectedVerdict::Allowed, only_labelled),
            };
            let delete_foreign = [resource.delete(foreign_name)];
            attempts.expect(foreign_deleted, &format!("delete another's {what}"), delete_foreign);
            attempts.expect(own_deleted, &format!("delete its own {what}"), [resource.delete(own_name)]);
        }
        let mut create = |expected, title: &str, kind: &str, change: Value| {
            let (resource, own) = self.own(kind);
            attempts.expect(expected, title, [resource.create(new(own, change))]);
        };
        let named = |name: &str| json!({"metadata": {"name": name}});
        create(
            refused("only StorageClasses of its own driver"),
            "create a class of another driver",
            "StorageClass",
            json!({"provisioner": OTHER_DRIVER}),
        );
        create(
            refused("only the CSIDriver"),
            "create another CSIDriver",
            "CSIDriver",
            named("csi.third.dev"),
        );
        create(
            refused("only PriorityClasses whose names begin with loopfs"),
            "create a PriorityClass of any name",
            "PriorityClass",
            named("urgent"),
        );
        create(
            refused("default of all pods"),
            "make all pods urgent",
            "PriorityClass",
            json!({"globalDefault": true}),
        );
        for kind in ["ClusterRole", "Role", "ClusterRoleBinding", "RoleBinding"] {
            let title = format!("create a {kind} of any name");
            create(refused("roles and bindings whose names"), &title, kind, named("prometheus"));
        }
        for (title, further) in [
            ("give the provisioner's rights to itself", subject(Account::Controller)),
            (
                "give its rights to another account",
                json!({"kind": "ServiceAccount", "name": "default", "namespace": SYSTEM}),
            ),
            (
                "give its rights to an account of the provisioner's name in another namespace",
                json!({"kind": "ServiceAccount", "name": Account::Provisioner.name(), "namespace": scene.namespace}),
            ),
            (
                "give its rights to the kubelet of its node",
                json!({"kind": "User", "apiGroup": RBAC, "name": format!("system:node:{}", scene.here)}),
            ),
            (
                "give its rights to all users",
                json!({"kind": "Group", "apiGroup": RBAC, "name": "system:authenticated"}),
            ),
        ] {
            for kind in ["ClusterRoleBinding", "RoleBinding"] {
                let subjects = json!({"subjects": [subject(Account::Provisioner), further]});
                create(refused("only to the account of the provisioner"), title, kind, subjects);
            }
        }
        for (kind, role) in [
            ("ClusterRoleBinding", "loopfs-builtin-objects"),
            ("RoleBinding", "loopfs-builtin-objects"),
            ("RoleBinding", "loopfs-controller"),
        ] {
            let title = format!("give the provisioner the role {role}");
            let bound = json!({"roleRef": {"name": role}});
            create(refused("may bind only the roles of the provisioner"), &title, kind, bound);
        }
        for (kind, group, resource, verb) in [
            ("ClusterRole", RBAC, "clusterroles", "update"),
            ("Role", RBAC, "rolebindings", "create"),
            ("Role", "coordination.k8s.io", "leases", "create"),
        ] {
            let title = format!("create a role with the right to {verb} {resource}");
            let rules = json!({"rules": [{"apiGroups": [group], "resources": [resource], "verbs": [verb]}]});
            create(refused("only roles for the API groups"), &title, kind, rules);
        }
        for kind in ["ClusterRole", "Role"] {
            let aggregated =
                json!({"metadata": {"labels": {"rbac.authorization.k8s.io/aggregate-to-view": "true"}}});
            create(
                refused("may add to roles only labels of app.kubernetes.io"),
                "have the role view take its rights in",
                kind,
                aggregated,
            );
        }
        let secrets = json!({"rules": [{"apiGroups": [""], "resources": ["secrets"], "verbs": ["get"]}]});
        create(
            ExpectedVerdict::Escalation,
            "create a role that reads secrets",
            "ClusterRole",
            secrets.clone(),
        );
        create(ExpectedVerdict::Escalation, "create a role that reads secrets", "Role", secrets);
        let all = json!({"aggregationRule": {"clusterRoleSelectors": [{}]}});
        create(ExpectedVerdict::Escalation, "create a role that takes all others in", "ClusterRole", all);
        let administrator = json!({"roleRef": {"kind": "ClusterRole", "name": "cluster-admin"}});
        create(
            ExpectedVerdict::Escalation,
            "become an administrator",
            "ClusterRoleBinding",
            administrator.clone(),
        );
        create(
            ExpectedVerdict::Escalation,
            "become an administrator of its namespace",
            "RoleBinding",
            administrator,
        );
        let owner = scene.other_node();
        for change in [json!({"finalizers": ["example.com/keep"]}), json!({"ownerReferences": [owner]})] {
            let change = json!({"metadata": change});
            create(
                refused("may not change finalizers and owners"),
                "keep a Node from being deleted",
                "StorageClass",
                change,
            );
        }
        let (resource, own) = self.own("ClusterRoleBinding");
        attempts.allow("bind a role of the provisioner", [resource.create(new(own, json!({})))]);
        attempts.also(1, "bind", "clusterroles");
        attempts.refuse_unbound(POLICY, "bind a role", resource.create(new(own, json!({}))));
        let (resource, own) = self.own("RoleBinding");
        attempts.allow("bind a role of the provisioner", [resource.create(new(own, json!({})))]);
        attempts.also(1, "bind", "roles");
        let map = config_maps();
        attempts.expect(
            ExpectedVerdict::Absent,
            "read the declaration",
            [map.request("get", Some("loopfs-objects"))],
        );
        attempts.allow(
            "read the declaration",
            ["list", "watch"].map(|verb| map.request(verb, Some("loopfs-objects"))),
        );
        attempts.expect(
            ExpectedVerdict::NotGranted,
            "read another ConfigMap",
            [map.request("get", Some("kube-root-ca.crt"))],
        );
    }
}

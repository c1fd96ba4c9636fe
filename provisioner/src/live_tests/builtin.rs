//! Tests of built-in objects, with the rights of `csi/deploy/builtin-objects`.

use futures::StreamExt;
use k8s_openapi::api::core::v1::ConfigMap;
use k8s_openapi::api::rbac::v1::{ClusterRole, ClusterRoleBinding};
use k8s_openapi::api::scheduling::v1::PriorityClass;
use k8s_openapi::api::storage::v1::CSIDriver;
use kube::api::{WatchEvent, WatchParams};

use super::{controllers, *};
use crate::controller::builtin;
use crate::controller::process::Duties;

/// The ConfigMap that the role of the manifests lets the controller read.
const CONFIG_MAP: &str = "loopfs-objects";
const ROLE: &str = "loopfs-provisioner";

pub(super) const OPT_IN: [&str; 2] = [
    include_str!("../../../csi/deploy/builtin-objects/rbac.yaml"),
    include_str!("../../../csi/deploy/builtin-objects/admission.yaml"),
];

fn ours() -> Value {
    json!({"metadata": {"labels": {
        "app.kubernetes.io/managed-by": "loopfs-provisioner", "app.kubernetes.io/instance": "csi.loopfs.dev",
    }}})
}

fn class(name: &str, option: &str) -> String {
    format!(
        "{{apiVersion: storage.k8s.io/v1, kind: StorageClass, metadata: {{name: {name}}}, provisioner: csi.loopfs.dev, \
         mountOptions: [{option}], parameters: {{bytesPerInode: '4096'}}}}"
    )
}

impl TestCluster {
    fn config_maps(&self) -> Api<ConfigMap> {
        Api::namespaced(self.admin.clone(), SYSTEM)
    }

    async fn declare(&self, files: Value) {
        let object = json!({
            "apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": CONFIG_MAP}, "data": files,
        });
        let parameters = PatchParams::apply("story").force();
        self.config_maps().patch(CONFIG_MAP, &parameters, &Patch::Apply(object)).await.unwrap();
    }

    async fn controller_with_builtin_objects(&self, holder: &str, repair_delay: Duration) -> Provisioner {
        let source = builtin::DeclarationSource {
            namespace: SYSTEM.to_owned(),
            config_map: CONFIG_MAP.to_owned(),
            repair_delay,
        };
        let duties = Duties { builtin: Some(source), ..controllers::ONLY_PLACEMENT };
        self.controller_named(holder, duties).await
    }

    fn all<K: KubernetesObject<Scope = k8s_openapi::ClusterResourceScope>>(&self) -> Api<K> {
        Api::all(self.admin.clone())
    }

    async fn event_on_declaration(&self, reason: &str, word: &str) -> String {
        self.event_in(SYSTEM, CONFIG_MAP, reason, word).await
    }

    async fn undeclare_all(&self) {
        self.config_maps().delete(CONFIG_MAP, &DeleteParams::default()).await.unwrap();
    }
}

fn options_of(class: &StorageClass) -> Vec<String> {
    class.mount_options.clone().unwrap_or_default()
}

#[tokio::test]
async fn builtin_objects_are_kept_as_declared() {
    let cluster = TestCluster::connect_with(&OPT_IN).await;
    let (name, priority) = (format!("{}-kept", cluster.class), format!("loopfs-{}", cluster.class));
    let priorities = format!(
        "{{apiVersion: scheduling.k8s.io/v1, kind: PriorityClass, metadata: {{name: {priority}}}, value: 1000}}"
    );
    let all = json!({
        "csidriver.yaml": include_str!("../../../csi/deploy/csidriver.yaml"),
        "class.yaml": class(&name, "nodev"), "priority.yaml": priorities,
    });
    cluster.declare(all).await;
    let controller = cluster.controller_with_builtin_objects("only", Duration::ZERO).await;
    let classes: Api<StorageClass> = cluster.all();
    let created = until(&classes, &name, |_| true).await;
    assert_eq!(created.labels()["app.kubernetes.io/managed-by"], "loopfs-provisioner");
    until(&cluster.all::<PriorityClass>(), &priority, |class| class.value == Some(1000)).await;

    // An administrator applied the manifests without the labels.
    let drivers: Api<CSIDriver> = cluster.all();
    let driver = fixtures::identity().driver().to_owned();
    cluster.change(&drivers, &driver, json!({"spec": {"storageCapacity": false}})).await;
    cluster.event_on_declaration("ObjectRefused", "add the labels").await;
    assert_eq!(drivers.get(&driver).await.unwrap().spec.storage_capacity, Some(false));
    // With the labels, the object is repaired immediately.
    cluster.change(&drivers, &driver, ours()).await;
    let kept = until(&drivers, &driver, |driver| driver.spec.storage_capacity == Some(true)).await;

    // An object is changed, one is deleted, and one is created again with other immutable fields.
    cluster
        .change(&classes, &name, json!({"mountOptions": ["noexec"], "metadata": {"labels": {"team": "x"}}}))
        .await;
    let repaired = until(&classes, &name, |class| options_of(class) == ["nodev"]).await;
    assert_eq!(repaired.labels()["team"], "x", "labels of other writers stay");
    classes.delete(&name, &DeleteParams::default()).await.unwrap();
    let created = until(&classes, &name, |_| true).await;
    assert!(created.uid() != repaired.uid());
    let mut another = serde_json::to_value(&created).unwrap();
    another["metadata"] = json!({"name": name, "labels": ours()["metadata"]["labels"]});
    another["parameters"] = json!({"bytesPerInode": "512"});
    classes.delete(&name, &DeleteParams::default()).await.unwrap();
    // The controller may be faster than this test.
    if classes.create(&PostParams::default(), &serde_json::from_value(another).unwrap()).await.is_ok() {
        let ratio = |class: &StorageClass| class.parameters.as_ref()?.get("bytesPerInode").cloned();
        until(&classes, &name, |class| ratio(class).as_deref() == Some("4096")).await;
        let note = "parameters differed, and the API server does not allow to change that";
        cluster.event_on_declaration("ObjectRepaired", note).await;
    }

    // A CSIDriver is never deleted: neither for an immutable field, nor if it is not declared any more.
    let attached = include_str!("../../../csi/deploy/csidriver.yaml")
        .replace("attachRequired: false", "attachRequired: true");
    cluster.declare(json!({"csidriver.yaml": attached, "class.yaml": class(&name, "nodev"), "priority.yaml": priorities})).await;
    cluster.event_on_declaration("ObjectFailed", "has other values of attachRequired than declared").await;
    cluster.declare(json!({"class.yaml": class(&name, "nodev")})).await;
    until_deleted(&cluster.all::<PriorityClass>(), &priority).await;
    assert_eq!(drivers.get(&driver).await.unwrap().uid(), kept.uid());
    // The API server does not drop a field that it does not know.
    let misspelt = class(&name, "nodev").replace("parameters:", "volumeBindingmode: Immediate, parameters:");
    cluster.declare(json!({"class.yaml": misspelt})).await;
    cluster.event_on_declaration("ObjectFailed", "unknown field \"volumeBindingmode\"").await;
    // An object that the API server would refuse does not replace the existing one.
    let refused = class(&name, "nodev").replace("'4096'}", "'4096'}, reclaimPolicy: Forget");
    cluster.declare(json!({"class.yaml": refused})).await;
    cluster.event_on_declaration("ObjectFailed", "in place of the existing one, which stays").await;
    let kept = classes.get(&name).await.unwrap();
    // Neither an empty nor an invalid nor a missing declaration removes objects.
    cluster.declare(json!({"class.yaml": ""})).await;
    cluster.event_on_declaration("DeclarationInvalid", "declares no object").await;
    cluster.declare(json!({"class.yaml": "{kind: Nonsense}"})).await;
    cluster.event_on_declaration("DeclarationInvalid", "Nonsense").await;
    cluster.undeclare_all().await;
    let (_, node) = controllers::kubeconfig();
    cluster.event_in("default", &node, "DeclarationInvalid", CONFIG_MAP).await;
    controller.stop().await;
    assert_eq!(classes.get(&name).await.unwrap().uid(), kept.uid());

    // The manifests have no labels here.
    cluster.change(&drivers, &driver, json!({"metadata": {"labels": null}})).await;
    cluster.finish([]).await;
}

/// A controller can restore only the role rules that it has itself.
#[tokio::test]
async fn controller_restores_only_its_rules() {
    let cluster = TestCluster::connect_with(&OPT_IN).await;
    let (roles, bindings): (Api<ClusterRole>, Api<ClusterRoleBinding>) = (cluster.all(), cluster.all());
    let before = roles.get(ROLE).await.unwrap();
    let binding = bindings.get(ROLE).await.unwrap();
    cluster.change(&roles, ROLE, ours()).await;
    cluster.change(&bindings, ROLE, ours()).await;
    let strip = |mut object: Value| {
        object["metadata"] = json!({"name": ROLE});
        object
    };
    let role = strip(serde_json::to_value(&before).unwrap());
    let bound = strip(serde_json::to_value(&binding).unwrap());
    cluster.declare(json!({"roles.yaml": format!("{role}\n---\n{bound}\n")})).await;
    let controller = cluster.controller_with_builtin_objects("only", Duration::ZERO).await;

    let rules = before.rules.clone().unwrap();
    let mut more = serde_json::to_value(&rules).unwrap();
    more.as_array_mut().unwrap().push(json!({"apiGroups": [""], "resources": ["secrets"], "verbs": ["get"]}));
    cluster.change(&roles, ROLE, json!({"rules": more})).await;
    until(&roles, ROLE, |role| role.rules.as_ref() == Some(&rules)).await;

    bindings.delete(ROLE, &DeleteParams::default()).await.unwrap();
    let kept = until(&bindings, ROLE, |_| true).await;
    // The role of a binding is immutable. A field that the API server does not know does not make it delete the binding.
    let mut extra = bound.clone();
    extra["roleRef"]["extra"] = json!("x");
    cluster.declare(json!({"roles.yaml": format!("{role}\n---\n{extra}\n")})).await;
    cluster.event_on_declaration("ObjectFailed", "unknown field \"roleRef.extra\"").await;
    assert_eq!(bindings.get(ROLE).await.unwrap().uid(), kept.uid());
    cluster.declare(json!({"roles.yaml": format!("{role}\n---\n{bound}\n")})).await;

    // The controller has these rules only by this role. If it was faster than the API server, which learns of a changed role by a watch as
    // the controller does, the role has the rules again.
    let refused = cluster
        .event_on_declaration("ObjectFailed", "attempting to grant RBAC permissions not currently held");
    let remove = async {
        loop {
            cluster.change(&roles, ROLE, json!({"rules": []})).await;
            until(&roles, ROLE, |role| role.rules.as_ref() == Some(&rules)).await;
        }
    };
    let text = tokio::select! {
        text = refused => text,
        never = remove => never,
    };
    assert!(text.contains("ClusterRole loopfs-provisioner"), "{text}");
    // An administrator restores the rules of the role.
    cluster.change(&roles, ROLE, json!({"rules": rules})).await;
    controller.stop().await;
    cluster.undeclare_all().await;
    let none = json!({"metadata": {"labels": null}});
    cluster.change(&roles, ROLE, none.clone()).await;
    cluster.change(&bindings, ROLE, none).await;
    cluster.finish([]).await;
}

/// An upgrade changes a role before the ConfigMap that declares it. The controller could not restore the new rule.
#[tokio::test]
async fn upgrade_in_progress_is_not_undone() {
    let cluster = TestCluster::connect_with(&OPT_IN).await;
    let roles: Api<ClusterRole> = cluster.all();
    let before = roles.get(ROLE).await.unwrap();
    cluster.change(&roles, ROLE, ours()).await;
    let role = |rules: &Value| {
        let role = json!({
            "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": {"name": ROLE}, "rules": rules,
        });
        role.to_string()
    };
    let rules = json!(before.rules);
    cluster.declare(json!({"role.yaml": role(&rules)})).await;
    let controller = cluster.controller_with_builtin_objects("only", TIMEOUT * 10).await;
    controller.until_it_leads().await;

    let mut more = rules.clone();
    more.as_array_mut().unwrap().push(json!({"apiGroups": [""], "resources": ["secrets"], "verbs": ["get"]}));
    cluster.change(&roles, ROLE, json!({"rules": more})).await;
    let classes: Api<StorageClass> = cluster.all();
    // The controller creates each class after it has received the change of the role.
    for number in 0..3 {
        let name = format!("{}-turn{number}", cluster.class);
        cluster.declare(json!({"role.yaml": role(&rules), "class.yaml": class(&name, "nodev")})).await;
        until(&classes, &name, |_| true).await;
    }
    cluster.declare(json!({"role.yaml": role(&more)})).await;
    // The class is not declared any more, and that change of the declaration is made immediately.
    until_deleted(&classes, &format!("{}-turn2", cluster.class)).await;
    assert_eq!(json!(roles.get(ROLE).await.unwrap().rules), more);
    controller.stop().await;
    cluster.undeclare_all().await;
    cluster.change(&roles, ROLE, json!({"rules": rules, "metadata": {"labels": null}})).await;
    cluster.finish([]).await;
}

/// One write repairs each difference, and a replica that has not received a new declaration does not undo it.
#[tokio::test]
async fn two_replicas_repair_with_one_write() {
    let cluster = TestCluster::connect_with(&OPT_IN).await;
    let name = format!("{}-kept", cluster.class);
    let classes: Api<StorageClass> = cluster.all();
    let start = classes.list(&ListParams::default()).await.unwrap().metadata.resource_version.unwrap();
    cluster.declare(json!({"class.yaml": class(&name, "o0")})).await;
    let mut leading = cluster.controller_with_builtin_objects("o0", Duration::ZERO).await;
    until(&classes, &name, |_| true).await;
    let mut expected = vec!["o0".to_owned()];
    for turn in 0..3 {
        cluster.change(&classes, &name, json!({"mountOptions": [format!("drift{turn}")]})).await;
        until(&classes, &name, |class| options_of(class) == [format!("o{turn}")]).await;
        let next = format!("o{}", turn + 1);
        // Another replica takes over.
        let following = cluster.controller_with_builtin_objects(&next, Duration::ZERO).await;
        leading.stop().await;
        leading = following;
        cluster.declare(json!({"class.yaml": class(&name, &next)})).await;
        until(&classes, &name, |class| options_of(class) == [next.clone()]).await;
        expected.extend([format!("drift{turn}"), format!("o{turn}"), next]);
    }
    leading.stop().await;
    classes.delete(&name, &DeleteParams::default()).await.unwrap();
    let only = WatchParams::default().fields(&format!("metadata.name={name}"));
    let mut watched = classes.watch(&only, &start).await.unwrap().boxed();
    let mut written = Vec::new();
    loop {
        match watched.next().await.unwrap().unwrap() {
            WatchEvent::Added(class) | WatchEvent::Modified(class) => written.extend(options_of(&class)),
            WatchEvent::Deleted(_) => break,
            _ => {}
        }
    }
    assert_eq!(written, expected);
    cluster.undeclare_all().await;
    cluster.finish([]).await;
}

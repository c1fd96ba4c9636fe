//! Requests that read, and requests with each verb that no role grants.

use serde_json::json;

use super::attacker::Attacker;
use super::attempt::{Attempts, name};
use super::claim_labels::NAME as CLAIM_LABELS;
use super::request::{AttackRequest, TargetResource, Verdict};
use super::scene::{
    LEASE, Scene, capacities, claims, config_maps, contents, events, leases, mutating_policies,
    policy_bindings, snapshot_classes, snapshots, volumes,
};

const VERBS: [&str; 8] = ["get", "list", "watch", "create", "update", "patch", "delete", "deletecollection"];
/// The verbs that concern all objects of a resource.
const OF_ALL: [&str; 3] = ["list", "watch", "deletecollection"];

pub(super) fn read(scene: &Scene, attacker: &Attacker, attempts: &mut Attempts) {
    let everywhere = |resource: TargetResource| TargetResource { namespace: None, ..resource };
    let nodes = TargetResource::new("", "Node", "nodes");
    let mut watched = vec![
        everywhere(claims(scene)),
        TargetResource::new("storage.k8s.io", "StorageClass", "storageclasses"),
    ];
    let one_claim = ["bound-own", "bound-theirs", "bound-other"];
    attempts.allow("read one", one_claim.map(|claim| claims(scene).request("get", Some(claim))));
    attempts.allow("read one", [nodes.request("get", Some(scene.here))]);
    if attacker.is_controller() {
        watched.push(TargetResource::new("storage.k8s.io", "CSINode", "csinodes"));
        attempts.allow("read all", [nodes.request("list", None), volumes().request("list", None)]);
    }
    let volume = |claim| volumes().request("get", Some(name(scene.volume(claim))));
    attempts.allow("read one", one_claim.map(volume));
    if attacker.provisions() {
        watched.extend([volumes(), capacities()]);
        // Without the component snapshots, this cluster does not serve the kinds.
        let snapshots = [snapshots(scene).request("get", Some("s")), contents().request("get", Some("s"))];
        attempts.expect(Verdict::Absent, "read a snapshot", snapshots);
    }
    for verb in ["list", "watch"] {
        attempts.allow("read all", watched.iter().map(|resource| resource.request(verb, None)));
    }
}

/// Returns one request for each verb on a resource. Subresources are those of one object, so there is no request for all of them.
fn all_verbs<'a>(resource: &'a TargetResource, object: &'a str) -> impl Iterator<Item = AttackRequest> + 'a {
    let body = json!({"metadata": {"name": object}});
    let is_subresource = resource.plural.contains('/');
    let verbs = VERBS.into_iter().filter(move |verb| !is_subresource || !OF_ALL.contains(verb));
    verbs.map(move |verb| match verb {
        // A subresource is created under the name of its object.
        "create" => resource.create(body.clone()).named(is_subresource.then_some(object)),
        "update" => resource.update(body.clone()),
        "patch" => resource.patch(object, super::request::BodyFormat::Merge, body.clone()),
        verb if OF_ALL.contains(&verb) => resource.request(verb, None),
        _ => resource.request(verb, Some(object)),
    })
}

pub(super) fn not_granted(scene: &Scene, attacker: &Attacker, attempts: &mut Attempts) {
    let granted = &attacker.rights;
    let (volume, claim) = (name(scene.volume("bound-own")), "bound-own");
    let class = scene.class.as_str();
    let cluster = |group, kind, plural| TargetResource::new(group, kind, plural);
    let within = |group, kind, plural| TargetResource::new(group, kind, plural).within(&scene.namespace);
    let system = |group, kind, plural| TargetResource::new(group, kind, plural).within(super::super::SYSTEM);
    let rbac = "rbac.authorization.k8s.io";
    let admission = "admissionregistration.k8s.io";
    let resources = [
        // Resources on which the account has some verbs.
        (volumes(), volume),
        (claims(scene), claim),
        (claims(scene).subresource("status"), claim),
        (capacities(), name(&scene.capacities["own"])),
        (events(scene), name(&scene.events["own"])),
        (leases(), LEASE),
        (leases(), "l"),
        (cluster("storage.k8s.io", "StorageClass", "storageclasses"), class),
        (cluster("storage.k8s.io", "CSINode", "csinodes"), scene.here),
        (cluster("", "Node", "nodes"), scene.here),
        (snapshots(scene), "s"),
        (contents(), "s"),
        (snapshot_classes(), "s"),
        (config_maps(), CLAIM_LABELS),
        (mutating_policies(), CLAIM_LABELS),
        (policy_bindings(), CLAIM_LABELS),
        // The same resources under other names.
        (config_maps(), "loopfs-objects"),
        (config_maps(), "kube-root-ca.crt"),
        (mutating_policies(), "p"),
        (policy_bindings(), "b"),
        // Subresources of these resources.
        (volumes().subresource("status"), volume),
        (volumes().subresource("finalizers"), volume),
        (claims(scene).subresource("finalizers"), claim),
        (claims(scene).subresource("scale"), claim),
        (cluster("", "Node", "nodes/status"), scene.here),
        (cluster("", "Node", "nodes/proxy"), scene.here),
        (snapshots(scene).subresource("status"), "s"),
        (contents().subresource("status"), "s"),
        // The same resources in other namespaces or API groups.
        (capacities().within(&scene.namespace), "c"),
        (leases().within(&scene.namespace), LEASE),
        (leases().within("kube-node-lease"), scene.here),
        (within("", "Event", "events"), name(&scene.events["own"])),
        // Resources on which the account has no verbs.
        (system("", "Secret", "secrets"), "s"),
        (within("", "Secret", "secrets"), "s"),
        (within("", "ConfigMap", "configmaps"), "loopfs-objects"),
        (within("", "ConfigMap", "configmaps"), CLAIM_LABELS),
        (system("", "ServiceAccount", "serviceaccounts"), "loopfs-provisioner"),
        (system("", "TokenRequest", "serviceaccounts/token"), "loopfs-provisioner"),
        (system("", "TokenRequest", "serviceaccounts/token"), "loopfs-controller"),
        (system("", "Pod", "pods"), &attacker.pod.name),
        (system("", "PodExecOptions", "pods/exec"), &attacker.pod.name),
        (system("", "Eviction", "pods/eviction"), &attacker.pod.name),
        (cluster("", "Namespace", "namespaces"), &scene.namespace),
        (system("apps", "DaemonSet", "daemonsets"), "loopfs"),
        (system("apps", "Deployment", "deployments"), "loopfs-controller"),
        (cluster("storage.k8s.io", "CSIDriver", "csidrivers"), "csi.loopfs.dev"),
        (cluster("storage.k8s.io", "VolumeAttachment", "volumeattachments"), "v"),
        (cluster("storage.k8s.io", "VolumeAttributesClass", "volumeattributesclasses"), "v"),
        (cluster("scheduling.k8s.io", "PriorityClass", "priorityclasses"), "p"),
        (cluster(rbac, "ClusterRole", "clusterroles"), "loopfs-provisioner"),
        (cluster(rbac, "ClusterRoleBinding", "clusterrolebindings"), "loopfs-provisioner"),
        (system(rbac, "Role", "roles"), "loopfs-provisioner"),
        (system(rbac, "RoleBinding", "rolebindings"), "loopfs-provisioner"),
        (within(rbac, "Role", "roles"), "r"),
        (within(rbac, "RoleBinding", "rolebindings"), "r"),
        (
            cluster(admission, "ValidatingAdmissionPolicy", "validatingadmissionpolicies"),
            "loopfs-provisioner-volumes",
        ),
        (
            cluster(admission, "ValidatingAdmissionPolicyBinding", "validatingadmissionpolicybindings"),
            "loopfs-provisioner-volumes",
        ),
        (cluster(admission, "MutatingWebhookConfiguration", "mutatingwebhookconfigurations"), "w"),
        (cluster("apiextensions.k8s.io", "CustomResourceDefinition", "customresourcedefinitions"), "c"),
        (cluster("csi.loopfs.dev", "LostNode", "lostnodes"), "l"),
        (cluster("csi.loopfs.dev", "ClaimLabel", "claimlabels"), "l"),
    ];
    for (resource, object) in &resources {
        let requests = all_verbs(resource, object);
        let not_granted = requests.filter(|request| !granted.iter().any(|right| right.is_used_by(request)));
        attempts.expect(Verdict::NotGranted, "use what no role grants", not_granted);
    }
    let unlisted = granted.iter().find(|right| {
        !resources.iter().any(|(resource, _)| {
            (resource.group, resource.plural.as_str()) == (&right.group, &right.resource)
        })
    });
    assert!(
        unlisted.is_none(),
        "no request for other verbs on the resource of the right to {}",
        unlisted.unwrap()
    );
}

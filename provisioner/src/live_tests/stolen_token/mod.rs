//! Tests of every request that an attacker may send with the stolen token of a node, and of the API server's verdict on each.
//!
//! The provisioner's account is the same on all nodes. Roles say which verbs it has, and the policies of `csi/deploy` narrow them to the
//! objects of the node that is in the token. These tests hold such a token. They read the roles and the policies from the cluster: a
//! right that no request uses fails the test, and so does a rule that refuses none of the requests. A request that a rule refuses is
//! refused by no other rule, so a test fails if that rule is removed.
//!
//! Writes are dry runs, which pass authorization, validation and admission. So no request changes what the next one finds.

mod attempt;
mod builtin;
mod claims;
mod reports;
mod request;
mod rights;
mod scene;
mod snapshots;
mod surroundings;
mod volumes;

use std::{fmt::Write as _, io::Write as _};

use k8s_openapi::api::{
    admissionregistration::v1::ValidatingAdmissionPolicy, authorization::v1::SubjectAccessReview,
};

use self::{
    attempt::{Attempt, Attempts, Token, changed, name},
    builtin::BuiltIn,
    request::Verdict,
    rights::{Right, granted, policies, rules, warnings},
    scene::{DRIVER, Scene},
    snapshots::Contents,
};
use std::collections::BTreeSet;

use super::*;

const NODE_LOSS: [&str; 2] = [
    include_str!("../../../../csi/deploy/node-loss/rbac.yaml"),
    include_str!("../../../../csi/deploy/node-loss/admission.yaml"),
];
const BUILTIN_OBJECTS: [&str; 2] = [
    include_str!("../../../../csi/deploy/builtin-objects/rbac.yaml"),
    include_str!("../../../../csi/deploy/builtin-objects/admission.yaml"),
];
const SNAPSHOTS: [&str; 2] = [
    include_str!("../../../../csi/deploy/snapshots/rbac.yaml"),
    include_str!("../../../../csi/deploy/snapshots/admission.yaml"),
];

/// The components of the manifests that are applied beside the rest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Component {
    None,
    NodeLoss,
    BuiltinObjects,
    Snapshots,
}

impl Cluster {
    /// Applies one component, and removes the others.
    async fn opt_in_only(&self, component: Component) {
        for (other, files) in [
            (Component::NodeLoss, NODE_LOSS),
            (Component::BuiltinObjects, BUILTIN_OBJECTS),
            (Component::Snapshots, SNAPSHOTS),
        ] {
            if other == component {
                self.opt_in(&files).await;
                continue;
            }
            for (api, object) in self.objects_of(&files) {
                if api.get_opt(&object.name_any()).await.unwrap().is_some() {
                    api.delete(&object.name_any(), &DeleteParams::default()).await.unwrap();
                }
            }
        }
    }
}

/// Sends each request until it has the expected verdict, because the API server needs a moment to observe new roles and policies.
/// After [`TIMEOUT`], it sends each of the rest once.
async fn verdicts(scene: &Scene, attempts: Vec<Attempt>) -> Vec<(Attempt, Verdict)> {
    let deadline = tokio::time::Instant::now() + TIMEOUT;
    let mut verdicts = Vec::new();
    for attempt in attempts {
        let client = match attempt.token {
            Token::OfNode => &scene.stolen,
            Token::Unbound => &scene.unbound,
        };
        let verdict = loop {
            let verdict = attempt.request.send(client).await;
            if attempt.expected.matches(&verdict) || tokio::time::Instant::now() > deadline {
                break verdict;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        };
        verdicts.push((attempt, verdict));
    }
    verdicts
}

/// Returns `true` if an attempt uses a right.
fn uses(right: &Right, attempt: &Attempt) -> bool {
    let also = attempt
        .additional_right
        .is_some_and(|(verb, resource)| (verb, resource) == (&right.verb, &right.resource));
    also || right.is_used_by(&attempt.request)
}

/// Returns a line for each unexpected verdict, and for each right and each rule that the requests do not cover.
fn faults(
    verdicts: &[(Attempt, Verdict)],
    rights: &BTreeSet<Right>,
    policies: &[ValidatingAdmissionPolicy],
) -> String {
    let mut faults = String::new();
    for (attempt, verdict) in verdicts {
        if !attempt.expected.matches(verdict) {
            let Attempt { title, request, expected, .. } = attempt;
            writeln!(faults, "{request}: {title}: {verdict}; expected: {expected:?}").unwrap();
        }
    }
    for right in rights {
        let of_right =
            || verdicts.iter().filter(|(attempt, _)| uses(right, attempt)).map(|(_, verdict)| verdict);
        if !of_right().any(Verdict::allows) {
            writeln!(faults, "no request that is allowed needs the right to {right}").unwrap();
        }
        let is_narrowed = of_right().any(|verdict| matches!(verdict, Verdict::Refused { .. }));
        if !right.reads() && right.verb != "bind" && right.verb != "settle" && !is_narrowed {
            writeln!(faults, "no policy refuses a request that needs the right to {right}").unwrap();
        }
    }
    for warning in policies.iter().flat_map(warnings) {
        writeln!(faults, "{warning}").unwrap();
    }
    let rules: Vec<_> = policies.iter().flat_map(rules).collect();
    for (index, rule) in rules.iter().enumerate() {
        if rules[..index].contains(rule) {
            writeln!(faults, "two rules have one message: {rule}").unwrap();
        }
        if !verdicts.iter().any(|(_, verdict)| verdict == rule) {
            writeln!(faults, "no request is {rule}").unwrap();
        }
    }
    faults
}

/// Writes the verdicts past the capture of the test harness, for the lane's log.
fn print(component: Component, verdicts: &[(Attempt, Verdict)]) {
    let mut text = String::from("\n");
    for (Attempt { title, request, token, .. }, verdict) in verdicts {
        let token = if *token == Token::Unbound { " with a token of no node" } else { "" };
        writeln!(text, "{request}{token}: {title}: {verdict}").unwrap();
    }
    let count =
        |predicate: fn(&Verdict) -> bool| verdicts.iter().filter(|(_, verdict)| predicate(verdict)).count();
    let allowed = count(Verdict::allows);
    writeln!(
        text,
        "stolen token, component {component:?}: {} requests tried, {} denied ({} by policies, {} by RBAC, {} as invalid), {allowed} allowed",
        verdicts.len(),
        verdicts.len() - allowed,
        count(|verdict| matches!(verdict, Verdict::Refused { .. })),
        count(|verdict| matches!(verdict, Verdict::NotGranted | Verdict::Escalation)),
        count(|verdict| matches!(verdict, Verdict::Invalid(_))),
    )
    .unwrap();
    std::io::stdout().write_all(text.as_bytes()).unwrap();
}

async fn suite(component: Component) {
    let cluster = Cluster::connect().await;
    cluster.opt_in_only(component).await;
    let scene = Scene::set(&cluster).await;
    let builtin = match component {
        Component::BuiltinObjects => Some(BuiltIn::set(&cluster).await),
        _ => None,
    };
    let contents = match component {
        Component::Snapshots => Some(Contents::set(&cluster).await),
        _ => None,
    };
    let (rights, policies) = (granted(&cluster.admin).await, policies(&cluster.admin).await);
    let mut attempts = Attempts::default();
    let enforced = component == Component::NodeLoss;
    surroundings::read(&scene, &mut attempts);
    volumes::create(&scene, &mut attempts);
    volumes::change(&scene, &mut attempts);
    volumes::of_deleted_nodes(&scene, enforced, &mut attempts);
    claims::reschedule(&scene, &mut attempts);
    claims::status(&scene, &mut attempts);
    claims::delete(&scene, enforced, &mut attempts);
    reports::capacity(&scene, &mut attempts);
    reports::event(&scene, &mut attempts);
    if let Some(builtin) = &builtin {
        builtin.attempts(&scene, &mut attempts);
    }
    if let Some(contents) = &contents {
        contents.attempts(&mut attempts);
    }
    surroundings::not_granted(&scene, &rights, &mut attempts);

    let verdicts = verdicts(&scene, attempts.0).await;
    print(component, &verdicts);
    if let Some(builtin) = builtin {
        builtin.remove(&cluster).await;
    }
    if let Some(contents) = contents {
        contents.remove(&cluster).await;
    }
    scene.remove(&cluster).await;
    cluster.opt_in_only(Component::None).await;
    cluster.finish([]).await;
    let faults = faults(&verdicts, &rights, &policies);
    assert!(faults.is_empty(), "\n{faults}");
}

#[tokio::test]
async fn a_stolen_token_writes_only_objects_of_its_own_node() {
    suite(Component::None).await;
}

#[tokio::test]
async fn a_stolen_token_of_the_node_loss_component_deletes_only_lost_volumes() {
    suite(Component::NodeLoss).await;
}

#[tokio::test]
async fn a_stolen_token_of_the_builtin_objects_component_writes_only_its_objects_and_grants_no_rights() {
    suite(Component::BuiltinObjects).await;
}

#[tokio::test]
async fn a_stolen_token_of_the_snapshots_component_writes_only_snapshots_of_its_own_node() {
    suite(Component::Snapshots).await;
}

/// The API server lets a kubelet read the secrets that the volumes of its pods name.
#[tokio::test]
async fn a_stolen_token_gives_the_kubelet_access_to_no_secret() {
    let cluster = Cluster::connect().await;
    let scene = Scene::set(&cluster).await;
    let pod = json!({
        "metadata": {"name": "reader"},
        "spec": {
            "nodeName": HERE, "containers": [{"name": "c", "image": "none"}],
            "volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "waiting-own"}}],
        },
    });
    let pods: Api<Pod> = Api::namespaced(cluster.admin.clone(), &cluster.namespace);
    let pod = serde_json::from_value(pod).unwrap();
    eventually("the pod is created", || async { pods.create(&PostParams::default(), &pod).await.ok() }).await;
    let secret = json!({"name": "password", "namespace": "kube-system"});
    let volume = changed(
        &scene.new_volume("waiting-own", DRIVER, HERE),
        json!({"spec": {"csi": {"nodeStageSecretRef": secret}}}),
    );
    let stolen: Api<PersistentVolume> = Api::all(scene.stolen.clone());
    let created =
        stolen.create(&PostParams::default(), &serde_json::from_value(volume.clone()).unwrap()).await;
    let review: SubjectAccessReview = serde_json::from_value(json!({"spec": {
        "user": format!("system:node:{HERE}"), "groups": ["system:nodes", "system:authenticated"],
        "resourceAttributes": {"verb": "get", "resource": "secrets", "namespace": "kube-system", "name": "password"},
    }}))
    .unwrap();
    let reviews: Api<SubjectAccessReview> = Api::all(cluster.admin.clone());
    let may_read = async || {
        let review = reviews.create(&PostParams::default(), &review).await.unwrap();
        review.status.is_some_and(|status| status.allowed)
    };
    if created.is_ok() {
        eventually("the kubelet may read the secret", || async { may_read().await.then_some(()) }).await;
    }
    let may_read = may_read().await;
    if created.is_ok() {
        let release = Patch::Merge(json!({"metadata": {"finalizers": null}}));
        cluster.objects().patch(name(&volume), &PatchParams::default(), &release).await.unwrap();
        cluster.objects().delete(name(&volume), &DeleteParams::default()).await.unwrap();
    }
    scene.remove(&cluster).await;
    cluster.finish([]).await;
    assert!(!may_read, "the kubelet of {HERE} may read the secret kube-system/password");
    assert!(created.unwrap_err().to_string().contains("with secrets or with other fields"));
}

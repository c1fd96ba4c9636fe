//! Tests of every request that an attacker who controls a node may send with stolen tokens, and of the API server's verdict on each.
//!
//! The driver has two accounts: that of the provisioner, which runs on all nodes, and that of the controller. Roles say which verbs each
//! has, and the policies of `csi/deploy` narrow them, mostly to the objects of the node that is in the token. These tests hold a token of
//! each account, of one node. They read the roles and the policies from the cluster: a right that no request of its account uses fails
//! the test, and so does a rule that refuses none of the requests of both. A request that a rule refuses is refused by no other rule, so
//! a test fails if that rule is removed.
//!
//! Writes are dry runs, which pass authorization, validation and admission. So no request changes what the next one finds.

mod another_namespace;
mod attacker;
mod attempt;
mod builtin;
mod claim_labels;
mod claims;
mod coverage;
mod lease;
mod reports;
mod request;
mod rights;
mod scene;
mod snapshots;
mod surroundings;
mod volumes;

use std::fmt::Write as _;
use std::io::Write as _;

use rstest::rstest;

use self::attacker::{Account, Attacker};
use self::attempt::{AttackAttempt, Attempts, Token};
use self::builtin::BuiltIn;
use self::claim_labels::ClaimLabels;
use self::request::Verdict;
use self::rights::policies;
use self::scene::Scene;
use self::snapshots::Contents;
use super::*;

const SNAPSHOTS: [&str; 2] = [
    include_str!("../../../../csi/deploy/snapshots/rbac.yaml"),
    include_str!("../../../../csi/deploy/snapshots/admission.yaml"),
];
const CLAIM_LABELS: [&str; 4] = [
    include_str!("../../../../csi/deploy/claim-labels/policy.yaml"),
    include_str!("../../../../csi/deploy/claim-labels/configmap.yaml"),
    include_str!("../../../../csi/deploy/claim-labels/rbac.yaml"),
    include_str!("../../../../csi/deploy/claim-labels/admission.yaml"),
];

/// The components of the manifests that are applied beside the rest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum OptionalComponent {
    None,
    NodeLoss,
    BuiltinObjects,
    Snapshots,
    ClaimLabels,
}

impl TestCluster {
    /// Applies one component, and removes the others.
    async fn opt_in_only(&self, component: OptionalComponent) {
        for (other, files) in [
            (OptionalComponent::NodeLoss, &node_loss::OPT_IN[..]),
            (OptionalComponent::BuiltinObjects, &super::builtin::OPT_IN),
            (OptionalComponent::Snapshots, &SNAPSHOTS),
            (OptionalComponent::ClaimLabels, &CLAIM_LABELS),
        ] {
            if other == component {
                self.opt_in(files).await;
                continue;
            }
            opt_out(files, &self.admin).await;
        }
    }
}

/// Sends each request until it has the expected verdict, because the API server needs a moment to observe new roles and policies.
/// After [`TIMEOUT`], it sends each of the rest once.
async fn verdicts(attacker: &Attacker, attempts: Vec<AttackAttempt>) -> Vec<(AttackAttempt, Verdict)> {
    let deadline = tokio::time::Instant::now() + TIMEOUT;
    let mut verdicts = Vec::new();
    for attempt in attempts {
        let client = attacker.client(attempt.token);
        let verdict = loop {
            let verdict = attempt.request.send(client).await;
            if verdict.is(&attempt.expected) || tokio::time::Instant::now() > deadline {
                break verdict;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        };
        verdicts.push((attempt, verdict));
    }
    verdicts
}

/// Writes the verdicts past the capture of the test harness, for the lane's log.
fn print(component: OptionalComponent, account: Account, verdicts: &[(AttackAttempt, Verdict)]) {
    let mut text = String::from("\n");
    for (AttackAttempt { title, request, token, .. }, verdict) in verdicts {
        let token = if *token == Token::Unbound { " with a token of no node" } else { "" };
        writeln!(text, "{request}{token}: {title}: {verdict}").unwrap();
    }
    let count =
        |predicate: fn(&Verdict) -> bool| verdicts.iter().filter(|(_, verdict)| predicate(verdict)).count();
    let allowed = count(Verdict::allows);
    writeln!(
        text,
        "stolen token, {}, component {component:?}: {} requests tried, {} denied ({} by policies, {} by RBAC, {} as invalid), {allowed} allowed",
        account.name(),
        verdicts.len(),
        verdicts.len() - allowed,
        count(|verdict| matches!(verdict, Verdict::Refused { .. })),
        count(|verdict| matches!(verdict, Verdict::NotGranted | Verdict::Escalation)),
        count(|verdict| matches!(verdict, Verdict::Invalid(_))),
    )
    .unwrap();
    std::io::stdout().write_all(text.as_bytes()).unwrap();
}

/// The objects that the requests of a component need.
#[derive(Default)]
struct OfComponent {
    builtin: Option<BuiltIn>,
    contents: Option<Contents>,
    claim_labels: Option<ClaimLabels>,
}

impl OfComponent {
    async fn set(cluster: &TestCluster, component: OptionalComponent, scene: &Scene) -> Self {
        let mut objects = OfComponent::default();
        match component {
            OptionalComponent::None => {}
            OptionalComponent::BuiltinObjects => objects.builtin = Some(BuiltIn::set(cluster).await),
            OptionalComponent::Snapshots | OptionalComponent::NodeLoss => {
                objects.contents = Some(Contents::set(cluster, scene).await);
            }
            OptionalComponent::ClaimLabels => objects.claim_labels = Some(ClaimLabels::set(cluster).await),
        }
        objects
    }

    async fn remove(self, cluster: &TestCluster) {
        if let Some(builtin) = self.builtin {
            builtin.remove(cluster).await;
        }
        if let Some(contents) = self.contents {
            contents.remove(cluster).await;
        }
    }
}

fn attempts(scene: &Scene, attacker: &Attacker, of_component: &OfComponent) -> Vec<AttackAttempt> {
    let OfComponent { builtin, contents, claim_labels } = of_component;
    let mut attempts = Attempts::default();
    surroundings::read(scene, attacker, &mut attempts);
    if attacker.provisions() {
        volumes::create(scene, &mut attempts);
        claims::status(scene, &mut attempts);
        reports::capacity(scene, attacker, &mut attempts);
    }
    if attacker.provisions() || attacker.reconciles_deleted_nodes() {
        volumes::change(scene, &mut attempts);
        volumes::of_deleted_nodes(scene, attacker, &mut attempts);
    }
    match attacker.account {
        Account::Provisioner => {
            claims::reschedule(scene, &mut attempts);
            if attacker.takes_snapshots() {
                contents.iter().for_each(|contents| contents.attempts(&mut attempts));
            }
            if claim_labels.is_some() {
                claim_labels::read(&mut attempts);
            }
        }
        Account::Controller => {
            claims::select(scene, &mut attempts);
            claims::unselect(scene, &mut attempts);
            claims::label(scene, attacker, &mut attempts);
            lease::hold(scene, &mut attempts);
            builtin.iter().for_each(|builtin| builtin.attempts(scene, &mut attempts));
            if attacker.reconciles_deleted_nodes() {
                contents.iter().for_each(|contents| contents.of_deleted_nodes(&mut attempts));
            }
            claim_labels.iter().for_each(|labels| labels.record(scene, &mut attempts));
        }
    }
    claims::delete(scene, attacker, &mut attempts);
    reports::event(scene, &mut attempts);
    surroundings::not_granted(scene, attacker, &mut attempts);
    attempts.0
}

#[rstest]
#[case::without_components(OptionalComponent::None)]
#[case::node_loss(OptionalComponent::NodeLoss)]
#[case::builtin_objects(OptionalComponent::BuiltinObjects)]
#[case::snapshots(OptionalComponent::Snapshots)]
#[case::claim_labels(OptionalComponent::ClaimLabels)]
#[tokio::test]
async fn stolen_token_writes_only_permitted_objects(#[case] component: OptionalComponent) {
    let cluster = TestCluster::connect().await;
    if component == OptionalComponent::ClaimLabels && cluster.lacks_mutating_policies().await {
        return cluster.finish([]).await;
    }
    cluster.opt_in_only(component).await;
    let (controller, node) = cluster.controller_client(&ApiTraffic::default()).await;
    let provisioner = cluster.client_of(&node, &ApiTraffic::default()).await;
    if component == OptionalComponent::ClaimLabels {
        cluster.until_labels_are_set().await;
    }
    let scene = Scene::set(&cluster, &node).await;
    let of_component = OfComponent::set(&cluster, component, &scene).await;
    let policies = policies(&cluster.admin).await;
    let (mut faults, mut all) = (String::new(), Vec::new());
    for (account, client) in [(Account::Provisioner, provisioner), (Account::Controller, controller)] {
        let attacker = Attacker::new(&cluster, account, component, client).await;
        let attempts = attempts(&scene, &attacker, &of_component);
        let verdicts = verdicts(&attacker, attempts).await;
        print(component, account, &verdicts);
        faults += &coverage::of_rights(&attacker, &verdicts);
        all.extend(verdicts);
    }
    faults += &coverage::of_policies(&policies, &all);

    of_component.remove(&cluster).await;
    scene.remove(&cluster).await;
    cluster.opt_in_only(OptionalComponent::None).await;
    cluster.finish([]).await;
    assert!(faults.is_empty(), "\n{faults}");
}

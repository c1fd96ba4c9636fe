//! The component `claim-labels` is added and removed while volumes are in use. No claim is missed, with and without a controller.

use std::time::Duration;

use anyhow::Result;
use k8s_openapi::api::admissionregistration::v1::MutatingAdmissionPolicyBinding;
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::Pod;
use kube::runtime::watcher;
use kube::{Api, ResourceExt};
use serde_json::json;
use testvm::steps::{StepResult, Steps};
use testvm_cluster::waiting::{State, until};
use testvm_cluster::{Cluster, objects};
use tokio::time::{Instant, sleep};

use crate::e2e::parts::component;
use crate::e2e::story::{Run, Sabotage, Story, When};
use crate::test_env::claim_labels::{NAME, until_recorded};
use crate::test_env::claims::SELECTED_NODE;
use crate::test_env::environment::TestEnv;
use crate::test_env::in_use::InUse;

pub(in crate::e2e) const STORY: Story = Story {
    name: "claim-labels",
    about: "each node watches only its own claims: the component is added and removed while volumes are in use",
    when: When::Long,
    run: Run::OwnNode(|steps, state, cluster, _| Box::pin(run(steps, state.env, cluster))),
    sabotages: &[Sabotage {
        name: "labels",
        about: "The claims have no labels",
        before: "each bound claim has the label of its node",
        change: |env| Box::pin(remove_labels(env)),
        repair: None,
        expected: &["claim labels-before-", "has the labels"],
    }],
};

const COMPONENT: &str = "claim-labels";
const CONTROLLER: &str = "loopfs-controller";
const POLL_INTERVAL: Duration = Duration::from_millis(500);

async fn run(steps: &mut Steps<'_>, env: &TestEnv<'_>, cluster: &Cluster) -> StepResult {
    let (root, kubectl) = (steps.session().workspace.root(), cluster.kubectl());
    let mut in_use = InUse::of("labels-before");
    steps.step("pods use a directory and a block volume", in_use.create(env)).await?;
    let added = component::add(env, root, kubectl, COMPONENT);
    let title = "apply the component claim-labels, and wait until the driver's new pods serve";
    let added = steps.step(title, added).await?;
    let recorded = until_recorded(&env.client, env.driver.namespace(), true);
    steps.step("the controller records that all claims have labels", recorded).await?;
    steps.step("each bound claim has the label of its node", labelled(env)).await?;

    steps.step("the controller is scaled to nothing", scale_controller(env, 0)).await?;
    steps.step("the volumes are expanded in use", in_use.expand(env)).await?;
    let provisioned = provision_and_delete(env, "labels-without-controller");
    steps.step("claims are provisioned, and deleted with their volumes", provisioned).await?;

    let removed = async {
        component::remove(env, &added).await?;
        until_recorded(&env.client, env.driver.namespace(), false).await
    };
    steps.step("the component is removed", removed).await?;
    steps.step("the volumes are expanded once more", in_use.expand(env)).await?;
    let provisioned = provision_and_delete(env, "labels-after");
    steps.step("claims are provisioned and deleted without the component", provisioned).await
}

async fn provision_and_delete(env: &TestEnv<'_>, name: &str) -> Result<()> {
    let another = InUse::of(name);
    another.create(env).await?;
    another.delete(env).await
}

/// Checks the labels of the claims whose volumes are in use.
async fn labelled(env: &TestEnv<'_>) -> Result<()> {
    let claims = objects::list(&env.claims(), "").await?;
    let label = format!("{}/node", env.driver.name);
    let mut checked = 0;
    for claim in claims {
        let Some(node) = claim.annotations().get(SELECTED_NODE) else { continue };
        anyhow::ensure!(
            claim.labels().get(&label) == Some(node),
            "claim {} has the labels {:?}, and its node is {node}",
            claim.name_any(),
            claim.labels()
        );
        checked += 1;
    }
    anyhow::ensure!(checked > 0, "no claim has a selected node");
    Ok(())
}

async fn scale_controller(env: &TestEnv<'_>, replicas: i32) -> Result<()> {
    let namespace = env.driver.namespace();
    let deployments: Api<Deployment> = Api::namespaced(env.client.clone(), namespace);
    objects::patch(&deployments, CONTROLLER, &json!({"spec": {"replicas": replicas}})).await?;
    let pods: Api<Pod> = Api::namespaced(env.client.clone(), namespace);
    let selected = watcher::Config::default().labels("app.kubernetes.io/name=loopfs-controller");
    until(pods, selected, env.timeouts.end, |pods| {
        State::ready_if(pods.len() == replicas as usize, format!("{} pods exist", pods.len()))
    })
    .await
    .map(drop)
}

/// Stops the controller, deletes the binding of the policy that labels claims, and removes the labels.
async fn remove_labels(env: &TestEnv<'_>) -> Result<()> {
    scale_controller(env, 0).await?;
    let bindings: Api<MutatingAdmissionPolicyBinding> = Api::all(env.client.clone());
    objects::delete(&bindings, NAME).await?;
    let label = format!("{}/node", env.driver.name);
    let patch = json!({"metadata": {"labels": {&label: null}}});
    let deadline = Instant::now() + env.timeouts.end;
    for claim in objects::list(&env.claims(), "").await? {
        // The API server applies the policy until it has noticed the deletion, which no event announces.
        while objects::patch(&env.claims(), &claim.name_any(), &patch).await?.labels().contains_key(&label) {
            anyhow::ensure!(Instant::now() < deadline, "the API server still applies the policy {NAME}");
            sleep(POLL_INTERVAL).await;
        }
    }
    Ok(())
}

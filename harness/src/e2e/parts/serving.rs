//! Waits until the driver serves, and says why if it does not.

use anyhow::{Context, Result};
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::storage::v1::CSINode;
use kube::api::{Patch, PatchParams};
use kube::runtime::watcher;
use kube::{Api, ResourceExt};
use serde_json::{Value, json};
use testvm_cluster::api_error::api_error;
use testvm_cluster::exec::log_tail;
use testvm_cluster::waiting::{State, until, until_one};
use testvm_cluster::workload::node_of;

use crate::test_env::disturbances::replace_pods;
use crate::test_env::environment::TestEnv;

/// The number of log lines that include the reason why a driver does not serve.
const LOG_TAIL_LINES: i64 = 5;

/// Waits until the pods of the DaemonSet are ready, and those of the controller.
pub(in crate::e2e) async fn ready(env: &TestEnv<'_>) -> Result<()> {
    let name = env.driver.daemon_set();
    let waited = until_one(env.daemon_sets(), name, env.timeouts.start, |daemon_set| {
        let Some(daemon_set) = daemon_set else { return State::Pending(format!("no DaemonSet {name}")) };
        let Some(status) = &daemon_set.status else { return State::Pending("no status yet".into()) };
        let (wanted, ready) = (status.desired_number_scheduled, status.number_ready);
        let seen = status.observed_generation >= daemon_set.metadata.generation;
        State::ready_if(seen && wanted > 0 && ready == wanted, format!("{ready} of {wanted} pods are ready"))
    })
    .await;
    explained(env, waited).await?;
    for name in env.deployments() {
        let deployments: Api<Deployment> = Api::namespaced(env.client.clone(), env.driver.namespace());
        let waited = until_one(deployments, &name, env.timeouts.start, |deployment| {
            let Some(deployment) = deployment else { return State::Pending(format!("no Deployment {name}")) };
            let wanted = deployment.spec.as_ref().and_then(|spec| spec.replicas).unwrap_or(1);
            let status = deployment.status.clone().unwrap_or_default();
            let seen = status.observed_generation >= deployment.metadata.generation;
            let available = status.available_replicas.unwrap_or_default();
            let updated = status.updated_replicas.unwrap_or_default();
            State::ready_if(
                seen && (updated, available) == (wanted, wanted),
                format!("of {wanted} replicas of {name}, {updated} are new and {available} are available"),
            )
        });
        waited.await?;
    }
    Ok(())
}

/// Waits as `kubectl rollout status` does, until the update of the DaemonSet to this generation has reached all of its
/// pods and they are available.
pub(in crate::e2e) async fn rolled_out(env: &TestEnv<'_>, generation: Option<i64>, pods: i32) -> Result<()> {
    let waited = until_one(env.daemon_sets(), env.driver.daemon_set(), env.timeouts.start, |daemon_set| {
        let status = daemon_set.and_then(|daemon_set| daemon_set.status.clone()).unwrap_or_default();
        let wanted = status.desired_number_scheduled;
        let new = status.updated_number_scheduled.unwrap_or_default();
        let available = status.number_available.unwrap_or_default();
        let observed = status.observed_generation >= generation;
        State::ready_if(
            observed && (wanted, new, available) == (pods, pods, pods),
            format!("of {wanted} pods {new} are new and {available} are available"),
        )
    });
    explained(env, waited.await).await
}

/// Changes a container of the driver's pods, and waits until the new pods serve. `change` has the name of the container.
pub(in crate::e2e) async fn change_container(env: &TestEnv<'_>, change: &Value) -> Result<()> {
    let pods = replace_pods(env).await?;
    let patch = Patch::Strategic(json!({"spec": {"template": {"spec": {"containers": [change]}}}}));
    let name = env.driver.daemon_set();
    let patched = env.daemon_sets().patch(name, &PatchParams::default(), &patch).await.map_err(api_error);
    let generation = patched.with_context(|| format!("patch DaemonSet {name}"))?.metadata.generation;
    rolled_out(env, generation, i32::try_from(pods.len())?).await?;
    served(env).await
}

/// Waits until the driver's pods are ready and their nodes have registered the driver.
pub(in crate::e2e) async fn served(env: &TestEnv<'_>) -> Result<()> {
    ready(env).await?;
    offered(env).await
}

pub(in crate::e2e) async fn offered(env: &TestEnv<'_>) -> Result<()> {
    let pods = env.live_driver_pods().await?;
    let nodes: Vec<&str> = pods.iter().filter_map(node_of).collect();
    let scope = watcher::Config::default();
    let waited = until(Api::all(env.client.clone()), scope, env.timeouts.start, |csi_nodes| {
        let offers = |node: &CSINode| node.spec.drivers.iter().any(|driver| driver.name == env.driver.name);
        let offering: Vec<String> =
            csi_nodes.values().filter(|node| offers(node)).map(ResourceExt::name_any).collect();
        let missing: Vec<_> =
            nodes.iter().filter(|node| !offering.iter().any(|name| name == *node)).collect();
        State::ready_if(
            missing.is_empty(),
            format!("the kubelet of {missing:?} has not registered {}", env.driver.name),
        )
    })
    .await;
    explained(env, waited).await
}

/// Adds the driver's logs to an error, because they have the reason why the driver does not serve.
async fn explained<T>(env: &TestEnv<'_>, waited: Result<T>) -> Result<()> {
    match waited {
        Ok(_) => Ok(()),
        Err(error) => {
            let complaints = complaints(env).await;
            Err(error.context(format!("the driver does not serve\n{complaints}\nwaited in vain")))
        }
    }
}

/// Returns the end of the log of every container of the driver.
async fn complaints(env: &TestEnv<'_>) -> String {
    let pods = match env.driver_pods_if_any().await {
        Ok(pods) if pods.is_empty() => return "it has no pods".into(),
        Ok(pods) => pods,
        Err(error) => return format!("its pods cannot be listed: {error:#}"),
    };
    let mut words = Vec::new();
    for pod in &pods {
        let name = pod.name_any();
        for container in env.driver.containers() {
            let log = log_tail(&env.driver_pods(), &name, container, LOG_TAIL_LINES).await;
            words.push(format!("{container} of {name} says:\n{}", log.trim_end()));
        }
    }
    words.join("\n")
}

/// Waits until this number of nodes has pods of the driver that are ready, and their kubelets have registered the driver.
pub(in crate::e2e) async fn serves(env: &TestEnv<'_>, nodes: i32) -> Result<()> {
    rolled_out(env, None, nodes).await?;
    served(env).await
}

//! Disturbances of the driver's containers, and of its writes to the API.

use anyhow::{Context, Result};
use kube::runtime::watcher;
use serde_json::json;
use testvm_cluster::containers::{Container, freeze, kill_in, until_replaced};

use crate::e2e::parts::serving::change_container;
use crate::test_env::environment::{FOREIGN_NODE, TestEnv};
use crate::test_env::rejected_writes::{Rejected, allow, reject};

/// Freezes the driver, so that no event announces anything any more.
pub(super) async fn freeze_driver(env: &TestEnv<'_>) -> Result<()> {
    let node = env.node.context(FOREIGN_NODE)?;
    for pod in env.live_driver_pods().await? {
        for container in env.driver.containers() {
            freeze(node, &Container::of(&pod, container)?).await?;
        }
    }
    env.timeouts.shorten();
    Ok(())
}

/// Has the API server reject new PersistentVolumes, so that no claim is bound.
pub(super) async fn reject_creation(env: &TestEnv<'_>) -> Result<()> {
    reject(env, Rejected::Creations).await?;
    env.timeouts.shorten();
    Ok(())
}

/// Has the API server reject the provisioner's changes of PersistentVolumes, so that no claim is expanded.
pub(super) async fn reject_expansion(env: &TestEnv<'_>) -> Result<()> {
    reject(env, Rejected::CreationsAndUpdates).await?;
    env.timeouts.shorten();
    Ok(())
}

pub(super) async fn allow_writes(env: &TestEnv<'_>) -> Result<()> {
    allow(env).await
}

/// Allows programs in the provisioner's container to get the privileges of their files.
pub(super) async fn allow_privileges(env: &TestEnv<'_>) -> Result<()> {
    let context = json!({"allowPrivilegeEscalation": true});
    change_container(env, &json!({"name": "provisioner", "securityContext": context})).await
}

/// Kills the csi container of the driver without a declaration, and waits until another runs in its place.
pub(super) async fn kill_undeclared(env: &TestEnv<'_>) -> Result<()> {
    let node = env.node.context(FOREIGN_NODE)?;
    let killed = kill_in(node, &env.driver_pods(), env.driver.pod_labels(), "csi").await?;
    let scope = watcher::Config::default().labels(env.driver.pod_labels());
    until_replaced(env.driver_pods(), scope, &[killed], env.timeouts.start).await
}

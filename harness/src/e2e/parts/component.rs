//! Adds an optional component of the manifests to the driver of a cluster with one node, as an administrator does, and removes it.

use std::path::Path;

use anyhow::Result;
use testvm_cluster::objects;

use super::serving;
use crate::test_env::disturbances::{replace_pods, replace_pods_if_any};
use crate::test_env::environment::TestEnv;
use crate::test_env::manifests::{self, Manifests};

/// The number of nodes of the cluster.
const NODES: i32 = 1;

/// Applies the manifests with a component, waits until the driver's new pods serve, and returns the objects of the component.
pub(in crate::e2e) async fn add(
    env: &TestEnv<'_>,
    root: &Path,
    kubectl: &Path,
    name: &str,
) -> Result<Manifests> {
    let manifests = manifests::with_component(root, kubectl, name).await?;
    // The component may be installed with the driver.
    replace_pods_if_any(env).await?;
    manifests.apply(&env.client).await?;
    rolled_out(env).await?;
    Ok(manifests.without(&env.manifests))
}

/// Applies the manifests without the component, waits until the driver's new pods serve, and deletes what only the component has.
pub(in crate::e2e) async fn remove(env: &TestEnv<'_>, component: &Manifests) -> Result<()> {
    replace_pods(env).await?;
    env.manifests.apply(&env.client).await?;
    rolled_out(env).await?;
    component.delete(&env.client).await
}

async fn rolled_out(env: &TestEnv<'_>) -> Result<()> {
    let generation = objects::read(&env.daemon_sets(), env.driver.daemon_set()).await?.metadata.generation;
    serving::rolled_out(env, generation, NODES).await?;
    serving::served(env).await
}

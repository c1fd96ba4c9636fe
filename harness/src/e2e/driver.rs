//! The driver on the clusters of other commands, lanes and benchmarks.

use std::path::Path;

use anyhow::{Context, Result};
use testvm::session::Session;
use testvm_cluster::Cluster;

use super::parts::{self, serving};
use super::runner::NAMESPACE;
use super::{state_dump, stories};
use crate::test_env::environment::TestEnv;
use crate::test_env::inventory::Inventory;

/// Applies the manifests to a cluster and waits until the driver serves.
pub(crate) async fn install_driver(session: &Session, cluster: &Cluster) -> Result<()> {
    let env = TestEnv::in_namespace(session, cluster, NAMESPACE)?;
    env.manifests.apply(&env.client).await?;
    serving::served(&env).await
}

/// Applies the manifests to a cluster with the component that takes snapshots, and waits until the driver serves.
pub(crate) async fn install_driver_with_snapshots(session: &Session, cluster: &Cluster) -> Result<()> {
    let env = TestEnv::in_namespace(session, cluster, NAMESPACE)?;
    let (root, kubectl) = (session.workspace.root(), cluster.kubectl());
    stories::snapshots::controllers::add_controller(&env, root, kubectl).await?;
    let component = stories::snapshots::controllers::COMPONENT;
    parts::component::add(&env, root, kubectl, component).await.map(drop)
}

/// Waits until the cluster has no volume of the driver, and its first node nothing that it did not have `before`.
///
/// # Errors
/// Something is left after some minutes.
pub(crate) async fn nothing_left(session: &Session, cluster: &Cluster, before: &Inventory) -> Result<()> {
    let env = TestEnv::in_namespace(session, cluster, NAMESPACE)?;
    stories::removal::no_volumes_of_the_driver(&env).await?;
    let node = env.node.context("the cluster has no node")?;
    stories::removal::nothing_left(&env, node, before).await
}

/// Writes the state of a cluster into `directory`, for readers of the report.
///
/// # Errors
/// The manifests of the driver cannot be read.
pub(crate) async fn write_state(session: &Session, cluster: &Cluster, directory: &Path) -> Result<()> {
    let env = TestEnv::in_namespace(session, cluster, NAMESPACE)?;
    state_dump::write(&env, directory).await;
    state_dump::write_node(session, cluster.node(), directory).await;
    Ok(())
}

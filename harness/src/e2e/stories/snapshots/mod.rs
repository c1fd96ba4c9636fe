//! VolumeSnapshots as users request them. snapshot-controller binds them, and csi-snapshotter in the driver's pod on the node
//! of the volume takes the snapshots.

pub(in crate::e2e) mod controllers;
mod deleted_node;
mod deletion_order;
mod interrupted;
mod names;
mod restored;
mod retained;

use testvm::steps::{StepResult, Steps};
use testvm_cluster::{Cluster, Node};

use super::removal;
use crate::test_env::environment::TestEnv;
use crate::test_env::inventory::Inventory;
use crate::test_env::workload::VolumeMode;

pub(in crate::e2e) const NAME: &str = "snapshots";

const MODES: [VolumeMode; 2] = [VolumeMode::Filesystem, VolumeMode::Block];

pub(in crate::e2e) async fn run(
    steps: &mut Steps<'_>,
    env: &TestEnv<'_>,
    cluster: &Cluster,
    node: &Node,
) -> StepResult {
    let before = steps.step("list what is on the node", Inventory::take(node)).await?;
    let installed = controllers::install(steps, env, cluster).await?;
    for mode in MODES {
        restored::run(steps, env, mode).await?;
        retained::run(steps, env, node, mode).await?;
        deletion_order::run(steps, env, node, mode).await?;
    }
    interrupted::run(steps, env, node).await?;
    deleted_node::run(steps, env).await?;
    steps.step("nothing is left on the node", removal::nothing_left(env, node, &before)).await?;
    controllers::remove(steps, env, installed).await
}

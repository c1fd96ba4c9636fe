//! VolumeSnapshots as users request them. snapshot-controller binds them, and csi-snapshotter in the driver's pod on the node
//! of the volume takes the snapshots.

pub(in crate::e2e) mod controllers;
mod deleted_node;
mod deletion_order;
mod interrupted;
mod names;
mod restored;
mod retained;

use testvm_cluster::{Cluster, Node};

use super::removal;
use crate::e2e::scenario::{Scenario, StepResult};
use crate::test_env::environment::TestEnv;
use crate::test_env::inventory::Inventory;
use crate::test_env::workload::VolumeMode;

pub(in crate::e2e) const NAME: &str = "snapshots";

const MODES: [VolumeMode; 2] = [VolumeMode::Filesystem, VolumeMode::Block];

pub(in crate::e2e) async fn run(
    scenario: &mut Scenario<'_>,
    env: &TestEnv<'_>,
    cluster: &Cluster,
    node: &Node,
) -> StepResult {
    let before = scenario.step("list what is on the node", Inventory::take(node)).await?;
    let installed = controllers::install(scenario, env, cluster).await?;
    for mode in MODES {
        restored::run(scenario, env, mode).await?;
        retained::run(scenario, env, node, mode).await?;
        deletion_order::run(scenario, env, node, mode).await?;
    }
    interrupted::run(scenario, env, node).await?;
    deleted_node::run(scenario, env).await?;
    scenario.step("nothing is left on the node", removal::nothing_left(env, node, &before)).await?;
    controllers::remove(scenario, env, installed).await
}

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
use crate::e2e::sabotages::on_node;
use crate::e2e::story::{Run, Sabotage, Story, When};
use crate::test_env::environment::TestEnv;
use crate::test_env::snapshots::delete_all;
use crate::test_env::workload::VolumeMode;

pub(in crate::e2e) const STORY: Story = Story {
    name: "snapshots",
    about: "VolumeSnapshots with snapshot-controller: restored, retained, deleted, interrupted",
    when: When::OtherProjects,
    run: Run::OwnNode(|steps, state, cluster, node| Box::pin(run(steps, state.env, cluster, node))),
    sabotages: &[Sabotage {
        name: "snapshot-data",
        about: "A snapshot does not have the content of its volume",
        before: "a volume of the same size has the content of the snapshot",
        change: |env| {
            Box::pin(on_node(env, "find DATA -name kept -type f -exec sh -c 'echo other > $1' sh {} \\;"))
        },
        // Before the driver is installed again without csi-snapshotter, which removes the finalizers.
        repair: Some(|env| Box::pin(delete_all(env))),
        expected: &["content of the file written before the resize", "other"],
    }],
};

const MODES: [VolumeMode; 2] = [VolumeMode::Filesystem, VolumeMode::Block];

async fn run(steps: &mut Steps<'_>, env: &TestEnv<'_>, cluster: &Cluster, node: &Node) -> StepResult {
    let installed = controllers::install(steps, env, cluster).await?;
    for mode in MODES {
        restored::run(steps, env, mode).await?;
        retained::run(steps, env, node, mode).await?;
        deletion_order::run(steps, env, node, mode).await?;
    }
    interrupted::run(steps, env, node).await?;
    deleted_node::run(steps, env).await?;
    steps
        .step("pods and claims are deleted, and their volumes with them", removal::delete_objects(env))
        .await?;
    controllers::remove(steps, env, installed).await
}

//! Installs what snapshots need besides the driver, as an administrator does, and removes it.

use std::path::Path;

use anyhow::Result;
use testvm::steps::{StepResult, Steps};
use testvm_cluster::waiting::until_established;
use testvm_cluster::{Cluster, workload};

use crate::e2e::parts::component;
use crate::test_env::disturbances::delete_snapshot_controller;
use crate::test_env::environment::TestEnv;
use crate::test_env::manifests::{self, Manifests};

pub(in crate::e2e) const COMPONENT: &str = "snapshots";
/// The Deployment of the manifests.
const CONTROLLER: &str = "snapshot-controller";
const NAMESPACE: &str = "kube-system";
const CUSTOM_RESOURCES: [&str; 3] = [
    "volumesnapshotclasses.snapshot.storage.k8s.io",
    "volumesnapshotcontents.snapshot.storage.k8s.io",
    "volumesnapshots.snapshot.storage.k8s.io",
];

/// The objects that this story adds to the cluster.
pub(super) struct Installed {
    controller: Manifests,
    component: Manifests,
}

pub(super) async fn install(
    steps: &mut Steps<'_>,
    env: &TestEnv<'_>,
    cluster: &Cluster,
) -> StepResult<Installed> {
    let (root, kubectl) = (steps.session().workspace.root(), cluster.kubectl());
    let controller = add_controller(env, root, kubectl);
    let controller = steps.step("apply snapshot-controller, and wait until it runs", controller).await?;
    let component = component::add(env, root, kubectl, COMPONENT);
    let title = "apply the component snapshots, and wait until the driver's new pods serve";
    let component = steps.step(title, component).await?;
    Ok(Installed { controller, component })
}

/// Applies the custom resources of snapshots and snapshot-controller, waits until it runs, and returns what was applied.
pub(in crate::e2e) async fn add_controller(
    env: &TestEnv<'_>,
    root: &Path,
    kubectl: &Path,
) -> Result<Manifests> {
    let controller = manifests::of_snapshot_controller(root, kubectl).await?;
    controller.apply(&env.client).await?;
    until_established(&env.client, &CUSTOM_RESOURCES, env.timeouts.start).await?;
    workload::until_available(&env.client, NAMESPACE, CONTROLLER, env.timeouts.start).await?;
    Ok(controller)
}

/// Applies the manifests without the component, and deletes everything that only it has.
pub(super) async fn remove(steps: &mut Steps<'_>, env: &TestEnv<'_>, installed: Installed) -> StepResult {
    let Installed { controller, component } = installed;
    let removed = async {
        component::remove(env, &component).await?;
        delete_snapshot_controller(env).await?;
        controller.delete(&env.client).await
    };
    steps.step("csi-snapshotter and snapshot-controller are removed", removed).await
}

//! The manifests are applied, the driver's pods become ready, the node registers the driver, and `loopfs doctor` finds nothing
//! missing.

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::Node as NodeObject;
use kube::Api;
use kube::runtime::watcher;
use testvm::steps::{StepResult, Steps};
use testvm_cluster::api_error::api_error;
use testvm_cluster::containers::{self, Container};
use testvm_cluster::waiting::{State, until, until_event};
use testvm_cluster::{Node, objects};

use crate::e2e::doctor;
use crate::e2e::parts::node_without_storage::{data_disk, mount_disk};
use crate::e2e::parts::serving::{offered, ready};
use crate::e2e::story::{Run, RunState, Sabotage, Story, When};
use crate::nodes::DATA_DIR;
use crate::test_env::disturbances::replace_pods_if_any;
use crate::test_env::environment::{FOREIGN_NODE, TestEnv};
use crate::test_env::inventory::{Inventory, is_mounted};

pub(in crate::e2e) const STORY: Story = Story {
    name: "install",
    about: "apply the manifests; every node with a pod of the driver offers it",
    when: When::Always,
    run: Run::AnyCluster(|steps, state| Box::pin(run(steps, state))),
    sabotages: &[Sabotage {
        name: "quota",
        about: "The data disk is mounted without project quotas",
        before: "apply the manifests",
        change: |env| Box::pin(mount_without_quota(env)),
        repair: Some(|env| Box::pin(mount_properly(env))),
        expected: WITHOUT_QUOTA,
    }],
};

/// Installs the driver, and records what is on the node before the first volume.
async fn run(steps: &mut Steps<'_>, state: &mut RunState<'_>) -> StepResult {
    let env = state.env;
    let applied = async {
        // On a cluster with another version of the driver, this updates it.
        replace_pods_if_any(env).await?;
        env.manifests.apply(&env.client).await
    };
    steps.step("apply the manifests", applied).await?;
    steps.step("the driver's pods are ready", ready(env)).await?;
    steps.step("every node with a driver pod offers the driver", offered(env)).await?;
    steps
        .step("loopfs doctor finds nothing missing in the driver's containers", doctor::in_containers(env))
        .await?;
    steps.step("the provisioner has no capability and no directory of the host", unprivileged(env)).await?;
    let Some(node) = env.node else {
        steps.skip(CONFINED, FOREIGN_NODE);
        return Ok(());
    };
    steps.step(CONFINED, confined(env, node)).await?;
    if state.before.is_none() {
        state.before = Some(steps.step("list what is on the node", Inventory::take(node)).await?);
    }
    Ok(())
}

const CONFINED: &str = "the provisioner is not root, and csi cannot read the kubelet's keys";
const PROVISIONER: &str = "provisioner";
const KUBELET_DIR: &str = "/var/lib/kubelet";
/// The subdirectories of the kubelet's directory that the csi container has. (plugins_registry is mounted
/// elsewhere.)
const OF_THE_KUBELET: [&str; 2] = ["plugins", "pods"];

/// Checks the live DaemonSet: the container with credentials has nothing of the node.
async fn unprivileged(env: &TestEnv<'_>) -> Result<()> {
    let daemon_set = objects::read(&env.daemon_sets(), env.driver.daemon_set()).await?;
    let pod = daemon_set.spec.and_then(|spec| spec.template.spec).context("the DaemonSet has no pods")?;
    let of_host = pod.volumes.iter().flatten().filter(|volume| volume.host_path.is_some());
    let of_host: Vec<&str> = of_host.map(|volume| volume.name.as_str()).collect();
    let provisioner = pod.containers.iter().find(|container| container.name == PROVISIONER);
    let provisioner = provisioner.with_context(|| format!("the DaemonSet has no container {PROVISIONER}"))?;
    let mounts = provisioner.volume_mounts.iter().flatten().map(|mount| mount.name.as_str());
    let mounted: Vec<&str> = mounts.filter(|name| of_host.contains(name)).collect();
    anyhow::ensure!(mounted.is_empty(), "{PROVISIONER} mounts {mounted:?} of the host");
    let context = provisioner.security_context.clone().unwrap_or_default();
    let added = context.capabilities.and_then(|capabilities| capabilities.add).unwrap_or_default();
    anyhow::ensure!(added.is_empty(), "{PROVISIONER} has the capabilities {added:?}");
    anyhow::ensure!(
        context.privileged != Some(true) && context.run_as_non_root == Some(true),
        "{PROVISIONER} may be privileged or root"
    );
    Ok(())
}

/// Checks the processes on the node.
async fn confined(env: &TestEnv<'_>, node: &Node) -> Result<()> {
    for pod in env.live_driver_pods().await? {
        let provisioner = containers::process(node, &Container::of(&pod, PROVISIONER)?).await?;
        let status = node.output(&["cat", &format!("{provisioner}/status")]).await?;
        let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default();
        anyhow::ensure!(
            !field("Uid:").is_empty() && field("Uid:").split_whitespace().all(|uid| uid != "0"),
            "{PROVISIONER} is root: {status}"
        );
        let bounding = u64::from_str_radix(field("CapBnd:").trim(), 16);
        anyhow::ensure!(bounding == Ok(0), "{PROVISIONER} has capabilities: {status}");
        let csi = containers::process(node, &Container::of(&pod, "csi")?).await?;
        let shown = node.output(&["ls", &format!("{csi}/root{KUBELET_DIR}")]).await?;
        anyhow::ensure!(
            shown.split_whitespace().eq(OF_THE_KUBELET),
            "csi has {shown:?} of the kubelet's directory"
        );
    }
    Ok(())
}

/// Returns `true` if the driver is installed already.
pub(in crate::e2e) async fn is_installed(env: &TestEnv<'_>) -> Result<bool> {
    let found = env.daemon_sets().get_opt(env.driver.daemon_set()).await.map_err(api_error);
    found.context("look for the driver").map(|found| found.is_some())
}

/// Deletes the driver's pods and waits until they are deleted. Applying the manifests creates them again.
pub(in crate::e2e) async fn stop(env: &TestEnv<'_>) -> Result<()> {
    let name = env.driver.daemon_set();
    replace_pods_if_any(env).await?;
    objects::delete_if_exists(&env.daemon_sets(), name).await?;
    let scope = watcher::Config::default().labels(env.driver.pod_labels());
    until(env.driver_pods(), scope, env.timeouts.end, |pods| {
        State::ready_if(pods.is_empty(), format!("{:?} still exist", pods.keys().collect::<Vec<_>>()))
    })
    .await
    .context("the driver's pods do not end")
    .map(drop)
}

/// Removes the driver from the cluster.
pub(in crate::e2e) async fn remove(env: &TestEnv<'_>) -> Result<()> {
    stop(env).await?;
    env.manifests.delete(&env.client).await
}

/// What the driver reports of the sabotage.
const WITHOUT_QUOTA: &[&str] = &["prjquota", DATA_DIR];

/// Mounts the data disk without project quotas, starts the driver, and waits for its event on the Node. The state does not change any more
/// after it.
async fn mount_without_quota(env: &TestEnv<'_>) -> Result<()> {
    let node = unmounted(env).await?;
    let device = data_disk(node).await?;
    let argv = ["mount", "-t", "xfs", "-o", "noquota,nodev,nosuid,noexec", &device, DATA_DIR];
    node.output(&argv).await?;
    env.manifests.apply(&env.client).await?;
    let nodes: Api<NodeObject> = Api::all(env.client.clone());
    let object = objects::read(&nodes, node.name()).await?;
    let has_words = |message: &str| WITHOUT_QUOTA.iter().all(|word| message.contains(word));
    until_event(&env.client, &object, &["StorageUnavailable"], env.timeouts.start, has_words).await?;
    env.timeouts.shorten();
    Ok(())
}

/// Mounts the disk as the driver needs it. The driver is stopped, so that it does not report the unmounted disk.
async fn mount_properly(env: &TestEnv<'_>) -> Result<()> {
    mount_disk(unmounted(env).await?).await
}

/// Stops the driver, unmounts the disk, and returns the node. The mount point stays.
async fn unmounted<'a>(env: &TestEnv<'a>) -> Result<&'a Node> {
    stop(env).await?;
    let node = env.node.context(FOREIGN_NODE)?;
    if is_mounted(node, DATA_DIR).await? {
        node.output(&["umount", DATA_DIR]).await?;
    }
    Ok(node)
}

//! Everything is deleted. Nothing may remain in the API or on the node.

use std::fmt::Debug;
use std::time::Duration;

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::{Namespace, PersistentVolume};
use kube::api::{DeleteParams, ListParams};
use kube::runtime::watcher;
use kube::{Api, Resource, ResourceExt};
use serde::de::DeserializeOwned;
use serde_json::json;
use testvm::excerpt::list;
use testvm::steps::{StepResult, Steps};
use testvm_cluster::api_error::api_error;
use testvm_cluster::containers::kill_in;
use testvm_cluster::waiting::{State, until, until_one};
use testvm_cluster::{Node, objects};
use tokio::time::{Instant, sleep};

use crate::e2e::sabotages::on_node;
use crate::e2e::story::{Run, Sabotage, Story, When};
use crate::test_env::claims;
use crate::test_env::disturbances::until_replaced;
use crate::test_env::environment::{FOREIGN_NODE, TestEnv};
use crate::test_env::inventory::Inventory;

pub(in crate::e2e) const STORY: Story = Story {
    name: "removal",
    about: "delete everything; nothing is left in the API or on the node",
    when: When::Always,
    run: Run::AnyCluster(|steps, state| Box::pin(run(steps, state.env, state.before.as_ref()))),
    sabotages: &[
        Sabotage {
            name: "leak",
            about: "A loop device, a project id with a limit, a mount and a file are left on the node",
            before: "files, project ids, loop devices and mounts are as before",
            change: |env| Box::pin(leak(env)),
            repair: Some(|env| Box::pin(on_node(env, REMOVE_LEAK))),
            expected: &[
                "leaked",
                "loop device attached to",
                "project id 4242 with a limit of 1048576 bytes",
                "mount of /leaked at",
                "/leaked/file",
            ],
        },
        Sabotage {
            name: "restart",
            about: "A container of the driver is killed, which the story does not declare",
            before: "files, project ids, loop devices and mounts are as before",
            change: |env| Box::pin(kill_undeclared(env)),
            repair: None,
            expected: &["container csi of pod", "restarted, which the test did not cause", "exit code 137"],
        },
    ],
};

/// The poll interval: the driver deletes data in the background, which no event announces.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

pub(in crate::e2e) async fn run(
    steps: &mut Steps<'_>,
    env: &TestEnv<'_>,
    before: Option<&Inventory>,
) -> StepResult {
    steps.step("delete the namespace of the stories", delete_namespace(env)).await?;
    as_before(steps, env, before).await
}

/// Deletes what a story left in its namespace, and checks that nothing of it remains on the node.
pub(in crate::e2e) async fn clean_up(
    steps: &mut Steps<'_>,
    env: &TestEnv<'_>,
    before: Option<&Inventory>,
) -> StepResult {
    steps.step("pods and claims are deleted, and their volumes with them", delete_objects(env)).await?;
    as_before(steps, env, before).await
}

async fn as_before(steps: &mut Steps<'_>, env: &TestEnv<'_>, before: Option<&Inventory>) -> StepResult {
    let title = "files, project ids, loop devices and mounts are as before";
    match (env.node, before) {
        (Some(node), Some(before)) => steps.step(title, nothing_left(env, node, before)).await,
        _ => {
            steps.skip(title, FOREIGN_NODE);
            Ok(())
        }
    }
}

/// Deletes all pods and claims in the namespace, and waits until they and their volumes are deleted. The controllers, pods and claims go
/// together, so that claims are deleted while in use.
pub(in crate::e2e) async fn delete_objects(env: &TestEnv<'_>) -> Result<()> {
    delete_all(env.stateful_sets()).await.context("delete the StatefulSets")?;
    delete_all(env.pods()).await.context("delete the pods")?;
    delete_all(env.claims()).await.context("delete the claims")?;
    none_left(env, env.pods(), |_| true).await.context("pods do not go")?;
    none_left(env, env.claims(), |_| true).await.context("claims do not go")?;
    no_volumes(env).await
}

/// Deletes the namespace with all its claims and pods, and waits until it is deleted.
///
/// The objects in it are deleted first: while any is left, Kubernetes checks such a namespace again only
/// after 5 s, then 10 s.
pub(in crate::e2e) async fn delete_namespace(env: &TestEnv<'_>) -> Result<()> {
    delete_objects(env).await?;
    let namespaces: Api<Namespace> = Api::all(env.client.clone());
    let name = &env.namespace;
    objects::delete_if_exists(&namespaces, name).await?;
    until_one(namespaces, name, env.timeouts.end, |namespace| {
        let Some(namespace) = namespace else { return State::Ready };
        let conditions = namespace.status.iter().flat_map(|status| status.conditions.iter().flatten());
        let why: Vec<_> =
            conditions.filter(|c| c.status == "True").filter_map(|c| c.message.clone()).collect();
        State::Pending(format!("it still exists: {}", why.join("; ")))
    })
    .await
    .with_context(|| format!("namespace {name} does not go"))
    .map(drop)
}

async fn delete_all<K>(api: Api<K>) -> Result<()>
where
    K: Clone + Debug + DeserializeOwned,
{
    let deleted = api.delete_collection(&DeleteParams::default(), &ListParams::default()).await;
    deleted.map_err(api_error).map(drop)
}

/// Has the provisioner delete the retained volumes of the claims of the stories, too.
pub(in crate::e2e) async fn retain_none(env: &TestEnv<'_>) -> Result<()> {
    let volumes = objects::list(&claims::volumes(env), "").await?;
    let policy = json!({"spec": {"persistentVolumeReclaimPolicy": "Delete"}});
    for volume in volumes.iter().filter(|volume| is_of_the_stories(env, volume)) {
        let retained = volume.spec.as_ref().and_then(|spec| spec.persistent_volume_reclaim_policy.as_deref());
        if retained == Some("Retain") {
            claims::patch_volume(env, &volume.name_any(), &policy).await?;
        }
    }
    Ok(())
}

/// Waits until no volume of the driver belongs to a claim of the stories.
pub(in crate::e2e) async fn no_volumes(env: &TestEnv<'_>) -> Result<()> {
    let volumes: Api<PersistentVolume> = Api::all(env.client.clone());
    none_left(env, volumes, |volume| is_of_the_stories(env, volume)).await
}

fn is_of_the_stories(env: &TestEnv<'_>, volume: &PersistentVolume) -> bool {
    let claim = volume.spec.as_ref().and_then(|spec| spec.claim_ref.as_ref());
    let namespace = claim.and_then(|claim| claim.namespace.as_deref());
    is_of_the_driver(env, volume) && namespace == Some(&env.namespace)
}

/// Waits until there is no volume of the driver.
pub(in crate::e2e) async fn no_volumes_of_the_driver(env: &TestEnv<'_>) -> Result<()> {
    let volumes: Api<PersistentVolume> = Api::all(env.client.clone());
    none_left(env, volumes, |volume| is_of_the_driver(env, volume)).await
}

fn is_of_the_driver(env: &TestEnv<'_>, volume: &PersistentVolume) -> bool {
    let csi = volume.spec.as_ref().and_then(|spec| spec.csi.as_ref());
    csi.is_some_and(|csi| csi.driver == env.driver.name)
}

async fn none_left<K>(env: &TestEnv<'_>, api: Api<K>, is_ours: impl Fn(&K) -> bool) -> Result<()>
where
    K: Resource<DynamicType: Default> + Clone + Debug + DeserializeOwned + Send + 'static,
{
    until(api, watcher::Config::default(), env.timeouts.end, |objects| {
        let ours = objects.values().filter(|object| is_ours(object));
        let left: Vec<_> = ours.map(ResourceExt::name_any).collect();
        State::ready_if(left.is_empty(), format!("left {}", list(&left)))
    })
    .await
    .map(drop)
}

/// Waits until the node has nothing that it did not have before.
pub(in crate::e2e) async fn nothing_left(env: &TestEnv<'_>, node: &Node, before: &Inventory) -> Result<()> {
    let deadline = Instant::now() + env.timeouts.end;
    loop {
        let more = Inventory::take(node).await?.added_since(before);
        if more.is_empty() {
            return Ok(());
        }
        anyhow::ensure!(Instant::now() < deadline, "leaked {}", list(&more));
        sleep(POLL_INTERVAL).await;
    }
}

/// One object of each kind that an [`Inventory`] has. The project id is not one of the store or of the kubelet, which would free
/// theirs. The loop device is read-only, because the driver also finds the writable devices of other programs and detaches them with
/// its own.
const LEAK: &str = "mkdir -p DATA/leaked /var/lib/kubelet/plugins/kubernetes.io/csi/leaked
truncate --size 1M DATA/leaked/file
losetup --read-only --find DATA/leaked/file
mount --bind DATA/leaked /var/lib/kubelet/plugins/kubernetes.io/csi/leaked
xfs_quota -x -c 'limit -p bhard=1m 4242' -c 'limit -p bhard=1m 4000000000' DATA";

const REMOVE_LEAK: &str = "umount /var/lib/kubelet/plugins/kubernetes.io/csi/leaked
rmdir /var/lib/kubelet/plugins/kubernetes.io/csi/leaked
losetup --detach \"$(losetup --noheadings --output NAME --associated DATA/leaked/file)\"
rm -r DATA/leaked
xfs_quota -x -c 'limit -p bhard=0 4242' -c 'limit -p bhard=0 4000000000' DATA";

async fn leak(env: &TestEnv<'_>) -> Result<()> {
    on_node(env, LEAK).await?;
    env.timeouts.shorten();
    Ok(())
}

/// Kills the csi container of the driver without a declaration, and waits until another runs in its place.
async fn kill_undeclared(env: &TestEnv<'_>) -> Result<()> {
    let node = env.node.context(FOREIGN_NODE)?;
    let killed = kill_in(node, &env.driver_pods(), env.driver.pod_labels(), "csi").await?;
    until_replaced(env, &[killed]).await
}

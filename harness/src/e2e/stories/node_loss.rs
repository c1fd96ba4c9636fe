//! A Node object is deleted by mistake while its machine runs: an event says what will be deleted and when, and nothing is deleted before
//! the node is registered again. Then the machine goes with its Node object: the claim is deleted. When the machine comes back, it
//! still has the data.

use anyhow::Result;
use k8s_openapi::api::core::v1::PersistentVolume;
use k8s_openapi::api::storage::v1::StorageClass;
use kube::{Api, ResourceExt};
use serde_json::json;
use testvm::steps::{StepResult, Steps};
use testvm_cluster::exec::exec_ok;
use testvm_cluster::waiting::until_event;
use testvm_cluster::{Cluster, DataDisk, Node, objects};

use super::orphans::{self, FILE, TEXT};
use super::{removal, second_node};
use crate::e2e::parts::component;
use crate::e2e::parts::serving;
use crate::e2e::sabotages::named;
use crate::e2e::story::{Run, Sabotage, Story, When};
use crate::test_env::claims;
use crate::test_env::environment::TestEnv;
use crate::test_env::pods::{check_text, end, start};
use crate::test_env::sizes::Size;
use crate::test_env::workload::{VolumeMode, claim};

pub(in crate::e2e) const STORY: Story = Story {
    name: "node-loss",
    about: "a node is deleted by mistake, and lost; it comes back with its data",
    when: When::Long,
    run: Run::OwnNode(|steps, state, cluster, _| Box::pin(run(steps, state.env, cluster))),
    sabotages: &[Sabotage {
        name: "retained-claim",
        about: "The volume of a lost node is to be retained",
        before: "the grace time is now a second, and the machine and its Node go",
        change: |env| Box::pin(retain_on_node_loss(env)),
        repair: Some(|env| Box::pin(remove_lost_volume(env))),
        expected: &["wait for the deletion of persistentvolumeclaims/on-a-lost-node", "it still exists"],
    }],
};

const COMPONENT: &str = "node-loss";
const SIZE: Size = Size::mebibytes(1);
const CLAIM: &str = "on-a-lost-node";
const WRITER: &str = "before-the-loss";
const ADOPTING: &str = "adopting";
const READER: &str = "after-the-return";
const GRACE: &str = "csi.loopfs.dev/node-loss-grace-seconds";

async fn run(steps: &mut Steps<'_>, env: &TestEnv<'_>, cluster: &Cluster) -> StepResult {
    let (root, kubectl) = (steps.session().workspace.root(), cluster.kubectl());
    let added = component::add(env, root, kubectl, COMPONENT);
    let added = steps.step("apply the component node-loss", added).await?;
    let session = steps.session();
    let booted = async {
        let node = cluster.boot_node(session, second_node::INDEX, DataDisk::Mounted).await?;
        serving::serves(env, 2).await?;
        Ok(node)
    };
    let node = steps.step("boot a second node", booted).await?;
    let written = write(env, &node);
    let title = "a pod on it writes to a claim that is to be deleted if the node is lost";
    let volume = steps.step(title, written).await?;

    let missed = async {
        second_node::delete(env, node.name()).await?;
        announced(env).await
    };
    steps.step("its Node is deleted, and the claim's event says when the claim will be", missed).await?;
    steps.step("the node is registered again, and a pod reads what was written", returns(env, &node)).await?;

    steps
        .step("the grace time is now a second, and the machine and its Node go", goes(env, &node, &volume))
        .await?;
    steps.step("the claim and its PersistentVolume are deleted", deleted(env, &volume)).await?;
    let kept = async {
        node.register().await?;
        node.boot().await?;
        serving::serves(env, 2).await?;
        adopt(env, &volume).await
    };
    steps.step("the machine comes back, and a new PersistentVolume brings its data back", kept).await?;

    let left = async {
        removal::delete_objects(env).await?;
        second_node::leave(env, node).await?;
        component::remove(env, &added).await?;
        let classes: Api<StorageClass> = Api::all(env.client.clone());
        objects::delete(&classes, &class(env)).await
    };
    steps.step("claim, node and component go", left).await
}

/// Returns the name of the class whose claims are deleted ten minutes after their node.
fn class(env: &TestEnv<'_>) -> String {
    format!("{}-node-loss", env.namespace)
}

async fn write(env: &TestEnv<'_>, node: &Node) -> Result<PersistentVolume> {
    let mut object: StorageClass = env.driver.class.clone();
    object.metadata = named(&class(env));
    let parameters = [("onNodeLoss", "deleteClaim"), ("nodeLossGraceSeconds", "600")];
    let parameters = parameters.map(|(name, value)| (name.to_owned(), value.to_owned()));
    object.parameters.get_or_insert_default().extend(parameters);
    let classes: Api<StorageClass> = Api::all(env.client.clone());
    objects::create(&classes, &object).await?;
    let object = claim(CLAIM, &class(env), SIZE, VolumeMode::Filesystem, "ReadWriteOnce")?;
    claims::create(env, &claims::with_selected_node(object, node.name())).await?;
    start(env, WRITER, CLAIM, VolumeMode::Filesystem).await?;
    exec_ok(&env.pods(), WRITER, &["/volume-check", "write", FILE, TEXT]).await?;
    claims::volume_of(env, CLAIM).await
}

async fn announced(env: &TestEnv<'_>) -> Result<()> {
    let claim = objects::read(&env.claims(), CLAIM).await?;
    let announces =
        |message: &str| message.contains("; at ") && message.contains("set that annotation to \"retain\"");
    until_event(&env.client, &claim, &["NodeLost"], env.timeouts.start, announces).await.map(drop)
}

/// Registers the node as a kubelet does that is restarted. Kubernetes may have deleted the pods of the node before.
async fn returns(env: &TestEnv<'_>, node: &Node) -> Result<()> {
    node.register().await?;
    node.kill_kubelet().await?;
    serving::serves(env, 2).await?;
    forget_pod(env, WRITER).await?;
    start(env, READER, CLAIM, VolumeMode::Filesystem).await?;
    check_text(env, READER, FILE, TEXT).await?;
    end(env, READER).await
}

/// Deletes the object of a pod, if it exists.
async fn forget_pod(env: &TestEnv<'_>, name: &str) -> Result<()> {
    objects::delete_if_exists(&env.pods(), name).await?;
    objects::until_gone(env.pods(), name, env.timeouts.end).await
}

async fn goes(env: &TestEnv<'_>, node: &Node, volume: &PersistentVolume) -> Result<()> {
    let shorter = json!({"metadata": {"annotations": {GRACE: "1"}}});
    claims::patch_volume(env, &volume.name_any(), &shorter).await?;
    node.cut_power().await?;
    second_node::delete(env, node.name()).await
}

async fn deleted(env: &TestEnv<'_>, volume: &PersistentVolume) -> Result<()> {
    objects::until_gone(env.claims(), CLAIM, env.timeouts.end).await?;
    claims::gone(env, &volume.name_any()).await
}

/// Creates the PersistentVolume again, without the fields that the API server and the claim had set.
async fn adopt(env: &TestEnv<'_>, volume: &PersistentVolume) -> Result<()> {
    let mut object = PersistentVolume { spec: volume.spec.clone(), ..PersistentVolume::default() };
    object.metadata.name = volume.metadata.name.clone();
    object.metadata.labels = volume.metadata.labels.clone();
    object.metadata.annotations = volume.metadata.annotations.clone();
    let spec = object.spec.get_or_insert_default();
    spec.claim_ref = None;
    let class = spec.storage_class_name.clone().unwrap_or_default();
    objects::create(&claims::volumes(env), &object).await?;
    let mut second = claim(ADOPTING, &class, SIZE, VolumeMode::Filesystem, "ReadWriteOnce")?;
    second.spec.get_or_insert_default().volume_name = object.metadata.name;
    claims::create(env, &second).await?;
    orphans::read(env, ADOPTING).await
}

/// Has the driver keep the claim.
async fn retain_on_node_loss(env: &TestEnv<'_>) -> Result<()> {
    let volume = claims::volume_of(env, CLAIM).await?.name_any();
    let retain = json!({"metadata": {"annotations": {"csi.loopfs.dev/on-node-loss": "retain"}}});
    env.timeouts.shorten();
    claims::patch_volume(env, &volume, &retain).await
}

/// Deletes that PersistentVolume, whose node does not run any more.
async fn remove_lost_volume(env: &TestEnv<'_>) -> Result<()> {
    let volume = claims::volume_of(env, CLAIM).await?.name_any();
    objects::delete(&claims::volumes(env), &volume).await?;
    claims::patch_volume(env, &volume, &json!({"metadata": {"finalizers": null}})).await
}

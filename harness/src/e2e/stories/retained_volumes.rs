//! A class with the reclaim policy Retain: the claim is deleted, the data stays, and another claim gets the
//! volume.

use anyhow::Result;
use k8s_openapi::api::storage::v1::StorageClass;
use kube::core::ObjectMeta;
use kube::{Api, ResourceExt};
use serde_json::json;
use testvm::steps::{StepResult, Steps};
use testvm_cluster::exec::exec_ok;
use testvm_cluster::objects;
use testvm_cluster::waiting::until_event;

use crate::e2e::sabotages::overwrite_files;
use crate::e2e::story::{Run, Sabotage, Story, When};
use crate::test_env::claims;
use crate::test_env::environment::TestEnv;
use crate::test_env::pods::{end, start};
use crate::test_env::sizes::Size;
use crate::test_env::workload::{VolumeMode, claim};

pub(in crate::e2e) const STORY: Story = Story {
    name: "retained-volumes",
    about: "reclaim policy Retain: the data stays, and another claim gets it",
    when: When::All,
    run: Run::AnyCluster(|steps, state| Box::pin(run(steps, state.env))),
    sabotages: &[Sabotage {
        name: "retained-data",
        about: "The data of a retained volume is lost",
        before: "another claim is given the volume, with its data",
        change: |env| Box::pin(overwrite_files(env)),
        repair: None,
        expected: &["the retained volume contains \"of another volume\""],
    }],
};

const SIZE: Size = Size::mebibytes(1);
const FIRST: &str = "retained";
const SECOND: &str = "retained-again";
const FILE: &str = "/vol/file";
const TEXT: &str = "kept";

async fn run(steps: &mut Steps<'_>, env: &TestEnv<'_>) -> StepResult {
    let class = steps.step("create a class that retains", retaining(env)).await?;
    let volume = steps.step("a pod writes to a claim of it", write(env, &class)).await?;
    steps.step("the claim is deleted, and the volume says where its data is", release(env, &volume)).await?;
    steps.step("another claim is given the volume, with its data", given(env, &class, &volume)).await?;
    steps.step("deleted with its claim, once that is its policy", discard(env, &class, &volume)).await
}

/// Creates the class, and returns its name.
async fn retaining(env: &TestEnv<'_>) -> Result<String> {
    let mut class: StorageClass = env.driver.class.clone();
    let name = format!("{}-retain", env.namespace);
    class.metadata = ObjectMeta { name: Some(name.clone()), ..ObjectMeta::default() };
    class.reclaim_policy = Some("Retain".into());
    let classes: Api<StorageClass> = Api::all(env.client.clone());
    objects::create(&classes, &class).await?;
    Ok(name)
}

/// Writes a text to a volume of the class, and returns the volume's name.
async fn write(env: &TestEnv<'_>, class: &str) -> Result<String> {
    claims::create(env, &claim(FIRST, class, SIZE, VolumeMode::Filesystem, "ReadWriteOnce")?).await?;
    start(env, FIRST, FIRST, VolumeMode::Filesystem).await?;
    exec_ok(&env.pods(), FIRST, &["/volume-check", "write", FILE, TEXT]).await?;
    end(env, FIRST).await?;
    Ok(claims::volume_of(env, FIRST).await?.name_any())
}

async fn release(env: &TestEnv<'_>, volume: &str) -> Result<()> {
    claims::delete(env, FIRST).await?;
    let released = claims::released(env, volume).await?;
    let says = |message: &str| message.contains(volume);
    until_event(&env.client, &released, &["VolumeRetained"], env.timeouts.start, says).await.map(drop)
}

/// Assigns the volume to a new claim as an administrator does: the old claim's reference is removed, and the
/// new claim names the volume.
async fn given(env: &TestEnv<'_>, class: &str, volume: &str) -> Result<()> {
    claims::patch_volume(env, volume, &json!({"spec": {"claimRef": null}})).await?;
    let mut second = claim(SECOND, class, SIZE, VolumeMode::Filesystem, "ReadWriteOnce")?;
    second.spec.get_or_insert_default().volume_name = Some(volume.to_owned());
    claims::create(env, &second).await?;
    start(env, SECOND, SECOND, VolumeMode::Filesystem).await?;
    let read = exec_ok(&env.pods(), SECOND, &["/volume-check", "read", FILE]).await?;
    anyhow::ensure!(read == TEXT, "the retained volume contains {read:?} instead of {TEXT:?}");
    end(env, SECOND).await
}

async fn discard(env: &TestEnv<'_>, class: &str, volume: &str) -> Result<()> {
    let policy = json!({"spec": {"persistentVolumeReclaimPolicy": "Delete"}});
    claims::patch_volume(env, volume, &policy).await?;
    claims::delete_with_volume(env, SECOND).await?;
    // The class is not in the namespace that is deleted at the end.
    let classes: Api<StorageClass> = Api::all(env.client.clone());
    objects::delete(&classes, class).await.map(drop)
}

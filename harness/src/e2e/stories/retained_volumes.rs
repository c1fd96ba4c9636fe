//! A class that retains: the claim is deleted, the data stays, and another claim is given it.

use anyhow::{Context, Result};
use k8s_openapi::api::storage::v1::StorageClass;
use kube::api::{DeleteParams, PostParams};
use kube::core::ObjectMeta;
use kube::{Api, ResourceExt};
use serde_json::json;

use crate::cluster::api_error::told;
use crate::cluster::exec::exec_ok;
use crate::cluster::waiting::until_event;
use crate::e2e::story::{Story, Told};
use crate::test_env::claims;
use crate::test_env::env::World;
use crate::test_env::pods::{end, start};
use crate::test_env::sizes::Size;
use crate::test_env::workload::{Use, claim};

pub(in crate::e2e) const NAME: &str = "retained volumes";

const SIZE: Size = Size::mebibytes(1);
const FIRST: &str = "retained";
const SECOND: &str = "retained-again";
const FILE: &str = "/vol/file";
const TEXT: &str = "kept";

pub(in crate::e2e) async fn tell(story: &mut Story<'_>, world: &World<'_>) -> Told {
    let class = story.step("create a class that retains", retaining(world)).await?;
    let volume = story.step("a pod writes to a claim of it", write(world, &class)).await?;
    story
        .step("the claim is deleted, and the volume says where its data is", release(world, &volume))
        .await?;
    story.step("another claim is given the volume, with its data", given(world, &class, &volume)).await?;
    story.step("deleted with its claim, once that is its policy", discard(world, &class, &volume)).await
}

/// Answers the name of the class.
async fn retaining(world: &World<'_>) -> Result<String> {
    let mut class: StorageClass = world.driver.class.clone();
    let name = format!("{}-retain", world.namespace);
    class.metadata = ObjectMeta { name: Some(name.clone()), ..ObjectMeta::default() };
    class.reclaim_policy = Some("Retain".into());
    let classes: Api<StorageClass> = Api::all(world.client.clone());
    let created = classes.create(&PostParams::default(), &class).await;
    created.map_err(told).context("create the StorageClass")?;
    Ok(name)
}

/// Answers the volume's name.
async fn write(world: &World<'_>, class: &str) -> Result<String> {
    claims::create(world, &claim(FIRST, class, SIZE, "Filesystem", "ReadWriteOnce")?).await?;
    start(world, FIRST, FIRST, Use::Mounted, false).await?;
    exec_ok(&world.pods(), FIRST, &["/volume-check", "write", FILE, TEXT]).await?;
    end(world, FIRST).await?;
    Ok(claims::volume_of(world, FIRST).await?.name_any())
}

async fn release(world: &World<'_>, volume: &str) -> Result<()> {
    claims::delete(world, FIRST).await?;
    let released = claims::released(world, volume).await?;
    let says = |message: &str| message.contains(volume);
    until_event(&world.client, &released, &["VolumeRetained"], world.patience.start, says).await.map(drop)
}

/// As an administrator does it: the old claim is taken off the volume, and the new one names it.
async fn given(world: &World<'_>, class: &str, volume: &str) -> Result<()> {
    claims::patch_volume(world, volume, &json!({"spec": {"claimRef": null}})).await?;
    let mut second = claim(SECOND, class, SIZE, "Filesystem", "ReadWriteOnce")?;
    second.spec.get_or_insert_default().volume_name = Some(volume.to_owned());
    claims::create(world, &second).await?;
    start(world, SECOND, SECOND, Use::Mounted, false).await?;
    let read = exec_ok(&world.pods(), SECOND, &["/volume-check", "read", FILE]).await?;
    anyhow::ensure!(read == TEXT, "what was kept is not what is read: {read:?}");
    end(world, SECOND).await
}

async fn discard(world: &World<'_>, class: &str, volume: &str) -> Result<()> {
    let policy = json!({"spec": {"persistentVolumeReclaimPolicy": "Delete"}});
    claims::patch_volume(world, volume, &policy).await?;
    claims::delete(world, SECOND).await?;
    claims::gone(world, volume).await?;
    // It is not in the namespace that is deleted at the end.
    let classes: Api<StorageClass> = Api::all(world.client.clone());
    classes.delete(class, &DeleteParams::default()).await.map_err(told).context("delete the class").map(drop)
}

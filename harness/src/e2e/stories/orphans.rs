//! A volume whose object was deleted: the audit finds it, and a new object with its id brings it back.

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::PersistentVolume;
use kube::ResourceExt;
use kube::api::{DeleteParams, PostParams};
use serde_json::json;

use crate::cluster::api_error::told;
use crate::cluster::exec::{exec_in, exec_ok};
use crate::e2e::story::{Story, Told};
use crate::test_env::claims;
use crate::test_env::env::World;
use crate::test_env::pods::{end, start};
use crate::test_env::sizes::Size;
use crate::test_env::workload::{Use, claim};

pub(in crate::e2e) const NAME: &str = "orphans";

const SIZE: Size = Size::mebibytes(1);
const FIRST: &str = "orphaned";
const SECOND: &str = "adopting";
const FILE: &str = "/vol/file";
const TEXT: &str = "without an object";
/// As the manifests call the container and place its data, and as `provisioner/README.md` tells people.
const PROVISIONER: &str = "provisioner";
const AUDIT: [&str; 3] = ["/loopfs-provisioner", "--data-dir=/var/lib/loopfs/data", "--audit"];

pub(in crate::e2e) async fn tell(story: &mut Story<'_>, world: &World<'_>) -> Told {
    let volume = story.step("a pod writes to a claim", write(world)).await?;
    story.step("the audit finds nothing", listed(world, "")).await?;
    story.step("the volume's object is deleted, and its data kept", orphan(world, &volume)).await?;
    let finding = format!("volume-without-pv\t{}\n", volume.name_any());
    story.step("the audit finds the volume", listed(world, &finding)).await?;
    story.step("a new object brings its data back", adopt(world, &volume)).await?;
    story.step("the audit finds nothing again", listed(world, "")).await?;
    story
        .step("the volume goes with its claim", async {
            claims::delete(world, SECOND).await?;
            claims::gone(world, &volume.name_any()).await
        })
        .await
}

async fn write(world: &World<'_>) -> Result<PersistentVolume> {
    let class = world.driver.class_name();
    claims::create(world, &claim(FIRST, &class, SIZE, "Filesystem", "ReadWriteOnce")?).await?;
    start(world, FIRST, FIRST, Use::Mounted, false).await?;
    exec_ok(&world.pods(), FIRST, &["/volume-check", "write", FILE, TEXT]).await?;
    end(world, FIRST).await?;
    claims::volume_of(world, FIRST).await
}

/// Every provisioner's list must be this; only that of the volume's node has something to say.
async fn listed(world: &World<'_>, expected: &str) -> Result<()> {
    let mut lists = String::new();
    for pod in world.live_driver_pods().await? {
        let said = exec_in(&world.driver_pods(), &pod.name_any(), PROVISIONER, &AUDIT).await?;
        anyhow::ensure!(said.succeeded, "the audit failed: {}{}", said.stdout, said.stderr);
        lists.push_str(&said.stdout);
    }
    anyhow::ensure!(lists == expected, "the audit lists {lists:?}, not {expected:?}");
    Ok(())
}

async fn orphan(world: &World<'_>, volume: &PersistentVolume) -> Result<()> {
    let name = volume.name_any();
    let retain = json!({"spec": {"persistentVolumeReclaimPolicy": "Retain"}});
    claims::patch_volume(world, &name, &retain).await?;
    claims::delete(world, FIRST).await?;
    claims::released(world, &name).await?;
    let deleted = claims::volumes(world).delete(&name, &DeleteParams::default()).await;
    deleted.map_err(told).with_context(|| format!("delete volume {name}"))?;
    claims::gone(world, &name).await
}

/// The object as it was, without what the API server and the claim had put into it.
async fn adopt(world: &World<'_>, volume: &PersistentVolume) -> Result<()> {
    let mut object = PersistentVolume { spec: volume.spec.clone(), ..PersistentVolume::default() };
    object.metadata.name = volume.metadata.name.clone();
    object.metadata.labels = volume.metadata.labels.clone();
    object.metadata.annotations = volume.metadata.annotations.clone();
    object.spec.get_or_insert_default().claim_ref = None;
    let created = claims::volumes(world).create(&PostParams::default(), &object).await;
    created.map_err(told).context("create the volume's object again")?;
    let mut second = claim(SECOND, &world.driver.class_name(), SIZE, "Filesystem", "ReadWriteOnce")?;
    second.spec.get_or_insert_default().volume_name = object.metadata.name;
    claims::create(world, &second).await?;
    start(world, SECOND, SECOND, Use::Mounted, false).await?;
    let read = exec_ok(&world.pods(), SECOND, &["/volume-check", "read", FILE]).await?;
    anyhow::ensure!(read == TEXT, "what was written is not what is read: {read:?}");
    end(world, SECOND).await
}

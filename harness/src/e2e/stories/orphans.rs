//! A volume whose PersistentVolume was deleted. The audit lists it, and a new PersistentVolume with its id
//! makes it usable again.

use anyhow::Result;
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use kube::ResourceExt;
use serde_json::{Value, from_value, json};
use testvm::steps::{StepResult, Steps};
use testvm_cluster::exec::{exec_in, exec_ok, exec_with_input};
use testvm_cluster::objects;

use crate::e2e::sabotages::{add_volume, overwrite_files, remove_volume};
use crate::e2e::story::{Run, Sabotage, Story, When};
use crate::test_env::claims;
use crate::test_env::environment::TestEnv;
use crate::test_env::pods::{end, start};
use crate::test_env::sizes::Size;
use crate::test_env::workload::{VolumeMode, claim};

pub(in crate::e2e) const STORY: Story = Story {
    name: "orphans",
    about: "the audit lists a volume whose PersistentVolume was deleted",
    when: When::All,
    run: Run::AnyCluster(|steps, state| Box::pin(run(steps, state.env))),
    sabotages: &[
        Sabotage {
            name: "orphan",
            about: "A volume has no PersistentVolume before the story deletes one",
            before: "the audit finds nothing",
            change: |env| Box::pin(add_volume(env)),
            repair: Some(|env| Box::pin(remove_volume(env))),
            expected: &["the audit lists"],
        },
        Sabotage {
            name: "orphan-data",
            about: "The data of a volume is lost with its PersistentVolume",
            before: "a new object brings its data back",
            change: |env| Box::pin(overwrite_files(env)),
            repair: None,
            expected: &["the volume contains \"of another volume\""],
        },
    ],
};

const SIZE: Size = Size::mebibytes(1);
const FIRST: &str = "orphaned";
pub(super) const SECOND: &str = "adopting";
pub(super) const FILE: &str = "/vol/file";
pub(super) const TEXT: &str = "without an object";
/// The containers in the manifests, and the commands of `provisioner/README.md` and `docs/src/failures.md` for them.
const PROVISIONER: &str = "provisioner";
const DRIVER: &str = "csi";
const LIST: [&str; 5] = ["/loopfs", "--json", "store", "list", "/var/lib/loopfs/data"];
const RESTORE: [&str; 2] = ["/loopfs-provisioner", "restore-objects"];
const AUDIT: [&str; 4] =
    ["/loopfs-provisioner", "node", "--driver-socket=unix:///control/control.sock", "--audit"];

async fn run(steps: &mut Steps<'_>, env: &TestEnv<'_>) -> StepResult {
    let volume = steps.step("a pod writes to a claim", write(env)).await?;
    steps.step("the audit finds nothing", listed(env, "")).await?;
    steps.step("the volume's object is deleted, and its data kept", orphan(env, FIRST, &volume)).await?;
    let finding = format!("volume-without-pv\t{}\n", volume.name_any());
    steps.step("the audit finds the volume", listed(env, &finding)).await?;
    steps.step("a new object brings its data back", adopt(env, &volume)).await?;
    steps.step("the audit finds nothing again", listed(env, "")).await?;
    steps
        .step("the claim and the object are deleted, and the data kept", orphan(env, SECOND, &volume))
        .await?;
    steps
        .step("the volume's record brings back the claim that it was created for", restore(env, &volume))
        .await?;
    steps
        .step("the volume goes with its claim, once that is its policy", async {
            let delete = json!({"spec": {"persistentVolumeReclaimPolicy": "Delete"}});
            claims::patch_volume(env, &volume.name_any(), &delete).await?;
            claims::delete_with_volume(env, FIRST).await
        })
        .await
}

async fn write(env: &TestEnv<'_>) -> Result<PersistentVolume> {
    let class = env.driver.class_name();
    claims::create(env, &claim(FIRST, &class, SIZE, VolumeMode::Filesystem, "ReadWriteOnce")?).await?;
    start(env, FIRST, FIRST, VolumeMode::Filesystem).await?;
    exec_ok(&env.pods(), FIRST, &["/volume-check", "write", FILE, TEXT]).await?;
    end(env, FIRST).await?;
    claims::volume_of(env, FIRST).await
}

/// Checks the list of every provisioner. Only the list of the volume's node has entries.
async fn listed(env: &TestEnv<'_>, expected: &str) -> Result<()> {
    let mut lists = String::new();
    for pod in env.live_driver_pods().await? {
        let said = exec_in(&env.driver_pods(), &pod.name_any(), PROVISIONER, &AUDIT).await?;
        anyhow::ensure!(said.succeeded, "the audit failed: {}{}", said.stdout, said.stderr);
        lists.push_str(&said.stdout);
    }
    anyhow::ensure!(lists == expected, "the audit lists {lists:?}, not {expected:?}");
    Ok(())
}

async fn orphan(env: &TestEnv<'_>, claim: &str, volume: &PersistentVolume) -> Result<()> {
    let name = volume.name_any();
    let retain = json!({"spec": {"persistentVolumeReclaimPolicy": "Retain"}});
    claims::patch_volume(env, &name, &retain).await?;
    claims::delete(env, claim).await?;
    claims::released(env, &name).await?;
    objects::delete(&claims::volumes(env), &name).await?;
    claims::gone(env, &name).await
}

/// Creates the PersistentVolume again, without the fields that the API server and the claim had set.
pub(super) async fn adopt(env: &TestEnv<'_>, volume: &PersistentVolume) -> Result<()> {
    let mut object = PersistentVolume { spec: volume.spec.clone(), ..PersistentVolume::default() };
    object.metadata.name = volume.metadata.name.clone();
    object.metadata.labels = volume.metadata.labels.clone();
    object.metadata.annotations = volume.metadata.annotations.clone();
    let spec = object.spec.get_or_insert_default();
    spec.claim_ref = None;
    let class = spec.storage_class_name.clone().unwrap_or_default();
    objects::create(&claims::volumes(env), &object).await?;
    let mut second = claim(SECOND, &class, SIZE, VolumeMode::Filesystem, "ReadWriteOnce")?;
    second.spec.get_or_insert_default().volume_name = object.metadata.name;
    claims::create(env, &second).await?;
    read(env, SECOND).await
}

/// Reads the volume of a claim in a pod.
async fn read(env: &TestEnv<'_>, claim: &str) -> Result<()> {
    start(env, claim, claim, VolumeMode::Filesystem).await?;
    let read = exec_ok(&env.pods(), claim, &["/volume-check", "read", FILE]).await?;
    anyhow::ensure!(read == TEXT, "the volume contains {read:?} instead of {TEXT:?}");
    end(env, claim).await
}

/// Creates the objects of the volume from what its disk records, as `docs/src/failures.md` tells administrators who have lost a cluster.
async fn restore(env: &TestEnv<'_>, volume: &PersistentVolume) -> Result<()> {
    let name = volume.name_any();
    let (mut volumes, mut restored) = (0, 0);
    for pod in env.live_driver_pods().await? {
        let pod = pod.name_any();
        let list = exec_in(&env.driver_pods(), &pod, DRIVER, &LIST).await?;
        anyhow::ensure!(list.succeeded, "the list of volumes failed: {}", list.stderr);
        let objects = exec_with_input(&env.driver_pods(), &pod, PROVISIONER, &list.stdout, &RESTORE).await?;
        anyhow::ensure!(objects.succeeded, "restore-objects failed: {}", objects.stderr);
        let objects: Value = serde_json::from_str(&objects.stdout)?;
        for object in objects["items"].as_array().into_iter().flatten() {
            if object["metadata"]["name"] == *name {
                objects::create(&claims::volumes(env), &from_value::<PersistentVolume>(object.clone())?)
                    .await?;
                volumes += 1;
            } else if object["spec"]["volumeName"] == *name {
                claims::create(env, &from_value::<PersistentVolumeClaim>(object.clone())?).await?;
                restored += 1;
            }
        }
    }
    anyhow::ensure!(
        (volumes, restored) == (1, 1),
        "{volumes} volumes and {restored} claims of {name} were printed"
    );
    read(env, FIRST).await
}

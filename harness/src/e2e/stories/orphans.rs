//! A volume whose PersistentVolume and claim were deleted. The audit lists it, and the objects that its record on the disk describes make
//! it usable again.

use anyhow::Result;
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use kube::ResourceExt;
use serde_json::{Value, from_value, json};
use testvm::steps::{StepResult, Steps};
use testvm_cluster::exec::{exec_in, exec_with_input};
use testvm_cluster::objects;

use crate::e2e::sabotages::{add_volume, overwrite_files, remove_volume};
use crate::e2e::story::{Run, Sabotage, Story, When};
use crate::test_env::claims;
use crate::test_env::environment::TestEnv;
use crate::test_env::pods::{self, check_text, end, start, start_new};
use crate::test_env::sizes::Size;
use crate::test_env::workload::VolumeMode;

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
            before: "the volume's record brings back its objects, and a pod reads its data",
            change: |env| Box::pin(overwrite_files(env)),
            repair: None,
            expected: &["pod orphaned reads \"of another volume\""],
        },
    ],
};

const SIZE: Size = Size::mebibytes(1);
const CLAIM: &str = "orphaned";
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
    steps
        .step("the claim and the volume's object are deleted, and the data kept", orphan(env, &volume))
        .await?;
    let finding = format!("volume-without-pv\t{}\n", volume.name_any());
    steps.step("the audit finds the volume", listed(env, &finding)).await?;
    let title = "the volume's record brings back its objects, and a pod reads its data";
    steps.step(title, restore(env, &volume)).await?;
    steps.step("the audit finds nothing again", listed(env, "")).await?;
    let delete = json!({"spec": {"persistentVolumeReclaimPolicy": "Delete"}});
    let changed = async { claims::patch_volume(env, &volume.name_any(), &delete).await };
    steps.step("the volume is to be deleted with its claim", changed).await
}

async fn write(env: &TestEnv<'_>) -> Result<PersistentVolume> {
    start_new(env, CLAIM, SIZE, VolumeMode::Filesystem).await?;
    pods::write(env, CLAIM, FILE, TEXT).await?;
    end(env, CLAIM).await?;
    claims::volume_of(env, CLAIM).await
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

async fn orphan(env: &TestEnv<'_>, volume: &PersistentVolume) -> Result<()> {
    let name = volume.name_any();
    let retain = json!({"spec": {"persistentVolumeReclaimPolicy": "Retain"}});
    claims::patch_volume(env, &name, &retain).await?;
    claims::delete(env, CLAIM).await?;
    claims::released(env, &name).await?;
    objects::delete(&claims::volumes(env), &name).await?;
    claims::gone(env, &name).await
}

/// Reads the volume of a claim in a pod.
pub(super) async fn read(env: &TestEnv<'_>, claim: &str) -> Result<()> {
    start(env, claim, claim, VolumeMode::Filesystem).await?;
    check_text(env, claim, FILE, TEXT).await?;
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
    read(env, CLAIM).await
}

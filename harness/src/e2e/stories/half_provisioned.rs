//! The provisioner is killed after it created volumes and before it created their PersistentVolumes. Each
//! claim must get the volume that was created for it before. The volume of a claim that was deleted in the
//! meantime must be deleted.
//!
//! To hold that state, an admission policy rejects the provisioner's PersistentVolumes until the provisioner
//! is dead.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::Result;
use futures::future::try_join_all;
use testvm::steps::{StepResult, Steps};
use testvm_cluster::Node;
use tokio::time::{Instant, sleep};

use super::{outages, removal};
use crate::e2e::sabotages::{add_volume, remove_volume};
use crate::e2e::story::{Run, Sabotage, Story, When};
use crate::test_env::claims;
use crate::test_env::environment::TestEnv;
use crate::test_env::inventory::Inventory;
use crate::test_env::rejected_writes::{Rejected, allow, reject, was_rejected};
use crate::test_env::sizes::Size;
use crate::test_env::workload::{VolumeMode, claim};

pub(in crate::e2e) const STORY: Story = Story {
    name: "half-provisioned",
    about: "the provisioner is killed between a volume and its PersistentVolume",
    when: When::All,
    run: Run::OwnNode(|steps, state, _, node| Box::pin(run(steps, state.env, node))),
    sabotages: &[Sabotage {
        name: "second-volume",
        about: "A volume is created again",
        before: "the claims have the volumes that were made, and the deleted one has none",
        change: |env| Box::pin(add_volume(env)),
        repair: Some(|env| Box::pin(remove_volume(env))),
        expected: &["pvc-00000000", "and those that were made first are"],
    }],
};

const SIZE: Size = Size::mebibytes(1);
const KEPT: [(&str, VolumeMode); 2] =
    [("half-mounted", VolumeMode::Filesystem), ("half-device", VolumeMode::Block)];
const DELETED: (&str, VolumeMode) = ("half-deleted", VolumeMode::Filesystem);

/// The poll interval: no event announces that an unneeded volume is deleted.
const POLL_INTERVAL: Duration = Duration::from_millis(500);

async fn run(steps: &mut Steps<'_>, env: &TestEnv<'_>, node: &Node) -> StepResult {
    let before = steps.step("list what is on the node", Inventory::take(node)).await?;
    steps.step("the API server takes no objects of volumes", reject(env, Rejected::Creations)).await?;
    let made =
        steps.step("claims have volumes and no objects", create_volumes_only(env, node, &before)).await?;
    steps.step("the provisioner is killed, and one claim deleted", kill(env, node)).await?;
    steps.step("the API server takes objects again", allow(env)).await?;
    let title = "the claims have the volumes that were made, and the deleted one has none";
    steps.step(title, settled(env, node, &before, &made)).await?;
    steps.step("deleted with their claims, they leave nothing", remove(env, node, &before)).await
}

/// Waits until the provisioner has created a volume for each claim but no PersistentVolume, and returns the
/// volumes.
async fn create_volumes_only(env: &TestEnv<'_>, node: &Node, before: &Inventory) -> Result<BTreeSet<String>> {
    let all = || KEPT.iter().chain([&DELETED]);
    try_join_all(all().map(async |(name, mode)| {
        let object = claim(name, &env.driver.class_name(), SIZE, *mode, "ReadWriteOnce")?;
        let claim = claims::create(env, &claims::with_selected_node(object, node.name())).await?;
        // The provisioner has created the volume before this event.
        was_rejected(env, &claim, "ProvisioningFailed").await
    }))
    .await?;
    let volumes: BTreeSet<String> =
        Inventory::take(node).await?.volumes_added_since(before).into_iter().collect();
    anyhow::ensure!(volumes.len() == all().count(), "on the node are the volumes {volumes:?}");
    let objects = claims::with_objects(env, is_ours).await?;
    anyhow::ensure!(objects.is_empty(), "there are PersistentVolumes of {objects:?}");
    Ok(volumes)
}

async fn kill(env: &TestEnv<'_>, node: &Node) -> Result<()> {
    outages::kill_provisioner(env, node).await?;
    claims::delete(env, DELETED.0).await
}

async fn settled(env: &TestEnv<'_>, node: &Node, before: &Inventory, made: &BTreeSet<String>) -> Result<()> {
    let kept: BTreeSet<String> = KEPT.iter().map(|(name, _)| (*name).to_owned()).collect();
    outages::until_bound(env, &kept, kept.len()).await?;
    let deadline = Instant::now() + env.timeouts.end;
    loop {
        let volumes = Inventory::take(node).await?.volumes_added_since(before);
        anyhow::ensure!(
            volumes.iter().all(|volume| made.contains(volume)),
            "{volumes:?}, and those that were made first are {made:?}"
        );
        if volumes.len() == kept.len() {
            break;
        }
        anyhow::ensure!(Instant::now() < deadline, "{} claims, and the volumes {volumes:?}", kept.len());
        sleep(POLL_INTERVAL).await;
    }
    let objects = claims::with_objects(env, is_ours).await?;
    anyhow::ensure!(objects.iter().eq(&kept), "there are PersistentVolumes of {objects:?}");
    Ok(())
}

fn is_ours(claim: &str) -> bool {
    KEPT.iter().chain([&DELETED]).any(|(ours, _)| *ours == claim)
}

async fn remove(env: &TestEnv<'_>, node: &Node, before: &Inventory) -> Result<()> {
    for (name, _) in KEPT {
        claims::delete(env, name).await?;
    }
    removal::nothing_left(env, node, before).await
}

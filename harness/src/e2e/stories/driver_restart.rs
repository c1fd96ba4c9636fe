//! The driver's pods are replaced while volumes are in use, as an upgrade does.

use std::collections::BTreeSet;

use anyhow::{Context, Result};
use kube::ResourceExt;
use kube::api::{DeleteParams, PostParams};
use kube::runtime::watcher;

use super::install;
use crate::cluster::api_error::told;
use crate::cluster::exec::exec_ok;
use crate::cluster::waiting::{State, until};
use crate::e2e::story::{Story, Told};
use crate::test_env::env::World;
use crate::test_env::pods::{end, start};
use crate::test_env::sizes::Size;
use crate::test_env::workload::{FLOW_POD, Use, claim};

pub(in crate::e2e) const NAME: &str = "driver restart";

const SIZE: Size = Size::mebibytes(1);

pub(in crate::e2e) async fn tell(story: &mut Story<'_>, world: &World<'_>) -> Told {
    story.step("replace the driver's pods", replace(world)).await?;
    story.step("the new pods serve", install::served(world)).await?;
    story.step("a pod that was running keeps its volumes", still_used(world)).await?;
    story.step("a new claim is served", served(world)).await
}

/// Deletes the driver's pods and waits until others have taken their place.
pub(in crate::e2e) async fn replace(world: &World<'_>) -> Result<()> {
    let old: BTreeSet<String> = world.live_driver_pods().await?.iter().filter_map(ResourceExt::uid).collect();
    for pod in world.live_driver_pods().await? {
        let name = pod.name_any();
        let deleted = world.driver_pods().delete(&name, &DeleteParams::default()).await;
        deleted.map_err(told).with_context(|| format!("delete pod {name}"))?;
    }
    let scope = watcher::Config::default().labels(world.driver.pod_labels());
    until(world.driver_pods(), scope, world.patience.end, |pods| {
        let remaining = pods.values().filter(|pod| pod.uid().is_some_and(|uid| old.contains(&uid))).count();
        State::when(remaining == 0 && !pods.is_empty(), format!("{remaining} of {} still exist", old.len()))
    })
    .await
    .map(drop)
}

async fn still_used(world: &World<'_>) -> Result<()> {
    exec_ok(&world.pods(), FLOW_POD, &["/volume-check", "write", "/vol/default/after-restart", "text"])
        .await?;
    let read =
        exec_ok(&world.pods(), FLOW_POD, &["/volume-check", "read", "/vol/default/after-restart"]).await?;
    anyhow::ensure!(read == "text", "read back {read:?}");
    Ok(())
}

async fn served(world: &World<'_>) -> Result<()> {
    let claim = claim("after-restart", &world.driver.class_name(), SIZE, "Filesystem", "ReadWriteOnce")?;
    world.claims().create(&PostParams::default(), &claim).await.map_err(told).context("create the claim")?;
    start(world, "after-restart", "after-restart", Use::Mounted, false).await?;
    end(world, "after-restart").await
}

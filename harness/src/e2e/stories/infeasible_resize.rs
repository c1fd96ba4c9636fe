//! More is asked than the node has, then less: the request is refused, and mended while the pod runs.

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use kube::api::{Patch, PatchParams};
use serde_json::json;

use crate::cluster::api_error::told;
use crate::cluster::waiting::{State, until_event, until_one};
use crate::e2e::claims;
use crate::e2e::pods::{end, start};
use crate::e2e::sizes::Size;
use crate::e2e::story::{Story, Told};
use crate::e2e::talking::exec_ok;
use crate::e2e::workload::{Use, claim};
use crate::e2e::world::World;

pub(in crate::e2e) const NAME: &str = "infeasible resize";

const CLAIM: &str = "infeasible";
const SIZE: Size = Size::mebibytes(1);
/// More than any node's file system.
const TOO_LARGE: Size = Size::mebibytes(1 << 30);
/// Less than was refused, and more than there is.
const REDUCED: Size = Size::mebibytes(3);

pub(in crate::e2e) async fn tell(story: &mut Story<'_>, world: &World<'_>) -> Told {
    story
        .step("a pod uses a claim of 1Mi", async {
            let object = claim(CLAIM, &world.driver.class_name(), SIZE, "Filesystem", "ReadWriteOnce")?;
            claims::create(world, &object).await?;
            start(world, CLAIM, CLAIM, Use::Mounted, false).await
        })
        .await?;
    story.step("more than the node has is refused", refused(world)).await?;
    story.step("the pod goes on with what it had", sees(world, SIZE)).await?;
    story.step("a reduced request is met", met(world)).await?;
    story.step("the pod sees it", sees(world, REDUCED)).await?;
    story.step("the pod ends", end(world, CLAIM)).await
}

async fn ask(world: &World<'_>, size: Size) -> Result<()> {
    let patch = json!({"spec": {"resources": {"requests": {"storage": size.quantity()}}}});
    let patched = world.claims().patch(CLAIM, &PatchParams::default(), &Patch::Merge(patch)).await;
    patched.map_err(told).with_context(|| format!("ask for {}", size.quantity())).map(drop)
}

async fn refused(world: &World<'_>) -> Result<()> {
    ask(world, TOO_LARGE).await?;
    let claim = until_one(world.claims(), CLAIM, world.patience.grow, |claim| {
        let state = claim.and_then(resize_state);
        State::when(state == Some("ControllerResizeInfeasible"), format!("its resize is {state:?}"))
    })
    .await?
    .context("the claim is gone")?;
    let says = |message: &str| message.contains("available");
    until_event(&world.client, &claim, &["VolumeResizeFailed"], world.patience.start, says).await.map(drop)
}

async fn met(world: &World<'_>) -> Result<()> {
    ask(world, REDUCED).await?;
    let asked = Quantity(REDUCED.quantity());
    until_one(world.claims(), CLAIM, world.patience.grow, |claim| {
        let status = claim.and_then(|claim| claim.status.as_ref());
        let capacity = status.and_then(|status| status.capacity.as_ref()?.get("storage"));
        let state = claim.and_then(resize_state);
        let settled = capacity == Some(&asked) && state.is_none();
        State::when(settled, format!("it has {capacity:?}, and its resize is {state:?}"))
    })
    .await
    .map(drop)
}

fn resize_state(claim: &PersistentVolumeClaim) -> Option<&str> {
    let states = claim.status.as_ref()?.allocated_resource_statuses.as_ref()?;
    states.get("storage").map(String::as_str)
}

async fn sees(world: &World<'_>, size: Size) -> Result<()> {
    let shown = exec_ok(&world.pods(), CLAIM, &["/volume-check", "show", "/vol"]).await?;
    let expected = format!("{} bytes", size.bytes());
    anyhow::ensure!(shown.contains(&expected), "expected {expected} in {shown:?}");
    Ok(())
}

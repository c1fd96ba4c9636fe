//! More is asked than the node has, then less: the request is refused, and mended while the pod runs.

use anyhow::{Context, Result};

use crate::cluster::exec::exec_ok;
use crate::cluster::waiting::{State, until_event, until_one};
use crate::e2e::story::{Story, Told};
use crate::test_env::claims;
use crate::test_env::env::World;
use crate::test_env::pods::{end, start};
use crate::test_env::sizes::Size;
use crate::test_env::workload::{Use, claim};

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

async fn refused(world: &World<'_>) -> Result<()> {
    claims::ask(world, CLAIM, TOO_LARGE).await?;
    let claim = until_one(world.claims(), CLAIM, world.patience.grow, |claim| {
        let state = claim.and_then(claims::resize_state);
        State::when(state == Some("ControllerResizeInfeasible"), format!("its resize is {state:?}"))
    })
    .await?
    .context("the claim is gone")?;
    let says = |message: &str| message.contains("available");
    until_event(&world.client, &claim, &["VolumeResizeFailed"], world.patience.start, says).await.map(drop)
}

async fn met(world: &World<'_>) -> Result<()> {
    claims::ask(world, CLAIM, REDUCED).await?;
    claims::has(world, CLAIM, REDUCED).await
}

async fn sees(world: &World<'_>, size: Size) -> Result<()> {
    let shown = exec_ok(&world.pods(), CLAIM, &["/volume-check", "show", "/vol"]).await?;
    let expected = format!("{} bytes", size.bytes());
    anyhow::ensure!(shown.contains(&expected), "expected {expected} in {shown:?}");
    Ok(())
}

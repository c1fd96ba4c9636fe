//! Kubernetes is made to give up a claim that a pod uses: the volume stays, says why, and goes when the pod has ended.

use anyhow::{Context, Result};
use kube::ResourceExt;
use kube::api::{Patch, PatchParams};
use serde_json::json;

use crate::cluster::api_error::told;
use crate::cluster::waiting::{State, until_event, until_one};
use crate::e2e::story::{Story, Told};
use crate::test_env::claims;
use crate::test_env::env::World;
use crate::test_env::pods::{end, reads, start, write};
use crate::test_env::sizes::Size;
use crate::test_env::workload::{Use, claim};

pub(in crate::e2e) const NAME: &str = "deletion in use";

const SIZE: Size = Size::mebibytes(1);
const TEXT: &str = "still here";

pub(in crate::e2e) async fn tell(story: &mut Story<'_>, world: &World<'_>) -> Told {
    for (mode, r#use, file) in [("Filesystem", Use::Mounted, "/vol/file"), ("Block", Use::Device, "/vol")] {
        let name = format!("in-use-{}", mode.to_lowercase());
        let volume = story
            .step(&format!("{mode}: a pod writes to a claim"), async {
                let object = claim(&name, &world.driver.class_name(), SIZE, mode, "ReadWriteOnce")?;
                claims::create(world, &object).await?;
                start(world, &name, &name, r#use, false).await?;
                write(world, &name, r#use, file, TEXT).await?;
                Ok(claims::volume_of(world, &name).await?.name_any())
            })
            .await?;
        story
            .step(&format!("{mode}: the claim is forced away, and the volume says who uses it"), async {
                force_away(world, &name).await?;
                let released = claims::released(world, &volume).await?;
                let says = |message: &str| message.contains("use");
                let reasons = ["VolumeFailedDelete"];
                until_event(&world.client, &released, &reasons, world.patience.start, says).await.map(drop)
            })
            .await?;
        story.step(&format!("{mode}: the pod still has its data"), reads(world, &name, file, TEXT)).await?;
        story
            .step(&format!("{mode}: the pod ends, and the volume goes"), async {
                end(world, &name).await?;
                claims::gone(world, &volume).await
            })
            .await?;
    }
    Ok(())
}

/// Deletes the claim, and takes off what keeps it while a pod uses it.
async fn force_away(world: &World<'_>, claim: &str) -> Result<()> {
    claims::delete(world, claim).await?;
    let unprotected = Patch::Merge(json!({"metadata": {"finalizers": null}}));
    let patched = world.claims().patch(claim, &PatchParams::default(), &unprotected).await;
    patched.map_err(told).with_context(|| format!("take the finalizers off claim {claim}"))?;
    until_one(world.claims(), claim, world.patience.end, |claim| {
        State::when(claim.is_none(), "it still exists")
    })
    .await
    .with_context(|| format!("claim {claim} does not go"))
    .map(drop)
}

//! Claims that a pod asks for read-only: the driver itself publishes them so.

use anyhow::Result;

use crate::cluster::exec::exec;
use crate::e2e::story::{Story, Told};
use crate::test_env::claims;
use crate::test_env::env::World;
use crate::test_env::pods::{self, end, start};
use crate::test_env::sizes::Size;
use crate::test_env::workload::{Use, claim};

pub(in crate::e2e) const NAME: &str = "read-only claims";

const SIZE: Size = Size::mebibytes(2);
const TEXT: &str = "written before";

pub(in crate::e2e) async fn tell(story: &mut Story<'_>, world: &World<'_>) -> Told {
    for (name, mode, r#use, file) in
        [("mounted", "Filesystem", Use::Mounted, "/vol/file"), ("device", "Block", Use::Device, "/vol")]
    {
        let claim_name = format!("read-only-{name}");
        story
            .step(&format!("{name}: a pod writes to it"), write(world, &claim_name, mode, r#use, file))
            .await?;
        let reader = format!("{claim_name}-reader");
        story
            .step(&format!("{name}: a pod that asked for it read-only reads it"), async {
                start(world, &reader, &claim_name, r#use, true).await?;
                pods::reads(world, &reader, file, TEXT).await
            })
            .await?;
        story
            .step(&format!("{name}: the same pod cannot write to it"), async {
                let said = exec(&world.pods(), &reader, &["/volume-check", "poke", file, "no"]).await?;
                anyhow::ensure!(!said.succeeded, "a write was allowed on the read-only volume");
                let refused =
                    ["os error 30", "os error 1)", "os error 13"].iter().any(|e| said.stderr.contains(e));
                anyhow::ensure!(refused, "the write failed, but not because of the volume: {}", said.stderr);
                Ok(())
            })
            .await?;
        story.step(&format!("{name}: the pod ends"), end(world, &reader)).await?;
    }
    Ok(())
}

async fn write(world: &World<'_>, claim_name: &str, mode: &str, r#use: Use, file: &str) -> Result<()> {
    let class = world.driver.class_name();
    let claim = claim(claim_name, &class, SIZE, mode, "ReadWriteOnce")?;
    claims::create(world, &claim).await?;
    let writer = format!("{claim_name}-writer");
    start(world, &writer, claim_name, r#use, false).await?;
    pods::write(world, &writer, r#use, file, TEXT).await?;
    end(world, &writer).await
}

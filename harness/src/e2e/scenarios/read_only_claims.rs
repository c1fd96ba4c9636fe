//! Claims that a pod mounts read-only: the driver itself publishes them read-only.

use anyhow::Result;
use testvm_cluster::exec::exec;

use crate::e2e::scenario::{Scenario, StepResult};
use crate::test_env::claims;
use crate::test_env::environment::TestEnv;
use crate::test_env::pods::{self, end, start};
use crate::test_env::sizes::Size;
use crate::test_env::workload::{Use, claim};

pub(in crate::e2e) const NAME: &str = "read-only claims";

const SIZE: Size = Size::mebibytes(2);
const TEXT: &str = "written before";

pub(in crate::e2e) async fn run(scenario: &mut Scenario<'_>, env: &TestEnv<'_>) -> StepResult {
    for (name, mode, r#use, file) in
        [("mounted", "Filesystem", Use::Mounted, "/vol/file"), ("device", "Block", Use::Device, "/vol")]
    {
        let claim_name = format!("read-only-{name}");
        scenario
            .step(&format!("{name}: a pod writes to it"), write(env, &claim_name, mode, r#use, file))
            .await?;
        let reader = format!("{claim_name}-reader");
        scenario
            .step(&format!("{name}: a pod that asked for it read-only reads it"), async {
                start(env, &reader, &claim_name, r#use, true).await?;
                pods::reads(env, &reader, file, TEXT).await
            })
            .await?;
        scenario
            .step(&format!("{name}: the same pod cannot write to it"), async {
                let said = exec(&env.pods(), &reader, &["/volume-check", "write-at", file, "no"]).await?;
                anyhow::ensure!(!said.succeeded, "a write was allowed on the read-only volume");
                let refused =
                    ["os error 30", "os error 1)", "os error 13"].iter().any(|e| said.stderr.contains(e));
                anyhow::ensure!(refused, "the write failed, but not because of the volume: {}", said.stderr);
                Ok(())
            })
            .await?;
        scenario.step(&format!("{name}: the pod ends"), end(env, &reader)).await?;
    }
    Ok(())
}

async fn write(env: &TestEnv<'_>, claim_name: &str, mode: &str, r#use: Use, file: &str) -> Result<()> {
    let class = env.driver.class_name();
    let claim = claim(claim_name, &class, SIZE, mode, "ReadWriteOnce")?;
    claims::create(env, &claim).await?;
    let writer = format!("{claim_name}-writer");
    start(env, &writer, claim_name, r#use, false).await?;
    pods::write(env, &writer, r#use, file, TEXT).await?;
    end(env, &writer).await
}

//! A pod that requests its claim read-only can read the volume but not write to it. The kubelet passes the request on to
//! the driver, and the driver itself publishes the volume read-only.

use anyhow::Result;
use testvm::steps::{StepResult, Steps};
use testvm_cluster::exec::exec;

use crate::e2e::sabotages::{mount_writable, replace_pod};
use crate::e2e::story::{Run, Sabotage, Story, When};
use crate::test_env::claims;
use crate::test_env::environment::TestEnv;
use crate::test_env::pods::{self, end, start, start_read_only};
use crate::test_env::sizes::Size;
use crate::test_env::workload::{VolumeMode, claim};

pub(in crate::e2e) const STORY: Story = Story {
    name: "read-only-claims",
    about: "a pod that requests its claim read-only cannot write to it",
    when: When::Main,
    run: Run::AnyCluster(|steps, state| Box::pin(run(steps, state.env))),
    sabotages: &[Sabotage {
        name: "writable-claim",
        about: "The pod has the claim that it requests read-only writable",
        before: "the same pod cannot write to the volume",
        change: |env| Box::pin(replace_pod(env, "read-only-filesystem-reader", mount_writable)),
        repair: None,
        expected: &["a write was allowed on the read-only volume"],
    }],
};

const SIZE: Size = Size::mebibytes(2);
const TEXT: &str = "written before";

/// How the kernel refuses a write: EROFS, EPERM or EACCES, as the test program prints them. The parenthesis tells EPERM,
/// which is 1, apart from the numbers that begin with 1.
const WRITE_REFUSED: [&str; 3] = ["os error 30", "os error 1)", "os error 13"];

async fn run(steps: &mut Steps<'_>, env: &TestEnv<'_>) -> StepResult {
    for (mode, file) in [(VolumeMode::Filesystem, "/vol/file"), (VolumeMode::Block, "/vol")] {
        let claim_name = format!("read-only-{}", mode.as_str().to_lowercase());
        let reader = format!("{claim_name}-reader");
        steps
            .step(
                &format!("{mode}: a pod writes to the volume"),
                create_and_write(env, &claim_name, mode, file),
            )
            .await?;
        steps
            .step(&format!("{mode}: a pod that requests the claim read-only reads the volume"), async {
                start_read_only(env, &reader, &claim_name, mode).await?;
                pods::check_text(env, &reader, file, TEXT).await
            })
            .await?;
        steps
            .step(
                &format!("{mode}: the same pod cannot write to the volume"),
                check_write_refused(env, &reader, file),
            )
            .await?;
        steps.step(&format!("{mode}: the pod ends"), end(env, &reader)).await?;
    }
    Ok(())
}

/// Creates the claim, and writes to its volume in a pod that has ended when this returns.
async fn create_and_write(env: &TestEnv<'_>, claim_name: &str, mode: VolumeMode, file: &str) -> Result<()> {
    let class = env.driver.class_name();
    let claim = claim(claim_name, &class, SIZE, mode, "ReadWriteOnce")?;
    claims::create(env, &claim).await?;
    let writer = format!("{claim_name}-writer");
    start(env, &writer, claim_name, mode).await?;
    pods::write(env, &writer, file, TEXT).await?;
    end(env, &writer).await
}

async fn check_write_refused(env: &TestEnv<'_>, pod: &str, file: &str) -> Result<()> {
    let output = exec(&env.pods(), pod, &["/volume-check", "write", file, "overwritten"]).await?;
    anyhow::ensure!(!output.succeeded, "a write was allowed on the read-only volume");
    let refused = WRITE_REFUSED.iter().any(|error| output.stderr.contains(error));
    anyhow::ensure!(refused, "the write failed, but not because the volume is read-only: {}", output.stderr);
    Ok(())
}

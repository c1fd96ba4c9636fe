//! A pod that requests its claims read-only can read the volumes but not write to them. The kubelet passes the request on to
//! the driver, and the driver itself publishes the volumes read-only.

use anyhow::Result;
use testvm::steps::{StepResult, Steps};
use testvm_cluster::exec::exec;

use crate::e2e::parts::both_modes::{self, FILES};
use crate::e2e::sabotages::{mount_writable, replace_pod};
use crate::e2e::story::{Run, Sabotage, Story, When};
use crate::test_env::environment::TestEnv;
use crate::test_env::pods::end;
use crate::test_env::sizes::Size;

pub(in crate::e2e) const STORY: Story = Story {
    name: "read-only-claims",
    about: "a pod that requests its claims read-only cannot write to them",
    when: When::Main,
    run: Run::AnyCluster(|steps, state| Box::pin(run(steps, state.env))),
    sabotages: &[Sabotage {
        name: "writable-claim",
        about: "The pod has the claims that it requests read-only writable",
        before: "the same pod cannot write to the volumes",
        change: |env| Box::pin(replace_pod(env, READER, mount_writable)),
        repair: None,
        expected: &["a write was allowed on the read-only volume"],
    }],
};

const SIZE: Size = Size::mebibytes(2);
const WRITER: &str = "read-only";
const READER: &str = "read-only-reader";
const TEXT: &str = "written before";

/// How the kernel refuses a write: EROFS, EPERM or EACCES, as the test program prints them. The parenthesis tells EPERM,
/// which is 1, apart from the numbers that begin with 1.
const WRITE_REFUSED: [&str; 3] = ["os error 30", "os error 1)", "os error 13"];

async fn run(steps: &mut Steps<'_>, env: &TestEnv<'_>) -> StepResult {
    let written = async {
        both_modes::start_new(env, WRITER, SIZE).await?;
        both_modes::write(env, WRITER, TEXT).await?;
        end(env, WRITER).await
    };
    steps.step("a pod writes to a mounted and a block volume", written).await?;
    let read = async {
        both_modes::start(env, READER, WRITER, true).await?;
        both_modes::check_text(env, READER, TEXT).await
    };
    steps.step("a pod that requests the claims read-only reads the volumes", read).await?;
    steps.step("the same pod cannot write to the volumes", check_writes_refused(env)).await
}

async fn check_writes_refused(env: &TestEnv<'_>) -> Result<()> {
    for (_, file) in FILES {
        let output = exec(&env.pods(), READER, &["/volume-check", "write", file, "overwritten"]).await?;
        anyhow::ensure!(!output.succeeded, "a write was allowed on the read-only volume at {file}");
        let refused = WRITE_REFUSED.iter().any(|error| output.stderr.contains(error));
        anyhow::ensure!(
            refused,
            "the write to {file} failed, but not because the volume is read-only: {}",
            output.stderr
        );
    }
    Ok(())
}

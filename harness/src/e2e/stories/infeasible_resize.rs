//! A claim requests more than the node has, and then less. The first request is rejected, and the second
//! succeeds while the pod runs.

use anyhow::{Context, Result};
use testvm::steps::{StepResult, Steps};
use testvm_cluster::waiting::{State, until_event, until_one};

use crate::e2e::sabotages::on_node;
use crate::e2e::story::{Run, Sabotage, Story, When};
use crate::test_env::claims;
use crate::test_env::environment::TestEnv;
use crate::test_env::pods::{self, end, start};
use crate::test_env::sizes::Size;
use crate::test_env::workload::{VolumeMode, claim};

pub(in crate::e2e) const STORY: Story = Story {
    name: "infeasible-resize",
    about: "an expansion beyond the node's space is rejected, a smaller one succeeds",
    when: When::All,
    run: Run::AnyCluster(|steps, state| Box::pin(run(steps, state.env))),
    sabotages: &[Sabotage {
        name: "rejected-resize",
        about: "A volume has grown although its expansion was rejected",
        before: "the pod goes on with what it had",
        change: |env| Box::pin(on_node(env, DOUBLE_LIMITS)),
        repair: None,
        expected: &["expected 1048576 bytes in"],
    }],
};

const CLAIM: &str = "infeasible";
const SIZE: Size = Size::mebibytes(1);
/// A size that exceeds every node's file system.
const TOO_LARGE: Size = Size::mebibytes(1 << 30);
/// A size less than the rejected one and greater than the current one.
const REDUCED: Size = Size::mebibytes(3);
const DOUBLE_LIMITS: &str = "for volume in DATA/volumes/*; do TOOL quota set --bytes 2MiB \"$volume\"; done";

async fn run(steps: &mut Steps<'_>, env: &TestEnv<'_>) -> StepResult {
    steps
        .step("a pod uses a claim of 1Mi", async {
            let object =
                claim(CLAIM, &env.driver.class_name(), SIZE, VolumeMode::Filesystem, "ReadWriteOnce")?;
            claims::create(env, &object).await?;
            start(env, CLAIM, CLAIM, VolumeMode::Filesystem).await
        })
        .await?;
    steps.step("more than the node has is refused", refused(env)).await?;
    steps.step("the pod goes on with what it had", sees(env, SIZE)).await?;
    steps.step("a reduced request is met", met(env)).await?;
    steps.step("the pod sees it", sees(env, REDUCED)).await?;
    steps.step("the pod ends", end(env, CLAIM)).await
}

async fn refused(env: &TestEnv<'_>) -> Result<()> {
    claims::request_size(env, CLAIM, TOO_LARGE).await?;
    let claim = until_one(env.claims(), CLAIM, env.timeouts.grow, |claim| {
        let state = claim.and_then(claims::resize_state);
        State::ready_if(state == Some("ControllerResizeInfeasible"), format!("its resize is {state:?}"))
    })
    .await?
    .context("the claim is gone")?;
    let says = |message: &str| message.contains("available");
    until_event(&env.client, &claim, &["VolumeResizeFailed"], env.timeouts.start, says).await.map(drop)
}

async fn met(env: &TestEnv<'_>) -> Result<()> {
    claims::request_size(env, CLAIM, REDUCED).await?;
    claims::until_expanded(env, CLAIM, REDUCED).await
}

async fn sees(env: &TestEnv<'_>, size: Size) -> Result<()> {
    pods::check_new(env, CLAIM, size, &["writable:/vol"]).await
}

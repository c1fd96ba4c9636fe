//! The check after each story that no container of the driver restarted, and that no pod of it was replaced, unless the story
//! caused it. `kubectl` shows a driver that panics and is started again as ready, and most stories would pass.

use anyhow::Result;
use testvm::report::Report;
use testvm::session::Session;
use testvm::steps::{StepResult, Steps};
use testvm_cluster::restarts::Watch;

use crate::test_env::disturbances::watched;
use crate::test_env::environment::TestEnv;

/// The name of the suite in the report.
pub(super) const NAME: &str = "restarts";

/// Starts to watch the containers of the driver.
pub(super) async fn watch(session: &Session, report: &mut Report, env: &TestEnv<'_>) -> StepResult<Watch> {
    let mut steps = Steps::begin(session, report, NAME);
    steps.step("watch the containers of the driver", Watch::start(watched(env), &env.caused)).await
}

/// Checks what happened to the containers since the last check.
pub(super) async fn check(
    steps: &mut Steps<'_>,
    watch: &mut Watch,
    env: &TestEnv<'_>,
    after: &str,
) -> StepResult {
    let title = format!("after {after}: no container has restarted or panicked unless the story caused it");
    steps.step(&title, none_unexpected(watch, env)).await
}

async fn none_unexpected(watch: &mut Watch, env: &TestEnv<'_>) -> Result<()> {
    let unexpected = watch.unexpected(&env.caused).await?;
    anyhow::ensure!(unexpected.is_empty(), "{}", unexpected.join("\n"));
    Ok(())
}

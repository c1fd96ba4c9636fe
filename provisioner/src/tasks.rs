//! The tasks of the process: their names, and how they end.

use anyhow::anyhow;
use tokio_util::sync::CancellationToken;

/// Runs a task until it ends or `stop` is cancelled.
pub(crate) async fn until(stop: CancellationToken, task: impl Future<Output = ()>) {
    // The task can be cancelled at any await, because it is then between two independent steps.
    stop.run_until_cancelled_owned(task).await;
}

/// Runs a task and returns its name when it ends.
pub(crate) async fn named(name: &'static str, task: impl Future<Output = ()>) -> &'static str {
    task.await;
    name
}

/// Returns the error of a task that ended before a signal.
pub(crate) fn ended_early(ended: Option<Result<&'static str, tokio::task::JoinError>>) -> anyhow::Error {
    match ended {
        Some(Ok(name)) => anyhow!("the task {name:?} ended unexpectedly"),
        Some(Err(error)) => anyhow!(error).context("a task failed"),
        None => anyhow!("there was no task"),
    }
}

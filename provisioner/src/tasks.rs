//! The tasks of the process: their names, and how they end.

use anyhow::anyhow;
use tokio_util::sync::CancellationToken;

pub(crate) async fn until(stop: CancellationToken, task: impl Future<Output = ()>) {
    // Cancelled is as good as done: such a task is at any await between two steps of which each stands alone.
    stop.run_until_cancelled_owned(task).await;
}

pub(crate) async fn named(name: &'static str, task: impl Future<Output = ()>) -> &'static str {
    task.await;
    name
}

pub(crate) fn ended_early(ended: Option<Result<&'static str, tokio::task::JoinError>>) -> anyhow::Error {
    match ended {
        Some(Ok(name)) => anyhow!("the task {name:?} ended on its own"),
        Some(Err(error)) => anyhow!(error).context("a task failed"),
        None => anyhow!("there was no task"),
    }
}

//! The tasks of a process.

use std::time::Duration;

use anyhow::{Context, anyhow};
use tokio::task::{JoinError, JoinSet};
use tokio_util::sync::CancellationToken;

/// The tasks of a process. Each is needed, so the end of one before the shutdown is an error that ends the process. Dropping the value
/// aborts them.
#[derive(Debug)]
pub struct Tasks {
    set: JoinSet<(&'static str, anyhow::Result<()>)>,
    stop: CancellationToken,
}

impl Tasks {
    /// Creates an empty set, whose tasks end after `stop` was cancelled.
    #[must_use]
    pub fn new(stop: CancellationToken) -> Self {
        Self { set: JoinSet::new(), stop }
    }

    /// Returns the token that requests the end of all tasks.
    #[must_use]
    pub fn stop(&self) -> &CancellationToken {
        &self.stop
    }

    /// Spawns a task that ends by itself after `stop`.
    pub fn spawn(&mut self, name: &'static str, task: impl Future<Output = ()> + Send + 'static) {
        // On the heap: each of the wrappers would copy a large future on the stack.
        let task = Box::pin(task);
        self.try_spawn(name, async {
            task.await;
            Ok(())
        });
    }

    /// Spawns such a task, which may fail.
    pub fn try_spawn(
        &mut self,
        name: &'static str,
        task: impl Future<Output = anyhow::Result<()>> + Send + 'static,
    ) {
        self.set.spawn(async move { (name, task.await) });
    }

    /// Spawns a task that is dropped at `stop`, at any of its awaits, because it is then between two independent steps.
    pub fn spawn_until_stop(&mut self, name: &'static str, task: impl Future<Output = ()> + Send + 'static) {
        let (stop, task) = (self.stop.clone(), Box::pin(task));
        self.spawn(name, async move {
            stop.run_until_cancelled_owned(task).await;
        });
    }

    /// Waits until `stop`, and then for all tasks, for at most `grace`. If a task ends before `stop`, cancels it.
    ///
    /// # Errors
    /// The error of the first task that failed, which is the cause of others; or a task ended before `stop`.
    pub async fn finish(mut self, grace: Duration) -> anyhow::Result<()> {
        let stop = self.stop.clone();
        let mut outcome = tokio::select! {
            biased;
            () = stop.cancelled() => Ok(()),
            error = self.ended_early() => Err(error),
        };
        stop.cancel();
        let rest = async {
            while let Some(ended) = self.set.join_next().await {
                outcome = std::mem::replace(&mut outcome, Ok(())).and(result(ended));
            }
        };
        if tokio::time::timeout(grace, rest).await.is_err() {
            tracing::warn!(
                ?grace,
                "the shutdown timeout has passed; operations in progress are aborted, and the next process continues them"
            );
        }
        outcome
    }

    /// Waits for the first task to end, and returns the error that this is before `stop`.
    pub async fn ended_early(&mut self) -> anyhow::Error {
        match self.set.join_next().await {
            None => anyhow!("there was no task"),
            Some(Ok((name, Ok(())))) => anyhow!("the task {name:?} ended unexpectedly"),
            Some(ended) => result(ended).expect_err("the task has failed"),
        }
    }

    /// Ends all tasks at their next await, as a SIGKILL would.
    pub async fn abort(mut self) {
        self.set.shutdown().await;
    }
}

fn result(ended: Result<(&'static str, anyhow::Result<()>), JoinError>) -> anyhow::Result<()> {
    let (name, result) = ended.context("a task failed")?;
    result.with_context(|| format!("the task {name:?} failed"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const GRACE: Duration = Duration::from_secs(10);

    fn tasks() -> Tasks {
        Tasks::new(CancellationToken::new())
    }

    /// Adds a task that fails after `stop`.
    fn add_failing(tasks: &mut Tasks) {
        let stop = tasks.stop().clone();
        tasks.try_spawn("second", async move {
            stop.cancelled().await;
            Err(anyhow!("no socket"))
        });
    }

    #[tokio::test]
    async fn ending_task_stops_the_others() {
        let mut tasks = tasks();
        tasks.spawn_until_stop("first", std::future::pending());
        tasks.spawn("short", async {});
        let error = tasks.finish(GRACE).await.unwrap_err();
        assert_eq!(error.to_string(), r#"the task "short" ended unexpectedly"#);
    }

    #[tokio::test]
    async fn the_first_error_is_returned() {
        let mut tasks = tasks();
        add_failing(&mut tasks);
        tasks.try_spawn("first", async { Err(anyhow!("no disk")) });
        let error = tasks.finish(GRACE).await.unwrap_err();
        assert_eq!(format!("{error:#}"), r#"the task "first" failed: no disk"#);
    }

    #[tokio::test]
    async fn error_after_stop_is_returned() {
        let mut tasks = tasks();
        add_failing(&mut tasks);
        tasks.stop().cancel();
        assert_eq!(
            format!("{:#}", tasks.finish(GRACE).await.unwrap_err()),
            r#"the task "second" failed: no socket"#
        );
    }

    #[tokio::test(start_paused = true)]
    async fn stuck_task_is_aborted() {
        let mut tasks = tasks();
        tasks.spawn("stuck", std::future::pending());
        tasks.stop().cancel();
        let before = tokio::time::Instant::now();
        tasks.finish(GRACE).await.unwrap();
        assert_eq!(before.elapsed(), GRACE);
    }

    #[tokio::test]
    async fn a_panic_is_an_error() {
        let mut tasks = tasks();
        tasks.spawn("panics", async { panic!("no reason") });
        assert!(format!("{:#}", tasks.finish(GRACE).await.unwrap_err()).contains("panicked"));
    }
}

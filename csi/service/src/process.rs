//! The process of a program: its log, its threads, and the signals that end it.

use std::process::ExitCode;

use anyhow::Context;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use tokio::runtime;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use crate::args::LogArgs;

/// Threads for everything that does not block. One for each processor, as is the default, would take more memory on a larger machine.
const WORKERS: usize = 2;

/// Runs a program until it ends. SIGTERM and SIGINT cancel the token, and the program then finishes its operations in progress. An error
/// is logged, and the exit code is 1.
pub fn run<S>(log: &LogArgs, serve: impl FnOnce(CancellationToken) -> S) -> ExitCode
where
    S: Future<Output = anyhow::Result<()>>,
{
    log.init();
    if let Err(error) = raise_descriptor_limit() {
        tracing::warn!(%error, "could not raise the limit on open files (RLIMIT_NOFILE); it stays as it is");
    }
    let runtime = runtime::Builder::new_multi_thread().worker_threads(WORKERS).enable_all().build();
    let ended = runtime.context("start the threads of the program").and_then(|runtime| {
        let ended = runtime.block_on(until_signal(serve));
        // A blocking call may be waiting for a disk that hangs, or removing a million files. Each is safe to interrupt.
        runtime.shutdown_background();
        ended
    });
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Permits as many descriptors as the hard limit does. The soft limit is usually 1024, because select(2) works with no larger descriptor. The
/// programs do not use it.
fn raise_descriptor_limit() -> nix::Result<()> {
    let (_soft, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard)
}

async fn until_signal<S>(serve: impl FnOnce(CancellationToken) -> S) -> anyhow::Result<()>
where
    S: Future<Output = anyhow::Result<()>>,
{
    let stop = CancellationToken::new();
    let mut terminate = signal(SignalKind::terminate()).context("handle SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("handle SIGINT")?;
    let mut serving = std::pin::pin!(serve(stop.clone()));
    let signal = tokio::select! {
        ended = &mut serving => return ended,
        _ = terminate.recv() => "SIGTERM",
        _ = interrupt.recv() => "SIGINT",
    };
    tracing::info!("received {signal}; the process exits when its operations in progress have finished");
    stop.cancel();
    serving.await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_descriptor_limit_becomes_the_hard_one() {
        raise_descriptor_limit().unwrap();
        let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
        assert_eq!(soft, hard);
    }
}

//! The CSI driver's process.

use std::process::ExitCode;

use anyhow::Context;
use clap::Parser;
use tokio::runtime;

/// Work on volumes has threads of its own. One thread for each processor, as is the default, would take more memory on a larger machine.
const WORKERS: usize = 2;

fn main() -> ExitCode {
    let args = csi::Args::parse();
    args.log.init();
    let runtime = runtime::Builder::new_multi_thread().worker_threads(WORKERS).enable_all().build();
    let ended = runtime.context("start the runtime").and_then(|runtime| {
        let ended = runtime.block_on(csi::run(args));
        // A blocking call may still be emptying the trash. It is safe to interrupt, so the process does not wait for it.
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

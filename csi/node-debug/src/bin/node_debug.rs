//! The service's process.

use std::process::ExitCode;

use anyhow::Context;
use clap::Parser;

fn main() -> ExitCode {
    let args = node_debug::Args::parse();
    args.log.init();
    match run(args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: node_debug::Args) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Runtime::new().context("start the threads of node-debug")?;
    let ended = runtime.block_on(node_debug::run(args));
    // A thread that waits for a disk that hangs never ends.
    runtime.shutdown_background();
    ended
}

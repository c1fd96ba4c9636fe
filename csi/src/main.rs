//! The CSI driver's process.

use std::process::ExitCode;

use clap::Parser;

// Work on volumes has threads of its own. One thread for each processor, as is the default, would take more memory on a larger machine.
#[tokio::main(worker_threads = 2)]
async fn main() -> ExitCode {
    let args = csi::Args::parse();
    args.log.init();
    match csi::run(args).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

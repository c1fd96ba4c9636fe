//! The CSI driver's process.

use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    let args = csi::Args::parse();
    service::run(&args.log.clone(), |stop| csi::serve(args, stop))
}

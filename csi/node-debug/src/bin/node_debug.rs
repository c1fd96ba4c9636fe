//! The service's process.

use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    let args = node_debug::Args::parse();
    service::run(&args.log.clone(), |stop| node_debug::serve(args, stop))
}

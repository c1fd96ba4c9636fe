//! The client of node-debug.

use std::process::ExitCode;

use clap::Parser;

// The worker serves the connection while the main thread waits for the reader of standard output, such as less.
#[tokio::main(flavor = "multi_thread", worker_threads = 1)]
async fn main() -> ExitCode {
    node_debug::dbg(node_debug::DbgArgs::parse()).await
}

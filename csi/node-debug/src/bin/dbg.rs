//! The client of node-debug.

use std::process::ExitCode;

use clap::Parser;

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    node_debug::dbg(node_debug::DbgArgs::parse()).await
}

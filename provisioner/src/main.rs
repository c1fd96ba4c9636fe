//! `loopfs-provisioner`: see the library.

use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    match provisioner::run(provisioner::Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("loopfs-provisioner: {error:#}");
            ExitCode::FAILURE
        }
    }
}

//! `loopfs-provisioner`: see the library.

use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    provisioner::run(provisioner::Args::parse())
}

//! Measures attaching, finding, detaching and removing loop devices, and allocating project ids, each beside the bare
//! system calls and beside the methods that other programs use. Run by `cargo harness bench loop`, which makes tables
//! and a plot of what this prints: one JSON object in a line, the machine first.
//!
//! ```console
//! # cargo bench -p loopfs --features bench --bench loop -- devices /var/tmp
//! # cargo bench -p loopfs --features bench --bench loop -- ids /mnt/xfs-with-prjquota
//! ```

mod command;
mod devices;
mod ids;
mod machine;
mod population;
mod samples;
mod stop;

use std::process::ExitCode;

use command::{Result, Size};

fn main() -> ExitCode {
    command::run([("devices", devices::run), ("ids", ids::run)])
}

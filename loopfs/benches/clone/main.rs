//! Measures copies that share blocks: clones and snapshots of images of several sizes, and clones of directory trees
//! beside a copy that reads and writes. Run by `cargo harness bench clone`, which makes tables and a plot of what this
//! prints: one JSON object in a line, the machine first.
//!
//! ```console
//! # cargo bench -p loopfs --features bench --bench clone -- images /mnt/xfs-with-prjquota
//! # cargo bench -p loopfs --features bench --bench clone -- trees /mnt/xfs
//! ```

#[path = "../loop/command.rs"]
mod command;
mod images;
#[path = "../loop/machine.rs"]
mod machine;
#[path = "../loop/samples.rs"]
mod samples;
#[path = "../loop/stop.rs"]
mod stop;
mod trees;

use std::process::ExitCode;

use command::{Result, Size};

fn main() -> ExitCode {
    command::run([("images", images::run), ("trees", trees::run)])
}

//! Measures copies that share blocks: clones and snapshots of images of several sizes, and clones of directory trees. It
//! compares the latter with a copy that reads and writes. `cargo harness bench clone` runs this program and creates tables and
//! a plot from its output: one JSON object per line, the description of the machine first.
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

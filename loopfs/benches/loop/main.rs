//! Measures attaching, finding, detaching and removing loop devices, losetup(8), allocating project ids, and the input and output of a device. Each is
//! compared with the bare system calls and with the methods of other programs. `cargo harness bench loop`, `node` and `io` run this
//! program and create tables and plots from its output: one JSON object per line, the description of the machine first.
//!
//! ```console
//! # cargo bench -p loopfs --features bench --bench loop -- devices /var/tmp
//! # LOOPFS_BENCH_DROP_IN=/usr/local/sbin/losetup cargo bench -p loopfs --features bench --bench loop -- losetup /var/tmp
//! # cargo bench -p loopfs --features bench --bench loop -- ids /mnt/xfs-with-prjquota
//! # cargo bench -p loopfs --features bench --bench loop -- io /var/tmp
//! ```

mod command;
mod devices;
mod ids;
mod io;
mod losetup;
mod machine;
mod population;
mod samples;
mod stop;

use std::process::ExitCode;

use command::{Result, Size};

fn main() -> ExitCode {
    command::run([("devices", devices::run), ("ids", ids::run), ("losetup", losetup::run), ("io", io::run)])
}

//! Measures attaching, finding, detaching and removing loop devices, losetup(8), allocating project ids, the input and output of a
//! device, and copies that share blocks: clones and snapshots of images, and clones of directory trees. Each is compared with the
//! bare system calls or with the methods of other programs. `cargo harness bench loop`, `node`, `io` and `clone` run this program and
//! create tables from its output: one JSON object per line, the description of the machine first.
//!
//! ```console
//! # cargo bench -p loopfs --features __tests --bench loop -- devices /var/tmp
//! # LOOPFS_BENCH_DROP_IN=/usr/local/sbin/losetup cargo bench -p loopfs --features __tests --bench loop -- losetup /var/tmp
//! # cargo bench -p loopfs --features __tests --bench loop -- ids /mnt/xfs-with-prjquota
//! # cargo bench -p loopfs --features __tests --bench loop -- io /var/tmp
//! # cargo bench -p loopfs --features __tests --bench loop -- images /mnt/xfs-with-prjquota
//! # cargo bench -p loopfs --features __tests --bench loop -- trees /mnt/xfs
//! ```

mod command;
mod devices;
mod ids;
mod images;
mod io;
mod losetup;
mod machine;
mod population;
mod samples;
mod stop;
mod trees;

use std::process::ExitCode;

use command::{Result, Size};

fn main() -> ExitCode {
    command::run([
        ("devices", devices::run),
        ("ids", ids::run),
        ("losetup", losetup::run),
        ("io", io::run),
        ("images", images::run),
        ("trees", trees::run),
    ])
}

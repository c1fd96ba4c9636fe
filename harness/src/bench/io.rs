//! `bench io`: reads and writes of a Block volume, compared with its file, with the device that losetup(8) attaches by default, and
//! with a ublk device.
//!
//! The disk of the virtual machine is a file of the host, mostly in its page cache. The ratios are those of the processor time that
//! each layer costs, which a fast disk shows and a slow one hides.

use anyhow::{Context, Result};
use testvm::cargo_tool::{CargoExample, CargoTool};
use testvm::images::debian_program::{FIO, LOSETUP};
use testvm::packages::{self, LIBCLANG};
use testvm::rust_build;
use testvm::session::Session;
use testvm::vm::GuestFile;

use super::guest;
use super::measurement::{Environment, Measurements};
use super::outcome::{Args, Outcome};
use super::plot::Plot;
use super::threshold::{self, Threshold};

/// The kernels of vm-images/kernels/kernels.toml that are compared, and the ends of the names of their rows. From Linux 6.19 on, the
/// loop driver submits direct I/O without a worker if the file system does not block.
const KERNELS: [(&str, &str); 2] = [("trixie", "6_12"), ("trixie-backports", "7")];

/// The workloads of `loopfs/benches/loop/io.rs`, as they start the names of its rows.
const WORKLOADS: [(&str, &str); 4] = [
    ("read_4k", "random reads of 4 KiB"),
    ("write_4k", "random writes of 4 KiB"),
    ("read_1m", "sequential reads of 1 MiB"),
    ("write_1m", "sequential writes of 1 MiB"),
];

/// The largest ratio of the time of a request to the volume to that of a request to its file.
const FACTOR: f64 = 2.0;

const X: &str = "requests in flight";

macro_rules! plot {
    ($title:literal, $workload:literal, $kernel:literal) => {
        Plot::new(
            $title,
            X,
            &[
                concat!($workload, "_volume_", $kernel),
                concat!($workload, "_file_", $kernel),
                concat!($workload, "_losetup_", $kernel),
                concat!($workload, "_ublk_", $kernel),
            ],
        )
    };
}

const PLOTS: [Plot; 8] = [
    plot!("Linux 6.12: random reads of 4 KiB, each", "read_4k", "6_12"),
    plot!("Linux 7: random reads of 4 KiB, each", "read_4k", "7"),
    plot!("Linux 6.12: random writes of 4 KiB, each", "write_4k", "6_12"),
    plot!("Linux 7: random writes of 4 KiB, each", "write_4k", "7"),
    plot!("Linux 6.12: sequential reads of 1 MiB, each", "read_1m", "6_12"),
    plot!("Linux 7: sequential reads of 1 MiB, each", "read_1m", "7"),
    plot!("Linux 6.12: sequential writes of 1 MiB, each", "write_1m", "6_12"),
    plot!("Linux 7: sequential writes of 1 MiB, each", "write_1m", "7"),
];

/// The example of the crate that serves a file as a ublk device.
const UBLK_LOOP: CargoExample =
    CargoExample { name: "loop", of: CargoTool { name: "libublk", version: "0.4.8" } };
const UBLK_LOOP_IN_GUEST: &str = "/usr/bin/ublk-loop";

pub(super) async fn run(session: &Session, args: &Args) -> Result<Outcome> {
    let program = session.until_cancelled(rust_build::bench(session, "loopfs", "loop")).await?;
    packages::ensure(session, &[LIBCLANG]).await?;
    let ublk_loop = session.until_cancelled(UBLK_LOOP.prepare(session)).await?;
    let mut parts = Vec::new();
    for (kernel, suffix) in KERNELS {
        if args.kernel.as_deref().is_some_and(|only| only != kernel) {
            continue;
        }
        let path = UBLK_LOOP_IN_GUEST.to_owned();
        let mut beside = vec![GuestFile { path, mode: 0o755, host: ublk_loop.clone() }];
        for program in [&FIO, &LOSETUP] {
            for (path, host) in session.until_cancelled(program.files(session)).await? {
                if beside.iter().all(|file: &GuestFile| file.path != path) {
                    beside.push(GuestFile { path, mode: 0o755, host });
                }
            }
        }
        let runs = [args.of_program(&["io", guest::XFS])];
        let measured = guest::run(session, Some(kernel), &program, beside, &runs, guest::DISK_MIB).await?;
        let part = measured.into_iter().next().context("the virtual machine measured nothing")?;
        parts.push(named(part, suffix));
    }
    let known = KERNELS.map(|(name, _)| name).join(" and ");
    anyhow::ensure!(
        !parts.is_empty(),
        "--kernel: the benchmark io compares {known}; give one of them, or none"
    );
    Ok(Outcome::new(parts, thresholds, &PLOTS))
}

/// Adds the kernel to the names of the rows.
fn named(mut part: Environment, suffix: &str) -> Environment {
    for row in &mut part.rows {
        row.name = format!("{}_{suffix}", row.name);
    }
    part
}

fn thresholds(all: &Measurements) -> Vec<Threshold> {
    let mut thresholds = Vec::new();
    for (_, suffix) in KERNELS {
        for (workload, text) in WORKLOADS {
            let [volume, file] = ["volume", "file"].map(|target| format!("{workload}_{target}_{suffix}"));
            for n in all.counts(&volume) {
                let linux = suffix.replace('_', ".");
                let text = format!(
                    "Linux {linux}, {text}, {n} in flight: a Block volume within {FACTOR} times its file"
                );
                thresholds.push(threshold::at_most(all, &text, (&volume, n), FACTOR, (&file, n)));
            }
        }
    }
    thresholds
}

#[cfg(test)]
mod tests {
    use super::super::measurement::{Machine, Row};
    use super::*;

    fn part(values: [f64; 2], suffix: &str) -> Environment {
        let row = |(name, value)| Row::of(name, 16, "us", [value]).unwrap();
        let rows = ["read_4k_volume", "read_4k_file"].into_iter().zip(values).map(row).collect();
        named(Environment { place: String::new(), machine: Machine::of("", "", ""), rows }, suffix)
    }

    #[test]
    fn each_kernel_has_thresholds_of_its_own() {
        let all = Measurements { parts: vec![part([21.0, 10.0], "6_12"), part([20.0, 10.0], "7")] };
        let decided: Vec<_> = thresholds(&all).into_iter().map(|threshold| threshold.is_met).collect();
        assert_eq!(decided, [Some(false), Some(true)]);
    }

    #[test]
    fn each_workload_has_a_plot_for_each_kernel() {
        let pairs = WORKLOADS.iter().flat_map(|(workload, _)| KERNELS.map(|(_, suffix)| (workload, suffix)));
        for (plot, (workload, suffix)) in PLOTS.iter().zip(pairs) {
            let rows =
                ["volume", "file", "losetup", "ublk"].map(|target| format!("{workload}_{target}_{suffix}"));
            assert_eq!(plot.names, rows);
        }
    }
}

//! `bench io`: reads and writes of a Block volume, compared with its file and with the device that losetup(8) attaches by default.
//!
//! The disk of the virtual machine is a file of the host, mostly in its page cache. The ratios are those of the processor time that
//! each layer costs, which a fast disk shows and a slow one hides.

use anyhow::{Context, Result};
use testvm::images::debian_program::{FIO, LOSETUP};
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
    ($title:literal, $workload:literal) => {
        Plot::new(
            $title,
            X,
            &[
                concat!($workload, "_volume_6_12"),
                concat!($workload, "_file_6_12"),
                concat!($workload, "_losetup_6_12"),
                concat!($workload, "_volume_7"),
                concat!($workload, "_file_7"),
                concat!($workload, "_losetup_7"),
            ],
        )
    };
}

const PLOTS: [Plot; 4] = [
    plot!("Random reads of 4 KiB, each", "read_4k"),
    plot!("Random writes of 4 KiB, each", "write_4k"),
    plot!("Sequential reads of 1 MiB, each", "read_1m"),
    plot!("Sequential writes of 1 MiB, each", "write_1m"),
];

pub(super) async fn run(session: &Session, args: &Args) -> Result<Outcome> {
    let program = session.until_cancelled(rust_build::bench(session, "loopfs", "loop")).await?;
    let mut parts = Vec::new();
    for (kernel, suffix) in KERNELS {
        if args.kernel.as_deref().is_some_and(|only| only != kernel) {
            continue;
        }
        let mut beside = Vec::new();
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
    fn each_workload_has_a_plot_with_the_rows_of_both_kernels() {
        for (plot, (workload, _)) in PLOTS.iter().zip(WORKLOADS) {
            for (_, suffix) in KERNELS {
                let rows =
                    ["volume", "file", "losetup"].map(|target| format!("{workload}_{target}_{suffix}"));
                assert!(rows.iter().all(|row| plot.names.contains(&row.as_str())), "{:?}", plot.names);
            }
        }
    }
}

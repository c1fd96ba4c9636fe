//! The input and output of a loop device with direct I/O, as a Block volume has it, compared with its file and with the device that
//! losetup(8) attaches by default. fio(1) reads and writes, always with `O_DIRECT`.
//!
//! The files are allocated and written before, so that no write allocates. The device of losetup has buffered I/O: its writes end in
//! the page cache, and its reads come from there, so it can be faster than the file, at the cost of that memory.

use std::fs::File;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use nix::fcntl::{FallocateFlags, fallocate};
use serde_json::Value;

use crate::command::output;
use crate::losetup::UTIL_LINUX;
use crate::population::{Population, options};
use crate::samples::Samples;
use crate::{Result, Size, machine, stop};

const FIO: &str = "/usr/bin/fio";

/// The numbers of requests in flight.
const DEPTHS: [usize; 2] = [1, 16];

/// What fio does: its `--rw` and `--bs`, and the direction in its report.
struct Workload {
    rw: &'static str,
    bs: &'static str,
    direction: &'static str,
    /// The start of the names of its rows, before the target.
    row: &'static str,
}

const WORKLOADS: [Workload; 4] = [
    Workload { rw: "randread", bs: "4k", direction: "read", row: "read_4k" },
    Workload { rw: "randwrite", bs: "4k", direction: "write", row: "write_4k" },
    Workload { rw: "read", bs: "1M", direction: "read", row: "read_1m" },
    Workload { rw: "write", bs: "1M", direction: "write", row: "write_1m" },
];

/// What is measured: a loop device as the driver attaches it, the file itself, and a loop device as losetup attaches it without options.
const TARGETS: [&str; 3] = [VOLUME, FILE, "losetup"];
const VOLUME: &str = "volume";
const FILE: &str = "file";

pub(crate) fn run(directory: &Path, size: Size) -> Result<()> {
    machine::print(directory)?;
    // Each round measures all targets, so that other load of the machine affects all of them alike.
    let (mib, rounds, seconds) = match size {
        Size::Full => (512, 7, 2),
        Size::Quick => (128, 2, 1),
    };
    let population = Population::new(directory)?;
    let mut paths = Vec::new();
    for target in TARGETS {
        let path = population.path(&format!("{target}.img"));
        allocate(&path, mib)?;
        let path = match target {
            FILE => path,
            VOLUME => population.control.attach(File::open(&path)?.as_fd(), &options())?.path(),
            _ => attach_by_default(&path)?,
        };
        eprintln!("write {} once", path.display());
        fio_run(&path, "write", "1M", 16, &[])?;
        paths.push(path);
    }
    let mut samples: Vec<Samples> = Vec::new();
    for workload in &WORKLOADS {
        for depth in DEPTHS {
            samples.extend(TARGETS.map(|target| Samples::new(&format!("{}_{target}", workload.row), depth)));
        }
    }
    let time = format!("--runtime={seconds}");
    for round in 0..rounds {
        let mut rows = samples.iter_mut();
        for workload in &WORKLOADS {
            for depth in DEPTHS {
                eprintln!("round {round} of {rounds}: {} {}, depth {depth}", workload.rw, workload.bs);
                for (path, row) in paths.iter().zip(&mut rows) {
                    stop::check()?;
                    let time = [&*time, "--time_based"];
                    let report = fio_run(path, workload.rw, workload.bs, depth, &time)?;
                    row.push(time_per_request(&report, workload.direction)?);
                }
            }
        }
    }
    samples.into_iter().for_each(Samples::print);
    Ok(())
}

fn allocate(path: &Path, mib: i64) -> Result<()> {
    let file = File::options().write(true).create_new(true).open(path)?;
    fallocate(&file, FallocateFlags::empty(), 0, mib << 20)?;
    Ok(())
}

/// Returns the path of the device. The population detaches it at its end.
fn attach_by_default(file: &Path) -> Result<PathBuf> {
    let shown = output(Command::new(UTIL_LINUX).args(["--find", "--show"]).arg(file))?;
    Ok(PathBuf::from(String::from_utf8(shown)?.trim_end()))
}

/// Runs fio once and returns its report.
fn fio_run(path: &Path, rw: &str, bs: &str, depth: usize, more: &[&str]) -> Result<Value> {
    let mut command = Command::new(FIO);
    command.args(["--name=loopfs", "--direct=1", "--ioengine=libaio", "--output-format=json"]);
    command.arg(format!("--filename={}", path.display()));
    command.args([format!("--rw={rw}"), format!("--bs={bs}"), format!("--iodepth={depth}")]).args(more);
    Ok(serde_json::from_slice(&output(&mut command)?)?)
}

/// Returns the time of the run divided by its requests.
fn time_per_request(report: &Value, direction: &str) -> Result<Duration> {
    let iops = report["jobs"][0][direction]["iops"].as_f64().filter(|iops| *iops > 0.0);
    let iops = iops.ok_or_else(|| format!("fio reported no {direction} requests: {report}"))?;
    Ok(Duration::from_secs_f64(1.0 / iops))
}

//! The input and output of a loop device with direct I/O, as a Block volume has it, compared with its file, with the device that
//! losetup(8) attaches by default, and with a ublk device. fio(1) reads and writes, always with `O_DIRECT`.
//!
//! The files are allocated and written before, so that no write allocates. The device of losetup has buffered I/O: its writes end in
//! the page cache, and its reads come from there, so it can be faster than the file, at the cost of that memory.
//! The server of the ublk device is the example `loop` of the crate libublk. It has the file open with `O_DIRECT` and submits each
//! request to an io_uring(7).

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Duration;

use nix::fcntl::{FallocateFlags, fallocate};
use serde_json::Value;

use crate::command::output;
use crate::population::{Population, options};
use crate::samples::Samples;
use crate::{Result, Size, machine, stop};

/// The programs, and their paths in a guest.
const FIO: (&str, &str) = ("LOOPFS_BENCH_FIO", "/usr/bin/fio");
const LOSETUP: (&str, &str) = ("LOOPFS_BENCH_UTIL_LINUX", "/usr/sbin/losetup");
const UBLK_LOOP: (&str, &str) = ("LOOPFS_BENCH_UBLK_LOOP", "/usr/bin/ublk-loop");

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

/// What is measured: a loop device as the driver attaches it, the file itself, a loop device as losetup attaches it without options,
/// and a ublk device, which a process serves.
const TARGETS: [&str; 4] = [VOLUME, FILE, LOSETUP_DEVICE, UBLK];
const VOLUME: &str = "volume";
const FILE: &str = "file";
const LOSETUP_DEVICE: &str = "losetup";
const UBLK: &str = "ublk";

pub(crate) fn run(directory: &Path, size: Size) -> Result<()> {
    machine::print(directory)?;
    // Each round measures all targets, so that other load of the machine affects all of them alike.
    let (mib, rounds, seconds) = match size {
        Size::Full => (512, 7, 2),
        Size::Quick => (128, 2, 1),
    };
    let [fio, losetup, ublk_loop] = [FIO, LOSETUP, UBLK_LOOP]
        .map(|(variable, path)| std::env::var_os(variable).map_or_else(|| path.into(), PathBuf::from));
    let population = Population::new(directory)?;
    let mut paths = Vec::new();
    // It ends before the population deletes its file.
    let mut server = None;
    for target in TARGETS {
        let path = population.path(&format!("{target}.img"));
        allocate(&path, mib)?;
        let path = match target {
            FILE => path,
            VOLUME => population.control.attach(File::open(&path)?.as_fd(), &options())?.path(),
            LOSETUP_DEVICE => attach_by_default(&losetup, &path)?,
            _ => server.insert(UblkServer::start(&ublk_loop, &path)?).device(),
        };
        eprintln!("write {} once", path.display());
        fio_run(&fio, &path, "write", "1M", 16, &[])?;
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
                    let report = fio_run(&fio, path, workload.rw, workload.bs, depth, &time)?;
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
fn attach_by_default(losetup: &Path, file: &Path) -> Result<PathBuf> {
    let shown = output(Command::new(losetup).args(["--find", "--show"]).arg(file))?;
    Ok(PathBuf::from(String::from_utf8(shown)?.trim_end()))
}

/// A process that serves a file as a ublk device.
struct UblkServer {
    program: PathBuf,
    process: Child,
    id: u32,
    /// Without a reader, the server would end at its next line.
    _output: BufReader<ChildStdout>,
}

impl UblkServer {
    /// The largest request, which is that of the workloads.
    const BUFFER_BYTES: usize = 1 << 20;

    /// Starts the process, and returns after it has started the device.
    fn start(program: &Path, file: &Path) -> Result<Self> {
        let mut command = Command::new(program);
        command.args(["add", "--foreground", "--buf_size", &Self::BUFFER_BYTES.to_string()]);
        let mut process = command.arg("--backing_file").arg(file).stdout(Stdio::piped()).spawn()?;
        let mut output = BufReader::new(process.stdout.take().ok_or("the server has no output")?);
        // After an empty line, it describes the started device: `dev id 0: nr_hw_queues 1 ...`.
        let mut text = String::new();
        while text.trim().is_empty() && output.read_line(&mut text)? > 0 {}
        let id = text.trim_start().strip_prefix("dev id ").and_then(|rest| rest.split(':').next());
        match id.and_then(|id| id.parse().ok()) {
            Some(id) => Ok(Self { program: program.to_owned(), process, id, _output: output }),
            None => {
                // Without its server, the kernel stops the device.
                process.kill()?;
                process.wait()?;
                Err(format!("{} started no device: {text:?}", program.display()).into())
            }
        }
    }

    fn device(&self) -> PathBuf {
        PathBuf::from(format!("/dev/ublkb{}", self.id))
    }
}

impl Drop for UblkServer {
    /// Deletes the device, which ends the server.
    fn drop(&mut self) {
        let deleted = output(Command::new(&self.program).args(["del", "--number", &self.id.to_string()]));
        let ended = deleted.and_then(|_| Ok(self.process.wait()?));
        if let Err(error) = ended {
            eprintln!("delete ublk device {}: {error}", self.id);
        }
    }
}

/// Runs fio once and returns its report.
fn fio_run(fio: &Path, path: &Path, rw: &str, bs: &str, depth: usize, more: &[&str]) -> Result<Value> {
    let mut command = Command::new(fio);
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

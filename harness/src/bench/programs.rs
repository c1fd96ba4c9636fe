//! The benchmarks that are programs of a crate, in `loopfs/benches` and `csi/benches`. Each prints its rows, in a virtual machine
//! or on this machine.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::OpenOptions;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use testvm::images::debian_program::{self, FIO, LOSETUP};
use testvm::process::{Program, tail};
use testvm::session::Session;
use testvm::{cache, rust_build};

use super::args::Args;
use super::guest::{self, DISK_MIB, XFS};
use super::measurement::Environment;
use super::results::directory;
use super::threshold::{Requirement, at_least, at_most, flat, grows_at_most};
use crate::builds::{self, ProgramProfile};

/// The time to detach and remove the devices of a run that was stopped.
const CLEAN_UP_TIMEOUT: Duration = Duration::from_secs(20);

/// Programs of a guest, by their paths there and on the host.
type Programs = BTreeMap<String, PathBuf>;

/// A program of a crate's benchmarks, which is built.
struct Measuring<'a> {
    session: &'a Session,
    args: &'a Args,
    program: PathBuf,
}

impl Measuring<'_> {
    async fn build<'a>(
        session: &'a Session,
        args: &'a Args,
        package: &str,
        bench: &str,
    ) -> Result<Measuring<'a>> {
        let program = session.until_cancelled(rust_build::bench(session, package, bench)).await?;
        Ok(Measuring { session, args, program })
    }

    /// Returns its arguments: these, and `--quick` for a short run.
    fn words(&self, args: &[&str]) -> Vec<String> {
        args.iter().copied().chain(self.args.quick.then_some("--quick")).map(str::to_owned).collect()
    }

    /// Runs it with each of these arguments in one virtual machine, beside the given programs.
    async fn in_guest(
        &self,
        kernel: Option<&str>,
        beside: Programs,
        runs: &[&[&str]],
        disk_mib: u64,
    ) -> Result<Vec<Environment>> {
        let runs: Vec<_> = runs.iter().map(|args| self.words(args)).collect();
        guest::run(self.session, kernel, &self.program, beside, &runs, disk_mib).await
    }

    /// Runs a part of it on this machine. It handles signals itself, and removes its devices if the run is stopped.
    async fn here(&self, part: &str, env: Option<(&str, OsString)>) -> Result<Environment> {
        let step = self.session.progress.step("measure on this machine");
        // The file system of this directory has the backing files, and affects the measurements.
        let files = directory(self.session)?;
        let log = files.join("here.log");
        cache::remove_file(&log)?;
        let words = self.words(&[part, &files.display().to_string()]);
        let program = with_realtime_priority(&self.program).await.args(words).log(&log);
        let program = env.into_iter().fold(program, |program, (name, value)| program.env(name, value));
        let mut process = program.on_stderr_line(step.line_notes()).spawn()?;
        let Some(status) = self.session.cancel.run_until_cancelled(process.wait()).await else {
            process.stop(CLEAN_UP_TIMEOUT).await?;
            anyhow::bail!("the run was stopped");
        };
        let output = std::fs::read_to_string(&log).with_context(|| format!("read {}", log.display()))?;
        let status = status?;
        anyhow::ensure!(status.success(), "the benchmark ended with {status}:\n{}", tail(&output, 10));
        step.done("");
        Environment::parse("this machine", &output)
    }
}

/// Returns the program with a real-time priority if the user may set it, because other load on the machine would affect the
/// measurements.
async fn with_realtime_priority(program: &Path) -> Program {
    let priority = ["--fifo", "50"];
    match Program::new("chrt").args(priority).arg("true").run().await {
        Ok(_) => Program::new("chrt").args(priority).arg(program).named("loop"),
        Err(_) => Program::new(program),
    }
}

/// Returns `true` for root on a kernel with `/dev/loop-control`.
fn has_loop_devices() -> bool {
    let control = OpenOptions::new().read(true).write(true).open("/dev/loop-control");
    nix::unistd::geteuid().is_root() && control.is_ok()
}

/// `bench loop`: loop devices and project ids, compared with the bare system calls and the methods of other programs.
pub(super) async fn loop_devices(session: &Session, args: &Args) -> Result<Vec<Environment>> {
    let program = Measuring::build(session, args, "loopfs", "loop").await?;
    let (mut parts, mut in_guest): (_, Vec<&[&str]>) = (Vec::new(), vec![&["ids", XFS]]);
    if has_loop_devices() {
        parts.push(program.here("devices", None).await?);
    } else {
        session
            .progress
            .line("this user or machine has no loop devices: they are measured in the virtual machine");
        in_guest.insert(0, &["devices", XFS]);
    }
    parts.extend(program.in_guest(args.kernel.as_deref(), Programs::new(), &in_guest, DISK_MIB).await?);
    Ok(parts)
}

pub(super) fn loop_requirements() -> Vec<Requirement> {
    vec![
        // The calls that an attachment with read-back cannot omit take 1.16 to 1.20 times as long as the bare two calls.
        at_most(
            "attach, warm pool, {n} attached: within 1.3 times the bare calls",
            "attach_pool",
            1.3,
            "floor_attach",
        )
        .at_each_count(),
        flat("attach, warm pool: flat within 1.3 times", "attach_pool", 1.3),
        at_least(
            "the device of a file, {n} attached: 1000 times as fast as losetup -j",
            "losetup_j",
            1000.0,
            "find_device",
        ),
        flat("the device of a file: constant within 1.5 times", "find_device", 1.5),
        // The bare calls write back no page cache, and do not look whether the node of the device is mounted.
        at_most("detach, {n} attached: within 3 times the bare calls", "detach", 3.0, "floor_detach")
            .at_each_count(),
        at_most(
            "write 8 MiB and detach, {n} attached: within 1.1 times losetup",
            "write_and_detach",
            1.1,
            "write_and_losetup_detach",
        )
        .at_each_count(),
        at_least(
            "{n} devices detached and removed in the background: 20 times as fast as one by one",
            "remove_serial",
            20.0,
            "remove_background",
        ),
        flat("project id allocation: flat within 1.5 times", "id_alloc", 1.5),
    ]
}

/// `bench clone`: copies that share blocks, of images and of directory trees.
pub(super) async fn clones(session: &Session, args: &Args) -> Result<Vec<Environment>> {
    let program = Measuring::build(session, args, "loopfs", "loop").await?;
    // The disk has an image of 8 GiB, its clone and its snapshot, and each reserves its full size. 8 GiB are written.
    let disk_mib = args.size(32 << 10, DISK_MIB);
    let runs: [&[&str]; 2] = [&["images", XFS], &["trees", XFS]];
    program.in_guest(args.kernel.as_deref(), Programs::new(), &runs, disk_mib).await
}

pub(super) fn clone_requirements() -> Vec<Requirement> {
    vec![
        flat("cloning an image: within twice the time at any size", "clone_image", 2.0),
        flat("a snapshot of an image: within twice the time at any size", "snapshot_image", 2.0),
        flat("cloning a tree: within twice the time for each inode", "clone_tree", 2.0),
        at_most(
            "cloning a tree of {n} files: at most twice the time of a copy that reads and writes, and preserves less",
            "clone_tree",
            2.0,
            "read_and_write",
        )
        .at_each_count(),
    ]
}

/// The calls by the name that starts their rows in `csi/benches/rpc/calls.rs`.
const CALLS: [(&str, &str); 4] = [
    ("publish", "NodePublishVolume"),
    ("stats", "NodeGetVolumeStats"),
    ("expand", "NodeExpandVolume"),
    ("unpublish", "NodeUnpublishVolume"),
];

/// `bench rpc`: the latency of the node's calls with few volumes on the node and with many.
pub(super) async fn rpc(session: &Session, args: &Args) -> Result<Vec<Environment>> {
    const DRIVER: &str = "/tests/programs/loopfs-csi";
    let program = Measuring::build(session, args, "csi", "rpc").await?;
    let driver = session.until_cancelled(builds::driver_programs(session, ProgramProfile::Release)).await?;
    let beside = Programs::from([(DRIVER.to_owned(), driver.csi)]);
    program.in_guest(args.kernel.as_deref(), beside, &[&[XFS, DRIVER]], DISK_MIB).await
}

pub(super) fn rpc_requirements() -> Vec<Requirement> {
    // A call may not look at other volumes.
    let requirement = |kind: &str, (row, call): (&str, &str)| {
        let text = format!(
            "{call} of a {kind} volume: with {{n}} volumes on the node within 1.2 times the time with {{peer_n}}"
        );
        grows_at_most(&text, &format!("{row}_{kind}"), 1.2)
    };
    ["filesystem", "block"].iter().flat_map(|kind| CALLS.map(|call| requirement(kind, call))).collect()
}

/// The kernels of vm-images/kernels/kernels.toml that `bench io` compares, the ends of the names of their rows, and their releases.
/// From Linux 6.19 on, the loop driver submits direct I/O without a worker if the file system does not block.
const KERNELS: [(&str, &str, &str); 2] = [("trixie", "6_12", "6.12"), ("trixie-backports", "7", "7")];

/// The workloads of `loopfs/benches/loop/io.rs`, as they start the names of its rows.
const WORKLOADS: [(&str, &str); 4] = [
    ("read_4k", "random reads of 4 KiB"),
    ("write_4k", "random writes of 4 KiB"),
    ("read_1m", "sequential reads of 1 MiB"),
    ("write_1m", "sequential writes of 1 MiB"),
];

fn kernels(args: &Args) -> impl Iterator<Item = (&'static str, &'static str, &'static str)> {
    KERNELS.into_iter().filter(|(kernel, ..)| args.kernel.as_deref().is_none_or(|only| only == *kernel))
}

/// `bench io`: reads and writes of a Block volume, compared with its file and with the device that losetup(8) attaches by default.
///
/// The disk of the virtual machine is a file of the host, mostly in its page cache. The ratios are those of the processor time that
/// each layer costs, which a fast disk shows and a slow one hides.
pub(super) async fn io(session: &Session, args: &Args) -> Result<Vec<Environment>> {
    let known = KERNELS.map(|(name, ..)| name).join(" and ");
    anyhow::ensure!(
        kernels(args).next().is_some(),
        "--kernel: the benchmark io compares {known}; give one of them, or none"
    );
    let program = Measuring::build(session, args, "loopfs", "loop").await?;
    let beside = session.until_cancelled(debian_program::files(session, &[&FIO, &LOSETUP])).await?;
    let mut parts = Vec::new();
    for (kernel, suffix, _) in kernels(args) {
        let measured = program.in_guest(Some(kernel), beside.clone(), &[&["io", XFS]], DISK_MIB).await?;
        for mut part in measured {
            for row in &mut part.rows {
                row.name = format!("{}_{suffix}", row.name);
            }
            parts.push(part);
        }
    }
    Ok(parts)
}

pub(super) fn io_requirements(args: &Args) -> Vec<Requirement> {
    let requirement = |(_, suffix, release): (_, &str, &str), (workload, what): (&str, &str)| {
        let text =
            format!("Linux {release}, {what}, {{n}} in flight: a Block volume within 2 times its file");
        let [volume, file] = ["volume", "file"].map(|target| format!("{workload}_{target}_{suffix}"));
        at_most(&text, &volume, 2.0, &file).at_each_count()
    };
    kernels(args).flat_map(|kernel| WORKLOADS.map(|workload| requirement(kernel, workload))).collect()
}

/// The first part of `bench node`: `losetup -j` of util-linux and of this project, on this machine, or in a virtual machine if this one
/// has no loop devices or a kernel is given.
pub(super) async fn losetup(session: &Session, args: &Args) -> Result<Vec<Environment>> {
    /// The variable with the path of this project's losetup.
    const DROP_IN: &str = "LOOPFS_BENCH_DROP_IN";
    let program = Measuring::build(session, args, "loopfs", "loop").await?;
    let tool = session.until_cancelled(builds::released_tool(session)).await?;
    if has_loop_devices() && args.kernel.is_none() {
        // The tool is losetup if it is called by that name.
        let directory = tempfile::tempdir().context("create a temporary directory")?;
        let losetup = directory.path().join("losetup");
        std::os::unix::fs::symlink(&tool, &losetup)
            .with_context(|| format!("create {}", losetup.display()))?;
        return Ok(vec![program.here("losetup", Some((DROP_IN, losetup.into()))).await?]);
    }
    let mut beside = session.until_cancelled(debian_program::files(session, &[&LOSETUP])).await?;
    beside.insert("/tests/programs/losetup".to_owned(), tool);
    program.in_guest(args.kernel.as_deref(), beside, &[&["losetup", XFS]], DISK_MIB).await
}

pub(super) fn losetup_requirements() -> Vec<Requirement> {
    let requirement = |state: &str, row: &str| {
        let text = format!("losetup -j, {{n}} devices, {state}: 20 times as fast as util-linux");
        at_least(&text, "losetup_j_util_linux", 20.0, row)
    };
    vec![
        requirement("no uevent since the last call", "losetup_j_drop_in").with_cause(
            "before Linux 6.15 attaching a file need not send a uevent, so losetup -j always checks one inode of each device",
        ),
        requirement("a uevent since the last call", "losetup_j_drop_in_after_uevent").with_cause(
            "after a uevent losetup -j checks one inode of each device, because no call of the kernel shows which devices were attached since",
        ),
    ]
}

//! PID 1, from its start by the kernel to the power-off.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use nix::sys::reboot::{RebootMode, reboot};
use nix::sys::time::TimeSpec;
use nix::time::{ClockId, clock_settime};

use super::children::Children;
use super::report::{END_OF_CONSOLE, Message, REPORT_PORT};
use super::reporter::Reporter;
use super::spec::{BootSpec, Mode, SPEC_PATH};
use super::{devices, kernel_log, modprobe, mounts, node, tests, xfs};

/// Runs PID 1. It powers the machine off and never returns, because the kernel panics if PID 1 ends.
pub fn main() {
    if let Some(alias) = modprobe::requested_alias() {
        if let Err(error) = modprobe::load(&alias) {
            eprintln!("modprobe: {error:#}");
            std::process::exit(1);
        }
        return;
    }
    if std::process::id() != 1 {
        eprintln!("guest-init is PID 1 of a test machine and does nothing anywhere else");
        std::process::exit(2);
    }
    if let Err(error) = boot() {
        // There is no report port yet. The host notices the missing verdict and shows the console.
        eprintln!("guest-init: {error:#}");
    }
    power_off();
}

fn boot() -> Result<()> {
    mounts::mount_early()?;
    let spec = read_spec()?;
    set_clock(spec.unix_time)?;
    for module in &spec.modules {
        modprobe::load_module(Path::new(module))?;
    }
    let reporter = Reporter::new(devices::port(REPORT_PORT)?);
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    reporter.send(&Message::Started { kernel: kernel.trim().to_owned() });

    let children = Children::new();
    let result = match &spec.mode {
        Mode::Hello => Ok(()),
        Mode::Tests(spec) => tests::run(spec, &children, &reporter),
        Mode::Node(spec) => node::run_node(spec, &children, &reporter),
    };
    reporter.verdict(result.map_err(|error| format!("{error:#}")));
    Ok(())
}

fn read_spec() -> Result<BootSpec> {
    let text = fs::read(SPEC_PATH).with_context(|| format!("read {SPEC_PATH}"))?;
    serde_json::from_slice(&text).with_context(|| format!("parse {SPEC_PATH}"))
}

fn set_clock(unix_time: u64) -> Result<()> {
    let seconds = i64::try_from(unix_time).context("the time of the specification is beyond i64")?;
    clock_settime(ClockId::CLOCK_REALTIME, TimeSpec::new(seconds, 0)).context("set the clock")
}

fn power_off() -> ! {
    nix::unistd::sync();
    if let Err(error) = xfs::close() {
        // The host's check of the disks fails.
        eprintln!("guest-init: {error:#}");
    }
    if let Err(error) = kernel_log::write(END_OF_CONSOLE) {
        eprintln!("guest-init: {error:#}");
    }
    for mode in [RebootMode::RB_POWER_OFF, RebootMode::RB_AUTOBOOT] {
        // This returns only if the machine cannot power off. A reset ends it too (-no-reboot).
        let Err(errno) = reboot(mode);
        eprintln!("guest-init: {mode:?}: {errno}");
    }
    loop {
        std::thread::park();
    }
}

//! Runs test binaries and reports how each ended.

use std::process::Command;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::Result;

use super::children::{Children, Output, PATH};
use super::report::{End, Message, TestBinaryResult};
use super::reporter::Reporter;
use super::services::Services;
use super::spec::{TestBinary, TestsSpec};
use super::{mounts, xfs};

/// The time that a service has to finish its work and to end.
const STOP_TIMEOUT: Duration = Duration::from_secs(40);

pub(super) fn run(spec: &TestsSpec, children: &Children, reporter: &Reporter) -> Result<()> {
    mounts::unmount_early()?;
    mounts::mount_system()?;
    for mount in &spec.mounts {
        mounts::mount_spec(mount)?;
    }
    anyhow::ensure!(!spec.binaries.is_empty(), "no test binary to run");
    let (end, ended) = mpsc::channel();
    let services = Services::new(children.clone(), reporter.clone(), end);
    for service in &spec.services {
        services.start(service)?;
    }
    let mut failed = Vec::new();
    for binary in &spec.binaries {
        let started = Instant::now();
        let end = run_one(spec, binary, children, reporter);
        if end != End::Exited(0) {
            failed.push(format!("{}: {end:?}", binary.name));
        }
        send_report(binary, reporter);
        let result = TestBinaryResult { name: binary.name.clone(), end, time: started.elapsed() };
        reporter.send(&Message::TestBinary(result));
    }
    let late = services.end(STOP_TIMEOUT);
    failed.extend(
        late.into_iter().map(|name| format!("the service {name} did not end within {STOP_TIMEOUT:?}")),
    );
    failed.extend(ended.try_iter().filter_map(Result::err));
    for mount in spec.mounts.iter().rev() {
        mounts::unmount(&mount.target)?;
    }
    failed.extend(xfs::wait_released().into_iter().map(|device| {
        format!(
            "the XFS on {device} is in use after its unmount: a loop device, a mount or a process is left"
        )
    }));
    anyhow::ensure!(failed.is_empty(), "{}", failed.join("; "));
    Ok(())
}

fn run_one(spec: &TestsSpec, binary: &TestBinary, children: &Children, reporter: &Reporter) -> End {
    let mut command = Command::new(&binary.path);
    command.args(&binary.args).env_clear().env("PATH", PATH).envs(&spec.env).envs(&binary.env);
    command.current_dir("/tmp");
    match children.run(&binary.name, command, "", Output::Log(reporter.clone(), None), binary.timeout) {
        Ok((end, ..)) => end,
        Err(error) => End::NotStarted(format!("start {}: {error}", binary.path)),
    }
}

/// Sends the lines of the binary's report file. If the binary died before it wrote the file, the host notices
/// the missing report.
fn send_report(binary: &TestBinary, reporter: &Reporter) {
    let text = binary.report.as_ref().and_then(|path| std::fs::read_to_string(path).ok());
    for line in text.as_deref().unwrap_or_default().lines() {
        reporter.log(&TestBinary::reported_as(&binary.name), line);
    }
}

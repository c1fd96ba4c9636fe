//! Runs test binaries and says how each ended.

use std::process::Command;
use std::time::Instant;

use anyhow::Result;

use super::children::{Children, Output};
use super::mounts;
use super::report::{End, Message, TestBinaryResult};
use super::reporter::Reporter;
use super::spec::{TestBinary, TestsSpec};

pub(super) fn run(spec: &TestsSpec, children: &Children, reporter: &Reporter) -> Result<()> {
    mounts::unmount_early()?;
    mounts::mount_system("")?;
    for mount in &spec.mounts {
        mounts::mount_spec(mount)?;
    }
    anyhow::ensure!(!spec.binaries.is_empty(), "no test binary to run");
    let mut failed = Vec::new();
    for binary in &spec.binaries {
        let started = Instant::now();
        let end = run_one(spec, binary, children, reporter);
        if end != End::Exited(0) {
            failed.push(format!("{}: {end:?}", binary.name));
        }
        let result = TestBinaryResult { name: binary.name.clone(), end, time: started.elapsed() };
        reporter.send(&Message::TestBinary(result));
    }
    for mount in spec.mounts.iter().rev() {
        mounts::unmount(&mount.target)?;
    }
    anyhow::ensure!(failed.is_empty(), "{}", failed.join("; "));
    Ok(())
}

fn run_one(spec: &TestsSpec, binary: &TestBinary, children: &Children, reporter: &Reporter) -> End {
    let mut command = Command::new(&binary.path);
    command.args(&binary.args).env_clear().env("PATH", super::node::PATH).envs(&spec.env).envs(&binary.env);
    command.current_dir("/tmp");
    match children.run(&binary.name, command, "", Output::Log(reporter.clone()), binary.timeout) {
        Ok((end, ..)) => end,
        Err(error) => End::NotStarted(format!("start {}: {error}", binary.path)),
    }
}

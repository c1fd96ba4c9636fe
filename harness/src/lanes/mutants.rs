//! Mutants of the pure functions that decide: cargo-mutants changes each in all ways that it knows, and a unit test of the crate
//! must fail. `.cargo/mutants.toml` lists the functions, and the mutants that no test can notice.

use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result};
use testvm::cargo_tool::CargoTool;
use testvm::process::Program;
use testvm::report::Report;
use testvm::session::Session;
use testvm::{cache, rust_build};

use super::checks;

const CARGO_MUTANTS: CargoTool = CargoTool { name: "cargo-mutants", version: "27.1.0" };
const SUITE: &str = "mutants";
/// The crates, the targets with their unit tests, and the options of the tests. The model of loop devices takes longest, and tests
/// none of the functions.
const PACKAGES: [(&str, &str, &[&str]); 4] = [
    ("loopfs", "--lib", &["--skip=loop_device::"]),
    ("loopfs-tool", "--bins", &[]),
    ("csi", "--lib", &[]),
    ("provisioner", "--lib", &[]),
];
/// The limit for the tests of a mutant, in seconds. A busy machine is slow, so tests that reach it show nothing.
const TIMEOUT: &str = "300";

pub(super) async fn run(session: &Session) -> Result<Report> {
    let program = CARGO_MUTANTS.prepare(session).await?;
    let mut report = Report::new();
    for (package, target, tests) in PACKAGES {
        let started = Instant::now();
        let checked = check(session, &program, package, target, tests).await;
        report.record(SUITE, package, started.elapsed(), &checked);
    }
    Ok(report)
}

/// Tests all mutants of a crate. They are built in a copy of the workspace, with a build directory in the cache.
async fn check(session: &Session, program: &Path, package: &str, target: &str, tests: &[&str]) -> Result<()> {
    let build = session.cache.root().join(SUITE);
    let output = session.workspace.reports(SUITE).join(package);
    // The lists of an earlier run would be read if this one did not begin.
    cache::empty_dir(&output)?;
    let program = rust_build::in_workspace(Program::new(program), session.workspace.root())
        .args(["mutants", "--package", package, "--timeout", TIMEOUT, "--cap-lints=true"])
        .arg("--output")
        .arg(&output)
        .args(["--", target, "--"])
        .args(tests.iter().copied())
        .env("CARGO_PROFILE_DEV_DEBUG", "0")
        .env("CARGO_TARGET_DIR", &build)
        .env("CARGO_BUILD_BUILD_DIR", &build);
    let finished = checks::run(session, &format!("mutants of {package}"), program).await.0?;
    let read = |name: &str| {
        let path = output.join("mutants.out").join(name);
        std::fs::read_to_string(&path)
            .with_context(|| format!("{}\nread {}", finished.failure(), path.display()))
    };
    judge(&read("timeout.txt")?, &read("missed.txt")?)?;
    // 2 says that some were missed, which `judge` has read. Another failure is, for example, a test that fails without any change.
    anyhow::ensure!(matches!(finished.status.code(), Some(0 | 2)), "{}", finished.failure());
    anyhow::ensure!(!read("caught.txt")?.is_empty(), "no mutant was tested");
    Ok(())
}

/// Checks the lists of cargo-mutants, which have a mutant in each line.
fn judge(timeout: &str, missed: &str) -> Result<()> {
    const REMEDY: &str = "add a test, or the mutant with a reason to .cargo/mutants.toml";
    // cargo-mutants 27.1 lists and excludes no deletions of fields: it tests them in all functions of the files.
    let missed: String =
        missed.split_inclusive('\n').filter(|line| !line.contains(": delete field ")).collect();
    anyhow::ensure!(missed.is_empty(), "no unit test notices these changes; {REMEDY}:\n{missed}");
    anyhow::ensure!(timeout.is_empty(), "the tests of these changes do not end; {REMEDY}:\n{timeout}");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_mutant_must_be_noticed() {
        judge("", "a.rs:1:2: delete field b from struct C expression in d\n").unwrap();
        for (timeout, missed) in [("b.rs:1: delete !\n", ""), ("", "b.rs:1: replace && with ||\n")] {
            assert!(judge(timeout, missed).unwrap_err().to_string().contains("b.rs:1"));
        }
    }
}

//! Runs the Go tests of `vm-images`, and converts their output to cases.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use testvm::go_build;
use testvm::process::{self, Program};
use testvm::report::Outcome;
use testvm::session::Session;

use super::libtest::{Case, Run};

/// The module with the sources that become part of the kubelet.
const OVERLAY: &str = "kubernetes/overlay";
/// Its package with tests of project quotas, and the build constraint of these tests.
const QUOTA: &str = "./native/quota";
pub(super) const KERNEL_TESTS: &str = "kernel_tests";
/// The prefix of the names of the tests with this constraint.
const KERNEL_TEST_PREFIX: &str = "TestOnXFS";

/// Why no Go test runs on a machine without Go.
pub(super) const WITHOUT_GO: &str = "Go is not installed (https://go.dev/dl)";

/// Returns `true` if this machine has Go.
pub(super) fn is_installed() -> bool {
    process::find(OsStr::new("go")).is_some()
}

/// Returns the command `program` in the directory of the module, without settings for other work.
pub(super) fn command(session: &Session, program: &str) -> Program {
    go_build::in_module(Program::new(program).downloads(), &session.workspace.definitions().join(OVERLAY))
}

/// Builds the tests that need a kernel with XFS project quotas, as a program for a virtual machine.
pub(super) async fn kernel_tests(session: &Session, directory: &Path) -> Result<PathBuf> {
    let step = session.progress.step("build the Go tests of project quotas");
    let binary = directory.join("go-quota-tests");
    let built = command(session, "go").args(["test", "-c", "-tags", KERNEL_TESTS, "-o"]).arg(&binary);
    session.until_cancelled(built.arg(QUOTA).run()).await.context("build the Go tests of project quotas")?;
    step.done("");
    Ok(binary)
}

/// Returns the arguments with which that program runs the tests whose names contain one of `only`, or all tests.
pub(super) fn arguments(only: &[String]) -> Vec<String> {
    let texts: Vec<String> = only.iter().map(|text| format!(r"\Q{text}\E")).collect();
    let pattern = format!("^{KERNEL_TEST_PREFIX}.*({})", texts.join("|"));
    vec!["-test.v".to_owned(), "-test.run".to_owned(), pattern]
}

/// Parses the output of `go test -v`. The lines between the start of a test and its result are the reason of a failure
/// and of a skip.
pub(super) fn parse(output: &str) -> Run {
    let mut cases = Vec::new();
    let mut started: Option<(String, Vec<&str>)> = None;
    for line in output.lines() {
        if let Some(name) = line.strip_prefix("=== RUN   ") {
            // Subtests are part of the test whose name they begin with.
            if !name.contains('/') {
                started = Some((name.trim().to_owned(), Vec::new()));
            }
        } else if let Some((word, name, time)) = result(line) {
            let lines = started.take().map_or_else(Vec::new, |(_, lines)| lines);
            let reason = lines.join("\n").trim().to_owned();
            let outcome = match word {
                "PASS" => Outcome::Passed,
                "SKIP" => Outcome::Unavailable(reason),
                _ => Outcome::Failed(reason),
            };
            cases.push(Case { name: name.to_owned(), outcome, time: Some(time) });
        } else if let Some((_, lines)) = &mut started {
            lines.push(line);
        }
    }
    if let Some((name, lines)) = started {
        let message = format!("it did not end: the program died in it\n{}", lines.join("\n"));
        cases.push(Case { name, outcome: Outcome::Failed(message), time: None });
    }
    Run::uncounted(cases)
}

/// Parses `--- PASS: TestName (0.01s)`.
fn result(line: &str) -> Option<(&str, &str, Duration)> {
    let (word, rest) = line.trim_end().strip_prefix("--- ")?.split_once(": ")?;
    let (name, seconds) = rest.split_once(" (")?;
    let time = Duration::try_from_secs_f64(seconds.strip_suffix("s)")?.parse().ok()?).ok()?;
    matches!(word, "PASS" | "FAIL" | "SKIP").then_some((word, name, time))
}

#[cfg(test)]
mod tests {
    use testvm::report::Report;

    use super::*;

    const OUTPUT: &str = "=== RUN   TestGood
--- PASS: TestGood (0.25s)
=== RUN   TestParts
=== RUN   TestParts/one
    --- PASS: TestParts/one (0.00s)
--- PASS: TestParts (0.00s)
=== RUN   TestBad
    x_test.go:3: expected 1
--- FAIL: TestBad (1.00s)
=== RUN   TestLater
    x_test.go:9: needs root
--- SKIP: TestLater (0.00s)
FAIL
FAIL\texample.invalid/x\t1.3s
";

    /// A case that did not pass has its reason.
    #[test]
    fn each_test_becomes_a_case() {
        let expected = [
            ("TestGood", Outcome::Passed),
            ("TestParts", Outcome::Passed),
            ("TestBad", Outcome::Failed("x_test.go:3: expected 1".to_owned())),
            ("TestLater", Outcome::Unavailable("x_test.go:9: needs root".to_owned())),
        ];
        let cases = parse(OUTPUT).cases;
        assert!(
            cases.iter().map(|case| (case.name.as_str(), case.outcome.clone())).eq(expected),
            "{cases:?}"
        );
        assert_eq!(cases[0].time, Some(Duration::from_millis(250)));
    }

    #[test]
    fn program_contradicting_its_tests_has_failed() {
        for (output, ended_well, failed) in [
            ("", Ok(()), 1),
            ("", Err("does not compile".to_owned()), 1),
            ("=== RUN   TestA\npanic: x\n", Err("exit code 2".to_owned()), 1),
            ("--- PASS: TestA (0.00s)\n", Err("exit code 1".to_owned()), 1),
            ("--- PASS: TestA (0.00s)\nPASS\n", Ok(()), 0),
        ] {
            let mut report = Report::new();
            parse(output).report(&mut report, "suite", ended_well, &[]);
            assert_eq!(report.failed(), failed, "{output:?}: {report:?}");
        }
    }

    #[test]
    fn the_pattern_contains_each_text_literally() {
        assert_eq!(arguments(&[])[2], "^TestOnXFS.*()");
        assert_eq!(arguments(&["a::b".to_owned(), "c".to_owned()])[2], r"^TestOnXFS.*(\Qa::b\E|\Qc\E)");
    }
}

//! Runs the Go tests of `vm-images`, and converts their output to cases.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use testvm::go_build;
use testvm::process::{self, Program};
use testvm::report::{Outcome, Report};
use testvm::session::Session;

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

/// Adds a case for each test in the output of `go test -v`, and one more if the program's own result contradicts them.
/// `selected` is `false` if there may be no test.
pub(super) fn report(
    report: &mut Report,
    suite: &str,
    output: &str,
    ended_well: Result<(), String>,
    selected: bool,
) {
    let cases = parse(output);
    let failed = cases.iter().any(|(_, outcome, _)| matches!(outcome, Outcome::Failed(_)));
    let problem = match ended_well {
        Err(why) if !failed => Some(why),
        Ok(()) if failed => Some("it ended well although a test failed".to_owned()),
        Ok(()) if cases.is_empty() && selected => Some("it ran no test".to_owned()),
        _ => None,
    };
    for (name, outcome, time) in cases {
        report.push(suite, &name, outcome, time);
    }
    if let Some(problem) = problem {
        report.push(suite, "the tests", Outcome::Failed(problem), Duration::ZERO);
    }
}

/// Parses the output of `go test -v`. The lines between the start of a test and its result are the reason of a failure
/// and of a skip.
fn parse(output: &str) -> Vec<(String, Outcome, Duration)> {
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
            cases.push((name.to_owned(), outcome, time));
        } else if let Some((_, lines)) = &mut started {
            lines.push(line);
        }
    }
    if let Some((name, lines)) = started {
        let message = format!("it did not end: the program died in it\n{}", lines.join("\n"));
        cases.push((name, Outcome::Failed(message), Duration::ZERO));
    }
    cases
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

    fn outcomes(output: &str, ended_well: Result<(), String>) -> Vec<(String, Outcome)> {
        let mut cases = Report::new();
        report(&mut cases, "suite", output, ended_well, true);
        cases.cases.into_iter().map(|case| (case.name, case.outcome)).collect()
    }

    /// A case that did not pass has its reason.
    #[test]
    fn each_test_becomes_a_case() {
        let expected = [
            ("TestGood", Outcome::Passed),
            ("TestParts", Outcome::Passed),
            ("TestBad", Outcome::Failed("x_test.go:3: expected 1".to_owned())),
            ("TestLater", Outcome::Unavailable("x_test.go:9: needs root".to_owned())),
        ];
        let expected = expected.map(|(name, outcome)| (name.to_owned(), outcome));
        assert_eq!(outcomes(OUTPUT, Err("exit code 1".to_owned())), expected);
        assert_eq!(parse(OUTPUT)[0].2, Duration::from_millis(250));
    }

    #[test]
    fn program_contradicting_its_tests_has_failed() {
        for (output, ended_well) in [
            ("", Ok(())),
            ("", Err("does not compile".to_owned())),
            ("=== RUN   TestA\npanic: x\n", Err("exit code 2".to_owned())),
            ("--- FAIL: TestA (0.00s)\n", Ok(())),
            ("--- PASS: TestA (0.00s)\n", Err("exit code 1".to_owned())),
        ] {
            let cases = outcomes(output, ended_well);
            assert!(
                cases.iter().any(|(_, outcome)| matches!(outcome, Outcome::Failed(_))),
                "{output:?}: {cases:?}"
            );
        }
        assert_eq!(outcomes("--- PASS: TestA (0.00s)\nPASS\n", Ok(())).len(), 1);
    }

    #[test]
    fn the_pattern_contains_each_text_literally() {
        assert_eq!(arguments(&[])[2], "^TestOnXFS.*()");
        assert_eq!(arguments(&["a::b".to_owned(), "c".to_owned()])[2], r"^TestOnXFS.*(\Qa::b\E|\Qc\E)");
    }
}

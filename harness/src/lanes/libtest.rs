//! Converts the output of Rust's test harness to cases.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use testvm::report::{Outcome, Report};

/// The output of one test binary.
#[derive(Debug, Default, Eq, PartialEq)]
pub(super) struct Run {
    pub(super) cases: Vec<Case>,
    /// The counts that the binary printed, or `None` if it did not print any.
    totals: Option<Totals>,
}

#[derive(Debug, Eq, PartialEq)]
pub(super) struct Case {
    pub(super) name: String,
    pub(super) outcome: Outcome,
    /// The time since the end of the test before it, if the line times are known.
    pub(super) time: Option<Duration>,
}

/// The beginning of the line in which a test prints why it cannot check anything: `report_skip` of the tests.
const SKIPPED: &str = "this test is skipped: ";

/// The number of all tests, and of those that failed.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
struct Totals {
    all: usize,
    failed: usize,
}

impl Run {
    /// Returns the tests of a binary that prints no counts.
    pub(super) fn uncounted(cases: Vec<Case>) -> Run {
        let totals = Totals::of(&cases);
        Run { cases, totals: Some(totals) }
    }

    /// Parses the output of one test binary, or of several in sequence.
    pub(super) fn parse(output: &str) -> Run {
        Run::parse_timed(output, &[])
    }

    /// Parses the output of a run with one thread. `times` has the time at which each line was received.
    pub(super) fn parse_timed(output: &str, times: &[Instant]) -> Run {
        let mut run = Run::default();
        let mut last_end = times.first().copied();
        let mut details: Vec<(String, String)> = Vec::new();
        // With one thread, the harness prints a test's name when it starts and its result when it ends.
        // Output that the test writes directly to the descriptors is in between.
        let mut started: Option<String> = None;
        let mut skipped: Option<Outcome> = None;
        for (number, line) in output.lines().enumerate() {
            let mut case = |name, outcome| {
                let now = times.get(number).copied();
                let time = now.zip(last_end).map(|(now, last)| now.saturating_duration_since(last));
                last_end = now;
                Case { name, outcome, time }
            };
            if let Some(totals) = totals(line) {
                let sum = run.totals.get_or_insert_default();
                sum.all += totals.all;
                sum.failed += totals.failed;
            } else if let Some(name) =
                line.strip_prefix("---- ").and_then(|rest| rest.strip_suffix(" stdout ----"))
            {
                details.push((name.to_owned(), String::new()));
            } else if let Some((name, word)) = started_test(line) {
                match outcome(word) {
                    Some(outcome) => run.cases.push(case(name, outcome)),
                    None => started = Some(name),
                }
            } else if let (Some(_), Some(reason)) = (&started, line.strip_prefix(SKIPPED)) {
                skipped = Some(Outcome::Unavailable(reason.to_owned()));
            } else if let Some(outcome) = outcome(line.trim()).filter(|_| started.is_some()) {
                let outcome = skipped.take().filter(|_| outcome == Outcome::Passed).unwrap_or(outcome);
                run.cases.extend(started.take().map(|name| case(name, outcome)));
            } else if let Some((_, text)) = details.last_mut() {
                text.push_str(line);
                text.push('\n');
            }
        }
        if let Some(name) = started {
            let outcome = Outcome::Failed("it did not end: the test binary died in it".to_owned());
            run.cases.push(Case { name, outcome, time: None });
        }
        for case in &mut run.cases {
            let detail = details.iter().find(|(name, _)| *name == case.name);
            if let (Outcome::Failed(message), Some((_, text))) = (&mut case.outcome, detail) {
                *message = text.split("\nfailures:\n").next().unwrap_or(text).trim().to_owned();
            }
        }
        run
    }

    /// Adds the cases to `report`. Adds one more if the binary's own result contradicts them: a different count, an exit code that does
    /// not match its tests, or no tests at all, unless `only` selects the tests whose names contain one of its texts.
    pub(super) fn report(
        self,
        report: &mut Report,
        suite: &str,
        ended_well: Result<(), String>,
        only: &[String],
    ) {
        let counted = Totals::of(&self.cases);
        let problem = match (&ended_well, self.totals) {
            (Err(why), None) => Some(why.clone()),
            (Err(why), _) if counted.failed == 0 => Some(why.clone()),
            (_, None) => Some("it did not count its tests, so it did not run them all".to_owned()),
            (_, Some(totals)) if totals != counted => {
                Some(format!("it says {totals:?}, and its output shows {counted:?}"))
            }
            (_, Some(_)) if self.cases.is_empty() && only.is_empty() => Some("it holds no test".to_owned()),
            _ => None,
        };
        let passed = self.cases.iter().filter(|case| case.outcome == Outcome::Passed);
        // Without their modules.
        let passed: BTreeSet<String> =
            passed.filter_map(|case| case.name.rsplit("::").next().map(str::to_owned)).collect();
        for case in self.cases {
            let outcome = match case.outcome {
                Outcome::Unavailable(reason) if is_run_by(&reason, &passed) => Outcome::Skipped(reason),
                outcome => outcome,
            };
            report.push(suite, &case.name, outcome, case.time);
        }
        if let Some(problem) = problem {
            report.push(suite, "the test binary", Outcome::Failed(problem), None);
        }
    }
}

impl Totals {
    fn of(cases: &[Case]) -> Totals {
        let failed = cases.iter().filter(|case| matches!(case.outcome, Outcome::Failed(_))).count();
        Totals { all: cases.len(), failed }
    }
}

/// Returns `true` if a test is ignored because another one runs it, such as `the test NAME runs it`, and that one passed.
fn is_run_by(reason: &str, passed: &BTreeSet<String>) -> bool {
    let other = reason.strip_prefix("the test ").and_then(|rest| rest.split_once(" runs it"));
    other.is_some_and(|(name, _)| passed.contains(name))
}

/// Parses `test a::b ... ok`, or the start of such a line if the test wrote other output in between.
fn started_test(line: &str) -> Option<(String, &str)> {
    let rest = line.strip_prefix("test ")?;
    // A guest sends no spaces at the end of a line.
    let (name, word) = rest.split_once(" ... ").or_else(|| Some((rest.strip_suffix(" ...")?, "")))?;
    let name = name.strip_suffix(" - should panic").unwrap_or(name);
    Some((name.to_owned(), word.trim()))
}

fn outcome(word: &str) -> Option<Outcome> {
    match word {
        "ok" => Some(Outcome::Passed),
        "FAILED" => Some(Outcome::Failed("it failed; see the log".to_owned())),
        _ => word
            .strip_prefix("ignored")
            .map(|reason| Outcome::Unavailable(reason.trim_start_matches(',').trim().to_owned())),
    }
}

/// Parses `test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.01s`
fn totals(line: &str) -> Option<Totals> {
    let counts = line.strip_prefix("test result: ")?.split_once(". ")?.1;
    let count = |word: &str| -> Option<usize> {
        let part = counts.split(';').find_map(|part| part.trim().strip_suffix(word))?;
        part.trim().parse().ok()
    };
    let failed = count("failed")?;
    Some(Totals { all: count("passed")? + failed + count("ignored")?, failed })
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "
running 3 tests
test quota::a_limit_is_enforced ... ok
test quota::later ... ignored, needs two disks
test loop_device::noisy ... something the test wrote
ok

test result: ok. 2 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.10s
";

    fn report(output: &str, ended: Result<(), String>) -> Report {
        let mut report = Report::new();
        Run::parse(output).report(&mut report, "kernel", ended, &[]);
        report
    }

    /// If the outer test fails, the inner one does not count as skipped.
    #[test]
    fn ignored_inner_test_is_skipped() {
        for (outer, expected) in [("ok", 1), ("FAILED", 0)] {
            let output = format!(
                "running 2 tests\ntest a::outer ... {outer}\ntest a::inner ... ignored, the test outer runs it twice\n"
            );
            let mut report = Report::new();
            Run::parse(&output).report(&mut report, "suite", Ok(()), &[]);
            assert_eq!(report.skipped(), expected, "{report:?}");
        }
    }

    #[test]
    fn every_test_is_a_case() {
        let report = report(GOOD, Ok(()));
        assert_eq!((report.passed(), report.failed(), report.not_run()), (2, 0, 1));
        assert_eq!(report.cases[1].outcome, Outcome::Unavailable("needs two disks".to_owned()));
    }

    #[test]
    fn test_time_starts_at_previous_end() {
        let start = Instant::now();
        // The first line is empty.
        let heard: Vec<Instant> =
            [0, 0, 5, 6, 7, 27].map(|seconds| start + Duration::from_secs(seconds)).to_vec();
        let run = Run::parse_timed(GOOD, &heard);
        let times: Vec<Option<u64>> =
            run.cases.iter().map(|case| case.time.map(|time| time.as_secs())).collect();
        assert_eq!(times, [Some(5), Some(1), Some(21)]);
        assert_eq!(Run::parse(GOOD).cases[0].time, None);
    }

    #[test]
    fn failed_case_has_test_output() {
        let output = "
running 2 tests
test a ... FAILED
test b ... ok

failures:

---- a stdout ----
thread 'a' panicked at x.rs:1:1:
asked 4096, got 0

failures:
    a

test result: FAILED. 1 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s
";
        let report = report(output, Err("exited with 101".to_owned()));
        assert_eq!(report.summary(), "1 passed, 1 failed, 0 skipped");
        let Outcome::Failed(message) = &report.cases[0].outcome else { panic!("{report:?}") };
        assert!(message.ends_with("asked 4096, got 0"), "{message}");
    }

    #[test]
    fn crashed_binary_reports_its_last_test() {
        let report =
            report("running 2 tests\ntest a ... ok\ntest b ... ", Err("killed by SIGSEGV".to_owned()));
        assert_eq!(report.summary(), "1 passed, 2 failed, 0 skipped");
        assert!(!report.succeeded());
    }

    #[test]
    fn self_skipped_tests_are_unavailable() {
        for space in ["", " "] {
            let output = format!(
                "running 2 tests\ntest a ...{space}\nthis test is skipped: Linux 6.1\nok\ntest b ... ok\n\n\
                 test result: ok. 2 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s\n"
            );
            let report = report(&output, Ok(()));
            assert_eq!(report.cases[0].outcome, Outcome::Unavailable("Linux 6.1".to_owned()));
            assert_eq!((report.cases.len(), report.passed(), report.failed()), (2, 1, 0), "{report:?}");
        }
    }

    #[test]
    fn output_without_tests_is_failure_unless_selected() {
        let output = "running 0 tests\n\ntest result: ok. 0 passed; 0 failed; 0 ignored; 0 measured; 7 filtered out; \
            finished in 0.00s\n";
        for (output, ended, only, failed) in [
            (output, Ok(()), &[][..], 1),
            (output, Ok(()), &["quota".to_owned()], 0),
            (output, Err("exited with 1".to_owned()), &["quota".to_owned()], 1),
            ("", Ok(()), &["quota".to_owned()], 1),
            (GOOD, Err("exited with 1".to_owned()), &[], 1),
        ] {
            let mut report = Report::new();
            Run::parse(output).report(&mut report, "kernel", ended, only);
            assert_eq!(report.failed(), failed, "{report:?}");
        }
    }
}

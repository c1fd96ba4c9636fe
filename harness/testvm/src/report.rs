//! The results of a run, with their times: for users, for CI and for the exit code.

use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use quick_junit::{NonSuccessKind, TestCase, TestCaseStatus, TestSuite};
use serde::{Deserialize, Serialize};

use crate::cache;
use crate::excerpt::excerpt;
use crate::progress::{Step, seconds};
use crate::versions::{self, Used};

/// The result of one case.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case", tag = "outcome", content = "message")]
pub enum Outcome {
    Passed,
    /// The complete reason, because a reader of the report has nothing else.
    Failed(String),
    /// The case failed, as it must, with the reason: the thing under test is known to lack what the case requires.
    ExpectedFailure(String),
    /// The reason why the case is left out, on any machine or by a decision of the user.
    Skipped(String),
    /// What this machine lacks, so that the case could not run. The report fails, unless its owner decides that the case may be
    /// skipped.
    Unavailable(String),
    /// The case was selected, but an earlier one failed or the run was stopped.
    NotRun,
}

/// One check.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Case {
    /// The lane, if the case belongs to one.
    pub lane: Option<String>,
    /// The part of a run to which the case belongs.
    pub suite: String,
    pub name: String,
    #[serde(flatten)]
    pub outcome: Outcome,
    /// `None` if the time of this case alone was not measured.
    #[serde(rename = "seconds", serialize_with = "as_seconds", deserialize_with = "from_seconds")]
    pub time: Option<Duration>,
}

impl Case {
    /// Returns `true` if the case ran, whatever its result.
    #[must_use]
    pub fn has_run(&self) -> bool {
        matches!(self.outcome, Outcome::Passed | Outcome::Failed(_) | Outcome::ExpectedFailure(_))
    }
}

/// The time of a part of a run.
#[derive(Clone, Debug, Serialize)]
pub struct Timed {
    pub name: String,
    #[serde(rename = "seconds", serialize_with = "as_seconds")]
    pub time: Duration,
}

/// All cases of a run, in the order in which they ran.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Report {
    pub cases: Vec<Case>,
    /// The time of each lane. Lanes run concurrently.
    pub lanes: Vec<Timed>,
    /// The time of each step of the progress.
    pub steps: Vec<Timed>,
    /// The versions of what was tested and of what tested it.
    pub versions: Used,
}

impl Report {
    /// Creates a report without cases.
    pub fn new() -> Report {
        Report::default()
    }

    /// Adds a case.
    pub fn push(&mut self, suite: &str, name: &str, outcome: Outcome, time: impl Into<Option<Duration>>) {
        let time = time.into();
        self.cases.push(Case { lane: None, suite: suite.to_owned(), name: name.to_owned(), outcome, time });
    }

    /// Records `result` as a case that passed or failed.
    pub fn record<T>(
        &mut self,
        suite: &str,
        name: &str,
        time: impl Into<Option<Duration>>,
        result: &Result<T>,
    ) {
        let outcome = match result {
            Ok(_) => Outcome::Passed,
            Err(error) => Outcome::Failed(format!("{error:#}")),
        };
        self.push(suite, name, outcome, time);
    }

    /// Runs `check`, and records it as a case. Returns its value, or `None` if it failed.
    pub async fn run<T>(
        &mut self,
        suite: &str,
        name: &str,
        check: impl Future<Output = Result<T>>,
    ) -> Option<T> {
        let started = Instant::now();
        // Boxed, because callers have several large checks.
        let result = Box::pin(check).await;
        self.record(suite, name, started.elapsed(), &result);
        result.ok()
    }

    /// Ends a step of the progress with the summary of this report.
    pub fn end(&self, step: Step) {
        match self.succeeded() {
            true => step.done(self.summary()),
            false => step.failed(self.summary()),
        }
    }

    /// Puts the name of a part before the name of each suite that does not begin with it.
    pub fn prefix_suites(&mut self, part: &str) {
        for case in &mut self.cases {
            if case.suite != part && !case.suite.starts_with(&format!("{part}: ")) {
                case.suite = format!("{part}: {}", case.suite);
            }
        }
    }

    /// Adds all cases of another report.
    pub fn append(&mut self, other: Report) {
        self.cases.extend(other.cases);
        self.lanes.extend(other.lanes);
        self.steps.extend(other.steps);
    }

    /// Returns the times of the lanes, and of the steps and cases that took longest, with a title before each.
    #[must_use]
    pub fn times(&self) -> String {
        let full_name = |case: &Case| format!("{}: {}", case.suite, case.name);
        let timed = |case: &Case| Some(Timed { name: full_name(case), time: case.time? });
        let cases: Vec<Timed> = self.cases.iter().filter_map(timed).collect();
        // A step of a story is a case.
        let of_cases: BTreeSet<String> = self.cases.iter().map(full_name).collect();
        let steps = self.steps.iter().filter(|step| !of_cases.contains(&step.name));
        longest("lanes", &self.lanes, usize::MAX)
            + &longest("longest steps", steps, LONGEST)
            + &longest("longest cases", &cases, LONGEST)
    }

    /// Returns the number of cases that passed.
    #[must_use]
    pub fn passed(&self) -> usize {
        self.count(|outcome| *outcome == Outcome::Passed)
    }

    /// Returns the number of cases that failed.
    #[must_use]
    pub fn failed(&self) -> usize {
        self.count(|outcome| matches!(outcome, Outcome::Failed(_)))
    }

    /// Returns the number of cases that failed as they must.
    #[must_use]
    pub fn expected_failures(&self) -> usize {
        self.count(|outcome| matches!(outcome, Outcome::ExpectedFailure(_)))
    }

    /// Returns the number of cases that were left out.
    #[must_use]
    pub fn skipped(&self) -> usize {
        self.count(|outcome| matches!(outcome, Outcome::Skipped(_)))
    }

    /// Returns the number of selected cases that did not run.
    #[must_use]
    pub fn not_run(&self) -> usize {
        self.count(|outcome| matches!(outcome, Outcome::NotRun | Outcome::Unavailable(_)))
    }

    fn count(&self, matches: impl Fn(&Outcome) -> bool) -> usize {
        self.cases.iter().filter(|case| matches(&case.outcome)).count()
    }

    /// Returns `true` if at least one case was selected, all of them ran, and none failed.
    #[must_use]
    pub fn succeeded(&self) -> bool {
        !self.cases.is_empty() && self.failed() == 0 && self.not_run() == 0 && self.passed() > 0
    }

    /// Returns a summary such as `3 passed, 0 failed, 1 skipped`, with the number of expected failures if there are any.
    #[must_use]
    pub fn summary(&self) -> String {
        let expected = match self.expected_failures() {
            0 => String::new(),
            count => format!(", {count} failed as expected"),
        };
        format!("{} passed, {} failed, {} skipped{expected}", self.passed(), self.failed(), self.skipped())
    }

    /// Returns one line per case, with its time and the first lines of its message. A suite with many passed cases has only one line for
    /// them.
    #[must_use]
    pub fn table(&self) -> String {
        let mut text = String::new();
        for suite in self.suites() {
            let cases: Vec<&Case> = self.cases.iter().filter(|case| case.suite == suite).collect();
            let fold = cases.len() > FOLD_ABOVE;
            let times: Vec<Duration> = cases.iter().filter_map(|case| case.time).collect();
            let total =
                if times.is_empty() { String::new() } else { format!(", {}", seconds(times.iter().sum())) };
            _ = writeln!(text, "\n{suite} ({} cases{total})", cases.len());
            let passed = cases.iter().filter(|case| case.outcome == Outcome::Passed).count();
            if fold && passed > 0 {
                _ = writeln!(text, "  passed   {passed} cases");
            }
            for case in cases {
                case_lines(&mut text, case, fold);
            }
        }
        text
    }

    /// Returns the failed cases as in the table, each after a line break, or an empty text.
    #[must_use]
    pub fn failures(&self) -> String {
        let mut text = String::new();
        for case in self.cases.iter().filter(|case| matches!(case.outcome, Outcome::Failed(_))) {
            text.push('\n');
            case_lines(&mut text, case, true);
        }
        text.trim_end().to_owned()
    }

    fn suites(&self) -> Vec<&str> {
        let mut suites: Vec<&str> = Vec::new();
        for case in &self.cases {
            if !suites.contains(&case.suite.as_str()) {
                suites.push(&case.suite);
            }
        }
        suites
    }

    fn junit(&self, project: &str) -> quick_junit::Report {
        let mut junit = quick_junit::Report::new(project);
        for name in self.suites() {
            let mut suite = TestSuite::new(name);
            for case in self.cases.iter().filter(|case| case.suite == name) {
                let mut test = TestCase::new(case.name.as_str(), junit_status(&case.outcome));
                test.set_classname(name);
                if let Some(time) = case.time {
                    test.set_time(time);
                }
                suite.add_test_case(test);
            }
            junit.add_test_suite(suite);
        }
        junit
    }
}

/// The files of a report, for readers and for CI: `junit.xml`, `report.json`, `report.txt` and `versions.txt`.
#[derive(Debug)]
pub struct ReportFiles {
    directory: PathBuf,
    project: &'static str,
}

impl ReportFiles {
    /// Removes the files of an earlier run, so that a run that is killed leaves no verdict. `project` is the name of the JUnit
    /// report.
    pub fn begin(directory: PathBuf, project: &'static str) -> Result<ReportFiles> {
        for name in [JUNIT, JSON, TEXT, VERSIONS] {
            cache::remove_file(&directory.join(name))?;
        }
        Ok(ReportFiles { directory, project })
    }

    /// Returns the directory of the files.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Writes the files.
    pub fn write(&self, report: &Report) -> Result<()> {
        let directory = &self.directory;
        fs::create_dir_all(directory).with_context(|| format!("create {}", directory.display()))?;
        let junit = report.junit(self.project).to_string().context("render junit.xml")?;
        let mut json = serde_json::to_value(report).context("render report.json")?;
        json["summary"] = report.summary().into();
        let json = serde_json::to_string_pretty(&json).context("render report.json")?;
        let text = format!("{}{}\n{}\n", report.table(), report.times(), report.summary());
        for (name, content) in [(JUNIT, junit), (JSON, json), (TEXT, text)] {
            let path = directory.join(name);
            fs::write(&path, content).with_context(|| format!("write {}", path.display()))?;
        }
        versions::write(&report.versions, &directory.join(VERSIONS))
    }
}

const JUNIT: &str = "junit.xml";
const JSON: &str = "report.json";
const TEXT: &str = "report.txt";
const VERSIONS: &str = "versions.txt";

/// A suite with more cases than this lists only those that need attention.
const FOLD_ABOVE: usize = 24;

/// The number of steps and of cases whose times are printed.
const LONGEST: usize = 12;

fn longest<'a>(title: &str, all: impl IntoIterator<Item = &'a Timed>, count: usize) -> String {
    let mut timed: Vec<_> = all.into_iter().map(|part| (part.time, &part.name)).collect();
    timed.sort_by_key(|(time, _)| Reverse(*time));
    if timed.is_empty() {
        return String::new();
    }
    let lines =
        timed.into_iter().take(count).map(|(time, name)| format!("  {:>12}  {name}\n", seconds(time)));
    format!("\n{title}\n{}", lines.collect::<String>())
}

fn case_lines(text: &mut String, case: &Case, fold: bool) {
    let (word, message) = match &case.outcome {
        Outcome::Passed if fold => return,
        Outcome::Passed => ("passed", ""),
        Outcome::Failed(message) => ("FAILED", message.as_str()),
        Outcome::ExpectedFailure(reason) => ("expected", reason.as_str()),
        Outcome::Skipped(reason) => ("skipped", reason.as_str()),
        Outcome::Unavailable(reason) => ("MISSING", reason.as_str()),
        Outcome::NotRun => ("not run", ""),
    };
    // Padding counts chars; names are ASCII.
    let time = case.time.map(seconds).unwrap_or_default();
    _ = writeln!(text, "{}", format!("  {word:<8} {:<64} {time:>12}", case.name).trim_end());
    for line in excerpt(message).lines() {
        _ = writeln!(text, "             {line}");
    }
}

fn junit_status(outcome: &Outcome) -> TestCaseStatus {
    let error = || TestCaseStatus::non_success(NonSuccessKind::Error);
    let (mut status, message) = match outcome {
        Outcome::Passed => return TestCaseStatus::success(),
        Outcome::Failed(why) => (TestCaseStatus::non_success(NonSuccessKind::Failure), why.clone()),
        // JUnit has no such state; pytest reports it in this way.
        Outcome::ExpectedFailure(why) => (TestCaseStatus::skipped(), format!("failed as expected: {why}")),
        Outcome::Skipped(reason) => (TestCaseStatus::skipped(), reason.clone()),
        // JUnit has no such states either, and a reader must not take the case for skipped.
        Outcome::NotRun => (error(), "selected, but not run".to_owned()),
        Outcome::Unavailable(reason) => (error(), reason.clone()),
    };
    status.set_message(message.lines().next().unwrap_or_default()).set_description(message);
    status
}

fn as_seconds<S: serde::Serializer>(
    time: &(impl Copy + Into<Option<Duration>>),
    serializer: S,
) -> Result<S::Ok, S::Error> {
    (*time).into().map(|time| time.as_secs_f64()).serialize(serializer)
}

fn from_seconds<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Option<Duration>, D::Error> {
    Ok(Option::<f64>::deserialize(deserializer)?.map(Duration::from_secs_f64))
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    fn report(outcomes: &[Outcome]) -> Report {
        let mut report = Report::new();
        for (index, outcome) in outcomes.iter().enumerate() {
            report.push("suite", &format!("case {index}"), outcome.clone(), Duration::from_secs(1));
        }
        report
    }

    #[rstest]
    #[case::nothing_selected(&[], false)]
    #[case::all_passed(&[Outcome::Passed], true)]
    #[case::one_failed(&[Outcome::Passed, Outcome::Failed("no".into())], false)]
    #[case::one_not_run(&[Outcome::Passed, Outcome::NotRun], false)]
    #[case::a_skip_beside_a_pass(&[Outcome::Passed, Outcome::Skipped("n/a".into())], true)]
    #[case::an_expected_failure_beside_a_pass(&[Outcome::Passed, Outcome::ExpectedFailure("known".into())], true)]
    #[case::only_expected_failures(&[Outcome::ExpectedFailure("known".into())], false)]
    #[case::a_tool_is_missing(&[Outcome::Passed, Outcome::Unavailable("no Go".into())], false)]
    #[case::only_skips(&[Outcome::Skipped("n/a".into())], false)]
    fn success_needs_pass_and_no_failure(#[case] outcomes: &[Outcome], #[case] expected: bool) {
        assert_eq!(report(outcomes).succeeded(), expected);
    }

    #[test]
    fn longest_steps_and_cases_are_listed() {
        let timed = |name: &str, seconds| Timed { name: name.into(), time: Duration::from_secs(seconds) };
        let mut report = Report { lanes: vec![timed("unit", 5), timed("e2e", 70)], ..Report::new() };
        for case in 0..LONGEST as u64 + 1 {
            report.push("flow", &case.to_string(), Outcome::Passed, Duration::from_secs(case));
        }
        report.push("flow", "not measured", Outcome::Passed, None);
        report.steps = vec![timed("flow: 3", 3), timed("build it", 4)];
        let times = report.times();
        assert!(times.starts_with("\nlanes\n    1 min 10 s  e2e\n         5.0 s  unit\n"), "{times}");
        assert!(times.contains("longest steps\n         4.0 s  build it\n\nlongest cases\n"), "{times}");
        assert!(!times.contains("flow: 0") && !times.contains("not measured"), "{times}");
    }

    #[test]
    fn suite_is_prefixed_once() {
        let mut report = Report::new();
        for suite in ["flow", "kind", "kind: removal", "kinds"] {
            report.push(suite, "a", Outcome::Passed, None);
        }
        report.prefix_suites("kind");
        assert_eq!(report.suites(), ["kind: flow", "kind", "kind: removal", "kind: kinds"]);
    }

    #[test]
    fn the_summary_counts_each_outcome() {
        let report = report(&[
            Outcome::Passed,
            Outcome::Failed("a".into()),
            Outcome::Skipped("b".into()),
            Outcome::NotRun,
        ]);
        assert_eq!(report.summary(), "1 passed, 1 failed, 1 skipped");
        assert_eq!(report.not_run(), 1);
    }

    /// The table has its reason.
    #[test]
    fn expected_failure_is_counted_separately() {
        let report = report(&[Outcome::Passed, Outcome::ExpectedFailure("no limit".into())]);
        assert_eq!(report.summary(), "1 passed, 0 failed, 0 skipped, 1 failed as expected");
        assert!(report.table().contains("  expected case 1 "), "{}", report.table());
        assert!(report.table().contains("no limit") && report.failures().is_empty());
    }

    /// The other cases are counted.
    #[test]
    fn long_suite_lists_only_failures() {
        let mut outcomes = vec![Outcome::Passed; FOLD_ABOVE + 1];
        outcomes.push(Outcome::Failed("asked 1, got 2\nsee log".into()));
        let report = report(&outcomes);
        let table = report.table();
        assert!(table.contains(&format!("passed   {} cases", FOLD_ABOVE + 1)), "{table}");
        assert!(table.contains("asked 1, got 2"), "{table}");
        assert!(!table.contains("case 3 "), "{table}");
        let failures = report.failures();
        assert!(failures.starts_with("\n  FAILED   case 25 "), "{failures:?}");
        assert!(failures.ends_with("\n             see log"), "{failures:?}");
    }

    /// Both files have the messages as well.
    #[test]
    fn junit_and_json_have_every_case() {
        let dir = tempfile::tempdir().unwrap();
        let mut report = report(&[Outcome::Passed, Outcome::Failed("reason <&>".into()), Outcome::NotRun]);
        report.push("suite", "case", Outcome::Unavailable("no tool".into()), None);
        ReportFiles::begin(dir.path().to_owned(), "project").unwrap().write(&report).unwrap();
        let junit = std::fs::read_to_string(dir.path().join("junit.xml")).unwrap();
        assert!(junit.contains("tests=\"4\"") && junit.contains("failures=\"1\""), "{junit}");
        assert!(junit.contains("reason &lt;&amp;"), "{junit}");
        let json: serde_json::Value =
            serde_json::from_str(&std::fs::read_to_string(dir.path().join("report.json")).unwrap()).unwrap();
        assert_eq!(json["cases"][1]["outcome"], "failed");
        assert_eq!(json["cases"][1]["message"], "reason <&>");
        let cases: Vec<Case> = serde_json::from_value(json["cases"].clone()).unwrap();
        assert_eq!(cases, report.cases);
    }

    #[test]
    fn killed_run_leaves_no_old_report() {
        let dir = tempfile::tempdir().unwrap();
        let begin = || ReportFiles::begin(dir.path().join("reports"), "project").unwrap();
        begin().write(&report(&[Outcome::Passed])).unwrap();
        let log = dir.path().join("reports/console.log");
        std::fs::write(&log, "").unwrap();
        drop(begin());
        let left: Vec<_> = std::fs::read_dir(dir.path().join("reports")).unwrap().flatten().collect();
        assert!(left.len() == 1 && log.exists(), "{left:?}");
    }
}

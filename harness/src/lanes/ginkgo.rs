//! Converts the JSON report of a Ginkgo suite to cases.

use std::collections::BTreeSet;
use std::time::Duration;

use serde::Deserialize;
use testvm::report::{Outcome, Report};

/// A spec that is expected to be skipped, and the reason why that is acceptable.
#[derive(Clone, Copy, Debug)]
pub(super) struct ExpectedSkip<'a> {
    /// The message of the suite, or the name of a spec without one: its authors or a filter of the run switched it off.
    pub(super) message: &'a str,
    pub(super) reason: &'a str,
    /// `true` if the suite's own clean-up of the skipped spec is known to panic. Any other failure after a
    /// skip counts.
    pub(super) clean_up_panics: bool,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Suite {
    suite_succeeded: bool,
    pre_run_stats: PreRunStats,
    spec_reports: Vec<Spec>,
    special_suite_failure_reasons: Option<Vec<String>>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct PreRunStats {
    total_specs: usize,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Spec {
    container_hierarchy_texts: Option<Vec<String>>,
    leaf_node_type: String,
    leaf_node_text: String,
    state: String,
    /// The run time in nanoseconds.
    run_time: u64,
    failure: Option<Failure>,
    additional_failures: Option<Vec<AdditionalFailure>>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Failure {
    message: String,
    location: Location,
    #[serde(default)]
    forwarded_panic: String,
}

/// A failure after the first one, such as in the clean-up.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct AdditionalFailure {
    state: String,
    failure: Failure,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Location {
    file_name: String,
    line_number: u32,
}

/// Adds each spec to `report` as a case. Adds one more if the suite contradicts its specs: it left no report,
/// counts other specs, or ended in another way than its specs report. An unexpected skip is a failure. So is
/// an expected skip that did not happen, because the list is then outdated.
pub(super) fn report(
    text: &str,
    expected: &[ExpectedSkip<'_>],
    ended_well: Result<(), String>,
    report: &mut Report,
    suite: &str,
) {
    let mut runs = Runs::new(expected, None);
    let mut problems = runs.read(text, ended_well, report, suite);
    problems.extend(runs.skips_that_did_not_happen());
    push_problems(report, suite, &problems);
}

/// Adds a failed case with what is wrong with a suite beside its specs, if anything is.
pub(super) fn push_problems(report: &mut Report, suite: &str, problems: &[String]) {
    if !problems.is_empty() {
        report.push(suite, "the suite itself", Outcome::Failed(problems.join("\n")), None);
    }
}

/// One or more runs of a suite, each of which may select other specs.
pub(super) struct Runs<'a> {
    expected: &'a [ExpectedSkip<'a>],
    /// The container whose specs count. The suite has others.
    container: Option<&'a str>,
    /// The messages of the skips that happened.
    skips: BTreeSet<&'a str>,
    /// The texts of the specs that were selected, and of those that were not.
    selected: BTreeSet<String>,
    left_out: BTreeSet<String>,
    /// The texts of the specs that passed.
    passed: BTreeSet<String>,
    /// `true` if a run left no report, so that its specs are unknown.
    incomplete: bool,
}

impl<'a> Runs<'a> {
    pub(super) fn new(expected: &'a [ExpectedSkip<'a>], container: Option<&'a str>) -> Runs<'a> {
        let (skips, selected, left_out, passed) = Default::default();
        Runs { expected, container, skips, selected, left_out, passed, incomplete: false }
    }

    /// Adds the specs of a run to `report`, and returns what contradicts them.
    pub(super) fn read(
        &mut self,
        text: &str,
        ended_well: Result<(), String>,
        report: &mut Report,
        suite: &str,
    ) -> Vec<String> {
        let suites = serde_json::from_str::<Vec<Suite>>(text);
        self.incomplete |= suites.is_err();
        match suites.as_deref() {
            Ok([found]) => {
                let failed_before = report.failed();
                for spec in &found.spec_reports {
                    self.read_spec(spec, report, suite);
                }
                found.contradictions(report.failed() > failed_before, ended_well)
            }
            Ok(suites) => vec![format!("it reports {} suites instead of one", suites.len())],
            Err(error) => {
                let why = ended_well.err().unwrap_or_else(|| error.to_string());
                vec![format!("it left no report: {why}")]
            }
        }
    }

    /// Returns a message for each expected skip that happened in no run. Returns none if a run left no report.
    pub(super) fn skips_that_did_not_happen(&self) -> Vec<String> {
        if self.incomplete {
            return Vec::new();
        }
        let missing = self.expected.iter().filter(|skip| !self.skips.contains(skip.message));
        let messages = missing.map(|skip| {
            format!("\"{}\" is on the list of expected skips, and was not said: take it off", skip.message)
        });
        messages.collect()
    }

    /// Returns the texts of the specs that no run selected.
    pub(super) fn never_selected(&self) -> impl Iterator<Item = &str> {
        self.left_out.difference(&self.selected).map(String::as_str)
    }

    /// Returns `true` if a run selected a spec whose text contains this.
    pub(super) fn has_selected(&self, part: &str) -> bool {
        self.selected.iter().any(|text| text.contains(part))
    }

    /// Returns `true` if a spec passed whose text ends so.
    pub(super) fn has_passed(&self, end: &str) -> bool {
        self.passed.iter().any(|text| text.ends_with(end))
    }

    fn read_spec(&mut self, spec: &Spec, report: &mut Report, suite: &str) {
        if self.container.is_some_and(|container| spec.is_test() && !spec.is_in(container)) {
            return;
        }
        if self.container.is_some() && spec.is_test() {
            if spec.was_left_out() {
                self.left_out.insert(spec.text(0));
                return;
            }
            self.selected.insert(spec.text(0));
        }
        let outcome = self.outcome(spec);
        if outcome == Outcome::Passed && spec.is_test() {
            self.passed.insert(spec.text(0));
        }
        if spec.is_test() || matches!(outcome, Outcome::Failed(_)) {
            let name = spec.text(usize::from(self.container.is_some()));
            report.push(suite, &name, outcome, Duration::from_nanos(spec.run_time));
        }
    }

    fn outcome(&mut self, spec: &Spec) -> Outcome {
        match spec.state.as_str() {
            "passed" => Outcome::Passed,
            "skipped" | "pending" => {
                let message = match &spec.failure {
                    Some(failure) if spec.state == "skipped" => failure.message.clone(),
                    _ => spec.text(0),
                };
                match self.expected.iter().find(|skip| skip.message == message) {
                    Some(skip) => {
                        self.skips.insert(skip.message);
                        if spec.ended_as(skip) {
                            Outcome::Skipped(format!("{message}: {}", skip.reason))
                        } else {
                            Outcome::Failed(spec.failures("skipped, and then failed"))
                        }
                    }
                    None => Outcome::Failed(format!("skipped, which was not expected: {message}")),
                }
            }
            state => Outcome::Failed(spec.failures(state)),
        }
    }
}

impl Suite {
    fn contradictions(&self, failed: bool, ended_well: Result<(), String>) -> Vec<String> {
        let mut problems = self.special_suite_failure_reasons.clone().unwrap_or_default();
        let specs = self.spec_reports.iter().filter(|spec| spec.is_test()).count();
        if specs == 0 || specs != self.pre_run_stats.total_specs {
            problems.push(format!("it has {} specs, and reports {specs}", self.pre_run_stats.total_specs));
        }
        // A spec that was skipped without need fails here only.
        if !self.suite_succeeded && !failed {
            problems.push("it failed, and none of its specs did".to_owned());
        }
        if let (Err(why), false) = (ended_well, failed) {
            problems.push(why);
        }
        problems
    }
}

impl Spec {
    /// Returns `true` for specs. Other nodes run before, between and after the specs.
    fn is_test(&self) -> bool {
        self.leaf_node_type == "It"
    }

    /// Returns `true` if the filters of the run did not select the spec: it was skipped, and nothing says why.
    fn was_left_out(&self) -> bool {
        self.state == "skipped" && self.failure.is_none()
    }

    fn is_in(&self, container: &str) -> bool {
        self.containers().any(|text| text.starts_with(container))
    }

    /// Returns the texts of the containers from the outermost on. Ginkgo leaves out empty ones when it compares with filters.
    fn containers(&self) -> impl Iterator<Item = &str> {
        let texts = self.container_hierarchy_texts.iter().flatten();
        texts.map(String::as_str).filter(|text| !text.is_empty())
    }

    /// Returns the text by which filters select the spec, without its first `skipped` containers.
    fn text(&self, skipped: usize) -> String {
        let leaf = if self.leaf_node_text.is_empty() { &self.leaf_node_type } else { &self.leaf_node_text };
        self.containers().skip(skipped).chain([leaf.as_str()]).collect::<Vec<_>>().join(" ")
    }

    /// Returns `true` if nothing but the known panic failed after the skip.
    fn ended_as(&self, skip: &ExpectedSkip<'_>) -> bool {
        let mut more = self.additional_failures.iter().flatten();
        more.all(|more| skip.clean_up_panics && more.state == "panicked")
    }

    fn failures(&self, state: &str) -> String {
        let more = self.additional_failures.iter().flatten().map(|more| &more.failure);
        let lines = self.failure.iter().chain(more).map(|failure| {
            let Failure { message, location: Location { file_name, line_number }, forwarded_panic } = failure;
            let file = file_name.rsplit('/').next().unwrap_or(file_name);
            format!("{state} at {file}:{line_number}: {message}{forwarded_panic}")
        });
        let text = lines.collect::<Vec<_>>().join("\n");
        if text.is_empty() { state.to_owned() } else { text }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXPECTED: &[ExpectedSkip<'_>] = &[
        ExpectedSkip { message: "X not supported", reason: "there is no X", clean_up_panics: false },
        ExpectedSkip { message: "Z not supported", reason: "there is no Z", clean_up_panics: true },
        ExpectedSkip {
            message: "Service [Server] Call is fragile",
            reason: "it is fragile",
            clean_up_panics: false,
        },
    ];

    fn spec(name: &str, state: &str, message: &str) -> serde_json::Value {
        let mut spec = serde_json::json!({
            "ContainerHierarchyTexts": ["Service [Server]", "Call"],
            "LeafNodeType": "It",
            "LeafNodeText": name,
            "State": state,
            "RunTime": 1_500_000_000_u64,
        });
        if !message.is_empty() {
            spec["Failure"] = serde_json::json!({
                "Message": message,
                "Location": { "FileName": "example.com/suite/node.go", "LineNumber": 7 },
            });
        }
        spec
    }

    fn suites(specs: &[serde_json::Value], succeeded: bool) -> String {
        let total = specs.iter().filter(|spec| spec["LeafNodeType"] == "It").count();
        let stats = serde_json::json!({ "TotalSpecs": total });
        serde_json::json!([{ "SuiteSucceeded": succeeded, "PreRunStats": stats, "SpecReports": specs }])
            .to_string()
    }

    fn read(specs: &[serde_json::Value], succeeded: bool, ended: Result<(), String>) -> Report {
        let mut found = Report::new();
        report(&suites(specs, succeeded), EXPECTED, ended, &mut found, "suite");
        found
    }

    fn good() -> Vec<serde_json::Value> {
        vec![
            spec("works", "passed", ""),
            spec("has X", "skipped", "X not supported"),
            spec("has Z", "skipped", "Z not supported"),
            spec("is fragile", "pending", ""),
        ]
    }

    fn why(report: &Report) -> String {
        let failures = report.cases.iter().filter_map(|case| match &case.outcome {
            Outcome::Failed(why) => Some(format!("{}: {why}", case.name)),
            _ => None,
        });
        failures.collect::<Vec<_>>().join("\n")
    }

    #[test]
    fn specs_become_cases_with_skip_reasons() {
        let found = read(&good(), true, Ok(()));
        assert_eq!(found.summary(), "1 passed, 0 failed, 3 skipped");
        assert_eq!(found.cases[0].name, "Service [Server] Call works");
        assert_eq!(found.cases[0].time, Some(Duration::from_millis(1500)));
        assert_eq!(found.cases[1].outcome, Outcome::Skipped("X not supported: there is no X".to_owned()));
    }

    /// Both the spec and its cleanup can fail.
    #[test]
    fn failures_have_message_and_location() {
        let mut failed = spec("fails", "failed", "asked 1, got 2");
        failed["AdditionalFailures"] = serde_json::json!([
            { "State": "failed", "Failure": spec("", "", "not deleted")["Failure"] }
        ]);
        let specs: Vec<_> = good().into_iter().chain([failed]).collect();
        let found = read(&specs, false, Err("it exited with 1".to_owned()));
        let expected = "Service [Server] Call fails: failed at node.go:7: asked 1, got 2\nfailed at node.go:7: not deleted";
        assert_eq!(why(&found), expected);
    }

    /// A spec that its authors or a filter switched off has no message.
    #[test]
    fn an_unexpected_skip_is_a_failure() {
        for (state, message, expected) in [
            ("pending", "", "Service [Server] Call has Y"),
            ("skipped", "", "Service [Server] Call has Y"),
            ("skipped", "Y not supported", "Y not supported"),
        ] {
            let specs: Vec<_> = good().into_iter().chain([spec("has Y", state, message)]).collect();
            let expected =
                format!("Service [Server] Call has Y: skipped, which was not expected: {expected}");
            assert_eq!(why(&read(&specs, true, Ok(()))), expected);
        }
    }

    #[test]
    fn missing_expected_skip_is_failure() {
        let found = read(&good()[..3], true, Ok(()));
        assert!(
            why(&found).contains("\"Service [Server] Call is fragile\" is on the list"),
            "{}",
            why(&found)
        );
    }

    /// A panic during cleanup does not count if the list of skips expects it.
    #[test]
    fn failure_after_skip_counts() {
        let failing = |state: &str| {
            let mut specs = good();
            for spec in &mut specs[1..3] {
                let failure = spec["Failure"].clone();
                spec["AdditionalFailures"] = serde_json::json!([{ "State": state, "Failure": failure }]);
            }
            read(&specs, true, Ok(())).summary()
        };
        assert_eq!(failing("panicked"), "1 passed, 1 failed, 2 skipped");
        assert_eq!(failing("failed"), "1 passed, 2 failed, 1 skipped");
    }

    #[test]
    fn hook_counts_only_when_failing() {
        let mut hook = spec("", "passed", "");
        hook["LeafNodeType"] = "AfterSuite".into();
        let specs: Vec<_> = good().into_iter().chain([hook.clone()]).collect();
        assert_eq!(read(&specs, true, Ok(())).summary(), "1 passed, 0 failed, 3 skipped");
        hook["State"] = "panicked".into();
        let specs: Vec<_> = good().into_iter().chain([hook]).collect();
        assert_eq!(why(&read(&specs, false, Ok(()))), "Service [Server] Call AfterSuite: panicked");
    }

    fn spec_of(container: &str, name: &str, state: &str, message: &str) -> serde_json::Value {
        let mut spec = spec(name, state, message);
        spec["ContainerHierarchyTexts"] = serde_json::json!([container, "[Testpattern: x] [Slow] volumes"]);
        spec
    }

    #[test]
    fn empty_container_name_is_omitted() {
        let mut nested = spec("takes a snapshot", "passed", "");
        nested["ContainerHierarchyTexts"] = serde_json::json!(["External Storage", "snapshottable", ""]);
        let mut runs = Runs::new(EXPECTED, Some("External Storage"));
        runs.read(&suites(&[nested], true), Ok(()), &mut Report::new(), "suite");
        assert!(runs.has_passed("snapshottable takes a snapshot"));
    }

    /// Two runs each select some of the specs, and specs that neither selects are listed.
    #[test]
    fn repeated_spec_is_reported_once() {
        let outer = "External Storage [Driver: x]";
        let mut runs = Runs::new(EXPECTED, Some("External Storage"));
        let mut found = Report::new();
        let first = [
            spec_of(outer, "one", "passed", ""),
            spec_of(outer, "two", "skipped", ""),
            spec_of(outer, "three", "skipped", ""),
            spec_of(outer, "four", "skipped", "X not supported"),
            spec_of("Another", "five", "skipped", ""),
        ];
        let first = suites(&first, true);
        assert_eq!(runs.read(&first, Ok(()), &mut found, "first"), Vec::<String>::new());
        let second = [spec_of(outer, "two", "passed", ""), spec_of(outer, "one", "skipped", "")];
        let second = suites(&second, true);
        assert_eq!(runs.read(&second, Ok(()), &mut found, "second"), Vec::<String>::new());
        let cases: Vec<_> = found.cases.iter().map(|case| format!("{}: {}", case.suite, case.name)).collect();
        let volumes = "[Testpattern: x] [Slow] volumes";
        assert_eq!(
            cases,
            [
                format!("first: {volumes} one"),
                format!("first: {volumes} four"),
                format!("second: {volumes} two")
            ]
        );
        assert_eq!(runs.never_selected().collect::<Vec<_>>(), [format!("{outer} {volumes} three")]);
        assert!(runs.has_passed("volumes two") && !runs.has_passed("volumes four"));
        assert_eq!(runs.skips_that_did_not_happen().len(), 2);
    }

    #[test]
    fn failed_hook_counts_despite_selected_container() {
        let mut hook = spec("", "failed", "no nodes");
        hook["LeafNodeType"] = "BeforeSuite".into();
        hook["ContainerHierarchyTexts"] = serde_json::Value::Null;
        let mut runs = Runs::new(EXPECTED, Some("External"));
        let mut found = Report::new();
        runs.read(&suites(&[hook], true), Ok(()), &mut found, "suite");
        assert!(why(&found).starts_with("BeforeSuite: failed at node.go:7: no nodes"));
    }

    #[test]
    fn contradictory_suite_result_is_failure() {
        assert!(why(&read(&good(), false, Ok(()))).contains("none of its specs did"));
        assert!(why(&read(&good(), true, Err("killed".to_owned()))).contains("killed"));
        let mut found = Report::new();
        report("", EXPECTED, Err("it was killed by SIGKILL".to_owned()), &mut found, "suite");
        assert_eq!(why(&found), "the suite itself: it left no report: it was killed by SIGKILL");
        let mut found = Report::new();
        let text = suites(&good()[..2], true).replace("\"TotalSpecs\":2", "\"TotalSpecs\":3");
        report(&text, &[], Ok(()), &mut found, "suite");
        assert!(why(&found).contains("it has 3 specs, and reports 2"), "{}", why(&found));
    }
}

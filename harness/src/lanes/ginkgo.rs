//! Converts the JSON report of a Ginkgo suite to cases.

use std::time::Duration;

use serde::Deserialize;
use testvm::report::{Outcome, Report};

/// A spec that is expected to be skipped: the suite's message, and the reason why the skip is acceptable.
#[derive(Clone, Copy, Debug)]
pub(super) struct ExpectedSkip {
    pub(super) message: &'static str,
    pub(super) reason: &'static str,
    /// `true` if the suite's own clean-up of the skipped spec is known to panic. Any other failure after a
    /// skip counts.
    pub(super) clean_up_panics: bool,
}

/// The message for a spec that the suite's authors have disabled.
pub(super) const SWITCHED_OFF: &str = "switched off in the suite";

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
    expected: &[ExpectedSkip],
    ended_well: Result<(), String>,
    report: &mut Report,
    suite: &str,
) {
    let mut problems = Vec::new();
    match serde_json::from_str::<Vec<Suite>>(text).as_deref() {
        Ok([found]) => {
            let failed_before = report.failed();
            let mut skips = Vec::new();
            for spec in &found.spec_reports {
                spec.report(expected, &mut skips, report, suite);
            }
            let failed = report.failed() > failed_before;
            problems.extend(found.contradictions(failed, ended_well));
            let missing = expected.iter().filter(|skip| !skips.contains(&skip.message));
            problems.extend(missing.map(|skip| {
                format!(
                    "\"{}\" is on the list of expected skips, and was not said: take it off",
                    skip.message
                )
            }));
        }
        Ok(suites) => problems.push(format!("it reports {} suites instead of one", suites.len())),
        Err(error) => {
            let why = ended_well.err().unwrap_or_else(|| error.to_string());
            problems.push(format!("it left no report: {why}"));
        }
    }
    if !problems.is_empty() {
        report.push(suite, "the suite itself", Outcome::Failed(problems.join("\n")), Duration::ZERO);
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

    fn report(
        &self,
        expected: &[ExpectedSkip],
        skips: &mut Vec<&'static str>,
        report: &mut Report,
        suite: &str,
    ) {
        let outcome = match self.state.as_str() {
            "passed" => Outcome::Passed,
            "skipped" | "pending" => {
                let message = match &self.failure {
                    Some(failure) if self.state == "skipped" => failure.message.as_str(),
                    _ => SWITCHED_OFF,
                };
                match expected.iter().find(|skip| skip.message == message) {
                    Some(skip) => {
                        skips.push(skip.message);
                        if self.ended_as(skip) {
                            Outcome::Skipped(format!("{message}: {}", skip.reason))
                        } else {
                            Outcome::Failed(self.failures("skipped, and then failed"))
                        }
                    }
                    None => Outcome::Failed(format!("skipped, which was not expected: {message}")),
                }
            }
            state => Outcome::Failed(self.failures(state)),
        };
        if self.is_test() || matches!(outcome, Outcome::Failed(_)) {
            report.push(suite, &self.name(), outcome, Duration::from_nanos(self.run_time));
        }
    }

    /// Returns `true` if nothing but the known panic failed after the skip.
    fn ended_as(&self, skip: &ExpectedSkip) -> bool {
        let mut more = self.additional_failures.iter().flatten();
        more.all(|more| skip.clean_up_panics && more.state == "panicked")
    }

    fn name(&self) -> String {
        let mut words: Vec<&str> = Vec::new();
        for text in self.container_hierarchy_texts.iter().flatten() {
            // `CreateVolume [Controller Server]`: the bracket is a label for selecting specs.
            words.push(text.split(" [").next().unwrap_or(text));
        }
        words.push(if self.leaf_node_text.is_empty() { &self.leaf_node_type } else { &self.leaf_node_text });
        words.join(": ")
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

    const EXPECTED: &[ExpectedSkip] = &[
        ExpectedSkip { message: "X not supported", reason: "there is no X", clean_up_panics: false },
        ExpectedSkip { message: "Z not supported", reason: "there is no Z", clean_up_panics: true },
        ExpectedSkip { message: SWITCHED_OFF, reason: "it is fragile", clean_up_panics: false },
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

    fn read(specs: &[serde_json::Value], succeeded: bool, ended: Result<(), String>) -> Report {
        let total = specs.iter().filter(|spec| spec["LeafNodeType"] == "It").count();
        let suites = serde_json::json!([{
            "SuiteSucceeded": succeeded,
            "PreRunStats": { "TotalSpecs": total, "SpecsThatWillRun": total },
            "SpecialSuiteFailureReasons": null,
            "SpecReports": specs,
        }]);
        let mut found = Report::new();
        report(&suites.to_string(), EXPECTED, ended, &mut found, "suite");
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
    fn every_spec_is_a_case_and_an_expected_skip_has_its_reason() {
        let found = read(&good(), true, Ok(()));
        assert_eq!(found.summary(), "1 passed, 0 failed, 3 skipped");
        assert_eq!(found.cases[0].name, "Service: Call: works");
        assert_eq!(found.cases[0].time, Duration::from_millis(1500));
        assert_eq!(found.cases[1].outcome, Outcome::Skipped("X not supported: there is no X".to_owned()));
    }

    #[test]
    fn failures_of_a_spec_and_its_clean_up_have_message_and_location() {
        let mut failed = spec("fails", "failed", "asked 1, got 2");
        failed["AdditionalFailures"] = serde_json::json!([
            { "State": "failed", "Failure": spec("", "", "not deleted")["Failure"] }
        ]);
        let specs: Vec<_> = good().into_iter().chain([failed]).collect();
        let found = read(&specs, false, Err("it exited with 1".to_owned()));
        let expected =
            "Service: Call: fails: failed at node.go:7: asked 1, got 2\nfailed at node.go:7: not deleted";
        assert_eq!(why(&found), expected);
    }

    #[test]
    fn an_unexpected_skip_is_a_failure() {
        let specs: Vec<_> = good().into_iter().chain([spec("has Y", "skipped", "Y not supported")]).collect();
        let found = read(&specs, true, Ok(()));
        assert_eq!(why(&found), "Service: Call: has Y: skipped, which was not expected: Y not supported");
    }

    #[test]
    fn an_expected_skip_that_did_not_happen_is_a_failure() {
        let found = read(&good()[..3], true, Ok(()));
        assert!(why(&found).contains("\"switched off in the suite\" is on the list"), "{}", why(&found));
    }

    #[test]
    fn a_failure_after_a_skip_counts_unless_it_is_a_known_panic() {
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
    fn a_node_outside_the_specs_counts_only_when_it_fails() {
        let mut hook = spec("", "passed", "");
        hook["LeafNodeType"] = "AfterSuite".into();
        let specs: Vec<_> = good().into_iter().chain([hook.clone()]).collect();
        assert_eq!(read(&specs, true, Ok(())).summary(), "1 passed, 0 failed, 3 skipped");
        hook["State"] = "panicked".into();
        let specs: Vec<_> = good().into_iter().chain([hook]).collect();
        assert_eq!(why(&read(&specs, false, Ok(()))), "Service: Call: AfterSuite: panicked");
    }

    #[test]
    fn a_suite_result_that_contradicts_its_specs_is_a_failure() {
        assert!(why(&read(&good(), false, Ok(()))).contains("none of its specs did"));
        assert!(why(&read(&good(), true, Err("killed".to_owned()))).contains("killed"));
        let mut found = Report::new();
        report("", EXPECTED, Err("it was killed by SIGKILL".to_owned()), &mut found, "suite");
        assert_eq!(why(&found), "the suite itself: it left no report: it was killed by SIGKILL");
        let mut found = Report::new();
        let text = r#"[{"SuiteSucceeded":true,"PreRunStats":{"TotalSpecs":2},"SpecReports":[]}]"#;
        report(text, &[], Ok(()), &mut found, "suite");
        assert!(why(&found).contains("it has 2 specs, and reports 0"), "{}", why(&found));
    }
}

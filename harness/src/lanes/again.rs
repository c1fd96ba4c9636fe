//! Runs tests again: those that failed in the last run, or all selected ones until one fails.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::{Context, Result};
use serde::Deserialize;
use testvm::report::{Case, Outcome};

/// What failed in a run.
#[derive(Debug, Default, Eq, PartialEq)]
pub(super) struct Failed {
    /// The names of the lanes.
    pub(super) lanes: BTreeSet<String>,
    /// The names of the tests. It is empty if something else failed as well, which only whole lanes repeat.
    pub(super) tests: BTreeSet<String>,
}

/// The part of `report.json` that names failures.
#[derive(Deserialize)]
struct LastRun {
    cases: Vec<Case>,
}

/// Returns what failed in the run with this `report.json`.
///
/// # Errors
/// There is no such file, it is not a report of test lanes, or nothing failed.
pub(super) fn failed(path: &Path) -> Result<Failed> {
    let text = std::fs::read_to_string(path).with_context(|| {
        format!("read the report of the last run, {}: run the lanes first", path.display())
    })?;
    parse(&text).with_context(|| format!("the report of the last run, {}", path.display()))
}

fn parse(text: &str) -> Result<Failed> {
    let run: LastRun = serde_json::from_str(text).context("parse it; run the lanes again")?;
    let has_failed = |case: &Case| matches!(case.outcome, Outcome::Failed(_) | Outcome::NotRun);
    let failed: Vec<Case> = run.cases.into_iter().filter(has_failed).collect();
    anyhow::ensure!(!failed.is_empty(), "nothing failed: run the lanes without --failed");
    // Paths of tests have no spaces, and other checks are sentences.
    let only_tests = failed.iter().all(|case| case.name.contains("::") && !case.name.contains(' '));
    let tests = failed.iter().filter(|_| only_tests).map(|case| case.name.clone()).collect();
    let lanes = failed.into_iter().filter_map(|case| case.lane).collect();
    Ok(Failed { lanes, tests })
}

#[cfg(test)]
mod tests {
    use testvm::report::Report;

    use super::*;

    fn report(cases: &[(&str, &str, Outcome)]) -> String {
        let mut report = Report::new();
        for (lane, name, outcome) in cases {
            report.push("suite", name, outcome.clone(), None);
            report.cases.last_mut().unwrap().lane = Some((*lane).to_owned());
        }
        serde_json::to_string(&report).unwrap()
    }

    fn set(names: &[&str]) -> BTreeSet<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn failed_tests_are_selected_by_name() {
        let failed = || Outcome::Failed("why".to_owned());
        let passed = || ("unit", "a::b", Outcome::Passed);
        let quota = || ("kernel", "quota::limit", failed());
        let text = report(&[passed(), quota(), ("apiserver", "live::x", Outcome::NotRun)]);
        let expected =
            Failed { lanes: set(&["apiserver", "kernel"]), tests: set(&["live::x", "quota::limit"]) };
        assert_eq!(parse(&text).unwrap(), expected);
        let with_machine = report(&[quota(), ("kernel", "the virtual machine", failed())]);
        assert_eq!(parse(&with_machine).unwrap(), Failed { lanes: set(&["kernel"]), tests: set(&[]) });
        assert!(parse(&report(&[passed()])).unwrap_err().to_string().contains("nothing failed"));
    }
}

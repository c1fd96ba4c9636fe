//! Decides which checks may be left out on this machine: `harness/skips.toml` lists them, with reasons.

use anyhow::{Context, Result};
use serde::Deserialize;
use testvm::report::{Outcome, Report};
use testvm::session::Session;

/// The path of the list in the checkout.
const LIST: &str = "harness/skips.toml";

/// The checks that may be left out.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Skips {
    skip: Vec<Skip>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Skip {
    suite: String,
    name: String,
    reason: String,
}

impl Skips {
    /// Reads the list.
    ///
    /// # Errors
    /// The list cannot be read or is not valid.
    pub(super) fn read(session: &Session) -> Result<Skips> {
        let path = session.workspace.root().join(LIST);
        let text = std::fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
        toml::from_str(&text).with_context(|| format!("parse {}", path.display()))
    }

    /// Replaces the outcome of each check that could not run here: it is skipped if it is on the list, and fails otherwise.
    pub(super) fn judge(&self, report: &mut Report) {
        for case in &mut report.cases {
            let Outcome::Unavailable(why) = &case.outcome else { continue };
            let listed = self.skip.iter().find(|skip| skip.suite == case.suite && skip.name == case.name);
            case.outcome = match listed {
                Some(skip) => Outcome::Skipped(format!("{why} (it may be left out: {})", skip.reason)),
                None => Outcome::Failed(format!(
                    "it did not run: {why}\n{LIST} lists the checks that may be left out"
                )),
            };
        }
    }

    /// Adds a failure for each entry that names no check, although its suite ran.
    pub(super) fn require_checks(&self, report: &mut Report) {
        for skip in &self.skip {
            let mut cases = report.cases.iter().filter(|case| case.suite == skip.suite).peekable();
            if cases.peek().is_some() && cases.all(|case| case.name != skip.name) {
                let why = format!("no check of {} has this name: take it off {LIST}", skip.suite);
                report.push(LIST, &skip.name, Outcome::Failed(why), None);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LISTED: &str = r#"
        [[skip]]
        suite = "unit"
        name = "advisories"
        reason = "no network"
    "#;

    fn skips() -> Skips {
        toml::from_str(LISTED).unwrap()
    }

    fn report(suite: &str, name: &str, outcome: Outcome) -> Report {
        let mut report = Report::new();
        report.push(suite, "format", Outcome::Passed, None);
        report.push(suite, name, outcome, None);
        report
    }

    /// The later checks of such a part build on the first, and do not run without it.
    #[test]
    fn no_entry_skips_a_whole_part() {
        let skips: Skips = toml::from_str(include_str!("../../skips.toml")).unwrap();
        let is_test = |skip: &Skip| skip.name.contains("::");
        let of_a_part = |skip: &&Skip| skip.suite != "unit" && !is_test(skip);
        assert!(skips.skip.iter().find(of_a_part).is_none());
    }

    /// A check that cannot run and is not listed fails.
    #[test]
    fn only_listed_checks_may_be_skipped() {
        let missing = || Outcome::Unavailable("no tool".to_owned());
        for (suite, name, is_listed) in
            [("unit", "advisories", true), ("unit", "Go tests", false), ("kernel", "advisories", false)]
        {
            let mut report = report(suite, name, missing());
            assert!(!report.succeeded(), "before it is judged");
            skips().judge(&mut report);
            assert_eq!(report.succeeded(), is_listed, "{suite}: {name}: {report:?}");
            assert_eq!(report.skipped(), usize::from(is_listed));
            assert!(report.table().contains("no tool"));
        }
    }

    #[test]
    fn entry_for_unknown_check_fails() {
        for (suite, name, failed) in [("unit", "advisory", 1), ("unit", "advisories", 0), ("kernel", "a", 0)]
        {
            let mut report = report(suite, name, Outcome::Passed);
            skips().require_checks(&mut report);
            assert_eq!(report.failed(), failed, "{suite}: {name}");
        }
    }
}

//! The reports of parts of lanes: nothing failed if nothing ran, so at least one check must pass.

use std::time::Instant;

use anyhow::Result;
use testvm::report::{Outcome, Report};

/// Returns the report of a part. A part that cannot run is a failed case, because the results of the others count.
pub(super) fn with_failure(result: Result<Report>, suite: &str, name: &str, started: Instant) -> Report {
    result.unwrap_or_else(|error| {
        let mut report = Report::new();
        report.record::<()>(suite, name, started.elapsed(), &Err(error));
        report
    })
}

/// Adds a failure to the report of a part of a lane if no check passed and none failed.
pub(super) fn require_pass(part: &str, mut report: Report) -> Report {
    if report.passed() + report.failed() == 0 {
        let why = Outcome::Failed("no check passed".to_owned());
        report.push(part, "some checks run", why, None);
    }
    report
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_without_passed_checks_fails() {
        let skipped = || Outcome::Skipped("elsewhere".to_owned());
        let failed = || Outcome::Failed("why".to_owned());
        for (outcomes, failures) in [
            (vec![], 1),
            (vec![skipped()], 1),
            (vec![Outcome::NotRun], 1),
            (vec![skipped(), Outcome::Passed], 0),
            (vec![Outcome::ExpectedFailure("known".to_owned())], 1),
            (vec![failed(), skipped()], 1),
        ] {
            let mut report = Report::new();
            for outcome in outcomes {
                report.push("suite", "check", outcome, None);
            }
            let report = require_pass("part", report);
            assert_eq!(report.failed(), failures, "{report:?}");
        }
    }
}

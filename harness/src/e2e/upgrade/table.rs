//! The table of volumes and directions.

use std::fmt::Write as _;

use testvm::report::{Outcome, Report};

/// Returns a table with a row for each case and a column for each suite.
pub(super) fn table(report: &Report, suites: &[&str]) -> String {
    let mut rows: Vec<&str> = Vec::new();
    for case in report.cases.iter().filter(|case| suites.contains(&case.suite.as_str())) {
        if !rows.contains(&case.name.as_str()) {
            rows.push(&case.name);
        }
    }
    let width = rows.iter().map(|row| row.chars().count()).max().unwrap_or(0);
    let mut text = format!("{:<width$}", "");
    for suite in suites {
        _ = write!(text, "  {suite:<10}");
    }
    for row in rows {
        _ = write!(text, "\n{row:<width$}");
        for suite in suites {
            _ = write!(text, "  {:<10}", outcome(report, suite, row));
        }
    }
    text.lines().map(str::trim_end).collect::<Vec<_>>().join("\n")
}

fn outcome(report: &Report, suite: &str, name: &str) -> &'static str {
    match report.cases.iter().find(|case| case.suite == suite && case.name == name).map(|case| &case.outcome)
    {
        Some(Outcome::Passed) => "passed",
        Some(Outcome::Failed(_)) => "FAILED",
        Some(Outcome::ExpectedFailure(_)) => "expected",
        Some(Outcome::Skipped(_)) => "skipped",
        Some(Outcome::Unavailable(_) | Outcome::NotRun) | None => "not run",
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// The row has the outcome in each suite.
    #[test]
    fn each_case_has_a_row() {
        let mut report = Report::new();
        for (suite, name, outcome) in [
            ("up", "in use", Outcome::Passed),
            ("other", "hidden", Outcome::Passed),
            ("up", "incomplete", Outcome::Failed("why".into())),
            ("down", "in use", Outcome::Passed),
        ] {
            report.push(suite, name, outcome, Duration::ZERO);
        }
        let expected = "            up          down\n\
                        in use      passed      passed\n\
                        incomplete  FAILED      not run";
        assert_eq!(table(&report, &["up", "down"]), expected);
    }
}

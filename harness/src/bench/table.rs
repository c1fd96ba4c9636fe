//! Measurements and thresholds as text.

use std::fmt::Write as _;

use super::measurement::{Environment, Measurements};
use super::threshold::Threshold;

pub(super) fn measurements(all: &Measurements) -> String {
    all.parts.iter().map(part).collect::<Vec<_>>().join("\n")
}

fn part(part: &Environment) -> String {
    let machine = &part.machine;
    let mut text = format!(
        "{}: Linux {}, {} x {}, {}{}\n",
        part.place,
        machine.kernel,
        machine.cpus,
        machine.cpu,
        machine.file_system,
        machine.kubernetes.as_ref().map(|release| format!(", Kubernetes {release}")).unwrap_or_default()
    );
    let width = part.rows.iter().map(|row| row.name.len()).fold(20, usize::max);
    _ = writeln!(text, "  {:<width$} {:>8} {:>12} {:>12} {:>6}  unit", "name", "n", "median", "p99", "runs");
    for row in &part.rows {
        _ = writeln!(
            text,
            "  {:<width$} {:>8} {:>12.1} {:>12.1} {:>6}  {}",
            row.name, row.n, row.median, row.p99, row.runs, row.unit
        );
    }
    text
}

pub(super) fn thresholds(all: &[Threshold]) -> String {
    let mut text = String::new();
    for threshold in all {
        let verdict = match threshold.is_met {
            Some(true) => "met",
            Some(false) => "NOT MET",
            None => "not measured",
        };
        _ = writeln!(text, "{verdict:<13}  {}\n{:15}{}", threshold.text, "", threshold.values);
    }
    text
}

/// Returns the last line of a run: how many thresholds are not met, because a run without `--check` succeeds either way, and
/// the known causes.
pub(super) fn verdict(all: &[Threshold]) -> String {
    let missed = all.iter().filter(|threshold| threshold.is_met == Some(false));
    let causes: Vec<&str> = missed.filter_map(|threshold| threshold.cause).collect();
    let causes = if causes.is_empty() { String::new() } else { format!(": {}", causes.join("; ")) };
    format!("{}{causes}", counts(all))
}

fn counts(all: &[Threshold]) -> String {
    let count = |verdict| all.iter().filter(|threshold| threshold.is_met == verdict).count();
    match (count(Some(false)), count(None)) {
        (0, 0) => format!("all {} thresholds are met", all.len()),
        (failed, unmeasured) => {
            let [failed, unmeasured] = [
                (failed, "is not met", "are not met"),
                (unmeasured, "was not measured", "were not measured"),
            ]
            .map(|(n, one, many)| format!("{n} {}", if n == 1 { one } else { many }));
            format!("of {} thresholds {failed} and {unmeasured}", all.len())
        }
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case(&[Some(true), Some(true)], "all 2 thresholds are met")]
    #[case(&[Some(true), Some(false), Some(true)], "of 3 thresholds 1 is not met and 0 were not measured")]
    #[case(&[Some(false), Some(false), None], "of 3 thresholds 2 are not met and 1 was not measured")]
    fn the_verdict_counts_thresholds_that_are_not_met(#[case] verdicts: &[Option<bool>], #[case] line: &str) {
        assert_eq!(verdict(&verdicts.iter().copied().map(threshold).collect::<Vec<_>>()), line);
    }

    fn threshold(is_met: Option<bool>) -> Threshold {
        Threshold { text: String::new(), is_met, values: String::new(), cause: None, ratio: None }
    }

    #[test]
    fn the_verdict_has_the_causes_of_thresholds_that_are_not_met() {
        let thresholds = [Some(true), Some(false), Some(false)].map(threshold);
        let [met, missed, other] = thresholds;
        let all = [met.with_cause("not shown"), missed.with_cause("the kernel has no such call"), other];
        assert_eq!(
            verdict(&all),
            "of 3 thresholds 2 are not met and 0 were not measured: the kernel has no such call"
        );
    }
}

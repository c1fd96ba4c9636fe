//! The report of a run, as text in columns.

use std::fmt::Write as _;

use super::comparison::{Change, Comparison, Verdict};
use super::measurement::Row;
use super::results::Results;
use super::threshold::Threshold;

/// Returns lines in columns: the headings, and the rows below them. The first column is aligned to the left, the others to the right.
fn table<const N: usize>(headings: [&str; N], rows: impl Iterator<Item = [String; N]>) -> String {
    let lines: Vec<[String; N]> = std::iter::once(headings.map(str::to_owned)).chain(rows).collect();
    let mut text = String::new();
    for line in &lines {
        for (column, cell) in line.iter().enumerate() {
            let width = lines.iter().map(|line| line[column].len()).max().unwrap_or_default();
            _ = if column == 0 { write!(text, "  {cell:<width$}") } else { write!(text, "  {cell:>width$}") };
        }
        text.push('\n');
    }
    text
}

/// Returns the commit, the rows and the thresholds of each benchmark, and why it did not complete.
pub(super) fn text(results: &Results) -> String {
    let mut text = match &results.commit {
        Some(commit) => format!("commit {commit}\n\n"),
        None => "the sources are no Git checkout\n\n".to_owned(),
    };
    for bench in &results.benches {
        for environment in &bench.environments {
            let rows = environment.rows.iter().map(|row| {
                let Row { name, n, unit, samples } = row;
                let (median, p99) = (number(row.median()), number(row.p99()));
                [name.clone(), n.to_string(), median, p99, unit.clone(), samples.len().to_string()]
            });
            let rows = table(["row", "n", "median", "p99", "unit", "runs"], rows);
            _ = writeln!(text, "{}: {environment}\n{rows}", bench.name);
        }
        for Threshold { text: requirement, is_met, values, .. } in &bench.thresholds {
            let verdict = match is_met {
                Some(true) => "met",
                Some(false) => "not met",
                None => "not measured",
            };
            _ = writeln!(text, "{verdict:<13}  {requirement}\n{:15}{values}", "");
        }
        if let Some(error) = &bench.error {
            _ = writeln!(text, "the benchmark {} did not complete: {error}", bench.name);
        }
        text.push('\n');
    }
    text
}

/// Returns a comparison: a table with one line for each row, and a last line that counts the verdicts.
pub(super) fn changes(Comparison { changes, warnings }: &Comparison) -> String {
    let mut text: String = warnings.iter().map(|warning| format!("warning: {warning}\n")).collect();
    let rows = changes.iter().map(|change| {
        let Change { bench, name, n, unit, old, new, verdict } = change;
        let value = |value: &Option<f64>| value.map_or_else(|| "-".to_owned(), number);
        let ratio = old.zip(*new).map(|(old, new)| new / old).filter(|ratio| !ratio.is_nan());
        let ratio = ratio.map_or_else(|| "-".to_owned(), |ratio| format!("{ratio:.2}"));
        let verdict = match verdict {
            Verdict::Worse => "WORSE",
            Verdict::Better => "better",
            Verdict::Unchanged => "unchanged",
            Verdict::TooFewSamples => "too few samples",
            Verdict::OnlyOld => "only in the old run",
            Verdict::OnlyNew => "only in the new run",
        };
        let name = format!("{bench} {name}");
        [name, n.to_string(), unit.clone(), value(old), value(new), ratio, verdict.to_owned()]
    });
    text += &table(["benchmark and row", "n", "unit", "old", "new", "new / old", "verdict"], rows);
    let count = |verdict| changes.iter().filter(|change| change.verdict == verdict).count();
    _ = writeln!(
        text,
        "of {} rows {} worse, {} better, {} unchanged, {} with too few samples, {} in one run only",
        changes.len(),
        count(Verdict::Worse),
        count(Verdict::Better),
        count(Verdict::Unchanged),
        count(Verdict::TooFewSamples),
        count(Verdict::OnlyOld) + count(Verdict::OnlyNew)
    );
    text
}

/// Returns the last line of a run: how many thresholds are not met, because a run without `--check` succeeds either way, and
/// the known causes. First come the benchmarks that did not complete, because their thresholds are not in `all`.
pub(super) fn verdict(all: &[&Threshold], failed: &[&str]) -> String {
    if !failed.is_empty() {
        return format!("did not complete: {}; {}", failed.join(", "), verdict(all, &[]));
    }
    let missed: Vec<_> = all.iter().filter(|threshold| threshold.is_met == Some(false)).collect();
    let unmeasured = all.iter().filter(|threshold| threshold.is_met.is_none()).count();
    if missed.is_empty() && unmeasured == 0 {
        return format!("all {} thresholds are met", all.len());
    }
    let causes: String =
        missed.iter().filter_map(|threshold| threshold.cause).map(|cause| format!("; {cause}")).collect();
    format!("of {} thresholds, not met: {}, not measured: {unmeasured}{causes}", all.len(), missed.len())
}

/// Returns a value as text, with fewer decimal places the larger it is.
fn number(value: f64) -> String {
    let digits = match value.abs() {
        large if large >= 1000.0 => 0,
        medium if medium >= 10.0 => 1,
        _ => 3,
    };
    format!("{value:.digits$}")
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::super::measurement::row;
    use super::super::threshold;
    use super::*;

    #[test]
    fn report_has_rows_thresholds_and_errors() {
        let mut results =
            Results::of("loop", vec![row("ours", 10, &[12.34]), row("peer", 10, &[5.0, 12_345.6])]);
        let bench = &mut results.benches[0];
        bench.thresholds =
            threshold::at_most("{n}: at most 2", "ours", 2.0, "peer").judge(&bench.environments);
        bench.error = Some("no disk".to_owned());
        results.commit = Some("0c20236-dirty".to_owned());
        let expected = "commit 0c20236-dirty\n\n\
                        loop: here: Linux 6.12.1, 0 x unknown, xfs\n  \
                        row    n  median    p99  unit  runs\n  \
                        ours  10    12.3   12.3    us     1\n  \
                        peer  10    6175  12346    us     2\n\n\
                        met            10: at most 2\n               \
                        ours(10) 12.3, peer(10) 6175.3: 0.00; the threshold is at most 2\n\
                        the benchmark loop did not complete: no disk\n\n";
        assert_eq!(text(&results), expected);
    }

    #[test]
    fn comparison_has_medians_ratios_and_counts() {
        let old = Results::of("loop", vec![row("ours", 10, &[1.0; 6]), row("gone", 10, &[1.0])]);
        let new = Results { quick: true, ..Results::of("loop", vec![row("ours", 10, &[2.0; 6])]) };
        let text = changes(&Comparison::of(&old, &new, 1.1));
        let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(lines[0][..2], ["warning:", "one"]);
        assert_eq!(lines[2], ["loop", "ours", "10", "us", "1.000", "2.000", "2.00", "WORSE"]);
        assert_eq!(lines[3][..7], ["loop", "gone", "10", "us", "1.000", "-", "-"]);
        assert!(text.ends_with(
            "of 2 rows 1 worse, 0 better, 0 unchanged, 0 with too few samples, 1 in one run only\n"
        ));
    }

    #[rstest]
    #[case(&[Some(true), Some(true)], &[], "all 2 thresholds are met")]
    #[case(&[Some(true), Some(false), Some(true)], &[], "of 3 thresholds, not met: 1, not measured: 0; cause")]
    #[case(&[Some(false), Some(false), None], &[], "of 3 thresholds, not met: 2, not measured: 1; cause; cause")]
    #[case(&[Some(true)], &["loop", "io"], "did not complete: loop, io; all 1 thresholds are met")]
    fn verdict_counts_failures_and_missed_thresholds(
        #[case] verdicts: &[Option<bool>],
        #[case] failed: &[&str],
        #[case] line: &str,
    ) {
        let all: Vec<Threshold> = verdicts
            .iter()
            .map(|is_met| Threshold { is_met: *is_met, cause: Some("cause"), ..Threshold::default() })
            .collect();
        assert_eq!(verdict(&all.iter().collect::<Vec<_>>(), failed), line);
    }
}

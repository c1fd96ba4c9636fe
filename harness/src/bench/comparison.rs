//! Compares two runs row by row, and tells changes from noise.
//!
//! A row changed if the Mann-Whitney U test finds its samples different and its median moved by more than a factor. The test
//! alone would report small differences between two boots of one machine, because a row can have many samples. The factor
//! alone would report the noise of rows with few samples.

use super::mann_whitney::{SIGNIFICANT, largest_score, score};
use super::measurement::Row;
use super::results::Results;

/// The verdict on one row.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Verdict {
    Worse,
    Better,
    /// The samples may come from one distribution, or the change is within the factor.
    Unchanged,
    /// So few samples cannot be significantly different.
    TooFewSamples,
    /// Only one of the runs has the row.
    OnlyOld,
    OnlyNew,
}

/// One row of both runs, with its medians.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Change {
    pub(super) bench: String,
    pub(super) name: String,
    pub(super) n: u64,
    pub(super) unit: String,
    pub(super) old: Option<f64>,
    pub(super) new: Option<f64>,
    pub(super) verdict: Verdict,
}

/// The comparison of two runs.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Comparison {
    pub(super) changes: Vec<Change>,
    /// Differences of the machines and of the kinds of runs, because of which times may differ.
    pub(super) warnings: Vec<String>,
}

impl Comparison {
    /// Compares the rows of two runs. A row is worse or better if its median moved by more than `factor`, which is above 1.
    pub(super) fn of(old: &Results, new: &Results, factor: f64) -> Comparison {
        let of_new = new.rows().map(|(bench, row)| {
            let before = old.find(bench, row);
            let verdict = before.map_or(Verdict::OnlyNew, |before| judge(before, row, factor));
            change(bench, row, before, Some(row), verdict)
        });
        let only_old = old.rows().filter(|(bench, row)| new.find(bench, row).is_none());
        let only_old = only_old.map(|(bench, row)| change(bench, row, Some(row), None, Verdict::OnlyOld));
        Comparison { changes: of_new.chain(only_old).collect(), warnings: warnings(old, new) }
    }

    /// Returns `true` if a row is worse.
    pub(super) fn has_worse(&self) -> bool {
        self.changes.iter().any(|change| change.verdict == Verdict::Worse)
    }
}

fn change(bench: &str, row: &Row, old: Option<&Row>, new: Option<&Row>, verdict: Verdict) -> Change {
    let (bench, name, unit) = (bench.to_owned(), row.name.clone(), row.unit.clone());
    Change { bench, name, n: row.n, unit, old: old.map(Row::median), new: new.map(Row::median), verdict }
}

fn judge(old: &Row, new: &Row, factor: f64) -> Verdict {
    if largest_score(old.samples.len(), new.samples.len()) < SIGNIFICANT {
        return Verdict::TooFewSamples;
    }
    if score(&old.samples, &new.samples) < SIGNIFICANT {
        return Verdict::Unchanged;
    }
    let ratio = new.median() / old.median();
    // How many times as bad the new median is: less of something per second is worse.
    let worsening = if new.unit.ends_with("/s") { 1.0 / ratio } else { ratio };
    match worsening {
        times if times > factor => Verdict::Worse,
        times if times < 1.0 / factor => Verdict::Better,
        _ => Verdict::Unchanged,
    }
}

fn warnings(old: &Results, new: &Results) -> Vec<String> {
    let mut warnings = Vec::new();
    if old.quick != new.quick {
        warnings.push(
            "one run is short (--quick) and the other is not, so few rows have the same count".to_owned(),
        );
    }
    let mut known: Vec<String> = environments(old).collect();
    for environment in environments(new) {
        if !known.contains(&environment) {
            warnings.push(format!("the old run has no measurements of this environment: {environment}"));
            known.push(environment);
        }
    }
    for bench in &new.benches {
        if let Some(error) = &bench.error {
            warnings.push(format!("the benchmark {} did not complete: {error}", bench.name));
        }
    }
    warnings
}

fn environments(results: &Results) -> impl Iterator<Item = String> {
    results.benches.iter().flat_map(|bench| &bench.environments).map(ToString::to_string)
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::super::measurement::row;
    use super::*;

    const FAST: [f64; 6] = [10.0, 11.0, 12.0, 13.0, 14.0, 15.0];

    fn run(unit: &str, values: &[f64]) -> Results {
        Results::of("loop", vec![Row { unit: unit.to_owned(), ..row("ours", 10, values) }])
    }

    #[rstest]
    #[case::slower("us", 2.0, 1.9, Verdict::Worse)]
    #[case::slower_within_the_factor("us", 2.0, 2.5, Verdict::Unchanged)]
    #[case::faster("us", 0.5, 1.1, Verdict::Better)]
    #[case::higher_rate("claims/s", 2.0, 1.1, Verdict::Better)]
    #[case::lower_rate("claims/s", 0.5, 1.1, Verdict::Worse)]
    #[case::overlapping_samples("us", 1.2, 1.1, Verdict::Unchanged)]
    fn verdict_depends_on_direction_unit_and_factor(
        #[case] unit: &str,
        #[case] times: f64,
        #[case] factor: f64,
        #[case] verdict: Verdict,
    ) {
        let comparison =
            Comparison::of(&run(unit, &FAST), &run(unit, &FAST.map(|value| value * times)), factor);
        assert_eq!(comparison.changes[0].verdict, verdict);
        assert_eq!(comparison.has_worse(), verdict == Verdict::Worse);
    }

    /// A row that stays zero is unchanged, and few samples are not judged.
    #[rstest]
    #[case(&[0.0; 12], &[1.0; 12], Verdict::Worse)]
    #[case(&[0.0; 12], &[0.0; 12], Verdict::Unchanged)]
    #[case(&[1.0], &[100.0], Verdict::TooFewSamples)]
    fn growth_from_zero_is_worse(#[case] old: &[f64], #[case] new: &[f64], #[case] verdict: Verdict) {
        assert_eq!(Comparison::of(&run("us", old), &run("us", new), 1.1).changes[0].verdict, verdict);
    }

    #[test]
    fn rows_of_one_run_are_listed() {
        let other = Results::of("loop", vec![row("theirs", 10, &FAST)]);
        let comparison = Comparison::of(&run("us", &FAST), &other, 1.1);
        let verdicts: Vec<Verdict> = comparison.changes.iter().map(|change| change.verdict).collect();
        assert_eq!(verdicts, [Verdict::OnlyNew, Verdict::OnlyOld]);
        // Another unit is another measurement.
        assert_eq!(Comparison::of(&run("ms", &FAST), &run("us", &FAST), 1.1).changes.len(), 2);
    }

    /// Another machine, another kind of run and a failure each cause a warning.
    #[test]
    fn incomparable_runs_have_warnings() {
        let old = run("us", &FAST);
        assert_eq!(Comparison::of(&old, &old, 1.1).warnings, Vec::<String>::new());
        let mut new = old.clone();
        new.quick = true;
        new.benches[0].environments[0].machine.kernel = "6.12.2".to_owned();
        new.benches[0].error = Some("no disk".to_owned());
        let warnings = Comparison::of(&old, &new, 1.1).warnings;
        assert_eq!(warnings.len(), 3, "{warnings:?}");
        assert!(warnings[1].contains("Linux 6.12.2") && warnings[2].contains("no disk"), "{warnings:?}");
    }
}

//! Compares two runs row by row, and tells changes from noise.
//!
//! A row changed if the Mann-Whitney U test finds its samples different and its median moved by more than a factor. The test
//! alone would report small differences between two boots of one machine, because a row can have many samples. The factor
//! alone would report the noise of rows with few samples.

use super::mann_whitney;
use super::measurement::RowName;
use super::results::{ResultRow, Results};

/// The probability below which samples count as different. One in a hundred unchanged rows is below it by chance, of which
/// those within the factor are not reported.
const SIGNIFICANCE: f64 = 0.01;

/// The verdict on one row.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Verdict {
    Worse,
    Better,
    /// The samples may come from one distribution, or the change is within the factor.
    Unchanged,
    /// So few samples cannot be significantly different.
    TooFewSamples,
    OnlyOld,
    OnlyNew,
}

/// One row of both runs.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Change {
    pub(super) bench: String,
    pub(super) row: RowName,
    pub(super) unit: String,
    /// The medians.
    pub(super) old: Option<f64>,
    pub(super) new: Option<f64>,
    /// The probability of the test.
    pub(super) probability: Option<f64>,
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
        let find =
            |all: &[ResultRow], row: &ResultRow| all.iter().position(|other| other.is_same_measurement(row));
        let of_new = new.rows.iter().filter_map(|row| {
            Change::of(find(&old.rows, row).map(|position| &old.rows[position]), Some(row), factor)
        });
        let only_old = old.rows.iter().filter(|row| find(&new.rows, row).is_none());
        let changes = of_new.chain(only_old.filter_map(|row| Change::of(Some(row), None, factor))).collect();
        Comparison { changes, warnings: warnings(old, new) }
    }

    /// Returns `true` if a row is worse.
    pub(super) fn has_worse(&self) -> bool {
        self.changes.iter().any(|change| change.verdict == Verdict::Worse)
    }
}

impl Change {
    /// Compares a row with that of the other run.
    fn of(old: Option<&ResultRow>, new: Option<&ResultRow>, factor: f64) -> Option<Change> {
        let row = new.or(old)?;
        let median = |row: Option<&ResultRow>| row.map(|row| row.row.median);
        let mut change = Change {
            bench: row.bench.clone(),
            row: RowName { name: row.row.name.clone(), n: row.row.n },
            unit: row.row.unit.clone(),
            old: median(old),
            new: median(new),
            probability: None,
            verdict: if new.is_some() { Verdict::OnlyNew } else { Verdict::OnlyOld },
        };
        if let (Some(old), Some(new)) = (old, new) {
            let (before, after) = (&old.row.samples, &new.row.samples);
            change.probability = mann_whitney::probability(before, after);
            let smallest = mann_whitney::smallest_probability(before.len(), after.len());
            change.verdict = if smallest.is_none_or(|smallest| smallest >= SIGNIFICANCE) {
                Verdict::TooFewSamples
            } else if change.probability.is_some_and(|probability| probability < SIGNIFICANCE) {
                change.direction(factor)
            } else {
                Verdict::Unchanged
            };
        }
        Some(change)
    }

    /// Returns the new median divided by the old one. Returns `None` if a run has no such row, or both are zero.
    pub(super) fn ratio(&self) -> Option<f64> {
        let ratio = self.new? / self.old?;
        (!ratio.is_nan()).then_some(ratio)
    }

    /// Returns the verdict on a change that is significant.
    fn direction(&self, factor: f64) -> Verdict {
        // How many times as bad the new median is: less of a rate is worse.
        let worsening = self.ratio().map(|ratio| if is_rate(&self.unit) { 1.0 / ratio } else { ratio });
        match worsening {
            Some(times) if times > factor => Verdict::Worse,
            Some(times) if times < 1.0 / factor => Verdict::Better,
            _ => Verdict::Unchanged,
        }
    }
}

impl Verdict {
    /// Returns the verdict in words.
    pub(super) fn text(self) -> &'static str {
        match self {
            Verdict::Worse => "WORSE",
            Verdict::Better => "better",
            Verdict::Unchanged => "unchanged",
            Verdict::TooFewSamples => "too few samples",
            Verdict::OnlyOld => "only in the old run",
            Verdict::OnlyNew => "only in the new run",
        }
    }
}

/// Returns `true` for units of which more is better: something per second.
fn is_rate(unit: &str) -> bool {
    unit.ends_with("/s")
}

fn warnings(old: &Results, new: &Results) -> Vec<String> {
    let mut warnings = Vec::new();
    if old.quick != new.quick {
        warnings.push(
            "one run is short (--quick) and the other is not, so few rows have the same count".to_owned(),
        );
    }
    for at in &new.environments {
        let is_same_place = old.environments.iter().any(|other| other == at);
        if !is_same_place {
            let machine = &at.machine;
            warnings.push(format!(
                "the old run has no measurements of this environment: {}, Linux {}, {} x {}, {}",
                at.place, machine.kernel, machine.cpus, machine.cpu, machine.file_system
            ));
        }
    }
    for failure in &new.failures {
        warnings.push(format!("the benchmark {} did not complete: {}", failure.bench, failure.error));
    }
    warnings
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::super::measurement::Row;
    use super::super::report;
    use super::super::results::Source;
    use super::*;

    const FAST: [f64; 6] = [10.0, 11.0, 12.0, 13.0, 14.0, 15.0];

    fn run(unit: &str, values: &[f64]) -> Results {
        Results::of("loop", vec![Row::of("ours", 10, unit, values.iter().copied()).unwrap()])
    }

    fn times(factor: f64) -> Vec<f64> {
        FAST.iter().map(|value| value * factor).collect()
    }

    #[rstest]
    #[case::slower("us", 2.0, Verdict::Worse)]
    #[case::faster("us", 0.5, Verdict::Better)]
    #[case::higher_rate("claims/s", 2.0, Verdict::Better)]
    #[case::lower_rate("claims/s", 0.5, Verdict::Worse)]
    #[case::overlapping_samples("us", 1.2, Verdict::Unchanged)]
    fn verdict_depends_on_direction_and_unit(
        #[case] unit: &str,
        #[case] factor: f64,
        #[case] verdict: Verdict,
    ) {
        let comparison = Comparison::of(&run(unit, &FAST), &run(unit, &times(factor)), 1.1);
        assert_eq!(comparison.changes[0].verdict, verdict);
        assert_eq!(comparison.has_worse(), verdict == Verdict::Worse);
    }

    #[test]
    fn change_within_factor_is_not_worse() {
        let (old, new) = (run("us", &FAST), run("us", &times(2.0)));
        assert_eq!(Comparison::of(&old, &new, 2.5).changes[0].verdict, Verdict::Unchanged);
        assert_eq!(Comparison::of(&old, &new, 1.9).changes[0].verdict, Verdict::Worse);
    }

    #[test]
    fn few_samples_are_not_judged() {
        let comparison = Comparison::of(&run("us", &[1.0]), &run("us", &[100.0]), 1.1);
        assert_eq!(comparison.changes[0].verdict, Verdict::TooFewSamples);
        assert_eq!(comparison.changes[0].ratio(), Some(100.0));
    }

    /// A row that stays zero is unchanged.
    #[test]
    fn growth_from_zero_is_worse() {
        let zero = run("us", &[0.0; 12]);
        assert_eq!(Comparison::of(&zero, &run("us", &[1.0; 12]), 1.1).changes[0].verdict, Verdict::Worse);
        let same = &Comparison::of(&zero, &zero, 1.1).changes[0];
        assert_eq!((same.verdict, same.ratio()), (Verdict::Unchanged, None));
    }

    #[test]
    fn rows_of_one_run_are_listed() {
        let other = Results::of("loop", vec![Row::of("theirs", 10, "us", FAST).unwrap()]);
        let comparison = Comparison::of(&run("us", &FAST), &other, 1.1);
        let verdicts: Vec<Verdict> = comparison.changes.iter().map(|change| change.verdict).collect();
        assert_eq!(verdicts, [Verdict::OnlyNew, Verdict::OnlyOld]);
        assert!(!comparison.has_worse());
        // Another unit is another measurement.
        assert_eq!(Comparison::of(&run("ms", &FAST), &run("us", &FAST), 1.1).changes.len(), 2);
    }

    #[test]
    fn table_has_medians_ratio_and_verdict() {
        let table = report::changes(&Comparison::of(&run("us", &FAST), &run("us", &times(2.0)), 1.1));
        let line = table.lines().nth(1).unwrap();
        let words: Vec<&str> = line.split_whitespace().collect();
        assert_eq!(words, ["loop", "ours", "10", "us", "12.5", "25.0", "2.00", "0.0022", "WORSE"], "{table}");
        assert!(table.ends_with(
            "of 1 rows 1 worse, 0 better, 0 unchanged, 0 with too few samples, 0 in one run only\n"
        ));
    }

    /// Another machine, another kind of run and a failure each cause a warning.
    #[test]
    fn incomparable_runs_have_warnings() {
        let old = run("us", &FAST);
        assert_eq!(Comparison::of(&old, &old, 1.1).warnings, Vec::<String>::new());
        let mut new = Results::new(Source::default(), true);
        new.environments = old.environments.clone();
        new.environments[0].machine.kernel = "6.12.1".to_owned();
        new.add_failure("csi", &anyhow::anyhow!("no disk"));
        let warnings = Comparison::of(&old, &new, 1.1).warnings;
        assert_eq!(warnings.len(), 3, "{warnings:?}");
        assert!(warnings[1].contains("Linux 6.12.1") && warnings[2].contains("no disk"), "{warnings:?}");
    }
}

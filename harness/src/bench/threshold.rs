//! Thresholds for the results of a benchmark, and whether the measurements meet them.

use serde::{Deserialize, Serialize};

use super::measurement::Measurements;

/// A threshold, compared with the measurements.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Threshold {
    pub(super) text: String,
    /// `None` if a value that it needs was not measured.
    pub(super) is_met: Option<bool>,
    /// The values that decided it.
    pub(super) values: String,
    /// The known cause if the threshold is not met. The last line of the run has it.
    pub(super) cause: Option<&'static str>,
    /// The ratio that decided it, if it compares two rows.
    pub(super) ratio: Option<Ratio>,
}

/// The ratio of a row to its peer in the same run.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub(super) struct Ratio {
    pub(super) row: RowName,
    pub(super) peer: RowName,
    pub(super) statistic: Statistic,
    /// The value of the row divided by that of its peer.
    pub(super) value: f64,
}

/// The name of a row and its count `n`.
#[derive(Clone, Debug, Deserialize, Eq, Ord, PartialEq, PartialOrd, Serialize)]
pub(super) struct RowName {
    pub(super) name: String,
    pub(super) n: u64,
}

#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Statistic {
    Median,
    P99,
}

impl Statistic {
    fn of(self, all: &Measurements, name: &str, n: u64) -> Option<f64> {
        match self {
            Statistic::Median => all.median(name, n),
            Statistic::P99 => all.p99(name, n),
        }
    }
}

impl Threshold {
    /// Adds the known cause for the case that the threshold is not met.
    #[must_use]
    pub(super) fn with_cause(self, cause: &'static str) -> Threshold {
        Threshold { cause: Some(cause), ..self }
    }
}

/// The name of a row and its count `n`.
pub(super) type RowKey<'a> = (&'a str, u64);

/// Requires that `ours` takes at most `factor` times as long as `other`.
pub(super) fn at_most(all: &Measurements, text: &str, ours: RowKey, factor: f64, other: RowKey) -> Threshold {
    compare(all, Statistic::Median, text, ours, other, up_to(factor))
}

/// Requires that the 99th percentile of `ours` is at most `factor` times that of `other`.
pub(super) fn p99_at_most(
    all: &Measurements,
    text: &str,
    ours: RowKey,
    factor: f64,
    other: RowKey,
) -> Threshold {
    compare(all, Statistic::P99, text, ours, other, up_to(factor))
}

fn up_to(factor: f64) -> impl Fn(f64) -> (bool, String) {
    move |ratio| (ratio <= factor, format!("{ratio:.2} times; the threshold is at most {factor}"))
}

/// Requires that `ours` is at least `factor` times as fast as `other`.
pub(super) fn faster(all: &Measurements, text: &str, ours: RowKey, factor: f64, other: RowKey) -> Threshold {
    compare(all, Statistic::Median, text, ours, other, |ratio| {
        let gain = 1.0 / ratio;
        (gain >= factor, format!("{gain:.1} times as fast; the threshold is at least {factor}"))
    })
}

/// Requires that `much` is at least `factor` times `little`.
pub(super) fn at_least(
    all: &Measurements,
    text: &str,
    much: RowKey,
    factor: f64,
    little: RowKey,
) -> Threshold {
    compare(all, Statistic::Median, text, much, little, |ratio| {
        (ratio >= factor, format!("{ratio:.1} times; the threshold is at least {factor}"))
    })
}

/// Requires that `ours` is at most `bound`.
pub(super) fn no_more(all: &Measurements, text: &str, ours: RowKey, bound: f64) -> Threshold {
    let (name, n) = ours;
    let (is_met, values) = match all.median(name, n) {
        Some(median) => {
            (Some(median <= bound), format!("{name}({n}) {median:.2}: the threshold is at most {bound}"))
        }
        None => (None, format!("{name} was not measured with {n}")),
    };
    Threshold { text: text.to_owned(), is_met, values, cause: None, ratio: None }
}

/// Requires that `name` takes about as long with any count: the slowest at most `factor` times as long as the fastest.
pub(super) fn flat(all: &Measurements, text: &str, name: &str, factor: f64) -> Threshold {
    let medians = || all.counts(name).into_iter().filter_map(|n| Some((n, all.median(name, n)?)));
    let slowest = medians().max_by(|a, b| a.1.total_cmp(&b.1));
    let fastest = medians().min_by(|a, b| a.1.total_cmp(&b.1));
    match (slowest, fastest) {
        (Some(slowest), Some(fastest)) if medians().count() > 1 => {
            at_most(all, text, (name, slowest.0), factor, (name, fastest.0))
        }
        _ => Threshold {
            text: text.to_owned(),
            is_met: None,
            values: format!("{name} was not measured"),
            cause: None,
            ratio: None,
        },
    }
}

fn compare(
    all: &Measurements,
    statistic: Statistic,
    text: &str,
    ours: RowKey,
    other: RowKey,
    judge: impl Fn(f64) -> (bool, String),
) -> Threshold {
    let text = text.to_owned();
    let value =
        |(name, n): RowKey| statistic.of(all, name, n).ok_or(format!("{name} was not measured with {n}"));
    match (value(ours), value(other)) {
        (Ok(our_value), Ok(other_value)) => {
            // Two values of zero are equal too, and their quotient is not a number.
            let quotient = if our_value == other_value { 1.0 } else { our_value / other_value };
            let (is_met, verdict) = judge(quotient);
            let named = |(name, n): RowKey| RowName { name: name.to_owned(), n };
            // A peer of zero has no ratio, and JSON has no infinity.
            let ratio = quotient.is_finite().then(|| Ratio {
                row: named(ours),
                peer: named(other),
                statistic,
                value: quotient,
            });
            let text_of = |(name, n): RowKey, value: f64| format!("{name}({n}) {value:.1}");
            let values = format!("{}, {}: {verdict}", text_of(ours, our_value), text_of(other, other_value));
            Threshold { text, is_met: Some(is_met), values, cause: None, ratio }
        }
        (Err(missing), _) | (_, Err(missing)) => {
            Threshold { text, is_met: None, values: missing, cause: None, ratio: None }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::measurement::Row;
    use super::*;

    fn measurements(rows: &[(&str, u64, f64)]) -> Measurements {
        let row = |&(name, n, median): &(&str, u64, f64)| Row {
            name: name.to_owned(),
            n,
            unit: "us".to_owned(),
            median,
            p99: median,
            runs: 1,
            samples: vec![median],
        };
        Measurements::of(rows.iter().map(row).collect())
    }

    #[test]
    fn at_most_is_met_up_to_its_factor() {
        let all = measurements(&[("floor", 10, 100.0), ("ours", 10, 130.0), ("slow", 10, 131.0)]);
        assert_eq!(at_most(&all, "", ("ours", 10), 1.3, ("floor", 10)).is_met, Some(true));
        let beyond = at_most(&all, "", ("slow", 10), 1.3, ("floor", 10));
        assert_eq!(beyond.is_met, Some(false));
        assert_eq!(
            beyond.values,
            "slow(10) 131.0, floor(10) 100.0: 1.31 times; the threshold is at most 1.3"
        );
    }

    #[test]
    fn two_values_of_zero_are_equal() {
        let all = measurements(&[("ours", 0, 0.0), ("ours", 10, 0.0), ("more", 10, 1.0)]);
        assert_eq!(at_most(&all, "", ("ours", 10), 1.1, ("ours", 0)).is_met, Some(true));
        assert_eq!(at_most(&all, "", ("more", 10), 1.1, ("ours", 0)).is_met, Some(false));
    }

    #[test]
    fn p99_at_most_compares_the_99th_percentiles() {
        let mut all = measurements(&[("idle", 10, 10.0), ("busy", 10, 10.0)]);
        all.parts[0].rows[1].p99 = 20.0;
        assert_eq!(p99_at_most(&all, "", ("busy", 10), 2.0, ("idle", 10)).is_met, Some(true));
        assert_eq!(p99_at_most(&all, "", ("busy", 10), 1.9, ("idle", 10)).is_met, Some(false));
    }

    #[test]
    fn a_comparison_has_its_ratio_unless_the_peer_is_zero() {
        let all = measurements(&[("ours", 10, 30.0), ("peer", 20, 15.0), ("nothing", 10, 0.0)]);
        let ratio = faster(&all, "", ("ours", 10), 1.0, ("peer", 20)).ratio.unwrap();
        assert_eq!((ratio.row.name.as_str(), ratio.peer.name.as_str(), ratio.peer.n), ("ours", "peer", 20));
        assert_eq!((ratio.statistic, ratio.value), (Statistic::Median, 2.0));
        assert_eq!(at_most(&all, "", ("ours", 10), 1.0, ("nothing", 10)).ratio, None);
        assert_eq!(no_more(&all, "", ("ours", 10), 1.0).ratio, None);
    }

    #[test]
    fn faster_is_met_from_its_factor_on() {
        let all = measurements(&[("ours", 4000, 10.0), ("theirs", 4000, 200.0)]);
        assert_eq!(faster(&all, "", ("ours", 4000), 20.0, ("theirs", 4000)).is_met, Some(true));
        assert_eq!(faster(&all, "", ("ours", 4000), 21.0, ("theirs", 4000)).is_met, Some(false));
    }

    #[test]
    fn flat_compares_the_slowest_with_the_fastest_whatever_their_counts() {
        let all = measurements(&[("ours", 10, 12.0), ("ours", 1000, 10.0), ("ours", 4000, 14.0)]);
        assert_eq!(flat(&all, "", "ours", 1.4).is_met, Some(true));
        assert_eq!(flat(&all, "", "ours", 1.3).is_met, Some(false));
    }

    #[test]
    fn at_least_and_no_more_include_their_bounds() {
        let all = measurements(&[("ours", 50, 15.0), ("theirs", 50, 5.0)]);
        assert_eq!(at_least(&all, "", ("ours", 50), 3.0, ("theirs", 50)).is_met, Some(true));
        assert_eq!(at_least(&all, "", ("ours", 50), 3.1, ("theirs", 50)).is_met, Some(false));
        assert_eq!(no_more(&all, "", ("theirs", 50), 5.0).is_met, Some(true));
        assert_eq!(no_more(&all, "", ("theirs", 50), 4.9).is_met, Some(false));
        assert_eq!(no_more(&all, "", ("theirs", 500), 4.9).is_met, None);
    }

    #[test]
    fn a_threshold_without_measurements_is_undecided() {
        let all = measurements(&[("ours", 10, 12.0)]);
        assert_eq!(at_most(&all, "", ("ours", 10), 1.3, ("losetup", 10)).is_met, None);
        assert_eq!(flat(&all, "", "ours", 1.3).is_met, None, "one count shows no growth");
    }
}

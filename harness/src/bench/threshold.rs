//! The requirements of the benchmarks on their rows, and whether the measurements meet them.

use serde::{Deserialize, Serialize};

use super::measurement::{Measurements, Row, RowName};

/// A requirement on a row. In its text, `{n}` stands for the count of the row, and `{peer_n}` for that of its peer.
#[derive(Clone, Debug)]
pub(super) struct Requirement {
    text: String,
    row: String,
    at: Counts,
    limit: Limit,
    peer: Option<Peer>,
    statistic: Statistic,
    cause: Option<&'static str>,
}

/// The row that a row is compared with.
#[derive(Clone, Debug)]
struct Peer {
    row: String,
    /// `None` for the count of the row.
    at: Option<Counts>,
}

/// Counts of a row among those that were measured.
#[derive(Clone, Copy, Debug)]
enum Counts {
    Each,
    Least,
    Most,
    /// The count with the smallest median.
    Fastest,
    /// The count with the largest median.
    Slowest,
}

/// A limit for the value of the row, or for its ratio to the peer.
#[derive(Clone, Copy, Debug)]
enum Limit {
    AtMost(f64),
    AtLeast(f64),
    /// The row may take at most the peer's time divided by this factor.
    TimesAsFast(f64),
}

#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Statistic {
    Median,
    P99,
}

/// A requirement of a benchmark at one count, compared with the measurements.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Threshold {
    pub(super) bench: String,
    pub(super) text: String,
    /// `None` if a value that it needs was not measured.
    pub(super) is_met: Option<bool>,
    /// The values that decided it.
    pub(super) values: String,
    /// The ratio that decided it, if it compares two rows.
    pub(super) ratio: Option<Ratio>,
    /// The known cause if the threshold is not met. The last line of the run has it.
    #[serde(skip)]
    pub(super) cause: Option<&'static str>,
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

impl Statistic {
    pub(super) fn of(self, row: &Row) -> f64 {
        match self {
            Statistic::Median => row.median,
            Statistic::P99 => row.p99,
        }
    }
}

/// Requires that the largest count of `row` is at most `bound`.
pub(super) fn no_more(text: &str, row: &str, bound: f64) -> Requirement {
    Requirement {
        text: text.to_owned(),
        row: row.to_owned(),
        at: Counts::Most,
        limit: Limit::AtMost(bound),
        peer: None,
        statistic: Statistic::Median,
        cause: None,
    }
}

/// Requires that the largest count of `row` takes at most `factor` times as long as `peer` with the same count.
pub(super) fn at_most(text: &str, row: &str, factor: f64, peer: &str) -> Requirement {
    Requirement { peer: Some(Peer { row: peer.to_owned(), at: None }), ..no_more(text, row, factor) }
}

/// Requires that the largest count of `row` is at least `factor` times as fast as `peer` with the same count.
pub(super) fn faster(text: &str, row: &str, factor: f64, peer: &str) -> Requirement {
    Requirement { limit: Limit::TimesAsFast(factor), ..at_most(text, row, factor, peer) }
}

/// Requires that the largest count of `row` is at least `factor` times `peer` with the same count.
pub(super) fn at_least(text: &str, row: &str, factor: f64, peer: &str) -> Requirement {
    Requirement { limit: Limit::AtLeast(factor), ..at_most(text, row, factor, peer) }
}

/// Requires that the largest count of `row` takes at most `factor` times as long as the smallest count.
pub(super) fn grows_at_most(text: &str, row: &str, factor: f64) -> Requirement {
    Requirement {
        peer: Some(Peer { row: row.to_owned(), at: Some(Counts::Least) }),
        ..no_more(text, row, factor)
    }
}

/// Requires that `row` takes about as long with any count: the slowest at most `factor` times as long as the fastest.
pub(super) fn flat(text: &str, row: &str, factor: f64) -> Requirement {
    Requirement {
        at: Counts::Slowest,
        peer: Some(Peer { row: row.to_owned(), at: Some(Counts::Fastest) }),
        ..no_more(text, row, factor)
    }
}

impl Requirement {
    /// Applies to each count of the row.
    #[must_use]
    pub(super) fn at_each_count(self) -> Requirement {
        Requirement { at: Counts::Each, ..self }
    }

    /// Applies to the smallest count of the row.
    #[must_use]
    pub(super) fn at_the_least_count(self) -> Requirement {
        Requirement { at: Counts::Least, ..self }
    }

    /// Compares the 99th percentiles instead of the medians.
    #[must_use]
    pub(super) fn of_p99(self) -> Requirement {
        Requirement { statistic: Statistic::P99, ..self }
    }

    /// Adds the known cause for the case that the requirement is not met.
    #[must_use]
    pub(super) fn with_cause(self, cause: &'static str) -> Requirement {
        Requirement { cause: Some(cause), ..self }
    }

    /// Compares the requirement of a benchmark with its measurements. Returns one threshold for each count.
    pub(super) fn judge(&self, bench: &str, all: &Measurements) -> Vec<Threshold> {
        let judge_at = |n| {
            let row = (self.row.as_str(), n);
            let peer = self.peer.as_ref().map(|peer| {
                let at = peer.at.and_then(|at| at.of(all, &peer.row).first().copied());
                (peer.row.as_str(), if peer.at.is_some() { at.unwrap_or_default() } else { n })
            });
            let (is_met, values, ratio) = match self.compare(all, row, peer) {
                Ok((is_met, values, ratio)) => (Some(is_met), values, ratio),
                Err(missing) => (None, missing, None),
            };
            let peer_n = peer.map_or(n, |peer| peer.1);
            let text = self.text.replace("{n}", &n.to_string()).replace("{peer_n}", &peer_n.to_string());
            Threshold { bench: bench.to_owned(), text, is_met, values, ratio, cause: self.cause }
        };
        let counts = self.at.of(all, &self.row);
        if counts.is_empty() { vec![judge_at(0)] } else { counts.into_iter().map(judge_at).collect() }
    }

    /// Returns whether the requirement is met, with the values and the ratio. Returns an error that names a missing measurement.
    fn compare(
        &self,
        all: &Measurements,
        row: (&str, u64),
        peer: Option<(&str, u64)>,
    ) -> Result<(bool, String, Option<Ratio>), String> {
        let value = |(name, n): (&str, u64)| {
            let row = all.row(name, n).ok_or_else(|| format!("{name} was not measured with {n}"))?;
            Ok::<f64, String>(self.statistic.of(row))
        };
        let ours = value(row)?;
        let Some(peer) = peer else {
            let (is_met, verdict) = self.limit.judge(ours);
            return Ok((is_met, format!("{}({}) {verdict}", row.0, row.1), None));
        };
        if row == peer {
            return Err(format!("{} was measured with one count, {}", row.0, row.1));
        }
        let theirs = value(peer)?;
        // Two values of zero are equal too, and their quotient is not a number.
        let quotient = if ours == theirs { 1.0 } else { ours / theirs };
        let (is_met, verdict) = self.limit.judge(quotient);
        let named = |(name, n): (&str, u64)| RowName { name: name.to_owned(), n };
        let ratio = Ratio { row: named(row), peer: named(peer), statistic: self.statistic, value: quotient };
        let values = format!("{}({}) {ours:.1}, {}({}) {theirs:.1}: {verdict}", row.0, row.1, peer.0, peer.1);
        // A peer of zero has no ratio, and JSON has no infinity.
        Ok((is_met, values, quotient.is_finite().then_some(ratio)))
    }
}

impl Counts {
    fn of(self, all: &Measurements, row: &str) -> Vec<u64> {
        let counts = all.counts(row);
        let by_median = |n: &&u64, other: &&u64| {
            let median = |n: u64| all.row(row, n).map_or(f64::NAN, |row| row.median);
            median(**n).total_cmp(&median(**other))
        };
        let only = match self {
            Counts::Each => return counts,
            Counts::Least => counts.first(),
            Counts::Most => counts.last(),
            Counts::Fastest => counts.iter().min_by(by_median),
            Counts::Slowest => counts.iter().max_by(by_median),
        };
        only.copied().into_iter().collect()
    }
}

impl Limit {
    fn judge(self, value: f64) -> (bool, String) {
        match self {
            Limit::AtMost(bound) => (value <= bound, format!("{value:.2}; the threshold is at most {bound}")),
            Limit::AtLeast(bound) => {
                (value >= bound, format!("{value:.1}; the threshold is at least {bound}"))
            }
            Limit::TimesAsFast(factor) => {
                let gain = 1.0 / value;
                (gain >= factor, format!("{gain:.1} times as fast; the threshold is at least {factor}"))
            }
        }
    }
}

#[cfg(test)]
impl Requirement {
    /// Returns measurements that are this many times as bad as the requirement allows.
    pub(super) fn example(&self, excess: f64) -> Measurements {
        const PEER: f64 = 100.0;
        let base = if self.peer.is_some() { PEER } else { 1.0 };
        let value = match self.limit {
            // Anything is more than none.
            Limit::AtMost(0.0) => excess - 1.0,
            Limit::AtMost(bound) => base * bound * excess,
            Limit::AtLeast(bound) => base * bound / excess,
            Limit::TimesAsFast(factor) => base / factor * excess,
        };
        let peer = self.peer.as_ref().and_then(|peer| {
            let n = if peer.row == self.row { 1 } else { 10 };
            Row::of(&peer.row, n, "us", [PEER])
        });
        Measurements::of(Row::of(&self.row, 10, "us", [value]).into_iter().chain(peer).collect())
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    fn measurements(rows: &[(&str, u64, f64)]) -> Measurements {
        Measurements::of(
            rows.iter().map(|(name, n, value)| Row::of(name, *n, "us", [*value]).unwrap()).collect(),
        )
    }

    fn verdicts(requirement: Requirement, all: &Measurements) -> Vec<Option<bool>> {
        requirement.judge("bench", all).into_iter().map(|threshold| threshold.is_met).collect()
    }

    #[rstest]
    #[case::at_most(at_most("", "ours", 1.3, "peer"), &[("ours", 10, 130.0), ("peer", 10, 100.0)], Some(true))]
    #[case::more(at_most("", "ours", 1.3, "peer"), &[("ours", 10, 131.0), ("peer", 10, 100.0)], Some(false))]
    #[case::zeros(at_most("", "ours", 1.1, "peer"), &[("ours", 10, 0.0), ("peer", 10, 0.0)], Some(true))]
    #[case::peer_of_zero(at_most("", "ours", 1.1, "peer"), &[("ours", 10, 1.0), ("peer", 10, 0.0)], Some(false))]
    #[case::no_peer(at_most("", "ours", 1.1, "peer"), &[("ours", 10, 1.0)], None)]
    #[case::faster(faster("", "ours", 20.0, "peer"), &[("ours", 10, 10.0), ("peer", 10, 200.0)], Some(true))]
    #[case::slower(faster("", "ours", 21.0, "peer"), &[("ours", 10, 10.0), ("peer", 10, 200.0)], Some(false))]
    #[case::at_least(at_least("", "ours", 3.0, "peer"), &[("ours", 10, 15.0), ("peer", 10, 5.0)], Some(true))]
    #[case::less(at_least("", "ours", 3.1, "peer"), &[("ours", 10, 15.0), ("peer", 10, 5.0)], Some(false))]
    #[case::bound(no_more("", "ours", 5.0), &[("ours", 10, 5.0)], Some(true))]
    #[case::above(no_more("", "ours", 4.9), &[("ours", 10, 5.0)], Some(false))]
    #[case::unmeasured(no_more("", "ours", 4.9), &[], None)]
    #[case::most(no_more("", "ours", 4.9), &[("ours", 20, 5.0), ("ours", 10, 1.0)], Some(false))]
    #[case::least(no_more("", "ours", 4.9).at_the_least_count(), &[("ours", 20, 5.0), ("ours", 10, 1.0)], Some(true))]
    #[case::flat(flat("", "ours", 1.4), &[("ours", 1, 12.0), ("ours", 2, 10.0), ("ours", 3, 14.0)], Some(true))]
    #[case::not_flat(flat("", "ours", 1.3), &[("ours", 1, 14.0), ("ours", 2, 10.0), ("ours", 3, 12.0)], Some(false))]
    #[case::one_count(flat("", "ours", 1.3), &[("ours", 1, 14.0)], None)]
    #[case::growth(grows_at_most("", "ours", 1.3), &[("ours", 1, 10.0), ("ours", 2, 20.0), ("ours", 3, 13.0)], Some(true))]
    fn a_requirement_includes_its_bound(
        #[case] requirement: Requirement,
        #[case] rows: &[(&str, u64, f64)],
        #[case] expected: Option<bool>,
    ) {
        assert_eq!(verdicts(requirement, &measurements(rows)), [expected]);
    }

    #[test]
    fn each_count_has_a_threshold() {
        let all = measurements(&[("ours", 10, 1.0), ("peer", 10, 1.0), ("ours", 20, 2.0), ("peer", 20, 1.0)]);
        let requirement = at_most("{n}", "ours", 1.0, "peer").at_each_count();
        assert_eq!(verdicts(requirement.clone(), &all), [Some(true), Some(false)]);
        let thresholds = requirement.judge("bench", &all);
        assert_eq!([&*thresholds[0].text, &*thresholds[1].text], ["10", "20"]);
        assert_eq!(thresholds[1].values, "ours(20) 2.0, peer(20) 1.0: 2.00; the threshold is at most 1");
    }

    #[test]
    fn p99_compares_the_99th_percentiles() {
        let mut all = measurements(&[("idle", 10, 10.0), ("busy", 10, 10.0)]);
        all.parts[0].rows[1].p99 = 20.0;
        assert_eq!(verdicts(at_most("", "busy", 2.0, "idle").of_p99(), &all), [Some(true)]);
        assert_eq!(verdicts(at_most("", "busy", 1.9, "idle").of_p99(), &all), [Some(false)]);
    }

    #[test]
    fn ratio_needs_peer_above_zero() {
        let all = measurements(&[("ours", 10, 30.0), ("peer", 10, 15.0), ("nothing", 10, 0.0)]);
        let ratio = |requirement: Requirement| requirement.judge("bench", &all).remove(0).ratio;
        let of_peer = ratio(faster("", "ours", 1.0, "peer")).unwrap();
        assert_eq!((&*of_peer.row.name, &*of_peer.peer.name, of_peer.value), ("ours", "peer", 2.0));
        assert_eq!(ratio(at_most("", "ours", 1.0, "nothing")), None);
        assert_eq!(ratio(no_more("", "ours", 1.0)), None);
    }
}

//! The requirements of the benchmarks on their rows, and whether the measurements meet them.

use serde::{Deserialize, Serialize};

use super::measurement::{Environment, Row};

/// A requirement on the value of a row, or on its ratio to a peer. In its text, `{n}` stands for the count of the row, and `{peer_n}`
/// for that of its peer.
#[derive(Clone, Debug)]
pub(super) struct Requirement {
    text: String,
    row: String,
    at: Counts,
    limit: Limit,
    peer: Peer,
    /// Compares the 99th percentiles instead of the medians.
    of_p99: bool,
    cause: Option<&'static str>,
}

/// Counts of the row among those that were measured.
#[derive(Clone, Copy, Debug)]
enum Counts {
    Each,
    Least,
    Most,
    Slowest,
}

/// The row that a row is compared with.
#[derive(Clone, Debug)]
enum Peer {
    None,
    /// The row with this name and the same count.
    Named(String),
    /// The same row with the smallest count.
    Least,
    /// The same row with the count that has the smallest median.
    Fastest,
}

#[derive(Clone, Copy, Debug)]
enum Limit {
    AtMost(f64),
    AtLeast(f64),
}

/// A requirement of a benchmark at one count, compared with the measurements.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Threshold {
    pub(super) text: String,
    /// `None` if a value that it needs was not measured.
    pub(super) is_met: Option<bool>,
    /// The values that decided it.
    pub(super) values: String,
    /// The known cause if the threshold is not met. The last line of the run has it.
    #[serde(skip)]
    pub(super) cause: Option<&'static str>,
}

/// Requires that the largest count of `row` is at most `bound`.
pub(super) fn no_more(text: &str, row: &str, bound: f64) -> Requirement {
    Requirement {
        text: text.to_owned(),
        row: row.to_owned(),
        at: Counts::Most,
        limit: Limit::AtMost(bound),
        peer: Peer::None,
        of_p99: false,
        cause: None,
    }
}

/// Requires that the largest count of `row` is at most `factor` times `peer` with the same count.
pub(super) fn at_most(text: &str, row: &str, factor: f64, peer: &str) -> Requirement {
    Requirement { peer: Peer::Named(peer.to_owned()), ..no_more(text, row, factor) }
}

/// Requires that the largest count of `row` is at least `factor` times `peer` with the same count.
pub(super) fn at_least(text: &str, row: &str, factor: f64, peer: &str) -> Requirement {
    Requirement { limit: Limit::AtLeast(factor), ..at_most(text, row, factor, peer) }
}

/// Requires that the largest count of `row` is at most `factor` times the smallest count.
pub(super) fn grows_at_most(text: &str, row: &str, factor: f64) -> Requirement {
    Requirement { peer: Peer::Least, ..no_more(text, row, factor) }
}

/// Requires that `row` takes about as long with any count: the slowest at most `factor` times as long as the fastest.
pub(super) fn flat(text: &str, row: &str, factor: f64) -> Requirement {
    Requirement { at: Counts::Slowest, peer: Peer::Fastest, ..no_more(text, row, factor) }
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
        Requirement { of_p99: true, ..self }
    }

    /// Adds the known cause for the case that the requirement is not met.
    #[must_use]
    pub(super) fn with_cause(self, cause: &'static str) -> Requirement {
        Requirement { cause: Some(cause), ..self }
    }

    /// Compares the requirement with the measurements of its benchmark. Returns one threshold for each count.
    pub(super) fn judge(&self, all: &[Environment]) -> Vec<Threshold> {
        let rows = rows(all, &self.row);
        let by_median = |a: &&Row, b: &&Row| a.median().total_cmp(&b.median());
        let fastest = rows.iter().copied().min_by(by_median);
        let slowest = rows.iter().copied().max_by(by_median);
        let (least, most) = (rows.first().copied(), rows.last().copied());
        let judge = |row: &Row| {
            let peer = match &self.peer {
                Peer::None => None,
                Peer::Named(name) => match self::rows(all, name).into_iter().find(|peer| peer.n == row.n) {
                    Some(peer) => Some(peer),
                    None => {
                        return self.threshold(
                            row,
                            None,
                            None,
                            format!("{name} was not measured with {}", row.n),
                        );
                    }
                },
                Peer::Least => least,
                Peer::Fastest => fastest,
            };
            if peer.is_some_and(|peer| std::ptr::eq(peer, row)) {
                let values = format!("{} was measured with one count, {}", row.name, row.n);
                return self.threshold(row, None, None, values);
            }
            let (is_met, values) = self.compare(row, peer);
            self.threshold(row, peer, Some(is_met), values)
        };
        let selected = match self.at {
            Counts::Each if !rows.is_empty() => return rows.into_iter().map(judge).collect(),
            Counts::Each | Counts::Least => least,
            Counts::Most => most,
            Counts::Slowest => slowest,
        };
        let unmeasured = || Threshold {
            text: self.text.replace("{n}", "?").replace("{peer_n}", "?"),
            values: format!("{} was not measured", self.row),
            ..Threshold::default()
        };
        vec![selected.map_or_else(unmeasured, judge)]
    }

    /// Returns whether the requirement is met, with the values.
    fn compare(&self, row: &Row, peer: Option<&Row>) -> (bool, String) {
        let value = |row: &Row| if self.of_p99 { row.p99() } else { row.median() };
        let named = |row: &Row| format!("{}({}) {:.1}", row.name, row.n, value(row));
        let (value, values) = match peer {
            None => (value(row), named(row)),
            // Two values of zero are equal too, and their quotient is not a number.
            Some(peer) if value(row) == value(peer) => (1.0, format!("{}, {}: 1", named(row), named(peer))),
            Some(peer) => {
                let quotient = value(row) / value(peer);
                (quotient, format!("{}, {}: {quotient:.2}", named(row), named(peer)))
            }
        };
        match self.limit {
            Limit::AtMost(bound) => (value <= bound, format!("{values}; the threshold is at most {bound}")),
            Limit::AtLeast(bound) => (value >= bound, format!("{values}; the threshold is at least {bound}")),
        }
    }

    fn threshold(&self, row: &Row, peer: Option<&Row>, is_met: Option<bool>, values: String) -> Threshold {
        let peer_n = peer.unwrap_or(row).n.to_string();
        let text = self.text.replace("{n}", &row.n.to_string()).replace("{peer_n}", &peer_n);
        Threshold { text, is_met, values, cause: self.cause }
    }
}

/// Returns the rows with this name, in ascending order of their counts.
fn rows<'a>(all: &'a [Environment], name: &str) -> Vec<&'a Row> {
    let rows = all.iter().flat_map(|environment| &environment.rows);
    let mut rows: Vec<&Row> = rows.filter(|row| row.name == name).collect();
    rows.sort_by_key(|row| row.n);
    rows
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::super::measurement::{environment, row};
    use super::*;

    fn judged(requirement: Requirement, rows: &[(&str, u64, f64)]) -> Vec<Threshold> {
        requirement.judge(&[environment(rows.iter().map(|(name, n, value)| row(name, *n, &[*value])))])
    }

    fn verdicts(requirement: Requirement, rows: &[(&str, u64, f64)]) -> Vec<Option<bool>> {
        judged(requirement, rows).iter().map(|threshold| threshold.is_met).collect()
    }

    #[rstest]
    #[case::at_most(at_most("", "ours", 1.3, "peer"), &[("ours", 10, 130.0), ("peer", 10, 100.0)], Some(true))]
    #[case::more(at_most("", "ours", 1.3, "peer"), &[("ours", 10, 131.0), ("peer", 10, 100.0)], Some(false))]
    #[case::zeros(at_most("", "ours", 1.1, "peer"), &[("ours", 10, 0.0), ("peer", 10, 0.0)], Some(true))]
    #[case::peer_of_zero(at_most("", "ours", 1.1, "peer"), &[("ours", 10, 1.0), ("peer", 10, 0.0)], Some(false))]
    #[case::no_peer(at_most("", "ours", 1.1, "peer"), &[("ours", 10, 1.0)], None)]
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
        assert_eq!(verdicts(requirement, rows), [expected]);
    }

    #[test]
    fn each_count_has_a_threshold() {
        let rows = [("ours", 10, 1.0), ("peer", 10, 1.0), ("ours", 20, 2.0), ("peer", 20, 1.0)];
        let requirement = at_most("{n}, {peer_n}", "ours", 1.0, "peer").at_each_count();
        let thresholds = judged(requirement, &rows);
        let texts: Vec<_> = thresholds.iter().map(|threshold| (&*threshold.text, threshold.is_met)).collect();
        assert_eq!(texts, [("10, 10", Some(true)), ("20, 20", Some(false))]);
        assert_eq!(thresholds[1].values, "ours(20) 2.0, peer(20) 1.0: 2.00; the threshold is at most 1");
    }

    #[test]
    fn unmeasured_counts_are_question_marks() {
        assert_eq!(judged(no_more("{n}, {peer_n}", "ours", 1.0), &[])[0].text, "?, ?");
    }

    #[test]
    fn p99_compares_the_99th_percentiles() {
        let all = [environment([row("idle", 10, &[10.0; 3]), row("busy", 10, &[10.0, 10.0, 20.0])])];
        for (factor, expected) in [(2.0, true), (1.9, false)] {
            let thresholds = at_most("", "busy", factor, "idle").of_p99().judge(&all);
            assert_eq!(thresholds[0].is_met, Some(expected));
        }
    }
}

//! The Mann-Whitney U test: how likely two samples differ as much as they do if both come from one distribution.
//!
//! The test compares ranks, so it needs no normal distribution, and outliers of a busy machine weigh little. Small samples
//! without ties get the exact probability, others the normal approximation with corrections for ties and continuity.

/// The size of both samples up to which the exact probability is computed.
const MAX_EXACT: usize = 20;

/// Returns the two-sided probability, or `None` if a sample is empty.
pub(super) fn probability(first: &[f64], second: &[f64]) -> Option<f64> {
    if first.is_empty() || second.is_empty() {
        return None;
    }
    let ranks = Ranks::of(first, second);
    let is_small = first.len().max(second.len()) <= MAX_EXACT;
    Some(if is_small && ranks.ties.is_empty() { ranks.exact() } else { ranks.approximate() })
}

/// Returns the smallest probability that samples of these sizes can have: that of samples which do not overlap.
pub(super) fn smallest_probability(first: usize, second: usize) -> Option<f64> {
    let ascending = |range: std::ops::Range<usize>| range.map(|value| value as f64).collect::<Vec<_>>();
    probability(&ascending(0..first), &ascending(first..first + second))
}

/// The ranks of two samples among all their values.
struct Ranks {
    sizes: (usize, usize),
    /// The smaller of the two U statistics.
    u: f64,
    /// The number of equal values in each group of more than one.
    ties: Vec<f64>,
}

impl Ranks {
    fn of(first: &[f64], second: &[f64]) -> Ranks {
        let in_first = first.iter().map(|value| (*value, true));
        let mut all: Vec<(f64, bool)> = in_first.chain(second.iter().map(|value| (*value, false))).collect();
        all.sort_by(|a, b| a.0.total_cmp(&b.0));
        let (mut rank_sum, mut ties, mut below) = (0.0, Vec::new(), 0);
        for group in all.chunk_by(|a, b| a.0 == b.0) {
            let of_first = group.iter().filter(|(_, in_first)| *in_first).count();
            // Equal values share the mean of the ranks that they would have.
            let rank = below as f64 + (group.len() as f64 + 1.0) / 2.0;
            rank_sum += of_first as f64 * rank;
            if group.len() > 1 {
                ties.push(group.len() as f64);
            }
            below += group.len();
        }
        let (m, n) = (first.len() as f64, second.len() as f64);
        let u = rank_sum - m * (m + 1.0) / 2.0;
        Ranks { sizes: (first.len(), second.len()), u: u.min(m * n - u), ties }
    }

    /// Returns the share of all orders of the values whose U is at least as extreme.
    fn exact(&self) -> f64 {
        let orders = orders_by_u(self.sizes);
        let all: f64 = orders.iter().sum();
        // Without ties, U is an integer.
        let extreme: f64 = orders.iter().take(self.u as usize + 1).sum();
        (2.0 * extreme / all).min(1.0)
    }

    fn approximate(&self) -> f64 {
        let (m, n) = (self.sizes.0 as f64, self.sizes.1 as f64);
        let all = m + n;
        let of_ties: f64 = self.ties.iter().map(|ties| ties.powi(3) - ties).sum();
        let variance = m * n / 12.0 * (all + 1.0 - of_ties / (all * (all - 1.0)));
        // All values are equal.
        if variance <= 0.0 {
            return 1.0;
        }
        let distance = (m * n / 2.0 - self.u - 0.5).max(0.0);
        complementary_error(distance / (2.0 * variance).sqrt())
    }
}

/// Returns how many orders of `m` and `n` values have each U from 0 to `m * n`.
fn orders_by_u((m, n): (usize, usize)) -> Vec<f64> {
    // The counts are the coefficients of a Gaussian binomial coefficient: the product of (1 - x^(n + i)) / (1 - x^i).
    let mut orders = vec![0.0; m * n + 1];
    orders[0] = 1.0;
    for i in 1..=m {
        for u in (n + i..orders.len()).rev() {
            orders[u] -= orders[u - n - i];
        }
        for u in i..orders.len() {
            orders[u] += orders[u - i];
        }
    }
    orders
}

/// Returns the complementary error function of a value that is not negative, by formula 7.1.26 of Abramowitz and Stegun. The
/// error is below 2e-7.
fn complementary_error(x: f64) -> f64 {
    const COEFFICIENTS: [f64; 5] = [1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592];
    let t = 1.0 / (1.0 + 0.3275911 * x);
    let polynomial = COEFFICIENTS.iter().fold(0.0, |sum, coefficient| (sum + coefficient) * t);
    (polynomial * (-x * x).exp()).clamp(0.0, 1.0)
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    fn is_near(value: f64, expected: f64) -> bool {
        (value - expected).abs() < 1e-6
    }

    // From tables of the exact distribution, and by hand: 1 of 20 orders of 3 and 3 values has U = 0.
    #[rstest]
    #[case::overlapping(&[19.0, 22.0, 16.0, 29.0, 24.0], &[20.0, 11.0, 17.0, 12.0], 1.0 / 9.0)]
    #[case::apart(&[1.0, 2.0, 3.0], &[4.0, 5.0, 6.0], 0.1)]
    #[case::five_and_five(&[1.0, 2.0, 3.0, 4.0, 5.0], &[6.0, 7.0, 8.0, 9.0, 10.0], 2.0 / 252.0)]
    #[case::in_turns(&[1.0, 4.0], &[2.0, 3.0], 1.0)]
    fn small_samples_have_the_exact_probability(
        #[case] first: &[f64],
        #[case] second: &[f64],
        #[case] expected: f64,
    ) {
        for (first, second) in [(first, second), (second, first)] {
            let computed = probability(first, second).unwrap();
            assert!(is_near(computed, expected), "{computed} instead of {expected}");
        }
    }

    #[test]
    fn approximation_matches_known_example() {
        let ranks = Ranks::of(&[19.0, 22.0, 16.0, 29.0, 24.0], &[20.0, 11.0, 17.0, 12.0]);
        assert!(is_near(ranks.approximate(), 0.111_346_886_533), "{}", ranks.approximate());
    }

    // U is 2.5, and the variance 79 / 7 with these ties, so z is 5 / sqrt(79 / 7).
    #[test]
    fn ties_lower_the_variance() {
        let computed = probability(&[1.0, 2.0, 2.0, 3.0], &[2.0, 3.0, 4.0, 5.0]).unwrap();
        assert!(is_near(computed, 0.136_658_248), "{computed}");
    }

    /// An empty sample has no probability.
    #[test]
    fn equal_samples_do_not_differ() {
        assert_eq!(probability(&[3.0; 8], &[3.0; 5]), Some(1.0));
        assert_eq!(probability(&[], &[3.0]), None);
    }

    #[test]
    fn counted_orders_match_binomial_coefficients() {
        // 20 over 10, and 40 over 20.
        assert!(is_near(orders_by_u((10, 10)).iter().sum(), 184_756.0));
        let most: f64 = orders_by_u((20, 20)).iter().sum();
        assert!(is_near(most / 137_846_528_820.0, 1.0), "{most}");
    }

    #[test]
    fn significance_needs_five_samples() {
        let smallest = |size| smallest_probability(size, size).unwrap();
        assert!(smallest(5) < 0.01 && smallest(4) > 0.01, "{} {}", smallest(5), smallest(4));
        assert!(smallest_probability(200, 200).unwrap() < 1e-6);
    }
}

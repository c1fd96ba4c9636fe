//! The Mann-Whitney U test: whether two samples differ so much that they hardly come from one distribution.
//!
//! The test compares ranks, so it needs no normal distribution, and outliers of a busy machine weigh little. The distribution of U is
//! taken as normal, with the variance that ties leave. With five values in each sample that do not overlap, the probability by this
//! is 0.009, and the exact one 0.008.

/// The score beyond which samples count as different. One in a hundred pairs of one distribution is beyond it by chance.
pub(super) const SIGNIFICANT: f64 = 2.5758;

/// Returns how many standard deviations U is from its mean.
pub(super) fn score(first: &[f64], second: &[f64]) -> f64 {
    let in_first = first.iter().map(|value| (*value, true));
    let mut all: Vec<(f64, bool)> = in_first.chain(second.iter().map(|value| (*value, false))).collect();
    all.sort_by(|a, b| a.0.total_cmp(&b.0));
    let (mut rank_sum, mut of_ties, mut below) = (0.0, 0.0, 0.0);
    for group in all.chunk_by(|a, b| a.0 == b.0) {
        let (of_first, size) = (group.iter().filter(|(_, in_first)| *in_first).count(), group.len() as f64);
        // Equal values share the mean of the ranks that they would have.
        rank_sum += of_first as f64 * (below + f64::midpoint(size, 1.0));
        of_ties += size.powi(3) - size;
        below += size;
    }
    let (m, n) = (first.len() as f64, second.len() as f64);
    let u = rank_sum - m * (m + 1.0) / 2.0;
    let variance = m * n / 12.0 * (m + n + 1.0 - of_ties / ((m + n) * (m + n - 1.0)));
    // All values are equal.
    if variance > 0.0 { (u - m * n / 2.0).abs() / variance.sqrt() } else { 0.0 }
}

/// Returns the largest score that samples of these sizes can have: that of samples which do not overlap.
pub(super) fn largest_score(m: usize, n: usize) -> f64 {
    let (m, n) = (m as f64, n as f64);
    (3.0 * m * n / (m + n + 1.0)).sqrt()
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    // The first from a textbook. In the second, U is 2.5, and the variance 79 / 7 with these ties.
    #[rstest]
    #[case::overlapping(&[19.0, 22.0, 16.0, 29.0, 24.0], &[20.0, 11.0, 17.0, 12.0], 7.0 / (50.0f64 / 3.0).sqrt())]
    #[case::ties(&[1.0, 2.0, 2.0, 3.0], &[2.0, 3.0, 4.0, 5.0], 5.5 / (79.0f64 / 7.0).sqrt())]
    #[case::in_turns(&[1.0, 4.0], &[2.0, 3.0], 0.0)]
    #[case::equal(&[3.0; 8], &[3.0; 5], 0.0)]
    #[case::apart(&[1.0, 2.0, 3.0], &[4.0, 5.0, 6.0, 7.0], largest_score(3, 4))]
    fn score_is_symmetric(#[case] first: &[f64], #[case] second: &[f64], #[case] expected: f64) {
        for (first, second) in [(first, second), (second, first)] {
            let computed = score(first, second);
            assert!((computed - expected).abs() < 1e-6, "{computed} instead of {expected}");
        }
    }

    #[test]
    fn significance_needs_five_samples() {
        assert!(largest_score(5, 5) > SIGNIFICANT && largest_score(4, 4) < SIGNIFICANT);
        assert_eq!(largest_score(0, 5), 0.0);
    }
}

//! Choosing a free project id: preferred ids, then random ones, then a scan. This file makes no system calls.

use std::ops::RangeInclusive;

/// Random ids to try. If nine of ten ids are used, all of these are used once in thirty times; a scan then finds the next gap
/// after few steps.
const GUESSES: usize = 32;

/// The used ids, as the search needs them.
pub(super) trait Ids {
    type Error;

    /// Returns `true` if the id has usage or limits.
    fn is_used(&mut self, id: u32) -> Result<bool, Self::Error>;

    /// Returns the smallest used id that is at least `from`. Returns `None` if there is none up to the end of the range.
    fn next_used(&mut self, from: u32) -> Result<Option<u32>, Self::Error>;

    /// Returns a random number.
    fn random(&mut self) -> Result<u64, Self::Error>;
}

/// Returns a free id of `range`, or `None` if all are used.
///
/// It first tries the `preferred` ids, those that were used before and the one after the one that was allocated last: XFS stores
/// thirty quota records in a block and never frees such a block, so they save space. Then it tries random ids, whose cost does not grow with the number of
/// used ids. Only then does it scan the used ids for a gap.
pub(super) fn free_id<I: Ids>(
    ids: &mut I,
    range: &RangeInclusive<u32>,
    preferred: impl IntoIterator<Item = u32>,
) -> Result<Option<u32>, I::Error> {
    if range.is_empty() {
        return Ok(None);
    }
    for id in preferred {
        if range.contains(&id) && !ids.is_used(id)? {
            return Ok(Some(id));
        }
    }
    let mut guess = *range.start();
    for _ in 0..GUESSES {
        guess = random_id(ids.random()?, range);
        if !ids.is_used(guess)? {
            return Ok(Some(guess));
        }
    }
    match first_free(ids, guess, *range.end())? {
        None => first_free(ids, *range.start(), guess),
        found => Ok(found),
    }
}

/// Returns the ids that are not in `used` but in a block of `count` with one of them. `used` is in order.
pub(super) fn beside(used: impl IntoIterator<Item = u32>, count: u32) -> impl Iterator<Item = u32> {
    let mut used = used.into_iter().peekable();
    std::iter::from_fn(move || {
        let first = used.peek()? / count * count;
        let block = first..=first.saturating_add(count - 1);
        let mut unused: Vec<u32> = block.clone().collect();
        while let Some(id) = used.next_if(|id| block.contains(id)) {
            unused.retain(|other| *other != id);
        }
        Some(unused)
    })
    .flatten()
}

fn random_id(number: u64, range: &RangeInclusive<u32>) -> u32 {
    let count = u64::from(range.end() - range.start()) + 1;
    // The remainder is less than the count, which is at most 2^32.
    range.start() + (number % count) as u32
}

/// Returns the first free id from `from` to `last`. Takes one step for each used id.
fn first_free<I: Ids>(ids: &mut I, from: u32, last: u32) -> Result<Option<u32>, I::Error> {
    for candidate in from..=last {
        if ids.next_used(candidate)? != Some(candidate) {
            return Ok(Some(candidate));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::convert::Infallible;

    use proptest::prelude::*;

    use super::*;

    /// A block is used if it holds the quota record of an id in use.
    #[test]
    fn unused_ids_in_blocks_are_found() {
        assert_eq!(
            beside([3, 5, 21, u32::MAX], 5).collect::<Vec<_>>(),
            [0, 1, 2, 4, 6, 7, 8, 9, 20, 22, 23, 24]
        );
        assert_eq!(beside([], 30).count(), 0);
    }

    /// Used ids, some of them outside the range, and a count of the queries.
    struct Model {
        used: BTreeSet<u32>,
        last: u32,
        seed: u64,
        queries: usize,
    }

    impl Model {
        fn new(used: BTreeSet<u32>, range: &RangeInclusive<u32>, seed: u64) -> Self {
            Self { used, last: *range.end(), seed, queries: 0 }
        }

        fn find(&mut self, range: &RangeInclusive<u32>, next_fit: Option<u32>) -> Option<u32> {
            self.queries = 0;
            let Ok(found) = free_id(self, range, next_fit);
            found
        }
    }

    impl Ids for Model {
        type Error = Infallible;

        fn is_used(&mut self, id: u32) -> Result<bool, Infallible> {
            self.queries += 1;
            Ok(self.used.contains(&id))
        }

        fn next_used(&mut self, from: u32) -> Result<Option<u32>, Infallible> {
            self.queries += 1;
            Ok(self.used.range(from..=self.last).next().copied())
        }

        /// splitmix64.
        fn random(&mut self) -> Result<u64, Infallible> {
            self.seed = self.seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut z = self.seed;
            z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            Ok(z ^ (z >> 31))
        }
    }

    fn small_range() -> impl Strategy<Value = RangeInclusive<u32>> {
        (prop_oneof![1..5u32, u32::MAX - 60..u32::MAX - 40], 0..40u32)
            .prop_map(|(first, more)| first..=first + more)
    }

    proptest! {
        #[test]
        fn a_free_id_is_always_found(
            range in small_range(),
            used in prop::collection::btree_set(0..60u32, 0..60),
            next_fit in prop::option::of(any::<u32>()),
            seed: u64,
        ) {
            let used: BTreeSet<u32> = used.into_iter().map(|id| range.start().saturating_sub(3).saturating_add(id)).collect();
            let any_free = range.clone().any(|id| !used.contains(&id));
            let found = Model::new(used.clone(), &range, seed).find(&range, next_fit);
            prop_assert_eq!(found.is_some(), any_free);
            if let Some(id) = found {
                prop_assert!(range.contains(&id) && !used.contains(&id));
            }
        }

        #[test]
        fn each_id_is_allocated_once(range in small_range(), seed: u64) {
            let mut model = Model::new(BTreeSet::new(), &range, seed);
            let mut next_fit = None;
            for _ in range.clone() {
                let id = model.find(&range, next_fit).unwrap();
                prop_assert!(model.used.insert(id), "{id} was allocated twice");
                next_fit = id.checked_add(1);
            }
            prop_assert_eq!(model.find(&range, next_fit), None);
        }
    }

    /// The number of ids in use does not change the number of queries per allocation.
    #[test]
    fn the_cost_stays_constant() {
        let range = 0x4c00_0000..=0x4cff_ffff;
        let mut model = Model::new(BTreeSet::new(), &range, 7);
        let mut next_fit = None;
        for count in 0..100_000 {
            let id = model.find(&range, next_fit).unwrap();
            assert!(model.queries <= 2, "{} queries with {count} ids in use", model.queries);
            model.used.insert(id);
            next_fit = Some(id + 1);
        }
        // Other processes start at a random id. They need no more queries than this.
        let queries: usize = (0..1000).map(|_| (model.find(&range, None), model.queries).1).sum();
        assert!(queries <= 1050, "{queries} queries for 1000 ids with 0.6 % in use");
    }
}

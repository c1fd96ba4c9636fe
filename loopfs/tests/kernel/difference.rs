//! The difference of two lists of resources, in a length that a reader can take in. The kernel tests of csi use it, too.

/// The number of entries that a failure has.
const MAX_ENTRIES: usize = 10;

/// Fails if the lists differ, with the number and the first of the entries that only one of them has.
#[track_caller]
pub(crate) fn assert_same(now: &[String], before: &[String], what: &str) {
    let (added, removed) = (without(now, before), without(before, now));
    assert!(
        added.is_empty() && removed.is_empty(),
        "{what}: {} more: {:#?}; {} fewer: {:#?}",
        added.len(),
        &added[..added.len().min(MAX_ENTRIES)],
        removed.len(),
        &removed[..removed.len().min(MAX_ENTRIES)],
    );
}

/// Returns the entries that `other` does not have, or not as often.
fn without<'a>(entries: &'a [String], other: &[String]) -> Vec<&'a String> {
    let mut other: Vec<&String> = other.iter().collect();
    let is_more = |entry: &&String| match other.iter().position(|found| found == entry) {
        Some(found) => {
            other.swap_remove(found);
            false
        }
        None => true,
    };
    entries.iter().filter(is_more).collect()
}

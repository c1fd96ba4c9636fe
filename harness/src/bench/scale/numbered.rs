//! Objects that are created in large numbers.

use std::ops::Range;

use anyhow::Result;
use futures::{StreamExt, TryStreamExt};
use testvm::progress::Step;

const CREATE_CONCURRENCY: usize = 32;

/// Calls `create` with each number, concurrently, and returns the end of the range, which is the number of objects that then exist.
/// `kind` is the plural in the progress.
pub(super) async fn create<F: Future<Output = Result<()>>>(
    numbers: Range<u64>,
    kind: &str,
    step: &Step,
    create: impl Fn(u64) -> F,
) -> Result<u64> {
    let Range { start, end } = numbers;
    let mut creating = futures::stream::iter(numbers).map(create).buffer_unordered(CREATE_CONCURRENCY);
    let mut existing = start;
    while creating.try_next().await?.is_some() {
        existing += 1;
        step.note(format!("{existing} of {end} {kind}"));
    }
    Ok(existing)
}

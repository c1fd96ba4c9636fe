//! The search for an order of concurrent operations that explains what they returned.

use std::collections::{BTreeSet, HashSet};
use std::fmt;

use super::model::{Next, Progress, State};
use super::operation::{LARGE, Operation, Outcome};
use crate::failure::Failure;

/// An operation that a process has begun.
#[derive(Clone, Debug)]
pub(super) struct Call {
    pub(super) process: usize,
    pub(super) operation: Operation,
    /// The moments of the begin and of the end or of the kill.
    pub(super) started: usize,
    pub(super) ended: usize,
    /// The result; `None` if the process was killed before it returned one.
    pub(super) outcome: Option<Outcome>,
    /// The message of an error.
    pub(super) message: String,
}

impl Call {
    pub(super) fn begun(process: usize, operation: Operation, started: usize) -> Self {
        Self { process, operation, started, ended: usize::MAX, outcome: None, message: String::new() }
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { process, operation, started, ended, outcome, message } = self;
        write!(f, "[{started:>3} to {ended:>3}] process {process}: {operation:?} -> ")?;
        match outcome {
            None => write!(f, "killed"),
            Some(Outcome::Failed(failure)) => write!(f, "{failure:?} ({message})"),
            Some(outcome) => write!(f, "{outcome:?}"),
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Stage {
    Running { progress: Progress, changed: bool },
    Over,
}

/// Returns each state in which the store can be after the calls. Returns none if no order of their steps explains the results.
///
/// A call that ended before another one began has all its effects before those of the other one. A killed call may have stopped
/// after any step. A call may fail because of another one that used the same entry at the same time, and then changes nothing.
pub(super) fn possible_states(before: &State, calls: &[Call]) -> BTreeSet<State> {
    let start = Stage::Running { progress: Progress::Check, changed: false };
    let mut found = BTreeSet::new();
    let mut seen = HashSet::new();
    let mut open = vec![(before.clone(), vec![start; calls.len()])];
    while let Some((state, stages)) = open.pop() {
        if !seen.insert((state.clone(), stages.clone())) {
            continue;
        }
        if stages.iter().all(|stage| *stage == Stage::Over) {
            found.insert(state.at_rest());
            continue;
        }
        for (number, call) in calls.iter().enumerate() {
            let Stage::Running { progress, changed } = stages[number] else { continue };
            let is_before = |(other, (earlier, stage)): (usize, (&Call, &Stage))| {
                other != number && earlier.ended <= call.started && *stage != Stage::Over
            };
            if calls.iter().zip(&stages).enumerate().any(is_before) {
                continue;
            }
            let with = |stage| {
                let mut stages = stages.clone();
                stages[number] = stage;
                stages
            };
            for (next_state, next) in state.clone().step(call.operation, progress, number + 1) {
                let changed = changed || next_state != state;
                match next {
                    Next::Continue(progress) => {
                        open.push((next_state, with(Stage::Running { progress, changed })));
                    }
                    Next::Finished(outcome) if call.outcome.is_none_or(|returned| returned == outcome) => {
                        open.push((next_state, with(Stage::Over)));
                    }
                    Next::Finished(_) => {}
                }
            }
            if call.outcome.is_none() || !changed && may_fail(number, calls) {
                open.push((state.clone(), with(Stage::Over)));
            }
        }
    }
    found
}

/// Returns `true` if the call failed, and a concurrent call can be the reason: it used the same entry, or its large reservation was
/// counted twice while it was pending.
fn may_fail(number: usize, calls: &[Call]) -> bool {
    let call = &calls[number];
    let entries = call.operation.entries();
    let explains = |other: &Operation| match call.outcome {
        Some(Outcome::Failed(Failure::Busy | Failure::NotFound | Failure::AlreadyExists)) => {
            other.entries().iter().any(|entry| entries.contains(entry))
        }
        Some(Outcome::Failed(Failure::NoSpace)) => other.capacity() >= Some(LARGE),
        _ => false,
    };
    let concurrent = |other: &Call| other.started < call.ended && call.started < other.ended;
    let others = calls.iter().enumerate().filter(|(other, _)| *other != number);
    others.into_iter().any(|(_, other)| concurrent(other) && explains(&other.operation))
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::super::operation::{Entry, Form};
    use super::*;
    use crate::environment::MIB;

    const CREATE: Operation = Operation::Create { volume: 0, form: Form::Directory, capacity: MIB };
    const CLONE: Operation =
        Operation::Clone { source: Entry::Volume(0), volume: 1, form: Form::Directory, capacity: MIB };
    const EXPAND: Operation = Operation::Expand { volume: 0, capacity: 2 * MIB };
    const DELETE: Operation = Operation::Delete { volume: 0 };
    const MADE: Option<Outcome> = Some(Outcome::Capacity(MIB));
    const GREW: Option<Outcome> = Some(Outcome::Capacity(2 * MIB));
    const DELETED: Option<Outcome> = Some(Outcome::Deleted(true));
    const ABSENT: Option<Outcome> = Some(Outcome::Deleted(false));
    const NOT_FOUND: Option<Outcome> = Some(Outcome::Failed(Failure::NotFound));
    const BUSY: Option<Outcome> = Some(Outcome::Failed(Failure::Busy));

    fn call(operation: Operation, times: (usize, usize), outcome: Option<Outcome>) -> Call {
        Call { ended: times.1, outcome, ..Call::begun(0, operation, times.0) }
    }

    #[rstest]
    #[case::created(&[call(CREATE, (0, 1), MADE)], &[vec![0]])]
    #[case::created_without_a_stop(&[call(CREATE, (0, 0), MADE)], &[vec![0]])]
    #[case::killed(&[call(CREATE, (0, 1), None)], &[vec![], vec![0]])]
    #[case::not_created(&[call(CREATE, (0, 1), NOT_FOUND)], &[])]
    #[case::another_capacity(&[call(CREATE, (0, 1), GREW)], &[])]
    #[case::created_then_deleted(&[call(CREATE, (0, 1), MADE), call(DELETE, (2, 3), DELETED)], &[vec![]])]
    #[case::deleted_then_created(&[call(DELETE, (0, 1), DELETED), call(CREATE, (2, 3), MADE)], &[])]
    #[case::nothing_deleted(&[call(CREATE, (0, 1), MADE), call(DELETE, (2, 3), ABSENT)], &[])]
    #[case::nothing_deleted_yet(&[call(CREATE, (0, 3), MADE), call(DELETE, (1, 2), ABSENT)], &[vec![0]])]
    #[case::deleted_before_it_was_returned(&[call(CREATE, (0, 3), NOT_FOUND), call(DELETE, (1, 2), DELETED)], &[vec![]])]
    #[case::busy_without_reason(&[call(CREATE, (0, 1), MADE), call(DELETE, (2, 3), BUSY)], &[])]
    #[case::busy_while_expanded(
        &[call(CREATE, (0, 1), MADE), call(EXPAND, (2, 5), GREW), call(DELETE, (3, 4), BUSY)],
        &[vec![0]],
    )]
    #[case::cloned(&[call(CREATE, (0, 1), MADE), call(CLONE, (2, 3), MADE)], &[vec![0, 1]])]
    #[case::cloned_while_deleted(
        &[call(CREATE, (0, 1), MADE), call(CLONE, (2, 5), MADE), call(DELETE, (3, 4), DELETED)],
        &[vec![1]],
    )]
    #[case::cloned_after_deletion(
        &[call(CREATE, (0, 1), MADE), call(DELETE, (2, 3), DELETED), call(CLONE, (4, 5), MADE)],
        &[],
    )]
    #[case::killed_effects_come_before_later_calls(
        &[call(CREATE, (0, 1), None), call(DELETE, (2, 3), ABSENT)],
        &[vec![]],
    )]
    fn possible_orders_explain_the_results(#[case] calls: &[Call], #[case] expected: &[Vec<u8>]) {
        let states = possible_states(&State::default(), calls);
        let volumes: BTreeSet<Vec<u8>> =
            states.iter().map(|state| state.volumes.keys().copied().collect()).collect();
        assert_eq!(volumes, expected.iter().cloned().collect());
    }
}

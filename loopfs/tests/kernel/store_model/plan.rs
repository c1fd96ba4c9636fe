//! Plans of a test case: which process performs which operations, and at which system calls they alternate or are killed.

use std::fmt;

use proptest::collection::vec;
use proptest::prelude::*;

use super::operation::{Operation, VOLUMES, operation};

pub(super) const PROCESSES: usize = 3;
/// The process that publishes volumes.
pub(super) const DRIVER: usize = 0;

/// The operations between two quiet points, at which no operation is in progress.
#[derive(Clone, Debug)]
pub(super) struct Epoch {
    /// Each with the number of the process that performs it.
    pub(super) operations: Vec<(usize, Operation)>,
    /// Turns of the processes, in stops before system calls. After the last turn, the
    /// processes take long turns until all operations have ended.
    pub(super) turns: Vec<(usize, usize)>,
    /// The process that is killed, and after how many of its stops.
    pub(super) kill: Option<(usize, usize)>,
    /// Volumes that get another content at the quiet point.
    pub(super) written: Vec<u8>,
}

impl fmt::Display for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (process, operation) in &self.operations {
            writeln!(f, "  process {process}: {operation:?}")?;
        }
        write!(f, "  turns {:?}", self.turns)?;
        if let Some((process, stops)) = self.kill {
            write!(f, ", kill process {process} after {stops} stops")?;
        }
        if !self.written.is_empty() {
            write!(f, ", write to volumes {:?}", self.written)?;
        }
        writeln!(f)
    }
}

pub(super) fn print(epochs: &[Epoch]) -> String {
    let numbered = epochs.iter().enumerate();
    numbered.map(|(number, epoch)| format!("epoch {number}:\n{epoch}")).collect()
}

fn epoch() -> impl Strategy<Value = Epoch> {
    let process = || 0..PROCESSES;
    let operation = (process(), operation()).prop_map(|(process, operation)| {
        (if operation.is_of_driver() { DRIVER } else { process }, operation)
    });
    // Short turns hit the moments between two steps of an operation, long turns let another process perform a whole operation in
    // between.
    let stops = prop_oneof![1 => 1..4usize, 3 => 1..25usize, 1 => 25..80usize];
    (
        vec(operation, 1..=6),
        vec((process(), stops), 0..10),
        proptest::option::weighted(0.5, (process(), 1..50usize)),
        vec(0..VOLUMES, 0..3),
    )
        .prop_map(|(operations, turns, kill, written)| Epoch { operations, turns, kill, written })
}

pub(super) fn epochs() -> impl Strategy<Value = Vec<Epoch>> {
    vec(epoch(), 1..=16)
}

//! Plans of a test case: which process performs which operations, and at which system calls they alternate or are killed.

use std::fmt;

use proptest::collection::vec;
use proptest::prelude::*;

use super::operation::{Form, Operation, VOLUMES, form, operation, volume};
use crate::environment::MIB;

pub(super) const PROCESSES: usize = 3;
/// A turn of so many stops ends with the operations of the process.
const TO_THE_END: usize = 1000;
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

/// Two processes expand the same volume, and one of them is stopped while the other one does so. Random epochs rarely have that.
fn concurrent_expansions() -> impl Strategy<Value = Vec<Epoch>> {
    (volume(), form(), 4..=9u64, 4..=9u64, 1..30usize).prop_map(|(volume, form, first, second, stops)| {
        let expand = |capacity| Operation::Expand { volume, capacity: capacity * MIB };
        let turns = vec![(0, stops), (1, TO_THE_END)];
        vec![
            undisturbed(vec![(0, Operation::Delete { volume }), (0, create(volume, form))]),
            Epoch { turns, ..undisturbed(vec![(0, expand(first)), (1, expand(second))]) },
        ]
    })
}

/// An image is deleted and its removal tried while another process has it open.
fn deletion_of_a_held_image() -> impl Strategy<Value = Vec<Epoch>> {
    (volume(), any::<bool>()).prop_map(|(volume, thin)| {
        let form = if thin { Form::ThinImage } else { Form::ThickImage };
        let created = vec![(0, Operation::Delete { volume }), (0, create(volume, form))];
        let deleted = vec![(0, Operation::Delete { volume }), (0, Operation::EmptyTrash)];
        [created, vec![(1, Operation::Hold { volume })], deleted].map(undisturbed).into()
    })
}

fn create(volume: u8, form: Form) -> Operation {
    Operation::Create { volume, form, capacity: MIB }
}

/// Returns an epoch whose processes perform their operations one after the other.
fn undisturbed(operations: Vec<(usize, Operation)>) -> Epoch {
    Epoch { operations, turns: Vec::new(), kill: None, written: Vec::new() }
}

pub(super) fn epochs() -> impl Strategy<Value = Vec<Epoch>> {
    let part = prop_oneof![
        16 => epoch().prop_map(|epoch| vec![epoch]),
        2 => concurrent_expansions(),
        1 => deletion_of_a_held_image(),
    ];
    vec(part, 1..=14).prop_map(|parts| parts.concat())
}

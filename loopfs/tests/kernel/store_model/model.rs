//! The sequential model of the store: the steps of each operation that take effect at one moment each.

use std::collections::BTreeMap;

use super::operation::{Entry, Form, LARGE, Operation, Outcome, TOO_LARGE};
use crate::failure::Failure;

/// The volumes and snapshots by number.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct State {
    pub(super) volumes: BTreeMap<u8, Volume>,
    pub(super) snapshots: BTreeMap<u8, Snapshot>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Volume {
    pub(super) form: Form,
    pub(super) capacity: u64,
    pub(super) source: Option<Entry>,
    /// The number that was written to it last, 0 before the first.
    pub(super) content: u64,
    /// Published or attached.
    pub(super) in_use: bool,
    /// Differs between volumes that have the same number one after the other. It is 0 at a quiet point.
    pub(super) incarnation: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Snapshot {
    pub(super) form: Form,
    pub(super) capacity: u64,
    pub(super) source: u8,
    pub(super) content: u64,
    pub(super) incarnation: usize,
}

/// What an operation reads of its source, or of the volume that it changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Seen {
    form: Form,
    capacity: u64,
    content: u64,
    incarnation: usize,
}

/// How far an operation has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Progress {
    Check,
    Observe,
    Commit(Option<Seen>),
    Return,
}

/// What follows after a step.
pub(super) enum Next {
    Continue(Progress),
    Finished(Outcome),
}

use Next::{Continue, Finished};

impl State {
    /// Returns the state at a quiet point, when nothing remembers earlier incarnations.
    pub(super) fn at_rest(mut self) -> Self {
        self.volumes.values_mut().for_each(|volume| volume.incarnation = 0);
        self.snapshots.values_mut().for_each(|snapshot| snapshot.incarnation = 0);
        self
    }

    fn seen(&self, entry: Entry) -> Option<Seen> {
        match entry {
            Entry::Volume(number) => {
                let &Volume { form, capacity, content, incarnation, .. } = self.volumes.get(&number)?;
                Some(Seen { form, capacity, content, incarnation })
            }
            Entry::Snapshot(number) => {
                let &Snapshot { form, capacity, content, incarnation, .. } = self.snapshots.get(&number)?;
                Some(Seen { form, capacity, content, incarnation })
            }
        }
    }

    /// Returns the capacity of an entry, with which an operation ends.
    fn capacity(&self, entry: Entry) -> Next {
        Finished(
            self.seen(entry)
                .map_or(Outcome::Failed(Failure::NotFound), |seen| Outcome::Capacity(seen.capacity)),
        )
    }

    /// Performs the next step of an operation. Returns each permitted continuation. `incarnation` is that of the entry that the
    /// operation creates.
    pub(super) fn step(
        self,
        operation: Operation,
        progress: Progress,
        incarnation: usize,
    ) -> Vec<(Self, Next)> {
        match operation {
            Operation::Create { volume, form, capacity } => {
                self.create(Target::Volume { volume, form, capacity, source: None }, progress, incarnation)
            }
            Operation::Clone { source, volume, form, capacity } => {
                let target = Target::Volume { volume, form, capacity, source: Some(source) };
                self.create(target, progress, incarnation)
            }
            Operation::Snapshot { source, snapshot } => {
                self.create(Target::Snapshot { snapshot, source }, progress, incarnation)
            }
            Operation::Expand { volume, capacity } => self.expand(volume, capacity, progress),
            _ => {
                let mut state = self;
                let next = state.single(operation, progress);
                vec![(state, next)]
            }
        }
    }

    fn create(self, target: Target, progress: Progress, incarnation: usize) -> Vec<(Self, Next)> {
        let entry = target.entry();
        let next = match (progress, target.source(), self.existing(target)) {
            (Progress::Check | Progress::Commit(_), _, Existing::Other) => fails(Failure::AlreadyExists),
            (Progress::Check, _, Existing::Same) => Continue(Progress::Return),
            (Progress::Check, None, Existing::Absent) => Continue(Progress::Commit(None)),
            (Progress::Check, Some(_), Existing::Absent) => Continue(Progress::Observe),
            (Progress::Observe, source, _) => match source.and_then(|source| self.seen(source)) {
                None => fails(Failure::NotFound),
                Some(seen) => match target {
                    Target::Volume { form, .. } if form.kind() != seen.form.kind() => {
                        fails(Failure::InvalidInput)
                    }
                    Target::Volume { capacity, .. } if capacity < seen.capacity => {
                        fails(Failure::WouldShrink)
                    }
                    _ => Continue(Progress::Commit(Some(seen))),
                },
            },
            (Progress::Commit(seen), source, existing) => {
                let current = source.and_then(|source| self.seen(source)).map(|current| current.incarnation);
                match seen {
                    // A directory that was deleted during the copy may have lost files.
                    Some(seen) if seen.form == Form::Directory && current != Some(seen.incarnation) => {
                        fails(Failure::NotFound)
                    }
                    _ if existing == Existing::Same => Continue(Progress::Return),
                    _ => return self.insert(target, seen, incarnation),
                }
            }
            (Progress::Return, ..) => self.capacity(entry),
        };
        vec![(self, next)]
    }

    fn insert(mut self, target: Target, seen: Option<Seen>, incarnation: usize) -> Vec<(Self, Next)> {
        let before = self.clone();
        let content = seen.map_or(0, |seen| seen.content);
        let capacity = match target {
            Target::Volume { volume, form, capacity, source } => {
                let made = Volume { form, capacity, source, content, in_use: false, incarnation };
                self.volumes.insert(volume, made);
                capacity
            }
            Target::Snapshot { snapshot, source } => {
                let seen = seen.expect("a snapshot has a source");
                let made =
                    Snapshot { form: seen.form, capacity: seen.capacity, source, content, incarnation };
                self.snapshots.insert(snapshot, made);
                seen.capacity
            }
        };
        reserving(capacity, before, (self, Continue(Progress::Return)))
    }

    fn existing(&self, target: Target) -> Existing {
        let same = match target {
            Target::Volume { volume, form, capacity, source } => self.volumes.get(&volume).map(|found| {
                found.form.kind() == form.kind() && found.capacity >= capacity && found.source == source
            }),
            Target::Snapshot { snapshot, source } => {
                self.snapshots.get(&snapshot).map(|found| found.source == source)
            }
        };
        match same {
            None => Existing::Absent,
            Some(true) => Existing::Same,
            Some(false) => Existing::Other,
        }
    }

    fn expand(mut self, volume: u8, capacity: u64, progress: Progress) -> Vec<(Self, Next)> {
        let entry = Entry::Volume(volume);
        let next = match progress {
            Progress::Check | Progress::Observe => match self.seen(entry) {
                None => fails(Failure::NotFound),
                seen => Continue(Progress::Commit(seen)),
            },
            Progress::Commit(seen) => {
                let seen = seen.expect("the opened volume");
                let before = self.clone();
                match self.volumes.get_mut(&volume).filter(|found| found.incarnation == seen.incarnation) {
                    Some(found) if found.capacity < capacity => {
                        found.capacity = capacity;
                        return reserving(capacity, before, (self, Continue(Progress::Return)));
                    }
                    // The image of a deleted volume may become larger, which nothing shows.
                    None if seen.form == Form::Directory && seen.capacity < capacity => {
                        fails(Failure::NotFound)
                    }
                    None => return reserving(capacity, before, (self, Continue(Progress::Return))),
                    Some(_) => Continue(Progress::Return),
                }
            }
            Progress::Return => self.capacity(entry),
        };
        vec![(self, next)]
    }

    /// Performs a step of an operation that changes at most one existing entry.
    fn single(&mut self, operation: Operation, progress: Progress) -> Next {
        match operation {
            Operation::Delete { volume } => match self.volumes.get(&volume) {
                None => Finished(Outcome::Deleted(false)),
                Some(found) if found.in_use => fails(Failure::Busy),
                Some(_) => {
                    self.volumes.remove(&volume);
                    Finished(Outcome::Deleted(true))
                }
            },
            Operation::DeleteSnapshot { snapshot } => {
                Finished(Outcome::Deleted(self.snapshots.remove(&snapshot).is_some()))
            }
            Operation::Hold { volume } => self.require(volume, None).map_or_else(|next| next, |_| done()),
            Operation::Publish { volume } => match self.require(volume, Some(true)) {
                Ok(found) => {
                    found.in_use = true;
                    done()
                }
                Err(next) => next,
            },
            Operation::Unpublish { volume } => {
                if let Ok(found) = self.require(volume, Some(true)) {
                    found.in_use = false;
                }
                done()
            }
            Operation::SyncPublications => {
                let directories = self.volumes.values_mut().filter(|volume| volume.form == Form::Directory);
                directories.for_each(|volume| volume.in_use = false);
                done()
            }
            Operation::Attach { volume } | Operation::Detach { volume } => {
                self.attach_or_detach(volume, matches!(operation, Operation::Attach { .. }), progress)
            }
            _ => done(),
        }
    }

    fn attach_or_detach(&mut self, volume: u8, attach: bool, progress: Progress) -> Next {
        let Progress::Commit(Some(seen)) = progress else {
            return match self.require(volume, Some(false)) {
                Ok(_) => Continue(Progress::Commit(self.seen(Entry::Volume(volume)))),
                Err(next) => next,
            };
        };
        match self.volumes.get_mut(&volume).filter(|found| found.incarnation == seen.incarnation) {
            Some(found) => {
                found.in_use = attach;
                done()
            }
            None if attach => fails(Failure::NotFound),
            None => done(),
        }
    }

    /// Returns the volume if it is a directory or an image, as requested.
    fn require(&mut self, volume: u8, directory: Option<bool>) -> Result<&mut Volume, Next> {
        let found = self.volumes.get_mut(&volume).ok_or_else(|| fails(Failure::NotFound))?;
        match directory {
            Some(directory) if (found.form == Form::Directory) != directory => {
                Err(fails(Failure::InvalidInput))
            }
            _ => Ok(found),
        }
    }
}

/// What an operation creates.
#[derive(Clone, Copy)]
enum Target {
    Volume { volume: u8, form: Form, capacity: u64, source: Option<Entry> },
    Snapshot { snapshot: u8, source: u8 },
}

impl Target {
    fn entry(self) -> Entry {
        match self {
            Self::Volume { volume, .. } => Entry::Volume(volume),
            Self::Snapshot { snapshot, .. } => Entry::Snapshot(snapshot),
        }
    }

    fn source(self) -> Option<Entry> {
        match self {
            Self::Volume { source, .. } => source,
            Self::Snapshot { source, .. } => Some(Entry::Volume(source)),
        }
    }
}

/// The entry that has the number of a target.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Existing {
    Absent,
    /// It has the requested properties.
    Same,
    Other,
}

fn fails(failure: Failure) -> Next {
    Finished(Outcome::Failed(failure))
}

fn done() -> Next {
    Finished(Outcome::Done)
}

/// Returns the continuations of a step that reserves space. A large reservation may fit or not, because the model does not know how
/// much space deleted volumes still have. The invariants check that the store does not overcommit.
fn reserving(capacity: u64, before: State, reserved: (State, Next)) -> Vec<(State, Next)> {
    let refused = || (before.clone(), fails(Failure::NoSpace));
    match capacity {
        TOO_LARGE.. => vec![refused()],
        LARGE.. => vec![reserved, refused()],
        _ => vec![reserved],
    }
}

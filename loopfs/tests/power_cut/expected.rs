//! The expected state after a power cut, derived from the lines that were written before it.

use std::collections::{BTreeMap, BTreeSet};

use loopfs::volume_store::VolumeKind;

use crate::line::{Line, Operation, Phase};

/// The volumes and snapshots by id. No volume has the id of a snapshot.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Expected(pub(crate) BTreeMap<String, Volume>);

#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Volume {
    pub(crate) kind: VolumeKind,
    presence: Presence,
    /// The last confirmed capacity, and the capacity that was requested since.
    capacities: [u64; 2],
    /// The blocks that were written and fsynced.
    pub(crate) written: BTreeSet<u64>,
    /// True for a copy, and for a volume or snapshot that was copied.
    pub(crate) shares: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Presence {
    There,
    /// The volume was being created or deleted. It is either complete or absent.
    Either,
    Absent,
}

/// The state of an existing volume.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Found {
    pub(crate) kind: VolumeKind,
    pub(crate) capacity: u64,
    /// The blocks that hold the content that was written to them.
    pub(crate) intact: BTreeSet<u64>,
}

impl Volume {
    /// Returns `true` if the operation that created and confirmed the volume has ended.
    pub(crate) fn is_confirmed(&self) -> bool {
        self.presence == Presence::There
    }
}

impl Expected {
    /// Derives the state from the lines in their order. Only one thread writes about a volume.
    pub(crate) fn of(lines: &[Line]) -> Expected {
        let mut expected = Expected::default();
        for line in lines {
            expected.apply(line.phase, &line.operation);
        }
        expected
    }

    fn apply(&mut self, phase: Phase, operation: &Operation) {
        match operation {
            Operation::Create { kind, volume, capacity } => {
                let presence = if phase == Phase::Done { Presence::There } else { Presence::Either };
                let made = Volume {
                    kind: *kind,
                    presence,
                    capacities: [*capacity; 2],
                    written: BTreeSet::new(),
                    shares: false,
                };
                self.0.insert(volume.clone(), made);
            }
            Operation::Clone { volume, capacity, source, .. } => {
                self.copy(phase, volume, source, Some(*capacity));
            }
            Operation::Snapshot { snapshot, source, .. } => self.copy(phase, snapshot, source, None),
            Operation::Grow { volume, capacity, .. } => {
                let volume = self.known(volume);
                volume.capacities[1] = *capacity;
                if phase == Phase::Done {
                    volume.capacities[0] = *capacity;
                }
            }
            Operation::Write { volume, block, .. } => {
                if phase == Phase::Done {
                    self.known(volume).written.insert(*block);
                }
            }
            Operation::Delete { volume, .. } => {
                let presence = if phase == Phase::Done { Presence::Absent } else { Presence::Either };
                self.known(volume).presence = presence;
            }
            Operation::Release | Operation::Recover => {}
        }
    }

    /// Handles a copy. A snapshot has the capacity of its source.
    fn copy(&mut self, phase: Phase, copy: &str, source: &str, capacity: Option<u64>) {
        let source = self.known(source);
        source.shares = true;
        let made = Volume {
            kind: source.kind,
            presence: if phase == Phase::Done { Presence::There } else { Presence::Either },
            capacities: capacity.map_or(source.capacities, |capacity| [capacity; 2]),
            written: source.written.clone(),
            shares: true,
        };
        self.0.insert(copy.to_owned(), made);
    }

    fn known(&mut self, volume: &str) -> &mut Volume {
        self.0.get_mut(volume).unwrap_or_else(|| panic!("a line names {volume} before its creation"))
    }

    /// Returns every difference between the found and the expected state.
    pub(crate) fn differences(&self, found: &BTreeMap<String, Found>) -> Vec<String> {
        let mut differences = Vec::new();
        for (id, volume) in &self.0 {
            match (volume.presence, found.get(id)) {
                (Presence::There, None) => differences.push(format!("{id} is lost: {volume:?}")),
                (Presence::Absent, Some(found)) => {
                    differences.push(format!("{id} was deleted, and is there: {found:?}"));
                }
                (Presence::Either | Presence::Absent, None) => {}
                (Presence::There | Presence::Either, Some(found)) => {
                    if found.kind != volume.kind || !volume.capacities.contains(&found.capacity) {
                        differences.push(format!("{id} is {found:?}, and should be {volume:?}"));
                    }
                    for block in volume.written.difference(&found.intact) {
                        differences.push(format!("{id} lost what was written to block {block}"));
                    }
                }
            }
        }
        let unknown = found.keys().filter(|id| !self.0.contains_key(*id));
        differences.extend(unknown.map(|id| format!("{id} exists, and no line created it")));
        differences
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    const CREATED: &str = "0 intent create Block v 100;0 done create Block v 100";
    const WRITTEN: &str = "0 intent write Block v 3;0 done write Block v 3";

    fn there(capacity: u64, intact: &[u64]) -> Option<Found> {
        Some(Found { kind: VolumeKind::Block, capacity, intact: intact.iter().copied().collect() })
    }

    #[rstest]
    #[case::being_created("0 intent create Block v 100", None, true)]
    #[case::being_created_and_whole("0 intent create Block v 100", there(100, &[]), true)]
    #[case::being_created_and_half_made("0 intent create Block v 100", there(50, &[]), false)]
    #[case::created(CREATED, there(100, &[]), true)]
    #[case::created_and_lost(CREATED, None, false)]
    #[case::growing(&format!("{CREATED};0 intent grow Block v 200"), there(100, &[]), true)]
    #[case::growing_and_grown(&format!("{CREATED};0 intent grow Block v 200"), there(200, &[]), true)]
    #[case::growing_and_between(&format!("{CREATED};0 intent grow Block v 200"), there(150, &[]), false)]
    #[case::grown(&format!("{CREATED};0 intent grow Block v 200;0 done grow Block v 200"), there(200, &[]), true)]
    #[case::grown_and_small(&format!("{CREATED};0 intent grow Block v 200;0 done grow Block v 200"), there(100, &[]), false)]
    #[case::written(&format!("{CREATED};{WRITTEN}"), there(100, &[3]), true)]
    #[case::written_and_lost(&format!("{CREATED};{WRITTEN}"), there(100, &[2]), false)]
    #[case::being_deleted(&format!("{CREATED};{WRITTEN};0 intent delete Block v"), None, true)]
    #[case::being_deleted_and_whole(&format!("{CREATED};{WRITTEN};0 intent delete Block v"), there(100, &[3]), true)]
    #[case::being_deleted_and_emptied(&format!("{CREATED};{WRITTEN};0 intent delete Block v"), there(100, &[]), false)]
    #[case::deleted(&format!("{CREATED};0 intent delete Block v;0 done delete Block v"), None, true)]
    #[case::deleted_and_back(&format!("{CREATED};0 intent delete Block v;0 done delete Block v"), there(100, &[]), false)]
    #[case::cloned(&format!("{CREATED};{WRITTEN};0 done clone Block w 100 v;0 done delete Block w"), there(100, &[3]), true)]
    #[case::snapshotted(&format!("{CREATED};{WRITTEN};0 done snapshot Block w v;0 done delete Block w"), there(100, &[3]), true)]
    #[case::never_made("0 intent release;0 done release", there(100, &[]), false)]
    fn a_volume_is_complete_or_absent(#[case] lines: &str, #[case] found: Option<Found>, #[case] good: bool) {
        let lines: Vec<Line> = lines.split(';').map(|line| Line::parse(line).expect(line)).collect();
        let found = found.into_iter().map(|found| ("v".to_owned(), found)).collect();
        let differences = Expected::of(&lines).differences(&found);
        assert_eq!(differences.is_empty(), good, "{differences:?}");
    }

    #[test]
    fn a_clone_has_its_sources_content() {
        let text = format!("{CREATED};{WRITTEN};0 intent clone Block w 100 v;0 done clone Block w 100 v");
        let lines: Vec<Line> = text.split(';').map(|line| Line::parse(line).expect(line)).collect();
        let found = |intact: &[u64]| {
            let of = |id: &str, intact: &[u64]| (id.to_owned(), there(100, intact).expect("a volume"));
            BTreeMap::from([of("v", &[3]), of("w", intact)])
        };
        assert!(Expected::of(&lines).0.values().all(Volume::is_confirmed));
        assert_eq!(Expected::of(&lines).differences(&found(&[3])), Vec::<String>::new());
        assert_eq!(Expected::of(&lines).differences(&found(&[])), ["w lost what was written to block 3"]);
    }

    #[test]
    fn another_kind_is_a_difference() {
        let lines = [Line::parse("0 done create Filesystem v 100").unwrap()];
        let found = there(100, &[]).into_iter().map(|found| ("v".to_owned(), found)).collect();
        assert_eq!(Expected::of(&lines).differences(&found).len(), 1);
    }
}

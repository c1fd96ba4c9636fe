//! Tests of files whose owner gave them the project id of another volume.

use std::fs::{self, File};
use std::io::Write;

use loopfs::Bytes;
use loopfs::project_quota::{ProjectId, assign_project, project_of};
use loopfs::volume_store::{AbnormalReason, ChargedTo, Condition, ForeignEvidence, ForeignFiles, VolumeId};

use crate::environment::{MIB, directory_with, id, project, quota, store, xfs};
use crate::fixtures::{TestStore, entry};

const HOLDER: u64 = 64 * MIB;
const VICTIM: u64 = 16 * MIB;
/// The bytes that the file system's own metadata may allocate or free in the meantime.
const TOLERANCE: u64 = MIB;

/// Two volumes. The owner of the first volume gave 4 MiB of its files the project id of the second one.
struct Fixture {
    store: TestStore,
    holder: VolumeId,
    victim: VolumeId,
    project: ProjectId,
    before: Bytes,
}

impl Fixture {
    fn new() -> Self {
        let (store, holder, victim) = (TestStore::open(), id("holder"), id("victim"));
        let before = store.space().unwrap().available;
        for (id, size) in [(&holder, HOLDER), (&victim, VICTIM)] {
            // The tolerance includes the space of these inodes.
            store.create(id, &directory_with(Bytes(size), 1 << 18)).unwrap();
        }
        let project = project(project_of(File::open(entry(&victim)).unwrap()).unwrap());
        let fixture = Self { store, holder, victim, project, before };
        fs::create_dir(fixture.foreign_directory()).unwrap();
        assign_project(File::open(fixture.foreign_directory()).unwrap(), project).unwrap();
        for name in ["a", "b"] {
            let mut file = File::create(fixture.foreign_directory().join(name)).unwrap();
            file.write_all(&vec![1; 2 * MIB as usize]).unwrap();
            file.sync_all().unwrap();
        }
        fixture
    }

    fn foreign_directory(&self) -> std::path::PathBuf {
        entry(&self.holder).join("foreign_directory")
    }

    fn condition(&self, id: &VolumeId) -> (Option<AbnormalReason>, String) {
        match self.store.stats(id).unwrap().condition {
            Condition::Healthy => (None, String::new()),
            Condition::Abnormal { reason, message } => (Some(reason), message),
        }
    }

    fn search(&self) -> Vec<ForeignFiles> {
        self.store.find_foreign_files(None, || ()).unwrap()
    }

    fn files(&self, charged: ChargedTo) -> ForeignFiles {
        ForeignFiles { volume: self.holder.clone(), charged, names: 3, example: "foreign_directory".into() }
    }

    fn charged(&self) -> Bytes {
        let root = File::open(xfs()).unwrap();
        quota(&root).finish_inactivation(self.project).unwrap();
        quota(&root).usage(self.project).unwrap().map_or(Bytes(0), |usage| usage.bytes)
    }

    /// Checks the bytes reserved since the fixture was created, both the kept total and the count of another
    /// process.
    #[track_caller]
    fn assert_reserved(&self, expected: u64) {
        for space in [self.store.space().unwrap(), store().space().unwrap()] {
            let reserved = self.before.saturating_sub(space.available).0;
            assert!(reserved.abs_diff(expected) < TOLERANCE, "{reserved} reserved instead of {expected}");
        }
    }

    fn end(self) {
        for id in self.store.list().unwrap() {
            assert!(self.store.delete(&id).unwrap());
        }
        self.store.empty_trash().unwrap();
        self.assert_reserved(0);
    }
}

/// A foreign file lies in one volume and is charged to another one.
#[test]
fn foreign_files_are_found_and_repaired() {
    let fixture = Fixture::new();
    assert!(fixture.store.stats(&fixture.victim).unwrap().used >= Bytes(4 * MIB), "the victim is charged");
    assert_eq!(fixture.condition(&fixture.holder).0, None, "no search ran yet");

    assert_eq!(fixture.search(), [fixture.files(ChargedTo::Volume(fixture.victim.clone()))]);
    let (reason, message) = fixture.condition(&fixture.holder);
    assert_eq!(reason, Some(AbnormalReason::FilesInForeignProject));
    assert!(message.contains("volume victim") && message.contains("foreign_directory"), "{message}");
    let (reason, message) = fixture.condition(&fixture.victim);
    assert_eq!(reason, Some(AbnormalReason::ChargedForForeignFiles));
    assert!(message.contains("volume holder") && message.contains("foreign_directory"), "{message}");
    let recorded = [fixture.holder.clone(), fixture.victim.clone()].into();
    let evidence = ForeignEvidence { recorded, ..ForeignEvidence::default() };
    assert_eq!(fixture.store.foreign_evidence().unwrap(), evidence);
    // A search of the victim alone finds nothing about it, so its record stays.
    assert_eq!(fixture.store.find_foreign_files(Some(&[fixture.victim.clone()].into()), || ()).unwrap(), []);
    assert_eq!(fixture.condition(&fixture.victim).0, Some(AbnormalReason::ChargedForForeignFiles));

    assert_eq!(fixture.store.repair_project(&fixture.holder).unwrap(), 3);
    assert_eq!(fixture.search(), []);
    for id in [&fixture.holder, &fixture.victim] {
        assert_eq!(fixture.condition(id), (None, String::new()));
    }
    assert_eq!(fixture.store.foreign_evidence().unwrap(), ForeignEvidence::default());
    assert!(fixture.store.stats(&fixture.victim).unwrap().used < Bytes(MIB));
    assert!(fixture.store.stats(&fixture.holder).unwrap().used >= Bytes(4 * MIB));
    fixture.assert_reserved(HOLDER + VICTIM);
    fixture.end();
}

/// The evidence for a search then contains the project of the full volume.
#[test]
fn foreign_files_can_fill_a_volume() {
    let fixture = Fixture::new();
    assert_eq!(fixture.store.foreign_evidence().unwrap().full, [].into());
    let mut file = File::create(fixture.foreign_directory().join("c")).unwrap();
    let full = (0..).find_map(|_| file.write_all(&[1; 1 << 16]).err()).unwrap();
    assert_eq!(full.raw_os_error(), Some(nix::libc::ENOSPC));
    drop(file);
    assert_eq!(fixture.store.foreign_evidence().unwrap().full, [fixture.project].into());
    fixture.end();
}

/// The volume that they are charged to is deleted, and the rest of its space is released.
#[test]
fn foreign_files_keep_their_space_reserved() {
    let fixture = Fixture::new();
    assert!(fixture.store.delete(&fixture.victim).unwrap());
    for _ in 0..2 {
        assert_eq!(fixture.store.empty_trash().unwrap(), 0, "its project id does not drain");
        // The files' bytes are reserved once, in addition to the volume that holds the files, because that
        // volume is not charged for them.
        fixture.assert_reserved(HOLDER + fixture.charged().0);
    }
    let more = File::options().append(true).open(fixture.foreign_directory().join("a")).unwrap();
    let refused = (&more).write_all(&vec![1; MIB as usize]).and_then(|()| more.sync_all()).unwrap_err();
    assert_eq!(
        refused.raw_os_error(),
        Some(nix::libc::ENOSPC),
        "the deleted volume must not be expanded: {refused}"
    );
    drop(more);
    let evidence = fixture.store.foreign_evidence().unwrap();
    assert_eq!((evidence.undrained, evidence.recorded), ([fixture.project].into(), [].into()));

    let [found] = fixture.search().try_into().unwrap();
    assert!(matches!(&found.charged, ChargedTo::Deleted(name) if name.starts_with("victim.")), "{found:?}");
    let (reason, message) = fixture.condition(&fixture.holder);
    assert_eq!(reason, Some(AbnormalReason::FilesInForeignProject));
    assert!(message.contains("the deleted volume victim"), "{message}");

    assert_eq!(fixture.store.repair_project(&fixture.holder).unwrap(), 3);
    assert_eq!(fixture.store.empty_trash().unwrap(), 1, "the project id is free");
    fixture.assert_reserved(HOLDER);
    assert_eq!(fixture.store.foreign_evidence().unwrap().undrained, [].into());
    fixture.end();
}

#[test]
fn removing_foreign_files_frees_the_volume() {
    let fixture = Fixture::new();
    assert!(fixture.store.delete(&fixture.victim).unwrap());
    assert_eq!(fixture.store.empty_trash().unwrap(), 0);
    fs::remove_file(fixture.foreign_directory().join("a")).unwrap();
    assert_eq!(fixture.store.empty_trash().unwrap(), 0);
    fixture.assert_reserved(HOLDER + fixture.charged().0);
    assert!(fixture.charged() < Bytes(3 * MIB));
    fs::remove_dir_all(fixture.foreign_directory()).unwrap();
    assert_eq!(fixture.store.empty_trash().unwrap(), 1);
    fixture.assert_reserved(HOLDER);
    fixture.end();
}

#[test]
fn files_without_a_project_are_found() {
    let fixture = Fixture::new();
    fs::remove_dir_all(fixture.foreign_directory()).unwrap();
    let path = entry(&fixture.holder).join("escaped");
    fs::create_dir(&path).unwrap();
    assign_project(File::open(&path).unwrap(), project(77)).unwrap();
    let [found] = fixture.search().try_into().unwrap();
    assert_eq!((&found.charged, found.names), (&ChargedTo::Nothing, 1));
    assert!(fixture.condition(&fixture.holder).1.contains("charged to no volume"));
    fs::remove_dir(&path).unwrap();
    assert_eq!(fixture.search(), []);
    assert_eq!(fixture.condition(&fixture.holder).0, None);
    fixture.end();
}

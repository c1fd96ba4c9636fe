//! Files that their owner gave the project id of another volume.

use std::fs::{self, File};
use std::io::Write;

use loopfs::Bytes;
use loopfs::project_quota::{ProjectId, assign_project, project_of};
use loopfs::volume_store::{
    AbnormalReason, ChargedTo, Condition, ForeignEvidence, ForeignFiles, VolumeId, VolumeKind, VolumeSpec,
    VolumeStore,
};

use crate::environment::{Leaks, id, quota, store, xfs};
use crate::store::{MIB, entry};

const HOLDER: u64 = 64 * MIB;
const VICTIM: u64 = 16 * MIB;
/// What the file system's own records may take, or give back, in the meantime.
const TOLERANCE: u64 = MIB;

/// Two volumes. The owner of the first one has given 4 MiB of files the project id of the second one.
struct Scene {
    leaks: Leaks,
    store: VolumeStore,
    holder: VolumeId,
    victim: VolumeId,
    project: ProjectId,
    before: Bytes,
}

impl Scene {
    fn new() -> Self {
        let leaks = Leaks::watch();
        let (store, holder, victim) = (store(), id("holder"), id("victim"));
        let before = store.space().unwrap().available;
        for (id, size) in [(&holder, HOLDER), (&victim, VICTIM)] {
            store.create(id, &VolumeSpec::new(VolumeKind::Filesystem, Bytes(size))).unwrap();
        }
        let project = project_of(File::open(entry(&victim)).unwrap()).unwrap();
        let project = ProjectId::new(project).unwrap();
        let scene = Self { leaks, store, holder, victim, project, before };
        fs::create_dir(scene.loot()).unwrap();
        assign_project(File::open(scene.loot()).unwrap(), project).unwrap();
        for name in ["a", "b"] {
            let mut file = File::create(scene.loot().join(name)).unwrap();
            file.write_all(&vec![1; 2 * MIB as usize]).unwrap();
            file.sync_all().unwrap();
        }
        scene
    }

    fn loot(&self) -> std::path::PathBuf {
        entry(&self.holder).join("loot")
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
        ForeignFiles { volume: self.holder.clone(), charged, names: 3, example: "loot".into() }
    }

    fn charged(&self) -> Bytes {
        let root = File::open(xfs()).unwrap();
        quota(&root).finish_inactivation(self.project).unwrap();
        quota(&root).usage(self.project).unwrap().map_or(Bytes(0), |usage| usage.bytes)
    }

    /// What is reserved since the scene began, as it is remembered and as another process counts it.
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
        self.leaks.check();
    }
}

#[test]
fn files_charged_to_another_volume_are_found_named_and_repaired() {
    let scene = Scene::new();
    assert!(scene.store.stats(&scene.victim).unwrap().used >= Bytes(4 * MIB), "the victim is charged");
    assert_eq!(scene.condition(&scene.holder).0, None, "nothing was searched yet");

    assert_eq!(scene.search(), [scene.files(ChargedTo::Volume(scene.victim.clone()))]);
    let (reason, message) = scene.condition(&scene.holder);
    assert_eq!(reason, Some(AbnormalReason::FilesInForeignProject));
    assert!(message.contains("volume victim") && message.contains("loot"), "{message}");
    let (reason, message) = scene.condition(&scene.victim);
    assert_eq!(reason, Some(AbnormalReason::ChargedForForeignFiles));
    assert!(message.contains("volume holder") && message.contains("loot"), "{message}");
    let recorded = [scene.holder.clone(), scene.victim.clone()].into();
    let evidence = ForeignEvidence { recorded, ..ForeignEvidence::default() };
    assert_eq!(scene.store.foreign_evidence().unwrap(), evidence);
    // Of the victim alone nothing can be said: its record stays.
    assert_eq!(scene.store.find_foreign_files(Some(&[scene.victim.clone()].into()), || ()).unwrap(), []);
    assert_eq!(scene.condition(&scene.victim).0, Some(AbnormalReason::ChargedForForeignFiles));

    assert_eq!(scene.store.repair_project(&scene.holder).unwrap(), 3);
    assert_eq!(scene.search(), []);
    for id in [&scene.holder, &scene.victim] {
        assert_eq!(scene.condition(id), (None, String::new()));
    }
    assert_eq!(scene.store.foreign_evidence().unwrap(), ForeignEvidence::default());
    assert!(scene.store.stats(&scene.victim).unwrap().used < Bytes(MIB));
    assert!(scene.store.stats(&scene.holder).unwrap().used >= Bytes(4 * MIB));
    scene.assert_reserved(HOLDER + VICTIM);
    scene.end();
}

#[test]
fn a_volume_that_files_of_another_one_have_filled_is_evidence() {
    let scene = Scene::new();
    assert_eq!(scene.store.foreign_evidence().unwrap().full, [].into());
    let mut file = File::create(scene.loot().join("c")).unwrap();
    let full = (0..).find_map(|_| file.write_all(&[1; 1 << 16]).err()).unwrap();
    assert_eq!(full.raw_os_error(), Some(nix::libc::ENOSPC));
    drop(file);
    assert_eq!(scene.store.foreign_evidence().unwrap().full, [scene.project].into());
    scene.end();
}

#[test]
fn a_deleted_volume_gives_back_all_but_what_foreign_files_take() {
    let scene = Scene::new();
    assert!(scene.store.delete(&scene.victim).unwrap());
    for _ in 0..2 {
        assert_eq!(scene.store.empty_trash().unwrap(), 0, "its project id does not drain");
        // What the files take is reserved once, beside the volume that holds them: that is not charged for them.
        scene.assert_reserved(HOLDER + scene.charged().0);
    }
    let more = File::options().append(true).open(scene.loot().join("a")).unwrap();
    let refused = (&more).write_all(&vec![1; MIB as usize]).and_then(|()| more.sync_all()).unwrap_err();
    assert_eq!(
        refused.raw_os_error(),
        Some(nix::libc::ENOSPC),
        "the deleted volume must not grow: {refused}"
    );
    drop(more);
    let evidence = scene.store.foreign_evidence().unwrap();
    assert_eq!((evidence.undrained, evidence.recorded), ([scene.project].into(), [].into()));

    let [found] = scene.search().try_into().unwrap();
    assert!(matches!(&found.charged, ChargedTo::Deleted(name) if name.starts_with("victim.")), "{found:?}");
    let (reason, message) = scene.condition(&scene.holder);
    assert_eq!(reason, Some(AbnormalReason::FilesInForeignProject));
    assert!(message.contains("the deleted volume victim"), "{message}");

    assert_eq!(scene.store.repair_project(&scene.holder).unwrap(), 3);
    assert_eq!(scene.store.empty_trash().unwrap(), 1, "the project id is free");
    scene.assert_reserved(HOLDER);
    assert_eq!(scene.store.foreign_evidence().unwrap().undrained, [].into());
    scene.end();
}

#[test]
fn a_deleted_volume_is_freed_when_the_foreign_files_are_removed() {
    let scene = Scene::new();
    assert!(scene.store.delete(&scene.victim).unwrap());
    assert_eq!(scene.store.empty_trash().unwrap(), 0);
    fs::remove_file(scene.loot().join("a")).unwrap();
    assert_eq!(scene.store.empty_trash().unwrap(), 0);
    scene.assert_reserved(HOLDER + scene.charged().0);
    assert!(scene.charged() < Bytes(3 * MIB));
    fs::remove_dir_all(scene.loot()).unwrap();
    assert_eq!(scene.store.empty_trash().unwrap(), 1);
    scene.assert_reserved(HOLDER);
    scene.end();
}

#[test]
fn files_in_no_project_are_found_too() {
    let scene = Scene::new();
    fs::remove_dir_all(scene.loot()).unwrap();
    let path = entry(&scene.holder).join("escaped");
    fs::create_dir(&path).unwrap();
    assign_project(File::open(&path).unwrap(), ProjectId::new(77).unwrap()).unwrap();
    let [found] = scene.search().try_into().unwrap();
    assert_eq!((&found.charged, found.names), (&ChargedTo::Nothing, 1));
    assert!(scene.condition(&scene.holder).1.contains("charged to no volume"));
    fs::remove_dir(&path).unwrap();
    assert_eq!(scene.search(), []);
    assert_eq!(scene.condition(&scene.holder).0, None);
    scene.end();
}

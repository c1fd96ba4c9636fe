//! Tests of volumes that changed after they were created.

use std::fs::File;

use loopfs::project_quota::{ProjectId, assign_project, project_of};
use loopfs::volume_store::{AbnormalReason, Condition, VolumeKind, VolumeSpec};
use loopfs::{Bytes, ErrorKind};

use crate::environment::{MIB, clone_image, id};
use crate::fixtures::{TestStore, entry};

/// The owner of a directory can put it into any project, also into one without free space.
#[test]
fn free_space_ignores_the_changed_project() {
    let (store, id, full) = (TestStore::open(), id("tenant"), crate::environment::id("full"));
    for id in [&id, &full] {
        store.create(id, &VolumeSpec::new(VolumeKind::Filesystem, Bytes(MIB))).unwrap();
    }
    std::fs::write(entry(&full).join("file"), vec![1; 1 << 19]).unwrap();
    let available = store.stats(&id).unwrap().available;
    let [directory, other] = [&id, &full].map(|id| File::open(entry(id)).unwrap());
    let [own, others] =
        [&directory, &other].map(|directory| ProjectId::new(project_of(directory).unwrap()).unwrap());
    assign_project(&directory, others).unwrap();
    assert_eq!(store.stats(&id).unwrap().available, available);
    assign_project(&directory, own).unwrap();
}

/// The store reports the image as truncated, and does not treat it as a smaller volume.
#[test]
fn a_truncated_image_keeps_its_capacity() {
    let (store, id, copy) = (TestStore::open(), id("cut"), id("copy"));
    store.create(&id, &VolumeSpec::new(VolumeKind::Block, Bytes(MIB))).unwrap();
    assert_eq!(store.expand(&id, Bytes(4 * MIB)).unwrap().capacity(), Bytes(4 * MIB));
    store.volume(&id).unwrap().require_whole().unwrap();
    let image = File::options().write(true).open(entry(&id)).unwrap();
    image.set_len(4 * MIB - 4096).unwrap();

    let stats = store.stats(&id).unwrap();
    assert_eq!(stats.capacity, Bytes(4 * MIB));
    let Condition::Abnormal { reason: AbnormalReason::ImageTruncated, message } = stats.condition else {
        panic!("{:?}", stats.condition)
    };
    assert!(message.contains("4 MiB") && message.contains("restore"), "{message}");
    // No call may make the image look complete again.
    for refused in [
        store.expand(&id, Bytes(8 * MIB)).map(drop),
        clone_image(&store, &id, &copy, Bytes(4 * MIB)).map(drop),
        store.volume(&id).unwrap().require_whole(),
    ] {
        assert_eq!(refused.unwrap_err().kind(), ErrorKind::Damaged);
    }
    // Repeating the calls changes nothing.
    assert_eq!(store.expand(&id, Bytes(MIB)).unwrap().capacity(), Bytes(4 * MIB));
    assert_eq!(std::fs::metadata(entry(&id)).unwrap().len(), 4 * MIB - 4096);

    // The owner restores the length.
    image.set_len(4 * MIB).unwrap();
    assert_eq!(store.stats(&id).unwrap().condition, Condition::Healthy);
    let clone = clone_image(&store, &id, &copy, Bytes(5 * MIB)).unwrap();
    assert_eq!(clone.capacity(), Bytes(5 * MIB));
    assert_eq!(store.stats(&copy).unwrap().condition, Condition::Healthy);
    File::options().write(true).open(entry(&copy)).unwrap().set_len(MIB).unwrap();
    assert_ne!(store.stats(&copy).unwrap().condition, Condition::Healthy, "a clone records its own");
}

#[test]
fn repeating_an_expansion_records_the_size() {
    let (store, id) = (TestStore::open(), id("grown"));
    store.create(&id, &VolumeSpec::new(VolumeKind::Block, Bytes(MIB))).unwrap();
    // A process that dies between the two steps leaves this state.
    let image = File::options().write(true).open(entry(&id)).unwrap();
    image.set_len(4 * MIB).unwrap();
    assert_eq!(store.stats(&id).unwrap().condition, Condition::Healthy);
    assert_eq!(store.expand(&id, Bytes(4 * MIB)).unwrap().capacity(), Bytes(4 * MIB));
    image.set_len(2 * MIB).unwrap();
    assert_eq!(store.volume(&id).unwrap().capacity(), Bytes(4 * MIB));
}

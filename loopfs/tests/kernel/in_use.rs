//! Tests that a volume in use is not deleted, whichever process uses it and whichever process deletes it.

use std::fs::File;
use std::path::Path;

use loopfs::loop_device::{Access, AttachOptions, Detach, LoopControl, LoopDevice};
use loopfs::mount::{MountFlags, bind_mount, table as mountinfo, unmount};
use loopfs::volume_store::{VolumeId, VolumeKind, VolumeSpec, VolumeStore};
use loopfs::{Bytes, Error, ErrorKind};

use crate::environment::{MIB, id, scratch, store, xfs};
use crate::fixtures::{TestStore, entry, remove};

fn create(store: &VolumeStore, name: &str, kind: VolumeKind) -> VolumeId {
    store.create(&id(name), &VolumeSpec::new(kind, Bytes(MIB))).unwrap();
    id(name)
}

/// Returns the error that prevents the deletion of the volume. Checks that the volume is still complete.
fn refusal(store: &VolumeStore, id: &VolumeId) -> String {
    let error: Error = store.delete(id).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
    store.volume(id).unwrap();
    error.to_string()
}

/// The image can be deleted after its device was detached or its detach was deferred.
#[test]
fn an_attached_image_cannot_be_deleted() {
    // One process attaches the image and another one deletes it.
    let (store, other) = (TestStore::open(), store());
    let id = create(&store, "disk", VolumeKind::Block);
    let control = LoopControl::open().unwrap();
    for access in [Access::ReadOnly, Access::ReadWrite] {
        let image = store.volume(&id).unwrap().open_image(access).unwrap();
        let device = control.attach(&image, &AttachOptions::new(access)).unwrap();
        let name = format!("/dev/loop{}", device.index());
        assert!(refusal(&other, &id).contains(&name));
        assert_eq!(control.detach(device).unwrap(), Detach::Detached);
    }
    let image = store.volume(&id).unwrap().open_image(Access::ReadWrite).unwrap();
    let device = control.attach(&image, &AttachOptions::new(Access::ReadWrite)).unwrap();
    let user = LoopDevice::open_index(device.index()).unwrap();
    assert!(matches!(control.detach(device).unwrap(), Detach::Deferred(_)));
    drop(image);
    assert!(other.delete(&id).unwrap(), "its device detaches at the last close");
    drop(user);
    store.empty_trash().unwrap();
}

#[test]
fn attaching_an_image_prevents_deletion() {
    let store = TestStore::open();
    let id = create(&store, "disk", VolumeKind::Block);
    let image = File::open(entry(&id)).unwrap();
    image.lock().unwrap();
    assert!(refusal(&store, &id).contains("try again"));
    image.unlock().unwrap();
}

#[test]
fn a_mounted_directory_cannot_be_deleted() {
    let (store, target) = (TestStore::open(), scratch());
    let id = create(&store, "data", VolumeKind::Filesystem);
    let volume = store.volume(&id).unwrap();
    bind_mount(volume.open_dir().unwrap(), target.path(), MountFlags::default()).unwrap();
    drop(volume);
    assert!(refusal(&store, &id).contains(target.path().to_str().unwrap()));
    assert!(unmount(target.path()).unwrap());
}

#[test]
fn publication_in_another_namespace_prevents_deletion() {
    let (store, other) = (TestStore::open(), store());
    let id = create(&store, "data", VolumeKind::Filesystem);
    let place = Path::new("/var/lib/kubelet/pods/a/mount");
    store.record_publication(&id, Path::new("/"), place).unwrap();
    assert!(refusal(&other, &id).contains(place.to_str().unwrap()));

    // The volume is published at two targets, and then at one.
    let target = scratch();
    let volume = store.volume(&id).unwrap();
    bind_mount(volume.open_dir().unwrap(), target.path(), MountFlags::default()).unwrap();
    drop(volume);
    store.sync_publication(&id, Path::new("/"), &mountinfo::read().unwrap()).unwrap();
    assert!(refusal(&other, &id).contains(target.path().to_str().unwrap()));
    assert!(unmount(target.path()).unwrap());
    // No process has removed the publication record.
    assert!(refusal(&other, &id).contains(target.path().to_str().unwrap()));
    store.sync_publication(&id, Path::new("/"), &mountinfo::read().unwrap()).unwrap();
    remove(&other, &id);
    let gone = store.record_publication(&id, Path::new("/"), place).unwrap_err();
    assert_eq!(gone.kind(), ErrorKind::NotFound, "the deleted volume cannot be published again");
}

#[test]
fn a_restart_restores_publication_records() {
    let (store, target) = (TestStore::open(), scratch());
    let (shown, not) =
        (create(&store, "shown", VolumeKind::Filesystem), create(&store, "not", VolumeKind::Filesystem));
    // One process was killed between writing the record and mounting. Another process wrote no records.
    store.record_publication(&not, Path::new("/"), Path::new("/pods/a")).unwrap();
    bind_mount(store.volume(&shown).unwrap().open_dir().unwrap(), target.path(), MountFlags::default())
        .unwrap();
    store.sync_publications(Path::new("/"), mountinfo::read).unwrap();
    remove(&store, &not);
    assert!(unmount(target.path()).unwrap());
    assert!(refusal(&store, &shown).contains(target.path().to_str().unwrap()), "the publication is recorded");
    store.sync_publications(Path::new("/"), || Ok(Vec::<mountinfo::Mount>::new())).unwrap();
}

#[test]
fn records_before_reboots_are_ignored() {
    let store = TestStore::open();
    let id = create(&store, "data", VolumeKind::Filesystem);
    let record = xfs().join(".loopfs/users").join(id.as_str());
    std::os::unix::fs::symlink("5f0c2e9a-0000-4000-8000-000000000000 /pods/a", &record).unwrap();
    remove(&store, &id);
    store.sync_publication(&id, Path::new("/"), &[] as &[mountinfo::Mount]).unwrap();
    assert!(std::fs::symlink_metadata(record).is_err());
}

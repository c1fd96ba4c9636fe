//! Volumes in use are not deleted, whoever uses them and whoever deletes.

use std::fs::File;
use std::os::fd::AsFd;
use std::path::Path;

use loopfs::loop_device::{Access, AttachOptions, Detach, LoopControl, LoopDevice};
use loopfs::mount::{MountFlags, bind_mount, table as mountinfo, unmount};
use loopfs::volume_store::{VolumeId, VolumeKind, VolumeSpec, VolumeStore};
use loopfs::{Bytes, Error, ErrorKind};

use crate::environment::{Leaks, id, scratch, store, xfs};
use crate::store::{MIB, remove};

fn made(store: &VolumeStore, name: &str, kind: VolumeKind) -> VolumeId {
    store.create(&id(name), &VolumeSpec::new(kind, Bytes(MIB))).unwrap();
    id(name)
}

/// What keeps a volume from being deleted; it is all there after.
fn refusal(store: &VolumeStore, id: &VolumeId) -> String {
    let error: Error = store.delete(id).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
    store.volume(id).unwrap();
    error.to_string()
}

#[test]
fn an_attached_image_is_kept_until_its_device_is_gone_or_is_to_go() {
    let leaks = Leaks::watch();
    // Another process deletes than attaches.
    let (store, other) = (store(), store());
    let id = made(&store, "disk", VolumeKind::Block);
    let control = LoopControl::open().unwrap();
    for access in [Access::ReadOnly, Access::ReadWrite] {
        let image = store.volume(&id).unwrap().open_image(access).unwrap();
        let device = control.attach(image.as_fd(), &AttachOptions::new(access)).unwrap();
        let name = format!("/dev/loop{}", device.index());
        assert!(refusal(&other, &id).contains(&name));
        assert_eq!(control.detach(device).unwrap(), Detach::Detached);
    }
    let image = store.volume(&id).unwrap().open_image(Access::ReadWrite).unwrap();
    let device = control.attach(image.as_fd(), &AttachOptions::new(Access::ReadWrite)).unwrap();
    let user = LoopDevice::open_index(device.index()).unwrap();
    assert!(matches!(control.detach(device).unwrap(), Detach::Deferred(_)));
    drop(image);
    assert!(other.delete(&id).unwrap(), "it goes when its last user closes it");
    drop(user);
    store.empty_trash().unwrap();
    leaks.check();
}

#[test]
fn an_image_that_is_being_attached_is_kept() {
    let leaks = Leaks::watch();
    let store = store();
    let id = made(&store, "disk", VolumeKind::Block);
    let image = File::open(crate::store::entry(&id)).unwrap();
    image.lock().unwrap();
    assert!(refusal(&store, &id).contains("try again"));
    image.unlock().unwrap();
    drop(image);
    remove(&store, &id);
    leaks.check();
}

#[test]
fn a_mounted_directory_is_kept() {
    let leaks = Leaks::watch();
    let (store, target) = (store(), scratch());
    let id = made(&store, "data", VolumeKind::Filesystem);
    let volume = store.volume(&id).unwrap();
    bind_mount(volume.open_dir().unwrap().as_fd(), target.path(), MountFlags::default()).unwrap();
    drop(volume);
    assert!(refusal(&store, &id).contains(target.path().to_str().unwrap()));
    assert!(unmount(target.path()).unwrap());
    remove(&store, &id);
    leaks.check();
}

#[test]
fn a_directory_that_is_shown_where_it_cannot_be_seen_is_kept() {
    let leaks = Leaks::watch();
    let (store, other) = (store(), store());
    let id = made(&store, "data", VolumeKind::Filesystem);
    let place = Path::new("/var/lib/kubelet/pods/a/mount");
    store.record_publication(&id, place).unwrap();
    assert!(refusal(&other, &id).contains(place.to_str().unwrap()));

    // Shown in two places, and then in one.
    let target = scratch();
    let volume = store.volume(&id).unwrap();
    bind_mount(volume.open_dir().unwrap().as_fd(), target.path(), MountFlags::default()).unwrap();
    drop(volume);
    store.sync_publication(&id, &mountinfo::read().unwrap()).unwrap();
    assert!(refusal(&other, &id).contains(target.path().to_str().unwrap()));
    assert!(unmount(target.path()).unwrap());
    assert!(
        refusal(&other, &id).contains(target.path().to_str().unwrap()),
        "nobody has said that it is gone"
    );
    store.sync_publication(&id, &mountinfo::read().unwrap()).unwrap();
    remove(&other, &id);
    let gone = store.record_publication(&id, place).unwrap_err();
    assert_eq!(gone.kind(), ErrorKind::NotFound, "it is not to be shown any more");
    leaks.check();
}

#[test]
fn a_process_that_begins_anew_knows_what_is_shown() {
    let leaks = Leaks::watch();
    let (store, target) = (store(), scratch());
    let (shown, not) =
        (made(&store, "shown", VolumeKind::Filesystem), made(&store, "not", VolumeKind::Filesystem));
    // One process was killed between the record and the mount; another one kept no records.
    store.record_publication(&not, Path::new("/pods/a")).unwrap();
    bind_mount(
        store.volume(&shown).unwrap().open_dir().unwrap().as_fd(),
        target.path(),
        MountFlags::default(),
    )
    .unwrap();
    store.sync_publications(&mountinfo::read().unwrap()).unwrap();
    remove(&store, &not);
    assert!(unmount(target.path()).unwrap());
    assert!(refusal(&store, &shown).contains(target.path().to_str().unwrap()), "it is written down");
    store.sync_publications(&[]).unwrap();
    remove(&store, &shown);
    leaks.check();
}

#[test]
fn what_was_shown_before_the_machine_was_started_is_not_shown_now() {
    let leaks = Leaks::watch();
    let store = store();
    let id = made(&store, "data", VolumeKind::Filesystem);
    let record = xfs().join(".loopfs/users").join(id.as_str());
    std::os::unix::fs::symlink("5f0c2e9a-0000-4000-8000-000000000000 /pods/a", &record).unwrap();
    remove(&store, &id);
    store.sync_publication(&id, &[]).unwrap();
    assert!(std::fs::symlink_metadata(record).is_err());
    leaks.check();
}

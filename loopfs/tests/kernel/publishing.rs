//! Tests of volumes that are published by the library alone. Those of csi publish by its calls, and kill its driver.

use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use loopfs::loop_device::unmanaged::Device;
use loopfs::loop_device::{Access, LoopControl, LoopDevice};
use loopfs::mount::MountFlags;
use loopfs::project_quota::{Limits, ProjectId, project_of};
use loopfs::publish::{Cleanup, Publications, PublishMode, PublishOptions, PublishRoot, Publisher};
use loopfs::volume_store::{VolumeId, VolumeKind, VolumeSpec};
use loopfs::{Bytes, ErrorKind};
use rstest::rstest;

use crate::environment::{Leaks, id, quota, scratch, store, wait_until, xfs};
use crate::fixtures::{assert_fails, entry};

const WRITABLE: PublishMode = PublishMode::Device(Access::ReadWrite);

fn publisher(root: &Path) -> Publisher {
    let root = Arc::new(PublishRoot::open(root).unwrap());
    let loops = LoopControl::open().unwrap();
    Publisher::open(store(), loops, root, PublishOptions::default()).unwrap()
}

/// Returns a publisher, and the directory below which it publishes.
fn set_up() -> (Leaks, tempfile::TempDir, Publisher) {
    let (leaks, root) = (Leaks::watch(), scratch());
    let publisher = publisher(root.path());
    (leaks, root, publisher)
}

fn create(publisher: &Publisher, name: &str, kind: VolumeKind) -> VolumeId {
    let id = id(name);
    publisher.store().create(&id, &VolumeSpec::new(kind, Bytes::MIB)).unwrap();
    id
}

#[track_caller]
fn unpublish_and_delete(publisher: &Publisher, id: &VolumeId, target: impl AsRef<Path>) {
    assert_eq!(publisher.unpublish(id, target.as_ref()).unwrap(), Cleanup::Complete);
    delete(publisher, id);
}

#[track_caller]
fn delete(publisher: &Publisher, id: &VolumeId) {
    assert!(publisher.delete(id).unwrap());
    publisher.store().empty_trash().unwrap();
}

fn mode(kind: VolumeKind) -> PublishMode {
    match kind {
        VolumeKind::Filesystem => PublishMode::Directory(MountFlags::default()),
        VolumeKind::Block => WRITABLE,
    }
}

fn write_to(device: &Path, content: &[u8]) {
    let mut file = File::options().write(true).open(device).unwrap();
    file.write_all(content).unwrap();
    file.sync_all().unwrap();
}

fn read_from(device: &Path, length: usize) -> Vec<u8> {
    let mut content = vec![0; length];
    File::open(device).unwrap().read_exact(&mut content).unwrap();
    content
}

#[rstest]
fn each_call_can_be_repeated(#[values(VolumeKind::Filesystem, VolumeKind::Block)] kind: VolumeKind) {
    let (_leaks, root, publisher) = set_up();
    let id = create(&publisher, "repeated", kind);
    for target in ["a", "b"] {
        for _ in 0..2 {
            publisher.publish(&id, Path::new(target), mode(kind)).unwrap();
        }
    }
    assert_fails(publisher.delete(&id), ErrorKind::Conflict);
    if kind == VolumeKind::Block {
        assert_eq!(publisher.detach(&id).unwrap_err().kind(), ErrorKind::Conflict);
    }
    assert_eq!(publisher.unpublish(&id, Path::new("a")).unwrap(), Cleanup::Complete);
    publisher.publish_only_at(&id, Path::new("b"), mode(kind)).unwrap();
    for _ in 0..2 {
        assert_eq!(publisher.unpublish(&id, Path::new("b")).unwrap(), Cleanup::Complete);
    }
    assert_eq!(fs::read_dir(root.path()).unwrap().count(), 0, "the targets are removed");
    delete(&publisher, &id);
    assert!(!publisher.delete(&id).unwrap());
}

#[rstest]
fn a_published_volume_is_not_pending(#[values(VolumeKind::Filesystem, VolumeKind::Block)] kind: VolumeKind) {
    let (_leaks, _root, publisher) = set_up();
    let (id, target) = (id("pending"), Path::new("a"));
    let spec = VolumeSpec { pending: true, ..VolumeSpec::new(kind, Bytes::MIB) };
    publisher.store().create(&id, &spec).unwrap();
    assert_eq!(publisher.store().pending().unwrap().len(), 1);
    publisher.publish(&id, target, mode(kind)).unwrap();
    assert!(publisher.store().pending().unwrap().is_empty());
    unpublish_and_delete(&publisher, &id, target);
}

/// A backup may restore a directory without its attributes, and an administrator may remove limits.
#[rstest]
#[case::without_its_mark(|directory: &File| rustix::fs::fremovexattr(directory, "trusted.loopfs.volume").unwrap())]
#[case::without_its_limits(|directory: &File| {
    let project = ProjectId::new(project_of(directory).unwrap()).unwrap();
    quota(&File::open(xfs()).unwrap()).set_limits(project, Limits::UNLIMITED).unwrap();
})]
fn a_damaged_directory_can_be_deleted(#[case] damage: fn(&File)) {
    let (_leaks, _root, publisher) = set_up();
    let id = create(&publisher, "damaged", VolumeKind::Filesystem);
    damage(&File::open(xfs().join("volumes/damaged")).unwrap());
    publisher.store().volume(&id).unwrap_err();
    delete(&publisher, &id);
    assert!(!publisher.delete(&id).unwrap());
    // The store does not know the project id of a directory without its mark until it looks for those that no directory has.
    publisher.store().recover().unwrap();
}

#[test]
fn other_uses_are_refused_and_named() {
    let (_leaks, root, publisher) = set_up();
    let (directory, block) = (
        create(&publisher, "directory", VolumeKind::Filesystem),
        create(&publisher, "block", VolumeKind::Block),
    );
    let (a, b, r) = (Path::new("a"), Path::new("b"), Path::new("r"));
    let read = create(&publisher, "read", VolumeKind::Block);
    publisher.publish(&read, r, PublishMode::Device(Access::ReadOnly)).unwrap();
    let plain = mode(VolumeKind::Filesystem);
    let read_only = PublishMode::Directory(MountFlags { read_only: true, ..MountFlags::default() });
    publisher.publish(&directory, a, plain).unwrap();
    publisher.publish(&block, b, WRITABLE).unwrap();
    fs::write(root.path().join("file"), "precious").unwrap();
    fs::create_dir_all(root.path().join("full/directory")).unwrap();

    let absent = id("absent");
    for (volume, target, mode, kind, named) in [
        (&absent, a, plain, ErrorKind::NotFound, "absent"),
        (&directory, Path::new("../a"), plain, ErrorKind::InvalidInput, "../a"),
        (&directory, Path::new("none/a"), plain, ErrorKind::Conflict, "create it"),
        (&directory, Path::new("c"), WRITABLE, ErrorKind::InvalidInput, "Filesystem"),
        (&block, Path::new("c"), plain, ErrorKind::InvalidInput, "Block"),
        (&directory, a, read_only, ErrorKind::AlreadyExists, "unpublish it there first"),
        (
            &block,
            b,
            PublishMode::Device(Access::ReadOnly),
            ErrorKind::AlreadyExists,
            "unpublish it there first",
        ),
        (&block, Path::new("c"), PublishMode::Device(Access::ReadOnly), ErrorKind::Conflict, "old data"),
        (&read, Path::new("c"), WRITABLE, ErrorKind::Conflict, "old data"),
        (&block, a, WRITABLE, ErrorKind::Conflict, "something else"),
        (&directory, Path::new("file"), plain, ErrorKind::Conflict, "remove it"),
        (&block, Path::new("file"), WRITABLE, ErrorKind::Conflict, "move that away"),
        (&directory, Path::new("full"), plain, ErrorKind::Conflict, "move that away"),
    ] {
        let error = assert_fails(publisher.publish(volume, target, mode), kind);
        assert!(error.to_string().contains(named), "{error}");
    }
    for (volume, target, mode) in [(&directory, a, plain), (&block, b, WRITABLE)] {
        let error =
            assert_fails(publisher.publish_only_at(volume, Path::new("c"), mode), ErrorKind::Conflict);
        assert!(error.to_string().contains(root.path().join(target).to_str().unwrap()), "{error}");
    }
    assert!(!root.path().join("c").exists());
    assert_fails(publisher.unpublish(&directory, Path::new("file")), ErrorKind::Conflict);
    assert_eq!(fs::read_to_string(root.path().join("file")).unwrap(), "precious");

    for (volume, target) in [(&directory, a), (&block, b), (&read, r)] {
        unpublish_and_delete(&publisher, volume, target);
    }
}

/// A target shows the volume that was published there until it is unpublished there, whatever happens to other targets and volumes.
#[test]
fn a_target_shows_no_other_volume() {
    let _leaks = Leaks::watch();
    let root = scratch();
    let (a, b) = (Path::new("a"), Path::new("b"));
    let first = publisher(root.path());
    let alice = create(&first, "alice", VolumeKind::Block);
    for target in [a, b] {
        first.publish(&alice, target, WRITABLE).unwrap();
    }
    write_to(&root.path().join(a), b"alice");
    assert_eq!(first.unpublish(&alice, a).unwrap(), Cleanup::Complete);
    // What a program can do that has the node of its device: no process holds the device in the meantime.
    drop(first);
    Device::open_path(&root.path().join(b), Access::ReadWrite).unwrap().detach().unwrap();

    let second = publisher(root.path());
    let bobs: Vec<VolumeId> =
        (0..4).map(|n| create(&second, &format!("bob-{n}"), VolumeKind::Block)).collect();
    for bob in &bobs {
        let target = root.path().join(bob.as_str());
        second.publish(bob, &target, WRITABLE).unwrap();
        write_to(&target, b"secret");
        let shown = File::open(root.path().join(b)).and_then(|mut file| file.read(&mut [0; 6]));
        assert!(shown.as_ref().map_or(true, |length| *length == 0), "alice's target shows bytes of {bob}");
    }
    assert_eq!(second.unpublish(&alice, b).unwrap(), Cleanup::Complete);
    second.publish(&alice, b, WRITABLE).unwrap();
    assert_eq!(read_from(&root.path().join(b), 5), b"alice");
    for (volume, target) in bobs.iter().map(|bob| (bob, Path::new(bob.as_str()))).chain([(&alice, b)]) {
        unpublish_and_delete(&second, volume, target);
    }
}

#[test]
fn a_devices_user_cannot_unbind_it() {
    let _leaks = Leaks::watch();
    let root = scratch();
    let target = root.path().join("a");
    let first = publisher(root.path());
    let id = create(&first, "held", VolumeKind::Block);
    first.publish(&id, &target, WRITABLE).unwrap();
    write_to(&target, b"mine");
    drop(first);
    // The next process holds what is published before it does anything else.
    let second = publisher(root.path());
    Device::open_path(&target, Access::ReadWrite).unwrap().detach().unwrap();
    assert_eq!(read_from(&target, 4), b"mine");
    second.publish(&id, &target, WRITABLE).unwrap();
    unpublish_and_delete(&second, &id, &target);
}

/// Another process starts, and does not see the mounts below the directory of the first: it could be in another container.
#[test]
fn another_publisher_keeps_the_records() {
    let _leaks = Leaks::watch();
    let (here, there) = (scratch(), scratch());
    let first = publisher(here.path());
    let id = create(&first, "recorded", VolumeKind::Filesystem);
    first.store().record_publication(&id, here.path(), &here.path().join("a")).unwrap();
    let second = publisher(there.path());
    let plain = mode(VolumeKind::Filesystem);
    assert_eq!(second.unpublish(&id, Path::new("b")).unwrap(), Cleanup::Complete);
    for in_use in [second.delete(&id).unwrap_err(), second.publish(&id, Path::new("b"), plain).unwrap_err()] {
        assert!(in_use.to_string().contains(here.path().to_str().unwrap()), "{in_use}");
    }

    first.publish(&id, Path::new("a"), plain).unwrap();
    assert_eq!(first.unpublish(&id, Path::new("a")).unwrap(), Cleanup::Complete);
    delete(&second, &id);
}

/// A tenant uses the device of a volume that the first process has published below its own directory.
#[test]
fn a_used_device_prevents_deletion() {
    let _leaks = Leaks::watch();
    let (here, there) = (scratch(), scratch());
    let first = publisher(here.path());
    let id = create(&first, "used", VolumeKind::Block);
    first.publish(&id, Path::new("a"), WRITABLE).unwrap();
    let second = publisher(there.path());
    assert_fails(second.delete(&id), ErrorKind::Conflict);
    assert_eq!(second.unpublish(&id, Path::new("b")).unwrap(), Cleanup::Complete);
    drop(first);
    // Its process has ended, so nothing but the mount shows the use.
    let read_only = PublishMode::Device(Access::ReadOnly);
    let refused = [
        second.delete(&id).unwrap_err(),
        second.detach(&id).unwrap_err(),
        second.publish(&id, Path::new("b"), read_only).unwrap_err(),
    ];
    for error in refused {
        assert_eq!(error.kind(), ErrorKind::Conflict, "{error}");
        assert!(error.to_string().contains(here.path().to_str().unwrap()), "{error}");
    }
    assert_eq!(second.unpublish(&id, Path::new("b")).unwrap(), Cleanup::Complete);
    write_to(&here.path().join("a"), b"mine");

    let again = publisher(here.path());
    let places = Publications::read(&again).unwrap().targets(&again.store().volume(&id).unwrap()).unwrap();
    assert_eq!(places, [here.path().join("a")]);
    assert_eq!(again.unpublish(&id, Path::new("a")).unwrap(), Cleanup::Complete);
    delete(&second, &id);
}

/// An administrator has deleted the volume, and a process has its device open.
#[test]
fn the_device_of_a_deleted_volume_is_detached_at_its_last_close() {
    let (_leaks, root, publisher) = set_up();
    let id = create(&publisher, "deleted", VolumeKind::Block);
    publisher.publish(&id, Path::new("a"), WRITABLE).unwrap();
    let index = LoopDevice::open_path(&root.path().join("a")).unwrap().index();
    // Not through the target, which could not be unmounted then.
    let user = File::open(format!("/dev/loop{index}")).unwrap();
    fs::rename(entry(&id), xfs().join("trash/deleted.0123456789abcdef")).unwrap();
    for _ in 0..2 {
        assert_eq!(publisher.unpublish(&id, Path::new("a")).unwrap(), Cleanup::DetachDeferred);
    }
    drop(user);
    wait_until(|| publisher.detach(&id).unwrap() == Cleanup::Complete);
    assert_eq!(publisher.store().empty_trash().unwrap(), 1);
}

#[test]
fn unpublishing_keeps_other_mounts() {
    let (_leaks, _root, publisher) = set_up();
    let kinds = [VolumeKind::Filesystem, VolumeKind::Block];
    let [directory, block] = kinds.map(|kind| {
        let id = create(&publisher, &format!("other-{kind}"), kind);
        publisher.publish(&id, Path::new(id.as_str()), mode(kind)).unwrap();
        id
    });
    for (id, other) in [(&directory, &block), (&block, &directory)] {
        let refused = assert_fails(publisher.unpublish(id, Path::new(other.as_str())), ErrorKind::Conflict);
        assert!(refused.to_string().contains(other.as_str()), "{refused}");
    }
    let inside = Path::new(directory.as_str()).join("inside");
    assert_fails(publisher.publish(&directory, &inside, mode(VolumeKind::Filesystem)), ErrorKind::Conflict);
    for id in [&directory, &block] {
        unpublish_and_delete(&publisher, id, id.as_str());
    }
}

/// The directory of a kubelet can be on the data disk. Only what belongs to the store is refused.
#[test]
fn the_root_can_be_on_xfs() {
    let _leaks = Leaks::watch();
    let root = tempfile::tempdir_in(xfs()).unwrap();
    let publisher = publisher(root.path());
    for kind in [VolumeKind::Filesystem, VolumeKind::Block] {
        let id = create(&publisher, &format!("on-it-{kind}"), kind);
        for _ in 0..2 {
            publisher.publish(&id, Path::new("a"), mode(kind)).unwrap();
        }
        if kind == VolumeKind::Block {
            // The XFS is mounted nodev. The flag belongs to the mount, and the bind mount is another mount.
            assert_eq!(read_from(&root.path().join("a"), 1), [0]);
        }
        let inside = Publisher::open(
            store(),
            LoopControl::open().unwrap(),
            Arc::new(PublishRoot::open(&xfs().join("volumes")).unwrap()),
            PublishOptions::default(),
        );
        let refused = inside.unwrap().publish(&id, Path::new("b"), mode(kind)).unwrap_err();
        assert!(refused.to_string().contains("directory of the store"), "{refused}");
        unpublish_and_delete(&publisher, &id, "a");
    }
}

/// Two publishers have published the device. It stays until the second of them has unpublished it.
#[test]
fn shared_devices_outlive_the_first_unpublication() {
    let _leaks = Leaks::watch();
    let (here, there) = (scratch(), scratch());
    let (first, second) = (publisher(here.path()), publisher(there.path()));
    let id = create(&first, "shared", VolumeKind::Block);
    for publisher in [&first, &second] {
        publisher.publish(&id, Path::new("a"), WRITABLE).unwrap();
    }
    assert_eq!(second.unpublish(&id, Path::new("a")).unwrap(), Cleanup::Complete);
    write_to(&here.path().join("a"), b"mine");
    unpublish_and_delete(&first, &id, "a");
}

/// Like a process that ends between both steps of an expansion.
#[test]
fn publishing_again_completes_an_expansion() {
    let (_leaks, root, publisher) = set_up();
    let id = create(&publisher, "growing", VolumeKind::Block);
    let target = root.path().join("a");
    let size = || File::open(&target).unwrap().seek(SeekFrom::End(0)).unwrap();
    publisher.publish(&id, &target, WRITABLE).unwrap();
    publisher.store().expand(&id, Bytes(2 * Bytes::MIB.0)).unwrap();
    assert_eq!(size(), Bytes::MIB.0);
    publisher.publish(&id, &target, WRITABLE).unwrap();
    assert_eq!(size(), 2 * Bytes::MIB.0);
    publisher.expand(&id, Bytes(4 * Bytes::MIB.0)).unwrap();
    assert_eq!(size(), 4 * Bytes::MIB.0);
    unpublish_and_delete(&publisher, &id, &target);
}

/// Six threads publish and unpublish three volumes at a target that all share. The target of its own of each volume shows it all the
/// time, and in the end nothing is left.
#[test]
fn concurrent_calls_leave_nothing_behind() {
    let (_leaks, root, publisher) = set_up();
    let volumes: Vec<VolumeId> =
        ["a", "b", "c"].iter().map(|name| create(&publisher, name, VolumeKind::Block)).collect();
    for volume in &volumes {
        let own = root.path().join(volume.as_str());
        publisher.publish(volume, &own, WRITABLE).unwrap();
        write_to(&own, volume.as_str().as_bytes());
    }
    let shared = Path::new("shared");
    let at_shared = AtomicU32::new(0);
    std::thread::scope(|scope| {
        for thread in 0..6 {
            let (publisher, volumes, at_shared, root) = (&publisher, &volumes, &at_shared, &root);
            scope.spawn(move || {
                let volume = &volumes[thread % volumes.len()];
                for _ in 0..6 {
                    match publisher.publish(volume, shared, WRITABLE) {
                        Ok(()) => drop(at_shared.fetch_add(1, Ordering::Relaxed)),
                        Err(error) => {
                            assert_eq!(error.kind(), ErrorKind::Conflict, "publish {volume}: {error}")
                        }
                    }
                    let own = root.path().join(volume.as_str());
                    assert_eq!(read_from(&own, 1), volume.as_str().as_bytes(), "what {volume} shows");
                    match publisher.unpublish(volume, shared) {
                        Ok(_) => {}
                        Err(error) => assert!(
                            [ErrorKind::Conflict, ErrorKind::Busy].contains(&error.kind()),
                            "unpublish {volume}: {error}"
                        ),
                    }
                }
            });
        }
    });
    assert!(at_shared.into_inner() > 0, "no volume was published at the shared target");
    for volume in &volumes {
        for target in [shared, Path::new(volume.as_str())] {
            assert_eq!(publisher.unpublish(volume, target).unwrap(), Cleanup::Complete);
        }
        delete(&publisher, volume);
    }
    assert_eq!(fs::read_dir(root.path()).unwrap().count(), 0);
}

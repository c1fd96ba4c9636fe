use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::Read;
use std::path::PathBuf;
use std::process::Stdio;

use loopfs::mount::{
    AccessTime, Isolation, KnownMount, MountCache, MountFlags, bind_mount, is_mount_point,
    table as mountinfo, unmount,
};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use nix::sys::wait::{Id, WaitPidFlag, waitid};
use nix::unistd::Pid;
use rustix::fs::CWD;
use rustix::mount::{MoveMountFlags, OpenTreeFlags, move_mount, open_tree};

use crate::environment::{Leaks, directory, scratch, this_test_again};
use crate::namespaces::in_namespace;

/// Set in a process that ends with its standard input.
const CHILD: &str = "LOOPFS_TEST_MOUNT_NAMESPACE";

#[test]
fn a_bind_mount_has_own_flags() {
    let _leaks = Leaks::watch();
    // The source is mounted nosuid, nodev and noexec.
    let (source, target) = (directory(), scratch());
    let flags = MountFlags {
        read_only: true,
        nosuid: true,
        access_time: AccessTime::Never,
        nodiratime: true,
        ..MountFlags::default()
    };
    let opened = File::open(source.path()).unwrap();
    bind_mount(&opened, target.path(), flags).unwrap();
    let mounts = mountinfo::read().unwrap();
    let mount = mountinfo::at(&mounts, target.path()).unwrap();
    for (option, expected) in [
        ("ro", true),
        ("nosuid", true),
        ("nodev", false),
        ("noexec", false),
        ("noatime", true),
        ("nodiratime", true),
    ] {
        assert_eq!(mount.has_option(option), expected, "{option} in {:?}", mount.options);
    }
    let refused = File::create(target.path().join("file")).unwrap_err();
    assert_eq!(refused.kind(), std::io::ErrorKind::ReadOnlyFilesystem);
    File::create(source.path().join("file")).unwrap();
    assert!(target.path().join("file").exists());
    assert!(unmount(target.path()).unwrap());
}

#[test]
fn unmounting_removes_stacked_mounts() {
    let _leaks = Leaks::watch();
    let (source, target) = (directory(), scratch());
    let opened = File::open(source.path()).unwrap();
    for _ in 0..2 {
        bind_mount(&opened, target.path(), MountFlags::default()).unwrap();
    }
    assert!(unmount(target.path()).unwrap());
    assert!(!unmount(target.path()).unwrap());
    assert!(!unmount(&target.path().join("absent")).unwrap());
}

#[test]
fn unmounting_a_busy_mount_fails() {
    let (source, target) = (directory(), scratch());
    File::create(source.path().join("file")).unwrap();
    bind_mount(File::open(source.path()).unwrap(), target.path(), MountFlags::default()).unwrap();
    let user = File::open(target.path().join("file")).unwrap();
    assert_eq!(unmount(target.path()).unwrap_err().kind(), loopfs::ErrorKind::Busy);
    drop(user);
    assert!(unmount(target.path()).unwrap());
}

/// The mount points below the directory of a cache.
fn mount_points(cache: &mut MountCache) -> BTreeSet<PathBuf> {
    cache.read().unwrap().iter().map(|mount| mount.mount_point.clone()).collect()
}

/// The cache has exactly the mounts below its directory.
#[test]
fn the_cache_follows_its_mounts() {
    let _leaks = Leaks::watch();
    let (source, base) = (directory(), scratch());
    let opened = File::open(source.path()).unwrap();
    let places = ["a", "b", "c"].map(|name| base.path().join(name));
    for place in &places {
        fs::create_dir(place).unwrap();
    }
    let mut cache = MountCache::below(base.path().to_owned());
    assert!(mount_points(&mut cache).is_empty());
    for count in 1..=places.len() {
        bind_mount(&opened, &places[count - 1], MountFlags::default()).unwrap();
        assert_eq!(mount_points(&mut cache), BTreeSet::from_iter(places[..count].iter().cloned()));
    }
    unmount(&places[1]).unwrap();
    let left = BTreeSet::from([places[0].clone(), places[2].clone()]);
    assert_eq!(mount_points(&mut cache), left);
    // A mount of the same file system outside of the directory.
    let outside = scratch();
    bind_mount(&opened, outside.path(), MountFlags::default()).unwrap();
    assert_eq!(mount_points(&mut cache), left);
    for place in [outside.path(), &places[0], &places[2]] {
        unmount(place).unwrap();
    }
    assert!(mount_points(&mut cache).is_empty());
}

/// `mount --bind` of util-linux 2.39 and `bind_mount` create a mount and then attach it. Its id is that of the creation.
#[test]
fn a_mount_attached_late_is_cached() {
    let _leaks = Leaks::watch();
    let (source, base) = (directory(), scratch());
    let opened = File::open(source.path()).unwrap();
    let (first, second) = (base.path().join("first"), base.path().join("second"));
    fs::create_dir(&first).unwrap();
    fs::create_dir(&second).unwrap();
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::AT_EMPTY_PATH;
    let created_first = open_tree(&opened, c"", flags).unwrap();
    let mut cache = MountCache::below(base.path().to_owned());
    bind_mount(&opened, &second, MountFlags::default()).unwrap();
    assert_eq!(mount_points(&mut cache), BTreeSet::from([second.clone()]));
    move_mount(created_first, c"", CWD, &first, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH).unwrap();
    assert_eq!(mount_points(&mut cache), BTreeSet::from([first.clone(), second.clone()]));
    unmount(&first).unwrap();
    unmount(&second).unwrap();
}

#[test]
fn cache_and_table_have_equal_fields() {
    let _leaks = Leaks::watch();
    let (source, base) = (directory(), scratch());
    // Names that the table escapes.
    let target = base.path().join("a b\\c\nd");
    fs::create_dir(&target).unwrap();
    fs::create_dir(source.path().join("with space")).unwrap();
    let opened = File::open(source.path().join("with space")).unwrap();
    let flags = MountFlags { read_only: true, nodev: true, ..MountFlags::default() };
    bind_mount(&opened, &target, flags).unwrap();
    let mounts = mountinfo::read().unwrap();
    let in_table = mountinfo::at(&mounts, &target).unwrap();
    let cached = MountCache::below(base.path().to_owned()).read().unwrap();
    let [in_cache] = &cached[..] else { panic!("{cached:?}") };
    assert_eq!((in_cache.id, in_cache.parent), (in_table.id, in_table.parent));
    assert_eq!((in_cache.device, &in_cache.root), (in_table.device, &in_table.root));
    assert_eq!((&in_cache.mount_point, &in_cache.fs_type), (&target, &in_table.fs_type));
    for option in ["ro", "rw", "nosuid", "nodev", "noexec", "noatime", "relatime", "nodiratime"] {
        assert_eq!(in_cache.has_option(option), in_table.has_option(option), "{option}");
    }
    unmount(&target).unwrap();
}

/// The path leads to the mount on top, so the root found there would be the wrong file.
#[test]
fn a_covered_mount_has_no_root() {
    let _leaks = Leaks::watch();
    let (source, target) = (directory(), scratch());
    let (file, other) = (source.path().join("file"), source.path().join("other"));
    fs::create_dir(&file).unwrap();
    fs::create_dir(&other).unwrap();
    let mut cache = MountCache::below(target.path().to_owned());
    bind_mount(File::open(&file).unwrap(), target.path(), MountFlags::default()).unwrap();
    let lower = cache.read().unwrap().remove(0);
    bind_mount(File::open(&other).unwrap(), target.path(), MountFlags::default()).unwrap();
    let with_root = |mounts: Vec<KnownMount>| mounts.iter().filter_map(KnownMount::root_file).count();
    assert_eq!(lower.root_file(), None);
    assert_eq!(with_root(cache.read().unwrap()), 1);
    assert!(unmount(target.path()).unwrap());
}

#[test]
fn only_mounted_entries_are_mount_points() {
    let (source, base) = (directory(), scratch());
    fs::create_dir(base.path().join("target")).unwrap();
    std::os::unix::fs::symlink("target", base.path().join("link")).unwrap();
    let parent = File::open(base.path()).unwrap();
    let is = |name: &str| is_mount_point(&parent, name.as_ref()).unwrap();
    assert!(!is("target") && !is("absent"));
    let target = base.path().join("target");
    bind_mount(File::open(source.path()).unwrap(), &target, MountFlags::default()).unwrap();
    assert!(is("target") && !is("link"));
    unmount(&target).unwrap();
    assert!(!is("target"));
}

/// A shared mount appears elsewhere only if a process in another mount namespace has a mount of its peer group. A process that has
/// ended is in no mount namespace, also if its parent has not waited for it.
#[test]
fn a_shared_mount_without_peers_is_isolated() {
    if std::env::var_os(CHILD).is_some() {
        std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
        return;
    }
    let _leaks = Leaks::watch();
    let target = scratch();
    let mut ended = this_test_again(CHILD, "yes").stdout(Stdio::null()).spawn().unwrap();
    let pid = Id::Pid(Pid::from_raw(ended.id().cast_signed()));
    waitid(pid, WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT).unwrap();
    let mut other = this_test_again(CHILD, "yes");
    other.stdin(Stdio::piped()).stdout(Stdio::null());
    in_namespace(|| {
        let nothing = None::<&str>;
        mount(Some("none"), target.path(), Some("tmpfs"), MsFlags::empty(), nothing).unwrap();
        mount(nothing, target.path(), nothing, MsFlags::MS_SHARED, nothing).unwrap();
        let mounts = mountinfo::read().unwrap();
        let shared = mountinfo::at(&mounts, target.path()).unwrap();
        assert_eq!(Isolation::of(shared), Some(Isolation::NoPeers));

        let in_copy = || {
            unshare(CloneFlags::CLONE_NEWNS).unwrap();
            other.spawn().unwrap()
        };
        let mut peer = std::thread::scope(|scope| scope.spawn(in_copy).join().unwrap());
        assert_eq!(Isolation::of(shared), None);
        // It ends with its standard input.
        assert!(peer.wait().unwrap().success());
        assert_eq!(Isolation::of(shared), Some(Isolation::NoPeers));
    });
    assert!(ended.wait().unwrap().success());
}

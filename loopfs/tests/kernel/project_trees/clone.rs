//! Tests of clones of trees: which attributes of an inode its copy has and which it has not.

use std::fs::{self, File, Permissions};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, chown, lchown, symlink};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use loopfs::project_quota::assign_project;
use loopfs::project_tree::{CloneReport, clone_tree};
use loopfs::test_support;
use nix::fcntl::{AT_FDCWD, FallocateFlags, fallocate};
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
use nix::sys::stat::{Mode, SFlag, UtimensatFlags, makedev, mknod, utimensat};
use nix::sys::time::TimeSpec;
use rustix::fs::{XattrFlags, lsetxattr};

use super::portrait::{TreeMetadata, assert_equal_trees, read_tree_metadata, without_access_times_of_links};
use super::{Fixture, make_fifo, project_at};
use crate::environment::{default_with, project};

/// `FS_XFLAG_*` of linux/fs.h.
const IMMUTABLE: u32 = 0x8;
const APPEND: u32 = 0x10;
const NOATIME: u32 = 0x40;
const NODUMP: u32 = 0x80;
const EXTSIZE: u32 = 0x800;
const EXTSZINHERIT: u32 = 0x1000;
const COWEXTSIZE: u32 = 0x1_0000;

impl Fixture {
    /// Creates a new directory in the project, to clone into.
    pub(super) fn empty_copy(&self) -> PathBuf {
        let copy = self.directory.path().join("copy");
        fs::create_dir(&copy).unwrap();
        assign_project(File::open(&copy).unwrap(), self.id).unwrap();
        copy
    }

    pub(super) fn clone(&self) -> (PathBuf, CloneReport) {
        let copy = self.empty_copy();
        let report = clone_into(&self.tree(), &copy).unwrap();
        (copy, report)
    }
}

pub(super) fn clone_into(source: &Path, target: &Path) -> loopfs::Result<CloneReport> {
    clone_tree(File::open(source).unwrap(), File::open(target).unwrap(), |_| {})
}

pub(super) fn set_attribute(path: &Path, name: &str, value: &[u8]) {
    lsetxattr(path, name, value, XattrFlags::empty()).unwrap();
}

/// Returns an ACL in the format of xattr(7), for the owner, user 4321, the group, mask and others.
fn acl(user: u16) -> Vec<u8> {
    let entries: [(u16, u16, u32); 5] = [
        (0x01, 6, u32::MAX),
        (0x02, user, 4321),
        (0x04, 4, u32::MAX),
        (0x10, 7, u32::MAX),
        (0x20, 0, u32::MAX),
    ];
    let mut bytes = 2u32.to_le_bytes().to_vec();
    for (tag, permissions, id) in entries {
        bytes.extend(tag.to_le_bytes());
        bytes.extend(permissions.to_le_bytes());
        bytes.extend(id.to_le_bytes());
    }
    bytes
}

/// Returns `CAP_NET_BIND_SERVICE` as `struct vfs_cap_data` of revision 2, effective.
fn capability() -> Vec<u8> {
    let mut bytes = vec![0; 20];
    bytes[..4].copy_from_slice(&0x0200_0001u32.to_le_bytes());
    bytes[4..8].copy_from_slice(&(1u32 << 10).to_le_bytes());
    bytes
}

pub(super) fn set_times(path: &Path, accessed: (i64, i64), modified: (i64, i64)) {
    let time = |(seconds, nanoseconds)| TimeSpec::new(seconds, nanoseconds);
    utimensat(AT_FDCWD, path, &time(accessed), &time(modified), UtimensatFlags::NoFollowSymlink).unwrap();
}

fn set_mode(path: &Path, mode: u32) {
    fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
}

/// Creates an entry of every type.
fn populate(tree: &Path) {
    let at = |name: &str| tree.join(name);
    fs::write(at("empty"), "").unwrap();
    fs::write(at("text"), "some text").unwrap();
    fs::write(at("large"), vec![7; 3_000_001]).unwrap();
    let sparse = File::create(at("sparse")).unwrap();
    sparse.write_all_at(b"in the midst", 4 << 20).unwrap();
    sparse.set_len(8 << 20).unwrap();
    let beyond = File::create(at("allocated past its end")).unwrap();
    beyond.write_all_at(b"data", 0).unwrap();
    fallocate(&beyond, FallocateFlags::FALLOC_FL_KEEP_SIZE, 0, 1 << 20).unwrap();
    fallocate(File::create(at("unwritten")).unwrap(), FallocateFlags::empty(), 0, 1 << 20).unwrap();

    fs::create_dir_all(at("a/b/c")).unwrap();
    fs::write(at("a/b/c/deep"), [1; 5000]).unwrap();
    let long = "x".repeat(255);
    fs::create_dir(at(&long)).unwrap();
    fs::write(at(&long).join(&long), "long").unwrap();

    fs::hard_link(at("text"), at("a/text")).unwrap();
    fs::hard_link(at("text"), at("a/b/text")).unwrap();
    symlink("nowhere", at("dangling")).unwrap();
    symlink("y".repeat(1023), at("long link")).unwrap();
    fs::hard_link(at("dangling"), at("a/dangling")).unwrap();
    make_fifo(&at("fifo"));
    fs::hard_link(at("fifo"), at("a/fifo")).unwrap();
    drop(UnixListener::bind(at("socket")).unwrap());
    mknod(&at("null"), SFlag::S_IFCHR, Mode::S_IRUSR, makedev(1, 3)).unwrap();
    mknod(&at("block"), SFlag::S_IFBLK, Mode::S_IRUSR, makedev(300, 70_000)).unwrap();
    mknod(&at("whiteout"), SFlag::S_IFCHR, Mode::empty(), makedev(0, 0)).unwrap();

    lchown(at("dangling"), Some(1001), Some(1002)).unwrap();
    chown(at("large"), Some(u32::MAX - 1), Some(70_000)).unwrap();
    chown(at("null"), Some(1001), Some(1002)).unwrap();
    for (name, mode) in [
        ("empty", 0),
        ("text", 0o6755),
        ("large", 0o2070),
        ("fifo", 0o622),
        ("socket", 0o777),
        ("block", 0o660),
        ("a", 0o3777),
        ("a/b", 0),
        ("a/b/c", 0o2111),
    ] {
        set_mode(&at(name), mode);
    }

    fs::write(at("capable"), "program").unwrap();
    chown(at("capable"), Some(5), Some(6)).unwrap();
    set_mode(&at("capable"), 0o4755);
    set_attribute(&at("capable"), "security.capability", &capability());
    fs::write(at("attributes"), "").unwrap();
    set_attribute(&at("attributes"), "user.empty", b"");
    set_attribute(&at("attributes"), "user.largest", &vec![3; 64 << 10]);
    set_attribute(&at("attributes"), "trusted.overlay.opaque", b"y");
    set_attribute(&at("attributes"), "trusted.loopfs.attributes", b"of the store");
    for n in 0..500 {
        set_attribute(&at("attributes"), &format!("user.{n:0>80}"), format!("{n}").as_bytes());
    }
    set_attribute(&at("dangling"), "trusted.of a link", b"1");
    set_attribute(&at("whiteout"), "security.of a device", b"2");

    fs::create_dir_all(at("acl/plain")).unwrap();
    fs::write(at("acl/file"), "").unwrap();
    fs::write(at("acl/closed"), "").unwrap();
    make_fifo(&at("acl/fifo"));
    // The default ACL is set last, so that the entries created before do not inherit it.
    set_attribute(&at("acl"), "system.posix_acl_default", &acl(7));
    set_attribute(&at("acl"), "system.posix_acl_access", &acl(5));
    set_attribute(&at("acl/closed"), "system.posix_acl_access", &acl(0));

    set_times(&at("text"), (1, 2), (3, 999_999_999));
    set_times(&at("dangling"), (-5, 6), (7, 8));
    set_times(&at("fifo"), (1 << 33, 1), (1 << 33, 2));
    set_times(&at("a/b/c"), (100, 1), (200, 2));
    set_times(&at("a"), (300, 3), (400, 4));
    chown(tree, Some(1234), Some(5678)).unwrap();
    set_mode(tree, 0o1751);
    set_attribute(tree, "user.of the root", b"3");
    set_times(tree, (500, 5), (600, 6));
}

/// Returns the change times. Reading them changes nothing.
fn changes(tree: &Path, tree_metadata: &TreeMetadata) -> Vec<(i64, i64)> {
    let statuses = tree_metadata.keys().map(|name| fs::symlink_metadata(tree.join(name)).unwrap());
    statuses.map(|status| (status.ctime(), status.ctime_nsec())).collect()
}

fn descriptors() -> usize {
    fs::read_dir("/proc/self/fd").unwrap().count()
}

/// The source stays unchanged, and none of its special files is opened.
#[test]
fn a_clone_equals_its_source() {
    let fixture = Fixture::new(5401);
    populate(&fixture.tree());
    let tree_metadata = read_tree_metadata(&fixture.tree());
    let opened = Inotify::init(InitFlags::IN_NONBLOCK | InitFlags::IN_CLOEXEC).unwrap();
    for name in ["fifo", "socket", "null", "block", "whiteout"] {
        opened.add_watch(&fixture.tree().join(name), AddWatchFlags::IN_OPEN).unwrap();
    }
    let before = changes(&fixture.tree(), &tree_metadata);
    let copy = fixture.empty_copy();
    let held = descriptors();
    let report = clone_into(&fixture.tree(), &copy).unwrap();
    assert_eq!(descriptors(), held);
    assert_eq!(opened.read_events().map(|events| events.len()), Err(nix::errno::Errno::EAGAIN));
    assert_eq!(changes(&fixture.tree(), &tree_metadata), before);
    let unchanged = without_access_times_of_links;
    assert_equal_trees(&unchanged(read_tree_metadata(&fixture.tree())), &unchanged(tree_metadata.clone()));

    let found = read_tree_metadata(&copy);
    assert_equal_trees(&found, &tree_metadata);
    // Two symbolic links, a socket, two FIFOs and three devices.
    let special_files = 8;
    let names = tree_metadata.len() as u64;
    let expected = default_with(|report: &mut CloneReport| {
        report.names = names;
        report.directories = 7;
        report.files = names - 7 - special_files - 4;
        report.special_files = special_files;
        report.hard_links = 4;
    });
    assert_eq!(report, expected);
    assert!(report.is_complete());
}

/// The clone shares its blocks with the source until one of them is written.
#[test]
fn a_clone_is_charged_in_full() {
    let fixture = Fixture::new(5402);
    fs::write(fixture.tree().join("file"), vec![1; 8 << 20]).unwrap();
    let (copy, _) = fixture.clone();
    let file = |tree: &Path| File::options().read(true).write(true).open(tree.join("file")).unwrap();
    let (original, clone) = (file(&fixture.tree()), file(&copy));
    for one in [&original, &clone] {
        let (all, shared) = test_support::extents(one).unwrap();
        assert!(all > 0 && all == shared, "{shared} of {all} extents are shared");
    }
    assert_eq!(fixture.charged(), (8 << 20, 2), "the directory and its file are charged with all blocks");
    assert_eq!(project_at(&fixture.tree().join("file")), 0);
    original.write_all_at(&[2; 5000], 1 << 20).unwrap();
    clone.write_all_at(&[3; 5000], 4 << 20).unwrap();
    let byte = |file: &File, at| {
        let mut byte = [0];
        file.read_exact_at(&mut byte, at).unwrap();
        byte[0]
    };
    assert_eq!((byte(&clone, 1 << 20), byte(&original, 4 << 20)), (1, 1));
}

#[test]
fn flags_are_copied_and_not_inherited() {
    let fixture = Fixture::new(5403);
    let tree = fixture.tree();
    let set =
        |name: &str, flags| test_support::set_flags(File::open(tree.join(name)).unwrap(), flags).unwrap();
    fs::create_dir_all(tree.join("frozen/below")).unwrap();
    for name in ["frozen/below/file", "immutable", "hints", "no dump", "frozen/linked", "outside"] {
        fs::write(tree.join(name), "").unwrap();
    }
    set("hints", (EXTSIZE | COWEXTSIZE, 65536, 131_072));
    fs::write(tree.join("hints"), [1; 100]).unwrap();
    fs::write(tree.join("frozen/linked"), [2; 100]).unwrap();
    fs::hard_link(tree.join("frozen/linked"), tree.join("linked")).unwrap();
    fs::hard_link(tree.join("outside"), fixture.outside().join("outside")).unwrap();
    fs::create_dir(tree.join("hands down")).unwrap();
    fs::write(tree.join("hands down/file"), "").unwrap();
    fs::create_dir(tree.join("hands down/directory")).unwrap();
    set("hands down", (EXTSZINHERIT | NODUMP | NOATIME, 65536, 0));
    set("no dump", (NODUMP, 0, 0));
    let frozen = ["immutable", "frozen/linked", "outside", "frozen/below", "frozen"];
    for name in frozen {
        set(name, (if name == "frozen/below" { APPEND } else { IMMUTABLE }, 0, 0));
    }
    let tree_metadata = read_tree_metadata(&tree);
    let (copy, report) = fixture.clone();
    let mut found = read_tree_metadata(&copy);
    assert!(report.is_complete(), "{report:?}");
    // One name of the file is outside the tree.
    let outside = Path::new("./outside").to_owned();
    let (copied, expected) = (found.remove(&outside).unwrap(), tree_metadata[&outside].clone());
    assert_eq!(copied.flags(), expected.flags());
    let mut tree_metadata = tree_metadata;
    tree_metadata.remove(&outside);
    assert_equal_trees(&found, &tree_metadata);

    for tree in [&tree, &copy] {
        for name in frozen.iter().rev() {
            test_support::set_flags(File::open(tree.join(name)).unwrap(), (0, 0, 0)).unwrap();
        }
    }
}

#[test]
fn an_immutable_sources_clone_is_mutable() {
    let fixture = Fixture::new(5404);
    let tree = File::open(fixture.tree()).unwrap();
    // The tenant must not be able to copy the attribute that the store keeps on a volume.
    set_attribute(&fixture.tree(), "trusted.loopfs.volume", b"of the source");
    let copy = fixture.empty_copy();
    set_attribute(&copy, "trusted.loopfs.volume", b"of the copy");
    // The copy inherits these from its parent directory. They must not remain, because the source does not
    // have them.
    test_support::set_flags(File::open(&copy).unwrap(), (NODUMP, 0, 0)).unwrap();
    set_attribute(&copy, "system.posix_acl_default", &acl(7));
    test_support::set_flags(&tree, (IMMUTABLE | APPEND | NOATIME, 0, 0)).unwrap();
    let report = clone_into(&fixture.tree(), &copy);
    test_support::set_flags(&tree, (0, 0, 0)).unwrap();
    assert!(report.unwrap().is_complete());
    assert_eq!(test_support::flags(File::open(&copy).unwrap()).unwrap(), (NOATIME, 0, 0));
    let mut mark = [0; 32];
    let length = rustix::fs::getxattr(&copy, "trusted.loopfs.volume", &mut mark).unwrap();
    assert_eq!(&mark[..length], b"of the copy");
    let acls = rustix::fs::getxattr(&copy, "system.posix_acl_default", &mut mark);
    assert_eq!(acls, Err(rustix::io::Errno::NODATA));
    fs::rename(&copy, fixture.directory.path().join("moved")).unwrap();
}

#[test]
fn strays_join_the_clones_project() {
    let fixture = Fixture::new(5405);
    fs::create_dir(fixture.tree().join("stray")).unwrap();
    let stray = File::open(fixture.tree().join("stray")).unwrap();
    assign_project(&stray, project(5406)).unwrap();
    fs::write(fixture.tree().join("stray/file"), [1; 4096]).unwrap();
    let (copy, _) = fixture.clone();
    assert_eq!(project_at(&copy.join("stray")), 5405);
    assert_eq!(project_at(&copy.join("stray/file")), 5405);
    assert_eq!(fixture.charged(), (4096, 3));
    let check = loopfs::project_tree::check_tree(File::open(&copy).unwrap(), fixture.id, |_| {}).unwrap();
    assert!(check.is_clean(), "{check:?}");
}

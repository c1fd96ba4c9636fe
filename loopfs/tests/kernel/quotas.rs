use std::fs::File;
use std::io::Write;
use std::path::PathBuf;

use loopfs::project_quota::{
    Limit, Limits, ProjectId, ProjectQuota, StoredLimits, assign_project, project_of,
};
use loopfs::{Bytes, ErrorKind, Inodes};
use nix::errno::Errno;
use nix::sys::statvfs::statvfs;

use crate::environment::{Leaks, MIB, directory, project, quota, xfs};
use crate::fixtures::assert_fails;

fn limits(bytes: u64, inodes: u64) -> Limits {
    Limits::hard(Bytes(bytes), Inodes(inodes))
}

fn stored_hard(bytes: u64, inodes: u64) -> StoredLimits {
    StoredLimits { bytes: Some(Bytes(bytes)), inodes: Some(Inodes(inodes)) }
}

/// Writes until a write fails. Returns the number of bytes written and the errno.
fn fill(path: &std::path::Path) -> (u64, Errno) {
    let mut file = File::create(path).unwrap();
    let mut written = 0;
    loop {
        match file.write(&[0x5a; 4096]) {
            Ok(count) => written += count as u64,
            Err(error) => return (written, Errno::from_raw(error.raw_os_error().unwrap())),
        }
        // Space of delayed allocation is charged immediately. Without this call its estimate would be charged as well.
        file.sync_data().unwrap();
    }
}

/// A directory in a project with limits. The end of the test removes both, and checks that nothing stays charged.
struct Limited {
    root: File,
    id: ProjectId,
    directory: tempfile::TempDir,
    _leaks: Leaks,
}

impl Limited {
    fn new(id: u32, limits: Limits) -> Self {
        let leaks = Leaks::watch();
        let (root, id, directory) = (File::open(xfs()).unwrap(), project(id), directory());
        quota(&root).set_limits(id, limits).unwrap();
        assign_project(File::open(directory.path()).unwrap(), id).unwrap();
        Self { root, id, directory, _leaks: leaks }
    }

    fn quota(&self) -> ProjectQuota<'_> {
        quota(&self.root)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Returns the size in bytes and inodes that statfs(2) returns.
    fn size(&self) -> (u64, u64) {
        let status = statvfs(self.directory.path()).unwrap();
        (status.blocks() * status.fragment_size(), status.files())
    }
}

impl Drop for Limited {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.quota().clear_limits(self.id).unwrap();
        }
    }
}

/// The size that `statfs` returns is the limit.
#[test]
fn the_byte_limit_is_exact() {
    let limited = Limited::new(4001, limits(MIB, 512));
    let (quota, id) = (limited.quota(), limited.id);
    assert_eq!(limited.size(), (MIB, 512));
    let filled = fill(&limited.path("file"));
    assert_eq!(filled, (MIB, Errno::ENOSPC), "XFS refuses a project with ENOSPC, not EDQUOT");

    quota.set_limits(id, limits(2 * MIB, 1024)).unwrap();
    assert_eq!(fill(&limited.path("file")), (2 * MIB, Errno::ENOSPC));
}

#[test]
fn the_inode_limit_holds() {
    let limited = Limited::new(4002, limits(16 * MIB, 20));
    let (quota, id) = (limited.quota(), limited.id);
    let made = (0..100).take_while(|n| File::create(limited.path(&n.to_string())).is_ok()).count();
    assert_eq!(made, 19, "the directory is one of the twenty");
    assert_eq!(quota.usage(id).unwrap().unwrap().inodes, Inodes(20));
}

#[test]
fn limits_round_up_to_blocks() {
    let root = File::open(xfs()).unwrap();
    let (quota, id) = (quota(&root), project(4003));
    let stored = quota.set_limits(id, limits(1_234_567, 100)).unwrap();
    assert_eq!(stored, stored_hard(302 * 4096, 100));
    quota.clear_limits(id).unwrap();
    // The kernel treats 0 as unlimited.
    assert_fails(quota.set_limits(id, limits(0, 100)), ErrorKind::InvalidInput);
    assert_eq!(quota.usage(id).unwrap(), None);
}

#[test]
fn only_the_requested_limits_are_changed() {
    let root = File::open(xfs()).unwrap();
    let (quota, id) = (quota(&root), project(4006));
    quota.set_limits(id, limits(MIB, 100)).unwrap();
    let bytes = Limits { bytes: Limit::Hard(Bytes(2 * MIB)), ..Limits::KEEP };
    assert_eq!(quota.set_limits(id, bytes).unwrap(), stored_hard(2 * MIB, 100));
    let inodes = Limits { inodes: Limit::Hard(Inodes(7)), ..Limits::KEEP };
    assert_eq!(quota.set_limits(id, inodes).unwrap(), stored_hard(2 * MIB, 7));
    assert_eq!(quota.set_limits(id, Limits::KEEP).unwrap(), stored_hard(2 * MIB, 7));
    let unlimited = Limits { bytes: Limit::Unlimited, ..Limits::KEEP };
    let stored = quota.set_limits(id, unlimited).unwrap();
    assert_eq!((stored.bytes, stored.inodes), (None, Some(Inodes(7))));
    quota.clear_limits(id).unwrap();
    assert_eq!(quota.set_limits(id, Limits::KEEP).unwrap(), StoredLimits::UNLIMITED);
    assert_eq!(quota.usage(id).unwrap(), None, "querying an id does not use it");
}

/// The kernel would take these limits for none.
#[test]
fn ineffective_limits_are_refused() {
    let root = File::open(xfs()).unwrap();
    let (quota, id) = (quota(&root), project(4008));
    quota.set_limits(id, limits(MIB, 100)).unwrap();
    for refused in [Limits { inodes: Limit::Hard(Inodes(0)), ..Limits::KEEP }, limits(u64::MAX, 100)] {
        assert_fails(quota.set_limits(id, refused), ErrorKind::InvalidInput);
        assert_eq!(quota.usage(id).unwrap().unwrap().limits, stored_hard(MIB, 100));
    }
    // The maximum accepted value is stored unchanged and does not wrap round.
    let most = i64::MAX as u64 - 4095;
    assert_eq!(quota.set_limits(id, limits(most, u64::MAX)).unwrap(), stored_hard(most, u64::MAX));
    quota.clear_limits(id).unwrap();
}

/// The new limit is below the usage, and only prevents further use.
#[test]
fn lowering_a_limit_keeps_the_usage() {
    let limited = Limited::new(4009, limits(2 * MIB, 16));
    let (quota, id) = (limited.quota(), limited.id);
    let (file, more) = (limited.path("file"), limited.path("more"));
    File::create(&more).unwrap();
    assert_eq!(fill(&file), (2 * MIB, Errno::ENOSPC));
    assert_eq!(quota.set_limits(id, limits(MIB, 16)).unwrap(), stored_hard(MIB, 16));
    assert_eq!(std::fs::metadata(&file).unwrap().len(), 2 * MIB);
    let usage = quota.usage(id).unwrap().unwrap();
    assert_eq!(usage.bytes, Bytes(2 * MIB));
    assert_eq!(fill(&more), (0, Errno::ENOSPC));
}

#[test]
fn ids_are_listed_in_order() {
    let root = File::open(xfs()).unwrap();
    let quota = quota(&root);
    let ids = [5001, 5003, 5900, u32::MAX - 1];
    for id in ids {
        quota.set_limits(project(id), limits(MIB, 8)).unwrap();
    }
    let listed = |from, to| -> Vec<u32> {
        quota.ids(project(from)..=project(to)).map(|usage| usage.unwrap().id.get()).collect()
    };
    assert_eq!(listed(5001, 5899), [5001, 5003]);
    assert_eq!(listed(5002, 5900), [5003, 5900]);
    assert_eq!(listed(5901, u32::MAX - 1), [u32::MAX - 1], "the search does not wrap");
    for id in ids {
        quota.clear_limits(project(id)).unwrap();
    }
    assert!(listed(5001, u32::MAX - 1).is_empty());
}

/// A file that is moved out of its project keeps the id.
#[test]
fn moving_into_a_project_is_refused() {
    let limited = Limited::new(4010, limits(MIB, 64));
    let (quota, id, outside) = (limited.quota(), limited.id, directory());
    let (coming, going) = (outside.path().join("coming"), limited.path("going"));
    File::create(&coming).unwrap();
    File::create(&going).unwrap();
    let errno =
        |result: std::io::Result<()>| result.map_err(|error| error.raw_os_error().map(Errno::from_raw));
    assert_eq!(errno(std::fs::rename(&coming, limited.path("x"))), Err(Some(Errno::EXDEV)));
    assert_eq!(errno(std::fs::hard_link(&coming, limited.path("x"))), Err(Some(Errno::EXDEV)));
    std::fs::rename(&going, outside.path().join("gone")).unwrap();
    assert_eq!(project_of(File::open(outside.path().join("gone")).unwrap()).unwrap(), id.get());
    let inodes = quota.usage(id).unwrap().unwrap().inodes;
    assert_eq!(inodes, Inodes(2), "the directory and the file that was moved out");
}

#[test]
fn only_an_empty_directory_is_assigned() {
    let _leaks = Leaks::watch();
    let (directory, id) = (directory(), project(4012));
    let file = directory.path().join("file");
    std::fs::write(&file, [7; 4096]).unwrap();
    for (path, why) in [(directory.path(), "tag_tree"), (&file, "only a directory")] {
        let error = assert_fails(assign_project(File::open(path).unwrap(), id), ErrorKind::InvalidInput);
        assert!(error.to_string().contains(why), "{error}");
        assert_eq!(project_of(File::open(path).unwrap()).unwrap(), 0, "it is unchanged");
    }
    std::fs::remove_file(&file).unwrap();
    assign_project(File::open(directory.path()).unwrap(), id).unwrap();
    std::fs::write(&file, [7; 4096]).unwrap();
    assign_project(File::open(directory.path()).unwrap(), id).unwrap();
}

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::{MetadataExt, chown};

use loopfs::project_quota::{
    Enforcement, Limit, Limits, ProjectId, StoredLimits, assign_project, project_of,
};
use loopfs::{Bytes, ErrorKind, Inodes};
use nix::errno::Errno;

use crate::environment::{Leaks, directory, quota, scratch, xfs, xfs_without_quota};

const MIB: u64 = 1 << 20;

fn project(id: u32) -> ProjectId {
    ProjectId::new(id).unwrap()
}

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

#[test]
fn enforcement_states_are_distinguished() {
    assert_eq!(quota(&File::open(xfs()).unwrap()).enforcement().unwrap(), Enforcement::Enforcing);
    assert_eq!(quota(&File::open(xfs_without_quota()).unwrap()).enforcement().unwrap(), Enforcement::NoQuota);
    assert_eq!(quota(&File::open(scratch().path()).unwrap()).enforcement().unwrap(), Enforcement::NoQuota);
}

/// The size that `statfs` returns is the limit.
#[test]
fn the_byte_limit_is_exact() {
    let leaks = Leaks::watch();
    let root = File::open(xfs()).unwrap();
    let (quota, id) = (quota(&root), project(4001));
    quota.set_limits(id, limits(MIB, 512)).unwrap();
    let directory = directory();
    assign_project(File::open(directory.path()).unwrap(), id).unwrap();

    let statfs = nix::sys::statvfs::statvfs(directory.path()).unwrap();
    assert_eq!(statfs.blocks() * statfs.fragment_size(), MIB);
    assert_eq!(statfs.files(), 512);
    assert_eq!(
        fill(&directory.path().join("file")),
        (MIB, Errno::ENOSPC),
        "XFS refuses a project with ENOSPC, not EDQUOT"
    );

    quota.set_limits(id, limits(4 * MIB, 2048)).unwrap();
    assert_eq!(fill(&directory.path().join("file")), (4 * MIB, Errno::ENOSPC));
    directory.close().unwrap();
    quota.finish_inactivation(id).unwrap();
    quota.clear_limits(id).unwrap();
    assert_eq!(quota.usage(id).unwrap(), None);
    leaks.check();
}

#[test]
fn the_inode_limit_holds() {
    let root = File::open(xfs()).unwrap();
    let (quota, id) = (quota(&root), project(4002));
    quota.set_limits(id, limits(16 * MIB, 20)).unwrap();
    let directory = directory();
    assign_project(File::open(directory.path()).unwrap(), id).unwrap();
    let made = (0..100).take_while(|n| File::create(directory.path().join(format!("{n}"))).is_ok()).count();
    assert_eq!(made, 19, "the directory is one of the twenty");
    assert_eq!(quota.usage(id).unwrap().unwrap().inodes, Inodes(20));
    directory.close().unwrap();
    quota.finish_inactivation(id).unwrap();
    quota.clear_limits(id).unwrap();
}

#[test]
fn limits_round_up_to_blocks() {
    let root = File::open(xfs()).unwrap();
    let (quota, id) = (quota(&root), project(4003));
    let stored = quota.set_limits(id, limits(1_234_567, 100)).unwrap();
    assert_eq!(stored, stored_hard(302 * 4096, 100));
    quota.clear_limits(id).unwrap();
    let error = quota.set_limits(id, limits(0, 100)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput, "the kernel treats 0 as unlimited");
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
        let error = quota.set_limits(id, refused).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
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
    let root = File::open(xfs()).unwrap();
    let (quota, id) = (quota(&root), project(4009));
    quota.set_limits(id, limits(2 * MIB, 16)).unwrap();
    let directory = directory();
    assign_project(File::open(directory.path()).unwrap(), id).unwrap();
    let (file, more) = (directory.path().join("file"), directory.path().join("more"));
    File::create(&more).unwrap();
    assert_eq!(fill(&file), (2 * MIB, Errno::ENOSPC));
    assert_eq!(quota.set_limits(id, limits(MIB, 16)).unwrap(), stored_hard(MIB, 16));
    assert_eq!(std::fs::metadata(&file).unwrap().len(), 2 * MIB);
    let usage = quota.usage(id).unwrap().unwrap();
    assert_eq!(usage.bytes, Bytes(2 * MIB));
    assert_eq!(fill(&more), (0, Errno::ENOSPC));
    directory.close().unwrap();
    quota.finish_inactivation(id).unwrap();
    quota.clear_limits(id).unwrap();
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
    let leaks = Leaks::watch();
    let root = File::open(xfs()).unwrap();
    let (quota, id) = (quota(&root), project(4010));
    quota.set_limits(id, limits(MIB, 64)).unwrap();
    let (inside, outside) = (directory(), directory());
    assign_project(File::open(inside.path()).unwrap(), id).unwrap();
    let (coming, going) = (outside.path().join("coming"), inside.path().join("going"));
    File::create(&coming).unwrap();
    File::create(&going).unwrap();
    let errno =
        |result: std::io::Result<()>| result.map_err(|error| error.raw_os_error().map(Errno::from_raw));
    assert_eq!(errno(std::fs::rename(&coming, inside.path().join("x"))), Err(Some(Errno::EXDEV)));
    assert_eq!(errno(std::fs::hard_link(&coming, inside.path().join("x"))), Err(Some(Errno::EXDEV)));
    std::fs::rename(&going, outside.path().join("gone")).unwrap();
    assert_eq!(project_of(File::open(outside.path().join("gone")).unwrap()).unwrap(), id.get());
    assert_eq!(
        quota.usage(id).unwrap().unwrap().inodes,
        Inodes(2),
        "the directory and the file that was moved out"
    );
    inside.close().unwrap();
    outside.close().unwrap();
    quota.finish_inactivation(id).unwrap();
    quota.clear_limits(id).unwrap();
    leaks.check();
}

/// New files inherit the project, and the kernel lets their owner change it.
#[test]
fn owners_can_leave_the_project() {
    let root = File::open(xfs()).unwrap();
    let (quota, id) = (quota(&root), project(4004));
    quota.set_limits(id, limits(MIB, 64)).unwrap();
    let directory = directory();
    assign_project(File::open(directory.path()).unwrap(), id).unwrap();
    let nested = directory.path().join("nested");
    std::fs::create_dir(&nested).unwrap();
    assert_eq!(project_of(File::open(&nested).unwrap()).unwrap(), id.get());
    // This is the documented weakness. The assertion fails if a kernel removes it. The owner acts without
    // capabilities in a thread of its own, because Linux keeps credentials per thread.
    chown(&nested, Some(1000), Some(1000)).unwrap();
    assert_eq!(std::fs::metadata(&nested).unwrap().uid(), 1000);
    std::thread::spawn({
        let nested = nested.clone();
        move || {
            nix::unistd::setfsuid(nix::unistd::Uid::from_raw(1000));
            assign_project(File::open(&nested).unwrap(), project(9999)).unwrap();
        }
    })
    .join()
    .unwrap();
    assert_eq!(project_of(File::open(&nested).unwrap()).unwrap(), 9999);
    directory.close().unwrap();
    quota.finish_inactivation(id).unwrap();
    quota.clear_limits(id).unwrap();
}

#[test]
fn only_an_empty_directory_is_assigned() {
    let leaks = Leaks::watch();
    let (directory, id) = (directory(), project(4012));
    let file = directory.path().join("file");
    std::fs::write(&file, [7; 4096]).unwrap();
    for (path, why) in [(directory.path(), "tag_tree"), (&file, "only a directory")] {
        let error = assign_project(File::open(path).unwrap(), id).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
        assert!(error.to_string().contains(why), "{error}");
        assert_eq!(project_of(File::open(path).unwrap()).unwrap(), 0, "it is unchanged");
    }
    std::fs::remove_file(&file).unwrap();
    assign_project(File::open(directory.path()).unwrap(), id).unwrap();
    std::fs::write(&file, [7; 4096]).unwrap();
    assign_project(File::open(directory.path()).unwrap(), id).unwrap();
    directory.close().unwrap();
    leaks.check();
}

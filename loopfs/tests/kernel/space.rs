//! Tests of the reported free capacity.

use std::fs::File;

use loopfs::Bytes;
use loopfs::volume_store::{AbnormalReason, Condition, Provisioning, VolumeId, VolumeKind, VolumeSpec};
use nix::errno::Errno;
use nix::fcntl::{AtFlags, FallocateFlags, fallocate};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
};

use crate::environment::{self, Leaks, MIB, directory, id, store, wait_for_deferred_frees, xfs};
use crate::fixtures::TestStore;

/// The tolerance for what the file system uses for directories, inodes and quotas.
const TOLERANCE: u64 = MIB;

/// The file of another program takes what is reserved.
#[test]
fn taken_space_is_reported() {
    let (store, mounted, thin, directory) = (TestStore::open(), id("mounted"), id("thin"), directory());
    store.create(&mounted, &VolumeSpec::new(VolumeKind::Filesystem, Bytes(8 * MIB))).unwrap();
    let mut spec = VolumeSpec::new(VolumeKind::Block, Bytes(8 * MIB));
    spec.image.provisioning = Provisioning::Thin;
    store.create(&thin, &spec).unwrap();
    let is_taken = |id: &VolumeId| {
        let stats = store.stats(id).unwrap();
        match stats.condition {
            Condition::Healthy => {
                assert!(stats.available > Bytes(7 * MIB), "{stats:?}");
                false
            }
            Condition::Abnormal { reason: AbnormalReason::SpaceTaken, .. } => {
                assert!(stats.available <= Bytes(4 * MIB), "{stats:?}");
                true
            }
            Condition::Abnormal { .. } => panic!("{stats:?}"),
        }
    };
    let free = nix::sys::statvfs::statvfs(&xfs()).unwrap();
    let free = free.blocks_available() * free.fragment_size();
    let foreign = File::create(directory.path().join("foreign")).unwrap();
    let mut end = 0;
    for (left, taken) in [(16 * MIB, false), (4 * MIB, true)] {
        let next = i64::try_from(free - left).unwrap();
        fallocate(&foreign, FallocateFlags::empty(), end, next - end).unwrap();
        end = next;
        assert_eq!([&mounted, &thin].map(is_taken), [taken; 2], "{left} bytes are left");
    }
    drop(foreign);
    directory.close().unwrap();
    wait_for_deferred_frees();
    assert_eq!([&mounted, &thin].map(is_taken), [false; 2]);
}

/// A total without the image would give its reservation to other volumes.
#[test]
fn a_count_fails_if_an_image_cannot_be_read() {
    let (store, image) = (TestStore::open(), id("counted"));
    store.create(&image, &VolumeSpec::new(VolumeKind::Block, Bytes(MIB))).unwrap();
    let count_in_vain = || {
        let nofollow = u64::from(AtFlags::AT_SYMLINK_NOFOLLOW.bits().cast_unsigned());
        let nofollow = SeccompCondition::new(3, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, nofollow).unwrap();
        let rules = [(libc::SYS_newfstatat, vec![SeccompRule::new(vec![nofollow]).unwrap()])].into();
        let failing = SeccompAction::Errno(Errno::EIO as u32);
        let arch = std::env::consts::ARCH.try_into().unwrap();
        let filter = SeccompFilter::new(rules, SeccompAction::Allow, failing, arch).unwrap();
        seccompiler::apply_filter(&BpfProgram::try_from(filter).unwrap()).unwrap();
        environment::store().space().unwrap_err()
    };
    let error = std::thread::scope(|scope| scope.spawn(count_in_vain).join().unwrap());
    assert!(error.to_string().contains("count the space of image counted"), "{error}");
    environment::store().space().unwrap();
}

#[test]
fn a_count_excludes_blocks_being_freed() {
    const PIECES: i64 = 1000;
    let _leaks = Leaks::watch();
    let directory = directory();
    wait_for_deferred_frees();
    let before = store().space().unwrap().available;
    for _ in 0..3 {
        let path = directory.path().join("file");
        let file = File::create(&path).unwrap();
        // The image has many extents, so that freeing it takes some time.
        for piece in 0..PIECES {
            fallocate(&file, FallocateFlags::empty(), piece * 16384, 8192).unwrap();
        }
        drop(file);
        std::fs::remove_file(path).unwrap();
        let available = store().space().unwrap().available;
        assert!(available.0.abs_diff(before.0) < TOLERANCE, "{available} counted, {before} free before");
    }
}

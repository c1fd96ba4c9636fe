//! The environment of the tests, and the check that a test leaves nothing behind.

use std::ffi::OsStr;
use std::fs::File;
use std::num::NonZeroU64;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use loopfs::Bytes;
use loopfs::loop_device::LoopControl;
use loopfs::mount::table as mountinfo;
use loopfs::project_quota::{ProjectId, ProjectQuota};
use loopfs::volume_store::{
    ContentSource, SnapshotId, StoreOptions, Volume, VolumeId, VolumeKind, VolumeSpec, VolumeStore,
};

use crate::difference::assert_same;

pub(crate) const MIB: u64 = 1 << 20;
/// Long enough for any machine. A wait ends with its condition.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(120);

/// Returns the default value after `set` has changed it. It replaces the struct expression for types with `#[non_exhaustive]`.
pub(crate) fn default_with<T: Default>(set: impl FnOnce(&mut T)) -> T {
    let mut value = T::default();
    set(&mut value);
    value
}

pub(crate) fn path_from(variable: &str) -> PathBuf {
    let path = std::env::var_os(variable);
    PathBuf::from(
        path.unwrap_or_else(|| panic!("{variable} is not set: run `cargo harness test --lane kernel`")),
    )
}

/// Returns the number in a variable, if it is set.
pub(crate) fn number_from(variable: &str) -> Option<u64> {
    let text = std::env::var(variable).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{variable}={text}")))
}

/// Returns the seed of a random test.
pub(crate) fn seed() -> u64 {
    number_from("LOOPFS_TEST_SEED").expect("LOOPFS_TEST_SEED is not set")
}

pub(crate) fn xfs() -> PathBuf {
    path_from("LOOPFS_TEST_XFS")
}

pub(crate) fn xfs_without_quota() -> PathBuf {
    path_from("LOOPFS_TEST_XFS_NOQUOTA")
}

pub(crate) fn scratch() -> tempfile::TempDir {
    tempfile::tempdir_in(path_from("LOOPFS_TEST_SCRATCH")).expect("a scratch directory")
}

/// Creates a directory on the quota file system, outside the store.
pub(crate) fn directory() -> tempfile::TempDir {
    tempfile::tempdir_in(xfs()).expect("a directory on the XFS")
}

/// The resources that a test could leak. The test fails if it has others when this is dropped.
pub(crate) struct Leaks {
    before: Vec<String>,
}

impl Leaks {
    pub(crate) fn watch() -> Self {
        Self { before: Self::count() }
    }

    fn count() -> Vec<String> {
        let control = LoopControl::open().expect("loop control");
        let mut all: Vec<String> = control
            .list()
            .expect("loop devices")
            .devices
            .iter()
            .map(|status| format!("{:?}", status.binding))
            .collect();
        all.extend(
            mountinfo::read().expect("mounts").iter().map(|m| format!("mount {}", m.mount_point.display())),
        );
        wait_for_deferred_frees();
        let root = File::open(xfs()).expect("the XFS");
        let quota = quota(&root);
        let range = project(1)..=project(u32::MAX - 1);
        all.extend(quota.ids(range).map(|usage| format!("project {}", usage.expect("quota").id)));
        all
    }
}

impl Drop for Leaks {
    fn drop(&mut self) {
        // The message of a failed test must not be hidden.
        if !std::thread::panicking() {
            assert_same(&Self::count(), &self.before, "loop devices, mounts and project ids");
        }
    }
}

/// Waits for a condition, of which no event tells. Some last for less than a millisecond.
#[track_caller]
pub(crate) fn wait_until(holds: impl FnMut() -> bool) {
    assert!(holds_in_time(holds), "not within {TIMEOUT:?}");
}

/// Waits as [`wait_until`] does, and returns `false` if the condition does not hold in time.
pub(crate) fn holds_in_time(mut holds: impl FnMut() -> bool) -> bool {
    let start = Instant::now();
    while !holds() {
        if start.elapsed() > TIMEOUT {
            return false;
        }
        std::thread::sleep(Duration::from_micros(100));
    }
    true
}

/// Returns the indices of all loop devices, idle ones included.
pub(crate) fn loop_devices() -> Vec<u32> {
    let names = std::fs::read_dir("/sys/block").unwrap().map(|entry| entry.unwrap().file_name());
    names.filter_map(|name| name.to_str()?.strip_prefix("loop")?.parse().ok()).collect()
}

/// Opens the store as the first process after a reboot does, which counts the reservations from the volumes.
pub(crate) fn store() -> VolumeStore {
    drop(std::fs::remove_file(xfs().join(".loopfs/promised")));
    VolumeStore::open(&xfs(), StoreOptions::default()).expect("the store")
}

/// Waits until XFS has freed the space of all deleted files, including those of earlier tests. Without this, a count of the
/// space may still include them.
pub(crate) fn wait_for_deferred_frees() {
    // XFS completes the deferred frees of all projects, whichever project the call names.
    quota(&File::open(xfs()).expect("the XFS")).finish_inactivation(project(1)).expect("finish frees");
}

/// Returns the number of bytes that are available according to a new count of the reservations.
pub(crate) fn available_after_recount() -> u64 {
    store().space().unwrap().available.0
}

/// Compares two numbers of bytes. They may differ by a few blocks of directories, inodes and extent trees.
#[track_caller]
pub(crate) fn assert_close(found: u64, expected: u64) {
    assert!(found.abs_diff(expected) <= Bytes::MIB.0 / 2, "{found} instead of {expected}");
}

/// Returns a command that runs the calling test in a process of its own, with `value` in the environment
/// variable `variable`.
pub(crate) fn this_test_again(variable: &str, value: impl AsRef<OsStr>) -> Command {
    let thread = std::thread::current();
    let test = thread.name().expect("the thread has the name of its test");
    let mut command = Command::new(std::env::current_exe().expect("the test binary"));
    command
        .args([test, "--exact", "--nocapture"])
        .env(variable, value)
        .stdin(Stdio::null())
        .stdout(Stdio::piped());
    command
}

pub(crate) fn id(text: &str) -> VolumeId {
    VolumeId::parse(text).expect("a volume id")
}

pub(crate) fn snapshot_id(text: &str) -> SnapshotId {
    SnapshotId::parse(text).expect("a snapshot id")
}

pub(crate) fn project(id: u32) -> ProjectId {
    ProjectId::new(id).expect("a project id")
}

/// Returns the specification of a Filesystem volume with one inode per this many bytes.
pub(crate) fn directory_with(capacity: Bytes, bytes_per_inode: u64) -> VolumeSpec {
    let mut spec = VolumeSpec::new(VolumeKind::Filesystem, capacity);
    spec.directory.bytes_per_inode = NonZeroU64::new(bytes_per_inode).expect("not 0");
    spec
}

/// Returns the specification of a Filesystem volume that may have so few inodes that they reserve little space.
pub(crate) fn with_few_inodes(capacity: Bytes) -> VolumeSpec {
    directory_with(capacity, 1 << 22)
}

pub(crate) fn quota(file: &impl AsFd) -> ProjectQuota<'_> {
    ProjectQuota::of(file.as_fd())
}

/// Creates a Block volume with the content of another volume.
pub(crate) fn clone_image(
    store: &VolumeStore,
    source: &VolumeId,
    id: &VolumeId,
    capacity: Bytes,
) -> loopfs::Result<Volume> {
    store.clone_from(ContentSource::Volume(source), id, &VolumeSpec::new(VolumeKind::Block, capacity))
}

/// Creates a preallocated file for a loop device.
pub(crate) fn image(directory: &Path, name: &str, size: u64) -> File {
    let file =
        File::options().read(true).write(true).create_new(true).open(directory.join(name)).expect("an image");
    file.set_len(size).expect("the size");
    file
}

/// Returns `true` if the running kernel is this version or a later one. Tests use it where kernels behave
/// differently.
pub(crate) fn linux_at_least(major: u32, minor: u32) -> bool {
    let uname = nix::sys::utsname::uname().expect("uname");
    let release = uname.release().to_str().expect("a release in ASCII");
    let mut numbers = release.split(['.', '-']).map(|part| part.parse::<u32>().unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0)) >= (major, minor)
}

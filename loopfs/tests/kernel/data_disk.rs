//! Tests of the data disk against the kernel: check, mount, growth, and the disks that are not formatted.
//!
//! `LOOPFS_TEST_MKFS_XFS` is the program mkfs.xfs.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use loopfs::data_disk::{self, BlankDisk, DataDisk, DiskSource, LogState, MIN_SIZE};
use loopfs::loop_device::{Access, BackingRange, unmanaged};
use loopfs::mount::{table as mountinfo, unmount};
use loopfs::project_quota::Enforcement;
use loopfs::volume_store::{StoreOptions, VolumeStore};
use loopfs::{Bytes, ErrorKind};
use nix::mount::{MsFlags, mount};
use rstest::rstest;
use serde_json::Value;

use crate::environment::{Leaks, directory, path_from, scratch, xfs, xfs_without_quota};

const MIB: u64 = 1 << 20;
const SIZE: u64 = 320 * MIB;

/// A disk: a sparse image behind a loop device, which is a disk like any other to the kernel.
pub(crate) struct Disk {
    device: unmanaged::Device,
    path: PathBuf,
    image: tempfile::TempDir,
}

impl Disk {
    fn blank(size: u64) -> Self {
        let image = directory();
        let file =
            File::options().read(true).write(true).create_new(true).open(image.path().join("disk")).unwrap();
        file.set_len(size).unwrap();
        Self::attach(image, &file, Access::ReadWrite)
    }

    /// A disk with an XFS that takes no writes.
    fn write_protected() -> Self {
        let writable = Self::formatted(SIZE);
        let image = directory();
        fs::rename(writable.image.path().join("disk"), image.path().join("disk")).unwrap();
        let file = File::open(image.path().join("disk")).unwrap();
        Self::attach(image, &file, Access::ReadOnly)
    }

    fn attach(image: tempfile::TempDir, file: &File, access: Access) -> Self {
        let index = unmanaged::find_free().unwrap();
        let device = unmanaged::Device::open_index(index, access).unwrap();
        device.set_up(file, &unmanaged::Setup { access, ..Default::default() }).unwrap();
        Self { device, path: format!("/dev/loop{index}").into(), image }
    }

    /// A disk with an XFS that takes all of it.
    pub(crate) fn formatted(size: u64) -> Self {
        let disk = Self::blank(size);
        mkfs(&disk.path);
        disk
    }

    pub(crate) fn source(&self) -> DiskSource {
        DiskSource::Path(self.path.clone())
    }

    fn check(&self) -> DataDisk {
        DataDisk::check(&self.source()).unwrap()
    }

    fn log(&self) -> LogState {
        self.check().filesystem.unwrap().log
    }

    fn write(&self, offset: u64, bytes: &[u8]) {
        let file = File::options().write(true).open(&self.path).unwrap();
        file.write_all_at(bytes, offset).unwrap();
        file.sync_all().unwrap();
    }

    fn grow(&self, size: u64) {
        File::options().write(true).open(self.image.path().join("disk")).unwrap().set_len(size).unwrap();
        self.device.refresh_capacity().unwrap();
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        if let Err(error) = self.device.detach() {
            eprintln!("{error}");
        }
    }
}

/// A mount point, unmounted at the end even if the test fails.
struct Directory(tempfile::TempDir);

impl Directory {
    fn new() -> Self {
        Self(scratch())
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    fn unmount(&self) {
        assert!(unmount(self.path()).unwrap(), "{} was not mounted", self.path().display());
    }

    fn is_mounted(&self) -> bool {
        mountinfo::at(&mountinfo::read().unwrap(), self.path()).is_some()
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        if let Err(error) = unmount(self.path()) {
            eprintln!("{error}");
        }
    }
}

fn mkfs(device: &Path) {
    mkfs_with(&[], device);
}

fn mkfs_with(options: &[&str], device: &Path) {
    let output = Command::new(path_from("LOOPFS_TEST_MKFS_XFS"))
        .arg("-q")
        .args(options)
        .arg(device)
        .output()
        .expect("mkfs.xfs runs");
    assert!(output.status.success(), "{output:?}");
}

/// Runs `loopfs data-dir` with mkfs.xfs in its `PATH`.
fn tool(args: &[&str]) -> Output {
    let mkfs = path_from("LOOPFS_TEST_MKFS_XFS");
    Command::new(path_from("LOOPFS_TEST_TOOL"))
        .args(["--json", "data-dir"])
        .args(args)
        .env("PATH", mkfs.parent().unwrap())
        .output()
        .expect("the tool runs")
}

#[track_caller]
fn json(args: &[&str]) -> Value {
    let output = tool(args);
    assert!(output.status.success(), "{args:?}: {output:?}");
    serde_json::from_slice(&output.stdout).expect("one JSON document")
}

#[track_caller]
fn failure(args: &[&str]) -> String {
    let output = tool(args);
    assert_eq!(output.status.code(), Some(1), "{args:?}: {output:?}");
    String::from_utf8(output.stderr).unwrap()
}

fn text(path: &Path) -> &str {
    path.to_str().expect("UTF-8")
}

#[test]
fn a_blank_disk_is_formatted_mounted_with_quotas_and_expanded_after_it_grew() {
    let leaks = Leaks::watch();
    let (disk, target) = (Disk::blank(SIZE), Directory::new());
    let (device, directory) = (text(&disk.path).to_owned(), text(target.path()).to_owned());

    let formatted = json(&["format", &device, "--yes-format-this-disk", "--label", "node-data"]);
    assert_eq!(formatted["filesystem"]["label"], "node-data");
    assert_eq!(formatted["filesystem"]["log"], "clean");
    assert_eq!(formatted["problems"], Value::Array(Vec::new()));

    let mounted = json(&["mount", &device, &directory]);
    assert_eq!((&mounted["already_mounted"], &mounted["growth"]), (&Value::Bool(false), &Value::Null));
    assert_eq!(mounted["uuid"], formatted["filesystem"]["uuid"]);
    let checked = json(&["check", &directory]);
    assert_eq!(checked["mounts"][0]["quota"], "enforcing");
    let options = checked["mounts"][0]["options"].as_array().unwrap();
    for option in ["nodev", "nosuid", "noexec", "prjquota"] {
        assert!(options.iter().any(|found| found == option), "{option} is not in {options:?}");
    }
    assert_eq!(checked["filesystem"]["log"], "in_use");

    disk.grow(SIZE + 200 * MIB);
    assert_eq!(json(&["check", &device])["unused_bytes"], 200 * MIB);
    let again = json(&["mount", &device, &directory]);
    assert_eq!(again["already_mounted"], true);
    assert_eq!(again["growth"]["from_bytes"], SIZE);
    assert_eq!(again["growth"]["to_bytes"], SIZE + 200 * MIB);
    let once_more = json(&["mount", &device, &directory]);
    assert_eq!(once_more["growth"], Value::Null, "the second call finds nothing to expand");
    assert_eq!(mountinfo::read().unwrap().iter().filter(|m| m.mount_point == target.path()).count(), 1);

    target.unmount();
    drop((disk, target));
    leaks.check();
}

#[test]
fn a_disk_that_grew_while_it_was_not_mounted_is_expanded_by_the_mount() {
    let leaks = Leaks::watch();
    let (disk, target) = (Disk::formatted(SIZE), Directory::new());
    disk.grow(SIZE + 64 * MIB);
    assert_eq!(disk.check().unused(), Bytes(64 * MIB));
    let growth = data_disk::mount(&disk.source(), target.path()).unwrap().growth.unwrap();
    assert_eq!((growth.from, growth.to), (Bytes(SIZE), Bytes(SIZE + 64 * MIB)));
    target.unmount();
    assert_eq!(disk.check().filesystem.unwrap().size, Bytes(SIZE + 64 * MIB));
    drop((disk, target));
    leaks.check();
}

#[test]
fn a_file_system_that_was_not_unmounted_is_reported_and_recovered_by_the_next_mount() {
    let leaks = Leaks::watch();
    let (disk, target) = (Disk::formatted(SIZE), Directory::new());
    assert_eq!(disk.log(), LogState::Clean, "mkfs.xfs leaves a clean log");
    for round in 0..3 {
        let mounted = data_disk::mount(&disk.source(), target.path()).unwrap();
        assert_eq!(mounted.recovered, round > 0, "round {round}");
        assert_eq!(disk.log(), LogState::InUse);
        fs::write(target.path().join(format!("file-{round}")), "content").unwrap();
        let root = File::open(target.path()).unwrap();
        nix::unistd::syncfs(&root).unwrap();
        loopfs::fault_injection::shut_down_xfs(&root).unwrap();
        drop(root);
        target.unmount();
        assert_eq!(disk.log(), LogState::NeedsRecovery, "round {round}");
    }
    data_disk::mount(&disk.source(), target.path()).unwrap();
    assert_eq!(fs::read_to_string(target.path().join("file-2")).unwrap(), "content");
    target.unmount();
    assert_eq!(disk.log(), LogState::Clean);
    drop((disk, target));
    leaks.check();
}

#[test]
fn a_file_system_that_the_kernel_refuses_is_not_mounted_and_the_message_names_xfs_repair() {
    let leaks = Leaks::watch();
    let (disk, target) = (Disk::formatted(SIZE), Directory::new());
    // Only the kernel notices that the inodes of the root directory are missing: the superblock is intact.
    let root = File::open(&disk.path).unwrap();
    let mut inodes = [0; 8];
    root.read_exact_at(&mut inodes, 56).unwrap();
    drop(root);
    let root_inode = u64::from_be_bytes(inodes);
    disk.write(root_inode * 512, &[0; 16 << 10]);
    let error = data_disk::mount(&disk.source(), target.path()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Damaged, "{error}");
    assert!(error.to_string().contains("xfs_repair"), "{error}");
    assert!(!target.is_mounted());

    // A changed superblock is noticed before the kernel is asked.
    disk.write(144, &[0xff; 8]);
    let error = failure(&["mount", text(&disk.path), text(target.path())]);
    assert!(error.contains("wrong checksum") && error.contains("xfs_repair"), "{error}");
    assert!(disk.check().filesystem.unwrap().damaged);
    drop((disk, target));
    leaks.check();
}

#[rstest]
#[case::blank(0, &[], "no known signature")]
#[case::ext4(1080, b"\x53\xef", "ext2, ext3 or ext4 (at byte 1080)")]
#[case::gpt(512, b"EFI PART", "GPT partition table (at byte 512)")]
fn a_disk_without_xfs_is_not_mounted(#[case] offset: u64, #[case] bytes: &[u8], #[case] says: &str) {
    let leaks = Leaks::watch();
    let (disk, target) = (Disk::blank(SIZE), Directory::new());
    disk.write(offset, bytes);
    let error = data_disk::mount(&disk.source(), target.path()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::WrongFilesystem, "{error}");
    assert!(error.to_string().contains(says), "{error}");
    assert!(!target.is_mounted());
    drop((disk, target));
    leaks.check();
}

#[test]
fn a_mount_with_other_options_or_of_another_file_system_is_an_error_and_stays() {
    let leaks = Leaks::watch();
    let (disk, target) = (Disk::formatted(SIZE), Directory::new());
    let flags = MsFlags::MS_NODEV | MsFlags::MS_NOSUID;
    for (flags, data, says) in [
        (flags, "prjquota", "without noexec"),
        (flags | MsFlags::MS_NOEXEC, "noquota", "project limits are not enforced"),
        (flags | MsFlags::MS_NOEXEC, "pqnoenforce", "pqnoenforce"),
    ] {
        mount(Some(&disk.path), target.path(), Some("xfs"), flags, Some(data)).unwrap();
        let error = data_disk::mount(&disk.source(), target.path()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::AlreadyExists, "{error}");
        assert!(error.to_string().contains(says), "{error}");
        let problems = DataDisk::check_mounted(target.path()).unwrap().problems();
        assert!(problems.len() == 1 && problems[0].to_string().contains(says), "{problems:?}");
        target.unmount();
    }
    mount(Some("tmpfs"), target.path(), Some("tmpfs"), MsFlags::empty(), None::<&str>).unwrap();
    let error = data_disk::mount(&disk.source(), target.path()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::WrongFilesystem, "{error}");
    assert!(error.to_string().contains("tmpfs") && error.to_string().contains("umount"), "{error}");
    target.unmount();
    drop((disk, target));
    leaks.check();
}

#[test]
fn a_disk_that_is_mounted_elsewhere_without_quotas_is_not_mounted_a_second_time() {
    let leaks = Leaks::watch();
    let target = Directory::new();
    let plain = DataDisk::check_mounted(&xfs_without_quota()).unwrap();
    assert_eq!(plain.mounts[0].quota, Some(Enforcement::NoQuota));
    // The search by UUID finds the disk without udev.
    let source = format!("UUID={}", plain.filesystem.unwrap().uuid);
    let error = failure(&["mount", &source, text(target.path())]);
    assert!(
        error.contains(text(&xfs_without_quota())) && error.contains("unmount it there first"),
        "{error}"
    );
    assert!(!target.is_mounted());

    let data = DataDisk::check_mounted(&xfs()).unwrap();
    assert_eq!(data.problems(), []);
    let mounted = data_disk::mount(&DiskSource::Uuid(data.filesystem.unwrap().uuid), target.path()).unwrap();
    assert_eq!(mounted.device, data.device);
    target.unmount();
    drop(target);
    leaks.check();
}

#[test]
fn a_label_on_a_loop_device_is_not_found() {
    let leaks = Leaks::watch();
    let (disk, target) = (Disk::blank(SIZE), Directory::new());
    json(&["format", text(&disk.path), "--yes-format-this-disk", "--label", "tenant"]);
    let error = data_disk::mount(&DiskSource::Label("tenant".into()), target.path()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
    drop((disk, target));
    leaks.check();
}

#[test]
fn concurrent_mounts_of_one_disk_leave_one_mount() {
    let leaks = Leaks::watch();
    let (disk, target) = (Disk::formatted(SIZE), Directory::new());
    let results: Vec<bool> = std::thread::scope(|scope| {
        let mount = || data_disk::mount(&disk.source(), target.path()).unwrap().already_mounted;
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(mount)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(results.iter().filter(|already_mounted| !**already_mounted).count(), 1, "{results:?}");
    assert_eq!(mountinfo::read().unwrap().iter().filter(|m| m.mount_point == target.path()).count(), 1);
    target.unmount();
    drop((disk, target));
    leaks.check();
}

#[test]
fn a_disk_with_content_is_not_claimed_and_the_named_command_makes_it_blank() {
    let leaks = Leaks::watch();
    let disk = Disk::blank(SIZE);
    drop(BlankDisk::claim(&disk.path).unwrap());
    for (offset, bytes, says) in [
        (1080, &b"\x53\xef"[..], "ext2, ext3 or ext4 (at byte 1080)"),
        (0, b"LUKS\xba\xbe\0\x02", "LUKS2 (at byte 0)"),
        (SIZE - 512, b"EFI PART", "GPT backup partition table (at byte 335543808)"),
        (3 * MIB, b"x", "byte 3145728 is not zero"),
        (SIZE - 1, b"x", "byte 335544319 is not zero"),
    ] {
        disk.write(offset, bytes);
        let error = BlankDisk::claim(&disk.path).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::AlreadyExists, "{error}");
        let error = failure(&["format", text(&disk.path), "--yes-format-this-disk"]);
        assert!(error.contains(says), "{error}");
        // What blkdiscard of the message does: zeros in the range that it names.
        let words: Vec<&str> = error.split(' ').collect();
        let number = |name: &str| {
            let at = words.iter().position(|word| *word == name).unwrap_or_else(|| panic!("{error}"));
            words[at + 1].parse::<u64>().unwrap()
        };
        disk.write(number("--offset"), &vec![0; usize::try_from(number("--length")).unwrap()]);
        drop(BlankDisk::claim(&disk.path).unwrap());
    }
    drop(disk);
    leaks.check();
}

#[test]
fn an_interrupted_mkfs_is_named_by_the_next_format_and_by_check() {
    let leaks = Leaks::watch();
    let (disk, target) = (Disk::formatted(SIZE), Directory::new());
    // mkfs.xfs writes the superblock with this flag first, and clears it at its end.
    disk.write(126, &[1]);
    let device = text(&disk.path);
    let error = failure(&["format", device, "--yes-format-this-disk"]);
    assert!(error.contains("has not completed") && error.contains("blkdiscard"), "{error}");
    let error = failure(&["mount", device, text(target.path())]);
    assert!(error.contains("has not completed"), "{error}");
    disk.write(0, &vec![0; 4 << 20]);
    json(&["format", device, "--yes-format-this-disk"]);
    drop((disk, target));
    leaks.check();
}

#[test]
fn a_disk_in_use_is_not_claimed_and_the_error_says_by_what() {
    let leaks = Leaks::watch();
    let (disk, target) = (Disk::formatted(SIZE), Directory::new());
    data_disk::mount(&disk.source(), target.path()).unwrap();
    let error = BlankDisk::claim(&disk.path).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
    assert!(error.to_string().contains(text(target.path())), "{error}");
    target.unmount();
    disk.write(0, &vec![0; 4 << 20]);

    let link = target.path().join("by-label");
    std::os::unix::fs::symlink(&disk.path, &link).unwrap();
    let claimed = BlankDisk::claim(&link).unwrap();
    assert_eq!((claimed.path(), claimed.size()), (disk.path.as_path(), Bytes(SIZE)));
    let exclusive = || File::options().read(true).custom_flags(libc::O_EXCL).open(&disk.path);
    assert_eq!(exclusive().unwrap_err().raw_os_error(), Some(libc::EBUSY), "the claim is exclusive");
    let (_, lock) = claimed.release();
    drop(exclusive().expect("mkfs.xfs can open the device"));
    drop(lock);

    let held = exclusive().unwrap();
    let error = BlankDisk::claim(&disk.path).unwrap_err();
    assert!(error.to_string().contains("in use by another program"), "{error}");
    drop(held);
    drop((disk, target));
    leaks.check();
}

#[test]
fn a_disk_behind_a_loop_device_is_not_claimed() {
    let leaks = Leaks::watch();
    let disk = Disk::blank(SIZE);
    // The loop device begins behind the range that is read, and the kernel lets others claim the disk.
    let index = unmanaged::find_free().unwrap();
    let user = unmanaged::Device::open_index(index, Access::ReadWrite).unwrap();
    let file = File::options().read(true).write(true).open(&disk.path).unwrap();
    let range = BackingRange { offset: 8 * MIB, size_limit: None };
    user.set_up(&file, &unmanaged::Setup { range, ..Default::default() }).unwrap();
    drop(file);
    let error = BlankDisk::claim(&disk.path).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
    assert!(error.to_string().contains(&format!("is behind /dev/loop{index};")), "{error}");
    user.detach().unwrap();
    drop(user);
    drop(BlankDisk::claim(&disk.path).unwrap());
    drop(disk);
    leaks.check();
}

#[test]
fn a_disk_with_the_metadata_of_a_raid_behind_its_file_system_is_not_mounted() {
    let leaks = Leaks::watch();
    let (disk, target) = (Disk::formatted(SIZE), Directory::new());
    disk.grow(SIZE + 64 * MIB);
    disk.write(SIZE + 64 * MIB - (64 << 10), b"\xfc\x4e\x2b\xa9");
    let error = data_disk::mount(&disk.source(), target.path()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::AlreadyExists, "{error}");
    assert!(error.to_string().contains("MD RAID 0.90"), "{error}");
    assert!(!target.is_mounted());
    drop((disk, target));
    leaks.check();
}

#[test]
fn small_and_read_only_disks_are_refused() {
    let leaks = Leaks::watch();
    let small = Disk::blank(MIN_SIZE.0 - 4096);
    let error = BlankDisk::claim(&small.path).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
    assert!(error.to_string().contains("300 MiB"), "{error}");
    drop(small);

    let (disk, target) = (Disk::write_protected(), Directory::new());
    let error = data_disk::mount(&disk.source(), target.path()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ReadOnly, "{error}");
    assert!(disk.check().read_only);
    assert!(BlankDisk::claim(&disk.path).is_err());
    drop((disk, target));
    leaks.check();
}

#[test]
fn a_store_refuses_short_project_ids() {
    let leaks = Leaks::watch();
    let (disk, target) = (Disk::blank(SIZE), Directory::new());
    mkfs_with(&["-m", "crc=0", "-i", "projid32bit=0"], &disk.path);
    mount(Some(&disk.path), target.path(), Some("xfs"), MsFlags::empty(), Some("prjquota")).unwrap();
    let error = VolumeStore::open(target.path(), StoreOptions::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::WrongFilesystem, "{error}");
    assert!(error.to_string().contains("16 bits"), "{error}");
    assert!(unmount(target.path()).unwrap());
    drop((disk, target));
    leaks.check();
}

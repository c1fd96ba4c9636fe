//! Tests of `loopfs data-dir`: check, mount, growth, and the disks that are not formatted.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::process::{Command, Output};

use loopfs::loop_device::{Access, BackingRange, unmanaged};
use loopfs::mount::{table as mountinfo, unmount};
use nix::mount::{MsFlags, mount};
use rstest::rstest;
use serde_json::Value;

use crate::disk::{Disk, MIN_SIZE};
use crate::environment::{Leaks, path_from, scratch, xfs, xfs_without_quota};

const MIB: u64 = 1 << 20;
const SIZE: u64 = 320 * MIB;

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

/// Returns what `check` prints. It fails if there is a problem.
#[track_caller]
fn check(target: &Path) -> Value {
    let output = tool(&["check", text(target)]);
    serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{output:?}"))
}

/// Returns the UUID in what `check` prints, as an argument.
fn uuid_of(checked: &Value) -> String {
    format!("UUID={}", checked["filesystem"]["uuid"].as_str().unwrap())
}

/// Mounts a disk, which must succeed.
#[track_caller]
fn mounted(disk: &Disk, target: &Directory) -> Value {
    json(&["mount", text(&disk.path), text(target.path())])
}

/// Returns the message of a mount, which must fail and leave nothing mounted if nothing was.
#[track_caller]
fn mount_failure(disk: &Disk, target: &Directory) -> String {
    let before = target.is_mounted();
    let error = failure(&["mount", text(&disk.path), text(target.path())]);
    assert_eq!(target.is_mounted(), before, "{error}");
    error
}

#[track_caller]
fn format_failure(disk: &Path) -> String {
    failure(&["format", text(disk), "--yes-format-this-disk"])
}

/// The disk is formatted, mounted with quotas, and expanded after it grew.
#[test]
fn a_blank_disk_becomes_data_disk() {
    let _leaks = Leaks::watch();
    let (disk, target) = (Disk::blank(SIZE), Directory::new());
    let (device, directory) = (text(&disk.path).to_owned(), text(target.path()).to_owned());

    let formatted = json(&["format", &device, "--yes-format-this-disk", "--label", "node-data"]);
    assert_eq!(formatted["filesystem"]["label"], "node-data");
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

    disk.grow(SIZE + 200 * MIB);
    let grown = json(&["check", &device]);
    assert_eq!(
        (&grown["size_bytes"], &grown["filesystem"]["size_bytes"]),
        (&(SIZE + 200 * MIB).into(), &SIZE.into())
    );
    let again = json(&["mount", &device, &directory]);
    assert_eq!(again["already_mounted"], true);
    assert_eq!(again["growth"]["from_bytes"], SIZE);
    assert_eq!(again["growth"]["to_bytes"], SIZE + 200 * MIB);
    let once_more = json(&["mount", &device, &directory]);
    assert_eq!(once_more["growth"], Value::Null, "the second call finds nothing to expand");
    assert_eq!(mountinfo::read().unwrap().iter().filter(|m| m.mount_point == target.path()).count(), 1);

    target.unmount();
    drop((disk, target));
}

#[test]
fn mounting_expands_a_grown_disk() {
    let _leaks = Leaks::watch();
    let (disk, target) = (Disk::formatted(SIZE), Directory::new());
    disk.grow(SIZE + 64 * MIB);
    // Metadata of a RAID behind the file system, which the expansion would overwrite.
    let behind = SIZE + 64 * MIB - (64 << 10);
    disk.write(behind, b"\xfc\x4e\x2b\xa9");
    let error = mount_failure(&disk, &target);
    assert!(error.contains("MD RAID 0.90"), "{error}");
    disk.write(behind, &[0; 4]);
    let growth = &mounted(&disk, &target)["growth"];
    assert_eq!((&growth["from_bytes"], &growth["to_bytes"]), (&SIZE.into(), &(SIZE + 64 * MIB).into()));
    target.unmount();
    assert_eq!(check(&disk.path)["filesystem"]["size_bytes"], SIZE + 64 * MIB);
    drop((disk, target));
}

#[test]
fn mounting_recovers_an_unclean_filesystem() {
    let _leaks = Leaks::watch();
    let (disk, target) = (Disk::formatted(SIZE), Directory::new());
    // The disk is a loop device, and a search by UUID ignores those.
    let error = failure(&["mount", &uuid_of(&check(&disk.path)), text(target.path())]);
    assert!(error.contains("no block device of this machine"), "{error}");
    mounted(&disk, &target);
    fs::write(target.path().join("file"), "content").unwrap();
    let root = File::open(target.path()).unwrap();
    nix::unistd::syncfs(&root).unwrap();
    loopfs::fault_injection::shut_down_xfs(&root).unwrap();
    drop(root);
    target.unmount();
    mounted(&disk, &target);
    assert_eq!(fs::read_to_string(target.path().join("file")).unwrap(), "content");
    target.unmount();
    drop((disk, target));
}

/// Only the kernel notices the damage, and the error names `xfs_repair`.
#[test]
fn a_damaged_filesystem_is_not_mounted() {
    let _leaks = Leaks::watch();
    let (disk, target) = (Disk::formatted(SIZE), Directory::new());
    // Only the kernel notices that the inodes of the root directory are missing: the superblock is intact.
    let root = File::open(&disk.path).unwrap();
    let mut inodes = [0; 8];
    root.read_exact_at(&mut inodes, 56).unwrap();
    drop(root);
    let root_inode = u64::from_be_bytes(inodes);
    disk.write(root_inode * 512, &[0; 16 << 10]);
    let error = mount_failure(&disk, &target);
    assert!(error.contains("the kernel refuses the file system as damaged"), "{error}");
    assert!(error.contains("xfs_repair"), "{error}");

    // A changed superblock is noticed before the kernel is asked.
    disk.write(144, &[0xff; 8]);
    let error = mount_failure(&disk, &target);
    assert!(error.contains("wrong checksum") && error.contains("xfs_repair"), "{error}");
    assert_eq!(check(&disk.path)["filesystem"]["damaged"], true);
    drop((disk, target));
}

#[rstest]
#[case::blank(0, &[], "are zeros; if the disk is empty, format it")]
#[case::ext4(1080, b"\x53\xef", "has no XFS; give another disk")]
fn a_disk_without_xfs_stays_unmounted(#[case] offset: u64, #[case] bytes: &[u8], #[case] says: &str) {
    let _leaks = Leaks::watch();
    let (disk, target) = (Disk::blank(SIZE), Directory::new());
    disk.write(offset, bytes);
    let error = mount_failure(&disk, &target);
    assert!(error.contains(says), "{error}");
    drop((disk, target));
}

#[test]
fn an_unsuitable_mount_is_kept() {
    let _leaks = Leaks::watch();
    let (disk, target) = (Disk::formatted(SIZE), Directory::new());
    let flags = MsFlags::MS_NODEV | MsFlags::MS_NOSUID;
    for (flags, data, says) in [
        (flags, "prjquota", "without noexec"),
        (flags | MsFlags::MS_NOEXEC, "noquota", "project limits are not enforced"),
        (flags | MsFlags::MS_NOEXEC, "pqnoenforce", "pqnoenforce"),
    ] {
        mount(Some(&disk.path), target.path(), Some("xfs"), flags, Some(data)).unwrap();
        let error = mount_failure(&disk, &target);
        assert!(error.contains("already mounted, but") && error.contains(says), "{error}");
        let checked = check(target.path());
        let problems = checked["problems"].as_array().unwrap();
        assert!(problems.len() == 1 && problems[0].to_string().contains(says), "{problems:?}");
        target.unmount();
    }
    mount(Some("tmpfs"), target.path(), Some("tmpfs"), MsFlags::empty(), None::<&str>).unwrap();
    let error = mount_failure(&disk, &target);
    assert!(error.contains("tmpfs") && error.contains("umount"), "{error}");
    target.unmount();
    drop((disk, target));
}

/// The disk is mounted elsewhere without quotas, which a second mount cannot enable.
#[test]
fn a_disk_without_quotas_stays_unmounted() {
    let _leaks = Leaks::watch();
    let target = Directory::new();
    let plain = check(&xfs_without_quota());
    assert_eq!(plain["mounts"][0]["quota"], "off");
    // The search by UUID finds the disk without udev.
    let error = failure(&["mount", &uuid_of(&plain), text(target.path())]);
    assert!(
        error.contains(text(&xfs_without_quota())) && error.contains("unmount it there first"),
        "{error}"
    );
    assert!(!target.is_mounted());

    let data = json(&["check", text(&xfs())]);
    let mounted = json(&["mount", &uuid_of(&data), text(target.path())]);
    assert_eq!(mounted["device"], data["device"]);
    target.unmount();
    drop(target);
}

#[test]
fn concurrent_mounts_leave_one_mount() {
    let _leaks = Leaks::watch();
    let (disk, target) = (Disk::formatted(SIZE), Directory::new());
    let results: Vec<bool> = std::thread::scope(|scope| {
        let mount = || mounted(&disk, &target)["already_mounted"] == true;
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(mount)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(results.iter().filter(|already_mounted| !**already_mounted).count(), 1, "{results:?}");
    assert_eq!(mountinfo::read().unwrap().iter().filter(|m| m.mount_point == target.path()).count(), 1);
    target.unmount();
    drop((disk, target));
}

#[test]
fn disk_with_content_is_not_formatted() {
    let _leaks = Leaks::watch();
    let disk = Disk::blank(SIZE);
    // Each message names the first byte, so the last ones show that the disk was blank before.
    for offset in [0, 1080, 3 * MIB, SIZE - 512, SIZE - 1] {
        disk.write(offset, b"x");
        let error = format_failure(&disk.path);
        assert!(error.contains(&format!("byte {offset} is not zero")), "{error}");
        // What blkdiscard of the message does: zeros in the range that it names.
        let words: Vec<&str> = error.split(' ').collect();
        let number = |name: &str| {
            let at = words.iter().position(|word| *word == name).unwrap_or_else(|| panic!("{error}"));
            words[at + 1].parse::<u64>().unwrap()
        };
        disk.write(number("--offset"), &vec![0; usize::try_from(number("--length")).unwrap()]);
    }
    json(&["format", text(&disk.path), "--yes-format-this-disk"]);
    drop(disk);
}

#[test]
fn an_interrupted_mkfs_is_named() {
    let _leaks = Leaks::watch();
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
}

#[test]
fn a_used_disk_is_not_formatted() {
    let _leaks = Leaks::watch();
    let (disk, target) = (Disk::formatted(SIZE), Directory::new());
    mounted(&disk, &target);
    let error = format_failure(&disk.path);
    assert!(error.contains(&format!("mounted at {}", text(target.path()))), "{error}");
    target.unmount();
    disk.write(0, &vec![0; 4 << 20]);

    let held = File::options().read(true).custom_flags(libc::O_EXCL).open(&disk.path).unwrap();
    let error = format_failure(&disk.path);
    assert!(error.contains("in use by another program, or as swap"), "{error}");
    drop(held);

    let locked = File::open(&disk.path).unwrap();
    locked.lock().unwrap();
    let error = format_failure(&disk.path);
    assert!(error.contains("may be formatting it"), "{error}");
    drop(locked);

    let link = target.path().join("by-label");
    std::os::unix::fs::symlink(&disk.path, &link).unwrap();
    let formatted = json(&["format", text(&link), "--yes-format-this-disk"]);
    assert_eq!((&formatted["device"], &formatted["size_bytes"]), (&text(&disk.path).into(), &SIZE.into()));
    drop((disk, target));
}

#[test]
fn a_loop_device_prevents_formatting() {
    let _leaks = Leaks::watch();
    let disk = Disk::blank(SIZE);
    // The loop device begins behind the range that is read, and the kernel lets others claim the disk.
    let index = unmanaged::find_free().unwrap();
    let user = unmanaged::Device::open_index(index, Access::ReadWrite).unwrap();
    let file = File::options().read(true).write(true).open(&disk.path).unwrap();
    let range = BackingRange { offset: 8 * MIB, size_limit: None };
    user.set_up(&file, &unmanaged::Setup { range, ..Default::default() }).unwrap();
    drop(file);
    let error = format_failure(&disk.path);
    assert!(error.contains(&format!("is behind /dev/loop{index};")), "{error}");
    user.detach().unwrap();
    drop(user);
    json(&["format", text(&disk.path), "--yes-format-this-disk"]);
    drop(disk);
}

#[test]
fn unsuitable_disks_are_refused() {
    let _leaks = Leaks::watch();
    let small = Disk::blank(MIN_SIZE - 4096);
    let error = format_failure(&small.path);
    assert!(error.contains("300 MiB"), "{error}");
    drop(small);

    let (disk, target) = (Disk::write_protected(), Directory::new());
    let error = mount_failure(&disk, &target);
    assert!(error.contains("is read-only"), "{error}");
    assert_eq!(check(&disk.path)["read_only"], true);
    format_failure(&disk.path);
    drop((disk, target));
}

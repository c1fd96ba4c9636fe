//! Tests of `loopfs doctor` on machines that lack something.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::chown;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

use loopfs::loop_device::{Access, AttachOptions, Detach, LoopControl};
use nix::mount::{MsFlags, mount, umount};
use nix::sched::{CloneFlags, unshare};
use rstest::rstest;
use serde_json::Value;

use crate::device_cgroup::DeviceCgroup;
use crate::environment::{Leaks, directory, image, path_from, scratch, xfs, xfs_without_quota};
use crate::namespaces::{
    MAPPED, NOBODY, NodeAside, TARGET, in_namespace, no_loop_nodes, start_in_user_namespace, with_static_dev,
};

const MIB: u64 = 1 << 20;

/// The result of one run.
struct Report {
    code: Option<i32>,
    checks: BTreeMap<String, (String, String)>,
}

impl Report {
    /// Returns the status of a check, and its finding with the remedy.
    #[track_caller]
    fn of(&self, id: &str) -> (&str, &str) {
        let (status, text) = &self.checks[id];
        (status, text)
    }

    /// Returns the ids of the checks with this status.
    fn with(&self, status: &str) -> Vec<&str> {
        self.checks.iter().filter(|(_, (found, _))| found == status).map(|(id, _)| id.as_str()).collect()
    }
}

fn command() -> Command {
    let mut command = Command::new(path_from("LOOPFS_TEST_TOOL"));
    command.args(["--json", "doctor"]);
    command
}

fn doctor(data_dir: &Path, kubelet_dir: &Path) -> Report {
    run(command().args(directories(data_dir, kubelet_dir)))
}

fn directories<'a>(data_dir: &'a Path, kubelet_dir: &'a Path) -> [&'a OsStr; 4] {
    [OsStr::new("--data-dir"), data_dir.as_ref(), "--kubelet-dir".as_ref(), kubelet_dir.as_ref()]
}

fn run(command: &mut Command) -> Report {
    // Where /dev is nodev, /dev/null cannot be opened.
    let output = command.stdin(Stdio::piped()).output().expect("the tool runs");
    report(output.status.code(), &output.stdout)
}

fn report(code: Option<i32>, printed: &[u8]) -> Report {
    let shown = || String::from_utf8_lossy(printed).into_owned();
    let json: Value = serde_json::from_slice(printed).unwrap_or_else(|_| panic!("{}", shown()));
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let checks = json["checks"].as_array().unwrap().iter().map(|check| {
        let shown = format!("{}: {}", text(&check["found"]), text(&check["remedy"]));
        (text(&check["id"]), (text(&check["status"]), shown))
    });
    let report = Report { code, checks: checks.collect() };
    assert_eq!(report.code == Some(1), !report.with("missing").is_empty(), "{:?}", report.checks);
    assert_eq!(json["missing"], report.with("missing").len());
    report
}

/// The directory of a kubelet, in a mount of its own.
struct KubeletDirectory(tempfile::TempDir);

impl KubeletDirectory {
    fn with_propagation(propagation: MsFlags) -> Self {
        let directory = scratch();
        for name in ["pods", "plugins"] {
            std::fs::create_dir(directory.path().join(name)).unwrap();
        }
        let path = Some(directory.path());
        mount(path, directory.path(), None::<&str>, MsFlags::MS_BIND, None::<&str>).unwrap();
        propagate(directory.path(), propagation);
        Self(directory)
    }
}

impl Drop for KubeletDirectory {
    fn drop(&mut self) {
        umount(self.0.path()).ok();
    }
}

fn propagate(path: &Path, how: MsFlags) {
    mount(None::<&str>, path, None::<&str>, how, None::<&str>).unwrap();
}

/// Runs `work` in a mount namespace that lasts as long as its thread, and in which mounts have the propagation that they have here.
fn in_copied_namespace<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    let apart = || {
        unshare(CloneFlags::CLONE_NEWNS).unwrap();
        work()
    };
    std::thread::scope(|scope| scope.spawn(apart).join().unwrap())
}

#[test]
fn a_node_with_everything_lacks_nothing() {
    let _leaks = Leaks::watch();
    drop(LoopControl::open().unwrap());
    let kubelet = KubeletDirectory::with_propagation(MsFlags::MS_SHARED);
    let report = doctor(&xfs(), kubelet.0.path());
    drop(kubelet);
    assert_eq!(report.code, Some(0), "{:?}", report.checks);
    assert_eq!(report.with("missing"), [""; 0], "{:?}", report.checks);
    // The test machine has neither udev nor LVM. Its data file system may be nearly full after other tests.
    const LACKING: [&str; 2] = ["udev-rule", "lvm-filter"];
    let open: Vec<_> = report.with("not_checked").into_iter().filter(|id| !LACKING.contains(id)).collect();
    assert_eq!(open, [""; 0], "{:?}", report.checks);
    let warnings: Vec<_> = report.with("warning").into_iter().filter(|id| *id != "data-dir-space").collect();
    assert_eq!(warnings, [""; 0], "{:?}", report.checks);
}

#[test]
fn an_unsuitable_data_directory_is_missing() {
    let kubelet = scratch();
    let report = doctor(&xfs_without_quota(), kubelet.path());
    let (status, text) = report.of("data-dir-quota");
    assert!(status == "missing" && text.contains("prjquota") && text.contains("umount"), "{status} {text}");
    assert_eq!(report.of("data-dir").0, "ok", "it is an XFS");
    assert_eq!(report.of("xfs-quota").0, "ok", "the kernel has quotas");
    let nothing = scratch();
    let report = doctor(nothing.path(), kubelet.path());
    let (status, text) = report.of("data-dir");
    assert!(status == "missing" && text.contains("loopfs data-dir mount"), "{status} {text}");
    assert_eq!(report.of("data-dir-quota").0, "not_checked");
}

/// A data directory that is mounted without nodev is only a warning.
#[test]
fn read_only_data_is_missing() {
    let kubelet = scratch();
    let remounted = |flags: MsFlags| {
        in_namespace(|| {
            let nothing = None::<&str>;
            let flags = MsFlags::MS_REMOUNT | MsFlags::MS_BIND | flags;
            mount(nothing, &xfs(), nothing, flags, nothing).unwrap();
            doctor(&xfs(), kubelet.path())
        })
    };
    let report = remounted(MsFlags::MS_RDONLY);
    assert_eq!(report.of("data-dir-options").0, "missing", "{:?}", report.checks);
    let report = remounted(MsFlags::MS_NOSUID | MsFlags::MS_NOEXEC);
    let (status, text) = report.of("data-dir-options");
    assert!(status == "warning" && text.contains("without nodev"), "{status} {text}");
}

#[rstest]
#[case::private(&[MsFlags::MS_PRIVATE], "is private", "mount --make-rshared")]
#[case::receiving(&[MsFlags::MS_SLAVE], "propagates none", "mount --make-rshared")]
#[case::service_with_private_mounts(&[MsFlags::MS_SLAVE, MsFlags::MS_SHARED], "shared with no other", "PrivateMounts=")]
fn an_unpropagated_kubelet_directory_is_missing(
    #[case] propagation: &[MsFlags],
    #[case] reason: &str,
    #[case] remedy: &str,
) {
    let kubelet = KubeletDirectory::with_propagation(MsFlags::MS_SHARED);
    let path = kubelet.0.path();
    let report = in_copied_namespace(|| {
        propagation.iter().for_each(|how| propagate(path, *how));
        doctor(&xfs(), path)
    });
    assert_eq!(report.with("missing"), ["propagation"], "{:?}", report.checks);
    let (_, text) = report.of("propagation");
    assert!(text.contains(reason) && text.contains(remedy), "{text}");
    assert!(text.contains(path.to_str().unwrap()), "{text}");
}

/// Outside of containers, a private mount of the directory is only a warning.
#[test]
fn a_shared_kubelet_directory_is_ok() {
    let kubelet = KubeletDirectory::with_propagation(MsFlags::MS_SHARED);
    let report = in_copied_namespace(|| doctor(&xfs(), kubelet.0.path()));
    assert_eq!(report.of("propagation").0, "ok", "{:?}", report.checks);
    propagate(kubelet.0.path(), MsFlags::MS_PRIVATE);
    let report = doctor(&xfs(), kubelet.0.path());
    let (status, text) = report.of("propagation");
    assert!(status == "warning" && text.contains("outside containers"), "{status} {text}");
}

/// If no device node can be created there, the check reports missing.
#[test]
fn a_static_dev_is_a_warning() {
    let kubelet = scratch();
    drop(LoopControl::open().unwrap());
    let report = with_static_dev(no_loop_nodes, MsFlags::empty(), || {
        let report = doctor(&xfs(), kubelet.path());
        let names: Vec<_> =
            std::fs::read_dir("/dev").unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert!(
            !names.iter().any(|name| name.to_string_lossy().contains("loop")),
            "doctor created {names:?}"
        );
        report
    });
    let (status, text) = report.of("dev");
    assert!(status == "warning" && text.contains("tmpfs") && text.contains("extraMount"), "{status} {text}");
    let (status, text) = report.of("loop-control");
    assert!(status == "not_checked" && text.contains("c 10:237 rwm"), "{status} {text}");
    let report = with_static_dev(no_loop_nodes, MsFlags::MS_NODEV, || doctor(&xfs(), kubelet.path()));
    let (status, text) = report.of("dev");
    assert!(status == "missing" && text.contains("nodev"), "{status} {text}");
    assert_eq!(report.of("loop-control").0, "missing");
}

/// Runs `work` in a device cgroup with the rules of a container and these further ones. In a container, nodes of all devices can be
/// created, and only those of memory devices opened.
fn with_device_rules<T: Send>(further: &[&str], work: impl FnOnce() -> T + Send) -> T {
    let allowed = ["c *:* m", "b *:* m", "c 1:* rwm"].iter().chain(further);
    let allowed = allowed.map(|rule| ("devices.allow", *rule));
    let rules: Vec<_> = [("devices.deny", "a")].into_iter().chain(allowed).collect();
    in_namespace(|| DeviceCgroup::with_rules(&rules).run(work))
}

#[test]
fn denied_loop_devices_are_never_ok() {
    let _leaks = Leaks::watch();
    let (kubelet, directory) = (scratch(), directory());
    let image = image(directory.path(), "image", MIB);
    let control = LoopControl::open().unwrap();
    let device = control.attach(image.as_fd(), &AttachOptions::new(Access::ReadWrite)).unwrap();
    let doctor = || doctor(&xfs(), kubelet.path());
    let own_dev = with_device_rules(&[], || with_static_dev(no_loop_nodes, MsFlags::empty(), doctor));
    let denied = with_device_rules(&[], doctor);
    let control_only = with_device_rules(&["c 10:237 rwm"], doctor);
    let allowed = with_device_rules(&["c 10:237 rwm", "b 7:* rwm"], doctor);
    assert_eq!(control.detach(device).unwrap(), Detach::Detached);
    // A rule for a device without a node cannot be seen.
    let (status, text) = own_dev.of("loop-control");
    assert!(status == "not_checked" && text.contains("c 10:237 rwm"), "{status} {text}");
    let (status, text) = own_dev.of("dev");
    assert!(status == "warning" && text.contains("b 7:* rwm"), "{status} {text}");
    for (report, id) in [(&denied, "loop-control"), (&denied, "dev"), (&control_only, "dev")] {
        let (status, text) = report.of(id);
        assert!(status == "missing" && text.contains("b 7:* rwm"), "{id}: {status} {text}");
    }
    assert_eq!(control_only.of("loop-control").0, "ok");
    for id in ["loop-control", "dev"] {
        assert_eq!(allowed.of(id).0, "ok", "{:?}", allowed.of(id));
    }
}

#[test]
fn a_device_without_node_is_missing() {
    let _leaks = Leaks::watch();
    let (kubelet, directory) = (scratch(), directory());
    let image = image(directory.path(), "image", MIB);
    let control = LoopControl::open().unwrap();
    let device = control.attach(image.as_fd(), &AttachOptions::new(Access::ReadWrite)).unwrap();
    let aside = NodeAside::of(&device.path());
    let report = doctor(&xfs(), kubelet.path());
    drop(aside);
    let (status, text) = report.of("dev");
    let remedy = format!("mknod -m 0660 {} b", device.path().display());
    assert!(status == "missing" && text.contains(&remedy), "{status} {text}");
    assert_eq!(control.detach(device).unwrap(), Detach::Detached);
}

/// A user namespace that maps every id to itself is not the initial one.
#[test]
fn an_identity_map_is_not_initial() {
    if std::env::var_os(TARGET).is_some() {
        unshare(CloneFlags::CLONE_NEWUSER).unwrap();
        // The parent maps the ids when it has read this line.
        println!("{MAPPED}");
        std::io::stdin().read_line(&mut String::new()).unwrap();
        let map = std::fs::read_to_string("/proc/self/uid_map").unwrap();
        assert!(map.split_whitespace().eq(["0", "0", "4294967295"]), "{map}");
        // The user may start no other process, so the tool replaces this one.
        panic!("{}", command().exec());
    }
    let (mut child, mut output) = start_in_user_namespace(Path::new("/"));
    for map in ["uid_map", "gid_map"] {
        std::fs::write(format!("/proc/{}/{map}", child.id()), "0 0 4294967295").unwrap();
    }
    writeln!(child.stdin.take().unwrap()).unwrap();
    let mut printed = Vec::new();
    output.read_to_end(&mut printed).unwrap();
    let report = report(child.wait().unwrap().code(), &printed);
    assert_eq!(report.of("user-namespace").0, "missing", "{:?}", report.checks);
}

#[test]
fn missing_capabilities_leave_checks_open() {
    let kubelet = directory();
    chown(kubelet.path(), Some(NOBODY), Some(NOBODY)).unwrap();
    let (data, kubelet_dir) = (xfs(), kubelet.path());
    let report = run(command().args(directories(&data, kubelet_dir)).uid(NOBODY).gid(NOBODY));
    let status = |id: &str| report.of(id).0;
    assert_eq!(status("capabilities"), "missing", "{:?}", report.checks);
    for id in ["loop-control", "system-calls"] {
        assert_eq!(status(id), "not_checked", "{:?}", report.checks);
    }
    for id in ["user-namespace", "kernel", "xfs-quota", "loop-driver", "data-dir-quota", "data-dir-features"]
    {
        assert_eq!(status(id), "ok", "{id}: {:?}", report.checks);
    }
    // The directory of the kubelet is below the parent of the data directory.
    assert_eq!(status("data-dir"), "warning", "{:?}", report.checks);
}

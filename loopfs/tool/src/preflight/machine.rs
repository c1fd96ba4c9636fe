//! The judgement of the kernel, of `/dev` and `/sys`, and of this process.

use nix::errno::Errno;

use super::check::Check;
use super::facts::{ControlState, Dev, DriverState, Facts};

const SYS_ADMIN: (u32, &str) = (21, "CAP_SYS_ADMIN");
const MKNOD: (u32, &str) = (27, "CAP_MKNOD");
/// Capabilities without which some operations fail.
const FURTHER: [(u32, &str, &str); 5] = [
    (0, "CAP_CHOWN", "directories of other users are not cloned"),
    (1, "CAP_DAC_OVERRIDE", "files of other users are not removed"),
    (3, "CAP_FOWNER", "files of other users are not removed from sticky directories"),
    (MKNOD.0, MKNOD.1, "device nodes are not cloned, and none is created in a /dev without devtmpfs"),
    (28, "CAP_LEASE", "loop devices of other programs on files of other users are not noticed"),
];

/// The remedy if the device cgroup of a container denies loop devices.
const ALLOW_DEVICES: &str =
    "run the container privileged, or allow the devices `c 10:237 rwm` and `b 7:* rwm` to it";
/// The remedy if a container has a `/dev` of its own.
const HOST_DEV: &str = "give the container the host's /dev (Docker: `-v /dev:/dev`; kind: an extraMount of /dev; Kubernetes: a \
                        hostPath volume)";

/// The remedy if the loop driver does not respond, as the library has it.
const NO_DRIVER_REMEDY: &str =
    "load the loop module (modprobe loop), and let this process see the host's /dev";

/// The version with the newest of the system calls that loopfs cannot do without.
const FIRST_SUPPORTED: (u32, u32) = (5, 14);
/// The features of Linux that loopfs uses: the version, the name, and `true` if loopfs works without it.
const FEATURES: [((u32, u32), &str, bool); 5] = [
    ((5, 8), "LOOP_CONFIGURE for loop devices", false),
    ((5, 12), "mount_setattr for mounts", false),
    (FIRST_SUPPORTED, "quotactl_fd for project quotas", false),
    ((5, 15), "sequence numbers that tell a reused loop device from the former one", true),
    ((6, 1), "the alignment of direct I/O (statx)", true),
];

pub(super) fn judge(facts: &Facts) -> Vec<Check> {
    vec![
        kernel(&facts.release),
        xfs(facts),
        xfs_quota(facts.xfs_quota),
        loop_driver(facts),
        loop_control(facts),
        dev(facts),
        sysfs(facts.sysfs_writable),
        system_calls(facts),
        capabilities(facts.capabilities),
        user_namespace(facts.initial_user_namespace),
        leases(facts.leases),
    ]
}

/// Returns the first two numbers of a release.
fn version(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|character: char| !character.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

fn kernel(release: &str) -> Check {
    const ID: &str = "kernel";
    let Some(version) = version(release) else {
        return Check::not_checked(ID, format!("the release {release:?} of the kernel has no version"));
    };
    let lacking = FEATURES.iter().filter(|(needed, ..)| version < *needed);
    let names: Vec<_> =
        lacking.clone().map(|((major, minor), name, _)| format!("{name} ({major}.{minor})")).collect();
    let found = match names.is_empty() {
        true => format!("Linux {release}"),
        false => format!("Linux {release}, which lacks {}", names.join(", ")),
    };
    match (names.is_empty(), lacking.clone().all(|(.., optional)| *optional)) {
        (true, _) => Check::ok(ID, found),
        (false, true) => Check::warning(ID, found, "boot Linux 6.1 or later"),
        (false, false) => Check::missing(ID, found, "boot Linux 5.14 or later"),
    }
}

fn xfs(facts: &Facts) -> Check {
    const ID: &str = "xfs";
    const REMEDY: &str = "install the kernel's XFS module, or boot a kernel with CONFIG_XFS_FS";
    // Then the kernel has XFS, whatever else is visible of it.
    if facts.data_dir.as_ref().is_some_and(|directory| directory.filesystem.is_some()) {
        return Check::ok(ID, "an XFS is mounted");
    }
    driver(ID, "xfs", facts.xfs, REMEDY)
}

/// Judges a driver with a module.
fn driver(id: &'static str, module: &str, state: DriverState, remedy: &str) -> Check {
    match state {
        DriverState::Registered => Check::ok(id, format!("the kernel has the driver {module}")),
        DriverState::Module => {
            Check::ok(id, format!("the module {module} is installed; the kernel loads it at its first use"))
        }
        DriverState::Absent => {
            Check::missing(id, format!("the kernel has neither the driver {module} nor its module"), remedy)
        }
        DriverState::Unknown => Check::not_checked(
            id,
            format!("the driver {module} is not loaded, and /lib/modules of this kernel is not visible here"),
        )
        .with_remedy(format!("load it with `modprobe {module}` on the host, or check there")),
    }
}

fn xfs_quota(quota: Option<bool>) -> Check {
    const ID: &str = "xfs-quota";
    match quota {
        Some(true) => Check::ok(ID, "the kernel's XFS has quotas"),
        Some(false) => Check::missing(
            ID,
            "the kernel was built without quotas of XFS (CONFIG_XFS_QUOTA), so it refuses the mount option prjquota",
            "boot a kernel with CONFIG_XFS_QUOTA=y, such as that of the distribution; in a virtual machine if it has to be",
        ),
        None => {
            Check::not_checked(ID, "XFS is not loaded, and no configuration of this kernel is visible here")
                .with_remedy("load it with `modprobe xfs` on the host, and check again")
        }
    }
}

fn loop_driver(facts: &Facts) -> Check {
    const ID: &str = "loop-driver";
    const REMEDY: &str = "install the kernel's loop module, or boot a kernel with CONFIG_BLK_DEV_LOOP";
    if let (DriverState::Registered, Some(parts @ 1..)) = (facts.loop_driver, facts.max_part) {
        let found =
            format!("the kernel has the driver loop, with max_part={parts}, which leaves fewer devices");
        return Check::ok(ID, found);
    }
    driver(ID, "loop", facts.loop_driver, REMEDY)
}

fn loop_control(facts: &Facts) -> Check {
    const ID: &str = "loop-control";
    match &facts.control {
        ControlState::Responds => Check::ok(ID, "the loop driver responds at /dev/loop-control"),
        ControlState::NotOpened => {
            Check::not_checked(ID, "/dev/loop-control exists, and to open it would load the loop module")
        }
        ControlState::NoNode => no_control(ID, facts),
        ControlState::Fails(failure) if failure.is_denied() && !has(facts.capabilities, SYS_ADMIN) => {
            Check::not_checked(ID, &failure.message).with_remedy("check as root")
        }
        // Root is refused by the device cgroup.
        ControlState::Fails(failure) if failure.is_denied() => {
            Check::missing(ID, &failure.message, ALLOW_DEVICES)
        }
        ControlState::Fails(failure) => Check::missing(ID, &failure.message, NO_DRIVER_REMEDY),
    }
}

/// Judges a `/dev` without the node of the control device.
fn no_control(id: &'static str, facts: &Facts) -> Check {
    const FOUND: &str = "/dev/loop-control does not exist";
    let in_devtmpfs = facts.dev.as_ref().is_some_and(Dev::is_devtmpfs);
    match facts.loop_driver {
        DriverState::Registered if in_devtmpfs => Check::missing(
            id,
            format!("{FOUND}, although the kernel has the loop driver: a program has removed it"),
            "run `mknod -m 0660 /dev/loop-control c 10 237`",
        ),
        DriverState::Registered | DriverState::Module | DriverState::Unknown if !can_create_nodes(facts) => {
            Check::missing(id, FOUND, NO_DRIVER_REMEDY)
        }
        DriverState::Absent => Check::missing(id, FOUND, NO_DRIVER_REMEDY),
        DriverState::Module if in_devtmpfs => Check::ok(
            id,
            format!("{FOUND} yet; the kernel creates it when loopfs makes it load the loop module"),
        ),
        DriverState::Unknown if in_devtmpfs => {
            Check::not_checked(id, format!("{FOUND}; the kernel creates it when the loop module is loaded"))
                .with_remedy("load it with `modprobe loop` on the host, or check there")
        }
        // Without a node, nothing shows the rules of the device cgroup.
        DriverState::Registered | DriverState::Module | DriverState::Unknown => Check::not_checked(
            id,
            format!(
                "{FOUND}; loopfs creates it if the device cgroup allows that, which cannot be seen before"
            ),
        )
        .with_remedy(ALLOW_DEVICES),
    }
}

fn has(capabilities: Option<u64>, (bit, _): (u32, &str)) -> bool {
    capabilities.is_none_or(|all| all & 1 << bit != 0)
}

/// Returns `true` if this process may create nodes in `/dev`, unless a device cgroup denies it.
fn can_create_nodes(facts: &Facts) -> bool {
    let writable = facts.dev.as_ref().is_none_or(|dev| !dev.has("ro") && !dev.has("nodev"));
    writable && has(facts.capabilities, MKNOD) && facts.initial_user_namespace != Some(false)
}

impl Dev {
    fn is_devtmpfs(&self) -> bool {
        self.fs_type == "devtmpfs"
    }

    fn has(&self, option: &str) -> bool {
        self.options.iter().any(|found| found == option)
    }
}

fn dev(facts: &Facts) -> Check {
    const ID: &str = "dev";
    let Some(dev) = &facts.dev else {
        return Check::not_checked(ID, "the mount at /dev is not in /proc/thread-self/mountinfo");
    };
    if dev.has("nodev") {
        let found = format!("/dev is a {} mounted nodev, so no device can be opened", dev.fs_type);
        return Check::missing(ID, found, HOST_DEV);
    }
    if !dev.denied.is_empty() {
        let found = format!("the device cgroup of this container denies {}", some_of(&dev.denied));
        return Check::missing(ID, found, ALLOW_DEVICES);
    }
    if dev.is_devtmpfs() { kernel_dev(ID, dev) } else { copied_dev(ID, dev, facts) }
}

/// Judges a `/dev` in which the kernel creates nodes. loopfs creates none there.
fn kernel_dev(id: &'static str, dev: &Dev) -> Check {
    let Some(first) = dev.without_node.first() else {
        return Check::ok(id, "/dev is the devtmpfs of the kernel, which creates the nodes of loop devices");
    };
    let found = |names: &[String]| {
        let lacking = some_of(names);
        format!(
            "/dev is a devtmpfs, and a program has removed the nodes of {lacking}, which loopfs cannot open"
        )
    };
    let remedy = |name: &str| {
        format!("create each node again: `mknod -m 0660 /dev/{name} b $(tr : ' ' </sys/block/{name}/dev)`")
    };
    match dev.chosen_without_node.first() {
        Some(first) => Check::missing(id, found(&dev.chosen_without_node), remedy(first)),
        None => {
            let found = format!("{}; loopfs attaches files to other devices", found(&dev.without_node));
            Check::warning(id, found, remedy(first))
        }
    }
}

/// Judges a `/dev` that is a copy.
fn copied_dev(id: &'static str, dev: &Dev, facts: &Facts) -> Check {
    let Dev { fs_type, devices, usable, .. } = dev;
    let lacking = dev.without_node.len();
    let found = format!(
        "/dev is a {fs_type}: a copy, in which the kernel creates no nodes of later loop devices; {lacking} of {devices} \
         devices have none"
    );
    if can_create_nodes(facts) {
        let remedy = format!(
            "loopfs creates the nodes that it needs if the device cgroup allows `b 7:* rwm`, but losetup(8) and the kubelet \
             create none: {HOST_DEV}"
        );
        Check::warning(id, found, remedy)
    } else if *usable > 0 {
        let found =
            format!("{found}; this process may not create nodes, so loopfs can use {usable} devices only");
        Check::warning(id, found, HOST_DEV)
    } else {
        let found = format!(
            "{found}; this process may not create nodes, and no device that loopfs would choose has one"
        );
        Check::missing(id, found, HOST_DEV)
    }
}

/// Returns the first names, and the number of the others.
fn some_of(names: &[String]) -> String {
    const SHOWN: usize = 3;
    let mut shown: Vec<_> = names.iter().take(SHOWN).cloned().collect();
    if names.len() > SHOWN {
        shown.push(format!("{} more", names.len() - SHOWN));
    }
    shown.join(", ")
}

fn sysfs(writable: Option<bool>) -> Check {
    const ID: &str = "sysfs";
    match writable {
        Some(true) => Check::ok(ID, "/sys is mounted and writable"),
        Some(false) => Check::warning(
            ID,
            "/sys/devices/virtual is read-only: discards of preallocated Block volumes cannot be disabled, so they are not attached",
            "mount the host's /sys/devices/virtual at the same path of the container, as the DaemonSet does",
        ),
        None => Check::missing(ID, "sysfs is not mounted at /sys", "run `mount -t sysfs sysfs /sys`"),
    }
}

fn system_calls(facts: &Facts) -> Check {
    const ID: &str = "system-calls";
    let with = |errno: Errno| -> Vec<&str> {
        facts.calls.iter().filter(|(_, found)| *found == errno).map(|(name, _)| *name).collect()
    };
    let (absent, denied) = (with(Errno::ENOSYS), with(Errno::EPERM));
    let filter = if facts.seccomp { "; a seccomp filter is active" } else { "" };
    if !absent.is_empty() {
        let found = format!("the kernel has no {}{filter}", absent.join(", "));
        return Check::missing(ID, found, remedy_of_absent_calls(facts));
    }
    if denied.is_empty() {
        let names: Vec<_> = facts.calls.iter().map(|(name, _)| *name).collect();
        return Check::ok(ID, format!("{} are available{filter}", names.join(", ")));
    }
    let found = format!("{} returns EPERM{filter}", denied.join(", "));
    if !has(facts.capabilities, SYS_ADMIN) {
        // The kernel itself refuses them without the capability.
        return Check::not_checked(ID, format!("{found}, as without CAP_SYS_ADMIN"))
            .with_remedy("check as root");
    }
    Check::missing(
        ID,
        found,
        "allow these calls in the seccomp profile (Docker: `--security-opt seccomp=unconfined`; Kubernetes: seccompProfile)",
    )
}

fn remedy_of_absent_calls(facts: &Facts) -> String {
    // quotactl_fd exists only with CONFIG_QUOTACTL.
    let boot = match version(&facts.release) {
        Some(version) if version >= FIRST_SUPPORTED => {
            "boot a kernel that was built with them, such as that of the distribution (CONFIG_XFS_QUOTA=y)"
        }
        _ => "boot Linux 5.14 or later",
    };
    match facts.seccomp {
        true => format!(
            "allow these calls in the seccomp profile (Docker: `--security-opt seccomp=unconfined`), or {boot}"
        ),
        false => boot.to_owned(),
    }
}

fn capabilities(effective: Option<u64>) -> Check {
    const ID: &str = "capabilities";
    if effective.is_none() {
        return Check::not_checked(ID, "/proc/thread-self/status cannot be read").with_remedy("mount /proc");
    }
    if !has(effective, SYS_ADMIN) {
        return Check::missing(
            ID,
            "this process has no CAP_SYS_ADMIN, which mounts, project quotas and loop devices need",
            "run as root; in a container, with `--cap-add SYS_ADMIN` or privileged",
        );
    }
    let lacking: Vec<_> = FURTHER.iter().filter(|(bit, name, _)| !has(effective, (*bit, name))).collect();
    if lacking.is_empty() {
        return Check::ok(ID, "this process has the capabilities that loopfs uses");
    }
    let effects: Vec<_> = lacking.iter().map(|(_, name, effect)| format!("{name} ({effect})")).collect();
    let names: Vec<_> = lacking.iter().map(|(_, name, _)| name.trim_start_matches("CAP_")).collect();
    Check::warning(
        ID,
        format!("this process lacks {}", effects.join(", ")),
        format!("add the capabilities to the container: {}", names.join(", ")),
    )
}

fn user_namespace(initial: Option<bool>) -> Check {
    const ID: &str = "user-namespace";
    match initial {
        Some(true) => Check::ok(ID, "the process is in the initial user namespace"),
        Some(false) => Check::missing(
            ID,
            "the process is in a user namespace, in which the kernel allows neither quotas nor loop devices",
            "run it in the initial user namespace: not in a rootless engine, Docker with `--userns=host`, Kubernetes with \
             hostUsers: true",
        ),
        None => Check::not_checked(ID, "/proc/thread-self/ns/user cannot be read").with_remedy("mount /proc"),
    }
}

fn leases(enabled: Option<bool>) -> Check {
    const ID: &str = "file-leases";
    match enabled {
        Some(true) => Check::ok(ID, "the kernel grants leases of files"),
        Some(false) => Check::warning(
            ID,
            "leases of files are disabled, so loopfs does not notice that another program attaches an image a second time",
            "run `sysctl fs.leases-enable=1`",
        ),
        None => Check::not_checked(ID, "/proc/sys/fs/leases-enable cannot be read"),
    }
}

#[cfg(test)]
mod tests {
    use loopfs::ErrorKind;
    use rstest::rstest;

    use super::*;
    use crate::preflight::facts::Failure;
    use crate::preflight::facts::tests::{complete, dev};
    use crate::preflight::tests::assert_check;
    use crate::preflight::{self, Status};

    #[test]
    fn the_cookbook_lists_feature_versions() {
        let cookbook = include_str!("../../../docs/cookbook.md");
        for ((major, minor), name, _) in FEATURES {
            assert!(cookbook.contains(&format!("\n| {major}.{minor} | ")), "no row for {name}");
        }
    }

    fn open_error(kind: ErrorKind) -> ControlState {
        ControlState::Fails(Failure { kind, message: "open /dev/loop-control".to_owned() })
    }

    /// Docker's default set.
    const DOCKER: u64 = 0xa804_25fb;

    /// The kernel tests have further facts.
    #[rstest]
    #[case::old_kernel("kernel", |f: &mut Facts| f.release = "5.10.0-35".into(), Status::Missing, "5.14")]
    #[case::no_diskseq("kernel", |f: &mut Facts| f.release = "5.14.21".into(), Status::Warning, "6.1")]
    #[case::no_version("kernel", |f: &mut Facts| f.release = "mine".into(), Status::NotChecked, "")]
    #[case::no_xfs("xfs", |f: &mut Facts| (f.xfs, f.data_dir) = (DriverState::Absent, None), Status::Missing, "CONFIG_XFS_FS")]
    #[case::xfs_module("xfs", |f: &mut Facts| (f.xfs, f.data_dir) = (DriverState::Module, None), Status::Ok, "")]
    #[case::xfs_unknown("xfs", |f: &mut Facts| (f.xfs, f.data_dir) = (DriverState::Unknown, None), Status::NotChecked, "modprobe xfs")]
    #[case::xfs_mounted("xfs", |f: &mut Facts| f.xfs = DriverState::Unknown, Status::Ok, "")]
    #[case::no_quota("xfs-quota", |f: &mut Facts| f.xfs_quota = Some(false), Status::Missing, "CONFIG_XFS_QUOTA=y")]
    #[case::quota_unknown("xfs-quota", |f: &mut Facts| f.xfs_quota = None, Status::NotChecked, "modprobe xfs")]
    #[case::no_loop("loop-driver", |f: &mut Facts| f.loop_driver = DriverState::Absent, Status::Missing, "CONFIG_BLK_DEV_LOOP")]
    #[case::loop_module("loop-driver", |f: &mut Facts| f.loop_driver = DriverState::Module, Status::Ok, "")]
    #[case::loop_unknown("loop-driver", |f: &mut Facts| f.loop_driver = DriverState::Unknown, Status::NotChecked, "modprobe loop")]
    #[case::max_part("loop-driver", |f: &mut Facts| f.max_part = Some(15), Status::Ok, "")]
    #[case::no_node_nor_module_in_a_copy("loop-control", |f: &mut Facts| {
        (f.control, f.dev, f.loop_driver) = (ControlState::NoNode, Some(dev("tmpfs")), DriverState::Absent);
    }, Status::Missing, "modprobe loop")]
    #[case::removed_node("loop-control", |f: &mut Facts| f.control = ControlState::NoNode, Status::Missing, "mknod -m 0660 /dev/loop-control")]
    #[case::no_node_before_the_module("loop-control", |f: &mut Facts| {
        (f.control, f.loop_driver) = (ControlState::NoNode, DriverState::Module);
    }, Status::Ok, "")]
    #[case::no_node_nor_module("loop-control", |f: &mut Facts| {
        (f.control, f.loop_driver) = (ControlState::NoNode, DriverState::Absent);
    }, Status::Missing, "modprobe loop")]
    #[case::no_node_and_unknown_modules("loop-control", |f: &mut Facts| {
        (f.control, f.loop_driver) = (ControlState::NoNode, DriverState::Unknown);
    }, Status::NotChecked, "modprobe loop")]
    #[case::no_node_nor_mknod("loop-control", |f: &mut Facts| {
        (f.control, f.dev, f.capabilities) = (ControlState::NoNode, Some(dev("tmpfs")), Some(1 << 21));
    }, Status::Missing, "modprobe loop")]
    #[case::not_opened("loop-control", |f: &mut Facts| f.control = ControlState::NotOpened, Status::NotChecked, "")]
    #[case::other_node("loop-control", |f: &mut Facts| f.control = open_error(ErrorKind::Unsupported), Status::Missing, "modprobe loop")]
    #[case::no_dev("dev", |f: &mut Facts| f.dev = None, Status::NotChecked, "")]
    #[case::static_dev_allowed("dev", |f: &mut Facts| f.dev = Some(dev("tmpfs")), Status::Warning, "`b 7:* rwm`")]
    #[case::static_dev_without_mknod("dev", |f: &mut Facts| {
        (f.dev, f.capabilities) = (Some(Dev { usable: 0, ..dev("tmpfs") }), Some(1 << 21));
    }, Status::Missing, "extraMount")]
    #[case::static_dev_with_nodes_without_mknod("dev", |f: &mut Facts| {
        (f.dev, f.capabilities) = (Some(dev("tmpfs")), Some(1 << 21));
    }, Status::Warning, "extraMount")]
    #[case::static_dev_in_user_namespace("dev", |f: &mut Facts| {
        (f.dev, f.initial_user_namespace) = (Some(Dev { usable: 0, ..dev("tmpfs") }), Some(false));
    }, Status::Missing, "extraMount")]
    #[case::read_only_dev("dev", |f: &mut Facts| {
        f.dev = Some(Dev { options: vec!["ro".into()], usable: 0, ..dev("tmpfs") });
    }, Status::Missing, "hostPath")]
    #[case::removed_node_of_another_program("dev", |f: &mut Facts| {
        f.dev = Some(Dev { without_node: vec!["loop7".into()], ..dev("devtmpfs") });
    }, Status::Warning, "`mknod -m 0660 /dev/loop7 b $(tr : ' ' </sys/block/loop7/dev)`")]
    #[case::read_only_sysfs("sysfs", |f: &mut Facts| f.sysfs_writable = Some(false), Status::Warning, "/sys/devices/virtual")]
    #[case::no_sysfs("sysfs", |f: &mut Facts| f.sysfs_writable = None, Status::Missing, "mount -t sysfs")]
    #[case::call_of_a_later_kernel("system-calls", |f: &mut Facts| {
        (f.calls[0].1, f.release) = (Errno::ENOSYS, "5.13.0".into());
    }, Status::Missing, "boot Linux 5.14")]
    #[case::call_not_built("system-calls", |f: &mut Facts| f.calls[0].1 = Errno::ENOSYS, Status::Missing, "CONFIG_XFS_QUOTA=y")]
    #[case::call_hidden("system-calls", |f: &mut Facts| {
        (f.calls[0].1, f.seccomp) = (Errno::ENOSYS, true);
    }, Status::Missing, "seccomp=unconfined")]
    #[case::call_denied("system-calls", |f: &mut Facts| {
        (f.calls[1].1, f.seccomp) = (Errno::EPERM, true);
    }, Status::Missing, "seccompProfile")]
    #[case::filter("system-calls", |f: &mut Facts| f.seccomp = true, Status::Ok, "")]
    #[case::no_capability("capabilities", |f: &mut Facts| f.capabilities = Some(DOCKER), Status::Missing, "--cap-add SYS_ADMIN")]
    #[case::few_capabilities("capabilities", |f: &mut Facts| f.capabilities = Some(1 << 21), Status::Warning, "FOWNER, MKNOD")]
    #[case::no_proc("capabilities", |f: &mut Facts| f.capabilities = None, Status::NotChecked, "mount /proc")]
    #[case::user_namespace_unknown("user-namespace", |f: &mut Facts| f.initial_user_namespace = None, Status::NotChecked, "mount /proc")]
    #[case::no_leases("file-leases", |f: &mut Facts| f.leases = Some(false), Status::Warning, "sysctl fs.leases-enable=1")]
    #[case::leases_unknown("file-leases", |f: &mut Facts| f.leases = None, Status::NotChecked, "")]
    fn each_fact_decides_its_status(
        #[case] id: &str,
        #[case] change: fn(&mut Facts),
        #[case] status: Status,
        #[case] remedy: &str,
    ) {
        let mut facts = complete();
        change(&mut facts);
        assert_check(&preflight::judge(&facts), id, status, remedy);
    }

    #[rstest]
    #[case("6.12.48+deb13-amd64", Some((6, 12)))]
    #[case("7.3-rc1", Some((7, 3)))]
    #[case("6", None)]
    #[case("", None)]
    fn the_version_has_two_numbers(#[case] release: &str, #[case] expected: Option<(u32, u32)>) {
        assert_eq!(version(release), expected);
    }

    #[test]
    fn a_long_list_is_shortened() {
        let denied = (0..5000).map(|index| format!("loop{index}")).collect();
        let facts = Facts { dev: Some(Dev { denied, ..dev("devtmpfs") }), ..complete() };
        assert!(super::dev(&facts).found.ends_with("denies loop0, loop1, loop2, 4997 more"));
    }
}

//! The judgement of the kernel, of `/dev` and `/sys`, and of this process.

use super::check::Check;
use super::facts::{Call, Cgroup, Control, Dev, Driver, Facts};
use crate::loop_device::NO_DRIVER_REMEDY;

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

/// The features of Linux that loopfs uses: the version, the name, and whether loopfs works without it.
const FEATURES: [((u32, u32), &str, bool); 5] = [
    ((5, 8), "LOOP_CONFIGURE for loop devices", false),
    ((5, 12), "mount_setattr for mounts", false),
    ((5, 14), "quotactl_fd for project quotas", false),
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
        cgroup(facts.cgroup),
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

/// Returns `true` if the data directory is an XFS, whatever else is visible of the kernel.
fn has_mounted_xfs(facts: &Facts) -> bool {
    facts.data_dir.as_ref().is_some_and(|directory| directory.filesystem.is_some())
}

fn xfs(facts: &Facts) -> Check {
    const ID: &str = "xfs";
    const REMEDY: &str = "install the kernel's XFS module, or boot a kernel with CONFIG_XFS_FS";
    match facts.xfs {
        _ if has_mounted_xfs(facts) => Check::ok(ID, "an XFS is mounted"),
        Driver::Registered => Check::ok(ID, "the kernel has XFS"),
        Driver::Module => {
            Check::ok(ID, "the XFS module is installed; the kernel loads it at the first mount")
        }
        Driver::Absent => Check::missing(ID, "the kernel has neither XFS nor an XFS module", REMEDY),
        Driver::Unknown => {
            Check::not_checked(ID, "XFS is not loaded, and /lib/modules of this kernel is not visible here")
                .with_remedy("load it with `modprobe xfs` on the host, or check there")
        }
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
    match (facts.loop_driver, facts.max_part) {
        (Driver::Registered, None | Some(0)) => Check::ok(ID, "the loop driver is loaded"),
        (Driver::Registered, Some(parts)) => Check::ok(
            ID,
            format!("the loop driver is loaded with max_part={parts}, which leaves fewer devices"),
        ),
        (Driver::Module, _) => Check::ok(
            ID,
            "the loop module is installed; the kernel loads it when loopfs opens /dev/loop-control",
        ),
        (Driver::Absent, _) => Check::missing(
            ID,
            "the kernel has neither the loop driver nor its module",
            "install the kernel's loop module, or boot a kernel with CONFIG_BLK_DEV_LOOP",
        ),
        (Driver::Unknown, _) => Check::not_checked(
            ID,
            "the loop driver is not loaded, and /lib/modules of this kernel is not visible here",
        )
        .with_remedy("load it with `modprobe loop` on the host, or check there"),
    }
}

fn loop_control(facts: &Facts) -> Check {
    const ID: &str = "loop-control";
    match &facts.control {
        Control::Responds => Check::ok(ID, "the loop driver responds at /dev/loop-control"),
        Control::NotOpened => {
            Check::not_checked(ID, "/dev/loop-control exists, and to open it would load the loop module")
        }
        Control::NoNode if can_create_nodes(facts) => {
            Check::ok(ID, "/dev/loop-control has no node yet; loopfs or the kernel creates it")
        }
        Control::NoNode => Check::missing(ID, "/dev/loop-control does not exist", NO_DRIVER_REMEDY),
        Control::Fails(error) if is_denied(error) && !has(facts.capabilities, SYS_ADMIN) => {
            Check::not_checked(ID, error.to_string()).with_remedy("check as root")
        }
        // Root is refused by the device cgroup.
        Control::Fails(error) if is_denied(error) => Check::missing(
            ID,
            error.to_string(),
            "run the container privileged, or allow the devices `c 10:237 rwm` and `b 7:* rwm` to it",
        ),
        Control::Fails(error) => Check::missing(ID, error.to_string(), NO_DRIVER_REMEDY),
    }
}

fn is_denied(error: &crate::Error) -> bool {
    error.kind() == crate::ErrorKind::PermissionDenied
}

fn has(capabilities: Option<u64>, (bit, _): (u32, &str)) -> bool {
    capabilities.is_none_or(|all| all & 1 << bit != 0)
}

fn can_create_nodes(facts: &Facts) -> bool {
    let writable = facts.dev.as_ref().is_none_or(|dev| !dev.has("ro") && !dev.has("nodev"));
    writable && has(facts.capabilities, MKNOD) && facts.initial_user_namespace != Some(false)
}

impl Dev {
    fn has(&self, option: &str) -> bool {
        self.options.iter().any(|found| found == option)
    }
}

fn dev(facts: &Facts) -> Check {
    const ID: &str = "dev";
    const HOST: &str = "give the container the host's /dev (Docker: `-v /dev:/dev`; kind: an extraMount of /dev; Kubernetes: a \
                        hostPath volume)";
    let Some(dev) = &facts.dev else {
        return Check::not_checked(ID, "the mount at /dev is not in /proc/self/mountinfo");
    };
    let fs_type = &dev.fs_type;
    if dev.has("nodev") {
        let found = format!("/dev is a {fs_type} mounted nodev, so no device can be opened");
        return Check::missing(ID, found, HOST);
    }
    let missing = format!("{} of {} loop devices have no node", dev.without_node, dev.devices);
    if fs_type == "devtmpfs" && dev.without_node == 0 {
        return Check::ok(ID, "/dev is the devtmpfs of the kernel, which creates the nodes of loop devices");
    }
    let found = match fs_type.as_str() {
        "devtmpfs" => format!("/dev is a devtmpfs, and {missing}, because a program has removed them"),
        _ => format!(
            "/dev is a {fs_type}: a copy, in which the kernel creates no nodes of later loop devices; {missing}"
        ),
    };
    if can_create_nodes(facts) {
        let remedy =
            format!("loopfs creates the nodes that it needs, but losetup(8) and the kubelet do not: {HOST}");
        Check::warning(ID, found, remedy)
    } else {
        Check::missing(ID, format!("{found}; this process may not create them"), HOST)
    }
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
    let with = |state: Call| -> Vec<&str> {
        facts.calls.iter().filter(|(_, found)| *found == state).map(|(name, _)| *name).collect()
    };
    let (absent, denied) = (with(Call::Absent), with(Call::Denied));
    let filter = if facts.seccomp { "; a seccomp filter is active" } else { "" };
    if !absent.is_empty() {
        let found = format!("the kernel has no {}{filter}", absent.join(", "));
        let remedy = if facts.seccomp {
            "allow these calls in the seccomp profile (Docker: `--security-opt seccomp=unconfined`), or boot Linux 5.14 or later"
        } else {
            "boot Linux 5.14 or later"
        };
        return Check::missing(ID, found, remedy);
    }
    if denied.is_empty() {
        let names = with(Call::Exists).join(", ");
        return Check::ok(ID, format!("{names} are available{filter}"));
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

fn capabilities(effective: Option<u64>) -> Check {
    const ID: &str = "capabilities";
    if effective.is_none() {
        return Check::not_checked(ID, "/proc/self/status cannot be read").with_remedy("mount /proc");
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
        None => Check::not_checked(ID, "/proc/self/uid_map cannot be read").with_remedy("mount /proc"),
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

fn cgroup(cgroup: Cgroup) -> Check {
    const ID: &str = "cgroup";
    match cgroup {
        Cgroup::V2 => Check::ok(ID, "cgroup v2"),
        Cgroup::V1 => Check::warning(
            ID,
            "cgroup v1, with which kubelets from Kubernetes 1.35 on do not start; loopfs itself works",
            "boot with `systemd.unified_cgroup_hierarchy=1`",
        ),
        Cgroup::None => Check::not_checked(ID, "no cgroup file system is mounted at /sys/fs/cgroup"),
    }
}

#[cfg(test)]
mod tests {
    use nix::errno::Errno;
    use rstest::rstest;

    use super::*;
    use crate::Error;
    use crate::preflight::facts::tests::{complete, dev};
    use crate::preflight::{self, Status};

    fn open_error(errno: Errno) -> Control {
        Control::Fails(Error::sys("open", "/dev/loop-control", errno))
    }

    /// Docker's default set.
    const DOCKER: u64 = 0xa804_25fb;

    #[rstest]
    #[case::old_kernel("kernel", |f: &mut Facts| f.release = "5.10.0-35".into(), Status::Missing, "5.14")]
    #[case::no_diskseq("kernel", |f: &mut Facts| f.release = "5.14.21".into(), Status::Warning, "6.1")]
    #[case::no_version("kernel", |f: &mut Facts| f.release = "mine".into(), Status::NotChecked, "")]
    #[case::no_xfs("xfs", |f: &mut Facts| (f.xfs, f.data_dir) = (Driver::Absent, None), Status::Missing, "CONFIG_XFS_FS")]
    #[case::xfs_module("xfs", |f: &mut Facts| (f.xfs, f.data_dir) = (Driver::Module, None), Status::Ok, "")]
    #[case::xfs_unknown("xfs", |f: &mut Facts| (f.xfs, f.data_dir) = (Driver::Unknown, None), Status::NotChecked, "modprobe xfs")]
    #[case::xfs_mounted("xfs", |f: &mut Facts| f.xfs = Driver::Unknown, Status::Ok, "")]
    #[case::no_quota("xfs-quota", |f: &mut Facts| f.xfs_quota = Some(false), Status::Missing, "CONFIG_XFS_QUOTA=y")]
    #[case::quota_unknown("xfs-quota", |f: &mut Facts| f.xfs_quota = None, Status::NotChecked, "modprobe xfs")]
    #[case::no_loop("loop-driver", |f: &mut Facts| f.loop_driver = Driver::Absent, Status::Missing, "CONFIG_BLK_DEV_LOOP")]
    #[case::loop_module("loop-driver", |f: &mut Facts| f.loop_driver = Driver::Module, Status::Ok, "")]
    #[case::loop_unknown("loop-driver", |f: &mut Facts| f.loop_driver = Driver::Unknown, Status::NotChecked, "modprobe loop")]
    #[case::max_part("loop-driver", |f: &mut Facts| f.max_part = Some(15), Status::Ok, "")]
    #[case::no_node("loop-control", |f: &mut Facts| f.control = Control::NoNode, Status::Ok, "")]
    #[case::no_node_nor_mknod("loop-control", |f: &mut Facts| {
        (f.control, f.capabilities) = (Control::NoNode, Some(1 << 21));
    }, Status::Missing, "modprobe loop")]
    #[case::not_opened("loop-control", |f: &mut Facts| f.control = Control::NotOpened, Status::NotChecked, "")]
    #[case::device_cgroup("loop-control", |f: &mut Facts| f.control = open_error(Errno::EPERM), Status::Missing, "c 10:237 rwm")]
    #[case::no_root("loop-control", |f: &mut Facts| {
        (f.control, f.capabilities) = (open_error(Errno::EACCES), Some(0));
    }, Status::NotChecked, "root")]
    #[case::other_node("loop-control", |f: &mut Facts| f.control = open_error(Errno::ENOTTY), Status::Missing, "modprobe loop")]
    #[case::no_dev("dev", |f: &mut Facts| f.dev = None, Status::NotChecked, "")]
    #[case::static_dev("dev", |f: &mut Facts| f.dev = Some(dev("tmpfs")), Status::Warning, "-v /dev:/dev")]
    #[case::static_dev_without_mknod("dev", |f: &mut Facts| {
        (f.dev, f.capabilities) = (Some(dev("tmpfs")), Some(1 << 21));
    }, Status::Missing, "extraMount")]
    #[case::static_dev_in_user_namespace("dev", |f: &mut Facts| {
        (f.dev, f.initial_user_namespace) = (Some(dev("tmpfs")), Some(false));
    }, Status::Missing, "extraMount")]
    #[case::read_only_dev("dev", |f: &mut Facts| {
        f.dev = Some(Dev { options: vec!["ro".into()], ..dev("tmpfs") });
    }, Status::Missing, "hostPath")]
    #[case::nodev("dev", |f: &mut Facts| {
        f.dev = Some(Dev { options: vec!["nodev".into()], ..dev("tmpfs") });
    }, Status::Missing, "hostPath")]
    #[case::removed_nodes("dev", |f: &mut Facts| {
        f.dev = Some(Dev { without_node: 2, ..dev("devtmpfs") });
    }, Status::Warning, "losetup")]
    #[case::read_only_sysfs("sysfs", |f: &mut Facts| f.sysfs_writable = Some(false), Status::Warning, "/sys/devices/virtual")]
    #[case::no_sysfs("sysfs", |f: &mut Facts| f.sysfs_writable = None, Status::Missing, "mount -t sysfs")]
    #[case::call_absent("system-calls", |f: &mut Facts| f.calls[0].1 = Call::Absent, Status::Missing, "boot Linux 5.14")]
    #[case::call_hidden("system-calls", |f: &mut Facts| {
        (f.calls[0].1, f.seccomp) = (Call::Absent, true);
    }, Status::Missing, "seccomp=unconfined")]
    #[case::call_denied("system-calls", |f: &mut Facts| {
        (f.calls[1].1, f.seccomp) = (Call::Denied, true);
    }, Status::Missing, "seccompProfile")]
    #[case::call_without_root("system-calls", |f: &mut Facts| {
        (f.calls[1].1, f.capabilities) = (Call::Denied, Some(0));
    }, Status::NotChecked, "root")]
    #[case::filter("system-calls", |f: &mut Facts| f.seccomp = true, Status::Ok, "")]
    #[case::no_capability("capabilities", |f: &mut Facts| f.capabilities = Some(DOCKER), Status::Missing, "--cap-add SYS_ADMIN")]
    #[case::few_capabilities("capabilities", |f: &mut Facts| f.capabilities = Some(1 << 21), Status::Warning, "FOWNER, MKNOD")]
    #[case::no_proc("capabilities", |f: &mut Facts| f.capabilities = None, Status::NotChecked, "mount /proc")]
    #[case::user_namespace("user-namespace", |f: &mut Facts| f.initial_user_namespace = Some(false), Status::Missing, "--userns=host")]
    #[case::no_uid_map("user-namespace", |f: &mut Facts| f.initial_user_namespace = None, Status::NotChecked, "mount /proc")]
    #[case::no_leases("file-leases", |f: &mut Facts| f.leases = Some(false), Status::Warning, "sysctl fs.leases-enable=1")]
    #[case::leases_unknown("file-leases", |f: &mut Facts| f.leases = None, Status::NotChecked, "")]
    #[case::cgroup_v1("cgroup", |f: &mut Facts| f.cgroup = Cgroup::V1, Status::Warning, "unified_cgroup_hierarchy")]
    #[case::no_cgroup("cgroup", |f: &mut Facts| f.cgroup = Cgroup::None, Status::NotChecked, "")]
    fn one_fact_decides_one_status_and_remedy(
        #[case] id: &str,
        #[case] change: fn(&mut Facts),
        #[case] status: Status,
        #[case] remedy: &str,
    ) {
        let mut facts = complete();
        change(&mut facts);
        let checks = preflight::judge(&facts);
        let check = checks.iter().find(|check| check.id == id).unwrap();
        assert_eq!(check.status, status, "{check:?}");
        assert_eq!(check.remedy.is_none(), remedy.is_empty(), "{check:?}");
        assert!(check.remedy.as_deref().unwrap_or_default().contains(remedy), "{check:?}");
    }

    #[rstest]
    #[case("6.12.48+deb13-amd64", Some((6, 12)))]
    #[case("7.3-rc1", Some((7, 3)))]
    #[case("6", None)]
    #[case("", None)]
    fn the_version_is_the_first_two_numbers_of_the_release(
        #[case] release: &str,
        #[case] expected: Option<(u32, u32)>,
    ) {
        assert_eq!(version(release), expected);
    }
}

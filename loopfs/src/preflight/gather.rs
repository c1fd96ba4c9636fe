//! Gathers the facts. Reads files and asks the kernel, and changes nothing: it opens no device whose driver is not loaded, because
//! the kernel would load it.

use std::fs::{self, File};
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::sys::statvfs::{FsFlags, fstatvfs, statvfs};

use super::Directories;
use super::facts::{
    Call, Cgroup, Control, DataDir, DataFilesystemFacts, Dev, Driver, Facts, Kubelet, KubeletDirectory,
    KubeletMount,
};
use crate::data_disk::{DataMount, Features};
use crate::error::{Context, Error, ErrorKind, Result};
use crate::loop_device::require_driver;
use crate::mount::Isolation;
use crate::mount::table::{self as mountinfo, Mount};
use crate::sys::{probe, statx, xfs};
use crate::units::Bytes;
use crate::volume_store::verify_data_directory;

const CONTROL: &str = "/dev/loop-control";
/// The directories below the kubelet's in which the driver mounts volumes.
const MOUNTED: [&str; 2] = ["pods", "plugins"];

impl Facts {
    pub(super) fn gather(directories: &Directories) -> Self {
        let release = text("/proc/sys/kernel/osrelease").unwrap_or_default();
        let xfs = driver(&release, "xfs", || has_line("/proc/filesystems", |line| line.trim() == "xfs"));
        let loop_driver =
            driver(&release, "loop", || has_line("/proc/misc", |line| line.ends_with(" loop-control")));
        let status = text("/proc/self/status").unwrap_or_default();
        let mounts = mountinfo::read().unwrap_or_default();
        Self {
            xfs,
            xfs_quota: xfs_quota(&release),
            loop_driver,
            max_part: text("/sys/module/loop/parameters/max_part").and_then(|parts| parts.parse().ok()),
            control: control(loop_driver),
            dev: dev(&mounts),
            sysfs_writable: sysfs_writable(),
            calls: calls(),
            seccomp: field(&status, "Seccomp:").is_some_and(|mode| mode != "0"),
            capabilities: field(&status, "CapEff:").and_then(|set| u64::from_str_radix(set, 16).ok()),
            initial_user_namespace: text("/proc/self/uid_map").map(|map| maps_all(&map)),
            leases: text("/proc/sys/fs/leases-enable").map(|enabled| enabled != "0"),
            cgroup: cgroup(&mounts),
            data_dir: directories.data_dir.as_deref().map(|path| data_dir(path, &mounts)),
            kubelet: directories.kubelet_dir.as_deref().map(|path| kubelet(path, &mounts)),
            release,
        }
    }
}

/// Reads a file, without space at its end.
fn text(path: impl AsRef<Path>) -> Option<String> {
    let text = fs::read(path).ok()?;
    Some(String::from_utf8_lossy(&text).trim_end().to_owned())
}

fn has_line(path: impl AsRef<Path>, accept: impl Fn(&str) -> bool) -> bool {
    text(path).is_some_and(|text| text.lines().any(accept))
}

/// Returns a field of `/proc/self/status`.
fn field<'a>(status: &'a str, name: &str) -> Option<&'a str> {
    status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim)
}

/// Returns `true` if the map is that of the initial user namespace, which maps every id to itself.
fn maps_all(map: &str) -> bool {
    map.split_whitespace().eq(["0", "0", "4294967295"])
}

fn driver(release: &str, module: &str, registered: impl FnOnce() -> bool) -> Driver {
    if registered() {
        return Driver::Registered;
    }
    // Without this file, the kernel was built without support for modules.
    if !Path::new("/proc/modules").exists() && Path::new("/proc/self").exists() {
        return Driver::Absent;
    }
    let directory = Path::new("/lib/modules").join(release);
    let name = format!("/{module}.ko");
    // Lines of modules.dep are `PATH.ko.xz: DEPENDENCIES`.
    let is_module = |line: &str| line.split(':').next().is_some_and(|path| path.contains(&name));
    match text(directory.join("modules.dep")) {
        None => Driver::Unknown,
        Some(list) if list.lines().any(is_module) => Driver::Module,
        Some(_) if has_line(directory.join("modules.builtin"), is_module) => Driver::Module,
        Some(_) => Driver::Absent,
    }
}

fn xfs_quota(release: &str) -> Option<bool> {
    // The kernel creates both files when XFS is loaded, and the first one only with CONFIG_XFS_QUOTA.
    if Path::new("/proc/fs/xfs/xqmstat").exists() {
        return Some(true);
    }
    if Path::new("/proc/fs/xfs/stat").exists() {
        return Some(false);
    }
    let copies = [format!("/boot/config-{release}"), format!("/lib/modules/{release}/config")];
    let config = copies.iter().find_map(text)?;
    Some(config.lines().any(|line| line == "CONFIG_XFS_QUOTA=y"))
}

fn control(driver: Driver) -> Control {
    if !Path::new(CONTROL).exists() {
        return Control::NoNode;
    }
    if driver != Driver::Registered {
        return Control::NotOpened;
    }
    let opened = File::options().read(true).write(true).open(CONTROL).context("open", CONTROL);
    match opened.and_then(|control| require_driver(control.as_fd())) {
        Ok(()) => Control::Responds,
        Err(error) => Control::Fails(error),
    }
}

/// Returns the mount that `file` was opened through.
fn mount_of<'a>(file: &File, mounts: &'a [Mount]) -> Option<&'a Mount> {
    let id = statx::mount_id(file).ok()??;
    mounts.iter().find(|mount| mount.id == id)
}

/// Returns the options of a mount and of its file system, each once.
fn all_options(mount: &Mount) -> Vec<String> {
    let further = mount.super_options.iter().filter(|option| !mount.options.contains(option));
    mount.options.iter().chain(further).cloned().collect()
}

fn dev(mounts: &[Mount]) -> Option<Dev> {
    let mount = mount_of(&File::open("/dev").ok()?, mounts)?;
    let names = fs::read_dir("/sys/block").into_iter().flatten().flatten().map(|entry| entry.file_name());
    let devices: Vec<_> = names.filter(|name| is_loop_device(name.as_bytes())).collect();
    let without_node = devices.iter().filter(|name| !Path::new("/dev").join(name).exists()).count();
    Some(Dev {
        fs_type: mount.fs_type.clone(),
        options: all_options(mount),
        devices: devices.len(),
        without_node,
    })
}

fn is_loop_device(name: &[u8]) -> bool {
    name.strip_prefix(b"loop").is_some_and(|index| !index.is_empty() && index.iter().all(u8::is_ascii_digit))
}

fn sysfs_writable() -> Option<bool> {
    let status = statvfs("/sys/devices/virtual").ok()?;
    Some(!status.flags().contains(FsFlags::ST_RDONLY))
}

fn calls() -> Vec<(&'static str, Call)> {
    let call = |errno: Option<Errno>| match errno {
        Some(Errno::ENOSYS) => Call::Absent,
        Some(Errno::EPERM) => Call::Denied,
        _ => Call::Exists,
    };
    vec![
        ("quotactl_fd", call(probe::quotactl_fd())),
        ("open_tree", call(probe::open_tree())),
        ("mount_setattr", call(probe::mount_setattr())),
        ("move_mount", call(probe::move_mount())),
    ]
}

fn cgroup(mounts: &[Mount]) -> Cgroup {
    let root = Path::new("/sys/fs/cgroup");
    match mountinfo::at(mounts, root) {
        Some(mount) if mount.fs_type == "cgroup2" => Cgroup::V2,
        _ if mounts.iter().any(|mount| mount.fs_type == "cgroup" && mount.mount_point.starts_with(root)) => {
            Cgroup::V1
        }
        _ => Cgroup::None,
    }
}

fn data_dir(path: &Path, mounts: &[Mount]) -> DataDir {
    DataDir {
        path: path.to_owned(),
        verified: verify_data_directory(path),
        filesystem: data_filesystem(path, mounts),
    }
}

fn data_filesystem(path: &Path, mounts: &[Mount]) -> Option<DataFilesystemFacts> {
    let root = File::open(path).ok()?;
    if !statx::is_mount_root(&root).ok()? {
        return None;
    }
    let mount = mount_of(&root, mounts)?;
    let geometry = xfs::geometry(&root).ok().filter(|_| mount.fs_type == "xfs")?;
    let has = |flag: u32| geometry.flags & flag != 0;
    let status = fstatvfs(&root).ok()?;
    let bytes = |blocks: u64| Bytes(blocks.saturating_mul(status.fragment_size()));
    Some(DataFilesystemFacts {
        mount: DataMount::of(mount),
        device: mount.source.clone(),
        features: Features {
            crc: has(xfs::V5SB),
            reflink: has(xfs::REFLINK),
            ftype: has(xfs::FTYPE),
            bigtime: has(xfs::BIGTIME),
        },
        size: bytes(status.blocks()),
        available: bytes(status.blocks_available()),
    })
}

fn kubelet(path: &Path, mounts: &[Mount]) -> Kubelet {
    let mounted = MOUNTED.map(|name| {
        let path = path.join(name);
        KubeletDirectory { mount: kubelet_mount(&path, mounts), path }
    });
    let registry = match fs::metadata(path.join("plugins_registry")) {
        Ok(status) => Some(status.is_dir()),
        Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => None,
        Err(_) => Some(false),
    };
    Kubelet { path: path.to_owned(), mounted: mounted.into(), registry }
}

fn kubelet_mount(path: &PathBuf, mounts: &[Mount]) -> Result<KubeletMount> {
    let shown = path.display();
    let directory = File::open(path).context("open the directory", &shown)?;
    let mount = mount_of(&directory, mounts).ok_or_else(|| {
        Error::new(ErrorKind::Other, "find the mount of", &shown, "it is not in /proc/self/mountinfo")
    })?;
    Ok(KubeletMount {
        mount_point: mount.mount_point.clone(),
        isolation: Isolation::of(mount),
        shared: mount.propagation.iter().any(|field| field.starts_with("shared:")),
        read_only: mount.has_option("ro"),
    })
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("         0          0 4294967295\n", true)]
    #[case("0 1000 1\n1 100000 65536\n", false)]
    #[case("0 0 65536\n", false)]
    #[case("", false)]
    fn only_the_map_of_every_id_to_itself_is_the_initial_user_namespace(
        #[case] map: &str,
        #[case] expected: bool,
    ) {
        assert_eq!(maps_all(map), expected);
    }

    #[rstest]
    #[case("loop0", true)]
    #[case("loop65536", true)]
    #[case("loop", false)]
    #[case("loop-control", false)]
    #[case("vda", false)]
    fn loop_devices_are_recognised_by_name(#[case] name: &str, #[case] expected: bool) {
        assert_eq!(is_loop_device(name.as_bytes()), expected);
    }

    #[test]
    fn fields_of_the_status_are_found_by_their_name() {
        let status = "Name:\tx\nCapEff:\t000001ffffffffff\nSeccomp:\t2\nSeccomp_filters:\t1\n";
        assert_eq!(field(status, "CapEff:"), Some("000001ffffffffff"));
        assert_eq!(field(status, "Seccomp:"), Some("2"));
        assert_eq!(field(status, "CapPrm:"), None);
    }

    #[rstest]
    #[case("31 24 0:27 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n", Cgroup::V2)]
    #[case(
        "31 24 0:27 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n32 31 0:28 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n\
         33 31 0:29 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n",
        Cgroup::V1
    )]
    #[case("31 24 0:27 / /sys rw - sysfs sysfs rw\n", Cgroup::None)]
    fn the_mounts_show_the_version_of_the_cgroups(#[case] table: &str, #[case] expected: Cgroup) {
        assert_eq!(cgroup(&mountinfo::parse(table.as_bytes()).unwrap()), expected);
    }
}

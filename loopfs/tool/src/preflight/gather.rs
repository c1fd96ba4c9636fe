//! Gathers the facts. It reads files and makes system calls that change nothing, and opens no device whose driver is not loaded,
//! because the kernel would load it. Facts about the process are those of the thread, which can be in other namespaces than the
//! main thread.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use loopfs::loop_device::{LoopControl, PoolOptions};
use loopfs::mount::Isolation;
use loopfs::mount::table::{self as mountinfo, Mount};
use loopfs::project_quota::{ProjectId, ProjectQuota};
use loopfs::volume_store::VolumeStore;
use loopfs::{Bytes, ErrorKind, probe_system_calls, xfs};
use nix::errno::Errno;
use nix::sys::statvfs::{FsFlags, fstatvfs, statvfs};
use nix::unistd::{AccessFlags, access};

use super::data_dir::BLOCKS_OF_AN_ID;
use super::facts::{
    ControlState, DataDir, DataFilesystemFacts, Dev, DriverState, Facts, Failure, Kubelet, KubeletDirectory,
    KubeletMount, QuotaRecords,
};
use super::host::HostFacts;
use super::read::{loop_devices, loop_index, text};
use crate::data_disk::{DataMount, all_options, is_mount_root};

const CONTROL: &str = "/dev/loop-control";
/// The directories below the kubelet's in which the driver mounts volumes.
const MOUNTED: [&str; 2] = ["pods", "plugins"];
/// The inode number of the initial user namespace (`USER_NS_INIT_INO`, linux/nsfs.h). The map of its ids proves nothing, because
/// another namespace can map every id to itself, too.
const INITIAL_USER_NAMESPACE: u64 = 0xefff_fffd;

impl Facts {
    pub(super) fn gather(data_directory: Option<&Path>, kubelet_directory: Option<&Path>) -> Self {
        let release = text("/proc/sys/kernel/osrelease").unwrap_or_default();
        let xfs = driver(&release, "xfs", || has_line("/proc/filesystems", |line| line.trim() == "xfs"));
        let loop_driver =
            driver(&release, "loop", || has_line("/proc/misc", |line| line.ends_with(" loop-control")));
        let status = text("/proc/thread-self/status").unwrap_or_default();
        let mounts = known_mounts(&fs::read("/proc/thread-self/mountinfo").unwrap_or_default());
        Self {
            xfs,
            xfs_quota: xfs_quota(&release),
            loop_driver,
            max_part: text("/sys/module/loop/parameters/max_part").and_then(|parts| parts.parse().ok()),
            control: control(loop_driver),
            dev: dev(&mounts),
            sysfs_writable: sysfs_writable(),
            calls: probe_system_calls().map(|(name, errno)| (name, Errno::from_raw(errno))).into(),
            seccomp: field(&status, "Seccomp:").is_some_and(|mode| mode != "0"),
            capabilities: field(&status, "CapEff:").and_then(|set| u64::from_str_radix(set, 16).ok()),
            initial_user_namespace: initial_user_namespace(),
            leases: text("/proc/sys/fs/leases-enable").map(|enabled| enabled != "0"),
            host: HostFacts::gather(),
            data_dir: data_directory.map(|path| data_dir(path, &mounts)),
            kubelet: kubelet_directory.map(|path| kubelet(path, &mounts)),
            release,
        }
    }
}

/// Parses the lines of the mount table that are of the documented form, and skips others, which must not hide the other mounts.
fn known_mounts(table: &[u8]) -> Vec<Mount> {
    table.split(|byte| *byte == b'\n').filter_map(|line| mountinfo::parse(line).ok()).flatten().collect()
}

fn has_line(path: impl AsRef<Path>, accept: impl Fn(&str) -> bool) -> bool {
    text(path).is_some_and(|text| text.lines().any(accept))
}

/// Returns a field of `/proc/thread-self/status`.
fn field<'a>(status: &'a str, name: &str) -> Option<&'a str> {
    status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim)
}

fn initial_user_namespace() -> Option<bool> {
    match fs::metadata("/proc/thread-self/ns/user") {
        Ok(namespace) => Some(namespace.ino() == INITIAL_USER_NAMESPACE),
        // The kernel was built without user namespaces.
        Err(_) if Path::new("/proc/thread-self/ns/mnt").exists() => Some(true),
        Err(_) => None,
    }
}

fn driver(release: &str, module: &str, registered: impl FnOnce() -> bool) -> DriverState {
    if registered() {
        return DriverState::Registered;
    }
    // Without this file, the kernel was built without support for modules.
    if !Path::new("/proc/modules").exists() && Path::new("/proc/self").exists() {
        return DriverState::Absent;
    }
    installed(&Path::new("/lib/modules").join(release), module)
}

/// Looks up a driver that is not registered in the directory of the kernel's modules.
fn installed(directory: &Path, module: &str) -> DriverState {
    let name = format!("/{module}.ko");
    // Lines of modules.dep are `PATH.ko.xz: DEPENDENCIES`, those of modules.builtin `PATH.ko`.
    let is_module = |line: &str| line.split(':').next().is_some_and(|path| path.contains(&name));
    if has_line(directory.join("modules.builtin"), is_module) {
        return DriverState::Registered;
    }
    match text(directory.join("modules.dep")) {
        None => DriverState::Unknown,
        Some(list) if list.lines().any(is_module) => DriverState::Module,
        Some(_) => DriverState::Absent,
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

fn control(driver: DriverState) -> ControlState {
    if !Path::new(CONTROL).exists() {
        return ControlState::NoNode;
    }
    if driver != DriverState::Registered {
        return match is_denied(CONTROL) {
            true => ControlState::Fails(Failure::of("open", CONTROL, &Errno::EPERM.into())),
            false => ControlState::NotOpened,
        };
    }
    if let Err(error) = File::options().read(true).write(true).open(CONTROL) {
        return ControlState::Fails(Failure::of("open", CONTROL, &error));
    }
    match LoopControl::open().and_then(|control| control.verify()) {
        Ok(()) => ControlState::Responds,
        Err(error) => ControlState::Fails(error.into()),
    }
}

/// Returns `true` if the device cgroup does not let this process open a node for reading and writing. The kernel compares with the
/// rules in access(2) as in open(2), and returns EPERM, while the permissions of the node lead to EACCES. The call opens no device.
fn is_denied(node: impl AsRef<Path>) -> bool {
    access(node.as_ref(), AccessFlags::R_OK | AccessFlags::W_OK) == Err(Errno::EPERM)
}

/// Opens a directory. The kernel compares the type before it opens the file, so that a FIFO does not block and a device notices
/// nothing.
fn open_directory(path: &Path) -> std::io::Result<File> {
    File::options().read(true).custom_flags(libc::O_DIRECTORY | libc::O_NONBLOCK).open(path)
}

fn dev(mounts: &[Mount]) -> Option<Dev> {
    let mount = mountinfo::holding(mounts, open_directory(Path::new("/dev")).ok()?)?;
    let names = loop_devices(Path::new("/sys/block"));
    let node = |name: &str| Path::new("/dev").join(name);
    let without_node =
        without_node(&names, |name| node(name).exists(), |name| Path::new("/sys/block").join(name).exists());
    let with_node = || names.iter().filter(|name| !without_node.contains(name));
    let range = PoolOptions::default().range;
    let is_chosen = |name: &String| loop_index(name).is_some_and(|index| range.contains(&index));
    let usable: Vec<_> = with_node().filter(|name| is_chosen(name)).collect();
    // If loopfs has no device yet, the rules for those of other programs are the only visible ones.
    let judged = if usable.is_empty() { with_node().collect() } else { usable.clone() };
    Some(Dev {
        fs_type: mount.fs_type.clone(),
        options: all_options(mount),
        devices: names.len(),
        usable: usable.len(),
        denied: judged.into_iter().filter(|name| is_denied(node(name))).cloned().collect(),
        chosen_without_node: without_node.iter().filter(|name| is_chosen(name)).cloned().collect(),
        without_node,
    })
}

/// Returns the devices that exist and have no node. Looks twice, because another program can add or remove a device between the
/// two looks at `/dev` and sysfs.
fn without_node(
    names: &[String],
    has_node: impl Fn(&str) -> bool,
    exists: impl Fn(&str) -> bool,
) -> Vec<String> {
    let lacks_node = |name: &&String| !has_node(name) && exists(name);
    let lacking: Vec<_> = names.iter().filter(lacks_node).collect();
    lacking.into_iter().filter(lacks_node).cloned().collect()
}

fn sysfs_writable() -> Option<bool> {
    let status = statvfs("/sys/devices/virtual").ok()?;
    Some(!status.flags().contains(FsFlags::ST_RDONLY))
}

fn data_dir(path: &Path, mounts: &[Mount]) -> DataDir {
    DataDir {
        path: path.to_owned(),
        verified: VolumeStore::check_data_directory(path).map_err(Failure::from),
        occupied: fs::read_dir(path).is_ok_and(|mut entries| entries.next().is_some()),
        filesystem: data_filesystem(path, mounts),
    }
}

fn data_filesystem(path: &Path, mounts: &[Mount]) -> Option<DataFilesystemFacts> {
    let root = open_directory(path).ok()?;
    if !is_mount_root(&root).ok()? {
        return None;
    }
    let mount = mountinfo::holding(mounts, &root)?;
    let geometry = xfs::geometry(&root).ok().filter(|_| mount.fs_type == "xfs")?;
    let status = fstatvfs(&root).ok()?;
    let bytes = |blocks: u64| Bytes(blocks.saturating_mul(status.fragment_size()));
    Some(DataFilesystemFacts {
        mount: DataMount::of(mount),
        device: mount.source.clone(),
        features: geometry.features,
        size: bytes(status.blocks()),
        available: bytes(status.blocks_available()),
        quota_records: quota_records(&root).ok(),
    })
}

/// Reads how much space the quota records of projects take. Counts no more ids than can be used in as much space.
fn quota_records(root: &File) -> loopfs::Result<QuotaRecords> {
    let quota = ProjectQuota::of(root.as_fd());
    let blocks = quota.record_blocks()?;
    let all = ProjectId::FIRST..=ProjectId::LAST;
    let counted = usize::try_from(blocks / BLOCKS_OF_AN_ID).unwrap_or(usize::MAX);
    let ids = quota.ids(all).take(counted).try_fold(0, |ids, usage| usage.map(|_| ids + 1))?;
    Ok(QuotaRecords { blocks, ids })
}

fn kubelet(path: &Path, mounts: &[Mount]) -> Kubelet {
    let mounted = MOUNTED.map(|name| {
        let path = path.join(name);
        let is_link = fs::symlink_metadata(&path).is_ok_and(|status| status.is_symlink());
        KubeletDirectory { mount: kubelet_mount(&path, mounts), is_link, path }
    });
    let in_use: BTreeSet<_> = mounts.iter().filter_map(|mount| kubelet_of(&mount.mount_point)).collect();
    Kubelet {
        path: std::path::absolute(path).unwrap_or_else(|_| path.to_owned()),
        resolved: path.canonicalize().ok(),
        in_use: in_use.into_iter().map(Path::to_owned).collect(),
        mounted: mounted.into(),
    }
}

/// Returns the directory of the kubelet that has mounted a volume of a pod here: `KUBELET/pods/UID/volumes/kubernetes.io~NAME/VOLUME`. A
/// token, which nearly each pod has, is such a volume.
fn kubelet_of(mount_point: &Path) -> Option<&Path> {
    let is_named = |path: &Path, name: &str| path.file_name().is_some_and(|found| found == name);
    let is_plugin = |path: &&Path| {
        let name = path.file_name().and_then(|name| name.to_str());
        name.is_some_and(|name| name.starts_with("kubernetes.io~"))
    };
    let volumes =
        mount_point.ancestors().find(is_plugin)?.parent().filter(|path| is_named(path, "volumes"))?;
    volumes.parent()?.parent().filter(|path| is_named(path, "pods"))?.parent()
}

fn kubelet_mount(path: &Path, mounts: &[Mount]) -> Result<KubeletMount, Failure> {
    let shown = path.display();
    let directory =
        open_directory(path).map_err(|error| Failure::of("open the directory", &shown, &error))?;
    let mount = mountinfo::holding(mounts, &directory).ok_or_else(|| Failure {
        kind: ErrorKind::Other,
        message: format!("find the mount of {shown}: it is not in /proc/thread-self/mountinfo"),
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
    use std::cell::Cell;

    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("loop0", Some(0))]
    #[case("loop65536", Some(65536))]
    #[case("loop", None)]
    #[case("loop+7", None)]
    #[case("loop-control", None)]
    #[case("vda", None)]
    fn loop_devices_are_recognised_by_name(#[case] name: &str, #[case] expected: Option<u32>) {
        assert_eq!(loop_index(name), expected);
    }

    /// The device is added or removed between the two looks at `/dev`.
    #[test]
    fn a_changing_device_lacks_no_node() {
        let names = ["loop1", "loop2", "loop3"].map(str::to_owned);
        let looks = Cell::new(0);
        let has_node = |name: &str| {
            looks.set(looks.get() + 1);
            // The first three looks are those of the first round.
            name == "loop1" && looks.get() > 3
        };
        assert_eq!(without_node(&names, has_node, |name| name != "loop2"), ["loop3"]);
    }

    #[rstest]
    #[case::of_a_module("kernel/drivers/block/loop.ko.xz: a.ko\n", "", DriverState::Module)]
    #[case::built_in("", "kernel/drivers/block/loop.ko\n", DriverState::Registered)]
    #[case::of_another_name(
        "kernel/drivers/net/loopback.ko: kernel/drivers/block/loop.ko\n",
        "",
        DriverState::Absent
    )]
    fn module_lists_show_the_driver(
        #[case] modules: &str,
        #[case] builtin: &str,
        #[case] expected: DriverState,
    ) {
        let directory = tempfile::tempdir().unwrap();
        assert_eq!(installed(directory.path(), "loop"), DriverState::Unknown);
        fs::write(directory.path().join("modules.dep"), modules).unwrap();
        fs::write(directory.path().join("modules.builtin"), builtin).unwrap();
        assert_eq!(installed(directory.path(), "loop"), expected);
    }

    #[rstest]
    #[case::token("/k/pods/1/volumes/kubernetes.io~projected/token", Some("/k"))]
    #[case::volume("/var/lib/k/pods/1/volumes/kubernetes.io~csi/pvc-1/mount", Some("/var/lib/k"))]
    #[case::sub_path("/k/pods/1/volume-subpaths/kubernetes.io~csi/c/0", None)]
    #[case::directory_of_a_kubelet("/k/pods", None)]
    #[case::short("volumes/kubernetes.io~csi", None)]
    fn a_mount_shows_the_kubelet_directory(#[case] mount_point: &str, #[case] kubelet: Option<&str>) {
        assert_eq!(kubelet_of(Path::new(mount_point)), kubelet.map(Path::new));
    }

    #[test]
    fn a_field_is_found_by_name() {
        assert_eq!(field("Seccomp_filters:\t1\nSeccomp:\t0\n", "Seccomp:"), Some("0"));
    }

    #[test]
    fn links_of_the_kubelet_are_found() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path().canonicalize().unwrap();
        fs::create_dir_all(root.join("real/plugins")).unwrap();
        fs::create_dir(root.join("elsewhere")).unwrap();
        std::os::unix::fs::symlink(root.join("elsewhere"), root.join("real/pods")).unwrap();
        std::os::unix::fs::symlink(root.join("real"), root.join("link")).unwrap();
        let found = kubelet(&root.join("link"), &[]);
        assert_eq!(found.resolved, Some(root.join("real")));
        let links: Vec<_> = found.mounted.iter().map(|directory| directory.is_link).collect();
        assert_eq!(links, [true, false]);
    }

    #[test]
    fn only_a_directory_is_opened() {
        let directory = tempfile::tempdir().unwrap();
        assert!(open_directory(directory.path()).is_ok());
        let fifo = directory.path().join("fifo");
        nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).unwrap();
        // With a writer, opening the FIFO would not block but succeed.
        let _writer = File::options().read(true).write(true).open(&fifo).unwrap();
        for path in [fifo.as_path(), Path::new("/dev/null")] {
            assert_eq!(open_directory(path).unwrap_err().raw_os_error(), Some(libc::ENOTDIR));
        }
    }

    #[test]
    fn an_unknown_line_hides_no_mount() {
        let line = "26 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw\n";
        let table = format!("a line of a later kernel\n{line}");
        assert!(mountinfo::parse(table.as_bytes()).is_err());
        assert_eq!(known_mounts(table.as_bytes()), mountinfo::parse(line.as_bytes()).unwrap());
    }
}

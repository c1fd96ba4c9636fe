//! The fixture of the tests: a node with a driver. A test must restore the state that it found.

use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use loopfs::Bytes;
use loopfs::loop_device::{Access, Detach, DeviceList, LoopControl, Status};
use loopfs::mount::{MountFlags, bind_mount, table as mountinfo};
use loopfs::project_quota::{ProjectId, ProjectQuota};
use loopfs::volume_store::{StoreOptions, VolumeId, VolumeKind, VolumeSpec, VolumeStore};
use nix::fcntl::{OFlag, open};
use nix::mount::{MntFlags, MsFlags, mount, umount, umount2};
use nix::sys::stat::Mode;
use nix::sys::statvfs::{FsFlags, statvfs};
use tempfile::TempDir;

use crate::difference::assert_same;
use crate::scratch_disk::ScratchDisk;
use crate::support::{Client, Directories, Driver, TIMEOUT, wait_until};

pub(crate) const MIB: u64 = 1 << 20;

pub(crate) fn path_from(variable: &str) -> PathBuf {
    let path = std::env::var_os(variable);
    PathBuf::from(
        path.unwrap_or_else(|| panic!("{variable} is not set: run `cargo harness test --lane kernel`")),
    )
}

/// A node: the store in which a provisioner creates volumes, the kubelet directory, and a driver.
pub(crate) struct Fixture {
    pub(crate) store: VolumeStore,
    pub(crate) directories: Directories,
    driver: Option<Driver>,
    /// The file system of all tests. `directories.data` may be another one.
    data: PathBuf,
    before: Vec<String>,
    scratch: TempDir,
}

impl Fixture {
    pub(crate) fn new() -> Self {
        let mut fixture = Self::without_driver();
        fixture.start_driver();
        fixture
    }

    /// Returns a node with a driver and the volume `v`.
    pub(crate) fn with_volume(kind: VolumeKind) -> Self {
        let fixture = Self::new();
        fixture.volume("v", kind);
        fixture
    }

    /// Returns a node without a driver. The kubelet directory is on a file system of its own, which is mounted with the
    /// strictest flags that nodes use.
    pub(crate) fn without_driver() -> Self {
        let data = path_from("LOOPFS_TEST_XFS");
        let store = VolumeStore::open(&data, StoreOptions::default()).unwrap();
        assert_eq!(store.list().unwrap(), [], "volumes of an earlier test are left");
        assert_eq!(store.snapshots().unwrap(), [], "snapshots of an earlier test are left");
        // The first runtime of a process creates a pair of sockets for signals, which stays open.
        drop(tokio::runtime::Runtime::new().unwrap());
        let before = holdings(&data);
        let scratch = tempfile::tempdir_in(path_from("LOOPFS_TEST_SCRATCH")).unwrap();
        let directories = Directories::create(scratch.path(), &data);
        let strict = MsFlags::MS_NODEV | MsFlags::MS_NOSUID | MsFlags::MS_NOEXEC;
        mount(Some("kubelet"), &directories.kubelet, Some("tmpfs"), strict, None::<&str>).unwrap();
        Self { store, directories, driver: None, data, before, scratch }
    }

    /// Returns a node whose volumes are on the second disk, with that disk and a driver that is ready. The test stops the
    /// driver and drops the disk before it calls [`finish`](Self::finish).
    pub(crate) fn on_scratch_disk() -> (Self, ScratchDisk, Driver) {
        let mut fixture = Self::without_driver();
        let disk = ScratchDisk::mount_at(fixture.scratch().join("data"));
        fixture.directories.data = disk.data.clone();
        let control = format!("--control-endpoint=unix://{}", fixture.control_socket().display());
        fixture.directories.more.push(control);
        let driver = Driver::start(&fixture.directories);
        driver.wait_until_ready();
        (fixture, disk, driver)
    }

    /// Returns where the control socket of a driver is that has one.
    pub(crate) fn control_socket(&self) -> PathBuf {
        self.scratch().join("control.sock")
    }

    pub(crate) fn scratch(&self) -> &Path {
        self.scratch.path()
    }

    pub(crate) fn start_driver(&mut self) {
        let driver = Driver::start(&self.directories);
        driver.wait_until_ready();
        self.driver = Some(driver);
    }

    pub(crate) fn restart_driver(&mut self) {
        self.stop_driver();
        self.start_driver();
    }

    /// Requests the shutdown of the driver, without waiting.
    pub(crate) fn begin_to_stop(&self) {
        self.driver.as_ref().unwrap().begin_to_stop();
    }

    pub(crate) fn stop_driver(&mut self) {
        self.driver.take().unwrap().stop();
    }

    pub(crate) fn node(&self) -> &Client {
        self.driver.as_ref().unwrap()
    }

    /// Deletes a volume that is in use, which the store would refuse.
    pub(crate) fn delete_in_use(&self, name: &str) {
        let data = &self.directories.data;
        let trash = data.join("trash").join(format!("{name}.0123456789abcdef"));
        std::fs::rename(data.join("volumes").join(name), trash).unwrap();
    }

    /// Creates a volume of 1 MiB.
    pub(crate) fn volume(&self, name: &str, kind: VolumeKind) {
        self.store.create(&id(name), &VolumeSpec::new(kind, Bytes(MIB))).unwrap();
    }

    pub(crate) fn target(&self, name: &str) -> PathBuf {
        self.directories.kubelet.join(name)
    }

    /// Opens the image of a volume for reading.
    pub(crate) fn image(&self, volume: &str) -> OwnedFd {
        self.store.volume(&id(volume)).unwrap().open_image(Access::ReadOnly).unwrap()
    }

    /// Returns the loop devices that are attached to a volume.
    pub(crate) fn devices(&self, volume: &str) -> Vec<Status> {
        let devices = LoopControl::open().unwrap().find(self.image(volume)).unwrap();
        devices.iter().map(|device| device.status().unwrap()).collect()
    }

    /// Detaches the loop devices of a volume while no driver holds them, as `losetup -d` does.
    pub(crate) fn detach_devices(&mut self, volume: &str) {
        self.stop_driver();
        let detached = LoopControl::open().unwrap().detach_all(self.image(volume)).unwrap();
        assert_eq!(detached, Detach::Detached);
        self.start_driver();
    }

    /// Returns the number of mounts at a target.
    pub(crate) fn mounts_at(&self, target: &Path) -> usize {
        mountinfo::read().unwrap().iter().filter(|mount| mount.mount_point == target).count()
    }

    /// Returns the number of project ids in use.
    pub(crate) fn projects(&self) -> usize {
        holdings(&self.data).iter().filter(|held| held.starts_with("project ")).count()
    }

    /// Deletes all volumes and snapshots, stops the driver, and fails if the test has left a mount or a device.
    pub(crate) fn finish(mut self) {
        if let Some(driver) = self.driver.take() {
            driver.stop();
        }
        umount(&self.directories.kubelet).expect("a volume is still published");
        for volume in self.store.list().unwrap() {
            assert!(self.store.delete(&volume).unwrap());
        }
        for snapshot in self.store.snapshots().unwrap() {
            assert!(self.store.delete_snapshot(&snapshot).unwrap());
        }
        self.store.empty_trash().unwrap();
        // Idle loop devices are removed in the background.
        let start = Instant::now();
        while holdings(&self.data) != self.before && start.elapsed() < TIMEOUT {
            std::thread::sleep(Duration::from_millis(20));
        }
        assert_same(&holdings(&self.data), &self.before, "loop devices, mounts, project ids and open files");
    }
}

impl Drop for Fixture {
    /// Cleans up after a failed test as far as possible, so that it does not make later tests fail.
    fn drop(&mut self) {
        if !std::thread::panicking() {
            return;
        }
        drop(self.driver.take());
        for directory in [&self.directories.kubelet, &self.scratch.path().join("data")] {
            umount2(directory, MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW).ok();
        }
        for volume in self.store.list().unwrap_or_default() {
            if let Ok(image) =
                self.store.volume(&volume).and_then(|volume| volume.open_image(Access::ReadOnly))
            {
                LoopControl::open().and_then(|control| control.detach_all(image.as_fd())).ok();
            }
            self.store.delete(&volume).ok();
        }
        for snapshot in self.store.snapshots().unwrap_or_default() {
            self.store.delete_snapshot(&snapshot).ok();
        }
        self.store.empty_trash().ok();
    }
}

/// Returns the loop devices, mounts, project ids with limits, and open files of this process.
fn holdings(data: &Path) -> Vec<String> {
    let devices = LoopControl::open().unwrap().list().unwrap().devices;
    let mut all: Vec<String> = devices.iter().map(|status| format!("{:?}", status.binding)).collect();
    all.extend(
        mountinfo::read().unwrap().iter().map(|mount| format!("mount {}", mount.mount_point.display())),
    );
    let root = File::open(data).unwrap();
    let quota = ProjectQuota::of(root.as_fd());
    quota.finish_inactivation(ProjectId::new(1).unwrap()).unwrap();
    let range = ProjectId::new(1).unwrap()..=ProjectId::new(u32::MAX - 1).unwrap();
    all.extend(quota.ids(range).map(|usage| format!("project {}", usage.unwrap().id)));
    drop(root);
    all.extend(open_files());
    all
}

/// Returns the open files. Sockets, pipes and the like are listed by type only, because each has a number of its own.
fn open_files() -> Vec<String> {
    let entries = fs::read_dir("/proc/self/fd").unwrap().map(Result::unwrap);
    // By then the descriptor of the listing itself is closed.
    let targets = entries.filter_map(|entry| fs::read_link(entry.path()).ok());
    let mut open: Vec<String> = targets
        .map(|target| target.to_string_lossy().split(":[").next().unwrap_or_default().to_owned())
        .filter(|target| !target.ends_with("/fd"))
        .map(|target| format!("open file {target}"))
        .collect();
    open.sort_unstable();
    open
}

/// Waits until the kernel has detached all devices.
pub(crate) fn until_detached() {
    let is_detached = |listed: DeviceList| listed.devices.is_empty() && listed.skipped.is_empty();
    // The kernel sends no event at the last close.
    wait_until("no device is attached", || is_detached(LoopControl::open().unwrap().list().unwrap()));
}

/// Repeats a call, as an orchestrator does, while the driver repeats the cleanup of an earlier publication: the kernel has deferred the detach
/// of a device.
pub(crate) fn repeated<T>(call: impl Fn() -> Result<T, tonic::Status>) -> Result<T, tonic::Status> {
    repeated_while(|status| status.message().contains("in progress"), call)
}

/// Repeats a call while it is refused for a reason that passes.
pub(crate) fn repeated_while<T>(
    passes: impl Fn(&tonic::Status) -> bool,
    call: impl Fn() -> Result<T, tonic::Status>,
) -> Result<T, tonic::Status> {
    let start = Instant::now();
    loop {
        match call() {
            Err(status) if passes(&status) && start.elapsed() < TIMEOUT => {}
            ended => return ended,
        }
    }
}

pub(crate) fn id(name: &str) -> VolumeId {
    VolumeId::parse(name).unwrap()
}

/// Returns the size of an open device.
pub(crate) fn device_size(mut device: &File) -> u64 {
    device.seek(SeekFrom::End(0)).unwrap()
}

pub(crate) fn is_block_device(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|file| file.file_type().is_block_device())
}

/// Bind-mounts a device node, as the kubelet and container runtimes do.
pub(crate) fn bind_mount_node(node: &Path, target: &Path) {
    let node = open(node, OFlag::O_PATH, Mode::empty()).unwrap();
    bind_mount(node.as_fd(), target, MountFlags::default()).unwrap();
}

pub(crate) fn device_number(path: &Path) -> u64 {
    fs::metadata(path).unwrap().rdev()
}

/// Writes, and does not call fsync(2), as most programs do.
pub(crate) fn write_to(path: &Path, content: &[u8]) -> std::io::Result<()> {
    File::options().write(true).open(path)?.write_all(content)
}

pub(crate) fn read_from(path: &Path, length: usize) -> Vec<u8> {
    let mut content = vec![0; length];
    File::open(path).unwrap().read_exact(&mut content).unwrap();
    content
}

/// Returns the total bytes and inodes that a program in the volume sees.
pub(crate) fn size_of_mount(path: &Path) -> (u64, u64) {
    let status = statvfs(path).unwrap();
    (status.blocks() * status.fragment_size(), status.files())
}

pub(crate) fn flags_of_mount(path: &Path) -> FsFlags {
    let seen = FsFlags::ST_RDONLY
        | FsFlags::ST_NOSUID
        | FsFlags::ST_NODEV
        | FsFlags::ST_NOEXEC
        | FsFlags::ST_NOATIME;
    statvfs(path).unwrap().flags() & seen
}

/// Writes to the log, even if the test passes.
#[allow(clippy::explicit_write, reason = "libtest discards the output of eprintln! if a test passes")]
pub(crate) fn write_log(text: &str) {
    writeln!(std::io::stderr(), "{text}").unwrap();
}

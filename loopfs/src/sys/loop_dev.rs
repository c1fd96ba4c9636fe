//! All calls to the loop driver: `/dev/loop-control`, `/dev/loopN` (loop(4), linux/loop.h) and sysfs.
//!
//! Unit tests replace this module with `loop_model.rs`, a model of the driver with the same functions.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::thread::JoinHandle;

use linux_raw_sys::{ioctl as block, loop_device as uapi};
use nix::NixPath;
use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, open};
use nix::sys::stat::{Mode, SFlag, fstat, fstatat, makedev, mknod};
use nix::unistd::{mkdtemp, unlink};
use rustix::fs::ioctl_blksszget;

use super::devtmpfs::is_devtmpfs;
use super::loop_abi::{DiscardLimit, empty_info, index_limit_of, loop_config, loop_info64};
use super::result::{Result, errno};
use super::{ioctl, kernel_version};

const CONTROL: &str = "/dev/loop-control";
/// The device number of `/dev/loop-control` (Documentation/admin-guide/devices.txt). The kernel does not export
/// linux/miscdevice.h to user space.
const CONTROL_NUMBER: u64 = makedev(10, 237);
/// The mode of nodes that this module creates, the one that devtmpfs gives to block devices.
const NODE_MODE: Mode = Mode::S_IRUSR.union(Mode::S_IWUSR);

/// Opens `/dev/loop-control`. If the node is missing, it first loads the loop module. Then, if `/dev` is a copy in which the
/// kernel creates no nodes, it creates the node. Returns ENODEV if the node exists but the kernel has no module for it, ENOENT
/// if the node can be neither found nor created, and EPERM if the device cgroup denies the process to open it.
pub(crate) fn open_control() -> Result<OwnedFd> {
    let opened = open_node(CONTROL, OFlag::O_RDWR);
    if !matches!(opened, Err(Errno::ENOENT)) || !load_module()? {
        return opened;
    }
    match open_node(CONTROL, OFlag::O_RDWR) {
        Err(Errno::ENOENT) => {
            create_node(CONTROL, SFlag::S_IFCHR, CONTROL_NUMBER)?;
            open_node(CONTROL, OFlag::O_RDWR)
        }
        opened => opened,
    }
}

/// Makes the kernel load the loop module. If a process opens a device number that has no driver, the kernel runs modprobe(8)
/// in the root file system of the host, even if the process is in a container. This needs a device node. systemd creates it
/// at boot (`kmod static-nodes`), but other init systems do not. This function therefore creates the node in a temporary
/// directory below `/dev`. Once the module is loaded, the kernel creates `/dev/loop-control` itself, unless `/dev` is a copy.
///
/// Returns `false` if the module is not loaded: the process may not create nodes there, `/dev` is mounted nodev, or the kernel has
/// no such module. Returns EPERM if the process can create the node and the device cgroup denies to open it. That is the default
/// of Docker, which lets a container create the nodes of all devices.
fn load_module() -> Result<bool> {
    // mkdtemp(3) creates the directory with mode 0700. If the process dies here, the directory stays until the next boot.
    let Ok(directory) = mkdtemp("/dev/.loopfs-XXXXXX") else { return Ok(false) };
    let node = directory.join("loop-control");
    let made = mknod(&node, SFlag::S_IFCHR, NODE_MODE, CONTROL_NUMBER);
    let opened = made.is_ok().then(|| open_node(&node, OFlag::O_RDWR));
    unlink(&node).ok();
    std::fs::remove_dir(&directory).ok();
    match opened {
        Some(Err(Errno::EPERM)) => Err(Errno::EPERM),
        Some(opened) => Ok(opened.is_ok()),
        None => Ok(false),
    }
}

fn open_node<P: NixPath + ?Sized>(node: &P, access: OFlag) -> Result<OwnedFd> {
    open(node, access | OFlag::O_CLOEXEC, Mode::empty())
}

/// Creates a node in `/dev` for a device that the kernel has. A container's `/dev` is a tmpfs with copies of the nodes that the
/// host had when the container started, and devtmpfs is not there to add the later ones. A concurrent call of another process
/// creates the same node, so an existing node is no error. Nodes are not removed, and on a disk they survive a reboot: a device
/// with this index has the same number again, unless the module is loaded with another `max_part`. Returns ENOENT if the process
/// may not create nodes there, because the node is still missing, and also in a devtmpfs: the kernel creates the node there a
/// moment after the device, and would never remove one that is not its own.
fn create_node(path: &str, kind: SFlag, number: u64) -> Result<()> {
    if is_devtmpfs("/dev") {
        return Err(Errno::ENOENT);
    }
    match mknod(path, kind, NODE_MODE, number) {
        Ok(()) | Err(Errno::EEXIST) => Ok(()),
        Err(_) => Err(Errno::ENOENT),
    }
}

/// Opens `/dev/loopN`. If the node is missing and the kernel has the device, it creates the node. Returns ENXIO while the kernel
/// unbinds or removes the device, and ENOENT without a device or without a node.
pub(crate) fn open_device(index: u32, writable: bool) -> Result<OwnedFd> {
    match open_listed(index, writable) {
        // The kernel lists a device in `/sys/block` a moment after it created the device and its node. If another process created it just
        // now, the first attempt may have come in between.
        Err(Errno::ENOENT) if exists(index) => open_listed(index, writable),
        opened => opened,
    }
}

/// Opens `/dev/loopN` of a device that exists, as far as the caller knows. Does not look for it in sysfs first, unlike
/// [`open_device`]. If it was removed in the meantime and its node was not, the kernel creates it again.
pub(crate) fn open_existing(index: u32, writable: bool) -> Result<OwnedFd> {
    let access = OFlag::O_NONBLOCK | if writable { OFlag::O_RDWR } else { OFlag::O_RDONLY };
    match open_node(format!("/dev/loop{index}").as_str(), access) {
        Err(Errno::ENOENT) => open_device(index, writable),
        opened => opened,
    }
}

fn open_listed(index: u32, writable: bool) -> Result<OwnedFd> {
    // The node can have outlived the device. To open it would create the device (CONFIG_BLOCK_LEGACY_AUTOLOAD).
    if !exists(index) && std::path::Path::new("/sys/block").exists() {
        return Err(Errno::ENOENT);
    }
    let access = OFlag::O_NONBLOCK | if writable { OFlag::O_RDWR } else { OFlag::O_RDONLY };
    let path = format!("/dev/loop{index}");
    match open_node(path.as_str(), access) {
        Err(Errno::ENOENT) => {
            create_node(&path, SFlag::S_IFBLK, number(index)?)?;
            open_node(path.as_str(), access)
        }
        opened => opened,
    }
}

/// Returns the number of device `index` according to sysfs. It is not 7:`index` if the parameter `max_part` of the module is set.
/// Returns ENOENT if the kernel has no such device.
pub(crate) fn number(index: u32) -> Result<u64> {
    number_in(&attribute(index, "dev"))
}

/// Reads a device number from sysfs.
fn number_in(path: &str) -> Result<u64> {
    let text = std::fs::read_to_string(path).map_err(errno_of)?;
    let (major, minor) = text.trim_end().split_once(':').ok_or(Errno::EIO)?;
    let parse = |text: &str| text.parse().or(Err(Errno::EIO));
    Ok(makedev(parse(major)?, parse(minor)?))
}

/// Returns `st_rdev` of an open device.
pub(crate) fn device_number(device: impl AsFd) -> Result<u64> {
    fstat(device.as_fd()).map(|status| status.st_rdev)
}

/// Returns the indices of all loop devices, bound or not, in ascending order.
pub(crate) fn indices() -> Result<Vec<u32>> {
    let mut indices = indices_in_sysfs_order()?;
    indices.sort_unstable();
    Ok(indices)
}

/// Identifies the kernel that the calls of this thread reach. There is one, but each test of the model has its own.
pub(crate) fn kernel() -> usize {
    0
}

/// Starts a thread that makes calls of this module.
pub(crate) fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> std::io::Result<JoinHandle<()>> {
    std::thread::Builder::new().name(name.to_owned()).spawn(work)
}

/// Returns the indices of all loop devices, bound or not, in the order of the directory in sysfs.
pub(crate) fn indices_in_sysfs_order() -> Result<Vec<u32>> {
    let mut indices = Vec::new();
    for entry in std::fs::read_dir("/sys/block").map_err(errno_of)? {
        let name = entry.map_err(errno_of)?.file_name();
        indices.extend(name.to_str().and_then(|name| name.strip_prefix("loop")?.parse::<u32>().ok()));
    }
    Ok(indices)
}

/// Returns, for each device, the inode number of its directory `loop` in sysfs, or `None` if the device is not bound. The kernel
/// creates that directory when it binds the device, and gives no inode number twice, so the number identifies the attachment.
pub(crate) fn attachment_inodes(indices: &[u32]) -> Result<Vec<Option<u64>>> {
    // The path through /sys/block has a symbolic link and takes three times as long.
    let devices = open("/sys/devices/virtual/block", OFlag::O_PATH | OFlag::O_CLOEXEC, Mode::empty())?;
    let inode = |index: &u32| {
        let status = fstatat(&devices, format!("loop{index}/loop").as_str(), AtFlags::empty());
        status.ok().map(|status| status.st_ino)
    };
    Ok(indices.iter().map(inode).collect())
}

/// Returns `true` if a device is bound to a file, according to sysfs. Opening the device instead would wait for as long as another
/// process changes it (Linux 6.11).
pub(crate) fn is_bound(index: u32) -> bool {
    std::fs::metadata(attribute(index, "loop")).is_ok()
}

/// Reads an attribute of device `index` in sysfs as bytes, without the line feed at its end.
pub(crate) fn attribute_bytes(index: u32, name: &str) -> Result<Vec<u8>> {
    let mut bytes = std::fs::read(attribute(index, name)).map_err(errno_of)?;
    bytes.pop_if(|byte| *byte == b'\n');
    Ok(bytes)
}

/// Returns the number of uevents that the kernel has sent since boot, to any listener.
pub(crate) fn uevent_count() -> Result<u64> {
    let text = std::fs::read_to_string("/sys/kernel/uevent_seqnum").map_err(errno_of)?;
    text.trim_end().parse().or(Err(Errno::EIO))
}

/// Returns the first index that no device can have, from `max_part` of the loop module in sysfs. If the parameter cannot be read,
/// the function assumes the default, devices without partitions.
pub(crate) fn index_limit() -> u32 {
    let text = std::fs::read_to_string("/sys/module/loop/parameters/max_part").unwrap_or_default();
    index_limit_of(text.trim_end().parse().unwrap_or(0))
}

/// Returns `true` if the kernel has the device, with or without a node.
pub(crate) fn exists(index: u32) -> bool {
    // The entry is a symbolic link, which takes longer to follow. With `sysfs.deprecated=1` (up to Linux 6.3) it is a directory.
    std::fs::symlink_metadata(format!("/sys/block/loop{index}")).is_ok()
}

/// Reads `queue/discard_max_bytes`, `discard_max_hw_bytes` or `discard_granularity` of device `index` in sysfs.
pub(crate) fn discard_limit(index: u32, limit: DiscardLimit) -> Result<u64> {
    let name = match limit {
        DiscardLimit::Set => "queue/discard_max_bytes",
        DiscardLimit::Hardware => "queue/discard_max_hw_bytes",
        DiscardLimit::Unit => "queue/discard_granularity",
    };
    let text = read_attribute(index, name).map_err(errno_of)?;
    text.parse().or(Err(Errno::EIO))
}

/// Returns `true` if discards are enabled on a device. Returns `None` if `device` is open for reading only, because the kernel
/// then refuses the call, and before Linux 5.19, where the call succeeds although the limit is 0. The call discards nothing: its range is empty and not aligned to a sector, and `BLKDISCARD` checks
/// the limit of the queue (EOPNOTSUPP) before it checks the range (EINVAL).
pub(crate) fn takes_discards(device: impl AsFd) -> Option<bool> {
    if !kernel_version::is_at_least(5, 19) {
        return None;
    }
    // SAFETY: BLKDISCARD reads two u64.
    match unsafe { ioctl::with(device, block::BLKDISCARD, [1u64, 0]) } {
        Err(Errno::EINVAL) => Some(true),
        Err(Errno::EOPNOTSUPP) => Some(false),
        Ok(_) | Err(_) => None,
    }
}

/// Sets `queue/discard_max_bytes` of device `index` in sysfs. Returns EINVAL if the limit is not a multiple of the granularity or
/// if it is 2^32 or more.
pub(crate) fn set_discard_limit(index: u32, bytes: u64) -> Result<()> {
    let path = attribute(index, "queue/discard_max_bytes");
    let file = std::fs::File::options().write(true).open(path).map_err(errno_of)?;
    // The limit must be a single write, because the kernel interprets each write as a limit.
    std::io::Write::write(&mut &file, bytes.to_string().as_bytes()).map_err(errno_of).map(drop)
}

/// Returns the path of an attribute of device `index` in sysfs.
fn attribute(index: u32, name: &str) -> String {
    format!("/sys/block/loop{index}/{name}")
}

/// Reads an attribute of device `index` in sysfs, without the line feed at its end.
fn read_attribute(index: u32, name: &str) -> std::io::Result<String> {
    let mut text = std::fs::read_to_string(attribute(index, name))?;
    text.truncate(text.trim_end().len());
    Ok(text)
}

fn errno_of(error: std::io::Error) -> Errno {
    Errno::from_raw(error.raw_os_error().unwrap_or(libc::EIO))
}

/// Returns `true` if a device uses direct I/O, according to sysfs. Returns `None` if the device is not bound.
pub(crate) fn direct_io(index: u32) -> Option<bool> {
    read_attribute(index, "loop/dio").ok().map(|flag| flag == "1")
}

/// Returns `true` if a device is bound and stays bound at its last close, according to sysfs. If sysfs is not mounted, it
/// returns `true`, because the device may stay bound.
pub(crate) fn stays_bound(index: u32) -> bool {
    match read_attribute(index, "loop/autoclear") {
        Ok(flag) => flag != "1",
        // The device is not bound, or no longer.
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            !std::path::Path::new("/sys/block").exists()
        }
        Err(_) => true,
    }
}

/// Returns `true` if the kernel unbinds a device only at its last close (Linux 6.11). Earlier ones also do it for a process that has the
/// device open alone, which may keep it open.
pub(crate) fn unbinds_at_last_close() -> bool {
    kernel_version::is_at_least(6, 11)
}

/// `LOOP_CTL_ADD`: creates device `index` and returns the index. Returns EEXIST if the device exists already.
pub(crate) fn add(control: impl AsFd, index: u32) -> Result<u32> {
    // SAFETY: LOOP_CTL_ADD takes an integer.
    unsafe { ioctl::by_value(control, uapi::LOOP_CTL_ADD, index.into()) }
}

/// `LOOP_CTL_REMOVE`: removes device `index`. The kernel waits for RCU grace periods (about 45 ms).
pub(crate) fn remove(control: impl AsFd, index: u32) -> Result<()> {
    // SAFETY: LOOP_CTL_REMOVE takes an integer.
    unsafe { ioctl::by_value(control, uapi::LOOP_CTL_REMOVE, index.into()) }.map(drop)
}

/// `LOOP_CTL_GET_FREE`: returns the lowest unbound index and creates the device if necessary. It does not reserve the index.
pub(crate) fn get_free(control: impl AsFd) -> Result<u32> {
    // SAFETY: LOOP_CTL_GET_FREE takes nothing.
    unsafe { ioctl::by_value(control, uapi::LOOP_CTL_GET_FREE, 0) }
}

/// `LOOP_CONFIGURE` (Linux 5.8): binds the device to a file with all properties in one call.
pub(crate) fn configure(device: impl AsFd, config: &loop_config) -> Result<()> {
    // SAFETY: LOOP_CONFIGURE reads one `struct loop_config`.
    unsafe { ioctl::with(device, uapi::LOOP_CONFIGURE, *config) }.map(drop)
}

/// `LOOP_GET_STATUS64`. Returns ENXIO if the device is not bound.
pub(crate) fn status(device: impl AsFd) -> Result<loop_info64> {
    // SAFETY: LOOP_GET_STATUS64 writes one `struct loop_info64`.
    unsafe { ioctl::with(device, uapi::LOOP_GET_STATUS64, empty_info()) }
}

/// `LOOP_SET_STATUS64`: changes the properties that may change while the device is bound, such as the AUTOCLEAR flag.
pub(crate) fn set_status(device: impl AsFd, info: &loop_info64) -> Result<()> {
    // SAFETY: LOOP_SET_STATUS64 reads one `struct loop_info64`.
    unsafe { ioctl::with(device, uapi::LOOP_SET_STATUS64, *info) }.map(drop)
}

/// `LOOP_CLR_FD`: unbinds the device, immediately or at its last close, depending on the kernel version.
pub(crate) fn clear(device: impl AsFd) -> Result<()> {
    // SAFETY: LOOP_CLR_FD takes nothing.
    unsafe { ioctl::by_value(device, uapi::LOOP_CLR_FD, 0) }.map(drop)
}

/// Opens the device of a descriptor a second time, for reading, so that the kernel counts one opener more. Returns ENXIO while the
/// kernel unbinds or removes the device.
pub(crate) fn open_again(device: impl AsFd, index: u32) -> Result<OwnedFd> {
    let flags = OFlag::O_RDONLY | OFlag::O_NONBLOCK;
    if let Ok(second) = open_node(format!("/dev/loop{index}").as_str(), flags)
        && device_number(&second)? == device_number(&device)?
    {
        return Ok(second);
    }
    // The node is missing, belongs to another device, or `device` is a partition. This takes twice as long.
    open_node(format!("/proc/self/fd/{}", device.as_fd().as_raw_fd()).as_str(), flags)
}

/// Returns the names of the partitions of a device, such as `loop7p1`.
pub(crate) fn partitions(index: u32) -> Result<Vec<String>> {
    let prefix = format!("loop{index}p");
    let mut partitions = Vec::new();
    for entry in std::fs::read_dir(format!("/sys/block/loop{index}")).map_err(errno_of)? {
        let name = entry.map_err(errno_of)?.file_name().into_string();
        partitions.extend(name.ok().filter(|name| name.starts_with(&prefix)));
    }
    Ok(partitions)
}

/// Opens the node of a partition for reading. Returns ENOENT if the node belongs to another device.
pub(crate) fn open_partition(index: u32, name: &str) -> Result<OwnedFd> {
    let partition = open_node(format!("/dev/{name}").as_str(), OFlag::O_RDONLY | OFlag::O_NONBLOCK)?;
    if device_number(&partition)? == number_in(&format!("/sys/block/loop{index}/{name}/dev"))? {
        Ok(partition)
    } else {
        Err(Errno::ENOENT)
    }
}

/// Writes the dirty pages of the device's page cache to its file, and waits for that (sync_file_range(2)). Returns EIO if a write
/// failed, also in the past if the kernel has reported that to no process. Does not flush the file, unlike fsync(2).
pub(crate) fn write_back(device: impl AsFd) -> Result<()> {
    let flags =
        libc::SYNC_FILE_RANGE_WAIT_BEFORE | libc::SYNC_FILE_RANGE_WRITE | libc::SYNC_FILE_RANGE_WAIT_AFTER;
    // SAFETY: sync_file_range takes integers and no pointer.
    let result = unsafe { libc::sync_file_range(device.as_fd().as_raw_fd(), 0, 0, flags) };
    Errno::result(result).map(drop)
}

/// `LOOP_SET_CAPACITY`: sets the capacity of the device to the current size of its file.
pub(crate) fn set_capacity(device: impl AsFd) -> Result<()> {
    // SAFETY: LOOP_SET_CAPACITY takes nothing.
    unsafe { ioctl::by_value(device, uapi::LOOP_SET_CAPACITY, 0) }.map(drop)
}

/// `LOOP_SET_DIRECT_IO` (Linux 4.10): makes the device bypass the page cache of its file, or use it.
pub(crate) fn set_direct_io(device: impl AsFd, enabled: bool) -> Result<()> {
    // SAFETY: LOOP_SET_DIRECT_IO takes an integer.
    unsafe { ioctl::by_value(device, uapi::LOOP_SET_DIRECT_IO, enabled.into()) }.map(drop)
}

/// `LOOP_SET_BLOCK_SIZE` (Linux 4.14): sets the logical block size, in bytes.
pub(crate) fn set_block_size(device: impl AsFd, bytes: u32) -> Result<()> {
    // SAFETY: LOOP_SET_BLOCK_SIZE takes an integer.
    unsafe { ioctl::by_value(device, uapi::LOOP_SET_BLOCK_SIZE, bytes.into()) }.map(drop)
}

/// `BLKGETSIZE64`: returns the size of the device in bytes.
pub(crate) fn size(device: impl AsFd) -> Result<u64> {
    // SAFETY: BLKGETSIZE64 writes one u64, although the header declares it with size_t.
    unsafe { ioctl::with(device, block::BLKGETSIZE64, 0) }
}

/// `BLKSSZGET`: returns the logical block size in bytes.
pub(crate) fn logical_block_size(device: impl AsFd) -> Result<u32> {
    ioctl_blksszget(device).map_err(errno)
}

/// `BLKGETDISKSEQ` (Linux 5.15): returns a sequence number that is unique among all attachments on this machine since
/// boot.
pub(crate) fn disk_sequence(device: impl AsFd) -> Result<u64> {
    // SAFETY: BLKGETDISKSEQ writes one u64.
    unsafe { ioctl::with(device, block::BLKGETDISKSEQ, 0) }
}

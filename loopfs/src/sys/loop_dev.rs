//! All that is asked of the loop driver: `/dev/loop-control`, `/dev/loopN` (loop(4), linux/loop.h), sysfs.
//!
//! Unit tests get `loop_model.rs` in its place, a model of the driver with the same functions.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use ioctl_sys::ioctl;
use linux_raw_sys::{ioctl as block, loop_device as uapi};
use nix::NixPath;
use nix::errno::Errno;
use nix::fcntl::{OFlag, open};
use nix::sys::stat::{Mode, SFlag, fstat, makedev, mknod};
use nix::unistd::{mkdtemp, unlink};

use super::loop_abi::{empty_info, index_limit_of, loop_config, loop_info64};
use super::result::Result;

ioctl!(arg loop_ctl_add with b'L', 0x80);
ioctl!(arg loop_ctl_remove with b'L', 0x81);
ioctl!(none loop_ctl_get_free with b'L', 0x82);
ioctl!(none loop_clr_fd with b'L', 0x01);
ioctl!(none loop_set_capacity with b'L', 0x07);
// These carry a pointer, yet their request numbers encode neither size nor direction
// (linux/loop.h predates that habit), which is the "bad" form.
ioctl!(bad read loop_get_status64 with uapi::LOOP_GET_STATUS64; loop_info64);
ioctl!(bad write loop_set_status64 with uapi::LOOP_SET_STATUS64; loop_info64);
ioctl!(bad write loop_configure with uapi::LOOP_CONFIGURE; loop_config);
// BLKGETSIZE64 is declared with size_t but answers a u64 everywhere, so it is taken by number.
ioctl!(bad read blk_get_size64 with block::BLKGETSIZE64; u64);
ioctl!(bad read blk_ssz_get with block::BLKSSZGET; libc::c_int);
ioctl!(bad read blk_get_diskseq with block::BLKGETDISKSEQ; u64);
ioctl!(bad write blk_discard with block::BLKDISCARD; [u64; 2]);

const CONTROL: &str = "/dev/loop-control";
/// Its device number (Documentation/admin-guide/devices.txt): linux/miscdevice.h is no header for programs.
const CONTROL_NUMBER: u64 = makedev(10, 237);

/// Opens `/dev/loop-control`, and loads the loop module if that is why the node is missing. ENODEV where there is a node
/// and no module for it.
pub(crate) fn open_control() -> Result<OwnedFd> {
    match open_node(CONTROL) {
        Err(Errno::ENOENT) => {
            // Why that failed is not the caller's concern: the node is still missing then.
            load_module().ok();
            open_node(CONTROL)
        }
        opened => opened,
    }
}

/// Has the kernel load the loop module. A process that opens a device number without a driver makes the kernel run
/// modprobe(8), in the root file system of the host, also where the caller is in a container. systemd creates the node that
/// it takes for that at boot (`kmod static-nodes`), and other init systems do not: here a directory below `/dev` has it for
/// a moment. Once the module is loaded, the kernel creates `/dev/loop-control` itself. EPERM, EACCES: without the right to
/// create nodes there.
fn load_module() -> Result<()> {
    // Only this process may enter it. A process that dies here leaves it, and it is gone with the next boot.
    let directory = mkdtemp("/dev/.loopfs-XXXXXX")?;
    let node = directory.join("loop-control");
    let made = mknod(&node, SFlag::S_IFCHR, Mode::S_IRUSR | Mode::S_IWUSR, CONTROL_NUMBER);
    let opened = made.and_then(|()| open_node(&node));
    unlink(&node).ok();
    std::fs::remove_dir(&directory).ok();
    opened.map(drop)
}

fn open_node<P: NixPath + ?Sized>(node: &P) -> Result<OwnedFd> {
    open(node, OFlag::O_RDWR | OFlag::O_CLOEXEC, Mode::empty())
}

/// Opens `/dev/loopN`. ENXIO while the device is being torn down, ENOENT without a node.
pub(crate) fn open_device(index: u32, writable: bool) -> Result<OwnedFd> {
    let access = if writable { OFlag::O_RDWR } else { OFlag::O_RDONLY };
    open(format!("/dev/loop{index}").as_str(), access | OFlag::O_CLOEXEC | OFlag::O_NONBLOCK, Mode::empty())
}

/// `st_rdev` of an open device.
pub(crate) fn device_number(device: impl AsFd) -> Result<u64> {
    fstat(device.as_fd()).map(|status| status.st_rdev)
}

/// Every index the kernel has, bound or not, in order.
pub(crate) fn indices() -> Result<Vec<u32>> {
    let mut indices = Vec::new();
    for entry in std::fs::read_dir("/sys/block").map_err(errno_of)? {
        let name = entry.map_err(errno_of)?.file_name();
        indices.extend(name.to_str().and_then(|name| name.strip_prefix("loop")?.parse::<u32>().ok()));
    }
    indices.sort_unstable();
    Ok(indices)
}

/// The first index that no device can have, by `max_part` of the loop module in sysfs. Where it cannot be read, devices have no
/// partitions, as by default.
pub(crate) fn index_limit() -> u32 {
    let text = std::fs::read_to_string("/sys/module/loop/parameters/max_part").unwrap_or_default();
    index_limit_of(text.trim_end().parse().unwrap_or(0))
}

/// Whether the kernel has the device, node or no node.
pub(crate) fn exists(index: u32) -> bool {
    std::path::Path::new(&format!("/sys/block/loop{index}")).exists()
}

/// How much a device takes in one discard, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DiscardLimit {
    /// What is set; 0 is none at all.
    Set,
    /// What the driver can.
    Hardware,
    /// What others must be multiples of.
    Unit,
}

/// `queue/discard_max_bytes`, `discard_max_hw_bytes` or `discard_granularity` of device `index` in sysfs.
pub(crate) fn discard_limit(index: u32, limit: DiscardLimit) -> Result<u64> {
    let name = match limit {
        DiscardLimit::Set => "discard_max_bytes",
        DiscardLimit::Hardware => "discard_max_hw_bytes",
        DiscardLimit::Unit => "discard_granularity",
    };
    let text = std::fs::read_to_string(queue_file(index, name)).map_err(errno_of)?;
    text.trim_end().parse().or(Err(Errno::EIO))
}

/// Whether a device takes discards; None where its descriptor cannot tell, for one that is open for reading only cannot. Nothing is
/// discarded: `BLKDISCARD` looks at the limit of the queue (EOPNOTSUPP) before it looks at the range (EINVAL), which
/// is empty and no multiple of a sector.
pub(crate) fn takes_discards(device: impl AsFd) -> Option<bool> {
    let fd = device.as_fd().as_raw_fd();
    // SAFETY: BLKDISCARD reads two u64, which the argument is.
    let result = unsafe { blk_discard(fd, &[1, 0]) };
    match Errno::result(result) {
        Err(Errno::EINVAL) => Some(true),
        Err(Errno::EOPNOTSUPP) => Some(false),
        Ok(_) | Err(_) => None,
    }
}

/// `queue/discard_max_bytes` of device `index` in sysfs, set. EINVAL where it is no multiple of the unit, or 2^32 or more.
pub(crate) fn set_discard_limit(index: u32, bytes: u64) -> Result<()> {
    let path = queue_file(index, "discard_max_bytes");
    let file = std::fs::File::options().write(true).open(path).map_err(errno_of)?;
    // One write: the kernel takes each as a limit.
    std::io::Write::write(&mut &file, bytes.to_string().as_bytes()).map_err(errno_of).map(drop)
}

fn queue_file(index: u32, name: &str) -> String {
    format!("/sys/block/loop{index}/queue/{name}")
}

fn errno_of(error: std::io::Error) -> Errno {
    Errno::from_raw(error.raw_os_error().unwrap_or(libc::EIO))
}

/// Whether a device does direct I/O, as sysfs has it; None of one that is bound to nothing.
pub(crate) fn direct_io(index: u32) -> Option<bool> {
    std::fs::read(format!("/sys/block/loop{index}/loop/dio")).ok().map(|text| text.starts_with(b"1"))
}

/// Whether a device that is bound stays so when it is closed, as sysfs has it. Where sysfs is not mounted it may.
pub(crate) fn stays_bound(index: u32) -> bool {
    match std::fs::read(format!("/sys/block/loop{index}/loop/autoclear")) {
        Ok(flag) => !flag.starts_with(b"1"),
        // It is bound to nothing (any more).
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            !std::path::Path::new("/sys/block").exists()
        }
        Err(_) => true,
    }
}

/// `LOOP_CTL_ADD`: makes device `index`; answers the index. EEXIST if it is there already.
pub(crate) fn add(control: impl AsFd, index: u32) -> Result<u32> {
    let fd = control.as_fd().as_raw_fd();
    // SAFETY: LOOP_CTL_ADD takes its argument by value.
    let result = unsafe { loop_ctl_add(fd, index.into()) };
    Errno::result(result).map(|made| made as u32)
}

/// `LOOP_CTL_REMOVE`: removes device `index`; waits for RCU grace periods (about 45 ms).
pub(crate) fn remove(control: impl AsFd, index: u32) -> Result<()> {
    let fd = control.as_fd().as_raw_fd();
    // SAFETY: LOOP_CTL_REMOVE takes its argument by value.
    let result = unsafe { loop_ctl_remove(fd, index.into()) };
    Errno::result(result).map(drop)
}

/// `LOOP_CTL_GET_FREE`: the lowest unbound index, made if need be. Not a reservation.
pub(crate) fn get_free(control: impl AsFd) -> Result<u32> {
    let fd = control.as_fd().as_raw_fd();
    // SAFETY: LOOP_CTL_GET_FREE takes no argument.
    let result = unsafe { loop_ctl_get_free(fd) };
    Errno::result(result).map(|index| index as u32)
}

/// `LOOP_CONFIGURE` (Linux 5.8): binds the device to a file with all properties at once.
pub(crate) fn configure(device: impl AsFd, config: &loop_config) -> Result<()> {
    let fd = device.as_fd().as_raw_fd();
    // SAFETY: LOOP_CONFIGURE reads one `struct loop_config`, which `config` is.
    let result = unsafe { loop_configure(fd, config) };
    Errno::result(result).map(drop)
}

/// `LOOP_GET_STATUS64`: ENXIO when the device is not bound.
pub(crate) fn status(device: impl AsFd) -> Result<loop_info64> {
    let fd = device.as_fd().as_raw_fd();
    let mut info = empty_info();
    // SAFETY: LOOP_GET_STATUS64 writes one `struct loop_info64`, which `info` is.
    let result = unsafe { loop_get_status64(fd, &mut info) };
    Errno::result(result).map(|_| info)
}

/// `LOOP_SET_STATUS64`: changes what may change while bound, such as the AUTOCLEAR flag.
pub(crate) fn set_status(device: impl AsFd, info: &loop_info64) -> Result<()> {
    let fd = device.as_fd().as_raw_fd();
    // SAFETY: LOOP_SET_STATUS64 reads one `struct loop_info64`, which `info` is.
    let result = unsafe { loop_set_status64(fd, info) };
    Errno::result(result).map(drop)
}

/// `LOOP_CLR_FD`: unbinds now or at the last close, as the kernel version has it.
pub(crate) fn clear(device: impl AsFd) -> Result<()> {
    let fd = device.as_fd().as_raw_fd();
    // SAFETY: LOOP_CLR_FD takes no argument.
    let result = unsafe { loop_clr_fd(fd) };
    Errno::result(result).map(drop)
}

/// `LOOP_SET_CAPACITY`: makes the device as large as its file is now.
pub(crate) fn set_capacity(device: impl AsFd) -> Result<()> {
    let fd = device.as_fd().as_raw_fd();
    // SAFETY: LOOP_SET_CAPACITY takes no argument.
    let result = unsafe { loop_set_capacity(fd) };
    Errno::result(result).map(drop)
}

/// `BLKGETSIZE64`: size of the device in bytes.
pub(crate) fn size(device: impl AsFd) -> Result<u64> {
    let fd = device.as_fd().as_raw_fd();
    let mut bytes = 0u64;
    // SAFETY: BLKGETSIZE64 writes one u64.
    let result = unsafe { blk_get_size64(fd, &mut bytes) };
    Errno::result(result).map(|_| bytes)
}

/// `BLKSSZGET`: logical block size in bytes.
pub(crate) fn logical_block_size(device: impl AsFd) -> Result<u32> {
    let fd = device.as_fd().as_raw_fd();
    let mut bytes: libc::c_int = 0;
    // SAFETY: BLKSSZGET writes one int.
    let result = unsafe { blk_ssz_get(fd, &mut bytes) };
    Errno::result(result).map(|_| bytes as u32)
}

/// `BLKGETDISKSEQ` (Linux 5.15): a number that no other attachment on this machine has had
/// since boot.
pub(crate) fn disk_sequence(device: impl AsFd) -> Result<u64> {
    let fd = device.as_fd().as_raw_fd();
    let mut sequence = 0u64;
    // SAFETY: BLKGETDISKSEQ writes one u64.
    let result = unsafe { blk_get_diskseq(fd, &mut sequence) };
    Errno::result(result).map(|_| sequence)
}

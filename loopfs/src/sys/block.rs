//! ioctls of any block device (linux/fs.h).

use std::os::fd::{AsFd, AsRawFd};

use ioctl_sys::ioctl;
use linux_raw_sys::ioctl as uapi;
use nix::errno::Errno;

use super::Result;

// BLKGETSIZE64 is declared with size_t but answers a u64 everywhere, so it is taken by number.
ioctl!(bad read blk_get_size64 with uapi::BLKGETSIZE64; u64);
ioctl!(bad read blk_ssz_get with uapi::BLKSSZGET; libc::c_int);
ioctl!(bad read blk_get_diskseq with uapi::BLKGETDISKSEQ; u64);

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

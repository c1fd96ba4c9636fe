//! `BLKDISCARD` (linux/fs.h), for tests of how devices handle it.

use std::os::fd::{AsFd, AsRawFd};

use ioctl_sys::ioctl;
use linux_raw_sys::ioctl as block;
use nix::errno::Errno;

use super::result::Result;

// The request number encodes neither size nor direction, which is the "bad" form.
ioctl!(bad write blk_discard with block::BLKDISCARD; [u64; 2]);

/// `BLKDISCARD`: discards the content of a range of the device, in bytes. Returns EOPNOTSUPP if discards are disabled or
/// unsupported on the device.
pub(crate) fn discard(device: impl AsFd, start: u64, length: u64) -> Result<()> {
    let fd = device.as_fd().as_raw_fd();
    // SAFETY: BLKDISCARD reads two u64, which the argument is.
    let result = unsafe { blk_discard(fd, &[start, length]) };
    Errno::result(result).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_request_matches_the_kernel_headers() {
        assert_eq!(ioctl_sys::io!(0x12, 119), block::BLKDISCARD);
    }
}

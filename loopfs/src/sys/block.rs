//! `BLKFLSBUF` (linux/fs.h): the page cache of a block device.

use std::os::fd::{AsFd, AsRawFd};

use ioctl_sys::ioctl;
use nix::errno::Errno;

use super::result::Result;

ioctl!(none blk_flsbuf with 0x12, 97);

/// `BLKFLSBUF`: writes the dirty pages of the device, and drops its clean ones. The next read comes from the disk. Returns
/// EACCES without CAP_SYS_ADMIN.
pub(crate) fn flush_buffers(device: impl AsFd) -> Result<()> {
    let fd = device.as_fd().as_raw_fd();
    // SAFETY: BLKFLSBUF takes no argument.
    let result = unsafe { blk_flsbuf(fd) };
    Errno::result(result).map(drop)
}

#[cfg(test)]
mod tests {
    use linux_raw_sys::ioctl as block;

    #[test]
    fn the_request_matches_the_kernel_headers() {
        assert_eq!(ioctl_sys::io!(0x12, 97), block::BLKFLSBUF);
    }
}

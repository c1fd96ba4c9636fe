//! ioctls of `/dev/loop-control` and `/dev/loopN` (loop(4), linux/loop.h).

use std::os::fd::{AsFd, AsRawFd};

use ioctl_sys::ioctl;
use linux_raw_sys::loop_device as uapi;
use nix::errno::Errno;

use super::Result;

pub(crate) use uapi::{loop_config, loop_info64};

pub(crate) const READ_ONLY: u32 = uapi::LO_FLAGS_READ_ONLY as u32;
pub(crate) const AUTOCLEAR: u32 = uapi::LO_FLAGS_AUTOCLEAR as u32;
pub(crate) const DIRECT_IO: u32 = uapi::LO_FLAGS_DIRECT_IO as u32;

ioctl!(arg loop_ctl_add with b'L', 0x80);
ioctl!(arg loop_ctl_remove with b'L', 0x81);
ioctl!(none loop_clr_fd with b'L', 0x01);
ioctl!(none loop_set_capacity with b'L', 0x07);
// These carry a pointer, yet their request numbers encode neither size nor direction
// (linux/loop.h predates that habit), which is the "bad" form.
ioctl!(bad read loop_get_status64 with uapi::LOOP_GET_STATUS64; loop_info64);
ioctl!(bad write loop_set_status64 with uapi::LOOP_SET_STATUS64; loop_info64);
ioctl!(bad write loop_configure with uapi::LOOP_CONFIGURE; loop_config);

/// `LOOP_CTL_ADD`: makes device `index`; answers the index. EEXIST if it is there already.
pub(crate) fn add(control: impl AsFd, index: u32) -> Result<u32> {
    let fd = control.as_fd().as_raw_fd();
    // SAFETY: LOOP_CTL_ADD takes its argument by value.
    let result = unsafe { loop_ctl_add(fd, index as _) };
    Errno::result(result).map(|made| made as u32)
}

/// `LOOP_CTL_REMOVE`: removes device `index`; waits for RCU grace periods (about 45 ms).
pub(crate) fn remove(control: impl AsFd, index: u32) -> Result<()> {
    let fd = control.as_fd().as_raw_fd();
    // SAFETY: LOOP_CTL_REMOVE takes its argument by value.
    let result = unsafe { loop_ctl_remove(fd, index as _) };
    Errno::result(result).map(drop)
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

pub(crate) const fn empty_info() -> loop_info64 {
    loop_info64 {
        lo_device: 0,
        lo_inode: 0,
        lo_rdevice: 0,
        lo_offset: 0,
        lo_sizelimit: 0,
        lo_number: 0,
        lo_encrypt_type: 0,
        lo_encrypt_key_size: 0,
        lo_flags: 0,
        lo_file_name: [0; 64],
        lo_crypt_name: [0; 64],
        lo_encrypt_key: [0; 32],
        lo_init: [0; 2],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layouts_and_requests_match_the_kernel_headers() {
        assert_eq!(size_of::<loop_info64>(), 232);
        assert_eq!(size_of::<loop_config>(), 304);
        assert_eq!(std::mem::offset_of!(loop_info64, lo_flags), 52);
        assert_eq!(std::mem::offset_of!(loop_info64, lo_file_name), 56);
        assert_eq!(ioctl_sys::io!(b'L', 0x80), uapi::LOOP_CTL_ADD);
        assert_eq!(ioctl_sys::io!(b'L', 0x81), uapi::LOOP_CTL_REMOVE);
        assert_eq!(ioctl_sys::io!(b'L', 0x01), uapi::LOOP_CLR_FD);
        assert_eq!(ioctl_sys::io!(b'L', 0x07), uapi::LOOP_SET_CAPACITY);
        assert_eq!(uapi::LOOP_CONFIGURE, 0x4C0A);
        assert_eq!(uapi::LOOP_GET_STATUS64, 0x4C05);
    }
}

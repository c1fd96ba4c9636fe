//! Bare system calls, with which `benches/loop` compares the library. This module is not part of the API. It is only
//! guaranteed to compile with the benchmarks of the same commit.

use std::fs::File;
use std::io::Result;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use nix::errno::Errno;

use crate::sys::loop_abi::{self as abi, loop_config};
use crate::sys::loop_dev;
use crate::sys::quotactl::{self, DiskQuota};

/// `/dev/loop-control`.
#[derive(Debug)]
pub struct ControlDevice(OwnedFd);

impl ControlDevice {
    pub fn open() -> Result<Self> {
        Ok(Self(loop_dev::open_control()?))
    }

    /// `LOOP_CTL_ADD`. Succeeds if the device exists already.
    pub fn add(&self, index: u32) -> Result<()> {
        match loop_dev::add(&self.0, index) {
            Ok(_) | Err(Errno::EEXIST) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }

    /// `LOOP_CTL_REMOVE`.
    pub fn remove(&self, index: u32) -> Result<()> {
        Ok(loop_dev::remove(&self.0, index)?)
    }

    /// `LOOP_CTL_GET_FREE`.
    pub fn get_free(&self) -> Result<u32> {
        Ok(loop_dev::get_free(&self.0)?)
    }
}

/// Returns the indices of all loop devices, bound or not.
pub fn indices() -> Result<Vec<u32>> {
    Ok(loop_dev::indices()?)
}

/// The properties with which a file is attached. They equal those of `AttachOptions::new`, so that both request the same from
/// the kernel.
pub struct Configuration(loop_config);

impl Configuration {
    /// Creates a configuration. `file` must be open with `O_DIRECT` and must stay open until the last [`attach`].
    pub fn new(file: BorrowedFd<'_>, label: &str) -> Self {
        let mut config = abi::config(file.as_raw_fd(), 512);
        config.info.lo_flags = abi::DIRECT_IO;
        config.info.lo_file_name[..label.len()].copy_from_slice(label.as_bytes());
        Self(config)
    }
}

/// open(2) and `LOOP_CONFIGURE`.
pub fn attach(index: u32, configuration: &Configuration) -> Result<OwnedFd> {
    let device = loop_dev::open_existing(index, true)?;
    loop_dev::configure(&device, &configuration.0)?;
    Ok(device)
}

/// A second open(2), `LOOP_CLR_FD` and close(2) of both: the fewest calls that detach a device and lose no write.
pub fn detach(device: OwnedFd, index: u32) -> Result<()> {
    let second = File::open(format!("/dev/loop{index}"))?;
    loop_dev::clear(&second)?;
    drop(device);
    Ok(())
}

/// `Q_XGETNEXTQUOTA`: returns the first used id that is at least `id`, or `None` if there is none.
pub fn next_id(fs: impl AsFd, id: u32) -> Result<Option<u32>> {
    match quotactl::get_next(fs.as_fd(), id) {
        Ok(quota) => Ok(Some(quota.id)),
        Err(Errno::ENOENT | Errno::ESRCH) => Ok(None),
        Err(errno) => Err(errno.into()),
    }
}

/// `Q_XSETQLIM`: sets the hard limits. 0 means no limit.
pub fn limit_id(fs: impl AsFd, id: u32, bytes: u64, inodes: u64) -> Result<()> {
    let mut quota = DiskQuota {
        version: quotactl::FS_DQUOT_VERSION,
        flags: quotactl::FS_PROJ_QUOTA,
        fieldmask: quotactl::FS_DQ_BHARD | quotactl::FS_DQ_IHARD,
        id,
        blk_hardlimit: bytes / 512,
        ino_hardlimit: inodes,
        ..DiskQuota::default()
    };
    Ok(quotactl::set_limits(fs.as_fd(), &mut quota)?)
}

/// Marks a new image as tracked, as `VolumeStore` does, so that its first attachment need not search all devices.
pub fn mark_new_file_tracked(image: impl AsFd) -> Result<()> {
    Ok(crate::loop_device::mark_new_file_tracked(image)?)
}

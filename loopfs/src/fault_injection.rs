//! Faults that tests inject.

use std::os::fd::AsFd;

use crate::error::{Context, Result};
use crate::sys::{loop_abi, loop_dev, test_calls};

/// Shuts an XFS down as an I/O error does, without writing its log (`XFS_IOC_GOINGDOWN`). Unmounting and mounting it
/// again restores it.
pub fn shut_down_xfs(file: impl AsFd) -> Result<()> {
    test_calls::shut_down_xfs(file).context("shut down", "an XFS")
}

/// Freezes a file system (`FIFREEZE`). Calls that write to it wait until it is thawed.
pub fn freeze(file: impl AsFd) -> Result<()> {
    test_calls::freeze(file).context("freeze", "a file system")
}

/// Thaws a file system (`FITHAW`).
pub fn thaw(file: impl AsFd) -> Result<()> {
    test_calls::thaw(file).context("thaw", "a file system")
}

/// A change of the status of a loop device (`LOOP_SET_STATUS64`).
#[derive(Clone, Copy, Debug)]
pub enum LoopStatusChange {
    /// The device begins at this byte of its file.
    Offset(u64),
    /// The device has at most this size.
    SizeLimit(u64),
    /// The device is unbound at its last close.
    AutoClear,
    /// The device stays bound at its last close.
    Persistent,
    /// The kernel scans the device for partitions.
    PartitionScan,
    /// The first character of the label is another one.
    Label,
}

/// Changes the status of a loop device, as a process can that has it open for writing.
pub fn change_loop_status(device: impl AsFd, change: LoopStatusChange) -> Result<()> {
    let changed = loop_dev::status(&device).and_then(|mut info| {
        match change {
            LoopStatusChange::Offset(offset) => info.lo_offset = offset,
            LoopStatusChange::SizeLimit(limit) => info.lo_sizelimit = limit,
            LoopStatusChange::AutoClear => info.lo_flags |= loop_abi::AUTOCLEAR,
            LoopStatusChange::Persistent => info.lo_flags &= !loop_abi::AUTOCLEAR,
            LoopStatusChange::PartitionScan => info.lo_flags |= loop_abi::PARTITION_SCAN,
            LoopStatusChange::Label => info.lo_file_name[0] = b'x',
        }
        loop_dev::set_status(&device, &info)
    });
    changed.context("change the status of", "a loop device")
}

/// Binds a loop device that is bound to no file (`LOOP_SET_FD`), as a process can that has it open.
pub fn bind_loop_device(device: impl AsFd, file: impl AsFd) -> Result<()> {
    test_calls::set_file(device, file).context("bind", "a loop device")
}

/// Binds a read-only loop device to another file (`LOOP_CHANGE_FD`), as a process can that has it open.
pub fn change_loop_file(device: impl AsFd, file: impl AsFd) -> Result<()> {
    test_calls::change_file(device, file).context("change the file of", "a loop device")
}

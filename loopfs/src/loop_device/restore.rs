//! Repairing a device that another process has changed.

use std::os::fd::AsFd;

use super::binding::BackingFile;
use super::device::{BEYOND_ALL_INDICES, LoopDevice, Status, node_name, read_info, read_status};
use super::discard::{self, Discard};
use super::options::{AttachOptions, BlockSize, DirectIo, Lifetime};
use crate::error::{Context, Result};
use crate::sys::{loop_abi as abi, loop_dev};

impl LoopDevice {
    /// Returns how the device differs from an attachment of `image` with these options, or `None` if it does not. Any process that may
    /// open the device can change it ([which](super::LoopControl#devices-that-untrusted-programs-can-open)).
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`](crate::ErrorKind::NotFound): the device is bound to no file.
    pub fn difference(&self, image: impl AsFd, options: &AttachOptions) -> Result<Option<String>> {
        let status = read_status(&self.fd, self.index())?;
        let backing = status.binding.backing;
        if backing != BackingFile::of(image)? {
            return Ok(Some(format!("it is bound to another file, {backing}")));
        }
        if let Some(mismatch) = options.mismatch(&status) {
            return Ok(Some(mismatch));
        }
        let Status { label, auto_clear, partition_scan, .. } = &status;
        if !status.is_labelled(&options.label) {
            return Ok(Some(format!("label {:?} requested, {label:?} found", options.label)));
        }
        if *auto_clear && options.lifetime == Lifetime::Persistent {
            return Ok(Some("the kernel detaches it at its last close".to_owned()));
        }
        // With `max_part`, the kernel scans every device.
        if *partition_scan && !options.partition_scan && loop_dev::index_limit() == BEYOND_ALL_INDICES {
            return Ok(Some("the kernel scans its content for partitions".to_owned()));
        }
        let discards =
            options.discard == Discard::Disabled && discard::current(self, self.index())? == Discard::Enabled;
        Ok(discards.then(|| "its discards are enabled".to_owned()))
    }

    /// Gives the device the properties of an attachment of `image` with these options again, and returns how it still differs. The
    /// kernel neither ends the scan for partitions nor replaces the file of a device: detach that device and attach the file again.
    /// Users of the device are not interrupted.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`](crate::ErrorKind::Busy): a process has the device open exclusively (Linux 6.19, no longer 7.3), or has
    /// written to it during the call; repeat it. [`ErrorKind::NotFound`](crate::ErrorKind::NotFound): the device is bound to no file.
    #[doc(alias = "LOOP_SET_STATUS64")]
    pub fn restore(&self, image: impl AsFd, options: &AttachOptions) -> Result<Option<String>> {
        let index = self.index();
        let found = self.difference(&image, options)?;
        let status = read_status(&self.fd, index)?;
        if found.is_none() || status.binding.backing != BackingFile::of(&image)? {
            return Ok(found);
        }
        let operation = "restore the properties of";
        let mut info = read_info(&self.fd, index)?;
        info.lo_offset = options.range.offset;
        info.lo_sizelimit = options.range.size_limit.map_or(0, |limit| limit.get());
        info.lo_file_name = options.file_name();
        if options.lifetime == Lifetime::Persistent {
            info.lo_flags &= !abi::AUTOCLEAR;
        }
        loop_dev::set_status(&self.fd, &info).context(operation, node_name(index))?;
        if let BlockSize::Exact(size) = options.block_size
            && size != status.block_size
        {
            loop_dev::set_block_size(&self.fd, size).context(operation, node_name(index))?;
        }
        if options.direct_io != DirectIo::Off && !status.direct_io {
            // What is left then is returned.
            loop_dev::set_direct_io(&self.fd, true).ok();
        }
        discard::set(&self.fd, index, options.discard)?;
        self.difference(image, options)
    }
}

//! Options of an attachment.

use std::num::NonZeroU64;
use std::os::fd::AsFd;
use std::time::Duration;

use nix::sys::stat::FileStat;

use super::binding::{Access, BackingRange};
use super::device::{Status, fitting_label};
use super::discard::Discard;
use crate::error::{Context, Error, ErrorKind, Explanation, Result};
use crate::sys::statx;

/// Whether I/O of the device bypasses the page cache of its file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DirectIo {
    /// Direct I/O is required. Without it data is cached twice, and only a flush limits the loss at a crash.
    Required,
    /// Direct I/O is used if the kernel grants it. From Linux 6.15 on the kernel does not grant it for blocks of 512 bytes on a file
    /// that shares blocks with another one.
    Preferred,
    /// Buffered I/O is required.
    Off,
}

impl DirectIo {
    /// Parses the text that [`as_str`](Self::as_str) returns.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        [Self::Required, Self::Preferred, Self::Off].into_iter().find(|value| value.as_str() == text)
    }

    /// Returns `required`, `preferred` or `off`.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Required => "required",
            Self::Preferred => "preferred",
            Self::Off => "off",
        }
    }
}

/// Logical block size of the device, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum BlockSize {
    /// This size: a power of two from 512 to 4096. Every program can use 512.
    Exact(u32),
    /// The smallest size in which the file takes direct I/O (`STATX_DIOALIGN`, Linux 6.1; 512 before). It
    /// may differ between a file and its reflinked copy.
    MatchDirectIo,
    /// The default of the kernel, which depends on its version and on how the file was opened.
    KernelDefault,
}

/// How long the device stays bound.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Lifetime {
    /// Until it is detached or the machine stops.
    #[default]
    Persistent,
    /// Until its last user closes it: mount its file system before dropping the [`LoopDevice`](super::LoopDevice). A bind mount of its node
    /// does not have the device open.
    AutoClear,
}

/// Which device to bind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum IndexPolicy {
    /// An idle device from the pool of the [`LoopControl`](super::LoopControl).
    #[default]
    Pool,
    /// The index that `LOOP_CTL_GET_FREE` returns, as other programs use it.
    Any,
    /// This index; the device is added if it does not exist.
    Exact(u32),
}

/// The options of an attachment. [`new`](Self::new) returns the defaults, which the other methods change.
#[derive(Clone, Debug)]
#[must_use]
pub struct AttachOptions {
    pub(super) access: Access,
    pub(super) range: BackingRange,
    pub(super) direct_io: DirectIo,
    pub(super) block_size: BlockSize,
    pub(super) discard: Discard,
    pub(super) lifetime: Lifetime,
    pub(super) partition_scan: bool,
    pub(super) index: IndexPolicy,
    pub(super) label: String,
    pub(super) deadline: Duration,
}

impl AttachOptions {
    /// Returns the defaults: the whole file, direct I/O required, blocks of 512 bytes, discards enabled, persistent, an index from the
    /// pool, a deadline of ten seconds.
    pub fn new(access: Access) -> Self {
        Self {
            access,
            range: BackingRange::default(),
            direct_io: DirectIo::Required,
            block_size: BlockSize::Exact(512),
            discard: Discard::Enabled,
            lifetime: Lifetime::Persistent,
            partition_scan: false,
            index: IndexPolicy::Pool,
            label: String::new(),
            deadline: Duration::from_secs(10),
        }
    }

    /// Sets where the device begins in the file, in bytes: a multiple of the block size.
    pub fn offset(mut self, offset: u64) -> Self {
        self.range.offset = offset;
        self
    }

    /// Sets the size limit of the device, in bytes: a multiple of the block size.
    pub fn size_limit(mut self, limit: NonZeroU64) -> Self {
        self.range.size_limit = Some(limit);
        self
    }

    /// Sets whether I/O bypasses the page cache.
    pub fn direct_io(mut self, direct_io: DirectIo) -> Self {
        self.direct_io = direct_io;
        self
    }

    /// Sets the logical block size.
    pub fn block_size(mut self, block_size: BlockSize) -> Self {
        self.block_size = block_size;
        self
    }

    /// Enables or disables discards, by `queue/discard_max_bytes` of the device in sysfs. A device that is attached already is changed
    /// accordingly, but newer kernels (6.18) keep disabled discards disabled until the index is removed. Users of the device are not
    /// interrupted; a file system that was mounted from it with the option `discard` may log rejected discards.
    ///
    /// Writing zeroes is different: fallocate(2) with `FALLOC_FL_PUNCH_HOLE` on the node makes a hole even if discards are
    /// disabled, and the `BLKZEROOUT` of mkfs(8) never makes one.
    #[doc(alias = "discard_max_bytes")]
    pub fn discard(mut self, discard: Discard) -> Self {
        self.discard = discard;
        self
    }

    /// Sets how long the device stays bound.
    pub fn lifetime(mut self, lifetime: Lifetime) -> Self {
        self.lifetime = lifetime;
        self
    }

    /// Makes the kernel scan the device for partitions, which [`LoopDevice::partitions`](super::LoopDevice::partitions) returns. It then
    /// parses what is in the file, so do this only for files that you trust. Partitions have numbers that the kernel gives to those of any
    /// disk later, so make no partition available to other programs by a mount of its node. If the parameter `max_part` of the loop
    /// module is set, the kernel scans every device.
    #[doc(alias = "LO_FLAGS_PARTSCAN")]
    pub fn partition_scan(mut self, scan: bool) -> Self {
        self.partition_scan = scan;
        self
    }

    /// Sets which device to bind.
    pub fn index(mut self, index: IndexPolicy) -> Self {
        self.index = index;
        self
    }

    /// Sets a label of at most 63 bytes, which `losetup` shows as the name of the backing file. It tells administrators which program uses
    /// the device, and has no meaning for the kernel. Longer labels are truncated.
    pub fn label(mut self, label: &str) -> Self {
        self.label = fitting_label(label).to_owned();
        self
    }

    /// Sets the time after which the attachment fails, if other programs take the devices or hold the lock of the file.
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// Returns the label as the kernel takes it.
    pub(super) fn file_name(&self) -> [u8; 64] {
        let mut name = [0; 64];
        name[..self.label.len()].copy_from_slice(self.label.as_bytes());
        name
    }

    /// Returns how a bound device differs from these options, or `None` if it meets them.
    pub(super) fn mismatch(&self, status: &Status) -> Option<String> {
        if status.binding.access != self.access {
            return Some(format!("{:?} requested, {:?} granted", self.access, status.binding.access));
        }
        if status.binding.range != self.range {
            return Some(format!("{:?} requested, {:?} granted", self.range, status.binding.range));
        }
        if let BlockSize::Exact(requested) = self.block_size
            && requested != status.block_size
        {
            return Some(format!("logical block size {requested} requested, {} granted", status.block_size));
        }
        if self.partition_scan && !status.partition_scan {
            return Some(
                "a scan for partitions requested, and the kernel does not scan the device".to_owned(),
            );
        }
        match (self.direct_io, status.direct_io) {
            (DirectIo::Required, false) => Some("direct I/O requested, buffered I/O granted".to_owned()),
            (DirectIo::Off, true) => Some("buffered I/O requested, direct I/O granted".to_owned()),
            _ => None,
        }
    }

    /// Returns how the device of a file differs from all that these options request, or `None` if it does not. A kernel that keeps
    /// discards disabled may not grant them, so these are set instead.
    pub(super) fn conflict(&self, status: &Status, image: impl AsFd) -> Result<Option<Explanation>> {
        if let Some(mismatch) = self.mismatch(status) {
            return Ok(Some(mismatch.into()));
        }
        let Status { label, auto_clear, block_size, .. } = status;
        if !self.label.is_empty() && !status.is_labelled(&self.label) {
            return Ok(Some(format!("label {:?} requested, {label:?} found", self.label).into()));
        }
        match (self.lifetime, auto_clear) {
            (Lifetime::Persistent, true) => {
                return Ok(Some(Explanation::of(
                    "the kernel detaches it at its last close, as another user or an earlier detach requested",
                    "wait for that, or cancel it (LoopDevice::cancel_detach)",
                )));
            }
            (Lifetime::AutoClear, false) => {
                return Ok(Some("AutoClear requested, and the device is persistent".into()));
            }
            _ => {}
        }
        if self.block_size == BlockSize::MatchDirectIo {
            // The file may have been cloned since, which raises the unit of its direct I/O (Linux 6.15).
            let unit = direct_io_unit(image)?;
            if *block_size > unit {
                return Ok(Some(format!("logical block size {unit} requested, {block_size} found").into()));
            }
        }
        Ok(None)
    }

    /// Checks that a file with this status can be attached as requested, a writable one without losing its end. `block_size` is that of the device, as far as it is
    /// known.
    pub(super) fn check_file(&self, status: &FileStat, block_size: u32) -> Result<()> {
        let invalid = |cause: String| Error::new(ErrorKind::InvalidInput, "attach", "the file", cause);
        match status.st_mode & libc::S_IFMT {
            libc::S_IFREG => {}
            libc::S_IFBLK => {
                let cause = "it is a block device, which can be used without a loop device";
                return Err(invalid(cause.to_owned()));
            }
            _ => return Err(invalid("it is no regular file".to_owned())),
        }
        let (size, offset, unit) = (status.st_size as u64, self.range.offset, u64::from(block_size.max(512)));
        let rest = size.saturating_sub(offset);
        if rest < unit {
            return Err(invalid(format!(
                "it has {size} bytes, and the device would begin at {offset}: less than one block of {unit} bytes is left"
            )));
        }
        if self.access == Access::ReadOnly {
            // So what is left of a truncated image can be saved.
            return Ok(());
        }
        match self.range.size_limit {
            Some(limit) if limit.get() > rest => Err(invalid(format!(
                "the size limit is {limit}, and the file has only {rest} bytes from {offset} on"
            ))),
            Some(_) => Ok(()),
            None if !rest.is_multiple_of(unit) => Err(invalid(format!(
                "the device would lack the last {} bytes, because blocks have {unit} bytes",
                rest % unit
            ))
            .with_remedy("make the file larger (truncate(1)), or set a size limit")),
            None => Ok(()),
        }
    }

    pub(super) fn check(&self) -> Result<()> {
        let invalid =
            |detail: String| Err(Error::new(ErrorKind::InvalidInput, "attach", "a loop device", detail));
        let unit = match self.block_size {
            BlockSize::Exact(size) if !(512..=4096).contains(&size) || !size.is_power_of_two() => {
                return invalid(format!("block size {size} is not 512, 1024, 2048 or 4096"));
            }
            BlockSize::Exact(size) => u64::from(size),
            BlockSize::MatchDirectIo | BlockSize::KernelDefault => 512,
        };
        let limit = self.range.size_limit.map_or(0, NonZeroU64::get);
        for (name, value) in [("offset", self.range.offset), ("size limit", limit)] {
            // The kernel would accept it, and silently drop direct I/O or the last bytes.
            if !value.is_multiple_of(unit) || i64::try_from(value).is_err() {
                return invalid(format!("{name} {value} is not a multiple of {unit} that a file can have"));
            }
        }
        if self.label.contains('\0') {
            return invalid(format!("label {:?} holds a NUL", self.label));
        }
        Ok(())
    }
}

/// Returns the smallest block size in which a file takes direct I/O.
pub(super) fn direct_io_unit(file: impl AsFd) -> Result<u32> {
    let unit = statx::direct_io_alignment(file).context("statx", "the backing file")?;
    Ok(unit.clamp(512, 4096))
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    const MIB: u64 = 1 << 20;

    #[rstest]
    #[case::whole(MIB, 0, None, 512, None)]
    #[case::part(MIB, 4096, NonZeroU64::new(4096), 4096, None)]
    #[case::empty(0, 0, None, 512, Some("0 bytes"))]
    #[case::less_than_a_block(511, 0, None, 512, Some("less than one block"))]
    #[case::tail(5000, 0, None, 512, Some("lack the last 392 bytes"))]
    #[case::tail_of_large_blocks(5120, 0, None, 4096, Some("lack the last 1024 bytes"))]
    #[case::tail_beyond_the_limit(5000, 0, NonZeroU64::new(4096), 512, None)]
    #[case::limit_beyond_the_end(MIB, 0, NonZeroU64::new(MIB + 512), 512, Some("only 1048576 bytes"))]
    #[case::offset_beyond_the_end(MIB, 2 * MIB, None, 512, Some("begin at 2097152"))]
    fn unsuitable_image_files_are_refused(
        #[case] size: u64,
        #[case] offset: u64,
        #[case] limit: Option<NonZeroU64>,
        #[case] block_size: u32,
        #[case] refused: Option<&str>,
    ) {
        let file = tempfile::tempfile().unwrap();
        file.set_len(size).unwrap();
        let mut options = AttachOptions::new(Access::ReadWrite).offset(offset);
        options.range.size_limit = limit;
        let checked = options.check_file(&nix::sys::stat::fstat(&file).unwrap(), block_size);
        match refused {
            None => checked.unwrap(),
            Some(text) => {
                let error = checked.unwrap_err();
                assert_eq!(error.kind(), ErrorKind::InvalidInput);
                assert!(error.to_string().contains(text), "{error}");
            }
        }
    }

    #[test]
    fn other_kinds_of_files_are_refused() {
        for path in ["/dev/null", "/"] {
            let status = nix::sys::stat::stat(path).unwrap();
            let error = AttachOptions::new(Access::ReadOnly).check_file(&status, 512).unwrap_err();
            assert!(error.to_string().contains("no regular file"), "{path}: {error}");
        }
    }
}

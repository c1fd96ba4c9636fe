//! The settings of an image, its capacity, and whether it may share blocks, in extended attributes of it.
//!
//! Without a recorded capacity, a truncated image would look like a smaller volume. The capacity is written after the size of the
//! file changes and read before that size, and a size only grows. So the recorded capacity is never more than the size of an image
//! that is not truncated, even if another process expands the image concurrently or dies while it does.

use std::ffi::CStr;
use std::os::fd::AsFd;

use nix::errno::Errno;

use super::attribute::{self, field};
use crate::error::{Context, Result};
use crate::loop_device::DirectIo;
use crate::sys::xattr;
use crate::units::Bytes;
use crate::volume_store::source::ContentSource;
use crate::volume_store::spec::{LogicalBlockSize, Provisioning};

/// The attribute of an image. It is written before the image has a name.
const IMAGE: &CStr = c"trusted.loopfs.image";
const CAPACITY: &CStr = c"trusted.loopfs.capacity";
/// The attribute of an image that was cloned from another, or that another was cloned from. No other image shares blocks.
const SHARES: &CStr = c"trusted.loopfs.shares";

/// The settings of the image of a Block volume, which are recorded and fixed at creation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Image {
    /// Whether its device must have direct I/O.
    pub direct_io: DirectIo,
    /// The logical block size of its device in each attachment: the content depends on it.
    pub logical_block_size: LogicalBlockSize,
    /// When the image gets its blocks.
    pub provisioning: Provisioning,
}

impl Image {
    /// Records the settings on an image that has no name yet.
    pub(crate) fn record(self, image: impl AsFd, entry: ContentSource<'_>) -> Result<()> {
        let Self { direct_io, logical_block_size, provisioning } = self;
        let text = format!(
            "direct-io={} logical-block-size={logical_block_size} provisioning={}",
            direct_io.as_str(),
            provisioning.as_str()
        );
        xattr::set(image, IMAGE, text.as_bytes()).context("set up", entry)
    }

    pub(crate) fn read(image: impl AsFd) -> Result<Self> {
        attribute::require(image, IMAGE, "read the settings of", "an image", Self::parse)
    }

    fn parse(text: &str) -> Option<Self> {
        Some(Self {
            direct_io: DirectIo::parse(field(text, "direct-io")?)?,
            logical_block_size: LogicalBlockSize::parse(field(text, "logical-block-size")?)?,
            provisioning: Provisioning::parse(field(text, "provisioning")?)?,
        })
    }
}

/// Records the size of an image that has no name yet, or whose lock is held.
pub(crate) fn write_capacity(image: impl AsFd, Bytes(capacity): Bytes) -> Result<()> {
    xattr::set(image, CAPACITY, capacity.to_string().as_bytes()).context("record the capacity of", "an image")
}

/// Reads the recorded capacity.
pub(crate) fn read_capacity(image: impl AsFd) -> Result<Bytes> {
    let parse = |text: &str| text.parse().ok().map(Bytes);
    attribute::require(image, CAPACITY, "read the capacity of", "an image", parse)
}

/// Marks an image whose blocks may be shared, before they are. After a crash an image may be marked that shares none.
pub(crate) fn mark_sharing(image: impl AsFd) -> Result<(), Errno> {
    xattr::set(image, SHARES, b"yes")
}

/// Returns `true` if the image may share blocks with other files.
pub(crate) fn may_share(image: impl AsFd) -> Result<bool> {
    attribute::is_set(image, SHARES, "an image")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A later version can add keys, so unknown keys are ignored.
    #[test]
    fn invalid_settings_are_refused() {
        let settings = "direct-io=required logical-block-size=4096 provisioning=thin";
        assert!(Image::parse(&format!("{settings} later=x")).is_some());
        for text in ["", "direct-io=required", &settings.replace("required", "x")] {
            assert_eq!(Image::parse(text), None, "{text}");
        }
    }
}

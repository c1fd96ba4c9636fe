//! The settings of an image, in an extended attribute of it.

use std::ffi::CStr;
use std::os::fd::AsFd;

use super::attribute::{self, field};
use crate::error::{Context, Result};
use crate::loop_device::DirectIo;
use crate::sys::xattr;
use crate::volume_store::source::ContentSource;
use crate::volume_store::spec::{LogicalBlockSize, Provisioning};

/// The attribute of an image. It is written before the image has a name.
const IMAGE: &CStr = c"trusted.loopfs.image";

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_read_back_as_recorded() {
        for direct_io in [DirectIo::Required, DirectIo::Preferred] {
            for logical_block_size in [LogicalBlockSize::B512, LogicalBlockSize::B4096] {
                for provisioning in [Provisioning::Thick, Provisioning::Thin] {
                    let image = Image { direct_io, logical_block_size, provisioning };
                    let text = format!(
                        "direct-io={} logical-block-size={logical_block_size} provisioning={} later=x",
                        direct_io.as_str(),
                        provisioning.as_str()
                    );
                    assert_eq!(Image::parse(&text), Some(image));
                }
            }
        }
        for text in ["", "direct-io=required", "direct-io=x logical-block-size=512 provisioning=thin"] {
            assert_eq!(Image::parse(text), None, "{text}");
        }
    }
}

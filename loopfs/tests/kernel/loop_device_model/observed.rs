//! What the kernel reports of the devices, read from sysfs. This opens no device, so it delays no detach, and it does not depend
//! on the code under test.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use super::RANGE;
use super::calls::{Attachment, Mapping};
use crate::environment::loop_devices;

/// Returns the attachments of the files in a directory, by index.
pub(super) fn attachments(directory: &Path) -> Vec<Attachment> {
    let mut all: Vec<_> =
        loop_devices().into_iter().filter_map(|index| attachment(index, directory)).collect();
    all.sort_by_key(|attachment| attachment.index);
    all
}

/// Returns the attachment of a device, if it is bound to a file in a directory.
pub(super) fn attachment(index: u32, directory: &Path) -> Option<Attachment> {
    let backing = PathBuf::from(attribute(index, "loop/backing_file")?);
    if backing.parent() != Some(directory) {
        return None;
    }
    let number = |name: &str| attribute(index, name).unwrap().parse::<u64>().unwrap();
    let mapping = Mapping {
        read_only: number("ro") == 1,
        offset: number("loop/offset"),
        limit: number("loop/sizelimit"),
        block_size: u32::try_from(number("queue/logical_block_size")).unwrap(),
    };
    Some(Attachment {
        index,
        sequence: number("diskseq"),
        inode: std::os::unix::fs::MetadataExt::ino(&fs::metadata(backing).unwrap()),
        mapping,
        size: number("size") * 512,
        direct_io: number("loop/dio") == 1,
        auto_clear: number("loop/autoclear") == 1,
        discard: number("queue/discard_max_bytes") > 0,
    })
}

/// Returns the indices in the range of the pools that have a device, bound or not.
pub(super) fn existing_in_range() -> BTreeSet<u32> {
    loop_devices().into_iter().filter(|index| RANGE.contains(index)).collect()
}

/// Returns `true` if a device is bound to any file.
pub(super) fn is_bound(index: u32) -> bool {
    attribute(index, "loop/backing_file").is_some()
}

fn attribute(index: u32, name: &str) -> Option<String> {
    let text = fs::read_to_string(format!("/sys/block/loop{index}/{name}")).ok()?;
    text.strip_suffix('\n').map(str::to_owned)
}

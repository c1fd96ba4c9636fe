//! The edges of a device: whether they are blank, and the metadata of other formats at its end.

use std::fmt;
use std::fs::File;
use std::io::Result;
use std::os::unix::fs::FileExt;

/// The number of bytes at the beginning and at the end of a device that a blank device has as zeros. The signatures of file systems,
/// partition tables and volume managers lie in these two ranges.
pub(crate) const EDGE: u64 = 4 << 20;

/// A signature on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Signature {
    /// The name of the format.
    pub(crate) name: &'static str,
    /// The position of the signature from the beginning of the device, in bytes.
    pub(crate) offset: u64,
}

impl fmt::Display for Signature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (at byte {})", self.name, self.offset)
    }
}

const MD_RAID: &[u8] = b"\xfc\x4e\x2b\xa9";
const GPT: &[u8] = b"EFI PART";
/// The formats with a signature at the end of a device: the name, the unit to which the size of the device is rounded down, the bytes
/// before this place, and the signature (md_p.h of the kernel, and the documentation of each format).
const TRAILING: [(&str, u64, u64, &[u8]); 6] = [
    ("MD RAID 0.90", 64 << 10, 64 << 10, MD_RAID),
    ("MD RAID 1.0", 4096, 8192, MD_RAID),
    ("Intel RAID", 1, 1024, b"Intel Raid ISM Cfg Sig. "),
    ("DDF RAID", 1, 512, b"\xde\x11\xde\x11"),
    ("GPT backup partition table", 1, 512, GPT),
    ("GPT backup partition table", 1, 4096, GPT),
];

/// ZFS has two labels of 256 KiB at the end, each with an array of uberblocks.
const ZFS_LABEL: u64 = 256 << 10;
const ZFS_UBERBLOCK: usize = 1 << 10;
const ZFS_MAGIC: u64 = 0x00ba_b10c;

/// The first and the last bytes of a device.
pub(crate) struct Edges {
    size: u64,
    start: Vec<u8>,
    end: Vec<u8>,
}

impl Edges {
    /// Reads the edges of a device of `size` bytes.
    pub(crate) fn read(device: &File, size: u64) -> Result<Self> {
        let mut start = vec![0; length(size)];
        device.read_exact_at(&mut start, 0)?;
        let begin = size.saturating_sub(EDGE).max(start.len() as u64);
        let mut end = vec![0; length(size - begin)];
        device.read_exact_at(&mut end, begin)?;
        Ok(Self { size, start, end })
    }

    /// Returns the offset of the first byte that is not zero.
    pub(crate) fn first_data(&self) -> Option<u64> {
        let first = |bytes: &[u8]| bytes.iter().position(|byte| *byte != 0).map(|at| at as u64);
        first(&self.start).or_else(|| first(&self.end).map(|at| self.begin_of_end() + at))
    }

    /// Returns the signatures behind a file system that ends at byte `end`. A signature before that is content of its files.
    pub(crate) fn signatures_behind(&self, end: u64) -> Vec<Signature> {
        let trailing = TRAILING.iter().filter_map(|(name, unit, before, bytes)| {
            let offset = (self.size - self.size % unit).checked_sub(*before)?;
            self.has(offset, bytes).then_some(Signature { name, offset })
        });
        let zfs = self.uberblock().map(|offset| Signature { name: "ZFS", offset });
        trailing.chain(zfs).filter(|signature| signature.offset >= end).collect()
    }

    /// Returns the offset of the first uberblock of ZFS, which has the byte order of the machine that wrote it.
    fn uberblock(&self) -> Option<u64> {
        let labels_end = self.size - self.size % ZFS_LABEL;
        let mut places = (labels_end.saturating_sub(2 * ZFS_LABEL)..labels_end).step_by(ZFS_UBERBLOCK);
        places.find(|offset| {
            [ZFS_MAGIC.to_le_bytes(), ZFS_MAGIC.to_be_bytes()].iter().any(|magic| self.has(*offset, magic))
        })
    }

    /// Returns `true` if the last edge has these bytes at this offset of the device.
    fn has(&self, offset: u64, bytes: &[u8]) -> bool {
        let at = offset.checked_sub(self.begin_of_end()).and_then(|at| usize::try_from(at).ok());
        at.and_then(|at| self.end.get(at..)).is_some_and(|found| found.starts_with(bytes))
    }

    fn begin_of_end(&self) -> u64 {
        self.size - self.end.len() as u64
    }
}

/// Returns the length of an edge of a device with this number of bytes: at most [`EDGE`], so it fits into a `usize`.
fn length(bytes: u64) -> usize {
    bytes.min(EDGE) as usize
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rstest::rstest;

    use super::*;

    const SIZE: u64 = 64 << 20;
    /// A size that is no multiple of the units of MD RAID.
    const ODD_SIZE: u64 = SIZE - 4608;

    /// A device with zeros, and these bytes at this offset.
    fn device(size: u64, offset: u64, bytes: &[u8]) -> Edges {
        let file = tempfile::tempfile().unwrap();
        file.set_len(size).unwrap();
        file.write_all_at(bytes, offset).unwrap();
        Edges::read(&file, size).unwrap()
    }

    #[test]
    fn a_blank_device_has_no_data() {
        for size in [0, 512, EDGE, EDGE + 512, 2 * EDGE, SIZE] {
            let blank = device(size, 0, &[]);
            assert_eq!((blank.signatures_behind(0), blank.first_data()), (vec![], None), "{size}");
        }
    }

    #[test]
    fn any_edge_byte_is_data() {
        for offset in [0, 4095, 4096, EDGE - 1, SIZE - EDGE, SIZE - EDGE + 5000, SIZE - 1] {
            assert_eq!(device(SIZE, offset, &[1]).first_data(), Some(offset));
        }
    }

    /// The offsets of MD RAID and GPT are those that wipefs(8) of util-linux prints for what their programs write.
    #[rstest]
    #[case::md_0_90("MD RAID 0.90", ODD_SIZE, 66_977_792, b"\xfc\x4e\x2b\xa9")]
    #[case::md_1_0("MD RAID 1.0", ODD_SIZE, 67_092_480, b"\xfc\x4e\x2b\xa9")]
    #[case::intel("Intel RAID", ODD_SIZE, ODD_SIZE - 1024, b"Intel Raid ISM Cfg Sig. ")]
    #[case::ddf("DDF RAID", ODD_SIZE, ODD_SIZE - 512, b"\xde\x11\xde\x11")]
    #[case::gpt("GPT backup partition table", SIZE, 67_108_352, b"EFI PART")]
    #[case::gpt_with_large_sectors("GPT backup partition table", SIZE, SIZE - 4096, b"EFI PART")]
    #[case::zfs("ZFS", SIZE, SIZE - ZFS_LABEL / 2 + 5120, b"\x0c\xb1\xba\0\0\0\0\0")]
    #[case::zfs_other_byte_order("ZFS", SIZE, SIZE - ZFS_LABEL - 1024, b"\0\0\0\0\0\xba\xb1\x0c")]
    fn trailing_signatures_are_found(
        #[case] name: &'static str,
        #[case] size: u64,
        #[case] offset: u64,
        #[case] bytes: &[u8],
    ) {
        let device = device(size, offset, bytes);
        assert_eq!(device.signatures_behind(offset), [Signature { name, offset }]);
        assert_eq!(device.signatures_behind(offset + 1), [], "it lies within the file system");
    }

    proptest! {
        #[test]
        fn any_content_can_be_searched(content in proptest::collection::vec(any::<u8>(), 0..5000)) {
            let size = content.len() as u64;
            Edges { size, start: Vec::new(), end: content }.signatures_behind(0);
        }
    }
}

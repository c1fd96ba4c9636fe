//! Signatures of file systems, partition tables and volume managers, and the edges of a device that hold them.

use std::fmt;
use std::fs::File;
use std::io::Result;
use std::os::unix::fs::FileExt;

/// The number of bytes at the beginning and at the end of a device that a blank device has as zeros. Every signature of
/// the table lies in one of the two ranges.
pub(crate) const EDGE: u64 = 4 << 20;

/// A signature on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Signature {
    /// The name of the format, such as `ext4` or `GPT partition table`.
    pub(crate) name: &'static str,
    /// The position of the signature from the beginning of the device, in bytes.
    pub(crate) offset: u64,
}

impl fmt::Display for Signature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (at byte {})", self.name, self.offset)
    }
}

/// Where a signature lies.
#[derive(Clone, Copy)]
enum SignaturePlace {
    /// Bytes from the beginning.
    Start(u64),
    /// Bytes before the end.
    End(u64),
    /// Bytes before the last multiple of a number, which is not after the end.
    AlignedEnd(u64, u64),
}

impl SignaturePlace {
    fn offset(self, size: u64) -> Option<u64> {
        match self {
            Self::Start(offset) => Some(offset),
            Self::End(before) => size.checked_sub(before),
            Self::AlignedEnd(unit, before) => (size - size % unit).checked_sub(before),
        }
    }
}

use SignaturePlace::{AlignedEnd, End, Start};

/// Names, places and bytes of signatures, from the headers of the kernel and the documentation of each format.
const TABLE: &[(&str, SignaturePlace, &[u8])] = &[
    ("XFS", Start(0), b"XFSB"),
    ("ext2, ext3 or ext4", Start(1080), b"\x53\xef"),
    ("btrfs", Start(0x1_0040), b"_BHRfS_M"),
    ("f2fs", Start(1024), b"\x10\x20\xf5\xf2"),
    ("EROFS", Start(1024), b"\xe2\xe1\xf5\xe0"),
    ("squashfs", Start(0), b"hsqs"),
    ("squashfs", Start(0), b"sqsh"),
    ("cramfs", Start(0), b"\x45\x3d\xcd\x28"),
    ("ISO 9660", Start(0x8001), b"CD001"),
    ("UDF", Start(0x8001), b"BEA01"),
    ("VFAT (FAT12)", Start(54), b"FAT12   "),
    ("VFAT (FAT16)", Start(54), b"FAT16   "),
    ("VFAT (FAT32)", Start(82), b"FAT32   "),
    ("exFAT", Start(3), b"EXFAT   "),
    ("NTFS", Start(3), b"NTFS    "),
    ("ReFS", Start(3), b"ReFS\0\0\0\0"),
    ("JFS", Start(0x8000), b"JFS1"),
    ("ReiserFS", Start(0x2034), b"ReIsEr"),
    ("ReiserFS", Start(0x1_0034), b"ReIsEr"),
    ("NILFS2", Start(1030), b"\x34\x34"),
    ("GFS2", Start(0x1_0000), b"\x01\x16\x19\x70"),
    ("OCFS2", Start(1024), b"OCFSV2"),
    ("OCFS2", Start(2048), b"OCFSV2"),
    ("OCFS2", Start(4096), b"OCFSV2"),
    ("OCFS2", Start(8192), b"OCFSV2"),
    ("HFS+", Start(1024), b"H+"),
    ("HFSX", Start(1024), b"HX"),
    ("APFS", Start(32), b"NXSB"),
    ("VMFS volume", Start(0x10_0000), b"\x0d\xd0\x01\xc0"),
    ("VMFS", Start(0x20_0000), b"\x5e\xf1\xab\x2f"),
    ("swap", Start(4086), b"SWAPSPACE2"),
    ("swap", Start(8182), b"SWAPSPACE2"),
    ("swap", Start(16_374), b"SWAPSPACE2"),
    ("swap", Start(65_526), b"SWAPSPACE2"),
    ("swap", Start(4086), b"SWAP-SPACE"),
    ("hibernated swap", Start(4086), b"S1SUSPEND"),
    ("hibernated swap", Start(65_526), b"S1SUSPEND"),
    ("LVM physical volume", Start(0), b"LABELONE"),
    ("LVM physical volume", Start(512), b"LABELONE"),
    ("LVM physical volume", Start(1024), b"LABELONE"),
    ("LVM physical volume", Start(1536), b"LABELONE"),
    ("LUKS1", Start(0), b"LUKS\xba\xbe\0\x01"),
    ("LUKS2", Start(0), b"LUKS\xba\xbe\0\x02"),
    // The second header of LUKS2 lies at the size of the first one.
    ("LUKS2 second header", Start(0x4000), b"SKUL\xba\xbe"),
    ("LUKS2 second header", Start(0x8000), b"SKUL\xba\xbe"),
    ("LUKS2 second header", Start(0x1_0000), b"SKUL\xba\xbe"),
    ("LUKS2 second header", Start(0x2_0000), b"SKUL\xba\xbe"),
    ("LUKS2 second header", Start(0x4_0000), b"SKUL\xba\xbe"),
    ("LUKS2 second header", Start(0x8_0000), b"SKUL\xba\xbe"),
    ("LUKS2 second header", Start(0x10_0000), b"SKUL\xba\xbe"),
    ("LUKS2 second header", Start(0x20_0000), b"SKUL\xba\xbe"),
    ("BitLocker", Start(3), b"-FVE-FS-"),
    ("dm-verity", Start(0), b"verity\0\0"),
    ("dm-integrity", Start(0), b"integrt\0"),
    ("VDO", Start(0), b"dmvdo001"),
    ("MD RAID 0.90", AlignedEnd(0x1_0000, 0x1_0000), b"\xfc\x4e\x2b\xa9"),
    ("MD RAID 1.0", AlignedEnd(4096, 8192), b"\xfc\x4e\x2b\xa9"),
    ("MD RAID 1.1", Start(0), b"\xfc\x4e\x2b\xa9"),
    ("MD RAID 1.2", Start(4096), b"\xfc\x4e\x2b\xa9"),
    ("Intel RAID", End(1024), b"Intel Raid ISM Cfg Sig. "),
    ("DDF RAID", End(512), b"\xde\x11\xde\x11"),
    ("bcache", Start(4120), b"\xc6\x85\x73\xf6\x4e\x1a\x45\xca\x82\x65\xf5\x7f\x48\xba\x6d\x81"),
    ("bcachefs", Start(4120), b"\xc6\x85\x73\xf6\x66\xce\x90\xa9\xd9\x6a\x60\xcf\x80\x3d\xf7\xef"),
    ("Ceph BlueStore", Start(0), b"bluestore block device"),
    ("Oracle ASM", Start(32), b"ORCLDISK"),
    ("GPT partition table", Start(512), b"EFI PART"),
    ("GPT partition table", Start(4096), b"EFI PART"),
    ("GPT backup partition table", End(512), b"EFI PART"),
    ("GPT backup partition table", End(4096), b"EFI PART"),
];

/// The last bytes of the first sector of a disk with an MBR, and of boot sectors of file systems.
const BOOT_SIGNATURE: (u64, &[u8]) = (510, b"\x55\xaa");
const BOOT_SECTORS: [&str; 7] =
    ["VFAT (FAT12)", "VFAT (FAT16)", "VFAT (FAT32)", "exFAT", "NTFS", "ReFS", "BitLocker"];

/// ZFS has four labels of 256 KiB, two at each end. The second half of each is an array of uberblocks.
const ZFS_LABEL: u64 = 256 << 10;
const ZFS_UBERBLOCK: u64 = 1 << 10;
const ZFS_MAGIC: u64 = 0x00ba_b10c;

const ZEROS: [u8; 4096] = [0; 4096];

/// The first and the last bytes of a device.
pub(crate) struct Edges {
    size: u64,
    start: Vec<u8>,
    end: Vec<u8>,
}

impl Edges {
    /// Reads the edges of a device of `size` bytes.
    pub(crate) fn read(device: &File, size: u64) -> Result<Self> {
        let mut start = vec![0; length(size.min(EDGE))];
        device.read_exact_at(&mut start, 0)?;
        let begin = size.saturating_sub(EDGE).max(start.len() as u64);
        let mut end = vec![0; length(size - begin)];
        device.read_exact_at(&mut end, begin)?;
        Ok(Self { size, start, end })
    }

    /// Returns every signature, by its offset.
    pub(crate) fn signatures(&self) -> Vec<Signature> {
        let mut found: Vec<Signature> = TABLE
            .iter()
            .filter_map(|(name, place, bytes)| {
                let offset = place.offset(self.size)?;
                (self.at(offset, bytes.len())? == *bytes).then_some(Signature { name, offset })
            })
            .collect();
        found.extend(self.zfs().map(|offset| Signature { name: "ZFS", offset }));
        let (offset, bytes) = BOOT_SIGNATURE;
        let boot_sector = found.iter().any(|signature| BOOT_SECTORS.contains(&signature.name));
        if !boot_sector && self.at(offset, bytes.len()) == Some(bytes) {
            found.push(Signature { name: "MBR partition table", offset });
        }
        found.sort_by_key(|signature| signature.offset);
        found.dedup_by_key(|signature| (signature.name, signature.offset));
        found
    }

    /// Returns the offset of the first byte that is not zero.
    pub(crate) fn first_data(&self) -> Option<u64> {
        let first = |bytes: &[u8]| {
            // Whole blocks are compared first: in a blank range, that is as fast as memory.
            let block = bytes.chunks(ZEROS.len()).position(|block| block != &ZEROS[..block.len()])?;
            let begin = block * ZEROS.len();
            let byte = bytes[begin..].iter().position(|byte| *byte != 0)?;
            Some((begin + byte) as u64)
        };
        let begin = self.size - self.end.len() as u64;
        first(&self.start).or_else(|| first(&self.end).map(|at| begin + at))
    }

    /// Returns the bytes at an offset, or `None` if they are not all within one edge.
    fn at(&self, offset: u64, length: usize) -> Option<&[u8]> {
        let within = |bytes: &'_ [u8], begin: u64| {
            let from = usize::try_from(offset.checked_sub(begin)?).ok()?;
            let to = from.checked_add(length)?;
            (to <= bytes.len()).then_some((from, to))
        };
        if let Some((from, to)) = within(&self.start, 0) {
            return self.start.get(from..to);
        }
        let (from, to) = within(&self.end, self.size - self.end.len() as u64)?;
        self.end.get(from..to)
    }

    /// Returns the offset of the first uberblock of ZFS.
    fn zfs(&self) -> Option<u64> {
        let aligned = self.size - self.size % ZFS_LABEL;
        let labels =
            [Some(0), Some(ZFS_LABEL), aligned.checked_sub(2 * ZFS_LABEL), aligned.checked_sub(ZFS_LABEL)];
        let mut places = labels.into_iter().flatten().flat_map(|label| {
            (ZFS_LABEL / 2..ZFS_LABEL).step_by(ZFS_UBERBLOCK as usize).map(move |at| label + at)
        });
        places.find(|offset| {
            let bytes = self.at(*offset, 8);
            bytes == Some(&ZFS_MAGIC.to_le_bytes()) || bytes == Some(&ZFS_MAGIC.to_be_bytes())
        })
    }
}

/// An edge has at most 4 MiB, so its length fits.
fn length(bytes: u64) -> usize {
    bytes.min(EDGE) as usize
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// What the programs of other formats write: one line for each signature that wipefs(8) of util-linux finds on their
    /// images, with the size of the image, the offset, and the bytes around it.
    const FIXTURES: &str = include_str!("../../tests/fixtures/signatures.txt");

    const SIZE: u64 = 64 << 20;

    fn blank(size: u64) -> Edges {
        let start = vec![0; length(size)];
        let end = vec![0; length(size - start.len() as u64)];
        Edges { size, start, end }
    }

    fn write(edges: &mut Edges, offset: u64, bytes: &[u8]) {
        let begin = edges.size - edges.end.len() as u64;
        for (place, byte) in (offset..).zip(bytes) {
            match usize::try_from(place).ok().and_then(|at| edges.start.get_mut(at)) {
                Some(start) => *start = *byte,
                None => edges.end[usize::try_from(place - begin).unwrap()] = *byte,
            }
        }
    }

    fn found(edges: &Edges) -> Vec<(&'static str, u64)> {
        edges.signatures().iter().map(|signature| (signature.name, signature.offset)).collect()
    }

    #[test]
    fn a_blank_device_has_no_signature() {
        for size in [0, 512, EDGE, EDGE + 512, 2 * EDGE, SIZE] {
            assert_eq!((found(&blank(size)), blank(size).first_data()), (vec![], None), "{size}");
        }
    }

    #[test]
    fn each_signature_is_found() {
        for (name, place, bytes) in TABLE {
            let mut edges = blank(SIZE + 4608);
            let offset = place.offset(edges.size).unwrap();
            write(&mut edges, offset, bytes);
            assert!(found(&edges).contains(&(*name, offset)), "{name}: {:?}", found(&edges));
            assert_eq!(edges.first_data(), Some(offset + bytes.iter().position(|b| *b != 0).unwrap() as u64));
        }
    }

    /// The offsets equal those that wipefs prints.
    #[test]
    fn other_programs_signatures_are_found() {
        let mut programs = 0;
        for line in FIXTURES.lines().filter(|line| !line.starts_with('#')) {
            let fields: Vec<&str> = line.split('|').collect();
            let [program, name, size, offset, begin, hex] = fields[..] else { panic!("{line}") };
            let number = |text: &str| text.parse::<u64>().unwrap();
            let digits = |at: usize| u8::from_str_radix(&hex[at..at + 2], 16).unwrap();
            let bytes: Vec<u8> = (0..hex.len()).step_by(2).map(digits).collect();
            let mut edges = blank(number(size));
            write(&mut edges, number(begin), &bytes);
            let found = found(&edges);
            assert!(
                found.contains(&(name, number(offset))),
                "{program}: {name} at {offset} is not in {found:?}"
            );
            programs += 1;
        }
        assert!(programs >= 15, "{programs} lines");
    }

    /// A boot sector is reported as a partition table only if it belongs to no file system.
    #[test]
    fn a_filesystem_explains_its_boot_sector() {
        let mut edges = blank(SIZE);
        write(&mut edges, 510, b"\x55\xaa");
        assert_eq!(found(&edges), [("MBR partition table", 510)]);
        write(&mut edges, 82, b"FAT32   ");
        assert_eq!(found(&edges), [("VFAT (FAT32)", 82)]);
    }

    /// The uberblock can have either byte order.
    #[test]
    fn uberblocks_are_found_in_each_label() {
        for label in [0, ZFS_LABEL, SIZE - 2 * ZFS_LABEL, SIZE - ZFS_LABEL] {
            for bytes in [ZFS_MAGIC.to_le_bytes(), ZFS_MAGIC.to_be_bytes()] {
                let mut edges = blank(SIZE);
                let offset = label + ZFS_LABEL / 2 + 5 * ZFS_UBERBLOCK;
                write(&mut edges, offset, &bytes);
                assert_eq!(found(&edges), [("ZFS", offset)]);
            }
        }
    }

    #[test]
    fn any_edge_byte_is_data() {
        for offset in [0, 4095, 4096, EDGE - 1, SIZE - EDGE, SIZE - EDGE + 5000, SIZE - 1] {
            let mut edges = blank(SIZE);
            write(&mut edges, offset, &[1]);
            assert_eq!(edges.first_data(), Some(offset));
        }
    }

    proptest! {
        #[test]
        fn any_content_can_be_searched(content in proptest::collection::vec(any::<u8>(), 0..5000)) {
            let size = content.len() as u64;
            let edges = Edges { size, start: content, end: Vec::new() };
            edges.signatures();
        }
    }
}

//! The superblock of XFS, in the first sector of its device (`struct xfs_dsb` of xfs_format.h in the kernel).

use std::fs::File;
use std::os::unix::fs::FileExt;

use loopfs::xfs::Features;
use loopfs::{Bytes, FilesystemUuid};

/// The largest sector of XFS. The checksum covers one sector.
const MAX_SECTOR: usize = 32 << 10;
const MAGIC: &[u8] = b"XFSB";
const CRC_OFFSET: usize = 224;

const VERSION_MASK: u16 = 0x000f;
const VERSION2_FTYPE: u32 = 0x0200;
const RO_COMPAT_REFLINK: u32 = 1 << 2;
const INCOMPAT_FTYPE: u32 = 1 << 0;
const INCOMPAT_BIGTIME: u32 = 1 << 3;
const INCOMPAT_NEEDSREPAIR: u32 = 1 << 4;

/// The fields of a superblock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Superblock {
    pub(crate) uuid: FilesystemUuid,
    /// The label, which may be empty. Any program with access to the device can choose it.
    pub(crate) label: String,
    pub(crate) block_size: u32,
    pub(crate) data_blocks: u64,
    pub(crate) features: Features,
    /// mkfs.xfs has not completed.
    pub(crate) in_progress: bool,
    /// xfs_repair did not complete, or is required.
    pub(crate) needs_repair: bool,
    /// The checksum is right, or there is none (version 4).
    pub(crate) checksum_valid: bool,
}

impl Superblock {
    /// Reads the superblock of a device. Returns `None` if the device has no XFS, or if the sizes in the superblock are ones
    /// that XFS does not have.
    pub(crate) fn read(device: &File, size: u64) -> std::io::Result<Option<Self>> {
        let mut sector = vec![0; MAX_SECTOR.min(usize::try_from(size).unwrap_or(MAX_SECTOR))];
        device.read_exact_at(&mut sector, 0)?;
        Ok(Self::parse(&sector))
    }

    /// Parses the first bytes of a device, which are at least one sector.
    fn parse(bytes: &[u8]) -> Option<Self> {
        let fields = Fields(bytes);
        let sector = usize::from(fields.u16(102)?);
        let block_size = fields.u32(4)?;
        let plausible = bytes.starts_with(MAGIC)
            && (512..=MAX_SECTOR).contains(&sector)
            && sector.is_power_of_two()
            && (512..=65_536).contains(&block_size)
            && block_size.is_power_of_two();
        if !plausible {
            return None;
        }
        let version = fields.u16(100)? & VERSION_MASK;
        let crc = version == 5;
        // Versions before 5 have other fields or nothing there.
        let newer = |offset| if crc { fields.u32(offset) } else { Some(0) };
        let (ro_compat, incompat) = (newer(212)?, newer(216)?);
        Some(Self {
            uuid: FilesystemUuid(bytes.get(32..48)?.try_into().ok()?),
            label: label(bytes.get(108..120)?),
            block_size,
            data_blocks: fields.u64(8)?,
            features: Features {
                crc,
                reflink: ro_compat & RO_COMPAT_REFLINK != 0,
                ftype: incompat & INCOMPAT_FTYPE != 0 || !crc && fields.u32(200)? & VERSION2_FTYPE != 0,
                bigtime: incompat & INCOMPAT_BIGTIME != 0,
            },
            in_progress: *bytes.get(126)? != 0,
            needs_repair: incompat & INCOMPAT_NEEDSREPAIR != 0,
            checksum_valid: !crc || checksum(bytes.get(..sector)?) == fields.u32(CRC_OFFSET)?.swap_bytes(),
        })
    }

    pub(crate) fn size(&self) -> Bytes {
        Bytes(self.data_blocks.saturating_mul(self.block_size.into()))
    }

    pub(crate) fn is_damaged(&self) -> bool {
        self.needs_repair || !self.checksum_valid
    }
}

/// Big-endian fields at byte offsets.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn u16(&self, offset: usize) -> Option<u16> {
        self.0.get(offset..offset + 2)?.try_into().ok().map(u16::from_be_bytes)
    }

    fn u32(&self, offset: usize) -> Option<u32> {
        self.0.get(offset..offset + 4)?.try_into().ok().map(u32::from_be_bytes)
    }

    fn u64(&self, offset: usize) -> Option<u64> {
        self.0.get(offset..offset + 8)?.try_into().ok().map(u64::from_be_bytes)
    }
}

/// A label has 12 bytes or ends at the first NUL. Any program with access to the device chooses the bytes.
fn label(field: &[u8]) -> String {
    let text = field.split(|byte| *byte == 0).next().unwrap_or_default();
    String::from_utf8_lossy(text).into_owned()
}

/// Returns the CRC-32C of a sector, with zeros in place of the stored one, which is little-endian.
fn checksum(sector: &[u8]) -> u32 {
    const POLYNOMIAL: u32 = 0x82f6_3b78;
    let stored = CRC_OFFSET..CRC_OFFSET + 4;
    let bytes = sector.iter().enumerate().map(|(at, byte)| if stored.contains(&at) { 0 } else { *byte });
    let sum = bytes.fold(!0, |sum: u32, byte| {
        (0..8)
            .fold(sum ^ u32::from(byte), |sum, _| if sum & 1 == 1 { sum >> 1 ^ POLYNOMIAL } else { sum >> 1 })
    });
    !sum
}

#[cfg(test)]
pub(crate) mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The superblock that `mkfs.xfs -L loopfs` (xfsprogs 6.1) writes on a device of 320 MiB.
    pub(crate) const SECTOR: &[u8; 512] = include_bytes!("../../tests/fixtures/superblock.xfs");

    #[test]
    fn the_superblock_of_mkfs_is_read() {
        let superblock = Superblock::parse(SECTOR).unwrap();
        assert_eq!(superblock.label, "loopfs");
        assert_eq!(superblock.uuid.to_string(), "00112233-4455-6677-8899-aabbccddeeff");
        assert_eq!((superblock.size(), superblock.block_size), (Bytes(320 << 20), 4096));
        assert!(superblock.checksum_valid && !superblock.in_progress && !superblock.needs_repair);
        assert_eq!(superblock.features, Features { crc: true, reflink: true, ftype: true, bigtime: true });
    }

    #[test]
    fn a_changed_byte_invalidates_the_checksum() {
        for at in (128..512).filter(|at| !(CRC_OFFSET..CRC_OFFSET + 4).contains(at)) {
            let mut sector = *SECTOR;
            sector[at] ^= 1;
            assert!(!Superblock::parse(&sector).unwrap().checksum_valid, "byte {at}");
        }
    }

    /// The flags mean that mkfs is incomplete and that the file system needs a repair.
    #[test]
    fn mkfs_and_repair_flags_are_read() {
        let mut sector = *SECTOR;
        sector[126] = 1;
        assert!(Superblock::parse(&sector).unwrap().in_progress);
        sector[219] |= 1 << 4;
        assert!(Superblock::parse(&sector).unwrap().needs_repair);
    }

    #[test]
    fn version_4_lacks_checksum_and_reflink() {
        let mut sector = *SECTOR;
        sector[101] = sector[101] & 0xf0 | 4;
        let superblock = Superblock::parse(&sector).unwrap();
        assert!(superblock.checksum_valid && !superblock.features.crc && !superblock.features.reflink);
    }

    #[test]
    fn invalid_fields_are_no_superblock() {
        for (at, value) in [(0, b'Y'), (4, 1), (7, 1), (102, 0xff), (103, 1)] {
            let mut sector = *SECTOR;
            sector[at] = value;
            assert_eq!(Superblock::parse(&sector), None, "byte {at}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(tail in proptest::collection::vec(any::<u8>(), 0..600)) {
            Superblock::parse(&[MAGIC, &tail].concat());
        }

        #[test]
        fn any_fields_are_read_or_refused(at in 8usize..508, value in any::<[u8; 4]>()) {
            let mut sector = *SECTOR;
            sector[at..at + 4].copy_from_slice(&value);
            Superblock::parse(&sector);
        }
    }
}

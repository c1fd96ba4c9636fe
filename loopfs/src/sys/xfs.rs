//! ioctls that only XFS has (xfs_fs.h of xfsprogs, ioctl_xfs_fsop_geometry(2)).

use std::os::fd::AsFd;

use ioctl_sys::{ior, iorw, iow};

use super::ioctl;
use super::result::Result;

/// `struct xfs_fsop_geom_v1`: the oldest form of the call, which every kernel supports.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Geometry {
    pub(crate) blocksize: u32,
    pub(crate) rtextsize: u32,
    pub(crate) agblocks: u32,
    pub(crate) agcount: u32,
    pub(crate) logblocks: u32,
    pub(crate) sectsize: u32,
    pub(crate) inodesize: u32,
    pub(crate) imaxpct: u32,
    pub(crate) datablocks: u64,
    pub(crate) rtblocks: u64,
    pub(crate) rtextents: u64,
    pub(crate) logstart: u64,
    pub(crate) uuid: [u8; 16],
    pub(crate) sunit: u32,
    pub(crate) swidth: u32,
    pub(crate) version: i32,
    pub(crate) flags: u32,
    pub(crate) logsectsize: u32,
    pub(crate) rtsectsize: u32,
    pub(crate) dirblocksize: u32,
}

/// `struct xfs_fs_eofblocks`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct EofBlocks {
    pub(crate) version: u32,
    pub(crate) flags: u32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) prid: u32,
    pub(crate) pad32: u32,
    pub(crate) min_file_size: u64,
    pub(crate) pad64: [u64; 12],
}

const XFS_EOFBLOCKS_VERSION: u32 = 1;
const XFS_EOF_FLAGS_PRID: u32 = 1 << 3;

/// `XFS_FSOP_GEOM_FLAGS_PROJID32`: project ids of 32 bits. Version 5 always has them.
#[cfg(feature = "volume-store")]
pub(crate) const PROJID32: u32 = 1 << 11;
/// `XFS_FSOP_GEOM_FLAGS_V5SB`: version 5, with checksums.
pub(crate) const V5SB: u32 = 1 << 15;
/// `XFS_FSOP_GEOM_FLAGS_FTYPE`.
pub(crate) const FTYPE: u32 = 1 << 16;
/// `XFS_FSOP_GEOM_FLAGS_REFLINK`.
pub(crate) const REFLINK: u32 = 1 << 20;
/// `XFS_FSOP_GEOM_FLAGS_BIGTIME`.
pub(crate) const BIGTIME: u32 = 1 << 21;

const XFS_IOC_FSGEOMETRY_V1: u32 = ior!(b'X', 100, size_of::<Geometry>());

/// `XFS_IOC_FSGEOMETRY_V1`. Returns ENOTTY or another errno if the file system is not XFS.
pub(crate) fn geometry(file: impl AsFd) -> Result<Geometry> {
    // SAFETY: XFS_IOC_FSGEOMETRY_V1 writes one `struct xfs_fsop_geom_v1`.
    unsafe { ioctl::with(file, XFS_IOC_FSGEOMETRY_V1, Geometry::default()) }
}

// The header declares the request as "read", although the kernel reads the argument.
const XFS_IOC_FREE_EOFBLOCKS: u32 = ior!(b'X', 58, size_of::<EofBlocks>());

/// `XFS_IOC_FREE_EOFBLOCKS` for the files of one project: frees their post-EOF blocks, and then waits until the kernel has
/// freed every deleted inode of the file system (inodegc).
pub(crate) fn free_eof_blocks(file: impl AsFd, project: u32) -> Result<()> {
    let scan = EofBlocks {
        version: XFS_EOFBLOCKS_VERSION,
        flags: XFS_EOF_FLAGS_PRID,
        prid: project,
        ..EofBlocks::default()
    };
    // SAFETY: XFS_IOC_FREE_EOFBLOCKS reads one `struct xfs_fs_eofblocks`.
    unsafe { ioctl::with(file, XFS_IOC_FREE_EOFBLOCKS, scan) }.map(drop)
}

/// `struct xfs_ag_geometry`.
#[cfg(feature = "volume-store")]
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct GroupGeometry {
    pub(crate) number: u32,
    pub(crate) length: u32,
    pub(crate) free_blocks: u32,
    pub(crate) allocated_inodes: u32,
    pub(crate) free_inodes: u32,
    pub(crate) sick: u32,
    pub(crate) checked: u32,
    pub(crate) flags: u32,
    pub(crate) reserved: [u64; 12],
}

#[cfg(feature = "volume-store")]
const XFS_IOC_AG_GEOMETRY: u32 = iorw!(b'X', 61, size_of::<GroupGeometry>());

/// `XFS_IOC_AG_GEOMETRY` (Linux 5.2): the counts of one allocation group. Waits for a transaction that changes them.
#[cfg(feature = "volume-store")]
pub(crate) fn group_geometry(file: impl AsFd, number: u32) -> Result<GroupGeometry> {
    let group = GroupGeometry { number, ..GroupGeometry::default() };
    // SAFETY: XFS_IOC_AG_GEOMETRY reads and writes one `struct xfs_ag_geometry`.
    unsafe { ioctl::with(file, XFS_IOC_AG_GEOMETRY, group) }
}

/// `struct xfs_fsop_counts`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct FilesystemCounts {
    pub(crate) free_data: u64,
    pub(crate) free_realtime: u64,
    pub(crate) free_inodes: u64,
    pub(crate) allocated_inodes: u64,
}

const XFS_IOC_FSCOUNTS: u32 = ior!(b'X', 113, size_of::<FilesystemCounts>());

/// `XFS_IOC_FSCOUNTS`: returns the counts of the whole file system, even in a directory where statfs(2) returns those of a
/// project. Returns ENOTTY if the file system is not XFS.
pub(crate) fn counts(file: impl AsFd) -> Result<FilesystemCounts> {
    // SAFETY: XFS_IOC_FSCOUNTS writes one `struct xfs_fsop_counts`.
    unsafe { ioctl::with(file, XFS_IOC_FSCOUNTS, FilesystemCounts::default()) }
}

/// `struct xfs_growfs_data`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct GrowData {
    pub(crate) newblocks: u64,
    pub(crate) imaxpct: u32,
}

const XFS_IOC_FSGROWFSDATA: u32 = iow!(b'X', 110, size_of::<GrowData>());

/// `XFS_IOC_FSGROWFSDATA`: expands the data section to `blocks` blocks, or to fewer if the last allocation group would be
/// too small. `imaxpct` is the share of the space for inodes, which the call sets as well.
pub(crate) fn grow_data(file: impl AsFd, blocks: u64, imaxpct: u32) -> Result<()> {
    let grow = GrowData { newblocks: blocks, imaxpct };
    // SAFETY: XFS_IOC_FSGROWFSDATA reads one `struct xfs_growfs_data`.
    unsafe { ioctl::with(file, XFS_IOC_FSGROWFSDATA, grow) }.map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The numbers encode the sizes of the structures. strace shows these.
    #[test]
    fn layouts_match_xfs_fs_h() {
        assert_eq!(std::mem::offset_of!(Geometry, uuid), 64);
        assert_eq!(XFS_IOC_FSGEOMETRY_V1, 0x8070_5864);
        assert_eq!(std::mem::offset_of!(EofBlocks, min_file_size), 24);
        assert_eq!(XFS_IOC_FREE_EOFBLOCKS, 0x8080_583a);
        assert_eq!(XFS_IOC_FSGROWFSDATA, 0x4010_586e);
        assert_eq!(XFS_IOC_FSCOUNTS, 0x8020_5871);
        #[cfg(feature = "__tests")]
        assert_eq!(crate::sys::test_calls::XFS_IOC_GOINGDOWN, 0x8004_587d);
        #[cfg(feature = "volume-store")]
        {
            assert_eq!(std::mem::offset_of!(GroupGeometry, reserved), 32);
            assert_eq!(XFS_IOC_AG_GEOMETRY, 0xc080_583d);
        }
    }
}

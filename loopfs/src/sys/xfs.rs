//! ioctls of XFS alone (xfs_fs.h of xfsprogs, ioctl_xfs_fsop_geometry(2)).

use std::os::fd::{AsFd, AsRawFd};

use ioctl_sys::ioctl;
use nix::errno::Errno;

use super::Result;

/// `struct xfs_fsop_geom_v1`: the oldest form of the call, which every kernel answers.
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

ioctl!(read xfs_ioc_fsgeometry_v1 with b'X', 100; Geometry);

/// `XFS_IOC_FSGEOMETRY_V1`. ENOTTY or another errno where the file system is not XFS.
pub(crate) fn geometry(file: impl AsFd) -> Result<Geometry> {
    let fd = file.as_fd().as_raw_fd();
    let mut geometry = Geometry::default();
    // SAFETY: XFS_IOC_FSGEOMETRY_V1 writes one `struct xfs_fsop_geom_v1`.
    let result = unsafe { xfs_ioc_fsgeometry_v1(fd, &mut geometry) };
    Errno::result(result).map(|_| geometry)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layout_matches_xfs_fs_h() {
        assert_eq!(size_of::<Geometry>(), 112);
        assert_eq!(std::mem::offset_of!(Geometry, uuid), 64);
        // _IOR('X', 100, struct xfs_fsop_geom_v1) as strace shows it.
        assert_eq!(ioctl_sys::ior!(b'X', 100, size_of::<Geometry>()), 0x8070_5864);
    }
}

//! The geometry of a mounted XFS, and its expansion to a larger disk.

use std::os::fd::AsFd;

use crate::error::{Context, Result};
use crate::filesystem_uuid::FilesystemUuid;
use crate::sys::xfs;

/// The geometry of an XFS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Geometry {
    /// The UUID.
    pub uuid: FilesystemUuid,
    /// The size of a block in bytes.
    pub block_size: u32,
    /// The number of blocks.
    pub blocks: u64,
    /// The features.
    pub features: Features,
}

/// The features of an XFS that matter for volumes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Features {
    /// Metadata has checksums (XFS version 5).
    pub crc: bool,
    /// Files can share blocks, which clones and snapshots need.
    pub reflink: bool,
    /// Directory entries have the file type, which overlayfs needs.
    pub ftype: bool,
    /// Times after 2038 can be stored. Nothing here depends on it.
    pub bigtime: bool,
}

/// Returns the geometry of the file system of a file.
///
/// # Errors
/// ENOTTY: the file system is not XFS. EBADF: the descriptor is `O_PATH`.
#[doc(alias = "XFS_IOC_FSGEOMETRY")]
pub fn geometry(file: impl AsFd) -> Result<Geometry> {
    let geometry = xfs::geometry(file).context("read the geometry of", "the file system")?;
    let has = |flag: u32| geometry.flags & flag != 0;
    Ok(Geometry {
        uuid: FilesystemUuid(geometry.uuid),
        block_size: geometry.blocksize,
        blocks: geometry.datablocks,
        features: Features {
            crc: has(xfs::V5SB),
            reflink: has(xfs::REFLINK),
            ftype: has(xfs::FTYPE),
            bigtime: has(xfs::BIGTIME),
        },
    })
}

/// Expands the file system of a file to a number of blocks, or to fewer if the last allocation group would be too small. The share of
/// the space that inodes may take stays the same.
///
/// # Errors
/// As [`geometry`]. ENOSPC: the device is too small. EPERM: no `CAP_SYS_ADMIN`. EINVAL: fewer blocks than the file system has.
#[doc(alias = "XFS_IOC_FSGROWFSDATA")]
pub fn expand(file: impl AsFd, blocks: u64) -> Result<()> {
    let expanded = xfs::geometry(&file).and_then(|geometry| xfs::grow_data(&file, blocks, geometry.imaxpct));
    expanded.context("expand", "the file system")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    #[test]
    fn other_filesystems_have_no_geometry() {
        let file = std::fs::File::open("/proc/self/status").unwrap();
        assert_eq!(geometry(&file).unwrap_err().kind(), ErrorKind::Unsupported);
        assert_eq!(expand(&file, 1).unwrap_err().kind(), ErrorKind::Unsupported);
    }
}

//! Sharing all blocks of one file with another (reflink).

use std::os::fd::BorrowedFd;

use nix::errno::Errno;
use nix::sys::stat::fstat;

use crate::error::Explanation;
use crate::sys::reflink;

/// Explains EOPNOTSUPP of [`share_content`].
pub(crate) const NO_REFLINK: Explanation = Explanation::of(
    "the file system cannot share blocks between files",
    "clones need XFS formatted with mkfs.xfs -m reflink=1 (the default since xfsprogs 5.1)",
);

/// The smallest block size of any file system, in bytes.
const SECTOR: u64 = 512;

/// Makes `target`, an empty file open for writing, share the whole content that `source` has at one moment.
///
/// If the disk is full or a quota is exceeded, `FICLONE` stops in the middle of the file and still returns success: the
/// kernel counts the cloned bytes, but the ioctl does not return the number. This function therefore compares the sizes. If
/// `target` is shorter, it clones the rest with a second call, which returns the errno.
pub(crate) fn share_content(source: BorrowedFd<'_>, target: BorrowedFd<'_>) -> Result<(), Errno> {
    let expected = size_of_file(source)?;
    reflink::clone(source, target)?;
    let mut reached = size_of_file(target)?;
    // An interrupted call stops at a block boundary. A size that is no multiple of a sector is the size of the source.
    while reached < expected && reached.is_multiple_of(SECTOR) && reached < size_of_file(source)? {
        reflink::clone_rest(source, reached, target)?;
        let now = size_of_file(target)?;
        if now <= reached {
            return Err(Errno::EIO);
        }
        reached = now;
    }
    Ok(())
}

fn size_of_file(file: BorrowedFd<'_>) -> Result<u64, Errno> {
    Ok(fstat(file)?.st_size as u64)
}

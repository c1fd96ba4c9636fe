//! All blocks of one file shared with another.

use std::os::fd::BorrowedFd;

use nix::errno::Errno;
use nix::sys::stat::fstat;

use crate::sys::reflink;

/// No file system has smaller blocks.
const SECTOR: u64 = 512;

/// Makes `target`, an empty file open for writing, share all that `source` has at one moment.
///
/// `FICLONE` answers success even where it had to stop in the midst of the file, for want of room or quota: it
/// counts what it did and is asked for no number. So the sizes are compared, and the rest is asked for, which has the
/// errno.
pub(crate) fn share_content(source: BorrowedFd<'_>, target: BorrowedFd<'_>) -> Result<(), Errno> {
    let expected = size_of_file(source)?;
    reflink::clone(source, target)?;
    let mut reached = size_of_file(target)?;
    // It stops between two blocks; an end that is in the midst of one is the end that the source had.
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

//! Removing what a crash left incomplete. The file system is the only source of truth.

use std::os::fd::AsFd;

use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag};
use nix::sys::stat::{fstat, fstatat};
use nix::unistd::ftruncate;

use super::on_disk::{assigned_ids, layout};
use super::store::VolumeStore;
use crate::error::{Context, Error, Result};
use crate::units::Bytes;

/// Counts of what [`VolumeStore::recover`] found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Recovered {
    /// Directories that never became volumes or snapshots. They were removed, or moved to the trash if a copy had begun.
    pub unfinished: usize,
    /// Images with post-EOF blocks from an incomplete expansion, which were freed.
    pub eof_blocks_freed: usize,
    /// Project ids with limits and without a directory, which were freed.
    pub released_ids: usize,
    /// Project ids with limits and without a directory that files are still charged to. They stay in use.
    pub busy_ids: usize,
}

impl VolumeStore {
    /// Removes incomplete volumes that a process left when it or the machine stopped, and frees project ids that are assigned to
    /// no directory. Waits for changes by other processes that are in progress. Copies of directories are an exception: the
    /// call leaves them alone as long as the copying process lives. The cost is proportional to the number of volumes, so call it
    /// once, at start.
    ///
    /// # Errors
    /// Those of the system calls. Changes made before the error stay.
    pub fn recover(&self) -> Result<Recovered> {
        // Before the lock, because any number of foreign ids may be used. Ids that are reserved in the meantime are not orphans.
        let reserved = self.ids.reserved()?;
        let _lock = self.layout.lock_exclusive(self.options.lock_timeout)?;
        let mut recovered = Recovered::default();
        for name in layout::names(&self.layout.staging, "staging")? {
            recovered.unfinished += usize::from(self.remove_abandoned(&name)?);
        }
        for name in layout::names(&self.layout.volumes, "volumes")? {
            recovered.eof_blocks_freed += usize::from(self.free_eof_blocks(&name)?);
        }
        let reclaimed = self.ids.recover_from(&reserved, &assigned_ids(&self.layout)?)?;
        recovered.released_ids = reclaimed.freed.len();
        recovered.busy_ids = reclaimed.draining.len();
        // Removed directories and freed ids no longer have a reservation.
        self.space_book().invalidate_total();
        Ok(recovered)
    }

    /// Frees the post-EOF blocks of an image, which an expansion allocates first. Returns `true` if there were any. The blocks of
    /// the extent tree count too, so more blocks than bytes are only a reason to try.
    fn free_eof_blocks(&self, name: &str) -> Result<bool> {
        let absent_or = |errno| match errno {
            Errno::ENOENT => Ok(false),
            errno => Err(Error::sys("look for blocks past the end of", name, errno)),
        };
        let before = match fstatat(&self.layout.volumes, name, AtFlags::AT_SYMLINK_NOFOLLOW) {
            Ok(status) => status,
            Err(errno) => return absent_or(errno),
        };
        let allocated = Bytes::from_basic_blocks(before.st_blocks as u64);
        if before.st_mode & libc::S_IFMT != libc::S_IFREG || allocated <= Bytes(before.st_size as u64) {
            return Ok(false);
        }
        let image = match layout::open_beneath(self.layout.volumes.as_fd(), name, OFlag::O_RDWR) {
            Ok(image) => image,
            Err(errno) => return absent_or(errno),
        };
        ftruncate(&image, before.st_size).context("drop the blocks past the end of", name)?;
        let after = fstat(&image).context("fstat", name)?;
        Ok(after.st_blocks < before.st_blocks)
    }
}

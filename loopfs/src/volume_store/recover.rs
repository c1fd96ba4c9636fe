//! Taking away what a crash left half made. The file system alone is asked.

use std::os::fd::AsFd;

use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag};
use nix::sys::stat::{fstat, fstatat};
use nix::unistd::ftruncate;

use super::on_disk::{assigned_ids, layout};
use super::store::VolumeStore;
use crate::error::{Context, Error, Result};
use crate::units::Bytes;

/// What [`VolumeStore::recover`] found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Recovered {
    /// Directories that never became volumes or snapshots: removed, or moved to the trash where a copy had begun.
    pub unfinished: usize,
    /// Images that had blocks past their end, from growing, which were given back.
    pub trimmed: usize,
    /// Project ids with limits and without a directory, freed.
    pub released_ids: usize,
    /// Project ids without a directory that files are still charged to, left as they are.
    pub busy_ids: usize,
}

impl VolumeStore {
    /// Removes what was being made when the process or the machine stopped, and frees project
    /// ids that no directory carries. Waits for changes that other processes have under way, but not for copies of
    /// directories, which it leaves alone as long as their makers live.
    /// Its cost grows with the number of volumes: meant for once, at start.
    ///
    /// # Errors
    /// Those of the system calls; what was done until then stays done.
    pub fn recover(&self) -> Result<Recovered> {
        let _lock = self.layout.lock_exclusive()?;
        let mut recovered = Recovered::default();
        for name in layout::names(&self.layout.staging, "staging")? {
            recovered.unfinished += usize::from(self.remove_abandoned(&name)?);
        }
        for name in layout::names(&self.layout.volumes, "volumes")? {
            recovered.trimmed += usize::from(self.free_eof_blocks(&name)?);
        }
        let reclaimed = self.ids.recover(&assigned_ids(&self.layout)?)?;
        recovered.released_ids = reclaimed.freed.len();
        recovered.busy_ids = reclaimed.draining.len();
        // Directories that were removed from staging and ids that were freed have nothing reserved any more.
        self.space_book().invalidate_total();
        Ok(recovered)
    }

    /// Drops the blocks that an image has past its end: growing allocates first. Blocks of the map of
    /// its blocks count too, so more blocks than bytes are only a reason to look.
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

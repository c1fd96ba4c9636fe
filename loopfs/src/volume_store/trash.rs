//! Deleting: out of sight at once, removed in the background.
//!
//! An entry stays in the trash until its space and its project id are free, so the trash is
//! also the durable list of what is still to be done. With the entry its reservation stays (`space`).

use std::collections::HashSet;
use std::ffi::CStr;
use std::fmt::Display;
use std::os::fd::{AsFd, OwnedFd};

use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, RenameFlags, renameat2};
use nix::sys::stat::fstatat;
use nix::unistd::{UnlinkatFlags, ftruncate, unlinkat};

use super::id::{SnapshotId, VolumeId};
use super::on_disk::{Attributes, layout};
use super::source::ContentSource;
use super::space::{Released, recorded};
use super::store::VolumeStore;
use crate::error::{Context, Error, ErrorKind, Result};
use crate::sys::file_lease;

impl VolumeStore {
    /// Deletes a volume: when this returns it is gone for good, and its space and project id are
    /// freed by [`empty_trash`](Self::empty_trash). False if there was none.
    ///
    /// One in use is not deleted: an image that is attached to a loop device which is to stay, and a directory that is shown
    /// somewhere, by what was recorded ([`record_use`](Self::record_use)) or as this process's mount table has it. Where
    /// a device is to go at its last close, or another program has bound one, whoever has it open keeps what it holds
    /// until then, and the volume keeps its reservation.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`](crate::ErrorKind::Busy) names the place or the device. EROFS and the like.
    pub fn delete(&self, id: &VolumeId) -> Result<bool> {
        self.discard(ContentSource::Volume(id))
    }

    /// Deletes a snapshot, as [`delete`](Self::delete) a volume. Volumes that were made from it stay.
    ///
    /// # Errors
    /// EROFS and the like.
    pub fn delete_snapshot(&self, id: &SnapshotId) -> Result<bool> {
        self.discard(ContentSource::Snapshot(id))
    }

    fn discard(&self, entry: ContentSource<'_>) -> Result<bool> {
        let _lock = self.layout.lock_shared()?;
        let held = match entry {
            ContentSource::Volume(id) => Some(self.guard_deletion(id)?),
            // Nobody can be shown one.
            ContentSource::Snapshot(_) => None,
        };
        let name = layout::unique(entry.id())?;
        let (from, to) = (self.layout.parent(entry)?, &self.layout.trash);
        match self.layout.rename_held(from, entry.id(), to, &name, held) {
            Ok(()) => Ok(true),
            // Whoever deleted it may have died before that was durable.
            Err(Errno::ENOENT) => self.layout.make_durable().map(|()| false),
            Err(errno) => Err(Error::sys("delete", entry, errno)),
        }
    }

    /// Removes what [`delete`](Self::delete) put into the trash; answers how many volumes and snapshots are
    /// gone. Takes as long as there are files; call it again for those left behind by an error or
    /// held by a file that is open. Any number of processes may call it concurrently.
    ///
    /// # Errors
    /// The first one met. Everything that can be removed is removed all the same, also from the volume that has the
    /// entry which cannot: an immutable file (EPERM), or a mount in this process's namespace (EBUSY).
    pub fn empty_trash(&self) -> Result<usize> {
        self.empty_trash_giving_way(|| ())
    }

    /// As [`empty_trash`](Self::empty_trash), for a caller who does more urgent things with the same disk and processors:
    /// `yield_now` is called before each file is removed, and can wait as long as it wants. No lock is held then, and
    /// what is left in the trash is complete for whoever else empties it.
    ///
    /// # Errors
    /// As [`empty_trash`](Self::empty_trash).
    pub fn empty_trash_giving_way(&self, mut yield_now: impl FnMut()) -> Result<usize> {
        let mut removed = 0;
        let mut first_error = self.space_book().retry_deferred_releases().err();
        // Removing them again in this call would fail again.
        let mut failed = HashSet::new();
        loop {
            let mut progress = false;
            for name in layout::names(&self.layout.trash, "trash")? {
                if failed.contains(&name) {
                    continue;
                }
                match self.remove_entry(&name, &mut yield_now, &mut progress) {
                    Ok(Removal::Done { volume }) => {
                        progress = true;
                        removed += usize::from(volume);
                    }
                    Ok(Removal::Postponed) => {}
                    Err(error) => {
                        first_error.get_or_insert(error);
                        failed.insert(name);
                    }
                }
            }
            if !progress {
                return first_error.map_or(Ok(removed), Err);
            }
        }
    }

    /// Removes an entry of the trash, or as much of it as can be removed. Sets `progress` if there are new entries.
    fn remove_entry(&self, name: &str, yield_now: &mut impl FnMut(), progress: &mut bool) -> Result<Removal> {
        yield_now();
        let trash = &self.layout.trash;
        let status = match fstatat(trash, name, AtFlags::AT_SYMLINK_NOFOLLOW) {
            Ok(status) => status,
            Err(Errno::ENOENT) => return Ok(Removal::Postponed),
            Err(errno) => return Err(Error::sys("stat in the trash", name, errno)),
        };
        match status.st_mode & libc::S_IFMT {
            libc::S_IFDIR => {}
            libc::S_IFREG => return self.remove_image(name),
            // It was never a volume, and has nothing reserved.
            _ => {
                let removed = self.unlink(name, UnlinkatFlags::NoRemoveDir)?;
                return Ok(if removed { Removal::Done { volume: false } } else { Removal::Postponed });
            }
        }
        let directory = match layout::open_directory(trash, name) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Removal::Postponed),
            directory => directory?,
        };
        let attributes = Attributes::read(&directory)?;
        if self.empty_directory(&directory, name, yield_now, progress)? {
            return Ok(Removal::Postponed);
        }
        let Some(Attributes { project, .. }) = attributes else {
            let removed = self.unlink(name, UnlinkatFlags::RemoveDir)?;
            return Ok(if removed { Removal::Done { volume: false } } else { Removal::Postponed });
        };
        let quota = self.filesystem.quota();
        quota.finish_frees(project)?;
        // The directory itself is the one inode left. Until then it marks the id as taken.
        if quota.usage(project)?.is_some_and(|usage| usage.inodes.0 > 1) {
            self.space_book().limit_to_usage(project)?;
            return Ok(Removal::Postponed);
        }
        drop(directory);
        // Recovery, which frees what no directory carries, is kept out until this has freed it.
        let _lock = self.layout.lock_shared()?;
        if !self.unlink(name, UnlinkatFlags::RemoveDir)? {
            return Ok(Removal::Postponed);
        }
        self.space_book().release_project(project)?;
        Ok(Removal::Done { volume: true })
    }

    /// Removes an image that no process and no loop device has open. Until then it keeps its entry and its reservation,
    /// for it keeps its blocks.
    fn remove_image(&self, name: &str) -> Result<Removal> {
        let Some(image) = self.open_unused_image(name)? else { return Ok(Removal::Postponed) };
        let released = Released::of(&image)?;
        if recorded(&image).is_some() {
            // Frees the blocks now. After the last name is removed the file system would do it in the background, and a
            // count would take them for its own. The record keeps the reservation, also if the process dies here.
            ftruncate(&image, 0).context("free the blocks of", name)?;
        }
        let removed =
            self.space_book().remove_image(released, || self.unlink(name, UnlinkatFlags::NoRemoveDir))?;
        Ok(if removed { Removal::Done { volume: true } } else { Removal::Postponed })
    }

    /// Returns `None` if the image is open elsewhere, or was removed by another process.
    fn open_unused_image(&self, name: &str) -> Result<Option<OwnedFd>> {
        // A count in another process has images open for a moment, and holds this.
        let _account = self.space_book().lock_out_counts()?;
        let flags = OFlag::O_RDWR | OFlag::O_NONBLOCK;
        let image = match layout::open_beneath(self.layout.trash.as_fd(), name, flags) {
            Ok(image) => image,
            Err(Errno::ENOENT) => return Ok(None),
            Err(errno) => return Err(refused(name, errno)),
        };
        match file_lease::is_open_elsewhere(&image) {
            Ok(open) => Ok(Some(image).filter(|_| !open)),
            Err(errno) => {
                let detail = "the kernel grants no lease, which shows whether the image is still open; set the sysctl \
                              fs.leases-enable to 1";
                Err(Error::sys("take a lease of", name, errno).explain(detail))
            }
        }
    }

    /// Removes the name of an entry. Returns `false` if another process has removed it, or has put something into it.
    fn unlink(&self, name: &str, flags: UnlinkatFlags) -> Result<bool> {
        match unlinkat(&self.layout.trash, name, flags) {
            Ok(()) => Ok(true),
            // A process that still has a deleted directory open can create files in it.
            Err(Errno::ENOENT | Errno::ENOTEMPTY | Errno::EEXIST) => Ok(false),
            Err(errno) => Err(refused(name, errno)),
        }
    }

    /// Removes everything in a directory of the trash. A directory that is not empty is lifted
    /// into the trash rather than walked into, so that no depth of a tree costs more than one
    /// descriptor. Out of its volume, for only there can a directory go whose owner has given it
    /// another project id (EXDEV elsewhere). Returns `true` if one was lifted, and sets `progress` then.
    ///
    /// An entry that cannot be removed keeps no other from being removed. The first error is returned in the end.
    fn empty_directory(
        &self,
        directory: &OwnedFd,
        name: &str,
        yield_now: &mut impl FnMut(),
        progress: &mut bool,
    ) -> Result<bool> {
        let (mut any_lifted, mut first_error) = (false, None);
        let own = layout::open_beneath(directory.as_fd(), ".", OFlag::O_RDONLY | OFlag::O_DIRECTORY)
            .context("open in the trash", name)?;
        let mut entries = nix::dir::Dir::from_fd(own).context("list in the trash", name)?;
        for entry in entries.iter() {
            let entry = entry.context("list in the trash", name)?;
            let child = entry.file_name();
            if matches!(child.to_bytes(), b"." | b"..") {
                continue;
            }
            yield_now();
            match self.remove_child(directory, name, child) {
                Ok(Child::Removed) => {}
                Ok(Child::Lifted) => any_lifted = true,
                Err(error) => drop(first_error.get_or_insert(error)),
            }
        }
        *progress |= any_lifted;
        first_error.map_or(Ok(any_lifted), Err)
    }

    /// Another process that empties the trash may remove or lift the same entry first (ENOENT).
    fn remove_child(&self, directory: &OwnedFd, name: &str, child: &CStr) -> Result<Child> {
        let refused = |errno| Err(refused(format!("{name}/{}", child.to_string_lossy()), errno));
        let unlinked = match unlinkat(directory, child, UnlinkatFlags::NoRemoveDir) {
            Err(Errno::EISDIR) => unlinkat(directory, child, UnlinkatFlags::RemoveDir),
            other => other,
        };
        match unlinked {
            Ok(()) | Err(Errno::ENOENT) => return Ok(Child::Removed),
            Err(Errno::ENOTEMPTY | Errno::EEXIST) => {}
            Err(errno) => return refused(errno),
        }
        let (trash, lifted) = (&self.layout.trash, layout::unique("lifted")?);
        match renameat2(directory, child, trash, lifted.as_str(), RenameFlags::RENAME_NOREPLACE) {
            Ok(()) | Err(Errno::ENOENT) => Ok(Child::Lifted),
            Err(errno) => refused(errno),
        }
    }
}

/// What became of an entry of a deleted directory.
enum Child {
    Removed,
    /// It is an entry of the trash now.
    Lifted,
}

/// The error for an entry that the kernel refuses to remove.
fn refused(shown: impl Display, errno: Errno) -> Error {
    let error = Error::sys("remove from the trash", shown, errno);
    match errno {
        Errno::EPERM => {
            error.explain("it or its directory is immutable or append-only; run `chattr -ia` on both")
        }
        Errno::EBUSY => error.explain("a file system is mounted there; unmount it"),
        _ => error,
    }
}

enum Removal {
    /// This call removed the entry, which was a volume, or a directory lifted out of one.
    Done { volume: bool },
    /// The entry is left for later: directories were lifted out of it, or some of it is open. Or another process
    /// has removed it.
    Postponed,
}

//! Deleting volumes: a rename takes the volume out of sight immediately, and a later call removes its content.
//!
//! An entry stays in the trash until its space and its project id are free, so the trash is also the durable list of
//! deletions in progress. The reservation of the entry stays as long as the entry (`space`).
//!
//! `docs/decisions/0018-deleted-images.md` gives the reasons.

use std::collections::HashSet;
use std::ffi::CStr;
use std::fmt::Display;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, RenameFlags, renameat2};
use nix::sys::stat::{FileStat, fstatat};
use nix::unistd::{UnlinkatFlags, ftruncate, symlinkat, unlinkat};

use super::id::{SnapshotId, VolumeId};
use super::on_disk::{DirectoryAttributes, layout};
use super::source::ContentSource;
use super::space::{recorded, reservation_to_release};
use super::store::{VolumeStore, if_found};
use crate::error::{Context, Error, ErrorKind, Result};
use crate::project_quota::{ProjectId, Release};
use crate::sys::file_lease;

/// The beginning of the names of directories that were lifted out of others.
const LIFTED: &str = "lifted";
/// The beginning of the names of links that record ids whose release was deferred. No entry of a volume begins with it.
const DRAINING: &str = "draining:";

/// How long volumes wait for directories that were lifted out of others. A process that still has a deleted directory open can create
/// more of them without end.
const LIFTED_WAIT: Duration = Duration::from_secs(1);

/// The most names that a pass removes from one directory, for the same reason, and because other volumes wait for them.
const MOST_NAMES: usize = 1 << 16;

impl VolumeStore {
    /// Deletes a volume, durably. [`empty_trash`](Self::empty_trash) then frees its space and its project id. Returns `false` if
    /// there is no such volume.
    ///
    /// Does not delete a volume in use: an image that is attached to a loop device without a deferred detach, or a directory that
    /// is published according to its record ([`record_publication`](Self::record_publication)) or mounted according to the mount table of this
    /// process. A device with a deferred detach, or one that another program has bound, does not prevent the deletion. Its
    /// users keep the content until the last of them closes it, and the volume keeps its reservation until then.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`](crate::ErrorKind::Busy) names the path or the device. Those of rename(2), such as EROFS.
    pub fn delete(&self, id: &VolumeId) -> Result<bool> {
        self.delete_while(id, || true)
    }

    /// As [`delete`](Self::delete), but only if `is_wanted` returns `true`. The call asks once it has the locks of the store and the volume,
    /// for which it may have waited long. After that, only rename(2) can take long, if the disk hangs.
    ///
    /// # Errors
    /// As [`delete`](Self::delete), and [`ErrorKind::Other`](crate::ErrorKind::Other): `is_wanted` has returned `false`.
    pub fn delete_while(&self, id: &VolumeId, is_wanted: impl FnOnce() -> bool) -> Result<bool> {
        self.discard(ContentSource::Volume(id), is_wanted)
    }

    /// Deletes a snapshot, as [`delete`](Self::delete) deletes a volume. Volumes that were cloned from it stay.
    ///
    /// # Errors
    /// Those of rename(2), such as EROFS.
    pub fn delete_snapshot(&self, id: &SnapshotId) -> Result<bool> {
        self.discard(ContentSource::Snapshot(id), || true)
    }

    fn discard(&self, entry: ContentSource<'_>, is_wanted: impl FnOnce() -> bool) -> Result<bool> {
        let _lock = self.layout.lock_shared()?;
        let held = match entry {
            ContentSource::Volume(id) => Some(self.guard_deletion(id)?),
            // Snapshots are never published.
            ContentSource::Snapshot(_) => None,
        };
        if !is_wanted() {
            let detail = "the caller does not request the deletion any more, so nothing is deleted";
            return Err(Error::new(ErrorKind::Other, "delete", entry, detail));
        }
        let name = layout::unique(entry.id())?;
        let (from, to) = (self.layout.parent(entry), &self.layout.trash);
        match layout::rename(from, entry.id(), to, &name, held) {
            Ok(()) => Ok(true),
            // The process that deleted it may have died before the deletion was durable.
            Err(Errno::ENOENT) => self.layout.make_durable().map(|()| false),
            Err(errno) => Err(Error::sys("delete", entry, errno)),
        }
    }

    /// Removes the volumes and snapshots in the trash, and returns how many it removed. The time is proportional to the
    /// number of files. Call it again for entries that an error left behind or that an open file keeps. Any number of processes
    /// may call it concurrently.
    ///
    /// # Errors
    /// The first error. The call still removes everything else that can be removed, also from the volume with the entry that
    /// cannot: an immutable file (EPERM), or a mount in the namespace of this process (EBUSY).
    pub fn empty_trash(&self) -> Result<usize> {
        self.empty_trash_yielding(|| ())
    }

    /// As [`empty_trash`](Self::empty_trash), for a caller with more urgent work on the same disk and processors. It calls
    /// `yield_now` before it removes each file. `yield_now` may wait for any time: no lock is held then, and another process can
    /// empty the rest of the trash in the meantime.
    ///
    /// # Errors
    /// As [`empty_trash`](Self::empty_trash).
    pub fn empty_trash_yielding(&self, mut yield_now: impl FnMut()) -> Result<usize> {
        let mut removed = 0;
        let mut first_error = self.retry_deferred_releases().err();
        // Entries that failed. Another attempt in the same call would fail again.
        let mut failed = HashSet::new();
        let mut removed_by_others = false;
        // The end of the last pass in which volumes did not wait for lifted directories.
        let mut finished_at = Instant::now();
        loop {
            let mut progress = false;
            let mut pass = TrashPass { unfinished: false, waits: finished_at.elapsed() < LIFTED_WAIT };
            for name in self.trash_in_order()? {
                if failed.contains(&name) {
                    continue;
                }
                match self.remove_entry(&name, &mut yield_now, &mut pass) {
                    Ok(Removal::Done { volume }) => {
                        progress = true;
                        removed += usize::from(volume);
                    }
                    Ok(Removal::Postponed) => {}
                    Ok(Removal::ByAnother(project)) => {
                        self.ids.defer_release(project);
                        removed_by_others = true;
                    }
                    Err(error) => {
                        first_error.get_or_insert(error);
                        failed.insert(name);
                    }
                }
            }
            if !progress && !pass.unfinished {
                break;
            }
            if !pass.waits {
                finished_at = Instant::now();
            }
        }
        if removed_by_others {
            // The other process could not free the project id while this call had the directory open, and may never try again.
            first_error = first_error.or(self.retry_deferred_releases().err());
        }
        first_error.map_or(Ok(removed), Err)
    }

    /// Tries again to free the project ids whose release this process or another one has deferred.
    fn retry_deferred_releases(&self) -> Result<()> {
        let mut recorded = Vec::new();
        for name in layout::names(&self.layout.trash, "trash")? {
            let id = name.strip_prefix(DRAINING).and_then(|id| ProjectId::new(id.parse().ok()?));
            if let Some(id) = id.filter(|id| self.ids.range().contains(id)) {
                self.ids.defer_release(id);
                recorded.push((name, id));
            }
        }
        self.space_book().retry_deferred_releases()?;
        let draining = self.ids.draining();
        for (name, _) in recorded.iter().filter(|(_, id)| !draining.contains(id)) {
            self.unlink(name, UnlinkatFlags::NoRemoveDir)?;
        }
        Ok(())
    }

    /// Records an id that is still charged, for all processes that empty the trash. If that fails, or the process dies before, this
    /// process tries again, or recovery finds the id.
    fn record_draining(&self, project: ProjectId) {
        symlinkat("deferred", &self.layout.trash, format!("{DRAINING}{project}").as_str()).ok();
    }

    /// Returns the names in the trash, first the directories that were lifted out of others.
    fn trash_in_order(&self) -> Result<Vec<String>> {
        let mut names = layout::names(&self.layout.trash, "trash")?;
        names.sort_by_key(|name| !name.starts_with(LIFTED));
        Ok(names)
    }

    /// Removes an entry of the trash, or as much of it as can be removed.
    fn remove_entry(
        &self,
        name: &str,
        yield_now: &mut impl FnMut(),
        pass: &mut TrashPass,
    ) -> Result<Removal> {
        if name.starts_with(DRAINING) {
            return Ok(Removal::Postponed);
        }
        yield_now();
        let trash = &self.layout.trash;
        let Some(status) = self.stat_in_trash(name)? else { return Ok(Removal::Postponed) };
        match status.st_mode & libc::S_IFMT {
            libc::S_IFDIR => {}
            libc::S_IFREG => return self.remove_image(name),
            // It was never a volume and has no reservation.
            _ => {
                let removed = self.unlink(name, UnlinkatFlags::NoRemoveDir)?;
                return Ok(if removed { Removal::Done { volume: false } } else { Removal::Postponed });
            }
        }
        let opened = if_found(layout::open_directory(trash, name))?;
        let Some(directory) = opened else { return Ok(Removal::Postponed) };
        let Some(DirectoryAttributes { project, .. }) = DirectoryAttributes::read(&directory)? else {
            self.empty_directory(&directory, name, yield_now, &mut pass.unfinished)?;
            let removed = self.unlink(name, UnlinkatFlags::RemoveDir)?;
            return Ok(if removed { Removal::Done { volume: false } } else { Removal::Postponed });
        };
        let removal = self.remove_volume_directory(directory, name, project, yield_now, pass);
        // The directory is closed now. If another process removes it from here on, that process can free the project id.
        match removal {
            Ok(Removal::Done { .. }) => removal,
            // No two entries ever have the same name.
            _ if self.stat_in_trash(name)?.is_some() => removal,
            _ => Ok(Removal::ByAnother(project)),
        }
    }

    /// Removes the directory of a volume or snapshot, and frees its project id.
    fn remove_volume_directory(
        &self,
        directory: OwnedFd,
        name: &str,
        project: ProjectId,
        yield_now: &mut impl FnMut(),
        pass: &mut TrashPass,
    ) -> Result<Removal> {
        let mut unfinished = false;
        let emptied = self.empty_directory(&directory, name, yield_now, &mut unfinished);
        pass.unfinished |= unfinished;
        emptied?;
        // Not while its directories, or those of others, are still in the trash: the wait for the file system below would be
        // repeated for each level of a tree.
        if unfinished || pass.unfinished && pass.waits {
            return Ok(Removal::Postponed);
        }
        let quota = self.filesystem.quota();
        quota.finish_inactivation(project)?;
        // The directory itself is the last inode. As long as it exists, the id is in use.
        if quota.usage(project)?.is_some_and(|usage| usage.inodes.0 > 1) {
            self.space_book().limit_to_usage(project)?;
            return Ok(Removal::Postponed);
        }
        drop(directory);
        // Prevents recovery, which frees unassigned ids, until this call has freed the id.
        let _lock = self.layout.lock_shared()?;
        if !self.unlink(name, UnlinkatFlags::RemoveDir)? {
            return Ok(Removal::Postponed);
        }
        if let Release::Draining(_) = self.space_book().release_project(project)? {
            self.record_draining(project);
        }
        Ok(Removal::Done { volume: true })
    }

    /// Returns `None` if there is no such entry.
    fn stat_in_trash(&self, name: &str) -> Result<Option<FileStat>> {
        match fstatat(&self.layout.trash, name, AtFlags::AT_SYMLINK_NOFOLLOW) {
            Ok(status) => Ok(Some(status)),
            Err(Errno::ENOENT) => Ok(None),
            Err(errno) => Err(Error::sys("stat in the trash", name, errno)),
        }
    }

    /// Removes an image that no process and no loop device has open. An image that is open keeps its entry and its reservation,
    /// because it keeps its blocks.
    fn remove_image(&self, name: &str) -> Result<Removal> {
        let Some(image) = self.open_unused_image(name)? else { return Ok(Removal::Postponed) };
        let released = reservation_to_release(&image)?;
        if recorded(&image).is_some() {
            // Frees the blocks now. After the removal of the last name the file system would free them in the background, and a
            // count would take them for overhead. The recorded capacity keeps the reservation if the process dies here.
            ftruncate(&image, 0).context("free the blocks of", name)?;
        }
        let removed =
            self.space_book().remove_image(released, || self.unlink(name, UnlinkatFlags::NoRemoveDir))?;
        Ok(if removed { Removal::Done { volume: true } } else { Removal::Postponed })
    }

    /// Returns `None` if the image is open elsewhere, or was removed by another process.
    fn open_unused_image(&self, name: &str) -> Result<Option<OwnedFd>> {
        // A count in another process opens images for a moment, and would make them look used.
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
                let cause =
                    "the kernel grants no lease, so the store cannot check whether the image is still open";
                let error = Error::sys("take a lease of", name, errno).explain(cause);
                Err(error.with_remedy("set the sysctl fs.leases-enable to 1"))
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

    /// Removes everything in a directory of the trash. It moves a subdirectory that is not empty up into the trash instead of
    /// walking into it, so a tree of any depth needs only two descriptors. The trash has no project, so a directory to which its
    /// owner has given another project id can be moved there too (EXDEV elsewhere). Sets `unfinished` if it
    /// moved one, or left names for the next pass.
    ///
    /// If an entry cannot be removed, the call removes the others and returns the first error in the end.
    fn empty_directory(
        &self,
        directory: &OwnedFd,
        name: &str,
        yield_now: &mut impl FnMut(),
        unfinished: &mut bool,
    ) -> Result<()> {
        let (mut names, mut first_error) = (0, None);
        let own = layout::open_beneath(directory.as_fd(), ".", OFlag::O_RDONLY | OFlag::O_DIRECTORY)
            .context("open in the trash", name)?;
        let mut entries = nix::dir::Dir::from_fd(own).context("list in the trash", name)?;
        for entry in entries.iter() {
            let entry = entry.context("list in the trash", name)?;
            let child = entry.file_name();
            if matches!(child.to_bytes(), b"." | b"..") {
                continue;
            }
            if names == MOST_NAMES {
                *unfinished = true;
                break;
            }
            yield_now();
            match self.remove_child(directory, name, child) {
                Ok(lifted) => {
                    names += 1;
                    *unfinished |= lifted;
                }
                Err(error) => drop(first_error.get_or_insert(error)),
            }
        }
        first_error.map_or(Ok(()), Err)
    }

    /// Removes an entry of a deleted directory. Returns `true` if it was moved up and is an entry of the trash now. Another process that
    /// empties the trash may remove or lift the same entry first (ENOENT).
    fn remove_child(&self, directory: &OwnedFd, name: &str, child: &CStr) -> Result<bool> {
        let refused = |errno| Err(refused(format!("{name}/{}", child.to_string_lossy()), errno));
        let unlinked = match unlinkat(directory, child, UnlinkatFlags::NoRemoveDir) {
            Err(Errno::EISDIR) => unlinkat(directory, child, UnlinkatFlags::RemoveDir),
            other => other,
        };
        match unlinked {
            Ok(()) | Err(Errno::ENOENT) => return Ok(false),
            Err(Errno::ENOTEMPTY | Errno::EEXIST) => {}
            Err(errno) => return refused(errno),
        }
        let (trash, lifted) = (&self.layout.trash, layout::unique(LIFTED)?);
        match renameat2(directory, child, trash, lifted.as_str(), RenameFlags::RENAME_NOREPLACE) {
            Ok(()) | Err(Errno::ENOENT) => Ok(true),
            Err(errno) => refused(errno),
        }
    }
}

/// A pass over the entries of the trash.
struct TrashPass {
    /// Directories were lifted out of others and are entries of the trash now, or have names left.
    unfinished: bool,
    /// Volumes are not finished until no pass leaves anything.
    waits: bool,
}

/// Returns the error for an entry that the kernel refuses to remove.
fn refused(shown: impl Display, errno: Errno) -> Error {
    let error = Error::sys("remove from the trash", shown, errno);
    match errno {
        Errno::EPERM => error
            .explain("it or its directory is immutable or append-only")
            .with_remedy("run `chattr -ia` on both"),
        Errno::EBUSY => error.explain("a file system is mounted there").with_remedy("unmount it"),
        _ => error,
    }
}

enum Removal {
    /// This call removed the entry, which was a volume, or a directory lifted out of one.
    Done { volume: bool },
    /// The entry is left for later: directories were lifted out of it, or some of it is open. Or another process
    /// has removed it.
    Postponed,
    /// Another process removed the directory of this project while this call had it open.
    ByAnother(ProjectId),
}

//! Detects whether a volume is in use. The evidence (locks and records) survives the process that uses the volume and is
//! visible from every container.
//!
//! **Images.** The kernel shows their use. A device that is bound to an image holds a lock on it (see `loop_device::index_lock`).
//! Every process sees that lock without the node of the device, and the kernel drops it with the device. A device with a
//! deferred detach does not count as use, because its user has already requested the detach.
//!
//! **Directories.** The kernel does not show their use. A bind mount leaves no trace on its source, and the process that
//! deletes a volume may be in another mount namespace than the mount. A process that publishes a directory therefore records
//! that before it mounts, and removes the record when the directory is no longer mounted anywhere. The record is a symbolic
//! link with the id of the volume in `.loopfs/users`, and its text is the boot and the path. It is not made
//! durable, because the mount is not durable either; a record of another boot is ignored.
//!
//! If a process dies between the record and the mount, the volume counts as in use until that process, started again, has
//! compared its records with its mount table ([`VolumeStore::sync_publications`]). The other order could lose a volume in use.
//!
//! **Concurrency.** One lock, of `.loopfs/users` itself, is held while a record is written, and from the detection until the
//! volume has been renamed. A tenant can lock the directory of a published volume, so that directory is not used for locks.
//!
//! `docs/decisions/0014-in-use-detection.md` gives the reasons.

use std::borrow::Borrow;
use std::collections::HashMap;
use std::ffi::OsStr;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Component, Path, PathBuf};
use std::sync::PoisonError;

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg, OFlag, RenameFlags, readlinkat, renameat2};
use nix::unistd::{UnlinkatFlags, symlinkat, unlinkat};

use super::id::VolumeId;
use super::on_disk::layout::{self, Layout};
use super::source::ContentSource;
use super::store::VolumeStore;
use crate::boot::Boot;
use crate::error::{Error, ErrorKind, Explanation, Result};
use crate::mount::table::Mount;
use crate::{flock, loop_device};

/// Guards the deletion of a volume: the volume is not in use, and no process begins to use it until this is dropped.
pub(super) struct DeletionGuard<'s> {
    _records: PublicationRecords<'s>,
    _image: Option<Flock<OwnedFd>>,
}

impl VolumeStore {
    /// Records that a Filesystem volume is about to be published at `place`, which is below `directory`: a process that publishes does so
    /// below one directory, and a volume is published below one at a time. From then on [`delete`](Self::delete) fails in every
    /// process, until [`sync_publication`](Self::sync_publication) finds no mount of the volume, or the machine restarts. A later path
    /// below the directory replaces an earlier one.
    ///
    /// [`Publisher`](crate::publish::Publisher) records what it publishes.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`]: the volume was deleted in the meantime and must not be published. [`ErrorKind::Conflict`]: it is recorded
    /// at a place outside `directory`. [`ErrorKind::InvalidInput`]: a path is not absolute or has `..`. [`ErrorKind::ReadOnly`]: the
    /// file system is read-only.
    pub fn record_publication(&self, id: &VolumeId, directory: &Path, place: &Path) -> Result<()> {
        require_normal(directory)?;
        require_normal(place)?;
        let records = self.records()?;
        let entry = ContentSource::Volume(id);
        if self.layout.stat(entry)?.is_none() {
            return Err(Error::new(ErrorKind::NotFound, "show", entry, "there is none of that id"));
        }
        records.write_below(id.as_str(), directory, place)?.map_or(Ok(()), |elsewhere| {
            let (elsewhere, directory) = (elsewhere.display(), directory.display());
            let cause =
                format!("it is published at {elsewhere}, by a program that publishes outside {directory}");
            Err(Error::new(ErrorKind::Conflict, "publish", entry, cause).with_remedy(format!(
                "unpublish it there first, or if nothing is mounted at {elsewhere}, start that program again"
            )))
        })
    }

    /// Makes the record of a volume agree with `mounts`, a table with all mounts of the volume below `directory`. Call it after an
    /// unmount, while no mount of the volume is in progress there. A record of another directory stays, because the mounts of another process
    /// need not be in any table of this one.
    ///
    /// # Errors
    /// Those of flock(2) and unlink(2).
    pub fn sync_publication(
        &self,
        id: &VolumeId,
        directory: &Path,
        mounts: &[impl Borrow<Mount>],
    ) -> Result<()> {
        require_normal(directory)?;
        let records = self.records()?;
        match self.published_at(id, directory, mounts)? {
            Some(place) => records.write_below(id.as_str(), directory, place).map(drop),
            None => records.remove_below(id.as_str(), directory),
        }
    }

    /// As [`sync_publication`](Self::sync_publication), for all volumes. For a process that publishes volumes, at its start: an earlier
    /// process may have been killed between a record and its mount. `mounts` reads the table while nothing is recorded.
    ///
    /// # Errors
    /// Those of flock(2), getdents(2), unlink(2), and of `mounts`.
    pub fn sync_publications<M: Borrow<Mount>>(
        &self,
        directory: &Path,
        mounts: impl FnOnce() -> Result<Vec<M>>,
    ) -> Result<()> {
        require_normal(directory)?;
        let records = self.records()?;
        let mounts = mounts()?;
        let shown: HashMap<&str, &Path> = self.published_below(directory, &mounts)?.collect();
        for name in layout::names(&self.layout.publications, ".loopfs/users")? {
            if !shown.contains_key(name.as_str()) {
                records.remove_below(&name, directory)?;
            }
        }
        for (name, place) in shown {
            records.write_below(name, directory, place)?;
        }
        Ok(())
    }

    /// Returns the mount point of a mount of this volume below a directory, if `mounts` has one.
    fn published_at<'a>(
        &self,
        id: &VolumeId,
        directory: &Path,
        mounts: &'a [impl Borrow<Mount>],
    ) -> Result<Option<&'a Path>> {
        let mut published = self.published_below(directory, mounts)?;
        Ok(published.find(|(volume, _)| *volume == id.as_str()).map(|(_, place)| place))
    }

    /// Returns the volumes that are mounted below a directory, by their names, with the mount points.
    fn published_below<'a>(
        &self,
        directory: &Path,
        mounts: &'a [impl Borrow<Mount>],
    ) -> Result<impl Iterator<Item = (&'a str, &'a Path)>> {
        let device = self.device()?;
        let mounts = mounts.iter().map(Borrow::borrow);
        let below = mounts
            .filter(move |mount: &&Mount| mount.device == device && mount.mount_point.starts_with(directory));
        Ok(below.filter_map(|mount| Some((published_volume(mount)?, mount.mount_point.as_path()))))
    }

    /// Checks that a volume is not in use, and prevents further use until the returned value is dropped.
    ///
    /// Does not detect devices that other programs have bound to the image. They keep the content until they are detached.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`] names the path or the device.
    pub(super) fn guard_deletion(&self, id: &VolumeId) -> Result<DeletionGuard<'_>> {
        let entry = ContentSource::Volume(id);
        let busy = |cause: String, remedy: &'static str| {
            Err(Error::new(ErrorKind::Busy, "delete", entry, cause).with_remedy(remedy))
        };
        let records = self.records()?;
        if let Some(place) = records.read(id.as_str())? {
            let cause = format!("it is in use: published at {}", place.display());
            return busy(cause, "unpublish it there first");
        }
        let image = match self.layout.stat(entry)?.map(|status| status.st_mode & libc::S_IFMT) {
            Some(libc::S_IFREG) => self.layout.open_entry(entry, OFlag::O_RDONLY | OFlag::O_NONBLOCK)?,
            Some(libc::S_IFDIR) => {
                // A program that mounts the directory by itself keeps no records.
                // A panic leaves a cache that has too few mounts, and the next read adds them.
                let mounts = self.mounts.lock().unwrap_or_else(PoisonError::into_inner).read()?;
                return match self.published_at(id, Path::new("/"), &mounts)? {
                    Some(place) => {
                        busy(format!("it is in use: mounted at {}", place.display()), "unmount it")
                    }
                    None => Ok(DeletionGuard { _records: records, _image: None }),
                };
            }
            _ => return Ok(DeletionGuard { _records: records, _image: None }),
        };
        // The same lock as for attaching. Expanding or copying an image holds it for longer, and a deletion must not wait for that.
        let image = match Flock::lock(image, FlockArg::LockExclusiveNonblock) {
            Ok(image) => image,
            Err((_, Errno::EAGAIN)) => {
                return busy("its image is being attached, expanded or copied".to_owned(), "try again");
            }
            Err((_, errno)) => return Err(Error::sys("lock the image of", entry, errno)),
        };
        match loop_device::attached_index(image.as_fd()) {
            Some(index) => {
                let cause = format!("it is in use: attached to /dev/loop{index}");
                busy(cause, "unpublish and unstage it first")
            }
            None => Ok(DeletionGuard { _records: records, _image: Some(image) }),
        }
    }

    /// Locks the publication records.
    fn records(&self) -> Result<PublicationRecords<'_>> {
        let Layout { publications, lock_timeout, boot, .. } = &self.layout;
        // The lock belongs to the open file description, so each call opens its own.
        let own = layout::open_directory(publications, ".")?;
        let operation = "record where volumes are published, which takes the lock";
        Ok(PublicationRecords { directory: flock::exclusive(own, *lock_timeout, operation)?, boot })
    }
}

/// Returns an error unless a path is absolute and without `..`, so that paths can be compared by their components.
fn require_normal(path: &Path) -> Result<()> {
    let mut components = path.components();
    let is_absolute = components.next() == Some(Component::RootDir);
    if is_absolute && components.all(|component| matches!(component, Component::Normal(_))) {
        return Ok(());
    }
    let cause = "it must be absolute and without ..";
    Err(Error::new(ErrorKind::InvalidInput, "record the path", path.display(), cause)
        .with_remedy("resolve it with realpath(3)"))
}

/// Returns the id of the volume that is the root of a mount of the store's file system.
fn published_volume(mount: &Mount) -> Option<&str> {
    let name = mount.root.strip_prefix("/volumes").ok()?;
    // A mount of a directory inside the volume publishes the volume too.
    name.iter().next().and_then(OsStr::to_str)
}

/// The publication records in `.loopfs/users`, locked.
struct PublicationRecords<'s> {
    directory: Flock<OwnedFd>,
    boot: &'s Boot,
}

impl PublicationRecords<'_> {
    /// Returns where the volume is published, if that was recorded in this boot.
    fn read(&self, id: &str) -> Result<Option<PathBuf>> {
        match readlinkat(&*self.directory, id) {
            Ok(text) => Ok(parse(&text.into_vec(), self.boot)),
            Err(Errno::ENOENT) => Ok(None),
            Err(errno) => Err(Error::sys("read the record of", id, errno)),
        }
    }

    /// Records that the volume is published at a place below `directory`. Writes nothing if that is already recorded. If it is recorded
    /// elsewhere in this boot, writes nothing and returns that path.
    fn write_below(&self, id: &str, directory: &Path, place: &Path) -> Result<Option<PathBuf>> {
        match self.read(id)? {
            Some(elsewhere) if !elsewhere.starts_with(directory) => return Ok(Some(elsewhere)),
            Some(recorded) if recorded == place => return Ok(None),
            _ => {}
        }
        let mut text = format!("{} ", self.boot).into_bytes();
        text.extend_from_slice(place.as_os_str().as_bytes());
        // By a rename, so that a record exists at every moment.
        let (records, temporary) = (&*self.directory, layout::unique(id)?);
        symlinkat(OsStr::from_bytes(&text), records, temporary.as_str())
            .and_then(|()| renameat2(records, temporary.as_str(), records, id, RenameFlags::empty()))
            .map_err(|errno| {
                let error = Error::sys("record the use of", id, errno);
                match errno {
                    Errno::ENOSPC | Errno::EDQUOT => error.explain(Explanation::of(
                        "the record needs a block, and the file system is full although volumes do not use all that is reserved \
                         for them",
                        "remove the files of other programs there",
                    )),
                    _ => error,
                }
            })?;
        Ok(None)
    }

    /// Removes the record, if there is one, unless it is of this boot and names a place outside `directory`.
    fn remove_below(&self, id: &str, directory: &Path) -> Result<()> {
        if self.read(id)?.is_some_and(|elsewhere| !elsewhere.starts_with(directory)) {
            return Ok(());
        }
        match unlinkat(&*self.directory, id, UnlinkatFlags::NoRemoveDir) {
            Ok(()) | Err(Errno::ENOENT) => Ok(()),
            Err(errno) => Err(Error::sys("remove the record of", id, errno)),
        }
    }
}

fn parse(text: &[u8], boot: &Boot) -> Option<PathBuf> {
    let place = text.strip_prefix(boot.to_string().as_bytes())?.strip_prefix(b" ")?;
    Some(PathBuf::from(OsStr::from_bytes(place)))
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[test]
    fn a_record_returns_the_newest_path() {
        let place = tempfile::tempdir().unwrap();
        let own = layout::open_directory(std::fs::File::open(place.path()).unwrap(), ".").unwrap();
        let boot = Boot::current().unwrap();
        let records =
            PublicationRecords { directory: Flock::lock(own, FlockArg::LockExclusive).unwrap(), boot: &boot };
        let (id, root) = ("pvc-1", Path::new("/"));
        assert_eq!(records.read(id).unwrap(), None);
        let of_another_boot = "5f0c2e9a-0000-4000-8000-000000000000 /pods/a";
        symlinkat(of_another_boot, &*records.directory, id).unwrap();
        assert_eq!(records.read(id).unwrap(), None);
        for place in ["/pods/a b/mount", "/pods/c/mount", "/pods/c/mount"] {
            assert_eq!(records.write_below(id, root, Path::new(place)).unwrap(), None);
            assert_eq!(records.read(id).unwrap().as_deref(), Some(Path::new(place)));
        }
        assert_eq!(std::fs::read_dir(place.path()).unwrap().count(), 1);
        for _ in 0..2 {
            records.remove_below(id, root).unwrap();
        }
        assert_eq!(records.read(id).unwrap(), None);
    }

    #[rstest]
    #[case::volume("/volumes/pvc-1", Some("pvc-1"))]
    #[case::part_of_it("/volumes/pvc-1/sub/directory", Some("pvc-1"))]
    #[case::all_volumes("/volumes", None)]
    #[case::the_whole("/", None)]
    #[case::deleted("/trash/pvc-1.0123456789abcdef", None)]
    fn a_mounts_root_names_the_volume(#[case] root: &str, #[case] expected: Option<&str>) {
        let table = format!("50 40 254:16 {root} /target rw - xfs /dev/vdb rw,prjquota\n");
        assert_eq!(published_volume(&crate::mount::table::parse(table.as_bytes()).unwrap()[0]), expected);
    }
}

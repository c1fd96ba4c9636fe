//! Who uses a volume: told by what outlives whoever uses it, and seen from any container.
//!
//! Of an image the kernel tells. A device that is bound to it holds a lock on it (see the hint in `loop_device`), which every
//! process sees without the device's node, and which goes with the device. A device that goes at its last close is not
//! use: whoever had asked for it has asked to have it taken away.
//!
//! Of a directory nobody tells. A bind mount leaves no trace on what it shows, and whoever deletes may be in another
//! mount namespace than the mount. So whoever shows a directory writes that down before, and takes it back when it is shown
//! no more. The record is a symbolic link of the volume's name in `.loopfs/users`, which says in which boot and where: a
//! link is there whole or not at all, and it costs the volume nothing of its limit, as an attribute of its directory could.
//! It is not made durable, for the mount is not either; of another boot it means nothing. A writer that dies between
//! record and mount leaves a volume that is taken for in use until the writer, started again, has compared its records with
//! its mount table ([`VolumeStore::settle_uses`]); the other order could lose a volume in use. A lock in place of the
//! record would go with the writer, and the mount does not.
//!
//! One lock, of `.loopfs/users` itself, is held from looking at all this until the volume has been renamed, and while a
//! record is written: a tenant can lock a directory that it is shown, so that one is not asked.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg, OFlag, RenameFlags, readlinkat, renameat2};
use nix::sys::stat::{fstat, major, minor};
use nix::unistd::{UnlinkatFlags, symlinkat, unlinkat};

use super::id::VolumeId;
use super::on_disk::Boot;
use super::on_disk::layout::{self, Layout};
use super::source::ContentSource;
use super::store::VolumeStore;
use crate::error::{Context, Error, ErrorKind, Result};
use crate::flock;
use crate::loop_device;
use crate::mount::table::{self as mountinfo, Mount};
use crate::units::DeviceNumber;

/// Nobody uses the volume, and nobody begins to while this lives.
pub(super) struct DeletionGuard {
    _records: Option<PublicationRecords>,
    _image: Option<Flock<OwnedFd>>,
}

impl VolumeStore {
    /// Writes down that a Filesystem volume is about to be shown at `place`: from now on [`delete`](Self::delete) refuses,
    /// whichever process asks, until [`settle_use`](Self::settle_use) finds it shown nowhere, or the machine is
    /// started anew. The newest place is kept.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`]: it was deleted meanwhile, and is not to be shown.
    pub fn record_use(&self, id: &VolumeId, place: &Path) -> Result<()> {
        let records = self.records()?.ok_or_else(|| {
            let detail = "the store has no directory of uses; opened for use, by a driver, it is given one";
            Error::new(ErrorKind::ReadOnly, "record the use of", id, detail)
        })?;
        let entry = ContentSource::Volume(id);
        if self.layout.stat(entry)?.is_none() {
            return Err(Error::new(ErrorKind::NotFound, "show", entry, "there is none of that id"));
        }
        records.write(id.as_str(), &self.layout.boot, place)
    }

    /// Brings the record of a volume into line with `mounts`, a table that has all mounts of it. To be called when one was
    /// taken away, while none is being made.
    ///
    /// # Errors
    /// Those of flock(2) and unlink(2).
    pub fn settle_use(&self, id: &VolumeId, mounts: &[Mount]) -> Result<()> {
        let Some(records) = self.records()? else { return Ok(()) };
        match self.published_at(id, mounts)? {
            Some(place) => records.write(id.as_str(), &self.layout.boot, place),
            None => records.remove(id.as_str()),
        }
    }

    /// As [`settle_use`](Self::settle_use), for all volumes. For a process that begins to show volumes and may have been
    /// killed at it before.
    ///
    /// # Errors
    /// Those of flock(2), getdents(2) and unlink(2).
    pub fn settle_uses(&self, mounts: &[Mount]) -> Result<()> {
        let (Some(records), Some(publications)) = (self.records()?, &self.layout.publications) else {
            return Ok(());
        };
        let device = self.device()?;
        let ours = mounts.iter().filter(|mount| mount.device == device);
        let shown: HashMap<&str, &Path> =
            ours.filter_map(|mount| Some((published_volume(mount)?, mount.mount_point.as_path()))).collect();
        for name in layout::names(publications, ".loopfs/publications")? {
            if !shown.contains_key(name.as_str()) {
                records.remove(&name)?;
            }
        }
        for (name, place) in shown {
            records.write(name, &self.layout.boot, place)?;
        }
        Ok(())
    }

    /// A mount among `mounts` that shows a Filesystem volume.
    fn published_at<'a>(&self, id: &VolumeId, mounts: &'a [Mount]) -> Result<Option<&'a Path>> {
        let device = self.device()?;
        let shows = |mount: &&Mount| mount.device == device && published_volume(mount) == Some(id.as_str());
        Ok(mounts.iter().find(shows).map(|mount| mount.mount_point.as_path()))
    }

    /// Keeps everybody from beginning to use a volume that nobody uses.
    ///
    /// Devices that other programs have bound to its image are not seen; they keep what they show until they go.
    pub(super) fn guard_deletion(&self, id: &VolumeId) -> Result<DeletionGuard> {
        let entry = ContentSource::Volume(id);
        let busy = |detail: String| Err(Error::new(ErrorKind::Busy, "delete", entry, detail));
        let records = self.records()?;
        let recorded =
            records.as_ref().map(|records| records.read(id.as_str(), &self.layout.boot)).transpose()?;
        if let Some(place) = recorded.flatten() {
            return busy(format!("it is in use: shown at {}; unpublish it there first", place.display()));
        }
        let image = match self.layout.stat(entry)?.map(|status| status.st_mode & libc::S_IFMT) {
            Some(libc::S_IFREG) => self.layout.open_entry(entry, OFlag::O_RDONLY | OFlag::O_NONBLOCK)?,
            Some(libc::S_IFDIR) => {
                // Whoever uses the library alone keeps no records.
                return match self.published_at(id, &mountinfo::read()?)? {
                    Some(place) => busy(format!("it is in use: mounted at {}; unmount it", place.display())),
                    None => Ok(DeletionGuard { _records: records, _image: None }),
                };
            }
            _ => return Ok(DeletionGuard { _records: records, _image: None }),
        };
        // As attaching does. Whoever grows or copies an image holds it for longer, and nobody shall wait for that here.
        let image = match Flock::lock(image, FlockArg::LockExclusiveNonblock) {
            Ok(image) => image,
            Err((_, Errno::EAGAIN)) => {
                return busy("its image is being attached, grown or copied; try again".to_owned());
            }
            Err((_, errno)) => return Err(Error::sys("lock the image of", entry, errno)),
        };
        match loop_device::attached_index(image.as_fd()) {
            Some(index) => {
                busy(format!("it is in use: attached to /dev/loop{index}; unpublish and unstage it first"))
            }
            None => Ok(DeletionGuard { _records: records, _image: Some(image) }),
        }
    }

    /// The device of the store's file system, as mount tables have it.
    fn device(&self) -> Result<DeviceNumber> {
        let status = fstat(&self.layout.volumes).context("fstat", "volumes")?;
        Ok(DeviceNumber { major: major(status.st_dev) as u32, minor: minor(status.st_dev) as u32 })
    }

    fn records(&self) -> Result<Option<PublicationRecords>> {
        PublicationRecords::lock(&self.layout)
    }
}

/// The name of the volume that a mount of the store's file system shows.
fn published_volume(mount: &Mount) -> Option<&str> {
    let name = mount.root.strip_prefix("/volumes").ok()?;
    // Of a directory in it, the volume is shown no less.
    name.iter().next().and_then(OsStr::to_str)
}

/// `.loopfs/users`, locked.
struct PublicationRecords(Flock<OwnedFd>);

impl PublicationRecords {
    /// None in a store of an earlier version that was opened to look at.
    fn lock(layout: &Layout) -> Result<Option<Self>> {
        let Some(publications) = &layout.publications else { return Ok(None) };
        // The lock is the description's, and another caller has its own.
        let own = layout::open_directory(publications, ".")?;
        flock::exclusive(own, layout.lock_timeout, "record where volumes are published, which takes the lock")
            .map(|locked| Some(Self(locked)))
    }

    /// Where the volume is shown, if that was recorded in this boot.
    fn read(&self, id: &str, boot: &Boot) -> Result<Option<PathBuf>> {
        match readlinkat(&*self.0, id) {
            Ok(text) => Ok(parse(&text.into_vec(), boot)),
            Err(Errno::ENOENT) => Ok(None),
            Err(errno) => Err(Error::sys("read the record of", id, errno)),
        }
    }

    fn write(&self, id: &str, boot: &Boot, place: &Path) -> Result<()> {
        if self.read(id, boot)?.as_deref() == Some(place) {
            return Ok(());
        }
        let mut text = format!("{boot} ").into_bytes();
        text.extend_from_slice(place.as_os_str().as_bytes());
        // Never without a record on the way from one place to another.
        let temporary = layout::unique(id)?;
        symlinkat(OsStr::from_bytes(&text), &*self.0, temporary.as_str())
            .and_then(|()| renameat2(&*self.0, temporary.as_str(), &*self.0, id, RenameFlags::empty()))
            .context("record the use of", id)
    }

    fn remove(&self, id: &str) -> Result<()> {
        match unlinkat(&*self.0, id, UnlinkatFlags::NoRemoveDir) {
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

    fn records(directory: &Path) -> (PublicationRecords, Boot) {
        let own = layout::open_directory(std::fs::File::open(directory).unwrap(), ".").unwrap();
        (PublicationRecords(Flock::lock(own, FlockArg::LockExclusive).unwrap()), Boot::current().unwrap())
    }

    #[test]
    fn a_record_says_the_newest_place_until_it_is_removed() {
        let directory = tempfile::tempdir().unwrap();
        let (records, boot) = records(directory.path());
        let id = "pvc-1";
        assert_eq!(records.read(id, &boot).unwrap(), None);
        for place in ["/pods/a b/mount", "/pods/c/mount", "/pods/c/mount"] {
            records.write(id, &boot, Path::new(place)).unwrap();
            assert_eq!(records.read(id, &boot).unwrap().as_deref(), Some(Path::new(place)));
        }
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1);
        for _ in 0..2 {
            records.remove(id).unwrap();
        }
        assert_eq!(records.read(id, &boot).unwrap(), None);
    }

    #[test]
    fn a_record_of_another_boot_says_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let (records, boot) = records(directory.path());
        let id = "pvc-1";
        symlinkat("5f0c2e9a-0000-4000-8000-000000000000 /pods/a", &*records.0, id).unwrap();
        assert_eq!(records.read(id, &boot).unwrap(), None);
        records.write(id, &boot, Path::new("/pods/b")).unwrap();
        assert_eq!(records.read(id, &boot).unwrap().as_deref(), Some(Path::new("/pods/b")));
    }

    #[rstest]
    #[case::volume("/volumes/pvc-1", Some("pvc-1"))]
    #[case::part_of_it("/volumes/pvc-1/sub/directory", Some("pvc-1"))]
    #[case::all_volumes("/volumes", None)]
    #[case::the_whole("/", None)]
    #[case::deleted("/trash/pvc-1.0123456789abcdef", None)]
    fn mounts_that_show_a_volume(#[case] root: &str, #[case] expected: Option<&str>) {
        let table = format!("50 40 254:16 {root} /target rw - xfs /dev/vdb rw,prjquota\n");
        assert_eq!(published_volume(&mountinfo::parse(table.as_bytes()).unwrap()[0]), expected);
    }
}

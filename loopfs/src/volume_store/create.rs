//! Creating a volume, completely or not at all.

use std::os::fd::OwnedFd;

use nix::fcntl::{AT_FDCWD, AtFlags, OFlag, openat};
use nix::sys::stat::{Mode, fstat};
use nix::unistd::{fsync, ftruncate, linkat};

use super::expand::allocate;
use super::id::VolumeId;
use super::on_disk::{Annotations, Image, is_pending, remove_pending, write_capacity};
use super::source::{ContentSource, OwnedContentSource};
use super::space::{PendingReservation, reservation_of_directory, reservation_of_image};
use super::spec::{VolumeKind, VolumeSpec, rounded};
use super::store::{VolumeStore, if_found};
use super::volume::Volume;
use crate::error::{Context, Error, ErrorKind, Result};
use crate::units::Bytes;
use crate::{descriptor, loop_device};

impl VolumeStore {
    /// Creates a volume. If the call is repeated, it returns the existing volume.
    ///
    /// # Errors
    /// [`ErrorKind::AlreadyExists`]: the id names a volume of another kind or a smaller one. [`ErrorKind::NoSpace`]: the file system
    /// has less available space beside its reservations, or may have fewer inodes; the call leaves nothing behind. [`ErrorKind::InvalidInput`]: no volume
    /// can have that size. [`ErrorKind::Unsupported`]: direct I/O is required in blocks smaller than the file system
    /// supports.
    pub fn create(&self, id: &VolumeId, spec: &VolumeSpec) -> Result<Volume> {
        let capacity = rounded(spec.capacity, id)?;
        self.create_by(id, spec, || {
            let _lock = self.layout.lock_shared()?;
            let is_there = || self.existing(id, spec.kind, capacity, None).map(|volume| volume.is_some());
            if self.exists_durably(is_there)? {
                return Ok(());
            }
            self.make(id, capacity, spec).or_else(|error| self.unless_created_concurrently(error, is_there))
        })
    }

    /// Creates a volume, which must not exist: of concurrent calls, one succeeds. A call that is repeated after a crash may find the volume
    /// of the first one.
    ///
    /// # Errors
    /// [`ErrorKind::AlreadyExists`]: there is a volume of that id. Otherwise as [`create`](Self::create).
    pub fn create_new(&self, id: &VolumeId, spec: &VolumeSpec) -> Result<Volume> {
        let capacity = rounded(spec.capacity, id)?;
        self.create_by(id, spec, || {
            let _lock = self.layout.lock_shared()?;
            match self.layout.stat(ContentSource::Volume(id))? {
                None => self.make(id, capacity, spec),
                Some(_) => {
                    let cause = "there is one of that id";
                    Err(Error::new(ErrorKind::AlreadyExists, "create volume", id, cause))
                }
            }
        })
    }

    /// Opens a volume after `create` has created it, or found the requested one. The caller holds no lock.
    pub(super) fn create_by(
        &self,
        id: &VolumeId,
        spec: &VolumeSpec,
        create: impl FnOnce() -> Result<()>,
    ) -> Result<Volume> {
        // Before and after: the volume is visible as soon as it has its name, and a reader drops what does not exist yet.
        if spec.pending {
            self.pending.add(id);
        }
        let created = create();
        if spec.pending {
            // Also after an error, because the volume may have its name.
            self.pending.add(id);
        }
        created?;
        let volume = self.volume(id)?;
        if !spec.pending {
            self.confirm_before_use(&volume)?;
        }
        Ok(volume)
    }

    /// Confirms a volume if it is pending: the caller does not expect that a program deletes it as incomplete.
    pub(crate) fn confirm_before_use(&self, volume: &Volume) -> Result<()> {
        if volume.is_pending()? { self.confirm(volume.id()) } else { Ok(()) }
    }

    /// Confirms a volume that was created as [pending](VolumeSpec::pending), durably. The call can be repeated.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`]. Those of fremovexattr(2) and fsync(2).
    pub fn confirm(&self, id: &VolumeId) -> Result<()> {
        let (_, content) = self.open_entry(ContentSource::Volume(id))?;
        remove_pending(content).context("confirm volume", id)?;
        self.layout.make_durable()
    }

    /// Returns the pending volumes and their annotations, in the order of their ids. A call reads all volumes if the last call that did so
    /// was more than five minutes ago, and otherwise only those that were pending then, or that were created through this `VolumeStore`
    /// since. A volume that cannot be read is left out, because it may have been confirmed.
    ///
    /// # Errors
    /// Those of getdents(2).
    pub fn pending(&self) -> Result<Vec<(VolumeId, Annotations)>> {
        self.pending.read(
            || self.list(),
            |id| {
                let (_, content) = self.open_entry(ContentSource::Volume(id))?;
                if is_pending(&content)? { Annotations::read(&content).map(Some) } else { Ok(None) }
            },
        )
    }

    fn make(&self, id: &VolumeId, capacity: Bytes, spec: &VolumeSpec) -> Result<()> {
        match spec.kind {
            VolumeKind::Filesystem => self.create_directory(id, capacity, spec),
            VolumeKind::Block => self.create_image(id, capacity, spec),
        }
    }

    /// Returns the existing volume of that id if it has the requested properties and the same source.
    pub(super) fn existing(
        &self,
        id: &VolumeId,
        kind: VolumeKind,
        capacity: Bytes,
        source: Option<ContentSource<'_>>,
    ) -> Result<Option<Volume>> {
        let Some(volume) = if_found(self.volume(id))? else { return Ok(None) };
        let found_source = volume.source()?;
        let found_source = found_source.as_ref().map(OwnedContentSource::as_ref);
        if volume.kind() == kind && volume.capacity() >= capacity && found_source == source {
            return Ok(Some(volume));
        }
        let of = |source: Option<ContentSource<'_>>| {
            source.map(|source| format!(", a clone of {source}")).unwrap_or_default()
        };
        let detail = format!(
            "a {} volume of {}{} has this id, but a {kind} volume of {capacity}{} is requested",
            volume.kind(),
            volume.capacity(),
            of(found_source),
            of(source),
        );
        Err(Error::new(ErrorKind::AlreadyExists, "create volume", id, detail))
    }

    /// Returns `true` if `is_there` does, and makes that durable: the process that created the volume may have died before.
    pub(super) fn exists_durably(&self, is_there: impl FnOnce() -> Result<bool>) -> Result<bool> {
        let there = is_there()?;
        if there {
            self.layout.make_durable()?;
        }
        Ok(there)
    }

    /// Ignores `error` if it means that a concurrent call for the same id has created the requested volume.
    pub(super) fn unless_created_concurrently(
        &self,
        error: Error,
        is_there: impl FnOnce() -> Result<bool>,
    ) -> Result<()> {
        let other = error.errno() == Some(libc::EEXIST) && self.exists_durably(is_there)?;
        if other { Ok(()) } else { Err(error) }
    }

    fn create_directory(&self, id: &VolumeId, capacity: Bytes, spec: &VolumeSpec) -> Result<()> {
        let entry = ContentSource::Volume(id);
        let limits = reservation_of_directory(capacity, spec.directory);
        let staged = self.stage(entry, "create", limits, spec.directory)?;
        let made = spec.directory.apply(&staged, entry);
        let made = made.and_then(|()| spec.annotations.write(&staged, spec.pending, entry));
        match made {
            Ok(()) => staged.publish(),
            Err(error) => Err(staged.discard(error)),
        }
    }

    fn create_image(&self, id: &VolumeId, capacity: Bytes, spec: &VolumeSpec) -> Result<()> {
        let entry = ContentSource::Volume(id);
        let reservation = reservation_of_image(capacity, spec.image.provisioning);
        let promise = self.mention_trash(self.space_book().reserve(entry, reservation, "create"))?;
        self.create_image_from(entry, promise, |image| {
            let settings = Image::resolve(spec.image, image, id)?;
            settings.record(image, entry)?;
            spec.annotations.write(image, spec.pending, entry)?;
            allocate(image, Bytes(0), capacity, settings.provisioning).context("allocate", entry)
        })
    }

    /// Creates an image of reserved space. It has no name until `fill` has completed it, so the kernel frees it after a crash.
    pub(super) fn create_image_from(
        &self,
        entry: ContentSource<'_>,
        promise: PendingReservation<'_>,
        fill: impl FnOnce(&OwnedFd) -> Result<()>,
    ) -> Result<()> {
        let flags = OFlag::O_TMPFILE | OFlag::O_RDWR | OFlag::O_CLOEXEC;
        let image = match openat(&self.layout.volumes, ".", flags, Mode::S_IRUSR | Mode::S_IWUSR) {
            Ok(image) => image,
            Err(errno) => {
                promise.release();
                return Err(Error::sys("make the image of", entry, errno));
            }
        };
        let made = fill(&image).and_then(|()| self.publish_image(&image, entry));
        // If the image has its name, the volume exists, even if that could not be made durable.
        if made.is_err() && fstat(&image).is_ok_and(|status| status.st_nlink == 0) {
            // Frees the blocks now. After the last close the file system would free them in the background, and a count would
            // take them for overhead.
            ftruncate(&image, 0).ok();
            promise.release();
        }
        made
    }

    /// Gives a complete image its name, durably.
    fn publish_image(&self, image: &OwnedFd, entry: ContentSource<'_>) -> Result<()> {
        let parent = self.layout.parent(entry);
        loop_device::mark_new_file_tracked(image).context("set up", entry)?;
        let size = Bytes(fstat(image).context("fstat", entry)?.st_size as u64);
        write_capacity(image, size)?;
        fsync(image).context("fsync", entry)?;
        linkat(AT_FDCWD, descriptor::link(image).as_str(), parent, entry.id(), AtFlags::AT_SYMLINK_FOLLOW)
            .context("create", entry)?;
        fsync(parent).context("fsync the directory of", entry)
    }
}

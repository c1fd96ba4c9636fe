//! Making a volume: complete or not at all.

use std::os::fd::OwnedFd;

use nix::errno::Errno;
use nix::sys::stat::{Mode, fchmod, mkdirat};
use nix::unistd::{UnlinkatFlags, fsync, unlinkat};

use super::attributes::Attributes;
use super::grow::allocate;
use super::id::VolumeId;
use super::{Image, Provisioning, Volume, VolumeKind, VolumeSpec, VolumeStore, inodes_for, layout, sharing};
use crate::error::{Context, Error, ErrorKind, Result};
use crate::project_quota::{Limits, ProjectId};
use crate::units::Bytes;

impl VolumeStore {
    /// Makes a volume. Repeating the call answers the volume that is there.
    ///
    /// # Errors
    /// [`ErrorKind::AlreadyExists`]: the id names a volume of another kind or a smaller one.
    /// [`ErrorKind::NoSpace`]: more than the file system can promise beside what it has promised
    /// to other volumes; nothing is left. [`ErrorKind::InvalidInput`]: no such size.
    /// [`ErrorKind::Unsupported`]: direct I/O is required in blocks smaller than the file system takes.
    pub fn create(&self, id: &VolumeId, spec: &VolumeSpec) -> Result<Volume> {
        let capacity = spec.rounded(id)?;
        let _lock = self.layout.lock_shared()?;
        if let Some(volume) = self.existing(id, spec.kind, capacity, None)? {
            // Whoever made it may have died before it was durable.
            self.layout.make_durable()?;
            return Ok(volume);
        }
        let promise = self.promise(id, promise_of(capacity, spec), "create volume")?;
        let made = match spec.kind {
            VolumeKind::Filesystem => self.create_directory(id, capacity, spec),
            VolumeKind::Block => self.create_image(id, capacity, spec),
        };
        match made {
            Ok(()) => self.volume(id),
            Err(error) => {
                promise.withdraw();
                self.or_of_other(error, id, spec.kind, capacity, None)
            }
        }
    }

    /// The volume of that id, if it is what was asked: empty at first, or a clone of `source`.
    pub(super) fn existing(
        &self,
        id: &VolumeId,
        kind: VolumeKind,
        capacity: Bytes,
        source: Option<&VolumeId>,
    ) -> Result<Option<Volume>> {
        let volume = match self.volume(id) {
            Ok(volume) => volume,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        let found_source = volume.source()?;
        if volume.kind() == kind && volume.capacity() >= capacity && found_source.as_ref() == source {
            return Ok(Some(volume));
        }
        let of =
            |source: Option<&VolumeId>| source.map(|id| format!(", a clone of {id}")).unwrap_or_default();
        let detail = format!(
            "a {} volume of {}{} has that id; a {kind} volume of {capacity}{} was asked",
            volume.kind(),
            volume.capacity(),
            of(found_source.as_ref()),
            of(source),
        );
        Err(Error::new(ErrorKind::AlreadyExists, "create volume", id, detail))
    }

    /// Where the error was that another call for the same id was faster, its volume is the answer.
    pub(super) fn or_of_other(
        &self,
        error: Error,
        id: &VolumeId,
        kind: VolumeKind,
        capacity: Bytes,
        source: Option<&VolumeId>,
    ) -> Result<Volume> {
        match self.existing(id, kind, capacity, source) {
            Ok(Some(volume)) if error.errno() == Some(libc::EEXIST) => Ok(volume),
            Err(conflict) if error.errno() == Some(libc::EEXIST) => Err(conflict),
            _ => Err(error),
        }
    }

    /// Limits are reserved, then the directory is tagged, then it gets its name: at no moment is
    /// there a volume without a limit. What cannot be undone after an error is undone by recovery.
    fn create_directory(&self, id: &VolumeId, capacity: Bytes, spec: &VolumeSpec) -> Result<()> {
        let limits = Limits::hard(capacity, inodes_for(capacity, spec.bytes_per_inode));
        let staging = &self.layout.staging;
        let staged = layout::unique(id.as_str())?;
        mkdirat(staging, staged.as_str(), Mode::S_IRWXU).context("make the directory of volume", id)?;
        let unstage = || unlinkat(staging, staged.as_str(), UnlinkatFlags::RemoveDir);
        let tagged = layout::open_directory(staging, &staged)
            .and_then(|directory| self.ids.create(&directory, limits).map(|project| (directory, project)));
        let (directory, project) = match tagged {
            Ok(tagged) => tagged,
            Err(error) => {
                unstage().ok();
                return Err(error);
            }
        };
        let made = complete_directory(id, &directory, project, spec).and_then(|()| {
            self.layout
                .rename(staging, &staged, &self.layout.volumes, id.as_str())
                .context("create volume", id)
        });
        // An open directory is charged.
        drop(directory);
        made.inspect_err(|_| {
            if let Ok(()) | Err(Errno::ENOENT) = unstage() {
                self.release_project(project, Bytes(0)).ok();
            }
        })
    }

    /// The image has no name until it is complete, so a crash leaves nothing to take away.
    fn create_image(&self, id: &VolumeId, capacity: Bytes, spec: &VolumeSpec) -> Result<()> {
        let image = self.unnamed_image(id)?;
        let settings = Image::settle(spec.image, &image, id)?;
        settings.record(&image, id)?;
        allocate(&image, Bytes(0), capacity, settings.provisioning).context("allocate volume", id)?;
        self.publish_image(&image, id)
    }
}

/// What a new volume may take: of a thin image also the extent tree it may come to have.
fn promise_of(capacity: Bytes, spec: &VolumeSpec) -> Bytes {
    match (spec.kind, spec.image.provisioning) {
        (VolumeKind::Block, Provisioning::Thin) => capacity.saturating_add(sharing::margin(capacity)),
        (VolumeKind::Block, Provisioning::Thick) | (VolumeKind::Filesystem, _) => capacity,
    }
}

fn complete_directory(
    id: &VolumeId,
    directory: &OwnedFd,
    project: ProjectId,
    spec: &VolumeSpec,
) -> Result<()> {
    Attributes { project, bytes_per_inode: spec.bytes_per_inode }.write(directory)?;
    // As an emptyDir: whichever user the pod runs as can write. The parent directories let
    // nobody else through, and mkdir's mode was subject to the umask.
    fchmod(directory, Mode::S_IRWXU | Mode::S_IRWXG | Mode::S_IRWXO).context("chmod volume", id)?;
    fsync(directory).context("fsync volume", id)
}

//! Copies that share blocks with the original until one of the two is written: volumes made from volumes and
//! snapshots, and snapshots taken of volumes.

use std::os::fd::{AsFd, OwnedFd};
use std::time::SystemTime;

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg, OFlag};
use nix::sys::stat::fstat;

use super::grow::allocate;
use super::id::{SnapshotId, VolumeId};
use super::snapshot::Taken;
use super::{
    ContentSource, Image, Provisioning, Snapshot, Volume, VolumeKind, VolumeSpec, VolumeStore, sharing,
    source,
};
use crate::error::{Context, Error, ErrorKind, Result};
use crate::loop_device::{Access, reopen};
use crate::sys::reflink;
use crate::units::Bytes;

impl VolumeStore {
    /// Makes a volume with the content of another one, or of a snapshot. The blocks are shared until one of the two
    /// is written. The whole capacity is promised to the new volume all the same, so that no write to either ever
    /// lacks space. Repeating the call answers the volume that is there.
    ///
    /// For a Block volume it takes a time that does not grow with its bytes (a little with the number of pieces
    /// it lies in), and 1/128 of the size and 1 MiB more are promised for what pieces cost, to the new volume and
    /// once to the source.
    ///
    /// # What the volume holds
    /// The source may be attached and in use. An image is copied as it is at one moment, between two writes: what a
    /// loss of power at that moment would leave (crash-consistent). Writes of a loop device with direct I/O are
    /// waited for, and what the page cache holds of the image (a device without direct I/O) is written first.
    /// What lies above the device is not: call fsync(2) on the node if programs write to it, syncfs(2) on the
    /// file system if one is mounted from it, or freeze that with `FIFREEZE` for a copy that needs no replay of
    /// its journal. The copy of a file system has its UUID: XFS mounts it beside the original with `nouuid`.
    ///
    /// # Attaching it
    /// From Linux 6.15 on a file that shares blocks takes direct I/O in whole blocks of the file system only,
    /// the source no less than the clone, until nothing of it is shared. A device attached before keeps what it
    /// has; one attached later has the sectors that the content was made for and, if those are of 512 bytes, no
    /// direct I/O ([`ImageDirectIo`](super::ImageDirectIo)). The volume takes the logical block size of its source over.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`]: no such source. [`ErrorKind::InvalidInput`]: the source is of another kind than
    /// `spec` says, or no such size. [`ErrorKind::WouldShrink`]: the capacity is less than the source has, or had
    /// when the snapshot was taken. [`ErrorKind::AlreadyExists`]: the id names another volume than one made from
    /// `source` that is large enough. [`ErrorKind::NoSpace`]: more than the file system can promise.
    /// [`ErrorKind::Unsupported`]: the file system cannot share blocks (EOPNOTSUPP), or one of the two requires direct
    /// I/O in blocks of 512 bytes. After an error nothing is left.
    #[doc(alias = "FICLONE")]
    #[doc(alias = "reflink")]
    pub fn clone_from(&self, source: ContentSource<'_>, id: &VolumeId, spec: &VolumeSpec) -> Result<Volume> {
        let capacity = spec.rounded(id)?;
        self.copy(source, Target::Volume { id, spec, capacity })?;
        self.volume(id)
    }

    /// Takes a snapshot of a volume: what [`clone_from`](Self::clone_from) would copy now, under a name of its own, to
    /// make volumes of later. It is never written to, takes space of its own only for what is written to the
    /// volume afterwards, and is promised what it can come to take then: the size of an image. It outlives the
    /// volume. Repeating the call answers the snapshot that is there.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`]: no such volume. [`ErrorKind::AlreadyExists`]: the id names a snapshot of another
    /// volume. [`ErrorKind::NoSpace`] and [`ErrorKind::Unsupported`]: as [`clone_from`](Self::clone_from).
    pub fn create_snapshot(&self, source: &VolumeId, id: &SnapshotId) -> Result<Snapshot> {
        self.copy(ContentSource::Volume(source), Target::Snapshot { id })?;
        self.snapshot(id)
    }

    fn copy(&self, source: ContentSource<'_>, target: Target<'_>) -> Result<()> {
        let _lock = self.layout.lock_shared()?;
        // Asked before the source is: that may be gone by the time the call is repeated.
        if self.is_durably_there(|| self.has_copy(source, target))? {
            return Ok(());
        }
        let original = self.original(source)?;
        target.require_kind(source, original.kind())?;
        match original.kind() {
            VolumeKind::Block => self.copy_image(source, &original, target),
            VolumeKind::Filesystem => {
                let detail = format!("{source} is a Filesystem volume, and only images can be copied so far");
                Err(Error::new(ErrorKind::Unsupported, target.operation(), target.entry(), detail))
            }
        }
    }

    /// Whether the target is there, as it is asked.
    fn has_copy(&self, source: ContentSource<'_>, target: Target<'_>) -> Result<bool> {
        match target {
            Target::Volume { id, spec, capacity } => {
                self.existing(id, spec.kind, capacity, Some(source)).map(|volume| volume.is_some())
            }
            Target::Snapshot { id } => self.existing_snapshot(id, source).map(|snapshot| snapshot.is_some()),
        }
    }

    fn original(&self, source: ContentSource<'_>) -> Result<Volume> {
        match source {
            ContentSource::Volume(id) => self.volume(id),
            ContentSource::Snapshot(id) => self.snapshot(id).map(|snapshot| snapshot.content),
        }
    }

    fn copy_image(&self, source: ContentSource<'_>, original: &Volume, target: Target<'_>) -> Result<()> {
        let original = original.open_image(Access::ReadOnly)?;
        // One copy of a source at a time, and it must not grow between the question how large it is and the copy.
        // A lock of its own file description, as in growing.
        let own = reopen(original.as_fd(), OFlag::O_RDONLY).context("open the image of", source)?;
        let _lock_source = Flock::lock(own, FlockArg::LockExclusive)
            .map_err(|(_, errno)| Error::sys("lock", source, errno))?;
        if self.is_durably_there(|| self.has_copy(source, target))? {
            return Ok(());
        }
        let size = Bytes(fstat(&original).context("fstat", source)?.st_size as u64);
        target.require_room_for(source, size)?;
        let of_source = Image::read(&original)?;
        let settings = target.settings(of_source, source)?;
        let promised = target.promise_of(&original, of_source, size)?;
        let promise = self.promise(target.entry(), promised, target.operation())?;
        self.link_copy(&original, source, size, target, settings).or_else(|error| {
            promise.withdraw();
            // What the source shares now depends on how far it went.
            self.count_anew();
            self.unless_made_by_other(error, || self.has_copy(source, target))
        })
    }

    /// As an empty image, it has no name until it is complete.
    fn link_copy(
        &self,
        original: &OwnedFd,
        source: ContentSource<'_>,
        size: Bytes,
        target: Target<'_>,
        settings: Image,
    ) -> Result<()> {
        let entry = target.entry();
        let image = self.unnamed_image(entry)?;
        settings.record(&image, entry)?;
        sharing::mark(original).context("mark", source)?;
        sharing::mark(&image).context("set up", entry)?;
        source::record(&image, source).context("set up", entry)?;
        share(original, &image, target)?;
        match target {
            // All of a thick one: where the source was never written, FICLONE leaves a hole. What is shared stays shared.
            Target::Volume { capacity, .. } => {
                allocate(&image, Bytes(0), capacity, settings.provisioning).context("allocate", entry)?;
            }
            Target::Snapshot { .. } => {
                Taken { created: SystemTime::now(), capacity: size }.record(&image, entry)?;
            }
        }
        self.publish_image(&image, entry)
    }
}

/// What is made of a source.
#[derive(Clone, Copy)]
enum Target<'a> {
    Volume { id: &'a VolumeId, spec: &'a VolumeSpec, capacity: Bytes },
    Snapshot { id: &'a SnapshotId },
}

impl<'a> Target<'a> {
    fn entry(self) -> ContentSource<'a> {
        match self {
            Self::Volume { id, .. } => ContentSource::Volume(id),
            Self::Snapshot { id } => ContentSource::Snapshot(id),
        }
    }

    fn operation(self) -> &'static str {
        match self {
            Self::Volume { .. } => "clone",
            Self::Snapshot { .. } => "create",
        }
    }

    fn require_kind(self, source: ContentSource<'_>, found: VolumeKind) -> Result<()> {
        match self {
            Self::Volume { spec, .. } if spec.kind != found => {
                let detail =
                    format!("{source} has the content of a {found} volume, not of a {} one", spec.kind);
                Err(Error::new(ErrorKind::InvalidInput, self.operation(), self.entry(), detail))
            }
            _ => Ok(()),
        }
    }

    fn require_room_for(self, source: ContentSource<'_>, size: Bytes) -> Result<()> {
        match self {
            Self::Volume { capacity, .. } if capacity < size => {
                let detail = format!("{capacity} asked, and {source} has {size}");
                Err(Error::new(ErrorKind::WouldShrink, self.operation(), self.entry(), detail))
            }
            _ => Ok(()),
        }
    }

    /// What the image will be. A snapshot is as its source.
    fn settings(self, of_source: Image, source: ContentSource<'_>) -> Result<Image> {
        match self {
            Self::Volume { id, spec, .. } => of_source.settle_clone(source, spec.image, id),
            Self::Snapshot { .. } => of_source.check_sharing(source).map(|()| of_source),
        }
    }

    /// What the copy of an image, and its source, may come to take beyond what the source was promised.
    fn promise_of(self, original: &OwnedFd, of_source: Image, size: Bytes) -> Result<Bytes> {
        let copy = match self {
            Self::Volume { capacity, .. } => capacity.saturating_add(sharing::margin(capacity)),
            Self::Snapshot { .. } => size,
        };
        let has_margin = of_source.provisioning == Provisioning::Thin || sharing::may_share(original)?;
        Ok(if has_margin { copy } else { copy.saturating_add(sharing::margin(size)) })
    }
}

fn share(original: &OwnedFd, image: &OwnedFd, target: Target<'_>) -> Result<()> {
    reflink::clone(original, image).map_err(|errno| {
        let error = Error::sys(target.operation(), target.entry(), errno);
        match errno {
            Errno::EOPNOTSUPP => error.explain(
                "the file system cannot share blocks between files; clones need XFS made with \
                 mkfs.xfs -m reflink=1 (the default since xfsprogs 5.1)",
            ),
            _ => error,
        }
    })
}

#[cfg(test)]
mod tests {
    use nix::sys::memfd::{MFdFlags, memfd_create};

    use super::*;

    #[test]
    fn a_file_system_that_cannot_share_blocks_is_named_with_what_to_do() {
        let memory = || memfd_create(c"image", MFdFlags::MFD_CLOEXEC).unwrap();
        let id = SnapshotId::parse("copy").unwrap();
        let error = share(&memory(), &memory(), Target::Snapshot { id: &id }).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
        assert!(error.to_string().contains("reflink=1"), "{error}");
    }
}

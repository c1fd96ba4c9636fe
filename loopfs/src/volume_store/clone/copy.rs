//! What copies of images and of directories have in common.

use super::target::{Original, Target};
use crate::error::Result;
use crate::volume_store::id::{SnapshotId, VolumeId};
use crate::volume_store::snapshot::Snapshot;
use crate::volume_store::source::ContentSource;
use crate::volume_store::spec::{VolumeKind, VolumeSpec};
use crate::volume_store::store::VolumeStore;
use crate::volume_store::volume::Volume;

impl VolumeStore {
    /// Makes a volume with the content of another one, or of a snapshot. The blocks are shared until one of the two
    /// is written. The whole capacity is promised to the new volume all the same, so that no write to either ever
    /// lacks space. Repeating the call answers the volume that is there.
    ///
    /// For a Block volume it takes a time that does not grow with its bytes (a little with the number of pieces
    /// it lies in), and 1/128 of the size and 1 MiB more are promised for what pieces cost, to the new volume and
    /// once to the source.
    ///
    /// For a Filesystem volume it takes as long as there are files ([`clone_tree`](crate::project_tree::clone_tree)); other volumes are
    /// made, deleted and recovered meanwhile. What the files have counts in full against the limit of the new
    /// volume, and while it lasts a sixteenth of that and 4 MiB are promised beside the capacity, for metadata that
    /// lies differently in the copy. A volume that is full can be copied to one of its size, which is full then: also what
    /// would overwrite a shared block finds no room in it until something is removed.
    ///
    /// # What the volume holds
    /// The source may be attached and in use. An image is copied as it is at one moment, between two writes: what a
    /// loss of power at that moment would leave (crash-consistent). Writes of a loop device with direct I/O are
    /// waited for, and what the page cache holds of the image (a device without direct I/O) is written first.
    /// What lies above the device is not: call fsync(2) on the node if programs write to it, syncfs(2) on the
    /// file system if one is mounted from it, or freeze that with `FIFREEZE` for a copy that needs no replay of
    /// its journal. The copy of a file system has its UUID: XFS mounts it beside the original with `nouuid`.
    ///
    /// Of a directory that is in use each file is as it was at one moment, and each at another.
    ///
    /// # Attaching it
    /// From Linux 6.15 on a file that shares blocks takes direct I/O in whole blocks of the file system only,
    /// the source no less than the clone, until nothing of it is shared. A device attached before keeps what it
    /// has; one attached later has the sectors that the content was made for and, if those are of 512 bytes, no
    /// direct I/O ([`ImageDirectIo`](crate::volume_store::ImageDirectIo)). The volume takes the logical block size of its source over.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`](crate::ErrorKind::NotFound): no such source. [`ErrorKind::InvalidInput`](crate::ErrorKind::InvalidInput): the source is of another kind than
    /// `spec` says, or no such size. [`ErrorKind::WouldShrink`](crate::ErrorKind::WouldShrink): the capacity is less than the source has, or had
    /// when the snapshot was taken. [`ErrorKind::AlreadyExists`](crate::ErrorKind::AlreadyExists): the id names another volume than one made from
    /// `source` that is large enough. [`ErrorKind::NoSpace`](crate::ErrorKind::NoSpace): more than the file system can promise.
    /// [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported): the file system cannot share blocks (EOPNOTSUPP), or one of the two requires direct
    /// I/O in blocks of 512 bytes. [`ErrorKind::Busy`](crate::ErrorKind::Busy): directories were moved about while they were copied. After an
    /// error nothing is left but what was copied of a directory, in the trash.
    #[doc(alias = "FICLONE")]
    #[doc(alias = "reflink")]
    pub fn clone_from(&self, source: ContentSource<'_>, id: &VolumeId, spec: &VolumeSpec) -> Result<Volume> {
        let capacity = spec.rounded(id)?;
        self.copy(source, Target::Volume { id, spec, capacity })?;
        self.volume(id)
    }

    /// Takes a snapshot of a volume: what [`clone_from`](Self::clone_from) would copy now, under a name of its own, to
    /// make volumes of later. It is never written to, takes space of its own only for what is written to the
    /// volume afterwards, and is promised what it can come to take then: the size of an image, or what a directory
    /// uses. It outlives the volume. Repeating the call answers the snapshot that is there.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`](crate::ErrorKind::NotFound): no such volume. [`ErrorKind::AlreadyExists`](crate::ErrorKind::AlreadyExists): the id names a snapshot of another
    /// volume. [`ErrorKind::NoSpace`](crate::ErrorKind::NoSpace) and [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported): as [`clone_from`](Self::clone_from).
    pub fn create_snapshot(&self, source: &VolumeId, id: &SnapshotId) -> Result<Snapshot> {
        self.copy(ContentSource::Volume(source), Target::Snapshot { id })?;
        self.snapshot(id)
    }

    fn copy(&self, source: ContentSource<'_>, target: Target<'_>) -> Result<()> {
        let lock = self.layout.lock_shared()?;
        // Asked before the source is: that may be gone by the time the call is repeated.
        if self.exists_durably(|| self.has_copy(source, target))? {
            return Ok(());
        }
        let original = self.original(source)?;
        original.content.require_whole()?;
        target.require_kind(source, original.content.kind())?;
        let copied = match original.content.kind() {
            VolumeKind::Block => self.copy_image(&original, target),
            VolumeKind::Filesystem => self.copy_directory(lock, &original, target),
        };
        copied.or_else(|error| self.unless_created_concurrently(error, || self.has_copy(source, target)))
    }

    /// Whether the target is there, as it is asked.
    pub(super) fn has_copy(&self, source: ContentSource<'_>, target: Target<'_>) -> Result<bool> {
        match target {
            Target::Volume { id, spec, capacity } => {
                self.existing(id, spec.kind, capacity, Some(source)).map(|volume| volume.is_some())
            }
            Target::Snapshot { id } => self.existing_snapshot(id, source).map(|snapshot| snapshot.is_some()),
        }
    }

    fn original<'a>(&self, entry: ContentSource<'a>) -> Result<Original<'a>> {
        match entry {
            ContentSource::Volume(id) => {
                let content = self.volume(id)?;
                Ok(Original { entry, capacity: content.capacity(), content })
            }
            ContentSource::Snapshot(id) => {
                let snapshot = self.snapshot(id)?;
                Ok(Original { entry, capacity: snapshot.capacity(), content: snapshot.content })
            }
        }
    }
}

//! Clones and snapshots: copies that share blocks with the original until one of the two is written. Volumes are cloned from
//! volumes and snapshots, and snapshots are taken of volumes.

mod directory;
mod image;
mod target;

use self::target::{CopyTarget, Original};
use crate::error::Result;
use crate::volume_store::id::{SnapshotId, VolumeId};
use crate::volume_store::snapshot::Snapshot;
use crate::volume_store::source::ContentSource;
use crate::volume_store::spec::{VolumeKind, VolumeSpec, rounded};
use crate::volume_store::store::VolumeStore;
use crate::volume_store::volume::Volume;

impl VolumeStore {
    /// Creates a volume with the content of another volume, or of a snapshot. The two share blocks until one of them is written.
    /// The store nevertheless reserves the whole capacity of the new volume, so no write to either of them fails for lack of
    /// space. If the call is repeated, it returns the existing volume.
    ///
    /// For a Block volume the time does not depend on its size, and only slightly on the number of its extents. The store reserves
    /// 1/128 of the size and 1 MiB more for the extent tree of the new volume, and once the same for the source.
    ///
    /// For a Filesystem volume the time is proportional to the number of files
    /// ([`clone_tree`](crate::project_tree::clone_tree)). Other volumes can be created, deleted and recovered in the meantime. The
    /// files count in full against the limit of the new volume. During the copy the store reserves a sixteenth of their size and
    /// 4 MiB beside the capacity, for metadata with another layout in the copy, and at least the inodes of the source, a sixteenth
    /// more and 1024, because the source may get files in the meantime. A full volume can be cloned to one of its
    /// size, which is full then: even overwriting a shared block fails in it until a file is removed.
    ///
    /// # Consistency
    /// The source may be attached and in use. The copy of an image is crash-consistent: it has the content that a loss of power at
    /// one moment, between two writes, would leave. The call waits for writes of a loop device with direct I/O, and first writes
    /// the page cache of the image (a device without direct I/O). It does not write caches above the device: call fsync(2) on the
    /// node if programs write to it, or syncfs(2) if a file system is mounted from it. Freeze that file system with `FIFREEZE` for a
    /// copy that needs no journal replay. The copy of a file system has the same UUID: XFS mounts it beside the original with
    /// `nouuid`.
    ///
    /// In the copy of a directory in use, each file has its content at one moment, and different files at different moments.
    ///
    /// # Attaching the clone
    /// From Linux 6.15 on, a file that shares blocks takes direct I/O only in whole blocks of the file system. This holds for the
    /// source and the clone until they share no blocks. A device that was attached before keeps its properties. One that is
    /// attached later has the block size that the content depends on and, if that is 512 bytes, no
    /// direct I/O ([`DirectIo`](crate::loop_device::DirectIo)). The clone has the logical block size of its source.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`](crate::ErrorKind::NotFound): there is no such source. [`ErrorKind::InvalidInput`](crate::ErrorKind::InvalidInput): the source is of another kind than
    /// `spec` requests, or no volume can have that size. [`ErrorKind::WouldShrink`](crate::ErrorKind::WouldShrink): the capacity is less than that of the source, or
    /// than that of the source of the snapshot when it was taken. [`ErrorKind::AlreadyExists`](crate::ErrorKind::AlreadyExists): the id names a volume that is smaller, or is
    /// no clone of `source`. [`ErrorKind::NoSpace`](crate::ErrorKind::NoSpace): the file system has less available space.
    /// [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported): the file system cannot share blocks (EOPNOTSUPP), or one of the two requires direct
    /// I/O in blocks of 512 bytes. [`ErrorKind::Busy`](crate::ErrorKind::Busy): directories were moved during the copy. After an
    /// error nothing is left except copied files of a directory, in the trash.
    #[doc(alias = "FICLONE")]
    #[doc(alias = "reflink")]
    pub fn clone_from(&self, source: ContentSource<'_>, id: &VolumeId, spec: &VolumeSpec) -> Result<Volume> {
        self.clone_from_while(source, id, spec, || true)
    }

    /// As [`clone_from`](Self::clone_from), but ends the copy of a directory once `is_wanted` returns `false`. The call asks after
    /// every 1024 names, and holds no lock then. The copy of an image is one system call, which does not end early.
    ///
    /// # Errors
    /// As [`clone_from`](Self::clone_from), and [`ErrorKind::Other`](crate::ErrorKind::Other): `is_wanted` has returned `false`.
    pub fn clone_from_while(
        &self,
        source: ContentSource<'_>,
        id: &VolumeId,
        spec: &VolumeSpec,
        mut is_wanted: impl FnMut() -> bool,
    ) -> Result<Volume> {
        let capacity = rounded(spec.capacity, id)?;
        let target = CopyTarget::Volume { id, spec, capacity };
        self.create_by(id, spec, || self.copy(source, target, &mut is_wanted))
    }

    /// Takes a snapshot of a volume: a copy as by [`clone_from`](Self::clone_from), to clone volumes from later. It is never written
    /// to, and uses space of its own only for blocks that are written to the volume afterwards. The store reserves the most that
    /// it can use then: the size of an image, or the usage of a directory. The snapshot remains after the volume is deleted. If
    /// the call is repeated, it returns the existing snapshot.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`](crate::ErrorKind::NotFound): no such volume. [`ErrorKind::AlreadyExists`](crate::ErrorKind::AlreadyExists): the id names a snapshot of another
    /// volume. [`ErrorKind::NoSpace`](crate::ErrorKind::NoSpace) and [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported): as [`clone_from`](Self::clone_from).
    pub fn create_snapshot(&self, source: &VolumeId, id: &SnapshotId) -> Result<Snapshot> {
        self.create_snapshot_while(source, id, || true)
    }

    /// As [`create_snapshot`](Self::create_snapshot), but ends the copy of a directory once `is_wanted` returns `false`, as
    /// [`clone_from_while`](Self::clone_from_while) does.
    ///
    /// # Errors
    /// As [`create_snapshot`](Self::create_snapshot), and [`ErrorKind::Other`](crate::ErrorKind::Other): `is_wanted` has returned `false`.
    pub fn create_snapshot_while(
        &self,
        source: &VolumeId,
        id: &SnapshotId,
        mut is_wanted: impl FnMut() -> bool,
    ) -> Result<Snapshot> {
        self.copy(ContentSource::Volume(source), CopyTarget::Snapshot { id }, &mut is_wanted)?;
        self.snapshot(id)
    }

    fn copy(
        &self,
        source: ContentSource<'_>,
        target: CopyTarget<'_>,
        is_wanted: &mut dyn FnMut() -> bool,
    ) -> Result<()> {
        let lock = self.layout.lock_shared()?;
        // Before the source is opened: it may have been deleted when the call is repeated.
        if self.exists_durably(|| self.has_copy(source, target))? {
            return Ok(());
        }
        let original = self.original(source)?;
        original.content.require_whole()?;
        target.require_kind(source, original.content.kind())?;
        let copied = match original.content.kind() {
            VolumeKind::Block => self.copy_image(&original, target),
            VolumeKind::Filesystem => self.copy_directory(lock, &original, target, is_wanted),
        };
        copied.or_else(|error| self.unless_created_concurrently(error, || self.has_copy(source, target)))
    }

    /// Returns `true` if the target exists with the requested properties.
    fn has_copy(&self, source: ContentSource<'_>, target: CopyTarget<'_>) -> Result<bool> {
        match target {
            CopyTarget::Volume { id, spec, capacity } => {
                self.existing(id, spec.kind, capacity, Some(source)).map(|volume| volume.is_some())
            }
            CopyTarget::Snapshot { id } => {
                self.existing_snapshot(id, source).map(|snapshot| snapshot.is_some())
            }
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

//! An open volume.

use std::os::fd::{AsFd, OwnedFd};

use nix::errno::Errno;
use nix::fcntl::{OFlag, openat};
use nix::sys::stat::{Mode, fstat};
use nix::sys::statvfs::fstatvfs;
use nix::unistd::{Whence, lseek};

use super::condition::{AbnormalReason, Condition};
use super::id::VolumeId;
use super::on_disk::{
    Annotations, DirectoryAttributes, ForeignRecord, Image, is_pending, layout, made_from, may_share,
    read_capacity,
};
use super::source::OwnedContentSource;
use super::space::Reservation;
use super::spec::{Provisioning, VolumeKind, VolumeSpec};
use crate::error::{Context, Error, ErrorKind, Explanation, Result};
use crate::loop_device::{Access, AttachOptions, BlockSize, Discard};
use crate::project_quota::{ProjectQuota, Usage, project_and_inheritance_of};
use crate::units::{Bytes, Inodes};

/// An open volume. It stays usable after it is renamed or deleted.
#[derive(Debug)]
pub struct Volume {
    id: VolumeId,
    kind: VolumeKind,
    pub(super) entry: OwnedFd,
    capacity: Bytes,
}

/// Inodes of a Filesystem volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct InodeStats {
    /// The limit.
    pub total: Inodes,
    /// Used inodes, including the directory of the volume.
    pub used: Inodes,
    /// Inodes that can still be created.
    pub free: Inodes,
}

/// The usage and capacity of a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct VolumeStats {
    /// The capacity.
    pub capacity: Bytes,
    /// Used bytes: charged to the quota, or allocated to the image.
    pub used: Bytes,
    /// Bytes that can still be written.
    pub available: Bytes,
    /// Inodes; `None` for a Block volume.
    pub inodes: Option<InodeStats>,
    /// Whether the volume is healthy.
    pub condition: Condition,
}

impl InodeStats {
    /// Returns the counts of a limit, of which this many inodes are used.
    #[must_use]
    pub fn new(total: Inodes, used: Inodes) -> Self {
        Self { total, used, free: Inodes(total.0.saturating_sub(used.0)) }
    }
}

impl VolumeStats {
    /// Returns the usage of a volume of which everything that is not used is available, and which has no limit of inodes.
    #[must_use]
    pub fn new(capacity: Bytes, used: Bytes, condition: Condition) -> Self {
        Self { capacity, used, available: capacity.saturating_sub(used), inodes: None, condition }
    }
}

impl Volume {
    pub(super) fn new(id: VolumeId, kind: VolumeKind, entry: OwnedFd) -> Result<Self> {
        let mut volume = Self { id, kind, entry, capacity: Bytes(0) };
        volume.capacity = match kind {
            VolumeKind::Filesystem => volume.limits()?.bytes,
            VolumeKind::Block => match volume.recorded_and_size() {
                Ok((recorded, size)) => recorded.max(size),
                // It is opened to be detached and deleted.
                Err(error) if error.kind() == ErrorKind::Damaged => volume.image_size()?,
                Err(error) => return Err(error),
            },
        };
        Ok(volume)
    }

    /// Returns the id.
    #[must_use]
    pub fn id(&self) -> &VolumeId {
        &self.id
    }

    /// Returns the kind: directory or image.
    #[must_use]
    pub fn kind(&self) -> VolumeKind {
        self.kind
    }

    /// Returns the capacity when the volume was opened: the limit of the quota, or the recorded size of the image. A truncated
    /// image is shorter than that; [`stats`](Self::stats) reports it.
    #[must_use]
    pub fn capacity(&self) -> Bytes {
        self.capacity
    }

    /// Returns the settings of the image, which are fixed at creation. Returns `None` for a Filesystem volume.
    ///
    /// # Errors
    /// Those of fgetxattr(2); [`ErrorKind::Other`]: a later version recorded them.
    pub fn image(&self) -> Result<Option<Image>> {
        match self.kind {
            VolumeKind::Filesystem => Ok(None),
            VolumeKind::Block => Image::read(&self.entry).map(Some),
        }
    }

    /// Returns `true` if the volume may share blocks with other volumes or snapshots: if it is a Block volume that took part in a
    /// clone or a snapshot, even if the others have been deleted.
    ///
    /// # Errors
    /// Those of fgetxattr(2).
    pub fn may_share_blocks(&self) -> Result<bool> {
        match self.kind {
            VolumeKind::Filesystem => Ok(false),
            VolumeKind::Block => may_share(&self.entry),
        }
    }

    /// Returns a description of how the settings differ from those of `spec`, or `None` if they are equal. Does not compare kind,
    /// size, and settings that have no effect on this kind.
    ///
    /// # Errors
    /// As [`image`](Self::image).
    pub fn settings_differ(&self, spec: &VolumeSpec) -> Result<Option<String>> {
        match self.kind {
            VolumeKind::Filesystem => Ok(self.attributes()?.spec.differs(spec.directory)),
            VolumeKind::Block => Ok(Image::read(&self.entry)?.differs(spec.image)),
        }
    }

    /// Opens the directory of a Filesystem volume with `O_PATH`, for [`bind_mount`](crate::mount::bind_mount) and openat(2). To list
    /// or sync it, open `.` in it.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`]: it is a Block volume.
    pub fn open_dir(&self) -> Result<OwnedFd> {
        self.require(VolumeKind::Filesystem)?;
        layout::open_beneath(self.entry.as_fd(), ".", OFlag::O_PATH | OFlag::O_DIRECTORY)
            .context("open the directory of volume", &self.id)
    }

    /// Returns the options with which the image of a Block volume is attached: its block size and direct I/O, discards only if it is
    /// thin, and its id as the label. With other options a thick image loses its blocks by discards, and the content depends on the
    /// block size.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`]: it is a Filesystem volume. Those of [`image`](Self::image).
    pub fn attach_options(&self, access: Access) -> Result<AttachOptions> {
        self.require(VolumeKind::Block)?;
        let Image { direct_io, logical_block_size, provisioning } = Image::read(&self.entry)?;
        let discard = match provisioning {
            Provisioning::Thick => Discard::Disabled,
            Provisioning::Thin => Discard::Enabled,
        };
        Ok(AttachOptions::new(access)
            .block_size(BlockSize::Exact(logical_block_size.bytes()))
            .direct_io(direct_io)
            .discard(discard)
            .label(self.id.as_str()))
    }

    /// Opens the image of a Block volume, for [`LoopControl`](crate::loop_device::LoopControl).
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`]: it is a Filesystem volume. EROFS: read-write on a read-only
    /// file system.
    pub fn open_image(&self, access: Access) -> Result<OwnedFd> {
        self.require(VolumeKind::Block)?;
        let flags = match access {
            Access::ReadWrite => OFlag::O_RDWR,
            Access::ReadOnly => OFlag::O_RDONLY,
        };
        crate::descriptor::reopen(self.entry.as_fd(), flags).context("open the image of volume", &self.id)
    }

    /// Returns the volume or snapshot that this volume was cloned from, even if that was deleted. Returns `None` if the volume was
    /// created empty.
    ///
    /// # Errors
    /// Those of fgetxattr(2).
    pub fn source(&self) -> Result<Option<OwnedContentSource>> {
        made_from::read(&self.entry)
    }

    /// Returns what the creator of the volume noted about it.
    ///
    /// # Errors
    /// Those of fgetxattr(2); [`ErrorKind::Other`]: the annotations were changed by another program.
    pub fn annotations(&self) -> Result<Annotations> {
        Annotations::read(&self.entry)
    }

    /// Returns `true` if the volume was created as [pending](VolumeSpec::pending), and was not confirmed yet.
    ///
    /// # Errors
    /// Those of fgetxattr(2).
    pub fn is_pending(&self) -> Result<bool> {
        is_pending(&self.entry)
    }

    /// Returns `true` if the volume holds data: a directory that has an entry, or an image with a block that was written, or copied
    /// from a source, and not discarded since. Preallocated blocks are no data. Writes that a loop device without direct I/O still
    /// has in the page cache of the image count, those in the page cache of the device do not.
    ///
    /// # Errors
    /// Those of getdents(2) and lseek(2).
    #[doc(alias = "SEEK_DATA")]
    pub fn holds_data(&self) -> Result<bool> {
        match self.kind {
            VolumeKind::Filesystem => layout::has_entries(&self.entry, "the directory of the volume"),
            VolumeKind::Block => match lseek(self.open_image(Access::ReadOnly)?, 0, Whence::SeekData) {
                Ok(_offset) => Ok(true),
                Err(Errno::ENXIO) => Ok(false),
                Err(errno) => Err(Error::sys("look for data in the image of volume", &self.id, errno)),
            },
        }
    }

    /// Returns the usage and capacity, in constant time.
    ///
    /// # Errors
    /// Those of statfs(2) and quotactl_fd(2).
    pub fn stats(&self) -> Result<VolumeStats> {
        let read = || match self.kind {
            VolumeKind::Filesystem => self.directory_stats(),
            VolumeKind::Block => self.image_stats(),
        };
        let stats = read()?;
        match stats.condition {
            // What is written between reading the usage and the free space looks like space that others take.
            Condition::Abnormal { reason: AbnormalReason::SpaceTaken, .. } => read(),
            _ => Ok(stats),
        }
    }

    fn directory_stats(&self) -> Result<VolumeStats> {
        let attributes = self.attributes()?;
        let usage = self.usage(attributes)?;
        let limits = Reservation::of_project(&usage).ok_or_else(|| self.unlimited())?;
        let mut stats = VolumeStats::new(limits.bytes, usage.bytes, self.directory_condition(attributes)?);
        stats.inodes = Some(InodeStats::new(limits.inodes, usage.inodes));
        self.limit_to_free(&mut stats)?;
        Ok(stats)
    }

    /// Limits what is available to what the file system has free. It is less than what is reserved only if files of other programs take
    /// that space.
    fn limit_to_free(&self, stats: &mut VolumeStats) -> Result<()> {
        let unused = stats.available;
        stats.available = if unused == Bytes(0) { unused } else { unused.min(self.free()?) };
        if stats.available < unused && stats.condition == Condition::Healthy {
            stats.condition = Condition::abnormal(
                AbnormalReason::SpaceTaken,
                format!(
                    "{unused} of the volume are unused, and its file system has only {} free: writes fail then, and what programs have \
                     written to a device without fsync(2) is lost; remove the files of other programs from the file system",
                    stats.available
                ),
            );
        }
        Ok(())
    }

    /// Returns the free space of the file system.
    fn free(&self) -> Result<Bytes> {
        // In a directory with a project, statfs(2) returns the free space of the project, which the owner can change. The directory above is
        // that of the store.
        let filesystem = match self.kind {
            VolumeKind::Filesystem => {
                openat(&self.entry, "..", OFlag::O_PATH | OFlag::O_CLOEXEC, Mode::empty()).and_then(fstatvfs)
            }
            VolumeKind::Block => fstatvfs(&self.entry),
        };
        let filesystem = filesystem.context("statfs the file system of volume", &self.id)?;
        Ok(Bytes(filesystem.blocks_available() * filesystem.fragment_size()))
    }

    /// Returns the condition of a directory. Its owner can cause each abnormal condition.
    fn directory_condition(&self, attributes: DirectoryAttributes) -> Result<Condition> {
        let made_with = attributes.project;
        let (carried, inherited) = project_and_inheritance_of(&self.entry)?;
        Ok(if carried != made_with.get() {
            Condition::abnormal(
                AbnormalReason::ProjectChanged,
                format!(
                    "the directory's project id was changed from {made_with} to {carried}: its size is no longer \
                     limited; `loopfs quota tag` puts the tree back into project {made_with}"
                ),
            )
        } else if !inherited {
            Condition::abnormal(
                AbnormalReason::ProjectNotInherited,
                format!(
                    "new entries do not inherit the directory's project id (FS_XFLAG_PROJINHERIT was cleared): their size \
                     is not limited; `loopfs quota tag` puts the tree back into project {made_with}"
                ),
            )
        } else {
            ForeignRecord::read(&self.entry)?.map_or(Condition::Healthy, |record| record.condition())
        })
    }

    fn image_stats(&self) -> Result<VolumeStats> {
        let (recorded, size) = self.recorded_and_size()?;
        let capacity = recorded.max(size);
        let status = fstat(&self.entry).context("fstat volume", &self.id)?;
        // Post-EOF blocks and blocks of the extent tree are allocated too.
        let used = Bytes::from_basic_blocks(status.st_blocks as u64).min(capacity);
        let condition = match truncation(recorded, size) {
            None => Condition::Healthy,
            Some(loss) => Condition::abnormal(AbnormalReason::ImageTruncated, loss.to_string()),
        };
        let mut stats = VolumeStats::new(capacity, used, condition);
        self.limit_to_free(&mut stats)?;
        Ok(stats)
    }

    /// Reads the recorded capacity before the size: see [`read_capacity`].
    fn recorded_and_size(&self) -> Result<(Bytes, Bytes)> {
        let recorded = read_capacity(&self.entry)?;
        Ok((recorded, self.image_size()?))
    }

    fn image_size(&self) -> Result<Bytes> {
        Ok(Bytes(fstat(&self.entry).context("fstat volume", &self.id)?.st_size as u64))
    }

    /// Checks that an image is not truncated. Expanding a truncated image, or writing to it as a device, would hide the loss.
    ///
    /// # Errors
    /// [`ErrorKind::Damaged`]: the image is truncated. Those of fgetxattr(2) and fstat(2).
    pub fn require_whole(&self) -> Result<()> {
        if self.kind == VolumeKind::Filesystem {
            return Ok(());
        }
        let (recorded, size) = self.recorded_and_size()?;
        match truncation(recorded, size) {
            None => Ok(()),
            Some(loss) => Err(Error::new(ErrorKind::Damaged, "use volume", &self.id, loss)),
        }
    }

    pub(super) fn attributes(&self) -> Result<DirectoryAttributes> {
        DirectoryAttributes::read(&self.entry)?.ok_or_else(|| {
            let detail = "its directory lacks the extended attribute trusted.loopfs.volume; the store did not create it";
            Error::new(ErrorKind::InvalidInput, "open volume", &self.id, detail)
        })
    }

    pub(super) fn quota(&self) -> ProjectQuota<'_> {
        ProjectQuota::of(self.entry.as_fd())
    }

    pub(super) fn usage(&self, attributes: DirectoryAttributes) -> Result<Usage> {
        self.quota().usage(attributes.project)?.ok_or_else(|| self.unlimited())
    }

    /// Returns the current limits of the directory's project.
    pub(super) fn limits(&self) -> Result<Reservation> {
        let usage = self.usage(self.attributes()?)?;
        Reservation::of_project(&usage).ok_or_else(|| self.unlimited())
    }

    fn unlimited(&self) -> Error {
        Error::new(ErrorKind::NotEnforced, "open volume", &self.id, "its project has no limits")
            .with_remedy("set them to its capacity again before it is used")
    }

    fn require(&self, kind: VolumeKind) -> Result<()> {
        if self.kind == kind {
            return Ok(());
        }
        let detail = format!("it is a {} volume, not a {kind} one", self.kind);
        Err(Error::new(ErrorKind::InvalidInput, "open volume", &self.id, detail))
    }
}

/// Returns what to say of an image that is shorter than its recorded capacity.
fn truncation(recorded: Bytes, size: Bytes) -> Option<Explanation> {
    (size < recorded).then(|| {
        let cause =
            format!("the image was cut off: {size} of {recorded} are left, and what was past them is lost");
        Explanation::from(cause).with_remedy("restore the volume from a backup, or delete it")
    })
}

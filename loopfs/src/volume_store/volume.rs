//! One volume, held open.

use std::num::NonZeroU64;
use std::os::fd::{AsFd, OwnedFd};

use nix::fcntl::OFlag;
use nix::sys::stat::fstat;
use nix::sys::statvfs::fstatvfs;

use super::condition::{AbnormalReason, Condition};
use super::id::VolumeId;
use super::on_disk::{Attributes, ForeignRecord, Image, layout, made_from, shares, sizes};
use super::settings;
use super::source::OwnedContentSource;
use super::spec::{VolumeKind, VolumeSpec};
use crate::error::{Context, Error, ErrorKind, Result};
use crate::loop_device::Access;
use crate::project_quota::{ProjectQuota, Usage, project_and_inheritance_of};
use crate::units::{Bytes, Inodes};

/// A volume that was there when it was opened. It stays usable while it is renamed or deleted.
#[derive(Debug)]
pub struct Volume {
    id: VolumeId,
    kind: VolumeKind,
    pub(super) entry: OwnedFd,
    capacity: Bytes,
}

/// Inodes of a Filesystem volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InodeStats {
    /// The limit.
    pub total: Inodes,
    /// In use, the volume's directory among them.
    pub used: Inodes,
    /// Left.
    pub free: Inodes,
}

/// Use and capacity of a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeStats {
    /// What the volume may hold.
    pub capacity: Bytes,
    /// What it holds: charged to the quota, or allocated to the image.
    pub used: Bytes,
    /// What more it can hold now.
    pub available: Bytes,
    /// Inodes, for a Filesystem volume.
    pub inodes: Option<InodeStats>,
    /// Whether it is as it was made.
    pub condition: Condition,
}

impl Volume {
    pub(super) fn new(id: VolumeId, kind: VolumeKind, entry: OwnedFd) -> Result<Self> {
        let mut volume = Self { id, kind, entry, capacity: Bytes(0) };
        volume.capacity = match kind {
            VolumeKind::Filesystem => volume.limit()?,
            VolumeKind::Block => {
                let (recorded, size) = volume.recorded_and_size()?;
                recorded.max(size)
            }
        };
        Ok(volume)
    }

    /// Its name.
    #[must_use]
    pub fn id(&self) -> &VolumeId {
        &self.id
    }

    /// Directory or image.
    #[must_use]
    pub fn kind(&self) -> VolumeKind {
        self.kind
    }

    /// Its size when it was opened: the quota's limit, or what the image was made or grown to. Of an image that was cut
    /// off, that is more than its length; [`stats`](Self::stats) tells.
    #[must_use]
    pub fn capacity(&self) -> Bytes {
        self.capacity
    }

    /// The ratio its limit of inodes was made with. None for a Block volume, which has none.
    ///
    /// # Errors
    /// Those of getxattr(2).
    pub fn bytes_per_inode(&self) -> Result<Option<NonZeroU64>> {
        match self.kind {
            VolumeKind::Filesystem => Ok(Some(self.attributes()?.bytes_per_inode)),
            VolumeKind::Block => Ok(None),
        }
    }

    /// What the image of a Block volume was made with. None for a Filesystem volume, which has none.
    ///
    /// # Errors
    /// Those of fgetxattr(2); [`ErrorKind::Other`]: recorded by a later version.
    pub fn image(&self) -> Result<Option<Image>> {
        match self.kind {
            VolumeKind::Filesystem => Ok(None),
            VolumeKind::Block => Image::read(&self.entry).map(Some),
        }
    }

    /// Whether blocks of it may be in other volumes or snapshots too. It says so of a Block volume that once took part in a
    /// clone or a snapshot, also when the others are gone by now.
    ///
    /// # Errors
    /// Those of fgetxattr(2).
    pub fn may_share_blocks(&self) -> Result<bool> {
        match self.kind {
            VolumeKind::Filesystem => Ok(false),
            VolumeKind::Block => shares::may_share(&self.entry),
        }
    }

    /// How its settings differ from those of `spec`, if they do: text for people. Its kind and size are not compared, nor
    /// are settings that mean nothing to its kind.
    ///
    /// # Errors
    /// As [`image`](Self::image) and [`bytes_per_inode`](Self::bytes_per_inode).
    pub fn settings_differ(&self, spec: &VolumeSpec) -> Result<Option<String>> {
        match self.kind {
            VolumeKind::Filesystem => {
                Ok(settings::other_ratio(self.attributes()?.bytes_per_inode, spec.bytes_per_inode))
            }
            VolumeKind::Block => Ok(Image::read(&self.entry)?.differs(spec.image)),
        }
    }

    /// The directory of a Filesystem volume, for [`bind_mount`](crate::mount::bind_mount).
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`]: it is a Block volume.
    pub fn open_dir(&self) -> Result<OwnedFd> {
        self.require(VolumeKind::Filesystem)?;
        layout::open_beneath(self.entry.as_fd(), ".", OFlag::O_PATH | OFlag::O_DIRECTORY)
            .context("open the directory of volume", &self.id)
    }

    /// The image of a Block volume, for [`LoopControl`](crate::loop_device::LoopControl).
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

    /// What it was made from, whether that is still there or not; None where it was made empty.
    ///
    /// # Errors
    /// Those of fgetxattr(2).
    pub fn source(&self) -> Result<Option<OwnedContentSource>> {
        made_from::read(&self.entry)
    }

    /// Use and capacity, in constant time.
    ///
    /// # Errors
    /// Those of statfs(2) and quotactl_fd(2).
    pub fn stats(&self) -> Result<VolumeStats> {
        match self.kind {
            VolumeKind::Filesystem => self.directory_stats(),
            VolumeKind::Block => self.image_stats(),
        }
    }

    fn directory_stats(&self) -> Result<VolumeStats> {
        let attributes = self.attributes()?;
        let usage = self.usage(attributes)?;
        let capacity = usage.limits.bytes.hard.ok_or_else(|| self.unlimited())?;
        let total = usage.limits.inodes.hard.ok_or_else(|| self.unlimited())?;
        let filesystem = fstatvfs(&self.entry).context("statfs volume", &self.id)?;
        let free = Bytes(filesystem.blocks_available() * filesystem.fragment_size());
        Ok(VolumeStats {
            capacity,
            used: usage.bytes,
            available: capacity.saturating_sub(usage.bytes).min(free),
            inodes: Some(InodeStats {
                total,
                used: usage.inodes,
                free: Inodes(total.0.saturating_sub(usage.inodes.0)),
            }),
            condition: self.directory_condition(attributes)?,
        })
    }

    /// The owner of a directory can do all of this.
    fn directory_condition(&self, attributes: Attributes) -> Result<Condition> {
        let made_with = attributes.project;
        let (carried, inherited) = project_and_inheritance_of(&self.entry)?;
        Ok(if carried != made_with.get() {
            Condition::abnormal(
                AbnormalReason::ProjectChanged,
                format!(
                    "the directory's project id was changed from {made_with} to {carried}: its size is not limited any \
                     more; `loopfs quota tag` puts the tree back into project {made_with}"
                ),
            )
        } else if !inherited {
            Condition::abnormal(
                AbnormalReason::ProjectNotInherited,
                format!(
                    "the directory does not hand its project id down (FS_XFLAG_PROJINHERIT was cleared): the size of what \
                     is made in it is not limited; `loopfs quota tag` puts the tree back into project {made_with}"
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
        // Blocks past the end and of the extent tree are allocated too.
        let used = Bytes::from_basic_blocks(status.st_blocks as u64).min(capacity);
        Ok(VolumeStats {
            capacity,
            used,
            available: capacity.saturating_sub(used),
            inodes: None,
            condition: match truncation(recorded, size) {
                None => Condition::Healthy,
                Some(message) => Condition::abnormal(AbnormalReason::ImageTruncated, message),
            },
        })
    }

    /// In this order: see [`sizes`].
    fn recorded_and_size(&self) -> Result<(Bytes, Bytes)> {
        let recorded = sizes::read_capacity(&self.entry)?.unwrap_or_default();
        let size = fstat(&self.entry).context("fstat volume", &self.id)?.st_size as u64;
        Ok((recorded, Bytes(size)))
    }

    /// That an image has all of its bytes: one that was cut off and then made longer, or written to as a device, would
    /// only look whole.
    ///
    /// # Errors
    /// [`ErrorKind::Damaged`]: it has not. Those of fgetxattr(2) and fstat(2).
    pub fn require_whole(&self) -> Result<()> {
        if self.kind == VolumeKind::Filesystem {
            return Ok(());
        }
        let (recorded, size) = self.recorded_and_size()?;
        match truncation(recorded, size) {
            None => Ok(()),
            Some(message) => Err(Error::new(ErrorKind::Damaged, "use volume", &self.id, message)),
        }
    }

    pub(super) fn attributes(&self) -> Result<Attributes> {
        Attributes::read(&self.entry)?.ok_or_else(|| {
            let detail = "its directory has no attribute of the store; it was not made by it";
            Error::new(ErrorKind::InvalidInput, "open volume", &self.id, detail)
        })
    }

    pub(super) fn quota(&self) -> ProjectQuota<'_> {
        ProjectQuota::of(self.entry.as_fd())
    }

    pub(super) fn usage(&self, attributes: Attributes) -> Result<Usage> {
        self.quota().usage(attributes.project)?.ok_or_else(|| self.unlimited())
    }

    /// The limit of bytes that the directory's project has now.
    pub(super) fn limit(&self) -> Result<Bytes> {
        self.usage(self.attributes()?)?.limits.bytes.hard.ok_or_else(|| self.unlimited())
    }

    fn unlimited(&self) -> Error {
        let detail = "its project has no limits; set them to its capacity again before it is used";
        Error::new(ErrorKind::NotEnforced, "open volume", &self.id, detail)
    }

    fn require(&self, kind: VolumeKind) -> Result<()> {
        if self.kind == kind {
            return Ok(());
        }
        let detail = format!("it is a {} volume, not a {kind} one", self.kind);
        Err(Error::new(ErrorKind::InvalidInput, "open volume", &self.id, detail))
    }
}

/// What is wrong with an image that is shorter than it was made.
fn truncation(recorded: Bytes, size: Bytes) -> Option<String> {
    (size < recorded).then(|| {
        format!(
            "the image was cut off: {size} of {recorded} are left, and what was past them is lost; restore the volume \
             from a backup, or delete it"
        )
    })
}

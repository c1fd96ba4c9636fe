//! The condition of a volume.

use std::fmt;

/// The health of a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Condition {
    /// The volume is healthy.
    Healthy,
    /// The volume is damaged, or its limit is not enforced completely.
    Abnormal {
        /// The problem, for programs.
        reason: AbnormalReason,
        /// The problem and its remedy, for people.
        message: String,
    },
}

impl Condition {
    /// Returns an abnormal condition.
    #[must_use]
    pub fn abnormal(reason: AbnormalReason, message: impl Into<String>) -> Self {
        Self::Abnormal { reason, message: message.into() }
    }
}

/// The problem of a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum AbnormalReason {
    /// The directory of the volume has another project id than at its creation.
    ProjectChanged,
    /// New entries of the volume's directory do not inherit its project id.
    ProjectNotInherited,
    /// The volume contains files with another project id, which are charged to another volume or to none.
    FilesInForeignProject,
    /// Files of another volume have the project id of this volume and use up its limit.
    ChargedForForeignFiles,
    /// The file system has less free space than the volume alone may still take: files of other programs have taken it. Shared blocks of a
    /// clone count as taken, although a write to them needs new ones.
    SpaceTaken,
    /// The image of the volume is shorter than its capacity.
    ImageTruncated,
    /// The image of the volume was removed, and only a loop device still has its content.
    ImageMissing,
    /// A loop device through which the volume is published is bound to another file than its image.
    DeviceOfOtherFile,
    /// A loop device of the volume has other properties than it was attached with: a pod can change those of its own device. Or it uses
    /// the page cache.
    DeviceChanged,
    /// The volume cannot be opened.
    Unreadable,
    /// The file system of the store cannot be used.
    StorageFailed,
}

impl AbnormalReason {
    /// All reasons.
    pub const ALL: [Self; 11] = [
        Self::ProjectChanged,
        Self::ProjectNotInherited,
        Self::FilesInForeignProject,
        Self::ChargedForForeignFiles,
        Self::SpaceTaken,
        Self::ImageTruncated,
        Self::ImageMissing,
        Self::DeviceOfOtherFile,
        Self::DeviceChanged,
        Self::Unreadable,
        Self::StorageFailed,
    ];

    /// Returns the name of the reason, which is the same in every version.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::ProjectChanged => "ProjectChanged",
            Self::ProjectNotInherited => "ProjectNotInherited",
            Self::FilesInForeignProject => "FilesInForeignProject",
            Self::ChargedForForeignFiles => "ChargedForForeignFiles",
            Self::SpaceTaken => "SpaceTaken",
            Self::ImageTruncated => "ImageTruncated",
            Self::ImageMissing => "ImageMissing",
            Self::DeviceOfOtherFile => "DeviceOfOtherFile",
            Self::DeviceChanged => "DeviceChanged",
            Self::Unreadable => "Unreadable",
            Self::StorageFailed => "StorageFailed",
        }
    }
}

impl fmt::Display for AbnormalReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

//! The condition of a volume.

use std::fmt;

/// Whether a volume is healthy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Condition {
    /// The volume is healthy.
    Healthy,
    /// The volume is damaged, or its limit is not enforced completely.
    Abnormal {
        /// For programs.
        reason: AbnormalReason,
        /// For people: what is wrong, and what to do about it.
        message: String,
    },
}

impl Condition {
    /// Not as it was made.
    #[must_use]
    pub fn abnormal(reason: AbnormalReason, message: impl Into<String>) -> Self {
        Self::Abnormal { reason, message: message.into() }
    }
}

/// What is wrong with a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum AbnormalReason {
    /// Its directory carries another project id than it was made with.
    ProjectChanged,
    /// Its directory does not hand its project id down to what is made in it.
    ProjectNotInherited,
    /// Its directory holds files with another project id, which are charged to another volume or to none.
    FilesInForeignProject,
    /// Files of another volume carry its project id and use up its limit.
    ChargedForForeignFiles,
    /// Its image is shorter than its capacity.
    ImageTruncated,
    /// Its image is gone, and a device still shows what was in it.
    ImageMissing,
    /// A device that shows it is bound to another file than its image.
    DeviceOfOtherFile,
    /// A device that shows it goes through the page cache.
    DirectIoLost,
    /// It cannot be opened.
    Unreadable,
    /// The file system under it cannot be used.
    StorageFailed,
}

impl AbnormalReason {
    /// All of them.
    pub const ALL: [Self; 10] = [
        Self::ProjectChanged,
        Self::ProjectNotInherited,
        Self::FilesInForeignProject,
        Self::ChargedForForeignFiles,
        Self::ImageTruncated,
        Self::ImageMissing,
        Self::DeviceOfOtherFile,
        Self::DirectIoLost,
        Self::Unreadable,
        Self::StorageFailed,
    ];

    /// One word, the same in every version.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::ProjectChanged => "ProjectChanged",
            Self::ProjectNotInherited => "ProjectNotInherited",
            Self::FilesInForeignProject => "FilesInForeignProject",
            Self::ChargedForForeignFiles => "ChargedForForeignFiles",
            Self::ImageTruncated => "ImageTruncated",
            Self::ImageMissing => "ImageMissing",
            Self::DeviceOfOtherFile => "DeviceOfOtherFile",
            Self::DirectIoLost => "DirectIoLost",
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

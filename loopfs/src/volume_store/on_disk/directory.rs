//! The facts about the directory of a volume, in an extended attribute of it.
//!
//! The owner of a directory can change its project id, and then the id on the inode may be that
//! of another tenant's volume. The store therefore trusts `trusted.loopfs.volume`, which only a process with `CAP_SYS_ADMIN` can
//! write, and compares the inode with it.

use std::collections::HashSet;
use std::ffi::CStr;
use std::num::NonZeroU64;
use std::os::fd::{AsFd, OwnedFd};

use nix::sys::stat::{Mode, fchmod};

use super::attribute::{self, field};
use super::layout::{self, Layout};
use crate::error::{Context, Result};
use crate::project_quota::{ProjectId, project_of};
use crate::sys::xattr;
use crate::volume_store::source::ContentSource;

const NAME: &CStr = c"trusted.loopfs.volume";

/// The settings of the directory of a Filesystem volume, which are recorded and fixed at creation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct DirectorySpec {
    /// Bytes of capacity for each inode that the volume may hold.
    pub bytes_per_inode: NonZeroU64,
}

impl Default for DirectorySpec {
    /// One inode for each 16384 bytes. In a file system of four allocation groups, these reserve an eighth of the capacity.
    fn default() -> Self {
        Self { bytes_per_inode: NonZeroU64::new(16384).expect("16384 is not 0") }
    }
}

impl DirectorySpec {
    /// Applies the settings to a new, empty directory. A clone has the mode and the owner of its source.
    pub(crate) fn apply(self, directory: impl AsFd, entry: ContentSource<'_>) -> Result<()> {
        // The directory was created with its limit of inodes.
        let Self { bytes_per_inode: _ } = self;
        // Any user can write to the directory, so a program that runs as any user can use the volume. Only root can pass the parent
        // directories. chmod is needed because the mode of mkdir was subject to the umask.
        fchmod(directory, Mode::S_IRWXU | Mode::S_IRWXG | Mode::S_IRWXO).context("chmod", entry)
    }
}

/// Facts that are fixed at creation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DirectoryAttributes {
    pub(crate) project: ProjectId,
    pub(crate) spec: DirectorySpec,
}

impl DirectoryAttributes {
    pub(crate) fn write(&self, directory: impl AsFd) -> Result<()> {
        let Self { project, spec: DirectorySpec { bytes_per_inode } } = self;
        let text = format!("project={project} bytes-per-inode={bytes_per_inode}");
        xattr::set(directory, NAME, text.as_bytes()).context("write the attribute of", "a volume's directory")
    }

    /// Returns `None` if the attribute does not exist.
    pub(crate) fn read(directory: impl AsFd) -> Result<Option<Self>> {
        attribute::read(directory, NAME, "read the attribute of", "a volume's directory", Self::parse)
    }

    fn parse(text: &str) -> Option<Self> {
        Some(Self {
            project: ProjectId::new(field(text, "project")?.parse().ok()?)?,
            spec: DirectorySpec { bytes_per_inode: field(text, "bytes-per-inode")?.parse().ok()? },
        })
    }
}

/// Returns the project ids that directories of the store use, by their inode or by their attribute.
pub(crate) fn assigned_ids(layout: &Layout) -> Result<HashSet<ProjectId>> {
    let mut assigned = HashSet::new();
    for parent in layout.entry_directories().chain([&layout.staging]) {
        for opened in layout::directories(parent, "volumes and trash")? {
            let (_, directory) = opened?;
            assigned.extend(DirectoryAttributes::read(&directory)?.map(|attributes| attributes.project));
            assigned.extend(ProjectId::new(project_of(&directory)?));
        }
    }
    Ok(assigned)
}

/// Returns the directories of volumes or snapshots in `parent`, with their names and projects.
pub(crate) fn projects(
    parent: &OwnedFd,
) -> Result<impl Iterator<Item = Result<(String, OwnedFd, ProjectId)>>> {
    let with_project = |(name, directory): (String, OwnedFd)| -> Result<_> {
        let attributes = DirectoryAttributes::read(&directory)?;
        Ok(attributes.map(|attributes| (name, directory, attributes.project)))
    };
    let directories = layout::directories(parent, "volumes, snapshots and trash")?;
    Ok(directories.filter_map(move |opened| opened.and_then(with_project).transpose()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A later version can add keys, so unknown keys are ignored.
    #[test]
    fn only_missing_keys_are_an_error() {
        let attributes = DirectoryAttributes::parse("project=7 bytes-per-inode=2048 later=x").unwrap();
        assert_eq!((attributes.project.get(), attributes.spec.bytes_per_inode.get()), (7, 2048));
        assert_eq!(DirectoryAttributes::parse("project=7"), None);
        assert_eq!(DirectoryAttributes::parse("project=0 bytes-per-inode=2048"), None);
        assert_eq!(DirectoryAttributes::parse("project=7 bytes-per-inode=0"), None);
    }
}

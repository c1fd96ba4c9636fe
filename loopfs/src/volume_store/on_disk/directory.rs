//! What a volume's directory says of itself, in an extended attribute.
//!
//! The owner of a directory can change its project id, and then the id on the inode may be that
//! of another tenant's volume. The store therefore believes `trusted.loopfs.volume`, which takes
//! `CAP_SYS_ADMIN` to write, and compares the inode with it.

use std::collections::HashSet;
use std::ffi::CStr;
use std::num::NonZeroU64;
use std::os::fd::{AsFd, OwnedFd};

use nix::errno::Errno;
use nix::fcntl::OFlag;

use super::layout::{self, Layout};
use crate::error::{Context, Error, ErrorKind, Result};
use crate::project_quota::{ProjectId, project_of};
use crate::sys::xattr;

const NAME: &CStr = c"trusted.loopfs.volume";

/// Facts that are fixed when the volume is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Attributes {
    pub(crate) project: ProjectId,
    pub(crate) bytes_per_inode: NonZeroU64,
}

impl Attributes {
    pub(crate) fn write(&self, directory: impl AsFd) -> Result<()> {
        let text = format!("project={} bytes-per-inode={}", self.project, self.bytes_per_inode);
        xattr::set(directory, NAME, text.as_bytes()).context("write the attribute of", "a volume's directory")
    }

    /// None where the attribute was never written.
    pub(crate) fn read(directory: impl AsFd) -> Result<Option<Self>> {
        let Some(value) =
            xattr::get(directory, NAME).context("read the attribute of", "a volume's directory")?
        else {
            return Ok(None);
        };
        let text = String::from_utf8_lossy(&value);
        Self::parse(&text).map(Some).ok_or_else(|| {
            Error::new(
                ErrorKind::Other,
                "read the attribute of",
                "a volume's directory",
                format!("{text:?} is not understood"),
            )
        })
    }

    fn parse(text: &str) -> Option<Self> {
        let value = |key: &str| text.split(' ').find_map(|field| field.strip_prefix(key)?.strip_prefix('='));
        Some(Self {
            project: ProjectId::new(value("project")?.parse().ok()?)?,
            bytes_per_inode: value("bytes-per-inode")?.parse().ok()?,
        })
    }
}

/// The project ids that a directory of the store carries or is recorded to carry.
pub(crate) fn assigned_ids(layout: &Layout) -> Result<HashSet<ProjectId>> {
    let mut assigned = HashSet::new();
    for directory in layout.entry_directories().chain([&layout.staging]) {
        add_assigned_ids(directory, &mut assigned)?;
    }
    Ok(assigned)
}

/// Adds the project ids that the directories of `parent` carry or are recorded to carry.
fn add_assigned_ids(parent: &OwnedFd, assigned: &mut HashSet<ProjectId>) -> Result<()> {
    for name in layout::names(parent, "volumes and trash")? {
        let directory =
            match layout::open_beneath(parent.as_fd(), &name, OFlag::O_RDONLY | OFlag::O_DIRECTORY) {
                Ok(directory) => directory,
                Err(Errno::ENOTDIR | Errno::ENOENT) => continue,
                Err(errno) => return Err(Error::sys("open", name, errno)),
            };
        assigned.extend(Attributes::read(&directory)?.map(|attributes| attributes.project));
        assigned.extend(ProjectId::new(project_of(&directory)?));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn later_keys_are_passed_over_and_missing_ones_are_not_made_up() {
        let attributes = Attributes::parse("project=7 bytes-per-inode=2048 later=x").unwrap();
        assert_eq!((attributes.project.get(), attributes.bytes_per_inode.get()), (7, 2048));
        assert_eq!(Attributes::parse("project=7"), None);
        assert_eq!(Attributes::parse("project=0 bytes-per-inode=2048"), None);
        assert_eq!(Attributes::parse("project=7 bytes-per-inode=0"), None);
    }
}

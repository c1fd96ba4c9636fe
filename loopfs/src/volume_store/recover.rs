//! Taking away what a crash left half made. The file system alone is asked.

use std::collections::HashSet;
use std::os::fd::{AsFd, OwnedFd};

use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::unistd::{UnlinkatFlags, unlinkat};

use super::attributes::Attributes;
use super::{VolumeStore, layout, project_ids};
use crate::error::{Context, Error, Result};
use crate::project_quota::{ProjectId, ProjectQuota, project_of};

/// What [`VolumeStore::recover`] found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Recovered {
    /// Directories that never became volumes, removed.
    pub unfinished: usize,
    /// Project ids with limits and without a directory, freed.
    pub released_ids: usize,
    /// Project ids without a directory that files are still charged to, left as they are.
    pub busy_ids: usize,
}

impl VolumeStore {
    /// Removes what was being made when the process or the machine stopped, and frees project
    /// ids that no directory carries. Waits for changes that other processes have under way.
    /// Its cost grows with the number of volumes: meant for once, at start.
    ///
    /// # Errors
    /// Those of the system calls; what was done until then stays done.
    pub fn recover(&self) -> Result<Recovered> {
        let _lock = self.layout.lock_exclusive()?;
        let mut recovered = Recovered::default();
        for name in layout::names(&self.layout.staging, "staging")? {
            // Nothing was ever put into it: it had not been shown to anybody.
            unlinkat(&self.layout.staging, name.as_str(), UnlinkatFlags::RemoveDir)
                .context("remove from staging", &name)?;
            recovered.unfinished += 1;
        }
        let mut carried = HashSet::new();
        for directory in [&self.layout.volumes, &self.layout.trash] {
            carry(directory, &mut carried)?;
        }
        let quota = ProjectQuota::of(self.filesystem.root.as_fd());
        let mut orphans = Vec::new();
        for usage in quota.ids(self.options.project_ids.clone()) {
            orphans.extend(Some(usage?.id).filter(|id| !carried.contains(id)));
        }
        for id in orphans {
            match project_ids::release(quota, id)? {
                true => recovered.released_ids += 1,
                false => recovered.busy_ids += 1,
            }
        }
        Ok(recovered)
    }
}

/// Adds the project ids that the directories of `parent` carry or are recorded to carry.
fn carry(parent: &OwnedFd, carried: &mut HashSet<ProjectId>) -> Result<()> {
    for name in layout::names(parent, "volumes and trash")? {
        let directory =
            match layout::open_beneath(parent.as_fd(), &name, OFlag::O_RDONLY | OFlag::O_DIRECTORY) {
                Ok(directory) => directory,
                Err(Errno::ENOTDIR | Errno::ENOENT) => continue,
                Err(errno) => return Err(Error::sys("open", name, errno)),
            };
        carried.extend(Attributes::read(&directory)?.map(|attributes| attributes.project));
        carried.extend(ProjectId::new(project_of(&directory)?));
    }
    Ok(())
}

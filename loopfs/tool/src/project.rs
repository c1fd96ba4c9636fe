//! Arguments that several commands share: a project id, and a directory with its project.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use anyhow::{Context, Result};
use loopfs::project_quota::{ProjectId, project_of};

use crate::size;

pub(crate) fn project_id(text: &str) -> Result<ProjectId, String> {
    let id = size::number(text).and_then(ProjectId::new);
    id.ok_or_else(|| "write a number from 1 to 4294967294".to_owned())
}

/// Returns the given project, or that of the directory if none is given.
pub(crate) fn project_or_own(id: Option<ProjectId>, directory: &File, path: &Path) -> Result<ProjectId> {
    if let Some(id) = id {
        return Ok(id);
    }
    let found = project_of(directory).with_context(|| path.display().to_string())?;
    ProjectId::new(found).with_context(|| {
        format!("{} is in no project (its id is {found}): give one with --id", path.display())
    })
}

pub(crate) fn open(path: &Path) -> Result<File> {
    let directory = OpenOptions::new().read(true).custom_flags(libc::O_DIRECTORY).open(path);
    directory.with_context(|| format!("open the directory {}", path.display()))
}

/// Writes the changes of project ids and limits to disk. Without this, a power cut could undo them.
pub(crate) fn sync(directory: &File, path: &Path) -> Result<()> {
    nix::unistd::syncfs(directory).with_context(|| format!("sync {}", path.display()))
}

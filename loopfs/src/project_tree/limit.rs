//! Limiting a directory, and removing its limit, by one call each.

use std::fs::File;
use std::ops::RangeInclusive;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt;

use nix::errno::Errno;
use nix::fcntl::{OFlag, OpenHow, ResolveFlag, openat2};
use nix::sys::stat::fstat;

use super::tag::{HardLinks, TreeReport, clear_tree, tag_tree};
use crate::error::{Context, Error, ErrorKind, Result};
use crate::project_quota::{Limits, ProjectId, ProjectIds, ProjectQuota, Release, project_of};

/// The project ids of [`limit_directory`]: the 16,777,216 after those of volume stores.
pub const LIMITED_DIRECTORIES: RangeInclusive<ProjectId> = RangeInclusive::new(
    ProjectId::new(0x4d00_0000).expect("neither 0 nor the last"),
    ProjectId::new(0x4dff_ffff).expect("neither 0 nor the last"),
);
/// All processes of the machine lock this file while they choose an id.
const LOCK: &str = "/run/loopfs-project-ids.lock";
const OBJECT: &str = "a directory";

/// Limits a directory with any content. The first call allocates a project id from [`LIMITED_DIRECTORIES`], sets the limits, and
/// puts the directory and its content into the project. A further call changes the limits, and tags what the first one did not.
/// [`project_of`] returns the id, and [`ProjectQuota::usage`] the usage.
///
/// [`TreeReport::skipped`] counts the entries that are not in the project, such as files with several hard links. The limits may be
/// below the usage, and then only prevent further growth. The owner of the directory can leave the project (see
/// [the crate](crate)).
///
/// A directory inside of a limited one shares its limit, and is refused. The call cannot tell this if the directory was moved out of the
/// limited one, or is the root of a bind mount, and then changes the limit that it shares.
///
/// To remove the limit, call [`unlimit_directory`]. If the directory was removed instead, the next call for any directory of the
/// file system frees its id. After a crash, repeat the call. The result is durable when the call returns.
///
/// Concurrent calls lock `/run/loopfs-project-ids.lock`, so containers need the `/run` of the host. Use [`ProjectIds`] for
/// another range or lock, and for very many directories: each first call reads the record of each limited directory.
///
/// # Errors
/// [`ErrorKind::AlreadyExists`]: the directory is in a project outside of the range. [`ErrorKind::InvalidInput`]: it is not a
/// directory, or `limits` contain no limit. [`ErrorKind::Conflict`]: it is inside of a limited directory.
/// [`ErrorKind::NotEnforced`]: the file system is mounted without project quotas. Those of [`ProjectIds::create`] and [`tag_tree`]. After an
/// error of `tag_tree`, the limits are set, and a part of the content may be outside the project.
pub fn limit_directory(directory: impl AsFd, limits: Limits) -> Result<TreeReport> {
    const OPERATION: &str = "limit";
    let directory = directory.as_fd();
    let ids = allocator(directory, OPERATION)?;
    let id = match own_project(directory, &ids, OPERATION)? {
        Some(id) => limit_again(directory, id, limits)?,
        None => {
            ids.free_abandoned()?;
            match ids.create_filled(directory, limits) {
                Ok(id) => id,
                // A concurrent call was faster.
                Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                    let id = own_project(directory, &ids, OPERATION)?.ok_or(error)?;
                    limit_again(directory, id, limits)?
                }
                Err(error) => return Err(error),
            }
        }
    };
    let report = tag_tree(directory, id, HardLinks::Skip, |_| {})?;
    nix::unistd::syncfs(directory).context("sync the file system of", OBJECT)?;
    Ok(report)
}

/// Removes the limit that [`limit_directory`] has set, and takes the directory and its content out of the project. Does nothing if the
/// directory is in no project, so the call can be repeated, also after a crash.
///
/// Returns [`Release::Draining`] if files are still charged to the id: deleted ones that a process has open, or ones outside of the
/// directory. A later call of [`limit_directory`], for any directory of the file system, then frees the id.
///
/// # Errors
/// [`ErrorKind::AlreadyExists`] and [`ErrorKind::Conflict`], as [`limit_directory`]. Those of [`tag_tree`] and [`ProjectIds::release`].
pub fn unlimit_directory(directory: impl AsFd) -> Result<Release> {
    const OPERATION: &str = "remove the limit of";
    let directory = directory.as_fd();
    let ids = allocator(directory, OPERATION)?;
    let Some(id) = own_project(directory, &ids, OPERATION)? else { return Ok(Release::Freed) };
    clear_tree(directory, id)?;
    nix::unistd::syncfs(directory).context("sync the file system of", OBJECT)?;
    ids.release(id)
}

fn allocator(directory: BorrowedFd<'_>, operation: &'static str) -> Result<ProjectIds> {
    ProjectQuota::of(directory).require_enforcing()?;
    let mut options = File::options();
    options.read(true).write(true).create(true).truncate(false).mode(0o600).custom_flags(libc::O_NOFOLLOW);
    let lock = options.open(LOCK).context(operation, format_args!("{OBJECT}, which locks {LOCK}"))?;
    ProjectIds::new(directory, lock, LIMITED_DIRECTORIES)
}

fn own_project(
    directory: BorrowedFd<'_>,
    ids: &ProjectIds,
    operation: &'static str,
) -> Result<Option<ProjectId>> {
    match project_of(directory)? {
        0 => Ok(None),
        id => match ProjectId::new(id).filter(|id| ids.range().contains(id)) {
            // XFS gives new entries the project of their directory.
            Some(id) if parent_project(directory)? == Some(id.get()) => {
                let cause = format!("it is inside of a limited directory, and shares its project {id}");
                Err(Error::new(ErrorKind::Conflict, operation, OBJECT, cause).with_remedy(
                    "name the directory that is limited, or copy this one out of it: a directory that is moved keeps its project",
                ))
            }
            Some(id) => Ok(Some(id)),
            None => {
                let cause = format!("it is in project {id}, which another program has chosen");
                Err(Error::new(ErrorKind::AlreadyExists, operation, OBJECT, cause)
                    .with_remedy("use that program, or ProjectQuota::set_limits and `loopfs quota set`"))
            }
        },
    }
}

/// Returns the project of the directory that contains this one. Returns `None` for the root of a mount.
fn parent_project(directory: BorrowedFd<'_>) -> Result<Option<u32>> {
    let how = OpenHow::new()
        .flags(OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC)
        .resolve(ResolveFlag::RESOLVE_NO_XDEV);
    let parent = match openat2(directory, "..", how) {
        // The caller may not be allowed to read it.
        Err(Errno::EXDEV | Errno::EACCES) => return Ok(None),
        parent => parent.context("open the parent of", OBJECT)?,
    };
    let inode = |directory| fstat(directory).context("fstat", OBJECT).map(|status| status.st_ino);
    // The root of the process contains itself.
    if inode(parent.as_fd())? == inode(directory)? {
        return Ok(None);
    }
    project_of(parent).map(Some)
}

fn limit_again(directory: BorrowedFd<'_>, id: ProjectId, limits: Limits) -> Result<ProjectId> {
    limits.require_limit("limit", OBJECT)?;
    ProjectQuota::of(directory).set_limits(id, limits)?;
    Ok(id)
}

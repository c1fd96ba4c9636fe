//! XFS project quotas: limits on the bytes and inodes of a directory tree.
//!
//! An inode has one project id; what it takes is charged to that project, and refused with ENOSPC at the
//! hard limit. A file or directory takes the id of the directory it is made in if that has the project inheritance
//! flag, which [`assign_project`] sets; with it statfs(2) shows the limit as the size. A rename or link
//! from another project into such a directory is refused with EXDEV, and one out of it keeps the id.
//!
//! The owner of a file or directory may change its project id (ioctl_xfs_fsgetxattr(2) asks for
//! no capability inside the initial user namespace). For a process that owns its directory the
//! limit is therefore a cooperative one; a loop-device image is a hard one.
//!
//! The limits of id 0 are the defaults of all ids, its grace periods those of all: it is no [`ProjectId`].

mod ids;
mod limits;
mod quota;
mod search;

pub use ids::{ProjectIds, Reclaimed, Release};
pub use limits::{Limit, Limits, ProjectId, StoredLimits, Usage};
#[cfg(feature = "__tests")]
pub(crate) use quota::set_project;
pub use quota::{Enforcement, ProjectQuota, assign_project, project_of};
pub(crate) use quota::{Interface, explain, project_and_inheritance_of};

//! Limits a directory to 1 MiB and 100 inodes, shows that the limit is enforced, and removes the directory and the limit.
//!
//! The directory must be on XFS mounted with `prjquota`.
//!
//! ```console
//! # cargo run -p loopfs --example quota -- /mnt/xfs/directory
//! ```

use std::error::Error;
use std::fs::File;
use std::os::fd::AsFd;
use std::path::PathBuf;

use loopfs::project_quota::{Limits, ProjectId, ProjectIds, ProjectQuota};
use loopfs::{Bytes, Inodes};

fn main() -> Result<(), Box<dyn Error>> {
    let path = PathBuf::from(std::env::args_os().nth(1).ok_or("give the path of a directory to make")?);
    std::fs::create_dir(&path)?;
    // The quota is accessed through the parent. An open directory stays charged to its project, even if it is deleted.
    let parent = File::open(path.join(".."))?;
    let quota = ProjectQuota::of(parent.as_fd());
    quota.require_enforcing()?;

    // All programs that use this range must use the same lock.
    let (first, last) = (ProjectId::new(123_000), ProjectId::new(123_999));
    let range = first.zip(last).map(|(first, last)| first..=last).ok_or("not ids that can have limits")?;
    let lock = File::create("/run/loopfs-example-project-ids.lock")?;
    let ids = ProjectIds::new(parent.as_fd(), lock.as_fd(), range)?;
    // `create` sets the limit before it tags the directory, so the directory is never in the project without a limit.
    let project = ids.create(File::open(&path)?, Limits::hard(Bytes::MIB, Inodes(100)))?;

    let refused = std::fs::write(path.join("file"), vec![0; 2 << 20]);
    println!("writing 2 MiB: {refused:?}");
    println!("usage: {:?}", quota.usage(project)?);

    std::fs::remove_dir_all(&path)?;
    println!("project {project}: {:?}", ids.release(project)?);
    Ok(())
}

//! Limits a directory to 1 MiB and 100 inodes, shows that the limit holds, and lifts it.
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

use loopfs::{Bytes, Enforcement, Inodes, Limits, ProjectId, ProjectQuota, assign_project};

fn main() -> Result<(), Box<dyn Error>> {
    let path = PathBuf::from(std::env::args_os().nth(1).ok_or("give the path of a directory to make")?);
    std::fs::create_dir(&path)?;
    let directory = File::open(&path)?;
    let quota = ProjectQuota::of(directory.as_fd());
    if quota.enforcement()? != Enforcement::Enforcing {
        return Err("mount the file system with prjquota".into());
    }

    let project = ProjectId::new(123_456).ok_or("not an id that can have limits")?;
    // First the limit and then the directory: it is never without one.
    let kept = quota.set_limits(project, Limits::hard(Bytes::MIB, Inodes(100)))?;
    println!("limits: {kept:?}");
    assign_project(&directory, project)?;

    let refused = std::fs::write(path.join("file"), vec![0; 2 << 20]);
    println!("writing 2 MiB: {refused:?}");
    println!("usage: {:?}", quota.usage(project)?);

    std::fs::remove_dir_all(&path)?;
    drop(directory);
    // Through another descriptor, for the directory itself counts until its last close.
    let parent = File::open(path.parent().ok_or("the root of the file system")?)?;
    let quota = ProjectQuota::of(parent.as_fd());
    quota.finish_frees(project)?;
    quota.clear_limits(project)?;
    println!("usage: {:?}", quota.usage(project)?);
    Ok(())
}

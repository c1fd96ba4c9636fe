//! Explains why a write of so many bytes below a directory failed with ENOSPC, EDQUOT or "No space left on device".
//!
//! XFS returns ENOSPC both at the limit of a project and if the file system is full. EDQUOT comes from the quota of a user or
//! group, which this library does not read. A soft limit holds like a hard one after its grace period; the program does not
//! check it.
//!
//! Needs Linux 5.14, and `CAP_SYS_ADMIN` to read the quota of a project.
//!
//! ```console
//! # cargo run -p loopfs --example refusal -- /mnt/xfs/alice 4096
//! project 123000 uses 1048576 bytes (1 MiB) of 1048576 bytes (1 MiB): delete files of the project, or raise its limit
//! ```

use std::error::Error;
use std::ffi::OsString;
use std::fs::File;
use std::os::fd::AsFd;
use std::path::Path;

use loopfs::Bytes;
use loopfs::mount::table;
use loopfs::project_quota::{ProjectId, ProjectQuota, project_of};

fn causes(directory: &File, needed: Bytes) -> Result<Vec<String>, Box<dyn Error>> {
    let mut causes = Vec::new();
    if let Some(project) = ProjectId::new(project_of(directory)?)
        && let Some(usage) = ProjectQuota::of(directory.as_fd()).usage(project)?
    {
        let (bytes, inodes) = (usage.bytes, usage.inodes);
        let byte_limit = usage.limits.bytes.filter(|limit| bytes.saturating_add(needed) > *limit);
        let inode_limit = usage.limits.inodes.filter(|limit| inodes >= *limit);
        let reached = byte_limit.map(|limit| format!("{bytes} of {limit}"));
        let reached = reached.into_iter().chain(inode_limit.map(|limit| format!("{inodes} of {limit}")));
        let remedy = "delete files of the project, or raise its limit";
        causes.extend(reached.map(|reached| format!("project {project} uses {reached}: {remedy}")));
    }
    // statfs(2) of a directory in a project shows the limit of the project, and that of the mount point the file system, unless
    // only the directory is mounted there.
    let mounts = table::read()?;
    let mount = table::holding(&mounts, directory).ok_or("the mount of the directory is not visible here")?;
    let filesystem = nix::sys::statvfs::statvfs(&mount.mount_point)?;
    let free = Bytes(filesystem.blocks_available() * filesystem.fragment_size());
    if free < needed || filesystem.files_available() == 0 {
        let shown = mount.mount_point.display();
        causes.push(format!("the file system at {shown} has only {free} left: delete files, or enlarge it"));
    }
    Ok(causes)
}

fn run() -> Result<(), Box<dyn Error>> {
    let args: Vec<OsString> = std::env::args_os().skip(1).collect();
    let [path, needed] = args.as_slice() else { return Err("usage: refusal DIRECTORY BYTES".into()) };
    let shown = Path::new(path).display();
    let needed: u64 = needed.to_str().and_then(|bytes| bytes.parse().ok()).ok_or("BYTES must be a number")?;
    let directory = File::open(path).map_err(|error| format!("open {shown}: {error}"))?;
    let causes = causes(&directory, Bytes(needed))?;
    if causes.is_empty() {
        return Err(format!("{shown}: no limit is reached; look at the quotas of users and groups").into());
    }
    causes.iter().for_each(|cause| println!("{cause}"));
    Ok(())
}

fn main() {
    if let Err(error) = run() {
        eprintln!("refusal: {error}");
        std::process::exit(1);
    }
}

//! Limits the bytes and inodes of a directory with any content, reports the usage in constant time, and removes the limit again.
//!
//! Needs Linux 5.14, `CAP_SYS_ADMIN`, and XFS mounted with `prjquota`. The owner of the directory can change its project id
//! and so leave the limit.
//!
//! ```console
//! # cargo run -p loopfs --example quota -- limit /mnt/xfs/alice 1MiB 100
//! # cargo run -p loopfs --example quota -- usage /mnt/xfs/alice
//! project 1291845632: 4096 bytes (4 KiB), 2 inodes
//! # cargo run -p loopfs --example quota -- unlimit /mnt/xfs/alice
//! Freed
//! ```

use std::error::Error;
use std::ffi::OsString;
use std::fs::File;
use std::os::fd::AsFd;
use std::path::Path;

use loopfs::project_quota::{Limits, ProjectId, ProjectQuota, project_of};
use loopfs::project_tree::{limit_directory, unlimit_directory};
use loopfs::{Bytes, Inodes};

const USAGE: &str = "usage: quota limit DIRECTORY BYTES INODES | usage DIRECTORY | unlimit DIRECTORY";

fn open(path: &Path) -> Result<File, Box<dyn Error>> {
    File::open(path).map_err(|error| format!("open {}: {error}", path.display()).into())
}

fn limit(path: &Path, bytes: Bytes, inodes: Inodes) -> Result<(), Box<dyn Error>> {
    let report = limit_directory(open(path)?, Limits::hard(bytes, inodes))?;
    // Files that have names outside of the directory too, for example.
    for entry in report.skipped.examples {
        eprintln!("{} is not limited", path.join(entry.path).display());
    }
    Ok(())
}

fn usage(path: &Path) -> Result<(), Box<dyn Error>> {
    let directory = open(path)?;
    let project = ProjectId::new(project_of(&directory)?).ok_or("the directory is in no project")?;
    let usage = ProjectQuota::of(directory.as_fd()).usage(project)?.ok_or("the project is unused")?;
    println!("project {project}: {}, {}", usage.bytes, usage.inodes);
    Ok(())
}

fn unlimit(path: &Path) -> Result<(), Box<dyn Error>> {
    // The id of the limit is freed when no process has a file open that was deleted from the directory.
    println!("{:?}", unlimit_directory(open(path)?)?);
    Ok(())
}

fn run() -> Result<(), Box<dyn Error>> {
    let args: Vec<OsString> = std::env::args_os().skip(1).collect();
    let [command, path, limits @ ..] = args.as_slice() else { return Err(USAGE.into()) };
    let (path, text) = (Path::new(path), |word: &OsString| word.to_str().map(str::to_owned).ok_or(USAGE));
    match (command.to_str(), limits) {
        (Some("limit"), [bytes, inodes]) => {
            limit(path, text(bytes)?.parse()?, Inodes(text(inodes)?.parse()?))
        }
        (Some("usage"), []) => usage(path),
        (Some("unlimit"), []) => unlimit(path),
        _ => Err(USAGE.into()),
    }
}

fn main() {
    if let Err(error) = run() {
        eprintln!("quota: {error}");
        std::process::exit(1);
    }
}

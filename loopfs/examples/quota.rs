//! Limits the bytes and inodes of an empty directory, reports the usage in constant time, and removes both again.
//!
//! Needs Linux 5.14, `CAP_SYS_ADMIN`, and XFS mounted with `prjquota`. The owner of the directory can change its project id
//! and so leave the limit.
//!
//! ```console
//! # mkdir /mnt/xfs/alice
//! # cargo run -p loopfs --example quota -- limit /mnt/xfs/alice 1048576 100
//! # cargo run -p loopfs --example quota -- usage /mnt/xfs/alice
//! project 123000: 4096 bytes (4 KiB), 2 inodes
//! # cargo run -p loopfs --example quota -- remove /mnt/xfs/alice
//! ```

use std::error::Error;
use std::ffi::OsString;
use std::fs::File;
use std::os::fd::AsFd;
use std::path::Path;
use std::process::ExitCode;

use loopfs::project_quota::{Limits, ProjectId, ProjectIds, ProjectQuota, project_of};
use loopfs::{Bytes, Inodes};

const USAGE: &str = "usage: quota limit DIRECTORY BYTES INODES | usage DIRECTORY | remove DIRECTORY";
const FIRST: ProjectId = ProjectId::new(123_000).expect("neither 0 nor the last");
const LAST: ProjectId = ProjectId::new(123_999).expect("neither 0 nor the last");

/// Returns the allocator of project ids. All programs that use the range must use the same lock file.
fn allocator(file: &File) -> Result<ProjectIds, Box<dyn Error>> {
    Ok(ProjectIds::new(file, File::create("/run/loopfs-example-project-ids.lock")?, FIRST..=LAST)?)
}

fn limit(path: &Path, bytes: Bytes, inodes: Inodes) -> Result<(), Box<dyn Error>> {
    let (directory, limits) = (File::open(path)?, Limits::hard(bytes, inodes));
    let quota = ProjectQuota::of(directory.as_fd());
    match ProjectId::new(project_of(&directory)?) {
        Some(id) if (FIRST..=LAST).contains(&id) => Ok(quota.set_limits(id, limits).map(drop)?),
        _ if path.read_dir()?.next().is_some() => Err("not empty; see project_tree::tag_tree".into()),
        // `create` sets the limits before it tags the directory, which is therefore never in the project without limits.
        _ => Ok(allocator(&directory)?.create(&directory, limits).map(drop)?),
    }
}

fn usage(path: &Path) -> Result<(), Box<dyn Error>> {
    let directory = File::open(path)?;
    let project = ProjectId::new(project_of(&directory)?).ok_or("the directory is in no project")?;
    let usage = ProjectQuota::of(directory.as_fd()).usage(project)?.ok_or("the project is unused")?;
    println!("project {project}: {}, {}", usage.bytes, usage.inodes);
    Ok(())
}

fn remove(path: &Path) -> Result<(), Box<dyn Error>> {
    let project = ProjectId::new(project_of(File::open(path)?)?).filter(|id| (FIRST..=LAST).contains(id));
    let project = project.ok_or("the directory is in no project of this program")?;
    // An open directory stays charged to its project, even if it is deleted. So the quota is accessed through the parent.
    let parent = File::open(path.join(".."))?;
    std::fs::remove_dir_all(path)?;
    // If a process has a deleted file open, the id is free after its last close, when `retry_draining` is called.
    println!("project {project}: {:?}", allocator(&parent)?.release(project)?);
    Ok(())
}

fn run() -> Result<(), Box<dyn Error>> {
    let args: Vec<OsString> = std::env::args_os().skip(1).collect();
    let [command, path, limits @ ..] = args.as_slice() else { return Err(USAGE.into()) };
    let path = Path::new(path);
    let number = |text: &OsString| text.to_str().and_then(|text| text.parse().ok()).ok_or(USAGE);
    let done = match (command.to_str(), limits) {
        (Some("limit"), [bytes, inodes]) => limit(path, Bytes(number(bytes)?), Inodes(number(inodes)?)),
        (Some("usage"), []) => usage(path),
        (Some("remove"), []) => remove(path),
        _ => return Err(USAGE.into()),
    };
    done.map_err(|error| format!("{}: {error}", path.display()).into())
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("quota: {error}");
            ExitCode::FAILURE
        }
    }
}

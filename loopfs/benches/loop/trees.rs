//! Clones of directory trees, compared with copies that read and write.

use std::fs::{self, File, FileTimes};
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, fchown};
use std::path::{Path, PathBuf};

use loopfs::project_tree::clone_tree;
use nix::unistd::syncfs;

use crate::samples::Samples;
use crate::{Result, Size, machine, stop};

const FILES_OF_A_DIRECTORY: usize = 100;
const FILE_BYTES: usize = 16 << 10;
const RUNS: usize = 5;

/// Runs the benchmark. `directory` must be on an XFS.
pub(crate) fn run(directory: &Path, size: Size) -> Result<()> {
    machine::print(directory)?;
    let directory = directory.join("loopfs-bench-trees");
    // A killed run may have left this directory.
    if directory.exists() {
        fs::remove_dir_all(&directory)?;
    }
    fs::create_dir(&directory)?;
    let counts: &[usize] = match size {
        Size::Full => &[1000, 4000],
        Size::Quick => &[500],
    };
    let result = counts.iter().try_for_each(|files| measure(&directory, *files));
    fs::remove_dir_all(&directory)?;
    result
}

fn measure(directory: &Path, files: usize) -> Result<()> {
    let source = directory.join("source");
    plant(&source, files)?;
    let mut clone = Samples::per("us/inode", "clone_tree", files);
    let mut copy = Samples::per("us/inode", "read_and_write", files);
    let inodes = files + files.div_ceil(FILES_OF_A_DIRECTORY) + 1;
    // Run 0 fills the caches and does not count.
    for run in 0..=RUNS {
        stop::check()?;
        eprintln!("{files} files: run {run} of {RUNS}");
        let target = empty(directory)?;
        let (from, to) = (File::open(&source)?, File::open(&target)?);
        let report = clone.share(run > 0, inodes, || clone_tree(from.as_fd(), to.as_fd(), |_| {}))?;
        if !report.is_complete() {
            return Err(format!("the clone is not complete: {report:?}").into());
        }
        let target = empty(directory)?;
        copy.share(run > 0, inodes, || copy_tree(&source, &target))?;
    }
    clone.print();
    copy.print();
    Ok(fs::remove_dir_all(source)?)
}

fn plant(source: &Path, files: usize) -> Result<()> {
    fs::create_dir(source)?;
    for n in 0..files {
        let directory = source.join(format!("{}", n / FILES_OF_A_DIRECTORY));
        if n.is_multiple_of(FILES_OF_A_DIRECTORY) {
            stop::check()?;
            fs::create_dir(&directory)?;
        }
        fs::write(directory.join(format!("{n}")), [n as u8; FILE_BYTES])?;
    }
    Ok(syncfs(File::open(source)?)?)
}

/// Creates an empty directory for the next run, and writes back the dirty data of the run before.
fn empty(directory: &Path) -> Result<PathBuf> {
    let target = directory.join("target");
    if target.exists() {
        fs::remove_dir_all(&target)?;
    }
    fs::create_dir(&target)?;
    syncfs(File::open(directory)?)?;
    Ok(target)
}

/// Copies content, owner, mode and times, the minimum of any copy. `std::fs::copy` is not used, because it would share blocks.
fn copy_tree(source: &Path, target: &Path) -> Result<()> {
    let mut content = vec![0; FILE_BYTES];
    for entry in fs::read_dir(source)? {
        let entry = entry?;
        let (from, to) = (entry.path(), target.join(entry.file_name()));
        let status = entry.metadata()?;
        let made = if status.is_dir() {
            fs::create_dir(&to)?;
            copy_tree(&from, &to)?;
            File::open(&to)?
        } else {
            File::open(&from)?.read_exact(&mut content)?;
            let mut made = File::create_new(&to)?;
            made.write_all(&content)?;
            made
        };
        fchown(&made, Some(status.uid()), Some(status.gid()))?;
        made.set_permissions(status.permissions())?;
        made.set_times(FileTimes::new().set_accessed(status.accessed()?).set_modified(status.modified()?))?;
    }
    Ok(())
}

//! Many empty files in a volume.

use std::fs::File;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use nix::sys::stat::{Mode, SFlag, mknodat};

use crate::Result;

/// The number of files in a directory, as users have it.
const IN_EACH: usize = 1000;
/// The number of directories between two progress lines.
const REPORT_INTERVAL: usize = 50;

/// Returns the number of directories for this number of files.
pub(crate) fn directories(files: usize) -> usize {
    files.div_ceil(IN_EACH)
}

/// Creates the files with one thread per processor, because creating a million takes some time.
pub(crate) fn create(volume: &Path, files: usize) -> Result<()> {
    let threads = std::thread::available_parallelism()?.get();
    let all = directories(files);
    let created = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        let create = |first: usize| {
            for directory in (first..all).step_by(threads) {
                fill(&volume.join(directory.to_string()), IN_EACH.min(files - directory * IN_EACH))?;
                let created = created.fetch_add(1, Ordering::Relaxed) + 1;
                if created.is_multiple_of(REPORT_INTERVAL) {
                    eprintln!("created {created} of {all} directories");
                }
            }
            std::io::Result::Ok(())
        };
        let threads: Vec<_> = (0..threads).map(|first| scope.spawn(move || create(first))).collect();
        for thread in threads {
            thread.join().map_err(|_panic| "a thread that creates files panicked")??;
        }
        Ok(())
    })
}

fn fill(directory: &Path, files: usize) -> std::io::Result<()> {
    std::fs::create_dir(directory)?;
    let at = File::open(directory)?;
    for file in 0..files {
        // mknod(2) is one system call; open(2) and close(2) would be two.
        mknodat(&at, file.to_string().as_str(), SFlag::S_IFREG, Mode::S_IRUSR, 0)?;
    }
    Ok(())
}

//! Many empty files in a volume.

use std::fs::File;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use nix::sys::stat::{Mode, SFlag, mknodat};

use crate::Result;

/// Directories of a size that people have.
const IN_EACH: usize = 1000;
/// How many of them are made between two lines that say so.
const TOLD: usize = 50;

/// How many directories so many files are in.
pub(crate) fn directories(files: usize) -> usize {
    files.div_ceil(IN_EACH)
}

/// Makes them from as many threads as there are processors: a million take their time.
pub(crate) fn make(volume: &Path, files: usize) -> Result<()> {
    let threads = std::thread::available_parallelism()?.get();
    let all = directories(files);
    let made = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        let make = |first: usize| {
            for directory in (first..all).step_by(threads) {
                fill(&volume.join(directory.to_string()), IN_EACH.min(files - directory * IN_EACH))?;
                let made = made.fetch_add(1, Ordering::Relaxed) + 1;
                if made.is_multiple_of(TOLD) {
                    eprintln!("made {made} of {all} directories");
                }
            }
            std::io::Result::Ok(())
        };
        let makers: Vec<_> = (0..threads).map(|first| scope.spawn(move || make(first))).collect();
        for maker in makers {
            maker.join().map_err(|_panic| "a thread that makes files has panicked")??;
        }
        Ok(())
    })
}

fn fill(directory: &Path, files: usize) -> std::io::Result<()> {
    std::fs::create_dir(directory)?;
    let at = File::open(directory)?;
    for file in 0..files {
        // One system call, where open and close would be two.
        mknodat(&at, file.to_string().as_str(), SFlag::S_IFREG, Mode::S_IRUSR, 0)?;
    }
    Ok(())
}

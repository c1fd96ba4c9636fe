//! The size of a volume as its user sees it, and the moment at which it changes.

use std::fs::File;
use std::io::{Seek, SeekFrom};
use std::thread;
use std::time::Duration;

use nix::sys::statvfs::statvfs;

use crate::volume::{Checked, Volume, named};

/// The interval between two reads of the size. The output lags behind the expansion by at most little more
/// than this. Shorter intervals would take the processor from the programs that expand the volume.
const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// Prints the size of the volume in bytes when the watch begins, and once more when the size has changed.
pub(crate) fn watch(volume: &Volume) -> Checked {
    // The device stays open, as in a program that uses it.
    let mut device = match volume {
        Volume::Block(path) => Some(File::open(path).map_err(|e| named("open", e))?),
        Volume::Writable(_) | Volume::Readonly(_) => None,
    };
    let mut size = || match &mut device {
        Some(device) => device.seek(SeekFrom::End(0)).map_err(|e| named("ask for the size", e)),
        None => {
            let stat = statvfs(volume.path()).map_err(|e| named("statfs", e.into()))?;
            Ok(stat.blocks() * stat.fragment_size())
        }
    };
    let before = size()?;
    println!("{before}");
    let mut now = before;
    while now == before {
        thread::sleep(POLL_INTERVAL);
        now = size()?;
    }
    println!("{now}");
    Ok(())
}

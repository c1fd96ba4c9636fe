//! The size of a volume as its user sees it, and the moment at which it changes.

use std::fs::File;
use std::io::{Seek, SeekFrom};
use std::path::Path;
use std::thread;
use std::time::Duration;

use nix::sys::statvfs::statvfs;

use crate::volume::{Checked, Volume, named};

/// The interval between two reads of the size. The output lags behind the expansion by at most little more
/// than this. Shorter intervals would take the processor from the programs that expand the volume.
const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// Prints the size of the volume in bytes when the watch begins, and once more when the size has changed.
pub(crate) fn watch(volume: &Volume) -> Checked {
    let mut size = size_of(volume)?;
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

/// Returns a function that reads the current size at each call.
fn size_of(volume: &Volume) -> Checked<Box<dyn FnMut() -> Checked<u64>>> {
    let path = volume.path().to_owned();
    Ok(match volume {
        // The device stays open, as in a program that uses it.
        Volume::Block(_) => {
            let mut device = File::open(&path).map_err(|e| named("open", e))?;
            Box::new(move || device.seek(SeekFrom::End(0)).map_err(|e| named("ask for the size", e)))
        }
        Volume::Writable(_) | Volume::Readonly(_) => Box::new(move || mounted_size(&path)),
    })
}

fn mounted_size(path: &Path) -> Checked<u64> {
    let stat = statvfs(path).map_err(|e| named("statfs", e.into()))?;
    Ok(stat.blocks() * stat.fragment_size())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn size_of_follows_an_expanded_image() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("image");
        let image = File::create(&path).unwrap();
        image.set_len(4096).unwrap();
        let mut size = size_of(&Volume::Block(path)).unwrap();
        assert_eq!(size().unwrap(), 4096);
        image.set_len(8192).unwrap();
        assert_eq!(size().unwrap(), 8192);
    }
}

//! The moment at which a volume grows, as its user sees it.

use std::fs::File;
use std::io::{Seek, SeekFrom};
use std::path::Path;
use std::thread;
use std::time::Duration;

use nix::sys::statvfs::statvfs;

use crate::volume::{Checked, Volume, named};

/// What is told comes later than the growth by at most this, and a little. Whoever asks more often takes the processor from those who
/// make it grow.
const LOOK: Duration = Duration::from_millis(1);

/// Says the size of the volume, in bytes, as soon as it is watched, and once more when it is another.
pub(crate) fn tell(volume: &Volume) -> Checked {
    let mut size = size_of(volume)?;
    let before = size()?;
    println!("{before}");
    let mut now = before;
    while now == before {
        thread::sleep(LOOK);
        now = size()?;
    }
    println!("{now}");
    Ok(())
}

/// Asks for the size as often as it is called.
fn size_of(volume: &Volume) -> Checked<Box<dyn FnMut() -> Checked<u64>>> {
    let path = volume.path().to_owned();
    Ok(match volume {
        // Open all the time, as a program that uses it has it.
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
    fn an_image_that_grows_is_seen_to_grow() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("image");
        let image = File::create(&path).unwrap();
        image.set_len(4096).unwrap();
        let mut size = size_of(&Volume::Block(path)).unwrap();
        assert_eq!(size().unwrap(), 4096);
        image.set_len(8192).unwrap();
        assert_eq!(size().unwrap(), 8192);
    }

    #[test]
    fn a_mounted_volume_has_the_size_of_its_file_system() {
        let dir = tempfile::tempdir().unwrap();
        let mut size = size_of(&Volume::Writable(dir.path().to_owned())).unwrap();
        assert_eq!(size().unwrap(), mounted_size(dir.path()).unwrap());
        assert!(size_of(&Volume::Block(dir.path().join("none"))).is_err());
    }
}

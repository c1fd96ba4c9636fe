//! Finds disks by the names that the host assigned (virtio-blk serial numbers).

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Result;

/// A driver may bind shortly after its module was loaded. Without udev, no event announces it.
const APPEARS_WITHIN: Duration = Duration::from_secs(20);

/// Returns the device node of the disk called `name`.
pub(super) fn find(name: &str) -> Result<PathBuf> {
    let deadline = Instant::now() + APPEARS_WITHIN;
    loop {
        if let Some(path) = look(Path::new("/sys/block"), name) {
            return Ok(path);
        }
        anyhow::ensure!(Instant::now() < deadline, "no disk is called {name}; is virtio_blk loaded?");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn look(blocks: &Path, name: &str) -> Option<PathBuf> {
    std::fs::read_dir(blocks).ok()?.flatten().find_map(|block| {
        let serial = std::fs::read_to_string(block.path().join("serial")).ok()?;
        (serial.trim() == name).then(|| PathBuf::from("/dev").join(block.file_name()))
    })
}

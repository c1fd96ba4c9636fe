//! Finds disks and virtio ports by the names that the host assigned.

use std::fs::{self, File, OpenOptions};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

/// A driver may bind shortly after its module was loaded. Without udev, no event announces it.
const APPEARS_WITHIN: Duration = Duration::from_secs(20);
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// Returns the device node of the disk called `name`, which is its virtio-blk serial number.
pub(super) fn disk(name: &str) -> Result<PathBuf> {
    let found = find("/sys/block", "serial", name);
    found.with_context(|| format!("no disk is called {name}; is virtio_blk loaded?"))
}

/// Opens the virtio port called `name`.
pub(super) fn port(name: &str) -> Result<File> {
    let path = find("/sys/class/virtio-ports", "name", name);
    let path = path.with_context(|| format!("no virtio port is called {name}; is virtio_console loaded?"))?;
    let port = OpenOptions::new().read(true).write(true).open(&path);
    port.with_context(|| format!("open the port {name} at {}", path.display()))
}

/// Waits for the device of `directory` whose attribute has the value `name`, and returns its node.
fn find(directory: &str, attribute: &str, name: &str) -> Option<PathBuf> {
    let deadline = Instant::now() + APPEARS_WITHIN;
    loop {
        let found = fs::read_dir(directory).into_iter().flatten().flatten().find_map(|device| {
            let value = fs::read_to_string(device.path().join(attribute)).ok()?;
            (value.trim() == name).then(|| PathBuf::from("/dev").join(device.file_name()))
        });
        if found.is_some() || Instant::now() > deadline {
            return found;
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

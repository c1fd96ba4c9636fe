//! Opens virtio ports by the names that the host assigned.

use std::fs::{File, OpenOptions};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

const PORTS: &str = "/sys/class/virtio-ports";

/// A driver may bind shortly after its module was loaded. Without udev, no event announces it.
const APPEARS_WITHIN: Duration = Duration::from_secs(20);

/// Opens the port called `name`.
pub(super) fn open(name: &str) -> Result<File> {
    let deadline = Instant::now() + APPEARS_WITHIN;
    loop {
        if let Some(path) = find(name) {
            return OpenOptions::new()
                .read(true)
                .write(true)
                .open(&path)
                .with_context(|| format!("open the port {name} at {}", path.display()));
        }
        anyhow::ensure!(
            Instant::now() < deadline,
            "no virtio port is called {name}; is virtio_console loaded?"
        );
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn find(name: &str) -> Option<PathBuf> {
    std::fs::read_dir(PORTS).ok()?.flatten().find_map(|port| {
        let given = std::fs::read_to_string(port.path().join("name")).ok()?;
        (given.trim() == name).then(|| PathBuf::from("/dev").join(port.file_name()))
    })
}

//! The free space of the host's file systems, checked before work that would fail late without it.

use std::path::Path;

use anyhow::{Context, Result};
use nix::sys::statvfs::statvfs;

/// The space that a build may take: a root file system as a tar file and as an image, or the programs of Kubernetes.
pub(crate) const BUILD_MIB: u64 = 2048;
/// The space that the disks of a machine may take.
pub(crate) const BOOT_MIB: u64 = 512;

/// Returns the space that this user can still write to the file system of `directory`.
pub(crate) fn free_mib(directory: &Path) -> Result<u64> {
    let found = statvfs(directory).with_context(|| format!("statvfs {}", directory.display()))?;
    Ok((found.blocks_available() * found.fragment_size()) >> 20)
}

/// Checks that the file system of `directory` has space for work that may take `needed_mib`.
pub(crate) fn require(directory: &Path, needed_mib: u64) -> Result<()> {
    let free = free_mib(directory)?;
    anyhow::ensure!(
        free >= needed_mib,
        "write to {}: its file system has {free} MiB free, and {needed_mib} MiB may be needed; free space there",
        directory.display()
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filesystem_with_insufficient_space_is_refused() {
        let free = free_mib(Path::new("/")).unwrap();
        require(Path::new("/"), 0).unwrap();
        // Others write to this file system, too, so the need is far above what is free.
        let error = require(Path::new("/"), free * 2 + 1024).unwrap_err().to_string();
        assert!(
            error.starts_with("write to /: its file system has ") && error.contains("MiB may be needed"),
            "{error}"
        );
    }
}

//! Files that only their owner can read.

use std::fs::{self, DirBuilder, OpenOptions, Permissions};
use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;

use anyhow::{Context, Result};
use testvm::cache::remove_file;

/// Writes a file that only its owner can read, from the moment it is created.
pub(crate) fn write_private(path: &Path, text: &str) -> Result<()> {
    remove_file(path)?;
    let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
    file.and_then(|mut file| file.write_all(text.as_bytes()))
        .with_context(|| format!("write {}", path.display()))
}

pub(crate) fn create_private_dir(path: &Path) -> Result<()> {
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(path)
        .and_then(|()| fs::set_permissions(path, Permissions::from_mode(0o700)))
        .with_context(|| format!("create {}", path.display()))
}

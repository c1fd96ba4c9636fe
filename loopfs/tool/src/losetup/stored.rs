//! The attachments that `-j` stores between calls.

use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};

use loopfs::loop_device::{Attachments, BackingFile};

/// Where the attachments are stored between calls.
const DIRECTORY: &str = "/run/loopfs";
const ATTACHMENTS: &str = "/run/loopfs/attachments";

/// Returns the devices of a file. Without a usable store, the function asks each device.
pub(crate) fn devices_of(file: &BackingFile) -> loopfs::Result<Vec<u32>> {
    let stored = stored_attachments();
    let mut attachments = stored.clone();
    let devices = attachments.devices_of(*file)?;
    if attachments != stored {
        // The store only saves time, so a failure is ignored.
        store_attachments(&attachments.to_text()).ok();
    }
    Ok(devices)
}

fn stored_attachments() -> Attachments {
    let read = || {
        let file = std::fs::File::open(ATTACHMENTS)?;
        let status = file.metadata()?;
        let own = nix::unistd::geteuid().as_raw();
        // A file that another user can write proves nothing.
        if status.uid() != own || status.mode() & 0o022 != 0 {
            return Err(std::io::ErrorKind::PermissionDenied.into());
        }
        std::io::read_to_string(file)
    };
    read().map_or_else(|_error: std::io::Error| Attachments::default(), |text| Attachments::from_text(&text))
}

fn store_attachments(text: &str) -> std::io::Result<()> {
    std::fs::DirBuilder::new().mode(0o700).recursive(true).create(DIRECTORY)?;
    // Each process writes a file of its own, and the rename replaces the store in one step.
    let new = format!("{ATTACHMENTS}.{}", std::process::id());
    let mut file = std::fs::File::options().write(true).create(true).truncate(true).mode(0o600).open(&new)?;
    file.write_all(text.as_bytes())?;
    std::fs::rename(&new, ATTACHMENTS)
}

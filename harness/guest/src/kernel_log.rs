//! Writes to the kernel's log, which reaches the console in whole lines.

use std::fs::OpenOptions;
use std::io::Write;

use anyhow::{Context, Result};

pub(super) const DEVICE: &str = "/dev/kmsg";

/// The severity of a line: the least that a message about a fault has. The console shows lines of this severity only if it shows
/// those messages too.
const NOTICE: u8 = 5;

/// Writes a line.
pub(super) fn write(line: &str) -> Result<()> {
    let mut device = OpenOptions::new().write(true).open(DEVICE).with_context(|| format!("open {DEVICE}"))?;
    // The kernel takes one line in one write.
    device.write_all(format!("<{NOTICE}>{line}\n").as_bytes()).with_context(|| format!("write to {DEVICE}"))
}

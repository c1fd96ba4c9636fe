//! Reads files of the kernel and of the node.

use std::fs;
use std::path::Path;

/// Reads a file, without space at its end.
pub(super) fn text(path: impl AsRef<Path>) -> Option<String> {
    let text = fs::read(path).ok()?;
    Some(String::from_utf8_lossy(&text).trim_end().to_owned())
}

/// Returns the index of a loop device by its name in sysfs.
pub(super) fn loop_index(name: &str) -> Option<u32> {
    let index = name.strip_prefix("loop")?;
    index.bytes().all(|byte| byte.is_ascii_digit()).then(|| index.parse().ok())?
}

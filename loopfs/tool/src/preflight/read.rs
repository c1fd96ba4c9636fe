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

/// Returns the names of the loop devices in `/sys/block`, by their index.
pub(super) fn loop_devices(block: &Path) -> Vec<String> {
    let entries = fs::read_dir(block).into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    let mut names: Vec<_> = names.filter(|name| loop_index(name).is_some()).collect();
    names.sort_unstable_by_key(|name| loop_index(name));
    names
}

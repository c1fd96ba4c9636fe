//! Paths in commands that people copy into a shell.

use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Returns the path as a word of a POSIX shell: in quotes if it has characters that are special there. Bytes that are not UTF-8
/// are replaced, as in all messages.
pub(crate) fn quoted(path: &Path) -> String {
    // The only error is a NUL, which no path of the kernel has.
    match shlex::bytes::try_quote(path.as_os_str().as_bytes()) {
        Ok(word) => String::from_utf8_lossy(&word).into_owned(),
        Err(_) => path.display().to_string(),
    }
}

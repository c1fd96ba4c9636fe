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

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("/var/lib/loopfs/data", "/var/lib/loopfs/data")]
    #[case("/mnt/a b", "'/mnt/a b'")]
    #[case("/mnt/$(reboot)", "'/mnt/$(reboot)'")]
    #[case("/mnt/it's", "\"/mnt/it's\"")]
    fn only_special_characters_need_quotes(#[case] path: &str, #[case] expected: &str) {
        assert_eq!(quoted(Path::new(path)), expected);
    }
}

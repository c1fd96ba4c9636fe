//! Numbers in text form.

use std::str::FromStr;

use loopfs::Bytes;

/// Parses a number that consists of digits only. `str::parse` would accept a sign too.
pub(crate) fn number<T: FromStr>(text: &str) -> Option<T> {
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok()).flatten()
}

/// Parses sizes such as `4096` or `4MiB`.
pub(crate) fn parse(text: &str) -> Result<u64, String> {
    text.parse().map(|Bytes(bytes)| bytes).map_err(|error: loopfs::ParseBytesError| error.to_string())
}

/// Formats a size in its largest unit.
pub(crate) fn show(bytes: u64) -> String {
    format!("{:#}", Bytes(bytes))
}

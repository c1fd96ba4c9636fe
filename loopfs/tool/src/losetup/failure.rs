//! Messages on standard error.

use std::ffi::OsStr;
use std::io;

/// The name of the program in messages.
pub(crate) const NAME: &str = "losetup";

/// A message on standard error.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct LosetupFailure {
    /// `None` prints nothing.
    text: Option<String>,
    errno: Option<i32>,
    /// Refers to the help.
    usage: bool,
}

impl LosetupFailure {
    pub(crate) fn message(text: impl Into<String>) -> Self {
        Self { text: Some(text.into()), ..Self::default() }
    }

    pub(crate) fn usage(text: impl Into<String>) -> Self {
        Self { usage: true, ..Self::message(text) }
    }

    pub(crate) fn os(text: impl Into<String>, errno: i32) -> Self {
        Self { errno: Some(errno), ..Self::message(text) }
    }

    pub(crate) fn of(text: impl Into<String>, error: &loopfs::Error) -> Self {
        match error.errno() {
            Some(errno) => Self::os(text, errno),
            None => Self::message(format!("{}: {error}", text.into())),
        }
    }

    pub(crate) fn silent() -> Self {
        Self::default()
    }

    pub(crate) fn print(&self) {
        let Some(text) = &self.text else { return };
        match self.errno {
            Some(errno) => eprintln!("{NAME}: {text}: {}", describe(errno)),
            None => eprintln!("{NAME}: {text}"),
        }
        if self.usage {
            eprintln!("Try '{NAME} --help' for more information.");
        }
    }
}

/// Returns the text of strerror(3).
fn describe(errno: i32) -> String {
    let text = io::Error::from_raw_os_error(errno).to_string();
    let suffix = format!(" (os error {errno})");
    text.strip_suffix(&suffix).unwrap_or(&text).to_owned()
}

/// Returns an argument as text for a message.
pub(crate) fn os_text(text: &OsStr) -> String {
    text.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The kernel returns errnos that no header names, such as ENOTSUPP.
    #[test]
    fn an_unknown_errno_keeps_its_number() {
        assert_eq!(describe(524), "Unknown error 524");
    }
}

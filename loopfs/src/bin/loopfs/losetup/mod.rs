//! `loopfs losetup`, also under the program name `losetup`: a replacement for losetup(8) of util-linux with its options, output
//! and exit codes. It is written from the manual and from the behaviour of the program, not from its source.

mod arguments;
mod columns;
mod commands;
mod help;
mod options;
mod size;

use std::ffi::{OsStr, OsString};
use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::process::ExitCode;

use loopfs::loop_device::{Attachments, BackingFile};

/// The name of the program in messages.
pub(crate) const NAME: &str = "losetup";

/// A message on standard error.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Failure {
    /// `None` prints nothing.
    text: Option<String>,
    errno: Option<i32>,
    /// Refers to the help.
    usage: bool,
}

impl Failure {
    fn message(text: impl Into<String>) -> Self {
        Self { text: Some(text.into()), ..Self::default() }
    }

    fn usage(text: impl Into<String>) -> Self {
        Self { usage: true, ..Self::message(text) }
    }

    fn os(text: impl Into<String>, errno: i32) -> Self {
        Self { errno: Some(errno), ..Self::message(text) }
    }

    fn of(text: impl Into<String>, error: &loopfs::Error) -> Self {
        match error.errno() {
            Some(errno) => Self::os(text, errno),
            None => Self::message(format!("{}: {error}", text.into())),
        }
    }

    fn silent() -> Self {
        Self::default()
    }

    fn print(&self) {
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
    let text = std::io::Error::from_raw_os_error(errno).to_string();
    let suffix = format!(" (os error {errno})");
    text.strip_suffix(&suffix).unwrap_or(&text).to_owned()
}

/// Returns an argument as text for a message.
fn os_text(text: &OsStr) -> String {
    text.to_string_lossy().into_owned()
}

/// Returns `true` if the program was called by the name `losetup`.
pub(crate) fn is_program_name(program: &OsStr) -> bool {
    Path::new(program).file_name() == Some(OsStr::new(NAME))
}

/// Runs losetup with the arguments that follow its name.
pub(crate) fn main(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    let outcome = match arguments::parse(args).and_then(|request| commands::run(&request)) {
        Ok(outcome) => outcome,
        Err(failure) => {
            failure.print();
            return ExitCode::FAILURE;
        }
    };
    let mut stdout = std::io::stdout().lock();
    let written = stdout.write_all(&outcome.stdout).and_then(|()| stdout.flush());
    outcome.warnings.iter().for_each(Failure::print);
    match written {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
            eprintln!("{NAME}: write error: {error}");
            ExitCode::FAILURE
        }
        _ if outcome.failed => ExitCode::FAILURE,
        _ => ExitCode::SUCCESS,
    }
}

/// Where the attachments are stored between calls.
const DIRECTORY: &str = "/run/loopfs";
const ATTACHMENTS: &str = "/run/loopfs/attachments";

/// Returns the devices of a file. Without a usable store, the function asks each device.
fn devices_of(file: &BackingFile) -> loopfs::Result<Vec<u32>> {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_errno_has_the_text_of_the_c_library() {
        assert_eq!(describe(2), "No such file or directory");
        assert_eq!(describe(6), "No such device or address");
    }

    #[test]
    fn the_name_of_the_program_selects_losetup() {
        assert!(is_program_name("/usr/sbin/losetup".as_ref()) && is_program_name("losetup".as_ref()));
        assert!(!is_program_name("/usr/bin/loopfs".as_ref()));
    }
}

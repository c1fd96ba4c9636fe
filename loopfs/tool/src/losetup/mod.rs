//! `loopfs losetup`, also under the program name `losetup`: a replacement for losetup(8) of util-linux with its options, output
//! and exit codes. It is written from the manual and from the behaviour of the program, not from its source.

mod arguments;
mod columns;
mod commands;
mod failure;
mod help;
mod options;
mod size;
mod stored;

use std::ffi::{OsStr, OsString};
use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

use failure::LosetupFailure;
pub(crate) use failure::NAME;

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
    outcome.warnings.iter().for_each(LosetupFailure::print);
    match written {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
            eprintln!("{NAME}: write error: {error}");
            ExitCode::FAILURE
        }
        _ if outcome.failed => ExitCode::FAILURE,
        _ => ExitCode::SUCCESS,
    }
}

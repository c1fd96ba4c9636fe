//! The command line that benchmarks share: the subject of the measurement, its directory, and its length.

use std::path::Path;
use std::process::{Command, ExitCode};

use crate::stop;

pub(crate) type Result<T, E = Box<dyn std::error::Error>> = std::result::Result<T, E>;

/// The length of a run.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Size {
    Full,
    Quick,
}

/// The name of a measurement and the function that runs it in a directory.
pub(crate) type Subject = (&'static str, fn(&Path, Size) -> Result<()>);

pub(crate) fn run<const N: usize>(subjects: [Subject; N]) -> ExitCode {
    // Cargo itself adds `--bench`.
    let args: Vec<String> = std::env::args().skip(1).filter(|arg| arg != "--bench").collect();
    let size = if args.iter().any(|arg| arg == "--quick") { Size::Quick } else { Size::Full };
    let words: Vec<&str> = args.iter().map(String::as_str).filter(|arg| !arg.starts_with("--")).collect();
    stop::on_signals();
    let subject = match words[..] {
        [name, directory] => subjects.iter().find(|(of, _)| *of == name).map(|(_, run)| (run, directory)),
        _ => None,
    };
    let result = match subject {
        Some((run, directory)) => run(Path::new(directory), size),
        None => {
            let known = subjects.map(|(name, _)| format!("`{name} DIRECTORY`")).join(" or ");
            Err(format!("give {known}, and --quick for a short run").into())
        }
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Runs a program and returns its output.
pub(crate) fn output(command: &mut Command) -> Result<Vec<u8>> {
    let output = command.output().map_err(|error| format!("{}: {error}", command.get_program().display()))?;
    match output.status.success() {
        true => Ok(output.stdout),
        false => Err(format!("{command:?}: {}", String::from_utf8_lossy(&output.stderr)).into()),
    }
}

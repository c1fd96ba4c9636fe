//! The execution of a program that is on a volume.

use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::{fmt, fs, io};

use crate::volume::{Checked, named};

/// The result of the execution of a program.
#[derive(Debug)]
pub(crate) enum Execution {
    NotStarted(io::Error),
    Exited(i32),
    /// A signal killed it.
    Killed(i32),
}

impl fmt::Display for Execution {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Execution::NotStarted(error) => write!(f, "not started: {error}"),
            Execution::Exited(code) => write!(f, "executed: exit code {code}"),
            Execution::Killed(signal) => write!(f, "killed by signal {signal}"),
        }
    }
}

/// Copies this program to the directory, runs the copy, and prints the result.
pub(crate) fn copy_and_execute(directory: &Path) -> Checked {
    let program = std::env::current_exe().map_err(|e| named("find this program's own file", e))?;
    println!("{}", execute_copy(&program, &["show", "/"], directory)?);
    Ok(())
}

/// Runs a copy of `program` in the directory, and removes it.
fn execute_copy(program: &Path, args: &[&str], directory: &Path) -> Checked<Execution> {
    let copy = directory.join("program");
    fs::copy(program, &copy).map_err(|e| named(&format!("copy this program to {}", copy.display()), e))?;
    let status = Command::new(&copy).args(args).stdout(Stdio::null()).status();
    fs::remove_file(&copy).map_err(|e| named(&format!("remove {}", copy.display()), e))?;
    Ok(match status {
        Err(error) => Execution::NotStarted(error),
        Ok(status) => match status.code() {
            Some(code) => Execution::Exited(code),
            None => Execution::Killed(status.signal().unwrap_or_default()),
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    // One test for all, because a process that another thread starts in the meantime could hold the copy open for writing
    // (ETXTBSY).
    #[test]
    fn a_copy_is_executed_and_removed() {
        let dir = tempfile::tempdir().unwrap();
        let text = dir.path().join("text");
        fs::write(&text, "").unwrap();
        let shell = Path::new("/bin/sh");
        for (program, script, expected) in [
            (shell, "exit 0", "executed: exit code 0"),
            (shell, "exit 3", "executed: exit code 3"),
            (shell, "kill -SEGV $$", "killed by signal 11"),
            (text.as_path(), "", "not started: Permission denied (os error 13)"),
        ] {
            let target = tempfile::tempdir().unwrap();
            let execution = execute_copy(program, &["-c", script], target.path()).unwrap();
            assert_eq!(execution.to_string(), expected);
            assert_eq!(fs::read_dir(target.path()).unwrap().count(), 0);
        }
    }

    #[test]
    fn nonexistent_directory_is_refused() {
        let error = execute_copy(Path::new("/bin/sh"), &[], Path::new("/none")).unwrap_err();
        assert!(error.to_string().contains("/none/program"), "{error}");
    }
}

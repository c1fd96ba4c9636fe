//! The execution of a program that is on a volume.

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::volume::{Checked, named};

/// Copies this program to the directory, runs the copy, and prints the result.
pub(crate) fn copy_and_execute(directory: &Path) -> Checked {
    let program = std::env::current_exe().map_err(|e| named("find this program's own file", e))?;
    println!("{}", execute_copy(&program, &["read", "/proc/version"], directory)?);
    Ok(())
}

/// Runs a copy of `program` in the directory, and removes it. Returns what became of it.
fn execute_copy(program: &Path, args: &[&str], directory: &Path) -> Checked<String> {
    let copy = directory.join("program");
    fs::copy(program, &copy).map_err(|e| named(&format!("copy this program to {}", copy.display()), e))?;
    let status = Command::new(&copy).args(args).stdout(Stdio::null()).status();
    fs::remove_file(&copy).map_err(|e| named(&format!("remove {}", copy.display()), e))?;
    Ok(match status.map(|status| (status.code(), status.signal())) {
        Err(error) => format!("not started: {error}"),
        Ok((Some(code), _)) => format!("executed: exit code {code}"),
        Ok((None, signal)) => format!("killed by signal {}", signal.unwrap_or_default()),
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
            assert_eq!(execution, expected);
            assert_eq!(fs::read_dir(target.path()).unwrap().count(), 0);
        }
    }

    #[test]
    fn nonexistent_directory_is_refused() {
        let error = execute_copy(Path::new("/bin/sh"), &[], Path::new("/none")).unwrap_err();
        assert!(error.to_string().contains("/none/program"), "{error}");
    }
}

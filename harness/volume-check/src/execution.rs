//! The execution of a program that is on a volume.

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::volume::{Checked, named};

/// Copies this program to the directory, runs the copy, and prints what happened.
pub(crate) fn of_a_copy(directory: &Path) -> Checked {
    let copy = directory.join("program");
    let program = std::env::current_exe().map_err(|e| named("find this program's own file", e))?;
    fs::copy(program, &copy).map_err(|e| named(&format!("copy this program to {}", copy.display()), e))?;
    let status = Command::new(&copy).args(["show", "/"]).stdout(Stdio::null()).status();
    fs::remove_file(&copy).map_err(|e| named(&format!("remove {}", copy.display()), e))?;
    match status {
        Err(error) => println!("not started: {error}"),
        Ok(status) => match (status.code(), status.signal()) {
            (Some(code), _) => println!("executed: exit code {code}"),
            (None, signal) => println!("killed by signal {}", signal.unwrap_or_default()),
        },
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_copy_is_removed_also_where_it_runs() {
        let dir = tempfile::tempdir().unwrap();
        // The copy of a test program runs its tests, of which none is called `show`.
        of_a_copy(dir.path()).unwrap();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
        assert!(of_a_copy(&dir.path().join("none")).is_err());
    }
}

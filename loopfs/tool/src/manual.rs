//! `loopfs manual`: the man pages of this tool, and the completions of its commands for shells.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::Args;
use clap_complete::Shell;
use clap_mangen::Man;

use crate::output::{Output, object};

/// Administrators run most commands as root.
const SECTION: &str = "8";
const SHELLS: [Shell; 3] = [Shell::Bash, Shell::Fish, Shell::Zsh];

/// Write the man pages of this tool, and the completions of its commands for bash, fish and zsh
///
/// The man pages are loopfs.8 and one for each command, such as loopfs-quota-set.8. The completions are loopfs.bash, loopfs.fish and
/// _loopfs (for zsh). Files of these names are replaced. The Debian package has all of them.
///
/// JSON: {"files": [path]}
#[derive(Args, Debug)]
#[command(verbatim_doc_comment)]
pub(crate) struct Manual {
    /// The directory for the files, which is created if it does not exist
    directory: PathBuf,
}

impl Manual {
    /// Writes the files for `tool`.
    pub(crate) fn run(&self, mut tool: clap::Command) -> Result<Output> {
        let directory = &self.directory;
        std::fs::create_dir_all(directory).with_context(|| format!("create {}", directory.display()))?;
        let name = tool.get_name().to_owned();
        let mut files = Vec::new();
        for shell in SHELLS {
            let written = clap_complete::generate_to(shell, &mut tool, &name, directory);
            files.push(written.with_context(|| format!("write a completion in {}", directory.display()))?);
        }
        // Every command has `--help`, and pages about the command `help` would repeat it.
        let mut tool = tool.disable_help_subcommand(true);
        tool.build();
        write_pages(tool, directory, &mut files)?;
        files.sort();
        let files: Vec<String> = files.iter().map(|file| file.display().to_string()).collect();
        let text = files.iter().map(|file| format!("{file}\n")).collect();
        Ok(Output::new(text, &object! { files: files })?)
    }
}

/// Writes the pages of a command and of the commands below it.
fn write_pages(command: clap::Command, directory: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    for below in command.get_subcommands().filter(|below| !below.is_hide_set()) {
        write_pages(below.clone(), directory, files)?;
    }
    let page = Man::new(command).section(SECTION);
    let file = directory.join(page.get_filename());
    page.generate_to(directory).with_context(|| format!("write {}", file.display()))?;
    files.push(file);
    Ok(())
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;
    use crate::Args as Tool;

    #[test]
    fn commands_have_pages_and_completions() {
        let directory = tempfile::tempdir().unwrap();
        let manual = Manual { directory: directory.path().join("new") };
        let output = manual.run(Tool::command()).unwrap();
        let written = output.print(false);
        for name in ["loopfs.8", "loopfs-quota-set.8", "loopfs-data-dir-format.8", "loopfs-doctor.8"] {
            let page = std::fs::read_to_string(manual.directory.join(name)).unwrap();
            assert!(page.contains(".SH NAME") && page.contains(".SH SYNOPSIS"), "{page}");
            assert!(written.contains(name), "{written}");
        }
        for name in ["loopfs.bash", "loopfs.fish", "_loopfs"] {
            let completion = std::fs::read_to_string(manual.directory.join(name)).unwrap();
            assert!(completion.contains("data-dir"), "{name}");
        }
    }
}

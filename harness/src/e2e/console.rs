//! The blocks of commands in the documents, as a reader pastes them.

use anyhow::{Context, Result};

/// The fence of a block of commands.
const FENCE: &str = "```console";

/// Returns the commands of the first block below a heading.
pub(super) fn below(document: &str, heading: &str) -> Result<String> {
    let (_, section) =
        document.split_once(heading).with_context(|| format!("there is no heading {heading:?}"))?;
    let block = blocks(section).into_iter().next().context("there is no block of commands below it")?;
    commands(&block)
}

/// Returns the commands of the block that begins with this line.
pub(super) fn beginning_with(document: &str, first: &str) -> Result<String> {
    let block = blocks(document).into_iter().find(|block| block.first().is_some_and(|line| *line == first));
    commands(&block.with_context(|| format!("no block of commands begins with {first:?}"))?)
}

/// Returns the lines of each block of commands, without the indentation of the block.
fn blocks(document: &str) -> Vec<Vec<&str>> {
    let mut blocks = Vec::new();
    let mut lines = document.lines();
    while let Some(line) = lines.next() {
        if line.trim() == FENCE {
            let indentation = line.len() - line.trim_start().len();
            let block = lines.by_ref().take_while(|line| line.trim() != "```");
            blocks.push(block.map(|line| line.get(indentation..).unwrap_or_default()).collect());
        }
    }
    blocks
}

/// Returns the commands of a block without their prompts: `#` for root and `$` for any user. A line that begins with a space
/// continues the one before.
fn commands(block: &[&str]) -> Result<String> {
    let line = |line: &&str| match line.strip_prefix("# ").or_else(|| line.strip_prefix("$ ")) {
        Some(command) => Ok(command.to_owned()),
        None if line.starts_with(' ') => Ok((*line).to_owned()),
        None => anyhow::bail!("{line:?} begins with no prompt"),
    };
    let commands = block.iter().map(line).collect::<Result<Vec<_>>>()?;
    anyhow::ensure!(!commands.is_empty(), "the block of commands is empty");
    Ok(commands.join("\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const DOCUMENT: &str = "## Other\n```console\n$ no\n```\n## Run on kind\nText.\n\n```console\n# mount\n$ kind create\n```\n\
                            1. List:\n\n   ```console\n   # if true; then\n       echo\n     fi\n   ```\n";

    #[test]
    fn the_commands_of_a_block_lose_their_prompts() {
        assert_eq!(below(DOCUMENT, "## Run on kind").unwrap(), "mount\nkind create");
        assert_eq!(beginning_with(DOCUMENT, "$ no").unwrap(), "no");
    }

    #[test]
    fn an_indented_block_keeps_the_lines_that_continue_a_command() {
        let commands = beginning_with(DOCUMENT, "# if true; then").unwrap();
        assert_eq!(commands, "if true; then\n    echo\n  fi");
    }

    #[test]
    fn a_line_without_a_prompt_is_an_error() {
        let error = below("## Run on kind\n```console\n$ a\nb\n```\n", "## Run on kind").unwrap_err();
        assert_eq!(error.to_string(), "\"b\" begins with no prompt");
        assert!(below("# Title\n", "## Run on kind").is_err());
        assert!(beginning_with(DOCUMENT, "$ kind create").is_err());
    }
}

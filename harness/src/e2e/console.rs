//! The blocks of commands in the documents, pasted on a machine with kind as a reader pastes them.
//! `harness/book/tests/book/commands.toml` has the other blocks of the documents, with what runs them.

use std::time::Duration;

use anyhow::{Context, Result};
use testvm::session::Session;
use testvm::steps::{StepResult, Steps};
use testvm_cluster::kind::KindMachine;

/// The fence of a block of commands.
const FENCE: &str = "```console";
/// The path in the checkout of the tool `loopfs`.
pub(super) const TOOL: &str = "target/release/loopfs";
/// The container that is the node of kind's cluster.
pub(super) const NODE: &str = "kind-control-plane";
/// The time for one block. An emulated node pulls no image, but it starts pods.
pub(super) const TIMEOUT: Duration = Duration::from_secs(900);

/// A block of commands.
pub(super) struct Block {
    pub(super) document: &'static str,
    /// Its first line, by which it is found.
    pub(super) begins: &'static str,
    pub(super) place: Place,
    /// Commands that bring about what the document supposes, run on the machine.
    pub(super) before: &'static str,
    /// What the reader has to fill in, and what the test does.
    pub(super) filled_in: &'static [(&'static str, &'static str)],
    /// What the output must contain.
    pub(super) shows: &'static [&'static str],
}

/// Where a reader runs the commands.
#[derive(Clone, Copy)]
pub(super) enum Place {
    /// The checkout on the machine with kubectl and kind, which also stands for a node before Kubernetes is installed.
    Checkout,
    /// The home directory of root on that machine.
    Home,
    /// The home directory of root on the node of the cluster.
    Node,
}

impl Block {
    /// Returns a block that is pasted in the checkout as it is.
    pub(super) const fn new(document: &'static str, begins: &'static str) -> Block {
        Block { document, begins, place: Place::Checkout, before: "true", filled_in: &[], shows: &[] }
    }

    async fn paste(&self, session: &Session, machine: &KindMachine) -> Result<()> {
        let path = session.workspace.root().join(self.document);
        let text = std::fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
        machine.shell(self.before, TIMEOUT).await.context("before the block")?;
        let output = machine.shell(&self.script(&text)?, TIMEOUT).await?;
        for expected in self.shows {
            anyhow::ensure!(output.contains(expected), "the output has no {expected:?}:\n{output}");
        }
        Ok(())
    }

    /// Returns the commands as the reader runs them.
    fn script(&self, document: &str) -> Result<String> {
        let mut commands = beginning_with(document, self.begins)?;
        for (placeholder, value) in self.filled_in {
            anyhow::ensure!(commands.contains(placeholder), "{}: no {placeholder:?} to fill in", self.begins);
            commands = commands.replace(placeholder, value);
        }
        Ok(match self.place {
            Place::Checkout => commands,
            Place::Home => format!("cd /root\n{commands}"),
            Place::Node => on_node(&commands),
        })
    }
}

/// Returns commands of the machine that run these on the node. The first that fails ends them.
pub(super) fn on_node(commands: &str) -> String {
    format!(
        "docker exec --interactive --workdir /root {NODE} sh -e <<'END-OF-BLOCK'\n{commands}\nEND-OF-BLOCK"
    )
}

/// Pastes blocks in their order, each as a step.
pub(super) async fn paste_all(steps: &mut Steps<'_>, machine: &KindMachine, blocks: &[Block]) -> StepResult {
    for block in blocks {
        let title = format!("{}: {}", block.document, block.begins);
        let pasted = block.paste(steps.session(), machine);
        steps.step(&title, pasted).await?;
    }
    Ok(())
}

/// Returns the commands of the first block below a heading.
pub(super) fn below(document: &str, heading: &str) -> Result<String> {
    let (_, section) =
        document.split_once(heading).with_context(|| format!("there is no heading {heading:?}"))?;
    let block = blocks(section).into_iter().next().context("there is no block of commands below it")?;
    commands(&block)
}

/// Returns the commands of the block that begins with this line.
fn beginning_with(document: &str, first: &str) -> Result<String> {
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
pub(super) mod tests {
    use std::path::Path;

    use super::*;

    /// Checks that each block is in its document, and that nothing is left to fill in.
    pub(in crate::e2e) fn check(blocks: &[Block]) {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        for block in blocks {
            let document = std::fs::read_to_string(root.join(block.document)).unwrap();
            let script = block.script(&document).unwrap();
            assert!(
                !["...", "THE-", "API-SERVER", " NODE"].iter().any(|left| script.contains(left)),
                "{script}"
            );
        }
    }

    #[test]
    fn value_without_placeholder_is_refused() {
        let block = Block { filled_in: &[("NAME", "value")], ..Block::new("page", "$ a") };
        assert_eq!(
            block.script("```console\n$ a NAME\n```\n").unwrap_err().to_string(),
            "no block of commands begins with \"$ a\""
        );
        let block = Block { filled_in: &[("NAME", "value")], ..Block::new("page", "$ a NAME") };
        assert_eq!(block.script("```console\n$ a NAME\n```\n").unwrap(), "a value");
        let block = Block { filled_in: &[("OTHER", "value")], ..Block::new("page", "$ a NAME") };
        assert!(block.script("```console\n$ a NAME\n```\n").is_err());
    }

    const DOCUMENT: &str = "## Other\n```console\n$ no\n```\n## Run on kind\nText.\n\n```console\n# mount\n$ kind create\n```\n\
                            1. List:\n\n   ```console\n   # if true; then\n       echo\n     fi\n   ```\n";

    #[test]
    fn commands_lose_their_prompts() {
        assert_eq!(below(DOCUMENT, "## Run on kind").unwrap(), "mount\nkind create");
        assert_eq!(beginning_with(DOCUMENT, "$ no").unwrap(), "no");
    }

    #[test]
    fn indented_block_keeps_continuation_lines() {
        let commands = beginning_with(DOCUMENT, "# if true; then").unwrap();
        assert_eq!(commands, "if true; then\n    echo\n  fi");
    }

    #[test]
    fn line_without_prompt_is_refused() {
        let error = below("## Run on kind\n```console\n$ a\nb\n```\n", "## Run on kind").unwrap_err();
        assert_eq!(error.to_string(), "\"b\" begins with no prompt");
        assert!(below("# Title\n", "## Run on kind").is_err());
        assert!(beginning_with(DOCUMENT, "$ kind create").is_err());
    }
}

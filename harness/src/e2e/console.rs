//! The blocks of commands in the documents, pasted on a machine with kind as a reader pastes them.
//! `commands.toml` has the other blocks of the documents, with the reasons why nothing pastes them.

use std::time::Duration;

use anyhow::{Context, Result};
use testvm::session::Session;
use testvm::steps::{StepResult, Steps};
use testvm_cluster::kind::KindMachine;

/// The language of blocks with commands.
const LANGUAGE: &str = "console";
/// What begins a block, followed by its language, and ends it.
const FENCE: &str = "```";
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
    pub(super) timeout: Duration,
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
        Block {
            document,
            begins,
            place: Place::Checkout,
            before: "true",
            filled_in: &[],
            shows: &[],
            timeout: TIMEOUT,
        }
    }

    async fn paste(&self, session: &Session, machine: &KindMachine) -> Result<()> {
        let path = session.workspace.root().join(self.document);
        let text = std::fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
        machine.shell(self.before, TIMEOUT).await.context("before the block")?;
        let output = machine.shell(&self.script(&text)?, self.timeout).await?;
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

/// Returns the commands of the block that begins with this line.
fn beginning_with(document: &str, first: &str) -> Result<String> {
    let mut blocks = blocks(document).into_iter().filter(|(language, _)| *language == LANGUAGE);
    let found = blocks.find(|(_, lines)| lines.first().is_some_and(|line| *line == first));
    commands(&found.with_context(|| format!("no block of commands begins with {first:?}"))?.1)
}

/// Returns the language and the lines of each block, without the indentation of the block.
fn blocks(document: &str) -> Vec<(&str, Vec<&str>)> {
    let mut blocks = Vec::new();
    let mut lines = document.lines();
    while let Some(line) = lines.next() {
        if let Some(language) = line.trim().strip_prefix(FENCE) {
            let indentation = line.len() - line.trim_start().len();
            let block = lines.by_ref().take_while(|line| line.trim() != FENCE);
            blocks.push((language, block.map(|line| line.get(indentation..).unwrap_or_default()).collect()));
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
    use std::collections::{BTreeMap, BTreeSet};
    use std::path::Path;

    use serde::Deserialize;

    use super::*;
    use crate::e2e::{documents, host_service, kind};

    /// The documents beside the pages of the book.
    const DOCUMENTS: [&str; 3] = ["README.md", "csi/deploy/README.md", "docs/kubelet-on-the-data-disk.md"];
    const PAGES: &str = "docs/src";
    /// Languages of scripts. A block of commands with one of them would be overlooked.
    const SHELLS: [&str; 3] = ["bash", "sh", "shell"];

    /// The blocks that nothing pastes.
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Exceptions {
        not_pasted: Vec<NotPasted>,
    }

    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct NotPasted {
        begins: String,
        reason: String,
    }

    /// The blocks that the part kind of the lane extended pastes.
    fn pasted() -> impl Iterator<Item = &'static Block> {
        let of_documents = documents::BLOCKS.iter().chain(&documents::REMOVAL);
        let of_service = host_service::INSTALLATION.iter().chain(&host_service::UNINSTALLATION);
        kind::CREATION.iter().chain(of_documents).chain(of_service)
    }

    fn root() -> &'static Path {
        Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
    }

    fn read(path: &str) -> String {
        let path = root().join(path);
        std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("read {}: {error}", path.display()))
    }

    /// Returns all documents with their texts.
    fn texts() -> Vec<(String, String)> {
        let names = std::fs::read_dir(root().join(PAGES)).unwrap().map(|page| page.unwrap().file_name());
        let pages = names.map(|name| format!("{PAGES}/{}", name.to_string_lossy()));
        let paths = pages.filter(|path| path.ends_with(".md")).chain(DOCUMENTS.map(str::to_owned));
        let with_text = |path: String| {
            let text = read(&path);
            (path, text)
        };
        paths.map(with_text).collect()
    }

    /// Nothing is left to fill in.
    #[test]
    fn pasted_blocks_are_found_and_complete() {
        for block in pasted() {
            let script = block.script(&read(block.document)).unwrap();
            let left = ["...", "THE-", "API-SERVER", " NODE"];
            assert!(!left.iter().any(|left| script.contains(left)), "{script}");
        }
    }

    /// The first lines are those of one block of a document each, so that it is that block which is pasted.
    #[test]
    fn each_block_is_pasted_or_has_a_reason() {
        let Exceptions { not_pasted } = toml::from_str(include_str!("commands.toml")).unwrap();
        for NotPasted { begins, reason } in &not_pasted {
            assert!(reason.len() > 20, "{begins}: {reason:?} is no reason");
        }
        let pasted: BTreeSet<_> = pasted().map(|block| (block.document, block.begins)).collect();
        let (texts, mut counts) = (texts(), BTreeMap::new());
        for (document, text) in &texts {
            for (language, lines) in blocks(text) {
                if language != LANGUAGE {
                    let commands = lines.join("\n");
                    let has_prompt = lines.iter().any(|line| line.starts_with("$ "));
                    let is_of_shell = has_prompt || SHELLS.contains(&language);
                    assert!(!is_of_shell, "{document}: this needs a block of {LANGUAGE}:\n{commands}");
                    continue;
                }
                let begins = lines[0];
                assert!(begins.starts_with(['$', '#']), "{document}: {begins:?} begins with no prompt");
                let is_known = pasted.contains(&(document.as_str(), begins))
                    || not_pasted.iter().any(|block| block.begins == begins);
                assert!(
                    is_known,
                    "{document}: nothing pastes the block {begins:?}, and commands.toml lacks it"
                );
                *counts.entry((document, begins)).or_insert(0) += 1;
            }
        }
        let several = counts.iter().filter(|(_, count)| **count > 1);
        assert_eq!(several.count(), 0, "two blocks of a document begin with one line: {counts:#?}");
        let is_stale = |block: &&NotPasted| !counts.keys().any(|(_, begins)| *begins == block.begins);
        let stale: Vec<_> = not_pasted.iter().filter(is_stale).map(|block| &block.begins).collect();
        assert!(stale.is_empty(), "remove from commands.toml: {stale:#?}");
    }

    #[test]
    fn files_named_in_commands_exist() {
        let mut checked = 0;
        for (document, text) in texts() {
            for (_, lines) in blocks(&text).into_iter().filter(|(language, _)| *language == LANGUAGE) {
                let words = lines.iter().flat_map(|line| line.split_whitespace());
                for path in words.filter(|word| word.starts_with("csi/")) {
                    assert!(root().join(path).exists(), "{document}: there is no {path}");
                    checked += 1;
                }
            }
        }
        assert!(checked > 5, "only {checked} paths were found");
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
        assert_eq!(beginning_with(DOCUMENT, "# mount").unwrap(), "mount\nkind create");
        assert_eq!(beginning_with(DOCUMENT, "$ no").unwrap(), "no");
    }

    #[test]
    fn indented_block_keeps_continuation_lines() {
        let commands = beginning_with(DOCUMENT, "# if true; then").unwrap();
        assert_eq!(commands, "if true; then\n    echo\n  fi");
    }

    #[test]
    fn line_without_prompt_is_refused() {
        let error = beginning_with("```console\n$ a\nb\n```\n", "$ a").unwrap_err();
        assert_eq!(error.to_string(), "\"b\" begins with no prompt");
        assert!(beginning_with(DOCUMENT, "$ kind create").is_err());
    }
}

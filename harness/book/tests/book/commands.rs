//! The commands of the documents, and what runs them: the part kind of the lane extended pastes the blocks whose first line is in one
//! of [`PASTED`]. `commands.toml` beside this file lists the others, with what runs them or the reason why nothing does.

use std::collections::BTreeMap;
use std::fs;

use book::markdown::{Block, blocks};
use serde::Deserialize;

use crate::{read, root};

/// The documents beside the pages of the book.
const DOCUMENTS: [&str; 3] = ["README.md", "csi/deploy/README.md", "docs/kubelet-on-the-data-disk.md"];
const PAGES: &str = "docs/src";
/// The sources with the first lines of the blocks that they paste.
const PASTED: [&str; 2] = ["harness/src/e2e/documents.rs", "harness/src/e2e/host_service.rs"];

/// The language of blocks with commands. Each line of them that begins with `$ ` or `# ` is a command.
const LANGUAGE: &str = "console";
/// Languages of scripts. The tests would miss a block of commands with one of them.
const SHELLS: [&str; 3] = ["bash", "sh", "shell"];

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Exceptions {
    elsewhere: Vec<Elsewhere>,
    not_run: Vec<NotRun>,
}

/// A block that another source runs, which contains a text that shows that it does.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Elsewhere {
    begins: String,
    source: String,
    contains: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct NotRun {
    begins: String,
    reason: String,
}

/// Returns the blocks of code of all documents, each with the document.
fn all_blocks() -> Vec<(String, Block)> {
    let pages = fs::read_dir(root().join(PAGES)).unwrap().map(|page| page.unwrap().file_name());
    let pages = pages.map(|name| format!("{PAGES}/{}", name.to_string_lossy()));
    let documents = pages.filter(|path| path.ends_with(".md")).chain(DOCUMENTS.map(str::to_owned));
    documents
        .flat_map(|path| blocks(&read(&path)).into_iter().map(move |block| (path.clone(), block)))
        .collect()
}

/// The first lines are those of one block of a document each, so that a source that names one runs that block.
#[test]
fn each_block_runs_or_has_reason() {
    let Exceptions { elsewhere, not_run } = toml::from_str(include_str!("commands.toml")).unwrap();
    for Elsewhere { begins, source, contains } in &elsewhere {
        assert!(read(source).contains(contains), "{begins}: {source} has no {contains:?}");
    }
    for NotRun { begins, reason } in &not_run {
        assert!(reason.len() > 20, "{begins}: {reason:?} is no reason");
    }
    let mut excepted: Vec<_> = elsewhere.into_iter().map(|block| block.begins).collect();
    excepted.extend(not_run.into_iter().map(|block| block.begins));
    let pasted = PASTED.map(read).concat();
    let mut counts = BTreeMap::new();
    for (document, block) in all_blocks().into_iter().filter(|(_, block)| block.language == LANGUAGE) {
        let begins = block.lines.first().expect("a block of commands is not empty").clone();
        assert!(begins.starts_with(['$', '#']), "{document}: {begins:?} begins with no prompt");
        let literal = format!("\"{}\"", begins.replace('\\', "\\\\").replace('"', "\\\""));
        let is_known = pasted.contains(&literal) || excepted.contains(&begins);
        assert!(is_known, "{document}: neither {PASTED:?} nor commands.toml has the block {begins:?}");
        *counts.entry((document, begins)).or_insert(0) += 1;
    }
    assert!(
        counts.values().all(|count| *count == 1),
        "two blocks of a document begin with one line: {counts:#?}"
    );
    let stale: Vec<_> =
        excepted.iter().filter(|begins| !counts.keys().any(|(_, other)| other == *begins)).collect();
    assert!(stale.is_empty(), "remove from commands.toml: {stale:#?}");
}

#[test]
fn block_with_prompt_has_console_language() {
    for (document, block) in all_blocks().into_iter().filter(|(_, block)| block.language != LANGUAGE) {
        let is_shell = SHELLS.contains(&block.language.as_str());
        let has_prompt = block.lines.iter().any(|line| line.starts_with("$ "));
        let lines = block.lines.join("\n");
        assert!(!is_shell && !has_prompt, "{document}: this needs a block of {LANGUAGE}:\n{lines}");
    }
}

#[test]
fn files_named_in_commands_exist() {
    let mut checked = 0;
    for (document, block) in all_blocks().into_iter().filter(|(_, block)| block.language == LANGUAGE) {
        for path in block.lines.iter().flat_map(|line| line.split_whitespace()) {
            if path.starts_with("csi/") {
                assert!(root().join(path).exists(), "{document}: there is no {path}");
                checked += 1;
            }
        }
    }
    assert!(checked > 5, "only {checked} paths were found");
}

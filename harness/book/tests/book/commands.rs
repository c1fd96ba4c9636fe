//! The commands of the documents, and what runs them. `commands.toml` beside this file lists each block of commands, with the lane
//! and the source that runs it, or with the reason why nothing does.

use std::collections::BTreeMap;
use std::fs;

use book::markdown::blocks;
use serde::Deserialize;

use crate::{read, root};

/// The documents beside the pages of the book.
const DOCUMENTS: [&str; 3] = ["README.md", "csi/deploy/README.md", "docs/kubelet-on-the-data-disk.md"];
const PAGES: &str = "docs/src";

/// The language of blocks with commands. Each line of them that begins with `$ ` or `# ` is a command.
const LANGUAGE: &str = "console";
/// Languages of scripts. The tests would miss a block of commands with one of them.
const SHELLS: [&str; 3] = ["bash", "sh", "shell"];

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Register {
    block: Vec<Entry>,
}

/// A block of commands. Either `lane` and `source` are given, or `not_run`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    document: String,
    /// The first line of the block.
    begins: String,
    /// The lane that runs the commands, and the option for its part.
    lane: Option<String>,
    /// The file that runs them in this lane.
    source: Option<String>,
    /// A text of that file, which shows that it does. By default, the first line of the block.
    contains: Option<String>,
    /// The reason why nothing runs them.
    not_run: Option<String>,
}

fn register() -> Vec<Entry> {
    let text = include_str!("commands.toml");
    toml::from_str::<Register>(text).expect("parse commands.toml").block
}

/// Returns the documents and their text.
fn documents() -> BTreeMap<String, String> {
    let pages = fs::read_dir(root().join(PAGES)).unwrap().map(|page| page.unwrap().file_name());
    let pages = pages.map(|name| format!("{PAGES}/{}", name.to_string_lossy()));
    let pages = pages.filter(|path| path.ends_with(".md"));
    pages.chain(DOCUMENTS.map(str::to_owned)).map(|path| (path.clone(), read(&path))).collect()
}

#[test]
fn each_command_block_is_registered_once() {
    let mut found = BTreeMap::new();
    for (document, text) in documents() {
        for block in blocks(&text).into_iter().filter(|block| block.language == LANGUAGE) {
            let begins = block.lines.first().expect("a block of commands is not empty").clone();
            assert!(
                begins.starts_with("$ ") || begins.starts_with("# "),
                "{document}: {begins:?} begins with no prompt"
            );
            *found.entry((document.clone(), begins)).or_insert(0) += 1;
        }
    }
    let mut registered = BTreeMap::new();
    for Entry { document, begins, .. } in register() {
        *registered.entry((document, begins)).or_insert(0) += 1;
    }
    let missing: Vec<_> = found.keys().filter(|block| !registered.contains_key(*block)).collect();
    let stale: Vec<_> = registered.keys().filter(|block| !found.contains_key(*block)).collect();
    assert!(
        missing.is_empty() && stale.is_empty(),
        "add to commands.toml: {missing:#?}\nremove from it: {stale:#?}"
    );
    let mut counts = found.into_iter().chain(registered);
    assert!(
        counts.all(|(_, count)| count == 1),
        "two blocks of a document must not begin with the same line, and none must be registered twice"
    );
}

/// An entry has either the lane and the source that run the block, or the reason that nothing runs it.
#[test]
fn each_block_runs_or_has_reason() {
    let lanes = read("docs/testing.md") + &read("docs/src/tests.md");
    for entry in register() {
        let Entry { document, begins, lane, source, contains, not_run } = entry;
        match (lane, source, contains, not_run) {
            (Some(lane), Some(source), contains, None) => {
                let contains = contains.unwrap_or_else(|| begins.clone());
                let is_known = [' ', '`'].iter().any(|end| lanes.contains(&format!("--lane {lane}{end}")));
                assert!(is_known, "{document}: {begins}: the documents of the tests have no lane {lane}");
                let runs = read(&source).contains(&contains);
                assert!(runs, "{document}: {begins}: {source} has no {contains:?}");
            }
            (None, None, None, Some(reason)) => {
                assert!(reason.len() > 20, "{document}: {begins}: {reason:?} is no reason");
            }
            _ => panic!("{document}: {begins}: give lane and source, or not_run"),
        }
    }
}

#[test]
fn block_with_prompt_has_console_language() {
    for (document, text) in documents() {
        for block in blocks(&text).into_iter().filter(|block| block.language != LANGUAGE) {
            let is_shell = SHELLS.contains(&block.language.as_str());
            let has_prompt = block.lines.iter().any(|line| line.starts_with("$ "));
            let lines = block.lines.join("\n");
            assert!(!is_shell && !has_prompt, "{document}: this needs a block of {LANGUAGE}:\n{lines}");
        }
    }
}

#[test]
fn files_named_in_commands_exist() {
    let mut checked = 0;
    for (document, text) in documents() {
        for block in blocks(&text).into_iter().filter(|block| block.language == LANGUAGE) {
            for path in block.lines.iter().flat_map(|line| line.split_whitespace()) {
                if path.starts_with("csi/") {
                    assert!(root().join(path).exists(), "{document}: there is no {path}");
                    checked += 1;
                }
            }
        }
    }
    assert!(checked > 5, "only {checked} paths were found");
}

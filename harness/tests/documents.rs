//! Checks the links of the Markdown documents, and the decision records that the code names.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use ignore::WalkBuilder;

const DECISIONS: &str = "docs/decisions";

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

/// Returns the files of the workspace with this extension, without those that Git ignores.
fn files(extension: &str) -> impl Iterator<Item = PathBuf> {
    let entries = WalkBuilder::new(root()).require_git(false).build();
    entries
        .map(|entry| entry.unwrap().into_path())
        .filter(move |path| path.extension().is_some_and(|other| other == extension))
}

/// Returns the lines outside of code blocks.
fn prose(text: &str) -> impl Iterator<Item = &str> {
    let mut in_code = false;
    text.lines().filter(move |line| {
        let is_fence = line.trim_start().starts_with("```");
        if is_fence {
            in_code = !in_code;
        }
        !in_code && !is_fence
    })
}

/// Returns the targets of links: `[text](target)`. A target must not contain a parenthesis.
fn links(text: &str) -> Vec<String> {
    // The text of a link may continue on the next line.
    let lines: Vec<&str> = prose(text).collect();
    lines.join(" ").split("](").skip(1).filter_map(|rest| Some(rest.split_once(')')?.0.to_owned())).collect()
}

/// Returns the anchors that GitHub assigns to the headings of a document.
fn anchors(text: &str) -> BTreeSet<String> {
    let headings = prose(text).filter(|line| line.starts_with('#'));
    let names = headings.map(|line| line.trim_start_matches('#').trim().to_lowercase().replace(' ', "-"));
    names.map(|name| name.replace(|c: char| !c.is_alphanumeric() && !"-_".contains(c), "")).collect()
}

#[test]
fn document_links_lead_to_existing_targets() {
    let mut checked = 0;
    let mut broken = Vec::new();
    for document in files("md") {
        let text = fs::read_to_string(&document).unwrap();
        for link in links(&text).iter().filter(|link| !link.contains("://")) {
            let (path, anchor) = link.split_once('#').unwrap_or((link, ""));
            let target =
                if path.is_empty() { document.clone() } else { document.parent().unwrap().join(path) };
            let exists = target.exists()
                && (anchor.is_empty() || anchors(&fs::read_to_string(&target).unwrap()).contains(anchor));
            if !exists {
                broken.push(format!("{}: {link}", document.display()));
            }
            checked += 1;
        }
    }
    // The documents have many more. Fewer would mean that the search is broken.
    assert!(checked > 50, "only {checked} links were found");
    assert!(broken.is_empty(), "links without a target:\n{}", broken.join("\n"));
}

#[test]
fn decision_index_links_every_record() {
    let directory = root().join(DECISIONS);
    let index = fs::read_to_string(directory.join("README.md")).unwrap();
    let linked: BTreeSet<String> = links(&index).into_iter().filter(|link| !link.contains('/')).collect();
    let names =
        fs::read_dir(&directory).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let records: BTreeSet<String> = names.filter(|name| name != "README.md").collect();
    assert_eq!(linked, records);
}

#[test]
fn decision_records_cited_in_code_exist() {
    let mut checked = 0;
    for source in files("rs") {
        let text = fs::read_to_string(&source).unwrap();
        for rest in text.split(&format!("{DECISIONS}/")).skip(1) {
            let name: String =
                rest.chars().take_while(|c| c.is_alphanumeric() || "-.".contains(*c)).collect();
            // A full stop may end the sentence.
            let name = name.trim_end_matches('.');
            assert!(root().join(DECISIONS).join(name).is_file(), "{}: {name}", source.display());
            checked += 1;
        }
    }
    assert!(checked > 5, "only {checked} records are cited");
}

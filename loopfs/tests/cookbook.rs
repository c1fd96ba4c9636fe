//! Checks that `docs/cookbook.md`, `Cargo.toml` and the kernel tests have every program of `examples`. The programs themselves
//! need root; `tests/kernel/cookbook.rs` runs them.

use std::fs;
use std::path::{Path, PathBuf};

/// Lines of code, without comments and empty lines. A longer program is no recipe any more.
const LINES: std::ops::RangeInclusive<usize> = 20..=100;

fn package(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

fn read(path: &str) -> String {
    fs::read_to_string(package(path)).unwrap_or_else(|error| panic!("read {path}: {error}"))
}

/// Returns the names and sources of the programs.
fn examples() -> Vec<(String, String)> {
    let entries = fs::read_dir(package("examples")).unwrap().map(|entry| entry.unwrap().path());
    let sources = entries.filter(|path| path.extension().is_some_and(|extension| extension == "rs"));
    let named = sources.map(|path| {
        let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
        (name, fs::read_to_string(path).unwrap())
    });
    named.collect()
}

#[test]
fn the_cookbook_links_to_every_example() {
    let cookbook = read("docs/cookbook.md");
    let mut linked: Vec<&str> = cookbook
        .split("](../examples/")
        .skip(1)
        .filter_map(|rest| Some(rest.split_once(".rs)")?.0))
        .collect();
    linked.sort_unstable();
    let mut names: Vec<String> = examples().into_iter().map(|(name, _)| name).collect();
    names.sort_unstable();
    assert_eq!(linked, names);
    assert_eq!(names.len(), 9);
}

#[test]
fn every_example_is_tested_and_scraped() {
    let (tests, manifest) = (read("tests/kernel/cookbook.rs"), read("Cargo.toml"));
    for (name, _) in examples() {
        assert!(tests.contains(&format!("fn {name}_")), "tests/kernel/cookbook.rs has no test of {name}");
        let target =
            manifest.split("[[example]]").find(|target| target.contains(&format!("name = \"{name}\"\n")));
        let target = target.unwrap_or_else(|| panic!("Cargo.toml has no [[example]] with the name {name}"));
        assert!(target.contains("doc-scrape-examples = true"), "{name} is not scraped");
    }
}

#[test]
fn every_example_is_short_and_introduced() {
    for (name, source) in examples() {
        let lines = source.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with("//"));
        let lines = lines.count();
        assert!(LINES.contains(&lines), "{name} has {lines} lines");
        let comment: String = source.lines().take_while(|line| line.starts_with("//!")).collect();
        for needed in ["Needs Linux ", "`CAP_SYS_ADMIN`", &format!("--example {name} -- ")] {
            assert!(comment.contains(needed), "the comment of {name} lacks: {needed}");
        }
    }
}

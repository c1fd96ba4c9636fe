//! Builds the book, and compares its tables with the sources of the programs.

mod reference;

use std::fs;
use std::path::Path;

/// The root of the workspace.
fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap()
}

fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("read {path}: {error}"))
}

#[test]
fn the_book_builds_without_warnings() {
    book::build(&root().join("docs"), &root().join("target/book")).unwrap();
}

//! Builds the book.

use std::collections::BTreeSet;
use std::fs;
use std::io::{Read, Seek};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use mdbook_driver::MDBook;
use tracing::Level;

use crate::links;

const SUMMARY: &str = "SUMMARY.md";

/// Builds the book in `docs` into `destination`, which is emptied first. Links that leave the book lead into the checkout, if
/// `destination` is its directory `target/book`.
///
/// # Errors
/// The book cannot be built, mdBook logs a warning, or a page is not in SUMMARY.md.
pub fn build(docs: &Path, destination: &Path) -> Result<()> {
    let mut log = tempfile::tempfile().context("create a file for the warnings of mdBook")?;
    let subscriber = tracing_subscriber::fmt().with_max_level(Level::WARN).with_ansi(false).without_time();
    let subscriber = subscriber.with_writer(log.try_clone()?).finish();
    tracing::subscriber::with_default(subscriber, || render(docs, destination))
        .with_context(|| format!("build the book in {}", docs.display()))?;
    let mut warnings = String::new();
    log.rewind()?;
    log.read_to_string(&mut warnings).context("read the warnings of mdBook")?;
    anyhow::ensure!(warnings.is_empty(), "mdBook warns of the book:\n{warnings}");
    Ok(())
}

fn render(docs: &Path, destination: &Path) -> Result<()> {
    let mut book = MDBook::load(docs)?;
    book.config.build.build_dir = destination.to_owned();
    let pages: BTreeSet<PathBuf> =
        book.book.chapters().filter_map(|chapter| chapter.source_path.clone()).collect();
    require_pages(&book.source_dir(), &pages)?;
    book.book.for_each_chapter_mut(|chapter| chapter.content = links::to_sources(&chapter.content));
    book.build()
}

/// Fails unless the documents in `directory` are the pages of the summary. The pages are in one directory: the links that
/// leave the book are rewritten for such pages.
fn require_pages(directory: &Path, pages: &BTreeSet<PathBuf>) -> Result<()> {
    let mut missing = Vec::new();
    for entry in fs::read_dir(directory).with_context(|| format!("list {}", directory.display()))? {
        let path = entry?.path();
        anyhow::ensure!(!path.is_dir(), "{}: the pages have to be in one directory", path.display());
        let name = Path::new(path.file_name().unwrap_or_default());
        let is_document = name.extension().is_some_and(|extension| extension == "md");
        if is_document && name != Path::new(SUMMARY) && !pages.contains(name) {
            missing.push(name.display().to_string());
        }
    }
    missing.sort_unstable();
    let missing = missing.join(", ");
    anyhow::ensure!(missing.is_empty(), "add these pages to {SUMMARY}, or remove them: {missing}");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Writes a book with these files beside its configuration, and builds it.
    fn built(files: &[(&str, &str)]) -> Result<()> {
        let directory = tempfile::tempdir().unwrap();
        let docs = directory.path().join("docs");
        fs::create_dir_all(docs.join("src")).unwrap();
        let config = "[book]\ntitle = \"a book\"\n[build]\ncreate-missing = false\n[output.html]\n";
        fs::write(docs.join("book.toml"), config).unwrap();
        for (name, text) in files {
            fs::write(docs.join("src").join(name), text).unwrap();
        }
        build(&docs, &directory.path().join("built"))
    }

    #[test]
    fn page_missing_in_summary_is_refused() {
        let files = [("SUMMARY.md", "# Summary\n- [A](a.md)\n"), ("a.md", "# A\n"), ("b.md", "# B\n")];
        let error = format!("{:#}", built(&files).unwrap_err());
        assert!(error.ends_with("add these pages to SUMMARY.md, or remove them: b.md"), "{error}");
    }

    #[test]
    fn mdbook_warning_fails_the_build() {
        let page = "# A\n[itself](a.md) <b>not closed\n";
        let files = [("SUMMARY.md", "# Summary\n- [A](a.md)\n"), ("a.md", page)];
        let error = built(&files).unwrap_err().to_string();
        assert!(error.starts_with("mdBook warns of the book:"), "{error}");
    }
}

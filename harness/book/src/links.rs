//! The links of the pages: those that leave the book are rewritten, and all of them are checked in the built pages.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use crate::markdown::is_fence;

/// Rewrites the links of a page that leave the book, so that they lead into `sources`, the address of the checkout.
pub(crate) fn to_sources(page: &str, sources: &str) -> String {
    let mut in_code = false;
    let line = |line: &str| {
        if is_fence(line) {
            in_code = !in_code;
        }
        if in_code { line.to_owned() } else { rewrite(line, sources) }
    };
    page.split_inclusive('\n').map(line).collect()
}

fn rewrite(line: &str, sources: &str) -> String {
    let mut parts = line.split("](");
    let mut text = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let (target, rest) = part.split_at(part.find(')').unwrap_or(0));
        text.push_str("](");
        text.push_str(&address(target, sources));
        text.push_str(rest);
    }
    text
}

/// Returns the address of a target. The pages are in `docs/src`.
fn address(target: &str, sources: &str) -> String {
    let Some(below_docs) = target.strip_prefix("../") else { return target.to_owned() };
    let address = match below_docs.strip_prefix("../") {
        Some(path) => format!("{sources}/{path}"),
        None => format!("{sources}/docs/{below_docs}"),
    };
    // In a link without a scheme, mdBook would replace `.md` by `.html`, and there is no such page.
    if sources.contains("://") { address } else { address.replace(".md", "%2Emd") }
}

/// Checks the links and images of the pages in `destination`.
///
/// # Errors
/// A link leads to no file, or to no heading of a page of the book. The error lists all of these links.
pub(crate) fn check(destination: &Path) -> Result<()> {
    let mut pages = BTreeMap::new();
    let entries = fs::read_dir(destination).with_context(|| format!("list {}", destination.display()))?;
    for entry in entries {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "html") {
            let text = fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            pages.insert(name, text);
        }
    }
    let mut checked = 0;
    let mut broken = Vec::new();
    for (name, text) in &pages {
        for target in targets(text) {
            checked += 1;
            if !leads_somewhere(target, name, &pages, destination) {
                broken.push(format!("{name}: {target}"));
            }
        }
    }
    anyhow::ensure!(checked > 0, "no links were found in the pages in {}", destination.display());
    anyhow::ensure!(broken.is_empty(), "links of the book without a target:\n{}", broken.join("\n"));
    Ok(())
}

/// Returns the targets of the links and images of a page, without those around its content, which are mdBook's.
fn targets(page: &str) -> Vec<&str> {
    let content = page.split_once("<main>").and_then(|(_, rest)| rest.split_once("</main>"));
    let content = content.map_or("", |(content, _)| content);
    let attributes = ["href=\"", "src=\""].into_iter().flat_map(|attribute| content.split(attribute).skip(1));
    attributes.filter_map(|rest| Some(rest.split_once('"')?.0)).collect()
}

fn leads_somewhere(target: &str, page: &str, pages: &BTreeMap<String, String>, destination: &Path) -> bool {
    if target.contains("://") {
        return true;
    }
    let (path, heading) = target.split_once('#').unwrap_or((target, ""));
    let path = if path.is_empty() { page } else { path };
    match pages.get(path) {
        Some(text) => heading.is_empty() || text.contains(&format!("id=\"{heading}\"")),
        // The test `documents` of the harness checks the headings of documents that are not part of the book.
        None => destination.join(path.replace("%2E", ".")).exists(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_links_that_leave_the_book_are_rewritten() {
        let page = "[a](b.md#c) [d](../../e/f.md#g),\n```\n[h](../../i.md)\n```\n![j](k.svg) [l](../notes/m.md) \
                    [n](https://o.p)\n";
        let rewritten = "[a](b.md#c) [d](https://x/e/f.md#g),\n```\n[h](../../i.md)\n```\n![j](k.svg) \
                         [l](https://x/docs/notes/m.md) [n](https://o.p)\n";
        assert_eq!(to_sources(page, "https://x"), rewritten);
        assert_eq!(to_sources("[d](../../e.md)", "../.."), "[d](../../e%2Emd)");
        assert_eq!(to_sources("[d](../../e", "../.."), "[d](../../e");
    }

    #[test]
    fn links_to_missing_files_and_headings_are_reported() {
        let directory = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(directory.path().join(name), text).unwrap();
        write("notes.md", "");
        write("b.html", "<nav><a href=\"missing.html\"></a></nav><main><h2 id=\"there\"></h2></main>");
        let links = "<a href=\"b.html#there\"></a><a href=\"notes%2Emd\"></a><a href=\"#here\" id=\"here\"></a>\
                     <a href=\"https://c.d\">";
        write("a.html", &format!("<main>{links}</main>"));
        check(directory.path()).unwrap();
        write("a.html", "<main><a href=\"b.html#gone\"></a><img src=\"c.svg\"></main>");
        let error = check(directory.path()).unwrap_err().to_string();
        assert!(error.ends_with("a.html: b.html#gone\na.html: c.svg"), "{error}");
    }
}

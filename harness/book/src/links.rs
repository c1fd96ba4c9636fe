//! Rewrites the links of the pages that leave the book. The test `documents` of the harness checks that all links lead somewhere.

use crate::markdown::is_fence;

/// Rewrites the links of a page that leave the book, so that they lead from `target/book` into the checkout.
pub(crate) fn to_sources(page: &str) -> String {
    let mut in_code = false;
    let line = |line: &str| {
        if is_fence(line) {
            in_code = !in_code;
        }
        if in_code { line.to_owned() } else { rewrite(line) }
    };
    page.split_inclusive('\n').map(line).collect()
}

fn rewrite(line: &str) -> String {
    let mut parts = line.split("](");
    let mut text = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let (target, rest) = part.split_at(part.find(')').unwrap_or(0));
        text.push_str("](");
        text.push_str(&address(target));
        text.push_str(rest);
    }
    text
}

/// Returns the address of a target. The pages are in `docs/src`.
fn address(target: &str) -> String {
    let Some(below_docs) = target.strip_prefix("../") else { return target.to_owned() };
    let address = match below_docs.strip_prefix("../") {
        Some(path) => format!("../../{path}"),
        None => format!("../../docs/{below_docs}"),
    };
    // mdBook would replace `.md` by `.html`, and there is no such page.
    address.replace(".md", "%2Emd")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_links_outside_book_are_rewritten() {
        let page = "[a](b.md#c) [d](../../e/f.md#g),\n```\n[h](../../i.md)\n```\n![j](k.svg) [l](../notes/m.md) \
                    [n](https://o.p) [q](../../r";
        let rewritten = "[a](b.md#c) [d](../../e/f%2Emd#g),\n```\n[h](../../i.md)\n```\n![j](k.svg) \
                         [l](../../docs/notes/m%2Emd) [n](https://o.p) [q](../../r";
        assert_eq!(to_sources(page), rewritten);
    }
}

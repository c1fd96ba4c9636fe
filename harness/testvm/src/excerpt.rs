//! Bounds what a failure prints: one with thousands of entries hides all others.

use std::fmt::Display;

/// The longest list, the longest text and the longest line, in items, lines and characters.
const MAX_ITEMS: usize = 20;
const MAX_LINES: usize = 40;
const MAX_LINE: usize = 400;

/// Returns the number of the items, and the first ones in a line each.
pub fn list(items: impl IntoIterator<Item: Display>) -> String {
    let items: Vec<String> = items.into_iter().map(|item| shortened(&item.to_string())).collect();
    let first = items.iter().take(MAX_ITEMS).map(|item| format!("\n  {item}")).collect::<String>();
    let shown = if items.len() > MAX_ITEMS { format!(", the first {MAX_ITEMS}") } else { String::new() };
    format!("{}{shown}:{first}", items.len())
}

/// Returns the first lines of a text, and the number of the others.
#[must_use]
pub fn excerpt(text: &str) -> String {
    let lines: Vec<String> = text.lines().map(shortened).collect();
    let Some(more) = lines.len().checked_sub(MAX_LINES + 1) else { return lines.join("\n") };
    format!("{}\n... and {} more lines", lines[..MAX_LINES].join("\n"), more + 1)
}

fn shortened(line: &str) -> String {
    match line.char_indices().nth(MAX_LINE) {
        Some((end, _)) => format!("{}... and {} more characters", &line[..end], line[end..].chars().count()),
        None => line.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_list_is_counted() {
        assert_eq!(list(["a", "b"]), "2:\n  a\n  b");
        let long = list((0..1000).map(|number| format!("{number}: {}", "x".repeat(1000))));
        assert!(long.starts_with("1000, the first 20:\n  0: xxx") && long.len() < 10_000, "{long}");
        assert_eq!(long.lines().count(), 21);
    }

    #[test]
    fn a_long_text_is_shortened() {
        assert_eq!(excerpt("a\nb"), "a\nb");
        let lines = excerpt(&"line\n".repeat(1000));
        assert!(lines.ends_with("line\n... and 960 more lines") && lines.lines().count() == 41, "{lines}");
        let line = excerpt(&"é".repeat(30_000));
        assert!(line.ends_with("é... and 29600 more characters") && line.len() < 1000, "{line}");
    }
}

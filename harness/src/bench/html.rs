//! Pages without scripts and without other files. Every text is escaped here, so that no other module writes markup.

use std::fmt::Write as _;

const STYLE: &str = "\
body { font: 15px/1.5 sans-serif; margin: 2em auto; max-width: 75em; padding: 0 1em; color: #222; background: #fff; }
table { border-collapse: collapse; margin: 1em 0; }
th, td { padding: 0.2em 0.8em; border-bottom: 1px solid #ddd; text-align: left; vertical-align: top; }
th { border-bottom: 2px solid #888; }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.good { color: #00664a; }
.bad { color: #a33b00; font-weight: bold; }
svg { max-width: 100%; height: auto; }
";

/// A page that is being written.
#[derive(Debug, Default)]
pub(super) struct Page {
    body: String,
}

/// A cell of a table.
#[derive(Clone, Debug)]
pub(super) struct Cell {
    text: String,
    class: Option<&'static str>,
}

impl Cell {
    pub(super) fn text(text: impl Into<String>) -> Cell {
        Cell { text: text.into(), class: None }
    }

    /// Returns a cell of a column of numbers.
    pub(super) fn number(text: impl Into<String>) -> Cell {
        Cell { text: text.into(), class: Some("number") }
    }

    /// Returns a cell that stands out as good or as bad.
    pub(super) fn verdict(text: impl Into<String>, is_good: Option<bool>) -> Cell {
        let class = is_good.map(|is_good| if is_good { "good" } else { "bad" });
        Cell { text: text.into(), class }
    }
}

impl Page {
    /// Adds a heading, of level 1 for the page, 2 for a section and 3 for a part of it.
    pub(super) fn heading(&mut self, level: u8, text: &str) {
        _ = writeln!(self.body, "<h{level}>{}</h{level}>", escaped(text));
    }

    pub(super) fn paragraph(&mut self, text: &str) {
        _ = writeln!(self.body, "<p>{}</p>", escaped(text));
    }

    /// Adds a table, or nothing if it has no rows.
    pub(super) fn table(&mut self, columns: &[&str], rows: &[Vec<Cell>]) {
        let Some(first) = rows.first() else { return };
        self.body.push_str("<table>\n<tr>");
        for (name, cell) in columns.iter().zip(first) {
            // The heading of a column of numbers is above the numbers.
            let class = if cell.class == Some("number") { " class=\"number\"" } else { "" };
            _ = write!(self.body, "<th{class}>{}</th>", escaped(name));
        }
        self.body.push_str("</tr>\n");
        for row in rows {
            self.body.push_str("<tr>");
            for Cell { text, class } in row {
                let class = class.map(|class| format!(" class=\"{class}\"")).unwrap_or_default();
                _ = write!(self.body, "<td{class}>{}</td>", escaped(text));
            }
            self.body.push_str("</tr>\n");
        }
        self.body.push_str("</table>\n");
    }

    /// Adds a drawing. Its library escapes the texts in it.
    pub(super) fn drawing(&mut self, svg: &str) {
        _ = writeln!(self.body, "<figure>\n{svg}\n</figure>");
    }

    /// Returns the whole document.
    pub(super) fn finish(self, title: &str) -> String {
        format!(
            "<!DOCTYPE html>\n<html lang=\"en-GB\">\n<head>\n<meta charset=\"utf-8\">\n<title>{}</title>\n\
             <style>\n{STYLE}</style>\n</head>\n<body>\n{}</body>\n</html>\n",
            escaped(title),
            self.body
        )
    }
}

/// Returns text in which no character begins markup or ends an attribute.
fn escaped(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&#39;"),
            other => escaped.push(other),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOSTILE: &str = "<script>alert('a & \"b\"')</script>";

    #[test]
    fn no_text_becomes_markup() {
        let mut page = Page::default();
        page.heading(1, HOSTILE);
        page.paragraph(HOSTILE);
        let cells = [Cell::text(HOSTILE), Cell::number(HOSTILE), Cell::verdict(HOSTILE, Some(false))];
        page.table(&[HOSTILE, HOSTILE, HOSTILE], &[cells.to_vec()]);
        let text = page.finish(HOSTILE);
        assert!(!text.contains("<script") && !text.contains("'a"), "{text}");
        let escaped = "&lt;script&gt;alert(&#39;a &amp; &quot;b&quot;&#39;)&lt;/script&gt;";
        assert_eq!(text.matches(escaped).count(), 9, "{text}");
    }

    #[test]
    fn numbers_and_verdicts_have_their_classes_and_an_empty_table_is_omitted() {
        let mut page = Page::default();
        page.table(&["a", "b"], &[]);
        page.table(&["a", "b"], &[vec![Cell::number("1"), Cell::verdict("met", Some(true))]]);
        let text = page.finish("t");
        assert_eq!(text.matches("<table>").count(), 1);
        assert!(text.contains("<th class=\"number\">a</th><th>b</th>"), "{text}");
        assert!(text.contains("<td class=\"number\">1</td><td class=\"good\">met</td>"), "{text}");
    }
}

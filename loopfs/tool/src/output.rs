//! The output of a command: text for people, JSON for programs.

use std::time::{SystemTime, UNIX_EPOCH};

use serde::Serialize;

use crate::size;

/// A JSON object with these fields in this order. `serde_json::json!` would sort them.
macro_rules! object {
    ($($field:ident: $value:expr),* $(,)?) => {{
        #[expect(non_camel_case_types, reason = "the type of each field is a parameter with the field's name")]
        let object = {
            #[derive(serde::Serialize)]
            struct JsonObject<$($field),*> {
                $($field: $field),*
            }
            JsonObject { $($field: $value),* }
        };
        object
    }};
}
pub(crate) use object;

/// The output of a command that completed.
#[derive(Debug)]
pub(crate) struct Output {
    /// Lines for people. If empty, the command prints nothing.
    pub(crate) text: String,
    pub(crate) json: String,
    /// If `false`, the exit code is 1.
    pub(crate) good: bool,
}

impl Output {
    pub(crate) fn new(text: String, json: &impl Serialize) -> serde_json::Result<Self> {
        Ok(Self { text, json: serde_json::to_string_pretty(json)?, good: true })
    }

    pub(crate) fn good(self, good: bool) -> Self {
        Self { good, ..self }
    }

    /// Returns the text for standard output.
    pub(crate) fn print(&self, as_json: bool) -> String {
        let mut printed = if as_json { self.json.clone() } else { self.text.clone() };
        if !printed.is_empty() && !printed.ends_with('\n') {
            printed.push('\n');
        }
        printed
    }
}

/// The alignment of the cells of a column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Left,
    Right,
}

/// A table with a header and aligned columns.
#[derive(Debug)]
pub(crate) struct Table<const N: usize> {
    sides: [Side; N],
    rows: Vec<[String; N]>,
}

impl<const N: usize> Table<N> {
    pub(crate) fn new(columns: [(&str, Side); N]) -> Self {
        Self { sides: columns.map(|(_, side)| side), rows: vec![columns.map(|(name, _)| name.to_owned())] }
    }

    pub(crate) fn row(&mut self, cells: [String; N]) {
        self.rows.push(cells.map(|cell| if cell.is_empty() { "-".to_owned() } else { printable(&cell) }));
    }

    pub(crate) fn print(&self) -> String {
        let width =
            |column: usize| self.rows.iter().map(|row| row[column].chars().count()).max().unwrap_or_default();
        let widths: [usize; N] = std::array::from_fn(width);
        let mut text = String::new();
        for row in &self.rows {
            let cells: [String; N] = std::array::from_fn(|column| match self.sides[column] {
                Side::Left => format!("{:<width$}", row[column], width = widths[column]),
                Side::Right => format!("{:>width$}", row[column], width = widths[column]),
            });
            text.push_str(cells.join("  ").trim_end());
            text.push('\n');
        }
        text
    }
}

/// Escapes characters that would control a terminal, because users choose names and labels.
pub(crate) fn printable(text: &str) -> String {
    let mut shown = String::new();
    for character in text.chars() {
        // These are control characters, and characters that change the direction of the text.
        match character {
            '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' => {
                shown.extend(character.escape_unicode());
            }
            _ if character.is_control() => shown.extend(character.escape_default()),
            _ => shown.push(character),
        }
    }
    shown
}

pub(crate) fn yes_no(value: bool) -> String {
    if value { "yes" } else { "no" }.to_owned()
}

/// Returns the size as text, or an empty string for `None`. A table prints an empty cell as `-`.
pub(crate) fn size_or_none(bytes: Option<u64>) -> String {
    bytes.map(size::show).unwrap_or_default()
}

/// Returns the count with the noun in its singular or plural.
pub(crate) fn counted(count: usize, noun: &str) -> String {
    if count == 1 { format!("1 {noun}") } else { format!("{count} {noun}s") }
}

/// Returns the whole seconds since 1970, or `None` for a time before.
pub(crate) fn seconds_since_1970(time: SystemTime) -> Option<u64> {
    time.duration_since(UNIX_EPOCH).ok().map(|since| since.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_fit_their_widest_cell() {
        let mut table = Table::new([("NAME", Side::Left), ("SIZE", Side::Right), ("NOTE", Side::Left)]);
        table.row(["a".to_owned(), "1023.9KiB".to_owned(), String::new()]);
        table.row(["längerer".to_owned(), "4MiB".to_owned(), "ok".to_owned()]);
        assert_eq!(
            table.print(),
            "NAME           SIZE  NOTE\n\
             a         1023.9KiB  -\n\
             längerer       4MiB  ok\n"
        );
    }

    #[test]
    fn control_characters_are_escaped() {
        let mut table = Table::new([("NAME", Side::Left)]);
        table.row(["a\nb\u{1b}[2J\u{202e}c\u{9b}".to_owned()]);
        assert_eq!(table.print(), "NAME\na\\nb\\u{1b}[2J\\u{202e}c\\u{9b}\n");
    }

    #[test]
    fn the_output_ends_with_one_newline() {
        let output = Output::new("text".to_owned(), &[1]).unwrap();
        assert_eq!(output.print(false), "text\n");
        assert_eq!(output.print(true), "[\n  1\n]\n");
        assert_eq!(Output::new(String::new(), &()).unwrap().print(false), "");
    }
}

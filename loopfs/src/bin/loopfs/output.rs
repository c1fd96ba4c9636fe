//! What a command answers: text for people, JSON for programs.

use serde::Serialize;

use crate::size;

/// The answer of a command that did what it was told.
#[derive(Debug)]
pub(crate) struct Answer {
    /// Lines for people; empty for nothing to say.
    pub(crate) text: String,
    pub(crate) json: String,
    /// Whether it is the one that was hoped for; the exit code says so.
    pub(crate) good: bool,
}

impl Answer {
    pub(crate) fn new(text: String, json: &impl Serialize) -> serde_json::Result<Self> {
        Ok(Self { text, json: serde_json::to_string_pretty(json)?, good: true })
    }

    pub(crate) fn good(self, good: bool) -> Self {
        Self { good, ..self }
    }

    /// What is written to standard output.
    pub(crate) fn print(&self, as_json: bool) -> String {
        let mut printed = if as_json { self.json.clone() } else { self.text.clone() };
        if !printed.is_empty() && !printed.ends_with('\n') {
            printed.push('\n');
        }
        printed
    }
}

/// On which side of its column a cell stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Left,
    Right,
}

/// Aligned columns under a header.
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

/// Names and labels are their owners' to choose: a terminal must not obey them.
pub(crate) fn printable(text: &str) -> String {
    let mut shown = String::new();
    for character in text.chars() {
        // Control characters, and those that turn the direction of the line.
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

/// Empty, which a table shows as `-`, for none.
pub(crate) fn size_or_none(bytes: Option<u64>) -> String {
    bytes.map(size::show).unwrap_or_default()
}

/// Empty, which a table shows as `-`, for none.
pub(crate) fn number_or_none(number: Option<u64>) -> String {
    number.map(|number| number.to_string()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_widest_cell_and_none_is_a_dash() {
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
    fn a_name_cannot_command_the_terminal_or_make_a_row() {
        let mut table = Table::new([("NAME", Side::Left)]);
        table.row(["a\nb\u{1b}[2J\u{202e}c\u{9b}".to_owned()]);
        assert_eq!(table.print(), "NAME\na\\nb\\u{1b}[2J\\u{202e}c\\u{9b}\n");
    }

    #[test]
    fn an_answer_ends_with_one_line_end_in_both_forms() {
        let answer = Answer::new("text".to_owned(), &[1]).unwrap();
        assert_eq!(answer.print(false), "text\n");
        assert_eq!(answer.print(true), "[\n  1\n]\n");
        assert_eq!(Answer::new(String::new(), &()).unwrap().print(false), "");
    }
}

//! Reads tables of Markdown documents.

/// Returns `true` if a code block begins or ends with this line.
pub(crate) fn is_fence(line: &str) -> bool {
    line.trim_start().starts_with("```")
}

/// Returns the rows of the first table after a heading, such as `## Events`, without its header. Returns no rows if there is
/// no such heading, or no table before the next heading.
#[must_use]
pub fn table(text: &str, heading: &str) -> Vec<Vec<String>> {
    let section = text.lines().skip_while(|line| *line != heading).skip(1);
    let section = section.take_while(|line| !line.starts_with('#'));
    let table = section.skip_while(|line| !line.starts_with('|')).take_while(|line| line.starts_with('|'));
    // The first two lines are the header and the line below it.
    table.skip(2).map(cells).collect()
}

fn cells(row: &str) -> Vec<String> {
    row.trim().trim_matches('|').split('|').map(|cell| cell.trim().to_owned()).collect()
}

/// Returns the text of a cell that is code, or the cell itself.
#[must_use]
pub fn code(cell: &str) -> &str {
    cell.trim_matches('`')
}

//! Reads code blocks and tables of Markdown documents.

/// A fenced code block.
#[derive(Debug)]
pub struct Block {
    /// The word after the fence; empty if there is none.
    pub language: String,
    /// The lines of the block, without the indentation of its fence.
    pub lines: Vec<String>,
}

/// Returns `true` if a code block begins or ends with this line.
pub(crate) fn is_fence(line: &str) -> bool {
    line.trim_start().starts_with("```")
}

/// Returns the code blocks of a document.
#[must_use]
pub fn blocks(text: &str) -> Vec<Block> {
    let mut blocks = Vec::new();
    let mut open: Option<(usize, Block)> = None;
    for line in text.lines() {
        if is_fence(line) {
            match open.take() {
                Some((_, block)) => blocks.push(block),
                None => {
                    let indentation = line.len() - line.trim_start().len();
                    let language = line.trim_start().trim_start_matches('`').trim().to_owned();
                    open = Some((indentation, Block { language, lines: Vec::new() }));
                }
            }
        } else if let Some((indentation, block)) = &mut open {
            block.lines.push(line.get(*indentation..).unwrap_or_default().to_owned());
        }
    }
    blocks
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

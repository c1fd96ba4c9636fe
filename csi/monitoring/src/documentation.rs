//! For tests of the programs: the metrics they serve beside those that their README has.

use std::collections::BTreeMap;

/// Name and type of each metric on a page, as a query has to name it. A line that cannot be read is left out.
#[must_use]
pub fn served(page: &str) -> BTreeMap<String, String> {
    let types = page.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' '));
    types.map(|(name, kind)| (format!("{name}{}", suffix(kind)), kind.to_owned())).collect()
}

fn suffix(kind: &str) -> &'static str {
    match kind {
        "counter" => "_total",
        "info" => "_info",
        _ => "",
    }
}

/// The same of the table rows in a README whose first cell is a name that begins with `prefix`, and whose second is its type.
#[must_use]
pub fn documented(readme: &str, prefix: &str) -> BTreeMap<String, String> {
    let rows = readme.lines().filter_map(|line| line.strip_prefix("| `"));
    let cells = rows.filter(|row| row.starts_with(prefix)).filter_map(|row| {
        let mut cells = row.split('|').map(str::trim);
        Some((cells.next()?.trim_end_matches('`').to_owned(), cells.next()?.to_owned()))
    });
    cells.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_and_the_table_that_describes_it_are_the_same() {
        let page = "# HELP a_calls Calls.\n# TYPE a_calls counter\na_calls_total 1\n# TYPE a_build info\n# TYPE a_open gauge\n";
        let readme = "| name | type | |\n| `a_calls_total` | counter | x |\n| `a_build_info` | info | |\n| `a_open` | gauge | |\n\
                      | `b_open` | gauge | another program's |\n";
        assert_eq!(served(page), documented(readme, "a_"));
        assert_eq!(served(page).len(), 3);
    }
}

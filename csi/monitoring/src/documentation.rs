//! Compares, for tests of the programs, the metrics that a program serves with those in its README.

use std::collections::BTreeMap;

/// Returns the name and type of each metric of a scrape, as a query has to name it. Skips lines that it cannot parse.
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

/// Returns the name and type of each metric that the tables of a README list. The first cell of such a row is a name
/// with this prefix, and the second cell is the type.
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
    fn served_and_documented_metrics_compare_equal() {
        let page = "# HELP a_calls Calls.\n# TYPE a_calls counter\na_calls_total 1\n# TYPE a_build info\n# TYPE a_open gauge\n";
        let readme = "| name | type | |\n| `a_calls_total` | counter | x |\n| `a_build_info` | info | |\n| `a_open` | gauge | |\n\
                      | `b_open` | gauge | another program's |\n";
        assert_eq!(served(page), documented(readme, "a_"));
        assert_eq!(served(page).len(), 3);
    }
}

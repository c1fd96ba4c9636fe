//! Compares, for tests of the programs, the metrics that a program serves with those in README.md.

use std::collections::{BTreeMap, BTreeSet};

/// The document with the tables of all metrics.
pub(crate) const README: &str = include_str!("../../monitoring/README.md");

/// The ends of the names of samples: counters and info metrics have one, histograms have three.
const SUFFIXES: [&str; 6] = ["", "_total", "_info", "_bucket", "_sum", "_count"];

/// A metric, as a scrape and a table describe it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Metric {
    /// The type in the text format: `counter`, `gauge`, `histogram` or `info`.
    pub kind: String,
    /// The names of the labels, without that of the bucket limits of a histogram.
    pub labels: BTreeSet<String>,
    /// `bytes`, `seconds`, or an empty text for a number of things.
    pub unit: String,
}

/// Returns the metrics of a scrape by name, as a query has to name them. Skips lines that it cannot parse.
#[must_use]
pub fn served(page: &str) -> BTreeMap<String, Metric> {
    let metrics = comments(page, "# TYPE ").map(|(name, kind)| {
        let unit = comments(page, "# UNIT ").find(|(other, _)| *other == name).map(|(_, unit)| unit);
        let metric = Metric {
            kind: kind.to_owned(),
            labels: labels(page, name),
            unit: unit.unwrap_or_default().to_owned(),
        };
        (format!("{name}{}", suffix(kind)), metric)
    });
    metrics.collect()
}

/// Returns the name and the value of each comment with this keyword.
fn comments<'a>(page: &'a str, keyword: &'static str) -> impl Iterator<Item = (&'a str, &'a str)> {
    page.lines().filter_map(move |line| line.strip_prefix(keyword)?.split_once(' '))
}

fn suffix(kind: &str) -> &'static str {
    match kind {
        "counter" => "_total",
        "info" => "_info",
        _ => "",
    }
}

/// Returns the labels of the samples of the metric that a comment names.
fn labels(page: &str, name: &str) -> BTreeSet<String> {
    let pairs = page.lines().filter_map(|line| {
        let (sample, rest) = line.split_once('{')?;
        let suffix = sample.strip_prefix(name)?;
        SUFFIXES.contains(&suffix).then_some(rest.rsplit_once("} ")?.0)
    });
    let mut labels: BTreeSet<String> = pairs
        .flat_map(|pairs| pairs.split("\","))
        .filter_map(|pair| Some(pair.split_once("=\"")?.0.to_owned()))
        .collect();
    labels.remove("le");
    labels
}

/// Returns the metrics in the tables of README.md whose names have this prefix.
#[must_use]
pub fn documented(prefix: &str) -> BTreeMap<String, Metric> {
    rows(README, prefix)
}

/// Returns the metrics in the tables of a document. The cells of a row are the name, the type, the labels, the unit and the
/// meaning.
fn rows(document: &str, prefix: &str) -> BTreeMap<String, Metric> {
    let rows = document.lines().filter_map(|line| line.strip_prefix("| `"));
    let metrics = rows.filter(|row| row.starts_with(prefix)).filter_map(|row| {
        let mut cells = row.split('|').map(str::trim);
        let name = cells.next()?.trim_end_matches('`').to_owned();
        let kind = cells.next()?.to_owned();
        let labels = cells.next()?.split(", ").map(|label| label.trim_matches('`').to_owned());
        let labels = labels.filter(|label| !label.is_empty()).collect();
        Some((name, Metric { kind, labels, unit: cells.next()?.to_owned() }))
    });
    metrics.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: &str = "# HELP a_calls Calls {all}.\n# TYPE a_calls counter\n\
                        a_calls_total{method=\"Get\",code=\"\"} 1\na_calls_waiting{why=\"x\"} 1\n\
                        # TYPE a_build info\na_build_info{version=\"1\"} 1\n# TYPE a_open gauge\na_open 1\n\
                        # TYPE a_time_seconds histogram\n# UNIT a_time_seconds seconds\n\
                        a_time_seconds_bucket{le=\"0.1\",method=\"Get\"} 1\n";

    const TABLE: &str = "| name | type | labels | unit | meaning |\n| `a_calls_total` | counter | `method`, `code` | | x |\n\
                         | `a_build_info` | info | `version` | | |\n| `a_open` | gauge | | | |\n\
                         | `a_time_seconds` | histogram | `method` | seconds | |\n\
                         | `b_open` | gauge | | | another program's |\n";

    #[test]
    fn served_and_documented_metrics_compare_equal() {
        assert_eq!(served(PAGE), rows(TABLE, "a_"));
        assert_eq!(served(PAGE).len(), 4);
    }

    #[test]
    fn another_type_label_or_unit_differs() {
        for (before, after) in
            [("counter", "gauge"), ("`method`, `code`", "`method`"), ("| seconds", "| bytes")]
        {
            let table = TABLE.replace(before, after);
            assert_ne!(table, TABLE, "{before}");
            assert_ne!(served(PAGE), rows(&table, "a_"), "{before}");
        }
    }
}

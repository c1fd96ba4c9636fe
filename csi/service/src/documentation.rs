//! Compares, for tests of the programs, the metrics that a program serves with those in README.md.

use std::collections::{BTreeMap, BTreeSet};

use prometheus_client::encoding::text;
use prometheus_client::registry::Registry;

/// The document with the tables of all metrics.
pub(crate) const README: &str = include_str!("../../monitoring/README.md");

/// The ends of the names of samples: counters and info metrics have one, histograms have three.
const SUFFIXES: [&str; 6] = ["", "_total", "_info", "_bucket", "_sum", "_count"];

/// A metric, as a scrape and a table describe it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Metric {
    /// The type in the text format: `counter`, `gauge`, `histogram` or `info`.
    pub(crate) kind: String,
    /// The names of the labels, without that of the bucket limits of a histogram.
    pub(crate) labels: BTreeSet<String>,
    /// `bytes`, `seconds`, or an empty text for a number of things.
    unit: String,
}

impl Metric {
    /// Returns the row of a table, without the meaning.
    fn row(&self, name: &str) -> String {
        let labels: Vec<String> = self.labels.iter().map(|label| format!("`{label}`")).collect();
        let cells = [format!("`{name}`"), self.kind.clone(), labels.join(", "), self.unit.clone()];
        format!("| {} | |\n", cells.join(" | ")).replace("  ", " ")
    }
}

/// Returns the text format of metrics.
///
/// # Panics
/// If a metric cannot be encoded.
#[must_use]
pub fn page(registry: &Registry) -> String {
    let mut page = String::new();
    text::encode(&mut page, registry).expect("encode the metrics");
    page
}

/// Checks that README.md lists the metrics of a scrape with this prefix, and no others.
///
/// # Panics
/// If it does not. The message has the rows to add and to remove.
#[track_caller]
pub fn assert_documented(page: &str, prefix: &str) {
    if let Some(remedy) = differences(page, README, prefix) {
        panic!("{remedy}");
    }
}

/// Returns how to correct the tables of a document, or `None` if they have the metrics of the scrape.
fn differences(page: &str, document: &str, prefix: &str) -> Option<String> {
    let (served, documented) = (served(page), rows(document, &format!("{prefix}_")));
    let lacking = |these: &BTreeMap<String, Metric>, others: &BTreeMap<String, Metric>| -> String {
        let lacking = these.iter().filter(|(name, metric)| others.get(*name) != Some(metric));
        lacking.map(|(name, metric)| metric.row(name)).collect()
    };
    let (add, remove) = (lacking(&served, &documented), lacking(&documented, &served));
    (!add.is_empty() || !remove.is_empty()).then(|| {
        format!(
            "the tables of csi/monitoring/README.md differ from the metrics that the program serves in this test\nadd, with the \
             meaning in the last cell:\n{add}remove:\n{remove}Alerts and dashboards of users have these names: write the change of \
             a name or label into CHANGELOG.md"
        )
    })
}

/// Returns the metrics of a scrape by name, as a query has to name them. Skips lines that it cannot parse.
fn served(page: &str) -> BTreeMap<String, Metric> {
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

/// Returns the metrics in the tables of a document whose names have this prefix. The cells of a row are the name, the type, the
/// labels, the unit and the meaning.
pub(crate) fn rows(document: &str, prefix: &str) -> BTreeMap<String, Metric> {
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
        assert_eq!(differences(PAGE, TABLE, "a"), None);
        assert_eq!(served(PAGE).len(), 4);
    }

    #[test]
    fn another_type_label_or_unit_differs() {
        for (before, after) in
            [("counter", "gauge"), ("`method`, `code`", "`method`"), ("| seconds", "| bytes")]
        {
            let table = TABLE.replace(before, after);
            assert_ne!(table, TABLE, "{before}");
            assert!(differences(PAGE, &table, "a").is_some(), "{before}");
        }
    }

    #[test]
    fn the_remedy_has_the_rows_to_add_and_to_remove() {
        let remedy = differences(PAGE, &TABLE.replace("a_open", "a_closed"), "a").unwrap();
        let (add, remove) = remedy.split_once("remove:").unwrap();
        assert!(add.ends_with("\n| `a_open` | gauge | | | |\n"), "{remedy}");
        assert!(remove.starts_with("\n| `a_closed` | gauge | | | |\n"), "{remedy}");
    }
}

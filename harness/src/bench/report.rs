//! The report of a run as a page: the ratios to the peers of the same run, then the plots, then the environments and all rows.

use anyhow::{Context, Result};

use super::comparison::{Comparison, Verdict};
use super::html::{Cell, Page};
use super::measurement::Measurements;
use super::plot::{self, Plot};
use super::results::{MeasuredAt, Results, ThresholdResult};
use super::threshold::{Ratio, RowName, Statistic};

const TITLE: &str = "loopfs benchmarks";

/// Returns the page. `plots_of` returns the plots of a benchmark by its name.
pub(super) fn page(
    results: &Results,
    plots_of: impl Fn(&str) -> &'static [Plot],
    comparison: Option<&Comparison>,
) -> Result<String> {
    let mut page = Page::default();
    page.heading(1, TITLE);
    page.paragraph(&source(results));
    failures(&mut page, results);
    if let Some(comparison) = comparison {
        changes(&mut page, comparison);
    }
    ratios(&mut page, results);
    thresholds(&mut page, results);
    plots(&mut page, results, plots_of)?;
    environments(&mut page, &results.environments);
    rows(&mut page, results);
    Ok(page.finish(TITLE))
}

fn source(results: &Results) -> String {
    let commit = match &results.source.commit {
        Some(commit) if results.source.has_changes => format!("Commit {commit} with uncommitted changes."),
        Some(commit) => format!("Commit {commit}."),
        None => "The sources were no Git checkout.".to_owned(),
    };
    let kind = if results.quick {
        " A short run (--quick), whose thresholds are not those of a full run."
    } else {
        ""
    };
    format!("{commit}{kind}")
}

fn environments(page: &mut Page, environments: &[MeasuredAt]) {
    page.heading(2, "Environments");
    let rows = environments.iter().map(|MeasuredAt { place, machine }| {
        let kubernetes = machine.kubernetes.clone().unwrap_or_else(|| "-".to_owned());
        vec![
            Cell::text(place.clone()),
            Cell::text(machine.kernel.clone()),
            Cell::text(kubernetes),
            Cell::number(machine.cpus.to_string()),
            Cell::text(machine.cpu.clone()),
            Cell::text(machine.file_system.clone()),
        ]
    });
    let columns = ["place", "Linux", "Kubernetes", "processors", "model", "file system"];
    page.table(&columns, &rows.collect::<Vec<_>>());
}

fn failures(page: &mut Page, results: &Results) {
    if results.failures.is_empty() {
        return;
    }
    page.heading(2, "Benchmarks that did not complete");
    let rows = results.failures.iter();
    let rows = rows.map(|failure| vec![Cell::text(failure.bench.clone()), Cell::text(failure.error.clone())]);
    page.table(&["benchmark", "error"], &rows.collect::<Vec<_>>());
}

fn changes(page: &mut Page, comparison: &Comparison) {
    page.heading(2, "Changes since the old run");
    for warning in &comparison.warnings {
        page.paragraph(&format!("Warning: {warning}."));
    }
    let rows = comparison.changes.iter().map(|change| {
        let value = |value: Option<f64>| Cell::number(value.map_or_else(|| "-".to_owned(), number));
        let is_good = match change.verdict {
            Verdict::Worse => Some(false),
            Verdict::Better => Some(true),
            _ => None,
        };
        vec![
            Cell::text(change.bench.clone()),
            Cell::text(change.name.clone()),
            Cell::number(change.n.to_string()),
            Cell::text(change.unit.clone()),
            value(change.old),
            value(change.new),
            Cell::number(change.ratio().map_or_else(|| "-".to_owned(), |ratio| format!("{ratio:.2}"))),
            Cell::verdict(change.verdict.text(), is_good),
        ]
    });
    let columns = ["benchmark", "row", "n", "unit", "old", "new", "new / old", "verdict"];
    page.table(&columns, &rows.collect::<Vec<_>>());
}

fn ratios(page: &mut Page, results: &Results) {
    page.heading(2, "Ratios to the peers of the same run");
    let rows = results.thresholds.iter().filter_map(|threshold| {
        let Ratio { row, peer, statistic, value } = threshold.ratio.as_ref()?;
        let all = results.measurements(&threshold.bench);
        let value_of = |name: &RowName| {
            Cell::text(format!("{} ({}): {}", name.name, name.n, measured(&all, name, *statistic)))
        };
        Some(vec![
            Cell::text(threshold.bench.clone()),
            Cell::text(threshold.text.clone()),
            value_of(row),
            value_of(peer),
            Cell::number(ratio_text(*value)),
            verdict(threshold),
        ])
    });
    let columns = ["benchmark", "requirement", "row (n)", "peer (n)", "row / peer", "threshold"];
    page.table(&columns, &rows.collect::<Vec<_>>());
}

/// Returns the value of a row with its unit, or a dash if the run has no such row.
fn measured(all: &Measurements, RowName { name, n }: &RowName, statistic: Statistic) -> String {
    let row = all.rows().find(|row| row.name == *name && row.n == *n);
    let text = row.map(|row| match statistic {
        Statistic::Median => format!("{} {}", number(row.median), row.unit),
        Statistic::P99 => format!("{} {} (p99)", number(row.p99), row.unit),
    });
    text.unwrap_or_else(|| "-".to_owned())
}

/// Adds the thresholds that compare a row with a bound or were not measured. The others are among the ratios.
fn thresholds(page: &mut Page, results: &Results) {
    let others: Vec<Vec<Cell>> = results
        .thresholds
        .iter()
        .filter(|threshold| threshold.ratio.is_none())
        .map(|threshold| {
            vec![
                Cell::text(threshold.bench.clone()),
                Cell::text(threshold.text.clone()),
                Cell::text(threshold.values.clone()),
                verdict(threshold),
            ]
        })
        .collect();
    if !others.is_empty() {
        page.heading(2, "Thresholds without a peer");
    }
    page.table(&["benchmark", "requirement", "measured", "threshold"], &others);
}

fn verdict(threshold: &ThresholdResult) -> Cell {
    let text = match threshold.is_met {
        Some(true) => "met",
        Some(false) => "not met",
        None => "not measured",
    };
    Cell::verdict(text, threshold.is_met)
}

fn plots(page: &mut Page, results: &Results, plots_of: impl Fn(&str) -> &'static [Plot]) -> Result<()> {
    page.heading(2, "Plots");
    for bench in results.benches() {
        let drawn = plot::svg(&results.measurements(bench), plots_of(bench));
        let drawn = drawn.with_context(|| format!("draw the plots of the benchmark {bench}"))?;
        if let Some(svg) = drawn {
            page.heading(3, bench);
            page.drawing(&svg);
        }
    }
    Ok(())
}

fn rows(page: &mut Page, results: &Results) {
    page.heading(2, "Rows");
    for bench in results.benches() {
        for part in results.measurements(bench).parts {
            page.heading(3, &format!("{bench}: {}", part.place));
            let rows = part.rows.iter().map(|row| {
                vec![
                    Cell::text(row.name.clone()),
                    Cell::number(row.n.to_string()),
                    Cell::number(number(row.median)),
                    Cell::number(number(row.p99)),
                    Cell::text(row.unit.clone()),
                    Cell::number(row.runs.to_string()),
                ]
            });
            let columns = ["row", "n", "median", "p99", "unit", "runs"];
            page.table(&columns, &rows.collect::<Vec<_>>());
        }
    }
}

/// Returns a value as text, with fewer decimal places the larger it is.
fn number(value: f64) -> String {
    let digits = match value.abs() {
        large if large >= 1000.0 => 0,
        medium if medium >= 10.0 => 1,
        _ => 3,
    };
    format!("{value:.digits$}")
}

/// Returns a ratio that is readable if it is far below 1, too.
fn ratio_text(ratio: f64) -> String {
    if ratio != 0.0 && ratio < 0.095 { format!("1/{:.0}", 1.0 / ratio) } else { format!("{ratio:.2}") }
}

#[cfg(test)]
mod tests {
    use super::super::measurement::Row;
    use super::super::outcome::Outcome;
    use super::super::results::Source;
    use super::super::threshold;
    use super::*;

    const PLOTS: &[Plot] = &[Plot::new("Attach", "devices", &["ours"])];

    fn outcome(peer: &str) -> Outcome {
        let row = |name: &str, n, value| Row::of(name, n, "us", [value]).unwrap();
        let rows = vec![row("ours", 10, 2.0), row("ours", 100, 2.5), row(peer, 100, 50.0)];
        let all = Measurements::of(rows);
        let thresholds = vec![
            threshold::faster(&all, "20 times as fast", ("ours", 100), 20.0, (peer, 100)),
            threshold::no_more(&all, "at most 1", ("ours", 10), 1.0),
        ];
        Outcome { measurements: all, thresholds, plots: PLOTS }
    }

    fn page_of(results: &Results, comparison: Option<&Comparison>) -> String {
        page(results, |_| PLOTS, comparison).unwrap()
    }

    fn results(peer: &str) -> Results {
        let mut results =
            Results::new(Source { commit: Some("0c20236".to_owned()), has_changes: true }, true);
        results.add("loop", &outcome(peer));
        results
    }

    #[test]
    fn ratios_are_before_plots_and_plots_before_rows() {
        let text = page_of(&results("peer"), None);
        let at = |part: &str| text.find(part).unwrap_or_else(|| panic!("no {part} in {text}"));
        let ratio = "<td>ours (100): 2.500 us</td><td>peer (100): 50.0 us</td><td class=\"number\">1/20</td>\
                     <td class=\"good\">met</td>";
        let (environment, row) = ("Environments", "<td>ours</td>");
        let order = ["0c20236 with uncommitted", ratio, "not met", "<svg", environment, row].map(at);
        assert!(order.is_sorted(), "{order:?}");
        assert!(!text.contains("Changes since") && !text.contains("did not complete"));
    }

    #[test]
    fn the_page_names_no_other_file_and_escapes_names() {
        let mut results = results("<img src=x>");
        results.add_failure("csi", &anyhow::anyhow!("<b>no disk</b>"));
        results.environments[0].place = "a & b".to_owned();
        let text = page_of(&results, None);
        assert!(!text.contains("<img") && !text.contains("<b>") && !text.contains("a & b"), "{text}");
        assert!(text.contains("&lt;img src=x&gt; (100)") && text.contains("&lt;b&gt;no disk"), "{text}");
        for reference in [" src=\"", " href=\"", "<link", "<script", "url("] {
            assert!(!text.contains(reference), "{reference} in {text}");
        }
    }

    #[test]
    fn a_comparison_is_shown_with_its_warnings() {
        let (old, new) = (Results::new(Source::default(), false), results("peer"));
        let text = page_of(&new, Some(&Comparison::of(&old, &new, 1.1)));
        assert!(text.contains("Changes since the old run") && text.contains("only in the new run"), "{text}");
        assert!(text.contains("Warning: one run is short"), "{text}");
    }

    #[test]
    fn numbers_and_ratios_are_short() {
        assert_eq!([0.1234, 12.34, 12_345.6].map(number), ["0.123", "12.3", "12346"]);
        assert_eq!([2.0, 0.5, 0.01, 0.0].map(ratio_text), ["2.00", "0.50", "1/100", "0.00"]);
    }
}

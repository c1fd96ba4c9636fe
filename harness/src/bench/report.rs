//! The report of a run: as a page, with the ratios to the peers of the same run, the plots, the environments and all rows; and as
//! text for the terminal.
//!
//! The page has no scripts and needs no other files.

use std::fmt::{Display, Write as _};

use anyhow::{Context, Result};
use clap::ValueEnum;

use super::args::Bench;
use super::comparison::{Comparison, Verdict};
use super::measurement::{Environment, Measurements, RowName};
use super::plot;
use super::results::{MeasuredAt, Results};
use super::threshold::{Ratio, Statistic, Threshold};

const TITLE: &str = "loopfs benchmarks";
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

/// A table for the page and for the terminal.
struct Table {
    columns: &'static [&'static str],
    rows: Vec<Vec<Cell>>,
}

/// The text of a cell, and its class in the style sheet.
#[derive(Clone, Debug)]
struct Cell(String, Option<&'static str>);

const NUMBER: Option<&str> = Some("number");

fn text_cell(text: impl Display) -> Cell {
    Cell(text.to_string(), None)
}

fn number_cell(text: impl Display) -> Cell {
    Cell(text.to_string(), NUMBER)
}

/// Returns a cell that stands out as good or as bad.
fn verdict_cell(text: &str, is_good: Option<bool>) -> Cell {
    Cell(text.to_owned(), is_good.map(|is_good| if is_good { "good" } else { "bad" }))
}

impl Table {
    /// Returns the table as markup, or nothing if it has no rows.
    fn html(&self) -> String {
        let Some(first) = self.rows.first() else { return String::new() };
        let row = |cells: &mut dyn Iterator<Item = (&str, Option<&str>)>, element: &str| {
            let cells = cells.map(|(text, class)| {
                let class = class.map(|class| format!(" class=\"{class}\"")).unwrap_or_default();
                format!("<{element}{class}>{}</{element}>", escaped(text))
            });
            format!("<tr>{}</tr>\n", cells.collect::<String>())
        };
        // The heading of a column of numbers is above the numbers.
        let headings = self.columns.iter().zip(first);
        let mut headings = headings.map(|(name, cell)| (*name, cell.1.filter(|_| cell.1 == NUMBER)));
        let mut text = format!("<table>\n{}", row(&mut headings, "th"));
        for cells in &self.rows {
            text += &row(&mut cells.iter().map(|cell| (cell.0.as_str(), cell.1)), "td");
        }
        text + "</table>\n"
    }

    /// Returns the table as text in columns.
    fn text(&self) -> String {
        let width = |column: usize| {
            let cells = self.rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.0.len());
            cells.fold(self.columns[column].len(), usize::max)
        };
        let widths: Vec<usize> = (0..self.columns.len()).map(width).collect();
        let headings = self.columns.iter().enumerate().map(|(column, name)| {
            let first = self.rows.first().and_then(|row| row.get(column));
            Cell((*name).to_owned(), first.and_then(|cell| cell.1))
        });
        let mut text = String::new();
        for row in std::iter::once(headings.collect()).chain(self.rows.iter().cloned()) {
            let cells = row.iter().zip(&widths).map(|(Cell(text, class), width)| match *class {
                NUMBER => format!("{text:>width$}"),
                _ => format!("{text:<width$}"),
            });
            _ = writeln!(text, "  {}", cells.collect::<Vec<_>>().join("  ").trim_end());
        }
        text
    }
}

/// Returns text in which no character begins markup or ends an attribute.
fn escaped(text: &str) -> String {
    let pairs = [('&', "&amp;"), ('<', "&lt;"), ('>', "&gt;"), ('"', "&quot;"), ('\'', "&#39;")];
    pairs.iter().fold(text.to_owned(), |text, (character, entity)| text.replace(*character, entity))
}

/// Returns a heading of level 1 for the page, 2 for a section and 3 for a part of it.
fn heading(level: u8, text: &str) -> String {
    format!("<h{level}>{}</h{level}>\n", escaped(text))
}

fn paragraph(text: &str) -> String {
    format!("<p>{}</p>\n", escaped(text))
}

/// Returns the page.
pub(super) fn page(results: &Results, comparison: Option<&Comparison>) -> Result<String> {
    let mut body = heading(1, TITLE) + &paragraph(&source(results));
    if !results.failures.is_empty() {
        let rows = results.failures.iter();
        let rows = rows.map(|failure| vec![text_cell(&failure.bench), text_cell(&failure.error)]).collect();
        body += &heading(2, "Benchmarks that did not complete");
        body += &Table { columns: &["benchmark", "error"], rows }.html();
    }
    if let Some(comparison) = comparison {
        body += &heading(2, "Changes since the old run");
        for warning in &comparison.warnings {
            body += &paragraph(&format!("Warning: {warning}."));
        }
        body += &changes_table(comparison).html();
    }
    body += &heading(2, "Ratios to the peers of the same run");
    body += &ratios(results).html();
    let bounds = bounds(&results.thresholds);
    if !bounds.rows.is_empty() {
        body += &heading(2, "Thresholds without a peer");
    }
    body += &bounds.html();
    body += &plots(results)?;
    body += &heading(2, "Environments");
    body += &environments(&results.environments).html();
    body += &heading(2, "Rows");
    for bench in results.benches() {
        for part in results.measurements(bench).parts {
            body += &heading(3, &format!("{bench}: {}", part.place));
            body += &rows(&part).html();
        }
    }
    Ok(format!(
        "<!DOCTYPE html>\n<html lang=\"en-GB\">\n<head>\n<meta charset=\"utf-8\">\n<title>{TITLE}</title>\n\
         <style>\n{STYLE}</style>\n</head>\n<body>\n{body}</body>\n</html>\n"
    ))
}

/// Returns the rows and the thresholds of each benchmark, and the benchmarks that did not complete, as text.
pub(super) fn text(results: &Results) -> String {
    let mut text = String::new();
    for bench in results.benches() {
        for part in results.measurements(bench).parts {
            let machine = &part.machine;
            let kubernetes = machine.kubernetes.as_ref().map(|release| format!(", Kubernetes {release}"));
            _ = writeln!(
                text,
                "{}: Linux {}, {} x {}, {}{}\n{}",
                part.place,
                machine.kernel,
                machine.cpus,
                machine.cpu,
                machine.file_system,
                kubernetes.unwrap_or_default(),
                rows(&part).text()
            );
        }
        for threshold in results.thresholds.iter().filter(|threshold| threshold.bench == bench) {
            let verdict = verdict_of(threshold.is_met);
            _ = writeln!(text, "{verdict:<13}  {}\n{:15}{}", threshold.text, "", threshold.values);
        }
        text.push('\n');
    }
    for failure in &results.failures {
        _ = writeln!(text, "the benchmark {} did not complete: {}", failure.bench, failure.error);
    }
    text
}

/// Returns a comparison as text: a table with one line for each row, and a last line that counts the verdicts.
pub(super) fn changes(comparison: &Comparison) -> String {
    let mut text = String::new();
    for warning in &comparison.warnings {
        _ = writeln!(text, "warning: {warning}");
    }
    text += &changes_table(comparison).text();
    let count = |verdict| comparison.changes.iter().filter(|change| change.verdict == verdict).count();
    _ = writeln!(
        text,
        "of {} rows {} worse, {} better, {} unchanged, {} with too few samples, {} in one run only",
        comparison.changes.len(),
        count(Verdict::Worse),
        count(Verdict::Better),
        count(Verdict::Unchanged),
        count(Verdict::TooFewSamples),
        count(Verdict::OnlyOld) + count(Verdict::OnlyNew)
    );
    text
}

/// Returns the last line of a run: how many thresholds are not met, because a run without `--check` succeeds either way, and
/// the known causes.
pub(super) fn verdict(all: &[Threshold]) -> String {
    let count = |verdict| all.iter().filter(|threshold| threshold.is_met == verdict).count();
    let (missed, unmeasured) = (count(Some(false)), count(None));
    if (missed, unmeasured) == (0, 0) {
        return format!("all {} thresholds are met", all.len());
    }
    let causes = all.iter().filter(|threshold| threshold.is_met == Some(false));
    let causes: Vec<&str> = causes.filter_map(|threshold| threshold.cause).collect();
    let causes = if causes.is_empty() { String::new() } else { format!(": {}", causes.join("; ")) };
    let number = |n: usize, one: &str, many: &str| format!("{n} {}", if n == 1 { one } else { many });
    format!(
        "of {} thresholds {} and {}{causes}",
        all.len(),
        number(missed, "is not met", "are not met"),
        number(unmeasured, "was not measured", "were not measured")
    )
}

fn verdict_of(is_met: Option<bool>) -> &'static str {
    match is_met {
        Some(true) => "met",
        Some(false) => "not met",
        None => "not measured",
    }
}

fn source(results: &Results) -> String {
    let commit = match &results.source.commit {
        Some(commit) if results.source.has_changes => format!("Commit {commit} with uncommitted changes."),
        Some(commit) => format!("Commit {commit}."),
        None => "The sources were no Git checkout.".to_owned(),
    };
    let quick = " A short run (--quick), whose thresholds are not those of a full run.";
    format!("{commit}{}", if results.quick { quick } else { "" })
}

fn environments(environments: &[MeasuredAt]) -> Table {
    let rows = environments.iter().map(|MeasuredAt { place, machine }| {
        vec![
            text_cell(place),
            text_cell(&machine.kernel),
            text_cell(machine.kubernetes.as_deref().unwrap_or("-")),
            number_cell(machine.cpus),
            text_cell(&machine.cpu),
            text_cell(&machine.file_system),
        ]
    });
    let columns = &["place", "Linux", "Kubernetes", "processors", "model", "file system"];
    Table { columns, rows: rows.collect() }
}

fn changes_table(comparison: &Comparison) -> Table {
    let rows = comparison.changes.iter().map(|change| {
        let value = |value: Option<f64>| number_cell(value.map_or_else(|| "-".to_owned(), number));
        let is_good = match change.verdict {
            Verdict::Worse => Some(false),
            Verdict::Better => Some(true),
            _ => None,
        };
        vec![
            text_cell(&change.bench),
            text_cell(&change.row.name),
            number_cell(change.row.n),
            text_cell(&change.unit),
            value(change.old),
            value(change.new),
            number_cell(change.ratio().map_or_else(|| "-".to_owned(), |ratio| format!("{ratio:.2}"))),
            number_cell(change.probability.map_or_else(|| "-".to_owned(), |p| format!("{p:.4}"))),
            verdict_cell(change.verdict.text(), is_good),
        ]
    });
    let columns = &["benchmark", "row", "n", "unit", "old", "new", "new / old", "p", "verdict"];
    Table { columns, rows: rows.collect() }
}

fn ratios(results: &Results) -> Table {
    let rows = results.thresholds.iter().filter_map(|threshold| {
        let Ratio { row, peer, statistic, value } = threshold.ratio.as_ref()?;
        let all = results.measurements(&threshold.bench);
        let value_of = |name: &RowName| {
            text_cell(format!("{} ({}): {}", name.name, name.n, measured(&all, name, *statistic)))
        };
        Some(vec![
            text_cell(&threshold.bench),
            text_cell(&threshold.text),
            value_of(row),
            value_of(peer),
            number_cell(ratio_text(*value)),
            verdict_cell(verdict_of(threshold.is_met), threshold.is_met),
        ])
    });
    let columns = &["benchmark", "requirement", "row (n)", "peer (n)", "row / peer", "threshold"];
    Table { columns, rows: rows.collect() }
}

/// Returns the value of a row with its unit, or a dash if the run has no such row.
fn measured(all: &Measurements, RowName { name, n }: &RowName, statistic: Statistic) -> String {
    let suffix = if statistic == Statistic::P99 { " (p99)" } else { "" };
    let text = |row| format!("{} {}{suffix}", number(statistic.of(row)), row.unit);
    all.row(name, *n).map_or_else(|| "-".to_owned(), text)
}

/// Returns the thresholds that compare a row with a bound or were not measured. The others are among the ratios.
fn bounds(thresholds: &[Threshold]) -> Table {
    let rows = thresholds.iter().filter(|threshold| threshold.ratio.is_none()).map(|threshold| {
        vec![
            text_cell(&threshold.bench),
            text_cell(&threshold.text),
            text_cell(&threshold.values),
            verdict_cell(verdict_of(threshold.is_met), threshold.is_met),
        ]
    });
    Table { columns: &["benchmark", "requirement", "measured", "threshold"], rows: rows.collect() }
}

/// Returns the plots of the benchmarks. Their library escapes the texts in them.
fn plots(results: &Results) -> Result<String> {
    let mut text = heading(2, "Plots");
    for name in results.benches() {
        let Ok(bench) = Bench::from_str(name, false) else { continue };
        let drawn = plot::svg(&results.measurements(name), &(bench.entry().plots)());
        let drawn = drawn.with_context(|| format!("draw the plots of the benchmark {name}"))?;
        if let Some(svg) = drawn {
            text += &heading(3, name);
            text += &format!("<figure>\n{svg}\n</figure>\n");
        }
    }
    Ok(text)
}

fn rows(part: &Environment) -> Table {
    let rows = part.rows.iter().map(|row| {
        vec![
            text_cell(&row.name),
            number_cell(row.n),
            number_cell(number(row.median)),
            number_cell(number(row.p99)),
            text_cell(&row.unit),
            number_cell(row.runs),
        ]
    });
    Table { columns: &["row", "n", "median", "p99", "unit", "runs"], rows: rows.collect() }
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
    use rstest::rstest;

    use super::super::measurement::Row;
    use super::super::results::Source;
    use super::super::threshold;
    use super::*;

    fn results(peer: &str) -> Results {
        let row = |name: &str, n, value| Row::of(name, n, "us", [value]).unwrap();
        let rows = vec![row("find_device", 10, 2.0), row("find_device", 100, 2.5), row(peer, 100, 50.0)];
        let all = Measurements::of(rows);
        let requirements = [
            threshold::faster("20 times as fast", "find_device", 20.0, peer),
            threshold::no_more("at most 1", "find_device", 1.0),
        ];
        let thresholds = requirements.iter().flat_map(|requirement| requirement.judge("loop", &all));
        let source = Source { commit: Some("0c20236".to_owned()), has_changes: true };
        let mut results = Results::new(source, true);
        results.add("loop", &all, thresholds.collect());
        results
    }

    #[test]
    fn ratios_are_before_plots_and_rows() {
        let text = page(&results("peer"), None).unwrap();
        let at = |part: &str| text.find(part).unwrap_or_else(|| panic!("no {part} in {text}"));
        let ratio = "<td>find_device (100): 2.500 us</td><td>peer (100): 50.0 us</td><td class=\"number\">1/20</td>\
                     <td class=\"good\">met</td>";
        let heading = "<th>peer (n)</th><th class=\"number\">row / peer</th>";
        let (environment, row) = ("Environments", "<td>find_device</td>");
        let order = ["0c20236 with uncommitted", heading, ratio, "not met", "<svg", environment, row].map(at);
        assert!(order.is_sorted(), "{order:?}");
        assert!(!text.contains("Changes since") && !text.contains("did not complete"));
    }

    #[test]
    fn no_text_becomes_markup() {
        const HOSTILE: &str = "<img src=x onerror='a & \"b\"'>";
        let mut results = results(HOSTILE);
        results.add_failure("csi", &anyhow::anyhow!(HOSTILE));
        results.environments[0].place = HOSTILE.to_owned();
        let comparison = Comparison::of(&Results::new(Source::default(), false), &results, 1.1);
        let text = page(&results, Some(&comparison)).unwrap();
        assert!(!text.contains("<img") && !text.contains("'a"), "{text}");
        assert!(text.contains("&lt;img src=x onerror=&#39;a &amp; &quot;b&quot;&#39;&gt; (100)"), "{text}");
        for reference in [" src=\"", " href=\"", "<link", "<script", "url("] {
            assert!(!text.contains(reference), "{reference} in {text}");
        }
    }

    #[test]
    fn comparison_has_warnings_and_table() {
        let (old, new) = (Results::new(Source::default(), false), results("peer"));
        let comparison = Comparison::of(&old, &new, 1.1);
        let html = page(&new, Some(&comparison)).unwrap();
        assert!(html.contains("Changes since the old run") && html.contains("only in the new run"), "{html}");
        assert!(html.contains("Warning: one run is short"), "{html}");
        let text = changes(&comparison);
        let line = text.lines().find(|line| line.contains("peer")).unwrap();
        let words: Vec<&str> = line.split_whitespace().take(8).collect();
        assert_eq!(words, ["loop", "peer", "100", "us", "-", "50.0", "-", "-"], "{text}");
        assert!(text.ends_with(
            "of 3 rows 0 worse, 0 better, 0 unchanged, 0 with too few samples, 3 in one run only\n"
        ));
    }

    #[rstest]
    #[case(&[Some(true), Some(true)], "all 2 thresholds are met")]
    #[case(&[Some(true), Some(false), Some(true)], "of 3 thresholds 1 is not met and 0 were not measured: cause")]
    #[case(&[Some(false), Some(false), None], "of 3 thresholds 2 are not met and 1 was not measured: cause; cause")]
    fn the_verdict_counts_missed_thresholds(#[case] verdicts: &[Option<bool>], #[case] line: &str) {
        let threshold = |is_met: &Option<bool>| Threshold {
            is_met: *is_met,
            cause: Some("cause"),
            ..Threshold::default()
        };
        assert_eq!(verdict(&verdicts.iter().map(threshold).collect::<Vec<_>>()), line);
    }

    #[test]
    fn numbers_and_ratios_are_short() {
        assert_eq!([0.1234, 12.34, 12_345.6].map(number), ["0.123", "12.3", "12346"]);
        assert_eq!([2.0, 0.5, 0.01, 0.0].map(ratio_text), ["2.00", "0.50", "1/100", "0.00"]);
    }
}

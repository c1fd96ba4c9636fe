//! Plots as SVG: times or bytes against a count, both logarithmic, so that a constant value is a horizontal line and a
//! factor is a distance.

use std::ops::Range;

use anyhow::{Context, Result};
use plotters::coord::Shift;
use plotters::prelude::*;

use super::measurement::{Measurements, Row};

/// One plot of the rows with these names against their counts.
#[derive(Clone, Debug)]
pub(super) struct Plot {
    title: String,
    /// The label of the counts.
    x: &'static str,
    names: Vec<String>,
}

impl Plot {
    pub(super) fn new(
        title: impl Into<String>,
        x: &'static str,
        names: impl IntoIterator<Item = impl Into<String>>,
    ) -> Plot {
        Plot { title: title.into(), x, names: names.into_iter().map(Into::into).collect() }
    }
}

/// The size of one plot with its legend. Two plots are side by side.
const SIZE: (u32, u32) = (640, 320);
/// The width without the legend.
const CURVES_WIDTH: u32 = 400;
/// The largest number of lines across an axis, so that each power of ten has one.
const MAX_LINES: usize = 12;
/// Colours that are distinguishable with colour vision deficiency too (Okabe and Ito).
const COLOURS: [RGBColor; 6] = [
    RGBColor(0, 0x72, 0xb2),
    RGBColor(0xd5, 0x5e, 0),
    RGBColor(0, 0x9e, 0x73),
    RGBColor(0xcc, 0x79, 0xa7),
    RGBColor(0xe6, 0x9f, 0),
    RGBColor(0x56, 0xb4, 0xe9),
];

/// Returns a drawing of all plots, except those without measurements. Returns `None` if no plot has any.
pub(super) fn svg(all: &Measurements, plots: &[Plot]) -> Result<Option<String>> {
    let drawn: Vec<&Plot> = plots.iter().filter(|plot| !rows(all, &plot.names).is_empty()).collect();
    if drawn.is_empty() {
        return Ok(None);
    }
    let lines = drawn.len().div_ceil(2);
    let size = (2 * SIZE.0, u32::try_from(lines)? * SIZE.1);
    let mut text = String::new();
    let root = SVGBackend::with_string(&mut text, size).into_drawing_area();
    root.fill(&WHITE)?;
    for (area, plot) in root.split_evenly((lines, 2)).iter().zip(drawn) {
        draw(area, all, plot).with_context(|| format!("draw the plot {:?}", plot.title))?;
    }
    root.present()?;
    drop(root);
    Ok(Some(text))
}

/// Returns the rows with these names in ascending order of the count. Those without a logarithm are left out.
fn rows<'a>(all: &'a Measurements, names: &[String]) -> Vec<&'a Row> {
    let is_drawn = |row: &&Row| names.contains(&row.name) && row.n > 0 && row.median > 0.0;
    let mut rows: Vec<&Row> = all.rows().filter(is_drawn).collect();
    rows.sort_by_key(|row| row.n);
    rows
}

fn draw(area: &DrawingArea<SVGBackend, Shift>, all: &Measurements, plot: &Plot) -> Result<()> {
    let (curves, legend) = area.split_horizontally(CURVES_WIDTH);
    let shown = rows(all, &plot.names);
    let counts = decades(shown.iter().map(|row| row.n as f64)).context("no count is positive")?;
    let values = decades(shown.iter().map(|row| row.median)).context("no value is positive")?;
    let in_bytes = shown.iter().all(|row| row.unit == BYTES);
    let value = |value: f64| if in_bytes { bytes(value) } else { duration(value) };
    let mut chart = ChartBuilder::on(&curves)
        .caption(&plot.title, ("sans-serif", 18))
        .margin(10)
        .x_label_area_size(40)
        .y_label_area_size(60)
        .build_cartesian_2d(counts.log_scale(), values.log_scale())?;
    chart
        .configure_mesh()
        .label_style(("sans-serif", 15))
        .bold_line_style(BLACK.mix(0.13))
        .x_desc(plot.x)
        .x_labels(MAX_LINES)
        .x_label_formatter(&|count| labelled(*count, label))
        .y_labels(MAX_LINES)
        .y_label_formatter(&|height| labelled(*height, value))
        .max_light_lines(1)
        .draw()?;
    for (place, (name, colour)) in plot.names.iter().zip(COLOURS.iter().cycle()).enumerate() {
        let rows = rows(all, std::slice::from_ref(name));
        let Some(last) = rows.last() else { continue };
        let points = rows.iter().map(|row| (row.n as f64, row.median));
        chart.draw_series(LineSeries::new(points, colour.filled()).point_size(3))?;
        let style = ("sans-serif", 15).into_font().color(colour);
        legend.draw_text(
            &format!("{name} {}", value(last.median)),
            &style,
            (12, 40 + 20 * i32::try_from(place)?),
        )?;
    }
    Ok(())
}

/// Returns the range between the powers of ten below and above the values, or `None` if no value is positive.
fn decades(values: impl Iterator<Item = f64>) -> Option<Range<f64>> {
    let exponents: Vec<f64> = values.filter(|value| *value > 0.0).map(f64::log10).collect();
    let first = exponents.iter().copied().reduce(f64::min)?.floor();
    let last = exponents.iter().copied().reduce(f64::max)?.ceil().max(first + 1.0);
    Some(10f64.powf(first)..10f64.powf(last))
}

/// Returns the label of a line across an axis. If an axis has all lines of one power of ten, not all labels have space.
fn labelled(value: f64, label: impl Fn(f64) -> String) -> String {
    let digit = (value / 10f64.powf(value.log10().floor())).round();
    if [1.0, 2.0, 5.0, 10.0].contains(&digit) { label(value) } else { String::new() }
}

fn label(count: f64) -> String {
    if count >= 1000.0 { format!("{} k", count / 1000.0) } else { count.to_string() }
}

/// Returns the text of a duration in microseconds.
fn duration(microseconds: f64) -> String {
    amount(match microseconds {
        us if us >= 1e6 => (us / 1e6, "s"),
        us if us >= 1e3 => (us / 1e3, "ms"),
        us => (us, "us"),
    })
}

/// The unit of rows that are bytes. All other rows that are drawn are times.
const BYTES: &str = "B";

fn bytes(bytes: f64) -> String {
    amount(match bytes {
        bytes if bytes >= 1e9 => (bytes / 1e9, "GB"),
        bytes if bytes >= 1e6 => (bytes / 1e6, "MB"),
        bytes if bytes >= 1e3 => (bytes / 1e3, "kB"),
        bytes => (bytes, "B"),
    })
}

fn amount((value, unit): (f64, &str)) -> String {
    let digits = if value < 10.0 && value.fract() > 0.01 { 1 } else { 0 };
    format!("{value:.digits$} {unit}")
}

#[cfg(test)]
mod tests {
    use super::super::measurement::Environment;
    use super::*;

    const OUTPUT: &str = r#"{"cpu":"x","cpus":2,"kernel":"6.12.1","file_system":"xfs"}
{"name":"a","n":10,"unit":"us","median":10.0,"p99":3.0,"runs":7,"samples":[]}
{"name":"a","n":1000,"unit":"us","median":1000.0,"p99":3.0,"runs":7,"samples":[]}
"#;

    /// Missing rows and empty plots are omitted.
    #[test]
    fn plot_ends_at_last_measurement() {
        let all = Measurements { parts: vec![Environment::parse("here", OUTPUT).unwrap()] };
        let plots = [Plot::new("drawn", "n", ["a", "missing"]), Plot::new("empty", "n", ["missing"])];
        let text = svg(&all, &plots).unwrap().unwrap();
        assert!(text.contains(" points=\"70,269 389,35 \""), "{text}");
        assert!(text.contains("\na 1 ms\n</text>") && !text.contains("missing"), "{text}");
        assert!(text.contains("\ndrawn\n") && !text.contains("empty"), "{text}");
        assert_eq!(svg(&all, &plots[1..]).unwrap(), None);
    }

    #[test]
    fn lines_between_the_labels_have_none() {
        let shown: Vec<String> =
            [1.0, 2.0, 3.0, 4.0, 5.0, 900.0, 1000.0].map(|n| labelled(n, label)).to_vec();
        assert_eq!(shown, ["1", "2", "", "", "5", "", "1 k"]);
    }

    #[test]
    fn values_have_a_fitting_unit() {
        let shown: Vec<String> = [0.5, 10.0, 2500.0, 3e6].map(duration).to_vec();
        assert_eq!(shown, ["0.5 us", "10 us", "2.5 ms", "3 s"]);
        let shown: Vec<String> = [10.0, 10_668.0, 7.5e6, 1.8e9].map(bytes).to_vec();
        assert_eq!(shown, ["10 B", "11 kB", "7.5 MB", "1.8 GB"]);
    }

    #[test]
    fn byte_plot_omits_count_zero() {
        let row = |n, bytes| Row::of("received", n, BYTES, [bytes]).unwrap();
        let all = Measurements::of([row(0, 10_000.0), row(1000, 80_000.0), row(100_000, 7.5e6)].to_vec());
        let text = svg(&all, &[Plot::new("drawn", "claims", ["received"])]).unwrap().unwrap();
        assert!(text.contains("\nreceived 7.5 MB\n") && text.contains("\n1 MB\n"), "{text}");
    }
}

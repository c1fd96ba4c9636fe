//! Plots as SVG: time against count, both logarithmic, so that a constant time is a horizontal line and a
//! factor is a distance.

use std::fmt::Write as _;
use std::path::Path;

use anyhow::{Context, Result};

use super::measurement::{Measurements, Row};

/// One plot of the rows with these names against their counts.
#[derive(Clone, Debug)]
pub(super) struct Plot {
    pub(super) title: &'static str,
    /// The label of the counts.
    pub(super) x: &'static str,
    pub(super) names: Vec<&'static str>,
}

/// The width of one plot with its legend. Two plots are side by side.
const WIDTH: f64 = 560.0;
const HEIGHT: f64 = 320.0;
/// The area of the curves within the plot.
const LEFT: f64 = 70.0;
const RIGHT: f64 = 390.0;
const TOP: f64 = 40.0;
const BOTTOM: f64 = 270.0;
/// Colours that are distinguishable with colour vision deficiency too (Okabe and Ito).
const COLOURS: [&str; 4] = ["#0072b2", "#d55e00", "#009e73", "#cc79a7"];

/// Writes all plots of a run into one file, except those without measurements.
pub(super) fn write(path: &Path, all: &Measurements, plots: &[Plot]) -> Result<()> {
    std::fs::write(path, svg(all, plots)).with_context(|| format!("write {}", path.display()))
}

fn svg(all: &Measurements, plots: &[Plot]) -> String {
    let drawn: Vec<String> = plots.iter().filter_map(|plot| draw(all, plot)).collect();
    let height = HEIGHT * drawn.len().div_ceil(2) as f64;
    let mut text = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {} {height}\" font-family=\"sans-serif\" \
         font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n",
        2.0 * WIDTH
    );
    for (place, plot) in drawn.iter().enumerate() {
        let (x, y) = ((place % 2) as f64 * WIDTH, (place / 2) as f64 * HEIGHT);
        _ = writeln!(text, "<g transform=\"translate({x},{y})\">\n{plot}</g>");
    }
    text + "</svg>\n"
}

fn draw(all: &Measurements, plot: &Plot) -> Option<String> {
    let rows = |name: &str| {
        let mut rows: Vec<&Row> = all.rows().filter(|row| row.name == name).collect();
        rows.sort_by_key(|row| row.n);
        rows
    };
    let shown: Vec<&Row> = plot.names.iter().flat_map(|name| rows(name)).collect();
    let x = Axis::over(shown.iter().map(|row| row.n as f64), LEFT, RIGHT)?;
    let y = Axis::over(shown.iter().map(|row| row.median), BOTTOM, TOP)?;
    let mut text = String::new();
    _ = writeln!(text, "<text x=\"{LEFT}\" y=\"22\" font-size=\"15\">{}</text>", plot.title);
    _ = writeln!(text, "<text x=\"{RIGHT}\" y=\"{}\" text-anchor=\"end\">{}</text>", BOTTOM + 36.0, plot.x);
    for decade in x.decades() {
        let (at, label) = (x.place(decade), label(decade));
        _ = writeln!(text, "<path d=\"M{at:.1} {TOP}V{BOTTOM}\" stroke=\"#ddd\"/>");
        _ = writeln!(
            text,
            "<text x=\"{at:.1}\" y=\"{}\" text-anchor=\"middle\">{label}</text>",
            BOTTOM + 18.0
        );
    }
    for decade in y.decades() {
        let (at, label) = (y.place(decade), duration(decade));
        _ = writeln!(text, "<path d=\"M{LEFT} {at:.1}H{RIGHT}\" stroke=\"#ddd\"/>");
        _ = writeln!(
            text,
            "<text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{label}</text>",
            LEFT - 6.0,
            at + 4.0
        );
    }
    for (place, (name, colour)) in plot.names.iter().zip(COLOURS.iter().cycle()).enumerate() {
        let rows = rows(name);
        let points: Vec<String> = rows
            .iter()
            .map(|row| format!("{:.1},{:.1}", x.place(row.n as f64), y.place(row.median)))
            .collect();
        let Some(last) = rows.last() else { continue };
        _ = writeln!(text, "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\"/>", points.join(" "));
        for point in &points {
            let (x, y) = point.split_once(',')?;
            _ = writeln!(text, "<circle cx=\"{x}\" cy=\"{y}\" r=\"3\" fill=\"{colour}\"/>");
        }
        let legend = TOP + 10.0 + 20.0 * place as f64;
        let at_last = duration(last.median);
        _ = writeln!(
            text,
            "<text x=\"{}\" y=\"{legend}\" fill=\"{colour}\">{name} {at_last}</text>",
            RIGHT + 12.0
        );
    }
    Some(text)
}

/// An axis from one power of ten to another.
struct Axis {
    first: f64,
    last: f64,
    from: f64,
    to: f64,
}

impl Axis {
    fn over(values: impl Iterator<Item = f64>, from: f64, to: f64) -> Option<Axis> {
        let exponents: Vec<f64> = values.filter(|value| *value > 0.0).map(f64::log10).collect();
        let first = exponents.iter().copied().reduce(f64::min)?.floor();
        let last = exponents.iter().copied().reduce(f64::max)?.ceil().max(first + 1.0);
        Some(Axis { first, last, from, to })
    }

    fn place(&self, value: f64) -> f64 {
        self.from + (value.log10() - self.first) / (self.last - self.first) * (self.to - self.from)
    }

    fn decades(&self) -> impl Iterator<Item = f64> {
        (self.first as i32..=self.last as i32).map(|exponent| 10f64.powi(exponent))
    }
}

fn label(count: f64) -> String {
    if count >= 1000.0 { format!("{} k", count / 1000.0) } else { count.to_string() }
}

/// Returns the text of a duration in microseconds.
fn duration(microseconds: f64) -> String {
    let (value, unit) = match microseconds {
        us if us >= 1e6 => (us / 1e6, "s"),
        us if us >= 1e3 => (us / 1e3, "ms"),
        us => (us, "us"),
    };
    let digits = if value < 10.0 && value.fract() > 0.01 { 1 } else { 0 };
    format!("{value:.digits$} {unit}")
}

#[cfg(test)]
mod tests {
    use super::super::measurement::Environment;
    use super::*;

    const OUTPUT: &str = r#"{"cpu":"x","cpus":2,"kernel":"6.12.1","file_system":"xfs"}
{"name":"a","n":10,"unit":"us","median":10.0,"p99":3.0,"runs":7}
{"name":"a","n":1000,"unit":"us","median":1000.0,"p99":3.0,"runs":7}
"#;

    #[test]
    fn a_plot_ends_at_its_last_measurement_and_empty_plots_are_omitted() {
        let all = Measurements { parts: vec![Environment::parse("here", OUTPUT).unwrap()] };
        let plot = |names: &[&'static str]| Plot { title: "t", x: "n", names: names.to_vec() };
        let text = svg(&all, &[plot(&["a", "missing"]), plot(&["missing"])]);
        assert!(text.contains("<polyline points=\"70.0,270.0 390.0,40.0\""), "{text}");
        assert!(text.contains(">a 1 ms</text>") && !text.contains("missing"), "{text}");
        assert_eq!(text.matches("<g ").count(), 1);
    }

    #[test]
    fn times_are_shown_in_a_unit_that_fits() {
        let shown: Vec<String> = [0.5, 10.0, 2500.0, 3e6].map(duration).to_vec();
        assert_eq!(shown, ["0.5 us", "10 us", "2.5 ms", "3 s"]);
    }
}

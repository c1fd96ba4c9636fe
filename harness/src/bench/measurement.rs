//! Measurements in rows, and the machines they come from.

use std::time::Duration;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

/// The largest number of samples that a row keeps: enough to compare two runs. The programs in `loopfs/benches` and
/// `csi/benches` print as many.
const MAX_SAMPLES: usize = 200;

/// One measurement: the value of `name` for a count `n` that it may depend on.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub(super) struct Row {
    pub(super) name: String,
    pub(super) n: u64,
    pub(super) unit: String,
    pub(super) median: f64,
    pub(super) p99: f64,
    pub(super) runs: u64,
    /// Values of single runs, in the order of the runs: all, or some that are evenly spread if there are too many.
    pub(super) samples: Vec<f64>,
}

/// The name of a row and its count `n`.
#[derive(Clone, Debug, Deserialize, Eq, Ord, PartialEq, PartialOrd, Serialize)]
pub(super) struct RowName {
    pub(super) name: String,
    pub(super) n: u64,
}

/// The values of rows that are being measured. The rows are in the order of their first values.
#[derive(Debug, Default)]
pub(super) struct Samples(Vec<(String, u64, &'static str, Vec<f64>)>);

impl Samples {
    /// Adds a value to the row with this name and count.
    pub(super) fn add(&mut self, name: impl Into<String>, n: u64, unit: &'static str, value: f64) {
        self.extend(name, n, unit, [value]);
    }

    pub(super) fn extend(
        &mut self,
        name: impl Into<String>,
        n: u64,
        unit: &'static str,
        values: impl IntoIterator<Item = f64>,
    ) {
        let name = name.into();
        match self.0.iter_mut().find(|row| row.0 == name && row.1 == n) {
            Some(row) => row.3.extend(values),
            None => self.0.push((name, n, unit, values.into_iter().collect())),
        }
    }

    /// Returns the rows that have values.
    pub(super) fn rows(self) -> Vec<Row> {
        self.0.into_iter().filter_map(|(name, n, unit, values)| Row::of(&name, n, unit, values)).collect()
    }
}

impl Row {
    /// Returns the median and the 99th percentile (nearest rank) of values, or `None` if there are none.
    pub(super) fn of(name: &str, n: u64, unit: &str, values: impl IntoIterator<Item = f64>) -> Option<Row> {
        let mut values: Vec<f64> = values.into_iter().collect();
        let stride = values.len().div_ceil(MAX_SAMPLES).max(1);
        let samples = values.iter().copied().step_by(stride).collect();
        values.sort_by(f64::total_cmp);
        let last = values.len().checked_sub(1)?;
        let middle = values.len() / 2;
        let median = if values.len() % 2 == 1 {
            values[middle]
        } else {
            f64::midpoint(values[middle - 1], values[middle])
        };
        let rank = (values.len() * 99).div_ceil(100);
        Some(Row {
            name: name.to_owned(),
            n,
            unit: unit.to_owned(),
            median,
            p99: values[rank.saturating_sub(1).min(last)],
            runs: values.len() as u64,
            samples,
        })
    }
}

/// Returns the time in milliseconds, for rows whose unit is `ms`.
pub(super) fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// The machine of a measurement, as the measuring program describes it.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub(super) struct Machine {
    pub(super) cpu: String,
    pub(super) cpus: u32,
    pub(super) kernel: String,
    /// The file system of the files or quotas.
    pub(super) file_system: String,
    /// The release of Kubernetes, if a cluster is measured.
    #[serde(default)]
    pub(super) kubernetes: Option<String>,
}

impl Machine {
    /// The files that describe it.
    pub(super) const CPUINFO: &str = "/proc/cpuinfo";
    pub(super) const KERNEL: &str = "/proc/sys/kernel/osrelease";

    /// Returns the description by the content of these files.
    pub(super) fn of(cpuinfo: &str, kernel: &str, file_system: &str, kubernetes: Option<&str>) -> Machine {
        let (cpu, cpus) = processors(cpuinfo);
        Machine {
            cpu: cpu.to_owned(),
            cpus,
            kernel: kernel.trim().to_owned(),
            file_system: file_system.to_owned(),
            kubernetes: kubernetes.map(str::to_owned),
        }
    }
}

/// Returns the model and the number of the processors.
fn processors(cpuinfo: &str) -> (&str, u32) {
    let fields = |name: &'static str| cpuinfo.lines().filter(move |line| line.starts_with(name));
    // Some architectures have no model name.
    let cpu = fields("model name").chain(fields("CPU part")).next().and_then(|line| line.split(':').nth(1));
    (cpu.unwrap_or("unknown").trim(), fields("processor").map(|_| 1).sum())
}

/// The measurements of one machine.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Environment {
    /// `this machine`, or the name of the virtual machine.
    pub(super) place: String,
    pub(super) machine: Machine,
    pub(super) rows: Vec<Row>,
}

/// All measurements of a run.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Measurements {
    pub(super) parts: Vec<Environment>,
}

impl Environment {
    /// Parses the output of a program: its machine, then rows, among other lines.
    pub(super) fn parse(place: &str, output: &str) -> Result<Environment> {
        let mut objects = output.lines().filter(|line| line.starts_with('{'));
        let machine = objects.next().context("the benchmark printed nothing")?;
        let machine =
            serde_json::from_str(machine).with_context(|| format!("read the machine: {machine}"))?;
        let rows =
            objects.map(|line| serde_json::from_str(line).with_context(|| format!("read a row: {line}")));
        Ok(Environment { place: place.to_owned(), machine, rows: rows.collect::<Result<_>>()? })
    }
}

impl Measurements {
    pub(super) fn rows(&self) -> impl Iterator<Item = &Row> {
        self.parts.iter().flat_map(|part| &part.rows)
    }

    pub(super) fn row(&self, name: &str, n: u64) -> Option<&Row> {
        self.rows().find(|row| row.name == name && row.n == n)
    }

    /// Returns the counts that `name` was measured with, in ascending order.
    pub(super) fn counts(&self, name: &str) -> Vec<u64> {
        let mut counts: Vec<u64> = self.rows().filter(|row| row.name == name).map(|row| row.n).collect();
        counts.sort_unstable();
        counts
    }
}

#[cfg(test)]
impl Measurements {
    /// Returns the measurements of an unnamed machine.
    pub(super) fn of(rows: Vec<Row>) -> Measurements {
        Measurements {
            parts: vec![Environment { place: String::new(), machine: Machine::of("", "", "", None), rows }],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OUTPUT: &str = r#"10 devices: run 0
{"cpu":"a \"fast\" one","cpus":2,"kernel":"6.12.1","file_system":"xfs"}
{"name":"find_device","n":10,"unit":"us","median":1.5,"p99":3.0,"runs":7,"samples":[1.5,3.0]}
{"name":"find_device","n":4,"unit":"us","median":1.25,"p99":3.0,"runs":7,"samples":[1.5,3.0]}
"#;

    #[test]
    fn processors_have_model_or_part_number() {
        let named = "processor\t: 0\nmodel name\t: A B\n\nprocessor\t: 1\nmodel name\t: A B\n";
        assert_eq!(processors(named), ("A B", 2));
        assert_eq!(processors("processor\t: 0\nCPU part\t: 0xd0c\n"), ("0xd0c", 1));
        assert_eq!(processors("processor\t: 0\n"), ("unknown", 1));
    }

    #[test]
    fn rows_are_found_among_other_lines() {
        let part = Environment::parse("here", OUTPUT).unwrap();
        assert_eq!(part.machine.cpu, "a \"fast\" one");
        let all = Measurements { parts: vec![part] };
        assert_eq!(all.counts("find_device"), [4, 10]);
        assert_eq!(all.row("find_device", 10).map(|row| row.median), Some(1.5));
        assert_eq!(all.row("find_device", 11), None);
    }

    #[test]
    fn row_has_median_and_99th_percentile() {
        let row = |values: &[f64]| Row::of("x", 1, "s", values.to_vec()).map(|row| (row.median, row.p99));
        assert_eq!(row(&[3.0, 1.0, 2.0]), Some((2.0, 3.0)));
        assert_eq!(row(&[4.0, 1.0]), Some((2.5, 4.0)));
        assert_eq!(row(&[]), None);
    }

    #[test]
    fn samples_become_rows_in_order() {
        let mut samples = Samples::default();
        samples.add("ours", 10, "us", 1.0);
        samples.extend("empty", 10, "us", []);
        samples.extend("ours", 20, "us", [5.0]);
        samples.add("ours", 10, "us", 3.0);
        let rows = samples.rows();
        let rows: Vec<_> = rows.iter().map(|row| (row.name.as_str(), row.n, row.median, row.runs)).collect();
        assert_eq!(rows, [("ours", 10, 2.0, 2), ("ours", 20, 5.0, 1)]);
    }

    /// A row with few samples keeps all of them.
    #[test]
    fn row_thins_out_many_samples_evenly() {
        let kept = |count: u32| Row::of("x", 1, "s", (0..count).map(f64::from)).unwrap().samples;
        assert_eq!(kept(3), [0.0, 1.0, 2.0]);
        let spread = kept(1000);
        assert_eq!((spread.len(), spread[0], spread[199]), (MAX_SAMPLES, 0.0, 995.0));
        assert_eq!(kept(201).len(), 101);
    }

    #[test]
    fn invalid_program_output_is_refused() {
        assert!(Environment::parse("here", "error: no\n").is_err());
        assert!(Environment::parse("here", &OUTPUT.replace("\"n\":4", "\"n\":-4")).is_err());
        assert!(Environment::parse("here", &OUTPUT.replace(",\"samples\":[1.5,3.0]", "")).is_err());
    }
}

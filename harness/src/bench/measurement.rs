//! Measurements in rows, and the machines they come from.

use std::fmt;
use std::time::Duration;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

/// One measurement: the values of `name` for a count `n` that they may depend on. It has at least one value.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Row {
    pub(super) name: String,
    pub(super) n: u64,
    pub(super) unit: String,
    /// The values of single runs, in the order of the runs.
    pub(super) samples: Vec<f64>,
}

impl Row {
    pub(super) fn median(&self) -> f64 {
        let (sorted, middle) = (self.sorted(), self.samples.len() / 2);
        if sorted.len() % 2 == 1 { sorted[middle] } else { f64::midpoint(sorted[middle - 1], sorted[middle]) }
    }

    /// Returns the 99th percentile by the nearest-rank method.
    pub(super) fn p99(&self) -> f64 {
        self.sorted()[(self.samples.len() * 99).div_ceil(100) - 1]
    }

    fn sorted(&self) -> Vec<f64> {
        let mut values = self.samples.clone();
        values.sort_by(f64::total_cmp);
        values
    }
}

/// The rows that are being measured, in the order of their first values.
#[derive(Debug, Default)]
pub(super) struct Samples(pub(super) Vec<Row>);

impl Samples {
    /// Adds a value to the row with this name and count.
    pub(super) fn add(&mut self, name: impl Into<String>, n: u64, unit: &str, value: f64) {
        let name = name.into();
        match self.0.iter_mut().find(|row| row.name == name && row.n == n) {
            Some(row) => row.samples.push(value),
            None => self.0.push(Row { name, n, unit: unit.to_owned(), samples: vec![value] }),
        }
    }

    pub(super) fn extend(&mut self, name: &str, n: u64, unit: &str, values: impl IntoIterator<Item = f64>) {
        for value in values {
            self.add(name, n, unit, value);
        }
    }
}

/// Returns the time in milliseconds, for rows whose unit is `ms`.
pub(super) fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// The machine of a measurement, as the measuring program describes it.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
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
        let fields = |name: &'static str| cpuinfo.lines().filter(move |line| line.starts_with(name));
        // Some architectures have no model name.
        let cpu =
            fields("model name").chain(fields("CPU part")).next().and_then(|line| line.split(':').nth(1));
        Machine {
            cpu: cpu.unwrap_or("unknown").trim().to_owned(),
            cpus: fields("processor").map(|_| 1).sum(),
            kernel: kernel.trim().to_owned(),
            file_system: file_system.to_owned(),
            kubernetes: kubernetes.map(str::to_owned),
        }
    }
}

/// The measurements of one machine.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Environment {
    /// `this machine`, or the name of the virtual machine.
    pub(super) place: String,
    pub(super) machine: Machine,
    pub(super) rows: Vec<Row>,
}

impl Environment {
    /// Parses the output of a program: its machine, then rows, among other lines.
    pub(super) fn parse(place: &str, output: &str) -> Result<Environment> {
        let mut objects = output.lines().filter(|line| line.starts_with('{'));
        let machine = objects.next().context("the benchmark printed nothing")?;
        let machine =
            serde_json::from_str(machine).with_context(|| format!("read the machine: {machine}"))?;
        let rows = objects.map(|line| {
            let row: Row = serde_json::from_str(line).with_context(|| format!("read a row: {line}"))?;
            anyhow::ensure!(!row.samples.is_empty(), "a row has no values: {line}");
            Ok(row)
        });
        Ok(Environment { place: place.to_owned(), machine, rows: rows.collect::<Result<_>>()? })
    }
}

impl fmt::Display for Environment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Machine { cpu, cpus, kernel, file_system, kubernetes } = &self.machine;
        write!(f, "{}: Linux {kernel}, {cpus} x {cpu}, {file_system}", self.place)?;
        kubernetes.as_ref().map_or(Ok(()), |release| write!(f, ", Kubernetes {release}"))
    }
}

#[cfg(test)]
pub(super) fn row(name: &str, n: u64, samples: &[f64]) -> Row {
    Row { name: name.to_owned(), n, unit: "us".to_owned(), samples: samples.to_vec() }
}

#[cfg(test)]
pub(super) fn environment(rows: impl IntoIterator<Item = Row>) -> Environment {
    Environment {
        place: "here".to_owned(),
        machine: Machine::of("", "6.12.1\n", "xfs", None),
        rows: rows.into_iter().collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OUTPUT: &str = r#"10 devices: run 0
{"cpu":"a \"fast\" one","cpus":2,"kernel":"6.12.1","file_system":"xfs"}
{"name":"find_device","n":10,"unit":"us","samples":[1.5,3.0]}
{"name":"find_device","n":4,"unit":"us","samples":[1.25]}
"#;

    #[test]
    fn processors_have_model_or_part_number() {
        let processors = |cpuinfo: &str| {
            let machine = Machine::of(cpuinfo, "", "", None);
            (machine.cpu, machine.cpus)
        };
        let named = "processor\t: 0\nmodel name\t: A B\n\nprocessor\t: 1\nmodel name\t: A B\n";
        assert_eq!(processors(named), ("A B".to_owned(), 2));
        assert_eq!(processors("processor\t: 0\nCPU part\t: 0xd0c\n"), ("0xd0c".to_owned(), 1));
        assert_eq!(processors("processor\t: 0\n"), ("unknown".to_owned(), 1));
    }

    #[test]
    fn rows_are_found_among_other_lines() {
        let environment = Environment::parse("here", OUTPUT).unwrap();
        assert_eq!(environment.to_string(), "here: Linux 6.12.1, 2 x a \"fast\" one, xfs");
        assert_eq!(environment.rows, [row("find_device", 10, &[1.5, 3.0]), row("find_device", 4, &[1.25])]);
    }

    #[test]
    fn row_has_median_and_99th_percentile() {
        let values = |values: &[f64]| (row("x", 1, values).median(), row("x", 1, values).p99());
        assert_eq!(values(&[3.0, 1.0, 2.0]), (2.0, 3.0));
        assert_eq!(values(&[4.0, 1.0]), (2.5, 4.0));
    }

    #[test]
    fn samples_become_rows_in_order() {
        let mut samples = Samples::default();
        samples.add("ours", 10, "us", 1.0);
        samples.extend("empty", 10, "us", []);
        samples.extend("ours", 20, "us", [5.0]);
        samples.add("ours", 10, "us", 3.0);
        assert_eq!(samples.0, [row("ours", 10, &[1.0, 3.0]), row("ours", 20, &[5.0])]);
    }

    #[test]
    fn invalid_program_output_is_refused() {
        assert!(Environment::parse("here", "error: no\n").is_err());
        assert!(Environment::parse("here", &OUTPUT.replace("\"n\":4", "\"n\":-4")).is_err());
        assert!(Environment::parse("here", &OUTPUT.replace("[1.25]", "[]")).is_err());
    }
}

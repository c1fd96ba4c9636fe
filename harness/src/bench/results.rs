//! The file of results: what a run measured and where, in one format for all benchmarks.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use testvm::session::Session;

use super::measurement::{Environment, Machine, Measurements, Row, RowName};
use super::threshold::Threshold;

/// The version of the format. A change of the fields below increments it.
const FORMAT: u32 = 1;

/// The results of a run.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Results {
    format: u32,
    pub(super) source: Source,
    /// `true` for a run with `--quick`.
    pub(super) quick: bool,
    pub(super) environments: Vec<MeasuredAt>,
    pub(super) rows: Vec<ResultRow>,
    pub(super) thresholds: Vec<Threshold>,
    pub(super) failures: Vec<Failure>,
}

/// The sources that were measured.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Source {
    /// The Git commit, or `None` if the sources are no Git checkout.
    pub(super) commit: Option<String>,
    /// `true` if tracked files differ from the commit.
    pub(super) has_changes: bool,
}

/// The place and the machine of measurements.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub(super) struct MeasuredAt {
    pub(super) place: String,
    #[serde(flatten)]
    pub(super) machine: Machine,
}

/// A row of a benchmark.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub(super) struct ResultRow {
    pub(super) bench: String,
    #[serde(flatten)]
    pub(super) row: Row,
    /// The row that this one is compared with in the same run.
    pub(super) peer: Option<RowName>,
    /// The index of the environment.
    environment: usize,
}

/// A benchmark that did not complete.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Failure {
    pub(super) bench: String,
    pub(super) error: String,
}

impl Results {
    pub(super) fn new(source: Source, quick: bool) -> Results {
        Results { format: FORMAT, source, quick, ..Results::default() }
    }

    /// Adds the measurements of a benchmark and its thresholds.
    pub(super) fn add(&mut self, bench: &str, all: &Measurements, thresholds: Vec<Threshold>) {
        let mut peers: BTreeMap<&RowName, &RowName> = BTreeMap::new();
        for ratio in thresholds.iter().filter_map(|threshold| threshold.ratio.as_ref()) {
            // If a row has several peers, its first threshold decides.
            peers.entry(&ratio.row).or_insert(&ratio.peer);
        }
        for part in &all.parts {
            let environment = self.environment_of(part);
            self.rows.extend(part.rows.iter().map(|row| ResultRow {
                bench: bench.to_owned(),
                row: row.clone(),
                peer: peers.get(&RowName { name: row.name.clone(), n: row.n }).copied().cloned(),
                environment,
            }));
        }
        self.thresholds.extend(thresholds);
    }

    /// Adds a benchmark that did not complete.
    pub(super) fn add_failure(&mut self, bench: &str, error: &anyhow::Error) {
        self.failures.push(Failure { bench: bench.to_owned(), error: format!("{error:#}") });
    }

    /// Returns the index of the environment, which is added if it is new.
    fn environment_of(&mut self, part: &Environment) -> usize {
        let measured_at = MeasuredAt { place: part.place.clone(), machine: part.machine.clone() };
        let known = self.environments.iter().position(|environment| *environment == measured_at);
        known.unwrap_or_else(|| {
            self.environments.push(measured_at);
            self.environments.len() - 1
        })
    }

    /// Returns the names of the benchmarks with rows, in the order of the run.
    pub(super) fn benches(&self) -> Vec<&str> {
        let mut names: Vec<&str> = self.rows.iter().map(|row| row.bench.as_str()).collect();
        names.dedup();
        names
    }

    /// Returns the measurements of a benchmark.
    pub(super) fn measurements(&self, bench: &str) -> Measurements {
        let of_environment = |(index, at): (usize, &MeasuredAt)| {
            let rows = self.rows.iter().filter(|row| row.bench == bench && row.environment == index);
            let rows: Vec<Row> = rows.map(|row| row.row.clone()).collect();
            let part = Environment { place: at.place.clone(), machine: at.machine.clone(), rows };
            (!part.rows.is_empty()).then_some(part)
        };
        Measurements { parts: self.environments.iter().enumerate().filter_map(of_environment).collect() }
    }

    /// Reads a file of results.
    ///
    /// # Errors
    /// The file cannot be read, or has another format.
    pub(super) fn read(path: &Path) -> Result<Results> {
        let text = std::fs::read_to_string(path).with_context(|| format!("read {}", path.display()))?;
        Results::parse(&text).with_context(|| format!("read the results in {}", path.display()))
    }

    fn parse(text: &str) -> Result<Results> {
        #[derive(Deserialize)]
        struct Version {
            format: u32,
        }
        let version: Version = serde_json::from_str(text)
            .context("the file has no format of results; give a report.json of `cargo harness bench`")?;
        anyhow::ensure!(
            version.format == FORMAT,
            "the file has format {}, but this program reads format {FORMAT}; measure again, or compare with the \
             program that wrote the file",
            version.format
        );
        let results: Results = serde_json::from_str(text)?;
        let unknown = results.rows.iter().find(|row| row.environment >= results.environments.len());
        if let Some(row) = unknown {
            anyhow::bail!(
                "row {} names environment {}, which is not in the file",
                row.row.name,
                row.environment
            );
        }
        Ok(results)
    }

    /// Writes the file, with one line for each row.
    pub(super) fn write(&self, path: &Path) -> Result<()> {
        std::fs::write(path, self.text()?).with_context(|| format!("write {}", path.display()))
    }

    fn text(&self) -> Result<String> {
        let Results { format, source, quick, environments, rows, thresholds, failures } = self;
        let source = serde_json::to_string(source)?;
        Ok(format!(
            "{{\n\"format\": {format},\n\"source\": {source},\n\"quick\": {quick},\n\"environments\": {},\n\
             \"rows\": {},\n\"thresholds\": {},\n\"failures\": {}\n}}\n",
            lines(environments)?,
            lines(rows)?,
            lines(thresholds)?,
            lines(failures)?
        ))
    }

    /// Combines runs: the rows of a measurement in several runs become one row with the samples of all of them. The rest is
    /// that of the first run.
    pub(super) fn pooled(runs: Vec<Results>) -> Option<Results> {
        let mut runs = runs.into_iter();
        let mut all = runs.next()?;
        for other in runs.flat_map(|run| run.rows) {
            let same = all.rows.iter_mut().find(|row| row.is_same_measurement(&other));
            let Some(same) = same else { continue };
            let samples = same.row.samples.iter().chain(&other.row.samples).copied();
            if let Some(row) = Row::of(&other.row.name, other.row.n, &other.row.unit, samples) {
                same.row = row;
            }
        }
        Some(all)
    }
}

impl ResultRow {
    /// Returns `true` if both rows have the same bench, name, count and unit.
    pub(super) fn is_same_measurement(&self, other: &ResultRow) -> bool {
        let (ours, theirs) = (&self.row, &other.row);
        (&self.bench, &ours.name, ours.n, &ours.unit) == (&other.bench, &theirs.name, theirs.n, &theirs.unit)
    }
}

/// Creates and returns the directory of the benchmarks' files.
pub(super) fn directory(session: &Session) -> Result<PathBuf> {
    let directory = session.workspace.reports("bench");
    std::fs::create_dir_all(&directory).with_context(|| format!("create {}", directory.display()))?;
    Ok(directory)
}

/// Returns a JSON list with one line for each entry.
fn lines(entries: &[impl Serialize]) -> Result<String> {
    let lines = entries.iter().map(serde_json::to_string).collect::<Result<Vec<_>, _>>()?;
    Ok(if lines.is_empty() { "[]".to_owned() } else { format!("[\n{}\n]", lines.join(",\n")) })
}

#[cfg(test)]
impl Results {
    /// Returns results with these rows of one benchmark.
    pub(super) fn of(bench: &str, rows: Vec<Row>) -> Results {
        let mut results = Results::new(Source::default(), false);
        results.add(bench, &Measurements::of(rows), Vec::new());
        results
    }
}

#[cfg(test)]
mod tests {
    use super::super::threshold;
    use super::*;

    fn row(name: &str, n: u64, values: &[f64]) -> Row {
        Row::of(name, n, "us", values.iter().copied()).unwrap()
    }

    fn results() -> Results {
        let part = |place: &str, rows| Environment {
            place: place.to_owned(),
            machine: Machine::of("processor\t: 0\nmodel name\t: \"x\"\n", "6.12.1\n", "xfs", None),
            rows,
        };
        let here = part("here", vec![row("ours", 10, &[1.0, 2.0]), row("peer", 10, &[3.0])]);
        let guest = part("guest", vec![row("ids", 5, &[4.0])]);
        let requirements = [
            threshold::faster("ours is faster", "ours", 1.5, "peer"),
            threshold::no_more("not measured", "absent", 1.0),
        ];
        let source = Source { commit: Some("0c20236".to_owned()), has_changes: true };
        let mut results = Results::new(source, true);
        let all = Measurements { parts: vec![here.clone(), guest] };
        let thresholds = requirements.iter().flat_map(|requirement| requirement.judge("loop", &all));
        results.add("loop", &all, thresholds.collect());
        results.add("csi", &Measurements { parts: vec![here] }, Vec::new());
        results.add_failure("clone", &anyhow::anyhow!("no space").context("create an image"));
        results
    }

    /// The file has one line for each row.
    #[test]
    fn written_results_are_read_back() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("report.json");
        results().write(&path).unwrap();
        assert_eq!(Results::read(&path).unwrap(), results());
        let text = std::fs::read_to_string(path).unwrap();
        assert_eq!(text.lines().filter(|line| line.starts_with("{\"bench\":\"loop\",\"name\"")).count(), 3);
    }

    #[test]
    fn row_has_peer_and_environment() {
        let results = results();
        let peers: Vec<Option<&str>> =
            results.rows.iter().map(|row| row.peer.as_ref().map(|peer| peer.name.as_str())).collect();
        assert_eq!(peers, [Some("peer"), None, None, None, None]);
        let places: Vec<&str> = results.environments.iter().map(|at| at.place.as_str()).collect();
        assert_eq!(places, ["here", "guest"], "both benchmarks ran here");
        assert_eq!(results.benches(), ["loop", "csi"]);
        let parts = results.measurements("loop").parts;
        assert_eq!(parts.iter().map(|part| part.rows.len()).collect::<Vec<_>>(), [2, 1]);
        assert_eq!(results.failures[0].error, "create an image: no space");
    }

    /// The error has a remedy.
    #[test]
    fn unknown_formats_are_refused() {
        let text = results().text().unwrap();
        let newer = Results::parse(&text.replace("\"format\": 1", "\"format\": 2")).unwrap_err();
        assert!(
            newer.to_string().contains("format 2") && newer.to_string().contains("measure again"),
            "{newer}"
        );
        let other = Results::parse("{}").unwrap_err().to_string();
        assert!(other.contains("report.json"), "{other}");
        assert!(Results::parse(&text.replace("\"environment\":1", "\"environment\":7")).is_err());
        assert!(Results::parse(&text.replace("\"quick\": true", "\"quick\": true, \"slow\": 1")).is_err());
    }

    /// Rows that the first run does not have are omitted.
    #[test]
    fn pooled_runs_have_all_samples() {
        let run = |values: &[f64]| Results::of("loop", vec![row("ours", 10, values)]);
        let pooled = Results::pooled(vec![run(&[1.0, 2.0]), run(&[9.0])]).unwrap();
        assert_eq!(pooled.rows[0].row.samples, [1.0, 2.0, 9.0]);
        assert_eq!((pooled.rows.len(), pooled.rows[0].row.median), (1, 2.0));
        let other = Results::of("csi", vec![row("ours", 10, &[5.0])]);
        assert_eq!(Results::pooled(vec![run(&[1.0]), other]).unwrap(), run(&[1.0]));
        assert_eq!(Results::pooled(Vec::new()), None);
    }
}

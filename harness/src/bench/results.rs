//! The file of results: what a run measured and where, in one format for all benchmarks.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use testvm::session::Session;

use super::measurement::{Environment, Row};
use super::threshold::Threshold;

/// The results of a run.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Results {
    /// The Git commit, with `-dirty` if tracked files differ from it. `None` if the sources are no Git checkout.
    pub(super) commit: Option<String>,
    /// `true` for a run with `--quick`.
    pub(super) quick: bool,
    /// In the order of the run.
    pub(super) benches: Vec<BenchResults>,
}

/// The results of a benchmark.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub(super) struct BenchResults {
    pub(super) name: String,
    pub(super) environments: Vec<Environment>,
    pub(super) thresholds: Vec<Threshold>,
    /// Why it did not complete.
    pub(super) error: Option<String>,
}

impl Results {
    /// Returns all rows with the names of their benchmarks.
    pub(super) fn rows(&self) -> impl Iterator<Item = (&str, &Row)> {
        self.benches.iter().flat_map(|bench| {
            let rows = bench.environments.iter().flat_map(|environment| &environment.rows);
            rows.map(|row| (bench.name.as_str(), row))
        })
    }

    /// Returns the row of the benchmark with the name, the count and the unit of `like`.
    pub(super) fn find(&self, bench: &str, like: &Row) -> Option<&Row> {
        let mut rows = self.rows().filter(|(name, _)| *name == bench).map(|(_, row)| row);
        rows.find(|row| row.is_same_measurement(like))
    }

    /// Reads files of results, and combines them: the rows of a measurement become one row with the samples of all files. The rest
    /// is that of the first file. Returns `None` if there are no files.
    pub(super) fn read(paths: &[PathBuf]) -> Result<Option<Results>> {
        let mut runs = paths.iter().map(|path| Results::read_file(path));
        let Some(mut all) = runs.next().transpose()? else { return Ok(None) };
        for run in runs {
            all.pool(&run?);
        }
        Ok(Some(all))
    }

    fn read_file(path: &Path) -> Result<Results> {
        let text = std::fs::read(path).with_context(|| format!("read {}", path.display()))?;
        let remedy = "give a report.json of `cargo harness bench` of this version";
        let results: Results =
            serde_json::from_slice(&text).with_context(|| format!("read {}; {remedy}", path.display()))?;
        let has_values = results.rows().all(|(_, row)| !row.samples.is_empty());
        anyhow::ensure!(has_values, "read {}: a row has no values; {remedy}", path.display());
        Ok(results)
    }

    fn pool(&mut self, other: &Results) {
        for bench in &mut self.benches {
            for row in bench.environments.iter_mut().flat_map(|environment| &mut environment.rows) {
                let same = other.find(&bench.name, row).map(|same| same.samples.clone());
                row.samples.extend(same.unwrap_or_default());
            }
        }
    }

    pub(super) fn write(&self, path: &Path) -> Result<()> {
        std::fs::write(path, serde_json::to_vec(self)?).with_context(|| format!("write {}", path.display()))
    }
}

impl Row {
    fn is_same_measurement(&self, other: &Row) -> bool {
        (&self.name, self.n, &self.unit) == (&other.name, other.n, &other.unit)
    }
}

/// Creates and returns the directory of the benchmarks' files.
pub(super) fn directory(session: &Session) -> Result<PathBuf> {
    let directory = session.workspace.reports("bench");
    std::fs::create_dir_all(&directory).with_context(|| format!("create {}", directory.display()))?;
    Ok(directory)
}

#[cfg(test)]
impl Results {
    /// Returns results with these rows of one benchmark.
    pub(super) fn of(bench: &str, rows: Vec<Row>) -> Results {
        let environments = vec![super::measurement::environment(rows)];
        let bench = BenchResults { name: bench.to_owned(), environments, ..BenchResults::default() };
        Results { benches: vec![bench], ..Results::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::super::measurement::row;
    use super::*;

    /// Rows that the first run does not have are omitted.
    #[test]
    fn read_results_have_the_samples_of_all_files() {
        let directory = tempfile::tempdir().unwrap();
        let written = |name: &str, run: Results| {
            let path = directory.path().join(name);
            run.write(&path).unwrap();
            path
        };
        let first = Results::of("loop", vec![row("ours", 10, &[1.0, 2.0])]);
        let one = written("1", first.clone());
        let two = written("2", Results::of("loop", vec![row("ours", 10, &[9.0]), row("ours", 20, &[9.0])]));
        let other = written("3", Results::of("csi", vec![row("ours", 10, &[5.0])]));
        assert_eq!(Results::read(&[one.clone(), other]).unwrap(), Some(first));
        let pooled = Results::read(&[one, two]).unwrap();
        assert_eq!(pooled, Some(Results::of("loop", vec![row("ours", 10, &[1.0, 2.0, 9.0])])));
        assert_eq!(Results::read(&[]).unwrap(), None);
    }

    #[test]
    fn other_files_are_refused_with_a_remedy() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let json = |samples: &[f64]| {
            let results = Results::of("loop", vec![row("ours", 10, samples)]);
            serde_json::to_string(&results).unwrap()
        };
        let unknown_in_row = json(&[1.0]).replace("\"n\":10", "\"n\":10,\"slow\":1");
        let unknown = "{\"commit\":null,\"quick\":true,\"benches\":[],\"slow\":1}".to_owned();
        for text in ["{}".to_owned(), unknown, unknown_in_row, json(&[])] {
            std::fs::write(file.path(), text).unwrap();
            let error = Results::read(&[file.path().to_owned()]).unwrap_err().to_string();
            assert!(error.contains("give a report.json"), "{error}");
        }
    }
}

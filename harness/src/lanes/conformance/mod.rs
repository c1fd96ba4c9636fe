//! The conformance lane: the storage tests of Kubernetes (`External.Storage`) against the driver on a cluster.
//!
//! `csi/conformance` has the definition of the driver and the list of the specs that do not run. Every other spec must
//! pass, and a spec that is skipped without being on the list is a failure.

mod definition;
mod list;
mod selection;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde_json::Value;
use testvm::excerpt;
use testvm::process::Process;
use testvm::report::{Outcome, Report};
use testvm::session::Session;
use testvm_cluster::conformance::{REPORT, Suite, Target};
use testvm_cluster::{Cluster, ClusterProfile, KubernetesMinor, unless_node_ends};

use self::list::SpecList;
pub(super) use self::selection::Selection;
use self::selection::{CONTAINER, Phase};
use super::clusters;
use super::ginkgo::{Runs, push_problems};
use crate::test_env::environment::{Driver, TestEnv};
use crate::test_env::inventory::Inventory;
use crate::test_env::node_debug;
use crate::{e2e, nodes};

/// The directory of the definition of the driver and of the list of specs.
const DIRECTORY: &str = "csi/conformance";
const DEFINITION: &str = "testdriver.yaml";
const LIST: &str = "specs.yaml";

const LANE: &str = "conformance";
const PROFILE: ClusterProfile = ClusterProfile::Conformance;
/// The namespace of the environment. The specs create namespaces of their own.
const NAMESPACE: &str = "loopfs-conformance";

/// The time from the request to stop until the runner is killed. In it, specs in progress clean up, and the report is
/// written.
const STOP_TIMEOUT: Duration = Duration::from_secs(20);

/// Runs the selected specs on a cluster of its own.
pub(super) async fn run(
    session: &Session,
    kubernetes: KubernetesMinor,
    selection: &Selection,
) -> Result<Report> {
    let list = SpecList::read(&session.workspace.root().join(DIRECTORY).join(LIST), kubernetes)?;
    let (definition, lane) = session.until_cancelled(prepare(session, kubernetes, list)).await?;
    let mut report = Report::new();
    let started = Instant::now();
    let tested = async {
        session.until_cancelled(install(session, &lane.cluster, &definition)).await?;
        lane.test(selection, &mut report).await
    };
    // An error must not hide the specs that ran before it.
    if let Err(error) = tested.await {
        report.push(LANE, "run the specs", Outcome::Failed(format!("{error:#}")), started.elapsed());
    }
    if !report.succeeded() {
        let written = e2e::write_state(session, &lane.cluster, &lane.reports);
        report.run(LANE, "store the state of the cluster", written).await;
    }
    // Also after a failure the cluster is stopped in order, so that the logs are complete.
    report.run(LANE, "stop the node and the control plane", lane.cluster.stop()).await;
    Ok(report)
}

/// Returns the definition of the driver, and the lane.
async fn prepare<'a>(
    session: &'a Session,
    kubernetes: KubernetesMinor,
    list: SpecList,
) -> Result<(Value, Lane<'a>)> {
    let suite = Suite::build(session, kubernetes).await?;
    let definition =
        definition::read(&session.workspace.root().join(DIRECTORY).join(DEFINITION), suite.sources())?;
    let parts = nodes::conformance_parts(session, kubernetes, &suite, PROFILE).await?;
    let reports = session.workspace.reports(LANE);
    let spec = clusters::spec(session, LANE, PROFILE)?;
    let cluster = Cluster::start(session, spec, parts).await?;
    Ok((definition, Lane { session, cluster, suite, list, reports }))
}

/// Installs the driver that the definition describes.
async fn install(session: &Session, cluster: &Cluster, definition: &Value) -> Result<()> {
    node_debug::grant(session, cluster.client()).await?;
    let step = session.progress.step("install the driver");
    e2e::install_driver_with_snapshots(session, cluster).await?;
    let env = TestEnv::in_namespace(session, cluster, NAMESPACE)?;
    require_driver(definition, &env.driver)?;
    step.done("");
    Ok(())
}

/// Checks that the definition describes the driver that the manifests install.
fn require_driver(definition: &Value, driver: &Driver) -> Result<()> {
    for (path, expected) in [
        ("/DriverInfo/Name", driver.name.clone()),
        ("/StorageClass/FromExistingClassName", driver.class_name()),
    ] {
        let found = definition.pointer(path).and_then(Value::as_str);
        anyhow::ensure!(
            found == Some(&expected),
            "{DIRECTORY}/{DEFINITION}: {path} is {found:?}, and the manifests have {expected:?}"
        );
    }
    Ok(())
}

/// A lane whose cluster runs the driver.
struct Lane<'a> {
    session: &'a Session,
    cluster: Cluster,
    suite: Suite,
    list: SpecList,
    reports: PathBuf,
}

impl Lane<'_> {
    /// Runs the selected specs, and adds them to the report.
    async fn test(&self, selection: &Selection, report: &mut Report) -> Result<()> {
        let node = self.cluster.node();
        let before = Inventory::take(node).await?;
        let expected = self.list.expected_skips();
        let mut runs = Runs::new(&expected, Some(CONTAINER));
        let mut problems = Vec::new();
        for phase in selection.phases(&self.list) {
            if self.session.cancel.is_cancelled() {
                report.push(LANE, &format!("run the specs: {}", phase.name), Outcome::NotRun, None);
                continue;
            }
            problems.extend(self.run(&phase, &mut runs, report).await?);
        }
        // A run that was stopped has specs that it did not select.
        if !self.session.cancel.is_cancelled() {
            problems.extend(match selection {
                Selection::All => complete(&runs, &self.list, report),
                Selection::Quick => not_passed(&runs, &self.list),
                Selection::Only(texts) => not_found(&runs, texts),
            });
        }
        push_problems(report, LANE, &problems);
        if !self.session.cancel.is_cancelled() {
            let left = e2e::nothing_left(self.session, &self.cluster, &before);
            report.run(LANE, "no volume, device, project id or mount is left", left).await;
        }
        Ok(())
    }

    /// Runs the specs of a phase, adds them to the report, and returns what contradicts them.
    async fn run(&self, phase: &Phase, runs: &mut Runs<'_>, report: &mut Report) -> Result<Vec<String>> {
        let directory = self.reports.join(phase.name);
        fs::create_dir_all(&directory).with_context(|| format!("create {}", directory.display()))?;
        // The runner has a working directory of its own.
        let directory = fs::canonicalize(&directory).context("find the directory of the reports")?;
        let step = self.session.progress.step(format!("run the specs: {}", phase.name));
        let target = Target {
            kubeconfig: &self.cluster.kubeconfig(),
            kubectl: self.cluster.kubectl(),
            driver: &self.session.workspace.root().join(DIRECTORY).join(DEFINITION),
        };
        let ended = self.ended(self.suite.start(&phase.specs, target, &directory)?, &directory).await?;
        let text = fs::read_to_string(directory.join(REPORT)).unwrap_or_default();
        let mut cases = Report::new();
        let problems = runs.read(&text, ended, &mut cases, &format!("{LANE}: {}", phase.name));
        if problems.is_empty() && cases.failed() == 0 {
            step.done(cases.summary());
        } else {
            step.failed(format!("{}; the logs of the specs are in {}", cases.summary(), directory.display()));
        }
        report.append(cases);
        Ok(problems.into_iter().map(|problem| format!("{}: {problem}", phase.name)).collect())
    }

    /// Waits until the specs end, or stops them if the run is cancelled. Either way, the runner writes its report.
    async fn ended(&self, mut process: Process, directory: &Path) -> Result<Result<(), String>> {
        let status = match self.session.cancel.run_until_cancelled(unless_node_ends(process.wait())).await {
            Some(status) => status?,
            None => process.stop(STOP_TIMEOUT).await?,
        };
        Ok(match status.success() {
            true => Ok(()),
            false => Err(format!("it ended with {status}; its output is in {}", directory.display())),
        })
    }
}

/// Adds the specs that the lane does not start to the report. Returns a message for each entry of the list that is of no use,
/// and for specs that no phase selected.
fn complete(runs: &Runs<'_>, list: &SpecList, report: &mut Report) -> Vec<String> {
    let mut problems = runs.skips_that_did_not_happen();
    let mut unexpected = Vec::new();
    let mut used = vec![false; list.not_started.len()];
    for text in runs.never_selected() {
        let entry = list.not_started.iter().position(|specs| text.contains(&specs.text));
        let Some(index) = entry else {
            unexpected.push(text);
            continue;
        };
        used[index] = true;
        let reason = Outcome::Skipped(list.not_started[index].reason.trim().to_owned());
        report.push(&format!("{LANE}: not started"), text, reason, None);
    }
    if !unexpected.is_empty() {
        problems.push(format!("specs that no phase selected: {}", excerpt::list(&unexpected)));
    }
    let unused = list.not_started.iter().zip(used).filter(|(_, used)| !used);
    problems.extend(unused.map(|(specs, _)| {
        format!(
            "\"{}\" is on the list of specs that are not started, and is in none: take it off",
            specs.text
        )
    }));
    problems
}

/// Returns a message for each text that is in no spec that ran.
fn not_found(runs: &Runs<'_>, texts: &[String]) -> Vec<String> {
    let missing = texts.iter().filter(|text| !runs.has_selected(text));
    missing.map(|text| format!("no spec that the lane starts contains \"{text}\"")).collect()
}

/// Returns a message for each spec of a quick run that did not pass.
fn not_passed(runs: &Runs<'_>, list: &SpecList) -> Vec<String> {
    let missing = list.quick.iter().filter(|text| !runs.has_passed(text));
    missing.map(|text| format!("\"{text}\" is on the list of quick specs, and did not pass")).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use testvm_cluster::KubernetesMinor;

    use super::*;

    const LIST: &str = "skipped: []\nnotStarted: [{text: any source, reason: no image}]\nquick: [stores]\n";

    /// Reads a run with these specs: text and state. A skipped spec has no message, as those that the filters leave out.
    fn read<'a>(specs: &[(&str, &str)]) -> Runs<'a> {
        let specs: Vec<Value> = specs
            .iter()
            .map(|(text, state)| {
                json!({
                    "ContainerHierarchyTexts": [CONTAINER], "LeafNodeType": "It", "LeafNodeText": text,
                    "State": state, "RunTime": 1,
                })
            })
            .collect();
        let stats = json!({"TotalSpecs": specs.len()});
        let passed = specs.iter().all(|spec| spec["State"] != "failed");
        let suite =
            json!([{"SuiteSucceeded": passed, "PreRunStats": stats, "SpecReports": specs}]).to_string();
        let mut runs = Runs::new(&[], Some(CONTAINER));
        assert_eq!(runs.read(&suite, Ok(()), &mut Report::new(), "suite"), Vec::<String>::new());
        runs
    }

    fn list() -> SpecList {
        SpecList::parse(LIST, KubernetesMinor::default()).unwrap()
    }

    #[test]
    fn unstarted_spec_is_skipped_with_reason() {
        let mut report = Report::new();
        let runs = read(&[("stores", "passed"), ("takes any source", "skipped")]);
        assert_eq!(complete(&runs, &list(), &mut report), Vec::<String>::new());
        assert_eq!(report.cases.len(), 1);
        assert_eq!(report.cases[0].outcome, Outcome::Skipped("no image".to_owned()));
    }

    /// No phase selected the spec, and the entry of the list matches nothing.
    #[test]
    fn unselected_specs_and_entries_are_reported() {
        let runs = read(&[("stores", "passed"), ("expands", "skipped")]);
        let problems = complete(&runs, &list(), &mut Report::new());
        assert!(problems[0].contains("no phase selected: 1:\n  External Storage expands"));
        assert!(
            problems[1].contains("\"any source\"") && problems[1].contains("take it off"),
            "{problems:?}"
        );
    }

    #[test]
    fn text_without_selected_spec_is_reported() {
        let runs = read(&[("stores", "failed"), ("expands", "skipped")]);
        assert_eq!(not_found(&runs, &["stor".to_owned()]), Vec::<String>::new());
        assert_eq!(not_found(&runs, &["expands".to_owned()]).len(), 1);
    }

    #[test]
    fn quick_spec_must_pass() {
        assert_eq!(not_passed(&read(&[("stores", "passed")]), &list()), Vec::<String>::new());
        let problems = not_passed(&read(&[("stores", "skipped")]), &list());
        assert!(problems.len() == 1 && problems[0].contains("\"stores\""), "{problems:?}");
    }
}

//! Runs the scenarios in their order and reports those that were not run.

use std::time::Duration;

use testvm::report::{Outcome, Report};
use testvm::session::Session;
use testvm_cluster::NodeVariant;

use super::catalogue::{Entry, Run, SCENARIOS, State};
use super::faults::Fault;
use super::scenario::{Scenario, StepResult};
use super::scenarios::flow;
use crate::node_options::NodeOptions;
use crate::test_env::environment::{FOREIGN_NODE, TestEnv};
use crate::test_env::workload::create_namespace;

/// The scenarios that a run executes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Selection<'a> {
    only: &'a [String],
    variant: NodeVariant,
}

impl<'a> Selection<'a> {
    /// Selects the scenarios of these names, and those that others need: the first and the last. Selects all that suit the
    /// nodes if there are no names.
    pub(super) fn new(only: &'a [String], variant: NodeVariant) -> Selection<'a> {
        Selection { only, variant }
    }

    /// Returns `true` if the scenario of this name is selected.
    pub(super) fn contains_name(self, name: &str) -> bool {
        SCENARIOS.iter().any(|entry| entry.name == name && self.contains(entry))
    }

    fn contains(self, entry: &Entry) -> bool {
        let all = self.only.is_empty() && entry.suits(self.variant);
        all || entry.always || self.only.iter().any(|only| only == entry.name)
    }
}

/// Runs the selected scenarios. The report lists the scenarios after a failed one as not run.
pub(super) async fn run_all(
    session: &Session,
    report: &mut Report,
    env: &TestEnv<'_>,
    nodes: &NodeOptions,
    selection: Selection<'_>,
    fault: Option<Fault>,
) {
    let state = State { env, nodes, fault, before: None };
    let remaining = SCENARIOS.iter().filter(|entry| selection.contains(entry)).map(|entry| entry.name);
    let remaining = remaining.collect();
    let mut runner = ScenarioRunner { session, report, selection, state, remaining };
    // The report has the reason of a failure.
    drop(runner.run().await);
    for name in runner.remaining {
        report.push(name, "all steps", Outcome::NotRun, Duration::ZERO);
    }
}

struct ScenarioRunner<'a> {
    session: &'a Session,
    report: &'a mut Report,
    selection: Selection<'a>,
    state: State<'a>,
    remaining: Vec<&'static str>,
}

impl ScenarioRunner<'_> {
    async fn run(&mut self) -> StepResult {
        for entry in &SCENARIOS {
            if self.selection.contains(entry) {
                self.run_one(entry).await?;
            } else if entry.name == flow::NAME {
                self.create_namespace().await?;
            }
        }
        Ok(())
    }

    async fn run_one(&mut self, entry: &Entry) -> StepResult {
        self.remaining.retain(|remaining| *remaining != entry.name);
        let mut scenario = Scenario::begin(self.session, self.report, entry.name);
        let (cluster, node) = (self.state.env.cluster, self.state.env.node);
        match entry.run {
            Run::AnyCluster(run) => run(&mut scenario, &mut self.state).await,
            Run::OwnNode { skipped, run } => match (cluster, node) {
                (Some(cluster), Some(node)) => run(&mut scenario, &mut self.state, cluster, node).await,
                _ => {
                    scenario.skip(skipped, FOREIGN_NODE);
                    Ok(())
                }
            },
            Run::KubeletOnDataDisk(run) => match node {
                Some(node) => run(&mut scenario, &mut self.state, node).await,
                None => {
                    scenario.skip("all steps", FOREIGN_NODE);
                    Ok(())
                }
            },
        }
    }

    /// Creates the namespace of all scenarios, which `flow` creates if it is selected.
    async fn create_namespace(&mut self) -> StepResult {
        let env = self.state.env;
        let mut scenario = Scenario::begin(self.session, self.report, "namespace");
        scenario.step("create it", create_namespace(&env.client, &env.namespace)).await
    }
}

#[cfg(test)]
mod tests {
    use testvm_cluster::KubeletRoot;

    use super::super::catalogue::names;
    use super::super::scenarios::gvisor;
    use super::*;

    #[test]
    fn only_a_run_with_its_scenario_needs_gvisor() {
        let needs = |only: &[&str]| {
            let only: Vec<String> = only.iter().map(|name| (*name).to_owned()).collect();
            Selection::new(&only, NodeVariant::default()).contains_name(gvisor::NAME)
        };
        assert!(needs(&[]) && needs(&["clones", "gvisor"]));
        assert!(!needs(&["flow", "node"]));
    }

    #[test]
    fn a_selection_has_the_first_and_the_last_scenario_and_none_that_it_does_not_name() {
        let selected = |only: &[&str], kubelet_root| -> Vec<&str> {
            let only: Vec<String> = only.iter().map(|name| (*name).to_owned()).collect();
            let selection = Selection::new(&only, NodeVariant { kubelet_root, ..NodeVariant::default() });
            SCENARIOS.iter().filter(|entry| selection.contains(entry)).map(|entry| entry.name).collect()
        };
        let all: Vec<_> = names().collect();
        assert_eq!(selected(&[], KubeletRoot::DataDisk), all);
        let of_data_disk = ["kubelet root", "kubelet quotas"];
        let others: Vec<_> = all.into_iter().filter(|name| !of_data_disk.contains(name)).collect();
        assert_eq!(selected(&[], KubeletRoot::RootDisk), others);
        assert_eq!(selected(&["clones"], KubeletRoot::RootDisk), ["install", "clones", "removal"]);
    }
}

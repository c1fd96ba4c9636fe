//! Runs the stories in their order and reports those that were not run.
//!
//! A story that failed does not stop the others. The run first removes the objects that it left, so that they do not become
//! the failure of another story. If that is impossible, or if [`MAX_FAILED`] stories failed, the remaining ones do not run.

use std::path::Path;
use std::time::Duration;

use testvm::report::{Outcome, Report};
use testvm::session::Session;
use testvm::steps::{StepFailed, StepResult, Steps};
use testvm_cluster::KubeletRoot;
use testvm_cluster::restarts::Watch;

use super::catalogue::{Entry, Run, STORIES, State};
use super::faults::Fault;
use super::stories::{flow, install, removal};
use super::{restarts, state_dump};
use crate::node_options::NodeOptions;
use crate::test_env::environment::{FOREIGN_NODE, TestEnv};
use crate::test_env::workload::create_namespace;
use crate::test_env::{rejected_writes, snapshots};

/// The number of failed stories that ends a run: more of them show the same fault, and each waits for its timeouts.
const MAX_FAILED: usize = 3;

/// The stories that a run executes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Selection<'a> {
    only: &'a [String],
    kubelet_root: KubeletRoot,
    leaves_out: &'static [&'static str],
}

impl<'a> Selection<'a> {
    /// Selects the stories of these names, and those that others need: the first and the last. Without names, it selects those
    /// that suit the nodes and need no programs of other projects.
    pub(super) fn new(only: &'a [String], kubelet_root: KubeletRoot) -> Selection<'a> {
        Selection { only, kubelet_root, leaves_out: &[] }
    }

    /// Leaves out the stories of these names, unless they are named.
    pub(super) fn without(self, leaves_out: &'static [&'static str]) -> Selection<'a> {
        Selection { leaves_out, ..self }
    }

    /// Returns `true` if the story of this name is selected.
    pub(super) fn contains_name(self, name: &str) -> bool {
        STORIES.iter().any(|entry| entry.name == name && self.contains(entry))
    }

    fn contains(self, entry: &Entry) -> bool {
        let default = self.only.is_empty()
            && entry.is_part_of_all(self.kubelet_root)
            && !self.leaves_out.contains(&entry.name);
        default || entry.always || self.only.iter().any(|only| only == entry.name)
    }
}

/// The stories of a run, and its reaction to failures.
#[derive(Clone, Copy, Debug)]
pub(super) struct Plan<'a> {
    /// What the run requires of the nodes of its cluster.
    pub(super) nodes: &'a NodeOptions,
    pub(super) selection: Selection<'a>,
    /// The fault to inject. The run then ends with the first failure.
    pub(super) fault: Option<Fault>,
    pub(super) after_failure: AfterFailure<'a>,
}

/// The reaction of a run to a story that failed.
#[derive(Clone, Copy, Debug)]
pub(super) enum AfterFailure<'a> {
    /// It ends, so that the user can inspect the cluster.
    End,
    /// It stores the state of the cluster in this directory, and goes on with the next story.
    GoOn(&'a Path),
}

/// Runs the selected stories. The report lists those that could not run after a failed one as not run.
pub(super) async fn run_all(session: &Session, report: &mut Report, env: &TestEnv<'_>, plan: Plan<'_>) {
    let Plan { nodes, selection, fault, after_failure } = plan;
    let state = State { env, nodes, fault, before: None };
    let watch = restarts::watch(session, report, env).await;
    let remaining = STORIES.iter().filter(|entry| selection.contains(entry)).map(|entry| entry.name);
    let mut remaining: Vec<_> = remaining.collect();
    // The report has the reason of a failure.
    if let Ok(watch) = watch {
        let mut runner =
            StoryRunner { session, report, selection, after_failure, state, watch, remaining, failed: 0 };
        drop(run_in_order(&mut runner, &STORIES).await);
        remaining = runner.remaining;
    }
    for name in remaining {
        report.push(name, "all steps", Outcome::NotRun, Duration::ZERO);
    }
}

struct StoryRunner<'a> {
    session: &'a Session,
    report: &'a mut Report,
    selection: Selection<'a>,
    after_failure: AfterFailure<'a>,
    state: State<'a>,
    watch: Watch,
    remaining: Vec<&'static str>,
    /// The number of stories that failed.
    failed: usize,
}

/// The steps of a run.
trait Runner {
    /// Runs a story if it is selected.
    async fn run(&mut self, entry: &Entry) -> StepResult;
    /// Removes the objects that a failed story left.
    async fn recover(&mut self, failed: &Entry) -> StepResult;
}

/// Runs stories in their order, and recovers from each that fails. The first that cannot be recovered from ends the run.
async fn run_in_order(runner: &mut impl Runner, entries: &[Entry]) -> StepResult {
    for entry in entries {
        if runner.run(entry).await.is_err() {
            runner.recover(entry).await?;
        }
    }
    Ok(())
}

impl Runner for StoryRunner<'_> {
    async fn run(&mut self, entry: &Entry) -> StepResult {
        if self.selection.contains(entry) {
            let outcome = self.run_one(entry).await;
            // After a failure too, because it can be the cause.
            let mut steps = Steps::begin(self.session, self.report, restarts::NAME);
            let checked = restarts::check(&mut steps, &mut self.watch, self.state.env, entry.name).await;
            outcome.and(checked)
        } else if entry.name == flow::NAME {
            self.create_namespace().await
        } else {
            Ok(())
        }
    }

    async fn recover(&mut self, failed: &Entry) -> StepResult {
        self.failed += 1;
        let (env, fault) = (self.state.env, self.state.fault);
        let cancelled = self.session.cancel.is_cancelled();
        let reports = go_on(self.after_failure, failed, fault, cancelled).ok_or(StepFailed)?;
        state_dump::write_failure(self.session, env, failed.name, reports).await;
        if self.failed >= MAX_FAILED {
            return Err(StepFailed);
        }
        let mut steps = Steps::begin(self.session, self.report, "recovery");
        let about = |step: &str| format!("after {}: {step}", failed.name);
        steps.step(&about("the API server takes all objects"), rejected_writes::allow(env)).await?;
        steps.step(&about("no volume is retained"), removal::retain_none(env)).await?;
        steps.step(&about("no snapshot is left"), snapshots::delete_all(env)).await?;
        steps.step(&about("delete the namespace"), removal::delete_namespace(env)).await?;
        steps.step(&about("no volume of the driver is left"), removal::no_volumes(env)).await?;
        steps.step(&about("the driver serves"), install::served(env)).await?;
        let created = create_namespace(&env.client, &env.namespace);
        steps.step(&about("create the namespace"), created).await?;
        // A restart in the meantime, for example of a driver that the story left frozen, is not the fault of the next story.
        let restarted = async { self.watch.unexpected(&env.caused).await.map(drop) };
        steps.step(&about("later restarts count from here"), restarted).await
    }
}

/// Returns the directory for the state of the cluster if a run goes on after this failure. The other stories need the driver,
/// which those that always run install and remove. A run with an injected fault has to end with its first failure.
fn go_on<'a>(
    after_failure: AfterFailure<'a>,
    failed: &Entry,
    fault: Option<Fault>,
    cancelled: bool,
) -> Option<&'a Path> {
    match after_failure {
        AfterFailure::GoOn(reports) if !failed.always && fault.is_none() && !cancelled => Some(reports),
        AfterFailure::GoOn(_) | AfterFailure::End => None,
    }
}

impl StoryRunner<'_> {
    async fn run_one(&mut self, entry: &Entry) -> StepResult {
        self.remaining.retain(|remaining| *remaining != entry.name);
        let mut steps = Steps::begin(self.session, self.report, entry.name);
        let (cluster, node) = (self.state.env.cluster, self.state.env.node);
        match entry.run {
            Run::AnyCluster(run) => run(&mut steps, &mut self.state).await,
            Run::OwnNode { skipped, run } => match (cluster, node) {
                (Some(cluster), Some(node)) => run(&mut steps, &mut self.state, cluster, node).await,
                _ => {
                    steps.skip(skipped, FOREIGN_NODE);
                    Ok(())
                }
            },
            Run::KubeletOnDataDisk(run) => match node {
                Some(node) => run(&mut steps, &mut self.state, node).await,
                None => {
                    steps.skip("all steps", FOREIGN_NODE);
                    Ok(())
                }
            },
        }
    }

    /// Creates the namespace of all stories, which `flow` creates if it is selected.
    async fn create_namespace(&mut self) -> StepResult {
        let env = self.state.env;
        let mut steps = Steps::begin(self.session, self.report, "namespace");
        steps.step("create it", create_namespace(&env.client, &env.namespace)).await
    }
}

#[cfg(test)]
mod tests {
    use super::super::catalogue::{LONG, WITH_OTHER_PROJECTS, names};
    use super::super::stories::{gvisor, snapshots};
    use super::*;

    /// Runs nothing. `failing` fails, and `can_recover` tells whether the run can go on.
    struct FakeRunner {
        failing: &'static str,
        can_recover: bool,
        calls: Vec<String>,
    }

    impl Runner for FakeRunner {
        async fn run(&mut self, entry: &Entry) -> StepResult {
            self.calls.push(entry.name.to_owned());
            if entry.name == self.failing { Err(StepFailed) } else { Ok(()) }
        }

        async fn recover(&mut self, failed: &Entry) -> StepResult {
            self.calls.push(format!("recover from {}", failed.name));
            if self.can_recover { Ok(()) } else { Err(StepFailed) }
        }
    }

    async fn calls(can_recover: bool) -> (bool, Vec<String>) {
        let mut runner = FakeRunner { failing: flow::NAME, can_recover, calls: Vec::new() };
        let succeeded = run_in_order(&mut runner, &STORIES).await.is_ok();
        (succeeded, runner.calls)
    }

    #[tokio::test]
    async fn a_failed_story_does_not_stop_the_others() {
        let (succeeded, calls) = calls(true).await;
        assert!(succeeded);
        assert_eq!(calls[..4], ["install", "flow", "recover from flow", "read-only-claims"]);
        assert_eq!(calls.len(), STORIES.len() + 1);
    }

    #[tokio::test]
    async fn a_run_ends_with_a_failure_that_it_cannot_recover_from() {
        let (succeeded, calls) = calls(false).await;
        assert!(!succeeded);
        assert_eq!(calls, ["install", "flow", "recover from flow"]);
    }

    #[test]
    fn a_run_ends_after_a_failed_installation_an_injected_fault_a_signal_or_if_its_cluster_is_kept() {
        let entry = |name: &str| STORIES.iter().find(|entry| entry.name == name).unwrap();
        let reports = Path::new("/reports");
        let (kept, flow) = (AfterFailure::GoOn(reports), entry(flow::NAME));
        assert_eq!(go_on(kept, flow, None, false), Some(reports));
        assert_eq!(go_on(AfterFailure::End, flow, None, false), None);
        assert_eq!(go_on(kept, entry("install"), None, false), None);
        assert_eq!(go_on(kept, flow, Some(Fault::NoDisk), false), None);
        assert_eq!(go_on(kept, flow, None, true), None);
    }

    #[test]
    fn only_a_run_with_its_story_needs_gvisor() {
        let needs = |only: &[&str]| {
            let only: Vec<String> = only.iter().map(|name| (*name).to_owned()).collect();
            Selection::new(&only, KubeletRoot::default()).contains_name(gvisor::NAME)
        };
        assert!(needs(&["clones", "gvisor"]));
        assert!(!needs(&[]) && !needs(&["flow", "node"]));
    }

    #[test]
    fn only_a_run_with_its_story_needs_the_snapshotter() {
        let contains = |only: &str| {
            Selection::new(&[only.to_owned()], KubeletRoot::default()).contains_name(snapshots::NAME)
        };
        assert!(contains("snapshots") && !contains("clones"));
    }

    #[test]
    fn a_selection_has_the_first_and_the_last_story_and_none_that_it_does_not_name() {
        let selected = |only: &[&str], kubelet_root| -> Vec<&str> {
            let only: Vec<String> = only.iter().map(|name| (*name).to_owned()).collect();
            let selection = Selection::new(&only, kubelet_root);
            STORIES.iter().filter(|entry| selection.contains(entry)).map(|entry| entry.name).collect()
        };
        let all: Vec<_> = names().filter(|name| !WITH_OTHER_PROJECTS.contains(name)).collect();
        assert_eq!(selected(&[], KubeletRoot::DataDisk), all);
        let of_data_disk = ["kubelet-root", "kubelet-quotas"];
        let others: Vec<_> = all.into_iter().filter(|name| !of_data_disk.contains(name)).collect();
        assert_eq!(selected(&[], KubeletRoot::RootDisk), others);
        assert_eq!(selected(&["clones"], KubeletRoot::RootDisk), ["install", "clones", "removal"]);
    }

    #[test]
    fn long_stories_are_left_out_unless_they_are_named() {
        let helm = ["helm".to_owned()];
        let contains =
            |only, name| Selection::new(only, KubeletRoot::default()).without(&LONG).contains_name(name);
        assert!(contains(&[], "clones") && !contains(&[], "helm") && !contains(&[], "power-cut"));
        assert!(contains(&helm, "helm") && !contains(&helm, "power-cut"));
    }
}

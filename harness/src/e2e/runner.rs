//! Runs the stories in their order and reports those that were not run.
//!
//! A story that failed does not stop the others. The run first removes the objects that it left, so that they do not become
//! the failure of another story. If that is impossible, or if [`MAX_FAILED`] stories failed, the remaining ones do not run.

use std::path::Path;
use std::time::Instant;

use anyhow::Result;
use testvm::report::{Case, Outcome, Report};
use testvm::session::Session;
use testvm::steps::{StepFailed, StepResult, Steps};
use testvm_cluster::KubeletRoot;
use testvm_cluster::restarts::Watch;

use super::parts::serving;
use super::state_dump;
use super::stories::{STORIES, flow, removal};
use super::story::{Broken, Run, RunState, Set, Story, When};
use crate::listing::record_time;
use crate::node_options::NodeOptions;
use crate::test_env::disturbances::watched;
use crate::test_env::environment::{FOREIGN_NODE, TestEnv};
use crate::test_env::inventory::Inventory;
use crate::test_env::workload::create_namespace;
use crate::test_env::{rejected_writes, snapshots};

/// The namespace of the claims and pods of the stories.
pub(super) const NAMESPACE: &str = "loopfs-e2e";
/// The suite of the checks for restarts in the report.
const RESTARTS: &str = "restarts";
/// The number of failed stories that ends a run: more of them show the same fault, and each waits for its timeouts.
const MAX_FAILED: usize = 3;

/// The stories that a run executes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Selection<'a> {
    /// The names of stories. If there are none, those of `unnamed` that suit the nodes run.
    pub(super) named: &'a [String],
    pub(super) unnamed: Set,
    pub(super) kubelet_root: KubeletRoot,
}

impl<'a> Selection<'a> {
    /// Returns the selected stories in their order.
    pub(super) fn stories(self) -> impl Iterator<Item = &'static Story> + use<'a> {
        STORIES.iter().filter(move |story| self.contains(story))
    }

    /// Returns `true` if the story of this name is selected.
    pub(super) fn contains_name(self, name: &str) -> bool {
        self.stories().any(|story| story.name == name)
    }

    fn contains(self, story: &Story) -> bool {
        if self.named.is_empty() {
            return self.unnamed.contains(story) && story.suits(self.kubelet_root);
        }
        story.when == When::Always || self.names(story)
    }

    fn names(self, story: &Story) -> bool {
        self.named.iter().any(|name| name == story.name)
    }

    /// Returns `true` if the story is selected for itself, not because others need it.
    pub(super) fn asks_for(self, story: &Story) -> bool {
        if story.when == When::Always && self.named.is_empty() {
            return self.unnamed == Set::All;
        }
        if self.named.is_empty() { self.contains(story) } else { self.names(story) }
    }
}

/// The stories of a run, and its reaction to failures.
#[derive(Clone, Copy, Debug)]
pub(super) struct Plan<'a> {
    /// What the run requires of the nodes of its cluster.
    pub(super) nodes: &'a NodeOptions,
    pub(super) selection: Selection<'a>,
    /// The run then ends with the first failure.
    pub(super) sabotage: Option<Broken>,
    /// The directory for the state of the cluster after a failed story. Without one, the run ends with the first failure, so that the
    /// user can inspect the cluster.
    pub(super) failures: Option<&'a Path>,
}

/// Runs the stories of a plan on a cluster.
pub(super) struct StoryRunner<'a> {
    session: &'a Session,
    report: &'a mut Report,
    plan: Plan<'a>,
    state: RunState<'a>,
    /// `None` if the containers of the driver cannot be watched. Then no story runs.
    watch: Option<Watch>,
    /// `false` for runs without progress lines.
    shown: bool,
    /// The number of stories that failed.
    failed: usize,
}

/// The steps of a run.
pub(super) trait Runner {
    /// Runs a story if it is selected.
    async fn run(&mut self, story: &Story) -> StepResult;
    /// Removes the objects that a failed story left.
    async fn recover(&mut self, failed: &Story) -> StepResult;
    /// Reports the selected stories that did not run.
    fn report_not_run(&mut self);

    /// Runs the stories in their order, and recovers from each that fails. The first that cannot be recovered from ends the run.
    async fn run_all(&mut self) {
        for story in STORIES {
            if self.run(story).await.is_err() && self.recover(story).await.is_err() {
                break;
            }
        }
        self.report_not_run();
    }
}

impl Runner for StoryRunner<'_> {
    async fn run(&mut self, story: &Story) -> StepResult {
        // The flow is the first story with claims.
        if story.name == flow::STORY.name {
            self.create_namespace().await?;
        }
        if !self.plan.selection.contains(story) {
            return Ok(());
        }
        let started = Instant::now();
        self.run_story(story).await?;
        record_time(self.session, "story", story.name, started.elapsed());
        Ok(())
    }

    async fn recover(&mut self, failed: &Story) -> StepResult {
        self.failed += 1;
        let cancelled = self.session.cancel.is_cancelled();
        let Some(reports) = self.plan.failures.filter(|_| goes_on(failed, self.plan.sabotage, cancelled))
        else {
            return Err(StepFailed);
        };
        state_dump::write_failure(self.session, self.state.env, failed.name, reports).await;
        if self.failed >= MAX_FAILED {
            return Err(StepFailed);
        }
        self.clean_up(failed).await?;
        // What the story has leaked is its failure, and not that of the next ones.
        if let (Some(before), Some(node)) = (&mut self.state.before, self.state.env.node) {
            let mut steps = begin(self.session, self.report, "recovery", self.shown);
            let title = format!("after {}: later leaks count from here", failed.name);
            *before = steps.step(&title, Inventory::take(node)).await?;
        }
        Ok(())
    }

    fn report_not_run(&mut self) {
        for story in self.plan.selection.stories() {
            if !self.report.cases.iter().any(|case| case.suite == story.name) {
                self.report.push(story.name, "all steps", Outcome::NotRun, None);
            }
        }
    }
}

/// Returns `true` if a run can go on after this failure. The other stories need the driver, which those that always run install and
/// remove. A sabotaged run has to end with its first failure.
fn goes_on(failed: &Story, sabotage: Option<Broken>, cancelled: bool) -> bool {
    failed.when != When::Always && sabotage.is_none() && !cancelled
}

impl<'a> StoryRunner<'a> {
    /// Begins to watch the containers of the driver.
    pub(super) async fn begin(
        session: &'a Session,
        report: &'a mut Report,
        env: &'a TestEnv<'a>,
        plan: Plan<'a>,
    ) -> StoryRunner<'a> {
        // The report has the reason of a failure.
        let started = Watch::start(watched(env), &env.caused);
        let mut steps = Steps::begin(session, report, RESTARTS);
        let watch = steps.step("watch the containers of the driver", started).await.ok();
        let state = RunState { env, nodes: plan.nodes, before: None };
        StoryRunner { session, report, plan, state, watch, shown: true, failed: 0 }
    }

    /// Runs a story, deletes what it created, and checks the driver's containers.
    pub(super) async fn run_story(&mut self, story: &Story) -> StepResult {
        let Some(watch) = &mut self.watch else { return Err(StepFailed) };
        let env = self.state.env;
        let sabotage = self.plan.sabotage.filter(|(broken, _)| broken.name == story.name);
        let sabotage = sabotage.map(|(_, sabotage)| (sabotage, move || (sabotage.change)(env)));
        let mut steps = begin(self.session, self.report, story.name, self.shown);
        if let Some((sabotage, change)) = &sabotage {
            steps = steps.inserting(sabotage.title(), sabotage.before, change);
        }
        let state = &mut self.state;
        let (cluster, node) = (env.cluster, env.node);
        let outcome = match (&story.run, cluster, node) {
            (Run::AnyCluster(run), ..) => run(&mut steps, state).await,
            (Run::OwnNode(run), Some(cluster), Some(node)) => run(&mut steps, state, cluster, node).await,
            (Run::KubeletOnDataDisk(run), _, Some(node)) => run(&mut steps, state, node).await,
            (Run::OwnNode(_), ..) | (Run::KubeletOnDataDisk(_), _, None) => {
                steps.skip("all steps", FOREIGN_NODE);
                return Ok(());
            }
        };
        let outcome = match outcome {
            Ok(()) if story.when != When::Always => {
                removal::clean_up(&mut steps, env, state.before.as_ref()).await
            }
            outcome => outcome,
        };
        // After a failure too, because it can be the cause.
        let mut steps = begin(self.session, self.report, RESTARTS, self.shown);
        let about = "no container has restarted or panicked unless the story caused it";
        let title = format!("after {}: {about}", story.name);
        let checked = steps.step(&title, none_unexpected(watch, env)).await;
        outcome.and(checked)
    }

    /// Removes what a failed story left.
    pub(super) async fn clean_up(&mut self, failed: &Story) -> StepResult {
        let Some(watch) = &mut self.watch else { return Err(StepFailed) };
        let env = self.state.env;
        let mut steps = begin(self.session, self.report, "recovery", self.shown);
        let about = |step: &str| format!("after {}: {step}", failed.name);
        steps.step(&about("the API server takes all objects"), rejected_writes::allow(env)).await?;
        steps.step(&about("no volume is retained"), removal::retain_none(env)).await?;
        steps.step(&about("no snapshot is left"), snapshots::delete_all(env)).await?;
        steps.step(&about("no pod, claim or volume is left"), removal::delete_objects(env)).await?;
        steps.step(&about("the driver serves"), serving::served(env)).await?;
        // A restart in the meantime, for example of a driver that the story left frozen, is not the fault of the next story.
        let restarted = async { watch.unexpected(&env.caused).await.map(drop) };
        steps.step(&about("later restarts count from here"), restarted).await
    }

    /// Begins runs that have to fail, without progress lines.
    pub(super) fn hidden(self) -> StoryRunner<'a> {
        StoryRunner { shown: false, ..self }
    }

    /// Changes the environment while the next stories run.
    pub(super) fn sabotage(&mut self, sabotage: Option<Broken>) {
        self.plan.sabotage = sabotage;
    }

    /// The cases of the stories so far.
    pub(super) fn cases(&self) -> &[Case] {
        &self.report.cases
    }

    /// Creates the namespace of all stories.
    pub(super) async fn create_namespace(&mut self) -> StepResult {
        let env = self.state.env;
        let mut steps = begin(self.session, self.report, "namespace", self.shown);
        steps.step("create it", create_namespace(&env.client, &env.namespace)).await
    }
}

/// Checks that no container of the driver restarted, and that no pod of it was replaced, unless the story caused it. `kubectl` shows a
/// driver that panics and is started again as ready, and most stories would pass.
async fn none_unexpected(watch: &mut Watch, env: &TestEnv<'_>) -> Result<()> {
    let unexpected = watch.unexpected(&env.caused).await?;
    anyhow::ensure!(unexpected.is_empty(), "{}", unexpected.join("\n"));
    Ok(())
}

fn begin<'a>(session: &'a Session, report: &'a mut Report, name: &'static str, shown: bool) -> Steps<'a> {
    let steps = Steps::begin(session, report, name);
    if shown { steps } else { steps.hidden() }
}

#[cfg(test)]
mod tests {
    use super::super::stories::{gvisor, install, names, sabotages, snapshots};
    use super::*;

    /// Runs nothing. `failing` fails, and `can_recover` tells whether the run can go on.
    struct FakeRunner {
        failing: &'static str,
        can_recover: bool,
        calls: Vec<String>,
    }

    impl Runner for FakeRunner {
        async fn run(&mut self, story: &Story) -> StepResult {
            self.calls.push(story.name.to_owned());
            if story.name == self.failing { Err(StepFailed) } else { Ok(()) }
        }

        async fn recover(&mut self, failed: &Story) -> StepResult {
            self.calls.push(format!("recover from {}", failed.name));
            if self.can_recover { Ok(()) } else { Err(StepFailed) }
        }

        fn report_not_run(&mut self) {
            self.calls.push("end".to_owned());
        }
    }

    async fn calls(can_recover: bool) -> Vec<String> {
        let mut runner = FakeRunner { failing: flow::STORY.name, can_recover, calls: Vec::new() };
        runner.run_all().await;
        runner.calls
    }

    #[tokio::test]
    async fn failed_story_does_not_stop_others() {
        let calls = calls(true).await;
        assert_eq!(calls[..4], ["install", "flow", "recover from flow", "read-only-claims"]);
        assert_eq!(calls.len(), STORIES.len() + 2);
    }

    #[tokio::test]
    async fn unrecoverable_failure_ends_the_run() {
        assert_eq!(calls(false).await, ["install", "flow", "recover from flow", "end"]);
    }

    #[test]
    fn a_failure_ends_some_runs() {
        assert!(goes_on(&flow::STORY, None, false));
        assert!(!goes_on(&install::STORY, None, false));
        assert!(!goes_on(&flow::STORY, sabotages().next(), false));
        assert!(!goes_on(&flow::STORY, None, true));
    }

    fn selected(names: &[&str], unnamed: Set, kubelet_root: KubeletRoot) -> Vec<&'static str> {
        let named: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        Selection { named: &named, unnamed, kubelet_root }.stories().map(|story| story.name).collect()
    }

    #[test]
    fn root_disk_kubelet_excludes_two_stories() {
        let all = selected(&[], Set::All, KubeletRoot::DataDisk);
        let other: Vec<&str> = names().filter(|name| !all.contains(name)).collect();
        assert_eq!(other, [gvisor::STORY.name, snapshots::STORY.name]);
        assert_eq!(
            selected(&[], Set::OtherProjects, KubeletRoot::RootDisk),
            ["install", "gvisor", "snapshots", "removal"]
        );
        let on_root_disk = selected(&[], Set::All, KubeletRoot::RootDisk);
        let missing: Vec<&str> = all.into_iter().filter(|name| !on_root_disk.contains(name)).collect();
        assert_eq!(missing, ["kubelet-root", "kubelet-quotas"]);
        let of_nodes = |root| selected(&[], Set::Node, root);
        assert_eq!(
            of_nodes(KubeletRoot::RootDisk),
            ["install", "flow", "read-only-claims", "node", "removal"]
        );
        assert_eq!(of_nodes(KubeletRoot::DataDisk).len(), 7);
    }

    #[test]
    fn short_and_long_stories_are_all() {
        let [short, long, all] =
            [Set::Short, Set::Long, Set::All].map(|set| selected(&[], set, KubeletRoot::RootDisk));
        assert_eq!(long, ["install", "node-loss", "power-cut", "helm", "claim-labels", "removal"]);
        assert!(short.iter().all(|name| all.contains(name)));
        assert_eq!(short.len() + 4, all.len());
        assert_eq!(selected(&["helm"], Set::Short, KubeletRoot::RootDisk), ["install", "helm", "removal"]);
    }
}

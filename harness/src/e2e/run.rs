//! Chooses the cluster of a run, runs the stories and writes the report.

use std::ffi::OsString;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result};
use clap::builder::PossibleValuesParser;
use kube::config::Kubeconfig;
use nix::fcntl::Flock;
use testvm::report::Report;
use testvm::session::Session;
use testvm::steps::{StepResult, Steps};
use testvm_cluster::{Cluster, ClusterProfile, KubeletRoot, background, client, gvisor, snapshotter};

use super::catalogue;
use super::faults::Fault;
use super::own_cluster::{self, Places};
use super::runner::{self, AfterFailure, Plan, Selection};
use super::{kind, self_check, state_dump, stories, upgrade};
use crate::node_options::{KubernetesOptions, NodeOptions};
use crate::nodes::{self, Additions};
use crate::test_env::environment::TestEnv;
use crate::test_env::inventory::Inventory;
use crate::test_env::manifests::{self, Manifests};

/// The name of the report and of the log directory.
const RUN: &str = "e2e";
/// The namespace of the claims and pods of the stories.
const NAMESPACE: &str = "loopfs-e2e";

/// The arguments of the command `e2e`.
#[derive(Debug, clap::Args)]
pub struct CommandArgs {
    /// Run these stories, and those that install and remove the driver; `cargo harness list` prints them. Without a STORY, the
    /// main ones run: flow and read-only claims.
    #[arg(value_name = "STORY", value_parser = PossibleValuesParser::new(catalogue::names()), hide_possible_values = true, conflicts_with = "broken")]
    named: Vec<String>,

    /// Run all stories that need no programs of other projects.
    #[arg(long, conflicts_with_all = ["named", "stories", "broken", "cluster"])]
    all: bool,

    #[command(flatten)]
    args: Args,
}

impl CommandArgs {
    /// Returns the arguments with the stories of both forms, or the main ones.
    #[must_use]
    pub fn into_args(mut self) -> Args {
        let Args { stories, broken, cluster, .. } = &mut self.args;
        stories.append(&mut self.named);
        // A fault is noticed by the story that it is for, whichever that is.
        if stories.is_empty() && !self.all && broken.is_none() && cluster.is_none() {
            stories.extend(catalogue::MAIN.map(str::to_owned));
        }
        self.args
    }
}

/// The arguments that the command `e2e` and the lane have in common.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct Args {
    /// Use this cluster rather than one of the harness's own. Its nodes must have the images, and an XFS file
    /// system with project quotas mounted at the manifests' data directory.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["cluster", "keep", "self_check", "broken", "kubernetes", "kubernetes_bin", "kubelet", "losetup", "node_image", "kubelet_root", "kernel"])]
    kubeconfig: Option<PathBuf>,

    /// Run on a cluster of this program, in a virtual machine with Docker, rather than on one of the harness's own. Without
    /// a STORY, only the story flow and those that install and remove the driver run.
    #[arg(long, value_enum, value_name = "PROGRAM", conflicts_with_all = ["keep", "self_check", "broken", "kubelet", "losetup", "node_image", "kubelet_root", "kernel"])]
    cluster: Option<ClusterProgram>,

    /// Leave the cluster running after the run, whatever its result; `cargo harness down` removes it.
    #[arg(long)]
    keep: bool,

    /// Run only this story, and those that install and remove the driver; may be given more than once.
    #[arg(long = "story", value_name = "STORY", value_parser = PossibleValuesParser::new(catalogue::names()), hide_possible_values = true, conflicts_with = "broken")]
    stories: Vec<String>,

    /// Inject one fault. The run must fail and name the fault.
    #[arg(long = "break", value_enum, value_name = "WHAT", conflicts_with = "kubelet_root")]
    broken: Option<Fault>,

    /// Then inject each fault in turn, and pass only if each failure names its fault.
    #[arg(long, conflicts_with_all = ["broken", "kubelet_root"])]
    self_check: bool,

    #[command(flatten)]
    kubernetes: KubernetesOptions,

    #[command(flatten)]
    nodes: NodeOptions,

    /// Leave out the long stories, unless they are named.
    #[arg(skip)]
    without_long: bool,
}

/// A program that creates clusters.
#[derive(Clone, Copy, Debug, Eq, PartialEq, clap::ValueEnum)]
enum ClusterProgram {
    /// kind, whose nodes are containers. The commands of csi/deploy/README.md create the cluster and install the driver.
    Kind,
}

impl Args {
    /// Locks the logs of the run, because two runs must not write the same ones. The background process of a kept cluster has
    /// logs of its own, and the run with the other lock waits for it.
    ///
    /// # Errors
    /// The lock cannot be acquired, the run was stopped while it waited, or another process has a kept cluster.
    pub async fn lock(&self, session: &Session) -> Result<Flock<File>> {
        match self.keep && background::is_background(session) {
            true => background::claim(session),
            false => session.exclusive(RUN).await,
        }
    }

    /// Returns the selected programs of Kubernetes.
    #[must_use]
    pub(crate) fn kubernetes(&self) -> &KubernetesOptions {
        &self.kubernetes
    }

    /// Returns `true` if an option is given that only runs of stories take: any but those of Kubernetes and the kernel.
    #[must_use]
    pub(crate) fn is_of_e2e_only(&self) -> bool {
        let Args {
            kubeconfig,
            cluster,
            keep,
            stories,
            broken,
            self_check,
            kubernetes: _,
            nodes,
            without_long: _,
        } = self;
        let of_nodes = nodes.clone().with_default_kernel() != NodeOptions::default();
        kubeconfig.is_some()
            || cluster.is_some()
            || *keep
            || !stories.is_empty()
            || broken.is_some()
            || *self_check
            || of_nodes
    }

    /// Returns the name of the selected kernel.
    #[must_use]
    pub(crate) fn kernel(&self) -> Option<&str> {
        self.nodes.kernel()
    }

    fn selection(&self) -> Selection<'_> {
        let all = Selection::new(&self.stories, self.nodes.variant().kubelet_root);
        if self.without_long { all.without(&catalogue::LONG) } else { all }
    }

    /// Returns the arguments for a run that leaves out the long stories, unless they are named.
    #[must_use]
    pub(crate) fn without_long_stories(self) -> Args {
        Args { without_long: true, ..self }
    }

    /// Refuses options that cannot work together.
    fn check(&self) -> Result<()> {
        self.nodes.check()?;
        catalogue::require_suitable(&self.stories, self.nodes.variant().kubelet_root)?;
        let on_node = [
            self.self_check.then_some("--self-check"),
            self.broken.map(|_| "--break"),
            self.stories.is_empty().then_some("all stories"),
        ];
        if let Some(option) = on_node.into_iter().flatten().next().filter(|_| !self.nodes.has_tools()) {
            anyhow::bail!(
                "--node-image no-tools with {option}: faults and some stories run mount and umount on the node; add \
                 {}",
                catalogue::OF_THE_NODE.map(|name| format!("--story {name:?}")).join(" ")
            );
        }
        Ok(())
    }

    /// Returns the command line of the same run.
    fn again(&self) -> Vec<OsString> {
        let mut line = vec![OsString::from("e2e")];
        line.extend(self.keep.then(|| "--keep".into()));
        line.extend((self.stories.is_empty() && self.broken.is_none()).then(|| "--all".into()));
        line.extend(self.nodes.words().map(OsString::from));
        line.extend(self.stories.iter().flat_map(|name| ["--story".into(), name.into()]));
        line.extend(self.self_check.then(|| "--self-check".into()));
        line.extend(self.broken.iter().flat_map(|broken| ["--break".into(), broken.name().into()]));
        line.extend(self.kubernetes.words());
        line
    }
}

/// Runs the stories and reports every step.
///
/// # Errors
/// Options contradict each other, the manifests cannot be read, or the background process cannot be started. Failed
/// steps are in the report.
pub async fn run(session: &Session, args: Args) -> Result<Report> {
    let manifests = manifests::of_driver(session)?;
    args.check()?;
    if args.cluster == Some(ClusterProgram::Kind) {
        return run_on_kind(session, &args.stories, &args.kubernetes, &session.workspace.reports(RUN)).await;
    }
    match &args.kubeconfig {
        Some(kubeconfig) => against_any_cluster(session, manifests, kubeconfig, args.selection()).await,
        None if !args.keep => {
            against_its_own(session, manifests, &args, &session.workspace.reports(RUN)).await
        }
        None if background::is_background(session) => against_one_that_stays(session, manifests, &args).await,
        None => {
            let cases = background::run_again(session, args.again()).await?;
            Ok(Report { cases, ..Report::default() })
        }
    }
}

/// Runs the stories that depend on the kubelet and the programs of the node, on a cluster with such nodes. The logs
/// and the state of the cluster are in `reports`.
///
/// # Errors
/// The manifests cannot be read. Failed steps are in the report.
pub(crate) async fn run_on_nodes(
    session: &Session,
    nodes: NodeOptions,
    kubernetes: &KubernetesOptions,
    reports: &Path,
) -> Result<Report> {
    let stories = catalogue::of_nodes(nodes.variant().kubelet_root);
    let args = Args { nodes, stories, kubernetes: kubernetes.clone(), ..Args::default() };
    args.check()?;
    against_its_own(session, manifests::of_driver(session)?, &args, reports).await
}

/// Runs the stories with programs of other projects. The logs and the state of the cluster are in `reports`.
///
/// # Errors
/// The manifests cannot be read. Failed steps are in the report.
pub(crate) async fn run_with_other_projects(
    session: &Session,
    kubernetes: &KubernetesOptions,
    reports: &Path,
) -> Result<Report> {
    run_only(session, &catalogue::WITH_OTHER_PROJECTS, kubernetes, reports).await
}

/// Runs the stories that the lane e2e leaves out. The logs and the state of the cluster are in `reports`.
///
/// # Errors
/// The manifests cannot be read. Failed steps are in the report.
pub(crate) async fn run_long(
    session: &Session,
    kubernetes: &KubernetesOptions,
    reports: &Path,
) -> Result<Report> {
    run_only(session, &catalogue::LONG, kubernetes, reports).await
}

/// Runs these stories, and those that install and remove the driver.
async fn run_only(
    session: &Session,
    stories: &[&str],
    kubernetes: &KubernetesOptions,
    reports: &Path,
) -> Result<Report> {
    let stories = stories.iter().map(|name| (*name).to_owned()).collect();
    let args = Args { stories, kubernetes: kubernetes.clone(), ..Args::default() };
    against_its_own(session, manifests::of_driver(session)?, &args, reports).await
}

/// Runs the flow, and then injects each fault in turn. The logs and the state of the cluster are in `reports`.
///
/// # Errors
/// The manifests cannot be read. Failed steps are in the report.
pub(crate) async fn run_self_check(
    session: &Session,
    kubernetes: &KubernetesOptions,
    reports: &Path,
) -> Result<Report> {
    let stories = vec![stories::flow::NAME.to_owned()];
    let args = Args { stories, self_check: true, kubernetes: kubernetes.clone(), ..Args::default() };
    against_its_own(session, manifests::of_driver(session)?, &args, reports).await
}

/// Runs stories on a cluster of kind. Without names, those that need no node of the harness's own and check the driver as
/// users install it: the flow, and the stories that install and remove the driver.
///
/// # Errors
/// The manifests cannot be read. Failed steps are in the report.
pub(crate) async fn run_on_kind(
    session: &Session,
    only: &[String],
    kubernetes: &KubernetesOptions,
    reports: &Path,
) -> Result<Report> {
    let default = [stories::flow::NAME.to_owned()];
    let documents = only.is_empty();
    let only = if documents { &default } else { only };
    let stories = kind::Stories { selection: Selection::new(only, KubeletRoot::default()), documents };
    let kubernetes = kubernetes.source_for_kind();
    kind::run(session, manifests::of_driver(session)?, NAMESPACE, stories, &kubernetes, reports).await
}

/// Replaces an earlier version of the driver by this one and back, on a cluster of its own with volumes in use. The logs
/// and the state of the cluster are in `reports`.
///
/// # Errors
/// The manifests cannot be read. Failed steps are in the report.
pub(crate) async fn run_upgrade(
    session: &Session,
    kubernetes: &KubernetesOptions,
    reports: &Path,
) -> Result<Report> {
    upgrade::run(session, NAMESPACE, &kubernetes.source(), reports).await
}

/// Runs on a cluster that is created for the run and deleted after it.
async fn against_its_own(
    session: &Session,
    manifests: Manifests,
    args: &Args,
    reports: &Path,
) -> Result<Report> {
    let mut report = Report::new();
    state_dump::clear(reports)?;
    let dir = session.workspace.target().join("e2e-cluster");
    let logs = reports.join("logs");
    let Ok(cluster) = start(session, &mut report, args, Places { dir, logs, reports }).await else {
        return Ok(report);
    };
    test(session, &mut report, manifests, &cluster, args, reports).await?;
    let started = Instant::now();
    // The cluster is stopped after Ctrl-C too, when no further step begins.
    let stopped = cluster.stop().await;
    report.record("cluster", "stop the node and the control plane", started.elapsed(), &stopped);
    Ok(report)
}

/// Runs in the background process, on a cluster that stays.
async fn against_one_that_stays(session: &Session, manifests: Manifests, args: &Args) -> Result<Report> {
    let mut report = Report::new();
    let dir = background::directory(&session.workspace);
    let logs = dir.join("logs");
    let places = Places { dir, logs: logs.clone(), reports: &logs };
    let Ok(cluster) = start(session, &mut report, args, places).await else {
        background::hand_over(&session.workspace, None, &report.cases)?;
        return Ok(report);
    };
    test(session, &mut report, manifests, &cluster, args, &logs).await?;
    session.progress.line(cluster.walkthrough());
    session.progress.finish();
    background::hand_over(&session.workspace, Some(&cluster), &report.cases)?;
    cluster.serve_until_cancelled(session).await?;
    Ok(report)
}

/// Builds the parts of the cluster, and starts it.
async fn start(
    session: &Session,
    report: &mut Report,
    args: &Args,
    places: Places<'_>,
) -> StepResult<Cluster> {
    let mut steps = Steps::begin(session, report, "cluster");
    let parts = async {
        let additions = additions(session, args.selection()).await?;
        nodes::parts(session, &args.kubernetes.source(), &args.nodes, ClusterProfile::Default, additions)
            .await
    };
    own_cluster::start(session, &mut steps, parts, places).await
}

/// Builds what only some stories need: each is large.
async fn additions(session: &Session, selection: Selection<'_>) -> Result<Additions> {
    let mut additions = Additions::default();
    if selection.contains_name(stories::gvisor::NAME) {
        additions.tools = gvisor::programs(session).await?;
    }
    if selection.contains_name(stories::snapshots::NAME) {
        additions.images = snapshotter::images(session).await?.into();
    }
    Ok(additions)
}

async fn test(
    session: &Session,
    report: &mut Report,
    manifests: Manifests,
    cluster: &Cluster,
    args: &Args,
    reports: &Path,
) -> Result<()> {
    let mut env = TestEnv::new(manifests, cluster.client().clone(), Some(cluster), NAMESPACE)?;
    env.reports = Some(reports.to_owned());
    let after_failure = if args.keep { AfterFailure::End } else { AfterFailure::GoOn(reports) };
    let plan = Plan { nodes: &args.nodes, selection: args.selection(), fault: args.broken, after_failure };
    runner::run_all(session, report, &env, plan).await;
    state_dump::write(&env, reports).await;
    if args.self_check {
        self_check::run(session, report, env).await;
    }
    if !report.succeeded() {
        state_dump::write_bundles(session, cluster.nodes(), reports).await;
    }
    Ok(())
}

/// Applies the manifests to a cluster and waits until the driver serves.
pub(crate) async fn install_driver(session: &Session, cluster: &Cluster) -> Result<()> {
    let env = TestEnv::in_namespace(session, cluster, NAMESPACE)?;
    env.manifests.apply(&env.client).await?;
    stories::install::served(&env).await
}

/// Replaces the driver's pods, and waits until the new ones serve.
///
/// # Errors
/// The driver does not serve.
pub(crate) async fn replace_driver(session: &Session, cluster: &Cluster) -> Result<()> {
    let env = TestEnv::in_namespace(session, cluster, NAMESPACE)?;
    stories::driver_restart::replace(&env).await?;
    stories::install::served(&env).await
}

/// Applies the manifests to a cluster with the component that takes snapshots, and waits until the driver serves.
pub(crate) async fn install_driver_with_snapshots(session: &Session, cluster: &Cluster) -> Result<()> {
    let env = TestEnv::in_namespace(session, cluster, NAMESPACE)?;
    let (root, kubectl) = (session.workspace.root(), cluster.kubectl());
    stories::snapshots::controllers::add_controller(&env, root, kubectl).await?;
    let component = stories::snapshots::controllers::COMPONENT;
    stories::component::add(&env, root, kubectl, component).await.map(drop)
}

/// Waits until the cluster has no volume of the driver, and its first node nothing that it did not have `before`.
///
/// # Errors
/// Something is left after some minutes.
pub(crate) async fn nothing_left(session: &Session, cluster: &Cluster, before: &Inventory) -> Result<()> {
    let env = TestEnv::in_namespace(session, cluster, NAMESPACE)?;
    stories::removal::no_volumes_of_the_driver(&env).await?;
    let node = env.node.context("the cluster has no node")?;
    stories::removal::nothing_left(&env, node, before).await
}

/// Writes the state of a cluster into `directory`, for readers of the report.
///
/// # Errors
/// The manifests of the driver cannot be read.
pub(crate) async fn write_state(session: &Session, cluster: &Cluster, directory: &Path) -> Result<()> {
    let env = TestEnv::in_namespace(session, cluster, NAMESPACE)?;
    state_dump::write(&env, directory).await;
    state_dump::write_bundles(session, cluster.nodes(), directory).await;
    Ok(())
}

/// Runs on an existing cluster, and removes everything that the run created.
async fn against_any_cluster(
    session: &Session,
    manifests: Manifests,
    kubeconfig: &Path,
    selection: Selection<'_>,
) -> Result<Report> {
    let reports = session.workspace.reports(RUN);
    state_dump::clear(&reports)?;
    let config =
        Kubeconfig::read_from(kubeconfig).with_context(|| format!("read {}", kubeconfig.display()))?;
    let client = client::connect(config).await?;
    let mut env = TestEnv::new(manifests, client, None, NAMESPACE)?;
    env.reports = Some(session.workspace.reports(RUN));
    let installed = stories::install::is_installed(&env).await?;
    let mut report = Report::new();
    let nodes = NodeOptions::default();
    let after_failure = AfterFailure::GoOn(&reports);
    let plan = Plan { nodes: &nodes, selection, fault: None, after_failure };
    runner::run_all(session, &mut report, &env, plan).await;
    state_dump::write(&env, &reports).await;
    let started = Instant::now();
    // The removal also runs if a story failed or was stopped.
    let cleaned = async {
        stories::removal::delete_namespace(&env).await?;
        stories::removal::no_volumes(&env).await?;
        if installed { Ok(()) } else { stories::install::remove(&env).await }
    };
    let cleaned = cleaned.await;
    report.record("clean-up", "remove what the run made", started.elapsed(), &cleaned);
    Ok(report)
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use rstest::rstest;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: CommandArgs,
    }

    fn parse<'a>(words: impl IntoIterator<Item = &'a str>) -> Args {
        Line::parse_from(words).args.into_args()
    }

    #[test]
    fn again_returns_the_command_line_of_the_same_run() {
        let words = ["e2e", "--keep", "--break", "no-disk", "--kubernetes-bin", "/k"];
        let again = parse(words).again();
        assert_eq!(again, words);
        assert_eq!(Line::parse_from(again).args.into_args().broken, Some(Fault::NoDisk));
        let words = ["e2e", "--keep", "--all"];
        assert_eq!(parse(words).again(), words);
        let words = [
            "e2e",
            "--keep",
            "--kubelet",
            "patched",
            "--losetup",
            "drop-in",
            "--story",
            "second-node",
            "--story",
            "clones",
        ];
        assert_eq!(parse(words).again(), words);
    }

    #[test]
    fn a_story_is_selected_by_its_position_or_by_the_option() {
        let args = parse(["e2e", "clones", "--story", "flow", "second-node"]);
        assert_eq!(args.stories, ["flow", "clones", "second-node"]);
        assert_eq!(args.again(), ["e2e", "--story", "flow", "--story", "clones", "--story", "second-node"]);
    }

    #[rstest]
    #[case(&["e2e"], &catalogue::MAIN)]
    #[case(&["e2e", "--keep", "--self-check"], &catalogue::MAIN)]
    #[case(&["e2e", "clones"], &["clones"])]
    #[case(&["e2e", "--all"], &[])]
    #[case(&["e2e", "--break", "unsynced"], &[])]
    #[case::the_run_on_kind_selects_its_own(&["e2e", "--cluster", "kind"], &[])]
    fn without_names_the_main_stories_run(#[case] line: &[&str], #[case] stories: &[&str]) {
        assert_eq!(parse(line.iter().copied()).stories, stories);
    }

    #[test]
    fn the_main_stories_include_the_removal() {
        let args = parse(["e2e"]);
        let selection = args.selection();
        let names = catalogue::names().filter(|name| selection.contains_name(name));
        let [flow, read_only] = catalogue::MAIN;
        let (first, last) = (stories::install::NAME, stories::removal::NAME);
        assert_eq!(names.collect::<Vec<_>>(), [first, flow, read_only, last]);
    }

    #[test]
    fn all_excludes_named_stories() {
        for word in ["clones", "--story=clones", "--break=leak", "--cluster=kind"] {
            assert!(Line::try_parse_from(["e2e", "--all", word]).is_err(), "{word}");
        }
    }

    #[test]
    fn an_unknown_story_is_refused_with_the_nearest_names() {
        for words in [&["e2e", "clone"][..], &["e2e", "--story", "clone"]] {
            let error = Line::try_parse_from(words).err().unwrap().to_string();
            assert!(
                error.contains("'clone'") && error.contains("similar") && error.contains("'clones'"),
                "{error}"
            );
        }
        let error = Line::try_parse_from(["e2e", "clones", "--break", "no-disk"]).err().unwrap().to_string();
        assert!(error.contains("cannot be used with"), "{error}");
    }
}

//! The options of a run of stories.

use std::ffi::OsString;
use std::fs::File;
use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use nix::fcntl::Flock;
use testvm::session::Session;
use testvm_cluster::background;

use super::runner::Selection;
use super::stories::{STORIES, flow, names, sabotages};
use super::story::{Broken, Set, When};
use crate::node_options::{KubernetesOptions, NodeOptions};

/// The name of the reports and of the lock of the command.
const RUN: &str = "e2e";

/// The arguments of the command `e2e`.
#[derive(Debug, clap::Args)]
pub struct CommandArgs {
    /// Run these stories, and those that install and remove the driver; `cargo harness list` prints them. Without a STORY, the
    /// main ones run: flow and read-only-claims.
    #[arg(value_name = "STORY", value_parser = PossibleValuesParser::new(names()), hide_possible_values = true, conflicts_with = "broken")]
    named: Vec<String>,

    /// Run all stories that need no programs of other projects.
    #[arg(long, conflicts_with_all = ["named", "broken", "cluster"])]
    all: bool,

    #[command(flatten)]
    args: Args,
}

impl CommandArgs {
    /// Returns the arguments with the stories. Without any, the main ones run.
    #[must_use]
    pub fn into_args(self) -> Args {
        let unnamed = if self.all { Set::All } else { Set::Main };
        Args { stories: self.named, unnamed, ..self.args }
    }
}

/// A run of stories: its cluster, its stories and its reports. The command `e2e` and the lane e2e take all options, and other runs
/// have some of them.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct Args {
    /// Use this cluster rather than one of the harness's own. Its nodes must have the images, and an XFS file
    /// system with project quotas mounted at the manifests' data directory.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["cluster", "keep", "self_check", "broken", "kubernetes", "kubelet", "losetup", "node_image", "kubelet_root", "kernel"])]
    pub(super) kubeconfig: Option<PathBuf>,

    /// Run on a cluster of this program, in a virtual machine with Docker, rather than on one of the harness's own. Without
    /// a STORY, the story flow runs, then the commands of the documents, and the flow with the Debian package.
    #[arg(long, value_enum, value_name = "PROGRAM", conflicts_with_all = ["keep", "self_check", "broken", "kubelet", "losetup", "node_image", "kubelet_root", "kernel"])]
    cluster: Option<ClusterProgram>,

    /// Leave the cluster running after the run, whatever its result; `cargo harness down` removes it.
    #[arg(long)]
    pub(super) keep: bool,

    /// Change the environment while a story runs. The run must fail and name the change.
    #[arg(long = "break", value_parser = sabotage_parser(), value_name = "WHAT")]
    pub(super) broken: Option<Broken>,

    /// Instead of running the stories, break each in all ways of --break, and pass only if each failure names its cause.
    #[arg(long, conflicts_with = "broken")]
    pub(super) self_check: bool,

    #[command(flatten)]
    kubernetes: KubernetesOptions,

    #[command(flatten)]
    pub(super) nodes: NodeOptions,

    /// The names of the stories that run.
    #[arg(skip)]
    stories: Vec<String>,

    /// The stories that run if none is named.
    #[arg(skip)]
    unnamed: Set,

    /// The directory of the reports and logs, below that of all reports. The default is that of the command.
    #[arg(skip)]
    reports: Option<PathBuf>,
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
            broken,
            self_check,
            kubernetes: _,
            nodes,
            stories: _,
            unnamed: _,
            reports: _,
        } = self;
        let of_nodes = nodes.clone().with_default_kernel() != NodeOptions::default();
        kubeconfig.is_some() || cluster.is_some() || *keep || broken.is_some() || *self_check || of_nodes
    }

    /// Returns the name of the selected kernel.
    #[must_use]
    pub(crate) fn kernel(&self) -> Option<&str> {
        self.nodes.kernel()
    }

    /// Returns a run of these stories with the selected programs of Kubernetes.
    #[must_use]
    pub(crate) fn of(unnamed: Set, kubernetes: &KubernetesOptions) -> Args {
        Args { unnamed, kubernetes: kubernetes.clone(), ..Args::default() }
    }

    /// Writes the reports and logs to this directory, below that of all reports.
    #[must_use]
    pub(crate) fn with_reports(self, directory: impl Into<PathBuf>) -> Args {
        Args { reports: Some(directory.into()), ..self }
    }

    /// Runs these stories if none is named.
    #[must_use]
    pub(crate) fn with_unnamed(self, unnamed: Set) -> Args {
        Args { unnamed, ..self }
    }

    #[must_use]
    pub(crate) fn with_nodes(self, nodes: NodeOptions) -> Args {
        Args { nodes, ..self }
    }

    /// Breaks each story instead of running it.
    #[must_use]
    pub(crate) fn with_self_check(self) -> Args {
        Args { self_check: true, ..self }
    }

    #[must_use]
    pub(crate) fn on_kind(self) -> Args {
        Args { cluster: Some(ClusterProgram::Kind), ..self }
    }

    pub(super) fn is_on_kind(&self) -> bool {
        self.cluster == Some(ClusterProgram::Kind)
    }

    /// Returns `true` if no story is named.
    pub(super) fn names_none(&self) -> bool {
        self.stories.is_empty()
    }

    pub(super) fn selection(&self) -> Selection<'_> {
        let unnamed = match self.broken {
            _ if self.is_on_kind() => Set::One(flow::STORY.name),
            Some((story, _)) => Set::One(story.name),
            None => self.unnamed,
        };
        Selection { named: &self.stories, unnamed, kubelet_root: self.nodes.variant().kubelet_root }
    }

    pub(super) fn reports(&self, session: &Session) -> PathBuf {
        match &self.reports {
            None => session.workspace.reports(RUN),
            Some(directory) => session.workspace.target().join(directory),
        }
    }

    /// Refuses options that cannot work together.
    ///
    /// # Errors
    /// The message names them and the remedy.
    pub(crate) fn check(&self) -> Result<()> {
        self.nodes.check()?;
        let named = STORIES.iter().filter(|story| self.stories.iter().any(|name| name == story.name));
        let mut named = named.chain(self.broken.map(|(story, _)| story));
        let kubelet_root = self.nodes.variant().kubelet_root;
        if let Some(story) = named.find(|story| !story.suits(kubelet_root)) {
            anyhow::bail!("story {} needs {}", story.name, story.needs());
        }
        let runs_all = self.stories.is_empty() && !matches!(self.unnamed, Set::Main | Set::Node);
        let on_node = [
            self.self_check.then_some("--self-check"),
            self.broken.map(|_| "--break"),
            runs_all.then_some("all stories"),
        ];
        if let Some(option) = on_node.into_iter().flatten().next().filter(|_| !self.nodes.has_tools()) {
            let of_nodes = Selection { named: &[], unnamed: Set::Node, ..self.selection() };
            let options = of_nodes.stories().filter(|story| story.when != When::Always);
            anyhow::bail!(
                "--node-image no-tools with {option}: faults and some stories run mount and umount on the node; name {}",
                options.map(|story| story.name).collect::<Vec<_>>().join(" ")
            );
        }
        Ok(())
    }

    /// Returns the command line of the same run.
    pub(super) fn again(&self) -> Vec<OsString> {
        let mut line = vec![OsString::from("e2e")];
        line.extend(self.keep.then(|| "--keep".into()));
        line.extend(self.nodes.words().map(OsString::from));
        if self.broken.is_none() && self.names_none() {
            let stories = self.selection().stories().filter(|story| story.when != When::Always);
            line.extend(stories.map(|story| story.name.into()));
        }
        line.extend(self.stories.iter().map(OsString::from));
        line.extend(self.self_check.then(|| "--self-check".into()));
        line.extend(self.broken.iter().flat_map(|(_, sabotage)| ["--break".into(), sabotage.name.into()]));
        line.extend(self.kubernetes.words());
        line
    }
}

/// Parses the value of `--break`.
fn sabotage_parser() -> impl TypedValueParser<Value = Broken> {
    let value = |(_, sabotage): Broken| PossibleValue::new(sabotage.name).help(sabotage.about);
    PossibleValuesParser::new(sabotages().map(value)).try_map(|name| {
        sabotages().find(|(_, sabotage)| sabotage.name == name).context("there is no such sabotage")
    })
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
    fn again_returns_the_same_command_line() {
        let words = ["e2e", "--keep", "--break", "quota", "--kubernetes", "1.36"];
        let again = parse(words).again();
        assert_eq!(again, words);
        let broken = Line::parse_from(again).args.into_args().broken;
        assert_eq!(broken.map(|(_, sabotage)| sabotage.name), Some("quota"));
        let words =
            ["e2e", "--keep", "--kubelet", "patched", "--losetup", "drop-in", "second-node", "clones"];
        assert_eq!(parse(words).again(), words);
    }

    fn selected(args: &Args) -> Vec<&'static str> {
        args.selection().stories().map(|story| story.name).collect()
    }

    #[rstest]
    #[case(&["e2e"], &["install", "flow", "read-only-claims", "removal"])]
    #[case(&["e2e", "--keep", "--self-check"], &["install", "flow", "read-only-claims", "removal"])]
    #[case(&["e2e", "clones"], &["install", "clones", "removal"])]
    #[case::the_run_on_kind_selects_its_own(&["e2e", "--cluster", "kind"], &["install", "flow", "removal"])]
    fn without_names_the_main_stories_run(#[case] line: &[&str], #[case] stories: &[&str]) {
        assert_eq!(selected(&parse(line.iter().copied())), stories);
    }

    /// A sabotage selects only the story that detects it, besides installation and removal.
    #[test]
    fn all_selects_all_stories() {
        let all = selected(&parse(["e2e", "--all"]));
        assert!(all.len() > 15 && all.contains(&"power-cut") && !all.contains(&"gvisor"), "{all:?}");
        let broken = parse(["e2e", "--break", "unsynced"]);
        for args in [broken.clone(), broken.with_unnamed(Set::Short)] {
            assert_eq!(selected(&args), ["install", "power-cut", "removal"]);
        }
    }

    #[test]
    fn background_process_selects_same_stories() {
        let of_lane = Args { keep: true, ..Args::default() }.with_unnamed(Set::Short);
        for args in [of_lane, parse(["e2e", "--keep", "--all"]), parse(["e2e", "--keep"])] {
            let again = Line::parse_from(args.again()).args.into_args();
            assert_eq!(selected(&again), selected(&args));
        }
    }

    #[test]
    fn all_excludes_named_stories() {
        for word in ["clones", "--break=leak", "--cluster=kind"] {
            assert!(Line::try_parse_from(["e2e", "--all", word]).is_err(), "{word}");
        }
    }
}

//! What a story is: an end-to-end test with its name, the runs that it is part of, what it needs, and its sabotages.

use anyhow::Result;
use futures::future::LocalBoxFuture;
use testvm::steps::{StepResult, Steps};
use testvm_cluster::{Cluster, KubeletRoot, Node};

use crate::listing::Line;
use crate::node_options::NodeOptions;
use crate::test_env::environment::TestEnv;
use crate::test_env::inventory::Inventory;

/// One end-to-end test. Each file of `stories` has one.
#[derive(Debug)]
pub(super) struct Story {
    /// The name in reports and on the command line.
    pub(super) name: &'static str,
    /// One line for users.
    pub(super) about: &'static str,
    pub(super) when: When,
    pub(super) run: Run,
    /// At least one: a test that cannot fail proves nothing.
    pub(super) sabotages: &'static [Sabotage],
}

/// The runs that a story is part of. A user can add each story to any run by its name.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum When {
    /// Every run. The other stories need it.
    Always,
    /// Runs that name no story: what the driver is for.
    Main,
    /// Runs on kinds of nodes, which the main stories are part of too. The story depends on the kubelet and the programs of the node.
    Node,
    All,
    /// Runs of all stories, but not the lane e2e: the story takes long.
    Long,
    /// No other run. The story has programs of other projects, which take minutes to build.
    OtherProjects,
}

/// The function of a story, by what it needs.
#[derive(Debug)]
pub(super) enum Run {
    AnyCluster(for<'a> fn(&'a mut Steps<'_>, &'a mut RunState<'_>) -> LocalBoxFuture<'a, StepResult>),
    /// Needs a cluster and a node of the harness's own. On another cluster, the story is skipped.
    OwnNode(
        for<'a> fn(
            &'a mut Steps<'_>,
            &'a mut RunState<'_>,
            &'a Cluster,
            &'a Node,
        ) -> LocalBoxFuture<'a, StepResult>,
    ),
    /// Needs nodes whose kubelet has its directory on the data disk, and is not part of runs on others.
    KubeletOnDataDisk(
        for<'a> fn(&'a mut Steps<'_>, &'a mut RunState<'_>, &'a Node) -> LocalBoxFuture<'a, StepResult>,
    ),
}

/// What the stories of one run share.
pub(super) struct RunState<'a> {
    pub(super) env: &'a TestEnv<'a>,
    /// What the run asks of the nodes of its cluster.
    pub(super) nodes: &'a NodeOptions,
    /// The inventory of the node before the first volume, if the node is the harness's own.
    pub(super) before: Option<Inventory>,
}

/// A change of the environment while a story runs, never of the product or of the story. The story must fail and name the change.
#[derive(Debug)]
pub(super) struct Sabotage {
    /// The value of `--break`.
    pub(super) name: &'static str,
    /// One line for users.
    pub(super) about: &'static str,
    /// The end of a step's title. The change is made directly before the first such step.
    pub(super) before: &'static str,
    pub(super) change: Change,
    /// Repairs what neither a new installation of the driver nor the deletion of pods, claims and volumes repairs.
    pub(super) repair: Option<Change>,
    /// The words that the failure must contain, so that its reader knows what to repair.
    pub(super) expected: &'static [&'static str],
}

/// Changes the environment.
pub(super) type Change = for<'a> fn(&'a TestEnv<'a>) -> LocalBoxFuture<'a, Result<()>>;

/// A sabotage with the story that must notice it.
pub(super) type Broken = (&'static Story, &'static Sabotage);

/// The stories of a run that names none, besides those of every run.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) enum Set {
    Main,
    /// The main stories, and those that depend on the node.
    Node,
    /// All stories that take no long time.
    Short,
    Long,
    /// All stories without programs of other projects.
    #[default]
    All,
    OtherProjects,
    /// Those that need a kubelet with its directory on the data disk.
    DataDisk,
    One(&'static str),
}

impl Set {
    pub(super) fn contains(self, story: &Story) -> bool {
        match (self, story.when) {
            (_, When::Always) => true,
            (Set::Main, when) => when == When::Main,
            (Set::Node, when) => matches!(when, When::Main | When::Node),
            (Set::Short, when) => !matches!(when, When::Long | When::OtherProjects),
            (Set::Long, when) => when == When::Long,
            (Set::All, when) => when != When::OtherProjects,
            (Set::OtherProjects, when) => when == When::OtherProjects,
            (Set::DataDisk, _) => matches!(story.run, Run::KubeletOnDataDisk(_)),
            (Set::One(name), _) => story.name == name,
        }
    }
}

impl Story {
    /// Returns `true` if the story can run on these nodes.
    pub(super) fn suits(&self, kubelet_root: KubeletRoot) -> bool {
        match self.run {
            Run::AnyCluster(_) | Run::OwnNode(_) => true,
            Run::KubeletOnDataDisk(_) => kubelet_root == KubeletRoot::DataDisk,
        }
    }

    pub(super) const fn needs(&self) -> &'static str {
        match (self.when, &self.run) {
            (When::OtherProjects, _) => "a cluster of the harness, and Go modules of other projects",
            (_, Run::AnyCluster(_)) => "any cluster",
            (_, Run::OwnNode(_)) => "a cluster of the harness",
            (_, Run::KubeletOnDataDisk(_)) => "a cluster of the harness with --kubelet-root data-disk",
        }
    }

    /// Returns the line of `cargo harness list`.
    pub(super) fn line(&self) -> Line {
        let when = match self.when {
            When::Always => " (in every run)",
            When::Main => " (also if no story is named)",
            When::OtherProjects => " (only if it is named)",
            When::Node | When::All | When::Long => "",
        };
        Line {
            kind: "story",
            name: self.name.to_owned(),
            about: format!("{}{when}", self.about),
            needs: self.needs(),
            estimate: "",
        }
    }
}

impl Sabotage {
    /// Returns the title of the change in the report.
    pub(super) fn title(&self) -> String {
        format!("break: {}", self.name)
    }
}

//! All stories in the order in which they run: what each is called, what it needs, and the function that runs it.

use anyhow::Result;
use futures::future::LocalBoxFuture;
use testvm::steps::{StepResult, Steps};
use testvm_cluster::{Cluster, KubeletRoot, Node};

use super::stories::*;
use crate::listing::Line;
use crate::node_options::NodeOptions;
use crate::test_env::environment::TestEnv;
use crate::test_env::inventory::Inventory;

/// One end-to-end test.
pub(super) struct Story {
    /// The name in reports and on the command line.
    pub(super) name: &'static str,
    /// One line for users.
    pub(super) about: &'static str,
    pub(super) when: When,
    pub(super) run: Run,
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

/// The stories of a run that names none, besides those of every run.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) enum Set {
    Flow,
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
            (Set::Flow, _) => story.name == flow::NAME,
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

/// The function of a story, by what it needs.
pub(super) enum Run {
    AnyCluster(for<'a> fn(&'a mut Steps<'_>, &'a mut State<'_>) -> LocalBoxFuture<'a, StepResult>),
    /// Needs a cluster and a node of the harness's own. On another cluster, the story is skipped.
    OwnNode(
        for<'a> fn(
            &'a mut Steps<'_>,
            &'a mut State<'_>,
            &'a Cluster,
            &'a Node,
        ) -> LocalBoxFuture<'a, StepResult>,
    ),
    /// Needs nodes whose kubelet has its directory on the data disk, and is not part of runs on others.
    KubeletOnDataDisk(
        for<'a> fn(&'a mut Steps<'_>, &'a mut State<'_>, &'a Node) -> LocalBoxFuture<'a, StepResult>,
    ),
}

impl Story {
    /// Returns `true` if the story can run on these nodes.
    pub(super) fn suits(&self, kubelet_root: KubeletRoot) -> bool {
        match self.run {
            Run::AnyCluster(_) | Run::OwnNode(_) => true,
            Run::KubeletOnDataDisk(_) => kubelet_root == KubeletRoot::DataDisk,
        }
    }

    const fn needs(&self) -> &'static str {
        match (self.when, &self.run) {
            (When::OtherProjects, _) => "a cluster of the harness, and Go modules of other projects",
            (_, Run::AnyCluster(_)) => "any cluster",
            (_, Run::OwnNode(_)) => "a cluster of the harness",
            (_, Run::KubeletOnDataDisk(_)) => "a cluster of the harness with --kubelet-root data-disk",
        }
    }
}

/// What the stories of one run share.
pub(super) struct State<'a> {
    pub(super) env: &'a TestEnv<'a>,
    /// What the run asks of the nodes of its cluster.
    pub(super) nodes: &'a NodeOptions,
    /// The inventory of the node before the first volume, if the node is the harness's own.
    pub(super) before: Option<Inventory>,
}

pub(super) const STORIES: &[Story] = &[
    Story {
        name: install::NAME,
        about: "apply the manifests; every node with a pod of the driver offers it",
        when: When::Always,
        run: Run::AnyCluster(|s, state| Box::pin(install(s, state))),
    },
    Story {
        name: flow::NAME,
        about: "a mounted, a read-only and a block volume, expanded in use while the driver is killed",
        when: When::Main,
        run: Run::AnyCluster(|s, state| Box::pin(flow::run(s, state.env))),
    },
    Story {
        name: read_only_claims::NAME,
        about: "a pod that requests its claim read-only cannot write to it",
        when: When::Main,
        run: Run::AnyCluster(|s, state| Box::pin(read_only_claims::run(s, state.env))),
    },
    Story {
        name: node::NAME,
        about: "the kubelet and losetup of the node, the programs that the kubelet starts, and node-debug",
        when: When::Node,
        run: Run::OwnNode(|s, state, _, node| Box::pin(node::run(s, state.env, state.nodes, node))),
    },
    Story {
        name: clones::NAME,
        about: "a claim with another claim as its data source, and one that a volume populator fills",
        when: When::All,
        run: Run::AnyCluster(|s, state| Box::pin(clones::run(s, state.env))),
    },
    Story {
        name: infeasible_resize::NAME,
        about: "an expansion beyond the node's space is rejected, a smaller one succeeds",
        when: When::All,
        run: Run::AnyCluster(|s, state| Box::pin(infeasible_resize::run(s, state.env))),
    },
    Story {
        name: retained_volumes::NAME,
        about: "reclaim policy Retain: the data stays, and another claim gets it",
        when: When::All,
        run: Run::AnyCluster(|s, state| Box::pin(retained_volumes::run(s, state.env))),
    },
    Story {
        name: deletion_in_use::NAME,
        about: "a claim is deleted by force while a pod uses its volume",
        when: When::All,
        run: Run::AnyCluster(|s, state| Box::pin(deletion_in_use::run(s, state.env))),
    },
    Story {
        name: orphans::NAME,
        about: "the audit lists a volume whose PersistentVolume was deleted",
        when: When::All,
        run: Run::AnyCluster(|s, state| Box::pin(orphans::run(s, state.env))),
    },
    Story {
        name: bad_claims::NAME,
        about: "claims that cannot be provisioned get an event with the reason",
        when: When::All,
        run: Run::AnyCluster(|s, state| Box::pin(bad_claims::run(s, state.env))),
    },
    Story {
        name: driver_restart::NAME,
        about: "the driver's pods are replaced while volumes are in use, and the driver killed while its disk is missing",
        when: When::All,
        run: Run::AnyCluster(|s, state| {
            Box::pin(driver_restart::run(s, state.env, state.nodes.variant().kubelet_root))
        }),
    },
    Story {
        name: user_namespaces::NAME,
        about: "the limit of a volume, with and without a user namespace of the pod",
        when: When::All,
        run: Run::OwnNode(|s, state, _, _| Box::pin(user_namespaces::run(s, state.env))),
    },
    Story {
        name: hostile_tenant::NAME,
        about: "a tenant attacks the node and another tenant by names, links, project ids and special files",
        when: When::All,
        run: Run::OwnNode(|s, state, _, node| Box::pin(hostile_tenant::run(s, state.env, node))),
    },
    Story {
        name: hostile_provisioner::NAME,
        about: "an attacker in the provisioner's container reaches neither the volumes nor the node",
        when: When::All,
        run: Run::OwnNode(|s, state, _, node| Box::pin(hostile_provisioner::run(s, state.env, node))),
    },
    Story {
        name: gvisor::NAME,
        about: "volumes of pods under gVisor",
        when: When::OtherProjects,
        run: Run::OwnNode(|s, state, _, node| Box::pin(gvisor::run(s, state.env, node))),
    },
    Story {
        name: kubelet_root::NAME,
        about: "a kubelet with its directory on the data disk",
        when: When::Node,
        run: Run::KubeletOnDataDisk(|s, state, node| Box::pin(kubelet_root::run(s, state.env, node))),
    },
    Story {
        name: kubelet_quotas::NAME,
        about: "project ids of the kubelet and of volumes on one file system",
        when: When::Node,
        run: Run::KubeletOnDataDisk(|s, state, node| Box::pin(kubelet_quotas::run(s, state.env, node))),
    },
    Story {
        name: half_provisioned::NAME,
        about: "the provisioner is killed between a volume and its PersistentVolume",
        when: When::All,
        run: Run::OwnNode(|s, state, _, node| Box::pin(half_provisioned::run(s, state.env, node))),
    },
    Story {
        name: outages::NAME,
        about: "the provisioner and the API server are killed while they work",
        when: When::All,
        run: Run::OwnNode(|s, state, cluster, node| Box::pin(outages::run(s, state.env, cluster, node))),
    },
    Story {
        name: second_node::NAME,
        about: "a second node joins, gets volumes, and leaves; a claim that names it gets another",
        when: When::All,
        run: Run::OwnNode(|s, state, cluster, node| Box::pin(second_node::run(s, state.env, cluster, node))),
    },
    Story {
        name: node_loss::NAME,
        about: "a node is deleted by mistake, and lost; it comes back with its data",
        when: When::Long,
        run: Run::OwnNode(|s, state, cluster, _| Box::pin(node_loss::run(s, state.env, cluster))),
    },
    Story {
        name: power_cut::NAME,
        about: "the power of a node is cut while 50 volumes are in use",
        when: When::Long,
        run: Run::OwnNode(|s, state, _, node| Box::pin(power_cut::run(s, state.env, node))),
    },
    Story {
        name: helm::NAME,
        about: "the chart installs the driver, over the manifests and without them, while volumes are in use",
        when: When::Long,
        run: Run::OwnNode(|s, state, cluster, _| Box::pin(helm::run(s, state.env, cluster))),
    },
    Story {
        name: claim_labels::NAME,
        about: "each node watches only its own claims: the component is added and removed while volumes are in use",
        when: When::Long,
        run: Run::OwnNode(|s, state, cluster, _| Box::pin(claim_labels::run(s, state.env, cluster))),
    },
    // The last story before the removal: if it fails, csi-snapshotter stays in the driver's pods.
    Story {
        name: snapshots::NAME,
        about: "VolumeSnapshots with snapshot-controller: restored, retained, deleted, interrupted",
        when: When::OtherProjects,
        run: Run::OwnNode(|s, state, cluster, node| Box::pin(snapshots::run(s, state.env, cluster, node))),
    },
    Story {
        name: removal::NAME,
        about: "delete everything; nothing is left in the API or on the node",
        when: When::Always,
        run: Run::AnyCluster(|s, state| Box::pin(remove(s, state))),
    },
];

/// Returns a line about each story.
pub(crate) fn lines() -> impl Iterator<Item = Line> {
    STORIES.iter().map(|story| {
        let when = match story.when {
            When::Always => " (in every run)",
            When::Main => " (also if no story is named)",
            When::OtherProjects => " (only if it is named)",
            When::Node | When::All | When::Long => "",
        };
        Line {
            kind: "story",
            name: story.name.to_owned(),
            about: format!("{}{when}", story.about),
            needs: story.needs(),
            estimate: "",
        }
    })
}

/// Returns the names of all stories.
pub(super) fn names() -> impl Iterator<Item = &'static str> {
    STORIES.iter().map(|story| story.name)
}

/// Refuses stories that cannot run on these nodes.
///
/// # Errors
/// The message names the story and the option that it needs.
pub(super) fn require_suitable<'a>(
    named: impl Iterator<Item = &'a str>,
    kubelet_root: KubeletRoot,
) -> Result<()> {
    let mut named = named.filter_map(|name| STORIES.iter().find(|story| story.name == name));
    match named.find(|story| !story.suits(kubelet_root)) {
        None => Ok(()),
        Some(story) => anyhow::bail!("story {} needs {}", story.name, story.needs()),
    }
}

/// Installs the driver, and records what is on the node before the first volume.
async fn install(steps: &mut Steps<'_>, state: &mut State<'_>) -> StepResult {
    let env = state.env;
    install::run(steps, env).await?;
    if let (Some(node), None) = (env.node, &state.before) {
        state.before = Some(steps.step("list what is on the node", Inventory::take(node)).await?);
    }
    Ok(())
}

async fn remove(steps: &mut Steps<'_>, state: &mut State<'_>) -> StepResult {
    removal::run(steps, state.env, state.before.as_ref()).await
}

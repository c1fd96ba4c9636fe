//! All stories in the order in which they run: what each is called, what it needs, and the function that runs it.

use anyhow::Result;
use futures::future::LocalBoxFuture;
use testvm::steps::{StepResult, Steps};
use testvm_cluster::{Cluster, KubeletRoot, Node};

use super::faults::{self, Fault};
use super::stories::power_cut::{self, Load};
use super::stories::{
    bad_claims, claim_labels, clones, deletion_in_use, driver_restart, flow, gvisor, half_provisioned, helm,
    hostile_tenant, infeasible_resize, install, kubelet_quotas, kubelet_root, node, orphans, outages,
    read_only_claims, removal, retained_volumes, second_node, snapshots, user_namespaces,
};
use crate::node_options::NodeOptions;
use crate::test_env::environment::TestEnv;
use crate::test_env::inventory::Inventory;

/// One end-to-end test.
pub(super) struct Entry {
    /// The name in reports and on the command line.
    pub(super) name: &'static str,
    /// One line for users.
    pub(super) about: &'static str,
    /// `true` for a story that the others need: it runs in every run.
    pub(super) always: bool,
    pub(super) run: Run,
}

/// The function of a story, by what it needs.
pub(super) enum Run {
    AnyCluster(for<'a> fn(&'a mut Steps<'_>, &'a mut State<'_>) -> LocalBoxFuture<'a, StepResult>),
    /// Needs a cluster and a node of the harness's own. On another cluster, the report has `skipped` as a skipped step.
    OwnNode {
        skipped: &'static str,
        run: for<'a> fn(
            &'a mut Steps<'_>,
            &'a mut State<'_>,
            &'a Cluster,
            &'a Node,
        ) -> LocalBoxFuture<'a, StepResult>,
    },
    /// Needs nodes whose kubelet has its directory on the data disk, and is not part of runs on others.
    KubeletOnDataDisk(
        for<'a> fn(&'a mut Steps<'_>, &'a mut State<'_>, &'a Node) -> LocalBoxFuture<'a, StepResult>,
    ),
}

impl Entry {
    /// Returns `true` if the story is part of a run of all stories on these nodes.
    pub(super) fn is_part_of_all(&self, kubelet_root: KubeletRoot) -> bool {
        self.suits(kubelet_root) && !WITH_OTHER_PROJECTS.contains(&self.name)
    }

    /// Returns `true` if the story can run on these nodes.
    pub(super) fn suits(&self, kubelet_root: KubeletRoot) -> bool {
        match self.run {
            Run::AnyCluster(_) | Run::OwnNode { .. } => true,
            Run::KubeletOnDataDisk(_) => kubelet_root == KubeletRoot::DataDisk,
        }
    }
}

/// What the stories of one run share.
pub(super) struct State<'a> {
    pub(super) env: &'a TestEnv<'a>,
    /// What the run asks of the nodes of its cluster.
    pub(super) nodes: &'a NodeOptions,
    /// The fault to inject, if the run must fail.
    pub(super) fault: Option<Fault>,
    /// The inventory of the node before the first volume, if the node is the harness's own.
    pub(super) before: Option<Inventory>,
}

pub(super) const STORIES: [Entry; 24] = [
    Entry {
        name: install::NAME,
        about: "apply the manifests; every node with a pod of the driver offers it",
        always: true,
        run: Run::AnyCluster(|s, state| Box::pin(install(s, state))),
    },
    anywhere(
        flow::NAME,
        "a mounted, a read-only and a block volume, expanded in use while the driver is killed",
        |s, state| Box::pin(flow::run(s, state.env, state.fault)),
    ),
    anywhere(
        read_only_claims::NAME,
        "a pod that requests its claim read-only cannot write to it",
        |s, state| Box::pin(read_only_claims::run(s, state.env)),
    ),
    Entry {
        name: node::NAME,
        about: "the kubelet and losetup of the node, the programs that the kubelet starts, and node-debug",
        always: false,
        run: Run::OwnNode {
            skipped: "the programs that the kubelet starts",
            run: |s, state, _, node| Box::pin(node::run(s, state.env, state.nodes, node)),
        },
    },
    anywhere(clones::NAME, "a claim with another claim as its data source", |s, state| {
        Box::pin(clones::run(s, state.env))
    }),
    anywhere(
        infeasible_resize::NAME,
        "an expansion beyond the node's space is rejected, a smaller one succeeds",
        |s, state| Box::pin(infeasible_resize::run(s, state.env)),
    ),
    anywhere(
        retained_volumes::NAME,
        "reclaim policy Retain: the data stays, and another claim gets it",
        |s, state| Box::pin(retained_volumes::run(s, state.env)),
    ),
    anywhere(deletion_in_use::NAME, "a claim is deleted by force while a pod uses its volume", |s, state| {
        Box::pin(deletion_in_use::run(s, state.env))
    }),
    anywhere(orphans::NAME, "the audit lists a volume whose PersistentVolume was deleted", |s, state| {
        Box::pin(orphans::run(s, state.env))
    }),
    anywhere(
        bad_claims::NAME,
        "claims that cannot be provisioned get an event with the reason",
        |s, state| Box::pin(bad_claims::run(s, state.env)),
    ),
    anywhere(driver_restart::NAME, "the driver's pods are replaced while volumes are in use", |s, state| {
        Box::pin(driver_restart::run(s, state.env))
    }),
    Entry {
        name: user_namespaces::NAME,
        about: "the limit of a volume, with and without a user namespace of the pod",
        always: false,
        run: Run::OwnNode {
            skipped: "pods with a user namespace of their own",
            run: |s, state, _, _| Box::pin(user_namespaces::run(s, state.env)),
        },
    },
    Entry {
        name: hostile_tenant::NAME,
        about: "a tenant attacks the node and another tenant by names, links, project ids and special files",
        always: false,
        run: Run::OwnNode {
            skipped: "a tenant who attacks the node and another tenant",
            run: |s, state, _, node| Box::pin(hostile_tenant::run(s, state.env, node)),
        },
    },
    Entry {
        name: gvisor::NAME,
        about: "volumes of pods under gVisor",
        always: false,
        run: Run::OwnNode {
            skipped: "pods under gVisor",
            run: |s, state, _, node| Box::pin(gvisor::run(s, state.env, node)),
        },
    },
    Entry {
        name: kubelet_root::NAME,
        about: "a kubelet with its directory on the data disk",
        always: false,
        run: Run::KubeletOnDataDisk(|s, state, node| Box::pin(kubelet_root::run(s, state.env, node))),
    },
    Entry {
        name: kubelet_quotas::NAME,
        about: "project ids of the kubelet and of volumes on one file system",
        always: false,
        run: Run::KubeletOnDataDisk(|s, state, node| Box::pin(kubelet_quotas::run(s, state.env, node))),
    },
    Entry {
        name: half_provisioned::NAME,
        about: "the provisioner is killed between a volume and its PersistentVolume",
        always: false,
        run: Run::OwnNode {
            skipped: "kill the provisioner between a volume and its object",
            run: |s, state, _, node| Box::pin(half_provisioned::run(s, state.env, node)),
        },
    },
    Entry {
        name: outages::NAME,
        about: "the provisioner and the API server are killed while they work",
        always: false,
        run: Run::OwnNode {
            skipped: "kill the provisioner and the API server while they work",
            run: |s, state, cluster, node| Box::pin(outages::run(s, state.env, cluster, node)),
        },
    },
    Entry {
        name: second_node::NAME,
        about: "a second node joins, gets volumes, and leaves",
        always: false,
        run: Run::OwnNode {
            skipped: "boot a second node",
            run: |s, state, cluster, node| Box::pin(second_node::run(s, state.env, cluster, node)),
        },
    },
    Entry {
        name: power_cut::NAME,
        about: "the power of a node is cut while 50 volumes are in use",
        always: false,
        run: Run::OwnNode {
            skipped: "cut the power of a node with volumes in use",
            run: |s, state, _, node| Box::pin(power_cut::run(s, state.env, node, Load::FULL, state.fault)),
        },
    },
    Entry {
        name: helm::NAME,
        about: "the chart installs the driver, over the manifests and without them, while volumes are in use",
        always: false,
        run: Run::OwnNode {
            skipped: "install the driver with Helm",
            run: |s, state, cluster, _| Box::pin(helm::run(s, state.env, cluster)),
        },
    },
    Entry {
        name: claim_labels::NAME,
        about: "each node watches only its own claims: the component is added and removed while volumes are in use",
        always: false,
        run: Run::OwnNode {
            skipped: "add and remove the component claim-labels",
            run: |s, state, cluster, _| Box::pin(claim_labels::run(s, state.env, cluster)),
        },
    },
    // The last story before the removal: if it fails, csi-snapshotter stays in the driver's pods.
    Entry {
        name: snapshots::NAME,
        about: "VolumeSnapshots with snapshot-controller: restored, retained, deleted, interrupted",
        always: false,
        run: Run::OwnNode {
            skipped: "snapshots of volumes",
            run: |s, state, cluster, node| Box::pin(snapshots::run(s, state.env, cluster, node)),
        },
    },
    Entry {
        name: removal::NAME,
        about: "delete everything; nothing is left in the API or on the node",
        always: true,
        run: Run::AnyCluster(|s, state| Box::pin(remove(s, state))),
    },
];

/// The stories of a run of the command `e2e` that names none, besides the first and the last: what the driver is for.
pub(super) const MAIN: [&str; 2] = [flow::NAME, read_only_claims::NAME];

/// The stories that depend on the kubelet and the programs of the node, besides the first and the last.
pub(super) const OF_THE_NODE: [&str; 3] = [flow::NAME, read_only_claims::NAME, node::NAME];

/// The stories with programs of other projects, which take minutes to build. They run only if they are named.
pub(super) const WITH_OTHER_PROJECTS: [&str; 2] = [gvisor::NAME, snapshots::NAME];

/// The stories that take longest. The lane e2e runs them only if they are named.
pub(super) const LONG: [&str; 3] = [power_cut::NAME, helm::NAME, claim_labels::NAME];

/// Returns the stories that depend on these nodes.
pub(super) fn of_nodes(kubelet_root: KubeletRoot) -> Vec<String> {
    let of_these = |entry: &&Entry| {
        OF_THE_NODE.contains(&entry.name)
            || matches!(entry.run, Run::KubeletOnDataDisk(_)) && entry.suits(kubelet_root)
    };
    STORIES.iter().filter(of_these).map(|entry| entry.name.to_owned()).collect()
}

/// Returns the name of each story, and one line about it with what it needs.
pub(crate) fn descriptions() -> impl Iterator<Item = (&'static str, String)> {
    STORIES.iter().map(|entry| {
        let needs = match entry.run {
            _ if entry.always => " (in every run)",
            _ if MAIN.contains(&entry.name) => " (also if no story is named)",
            _ if WITH_OTHER_PROJECTS.contains(&entry.name) => " (only if it is named, not with --kubeconfig)",
            Run::AnyCluster(_) => "",
            Run::OwnNode { .. } => " (not with --kubeconfig)",
            Run::KubeletOnDataDisk(_) => " (with --kubelet-root data-disk)",
        };
        (entry.name, format!("{}{needs}", entry.about))
    })
}

/// Returns the names of all stories.
pub(super) fn names() -> impl Iterator<Item = &'static str> {
    STORIES.iter().map(|entry| entry.name)
}

/// Refuses stories that cannot run on these nodes.
///
/// # Errors
/// The message names the story and the option that it needs.
pub(super) fn require_suitable(only: &[String], kubelet_root: KubeletRoot) -> Result<()> {
    let named = |entry: &&Entry| only.iter().any(|only| only == entry.name);
    match STORIES.iter().filter(named).find(|entry| !entry.suits(kubelet_root)) {
        None => Ok(()),
        Some(entry) => anyhow::bail!(
            "story '{}' needs nodes whose kubelet has its directory on the data disk: add --kubelet-root data-disk",
            entry.name
        ),
    }
}

const fn anywhere(
    name: &'static str,
    about: &'static str,
    run: for<'a> fn(&'a mut Steps<'_>, &'a mut State<'_>) -> LocalBoxFuture<'a, StepResult>,
) -> Entry {
    Entry { name, about, always: false, run: Run::AnyCluster(run) }
}

/// Installs the driver, and records what is on the node before the first volume.
async fn install(steps: &mut Steps<'_>, state: &mut State<'_>) -> StepResult {
    let env = state.env;
    let Some(node) = env.node else {
        return install::run(steps, env).await;
    };
    match state.fault {
        Some(Fault::Quota) => {
            let mounted =
                async { faults::mount_without_quota(node, &faults::data_device(node).await?).await };
            steps.step("break: mount without quota", mounted).await?;
        }
        Some(Fault::NoDisk) => {
            steps.step("break: unmount the data disk", faults::unmount(node)).await?;
        }
        _ => {}
    }
    install::run(steps, env).await?;
    if state.fault == Some(Fault::WrongDisk) {
        steps.step("break: stop the driver", install::stop(env)).await?;
        let replaced = async { faults::replace(node, &faults::data_device(node).await?).await };
        steps.step("break: put another file system there", replaced).await?;
        install::run(steps, env).await?;
    }
    state.before = Some(steps.step("list what is on the node", Inventory::take(node)).await?);
    Ok(())
}

async fn remove(steps: &mut Steps<'_>, state: &mut State<'_>) -> StepResult {
    if state.fault == Some(Fault::Leak) {
        steps.step("break: leak an object of each kind", faults::leak(state.env)).await?;
    }
    removal::run(steps, state.env, state.before.as_ref()).await?;
    if state.fault == Some(Fault::Restart) {
        steps.step("break: kill a container of the driver", faults::kill_undeclared(state.env)).await?;
    }
    Ok(())
}

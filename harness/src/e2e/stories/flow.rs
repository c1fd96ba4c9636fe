//! The main flow: a StatefulSet with a mounted, a read-only and a block volume. A program in its pod checks them. They are
//! expanded while in use, and the driver is killed during that.

use std::time::Duration;

use anyhow::{Context, Result};
use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use kube::ResourceExt;
use kube::api::DeleteParams;
use kube::runtime::watcher;
use testvm::excerpt::list;
use testvm::steps::{StepResult, Steps};
use testvm_cluster::api_error::api_error;
use testvm_cluster::containers::Container;
use testvm_cluster::exec::{http_get, log_tail};
use testvm_cluster::mount_table::Mounted;
use testvm_cluster::waiting::{State, until, until_event, until_none_complains, until_one};
use testvm_cluster::workload::until_pod_runs;
use testvm_cluster::{Node, objects};

use crate::e2e::sabotages::{mount_writable, named, on_node, reject_writes};
use crate::e2e::story::{Run, Sabotage, Story, When};
use crate::test_env::disturbances::{REQUEST_LIMIT, kill_all, kill_while_frozen};
use crate::test_env::environment::{FOREIGN_NODE, TestEnv};
use crate::test_env::inventory::volume_mounts;
use crate::test_env::rejected_writes::Rejected;
use crate::test_env::sizes::Size;
use crate::test_env::workload::{self, FLOW, FLOW_CLAIMS, FLOW_POD};
use crate::test_env::{claims, pods};

pub(in crate::e2e) const STORY: Story = Story {
    name: "flow",
    about: "a mounted, a read-only and a block volume, expanded in use while the driver is killed",
    when: When::Main,
    run: Run::AnyCluster(|steps, state| Box::pin(run(steps, state.env))),
    sabotages: &[
        Sabotage {
            name: "readonly",
            about: "The pod can write to the volume that its arguments call read-only",
            before: "the claims are bound to volumes of exactly that size",
            change: |env| Box::pin(mount_flow_writable(env)),
            repair: None,
            expected: &["a write was allowed on the read-only volume", "/vol/readonly"],
        },
        Sabotage {
            name: "rejected-resize",
            about: "A volume has grown although its expansion was rejected",
            before: "the pod sees volumes as large as before",
            change: |env| Box::pin(on_node(env, DOUBLE_LIMITS)),
            repair: None,
            expected: &["total bytes: expected 1048576"],
        },
        Sabotage {
            name: "resize",
            about: "The API server rejects the expansion of the volumes",
            before: GROW,
            change: |env| Box::pin(reject_writes(env, Rejected::CreationsAndUpdates)),
            repair: None,
            expected: &["has not grown", "4Mi asked", "it has 1Mi"],
        },
    ],
};

const SIZE: Size = Size::mebibytes(1);
const GROWN: Size = Size::mebibytes(4);
/// A size that exceeds every node's file system.
const TOO_LARGE: Size = Size::mebibytes(1 << 30);
const DOUBLE_LIMITS: &str = "for volume in DATA/volumes/*/; do TOOL quota set --bytes 2MiB \"$volume\"; done";
/// The conditions of a claim that is being resized. From Kubernetes 1.37 on, a claim has another one, `Unused`.
const OF_A_RESIZE: [&str; 4] =
    ["Resizing", "FileSystemResizePending", "ControllerResizeError", "NodeResizeError"];

/// The title of the step in which the claims request 4Mi.
const GROW: &str = "ask for 4Mi, and kill the driver while the claims grow";
/// The port of the driver's metrics, as in the manifests.
const METRICS_PORT: u16 = 9809;
/// The paths of the volumes in the pod, in the syntax of the test program.
const VOLUMES: [&str; 3] = ["writable:/vol/default", "readonly:/vol/readonly", "block:/vol/block"];

/// The title of the step that needs pods of the driver.
const DRIVER_PODS: &str = "logs of the driver can be read, and its metrics by port-forward";

async fn run(steps: &mut Steps<'_>, env: &TestEnv<'_>) -> StepResult {
    run_without_driver_pods(steps, env).await?;
    steps.step(DRIVER_PODS, driver_pods_respond(env)).await
}

/// Runs the flow on nodes that run the driver as services, so that it has no pods.
pub(in crate::e2e) async fn run_on_services(steps: &mut Steps<'_>, env: &TestEnv<'_>) -> StepResult {
    run_without_driver_pods(steps, env).await?;
    steps.skip(DRIVER_PODS, "the nodes run the driver as services");
    Ok(())
}

async fn run_without_driver_pods(steps: &mut Steps<'_>, env: &TestEnv<'_>) -> StepResult {
    let containers: Vec<&str> = env.driver.containers().collect();
    steps.step("create the StatefulSet with three claims of 1Mi", create(env)).await?;
    steps.step("the claims are bound to volumes of exactly that size", bound(env)).await?;
    let killed = kill_driver(steps, env, "kill the driver while the pod starts", &containers[..1]).await?;
    steps.step("the pod runs", until_pod_runs(&env.pods(), FLOW_POD, env.timeouts.start)).await?;
    let checked = pods::check_new(env, FLOW_POD, SIZE, &VOLUMES);
    steps.step("[INIT-PASSED]: the pod sees volumes of 1Mi, and no more fits", checked).await?;
    let title = "the node's mounts have the options of the StorageClass";
    match env.node {
        Some(node) => steps.step(title, check_mount_options(env, node, FLOW_POD)).await?,
        None => steps.skip(title, FOREIGN_NODE),
    }
    steps.step("an expansion beyond the space of the node is rejected", rejected(env)).await?;
    let checked = pods::check_kept(env, FLOW_POD, [SIZE, SIZE], &VOLUMES);
    steps.step("the pod sees volumes as large as before", checked).await?;
    if env.node.is_some() {
        steps.step("the driver that was killed was started again", killed_and_back(env, &killed)).await?;
    }
    let killed = match env.node {
        Some(node) => {
            let killed = kill_while_frozen(env, node, expansions_begin(env), &containers);
            steps.step(GROW, killed).await?
        }
        None => {
            steps.step("ask for 4Mi", ask_for_expansions(env)).await?;
            steps.skip(GROW, FOREIGN_NODE);
            Vec::new()
        }
    };
    steps.step("the claims have grown", grown(env)).await?;
    let checked = pods::check_kept(env, FLOW_POD, [SIZE, GROWN], &VOLUMES);
    steps
        .step("[RESIZE-PASSED]: the pod sees volumes of 4Mi with its data, and no more fits", checked)
        .await?;
    steps.step("describe shows what happened to the claims", events(env)).await?;
    if env.node.is_some() {
        steps.step("the driver was started again once more", killed_and_back(env, &killed)).await?;
    }
    Ok(())
}

async fn create(env: &TestEnv<'_>) -> Result<()> {
    let flow = workload::flow(&env.driver.class_name(), SIZE)?;
    objects::create(&env.stateful_sets(), &flow).await.map(drop)
}

async fn bound(env: &TestEnv<'_>) -> Result<()> {
    until_claims(env, env.timeouts.start, |claim| {
        let status = claim.status.as_ref();
        let phase = status.and_then(|status| status.phase.as_deref()).unwrap_or("without status");
        (phase != "Bound").then(|| format!("is {phase}"))
    })
    .await?;
    for name in FLOW_CLAIMS {
        let volume = claims::volume_of(env, name).await?;
        let capacity =
            volume.spec.as_ref().and_then(|spec| spec.capacity.as_ref()).and_then(|c| c.get("storage"));
        let asked = Quantity(SIZE.quantity());
        anyhow::ensure!(
            capacity == Some(&asked),
            "{} of claim {name} has capacity {capacity:?}",
            volume.name_any()
        );
    }
    Ok(())
}

/// Checks the mount options of the pod's two Filesystem volumes on the node, before a container runtime mounts them
/// once more with its own options.
pub(super) async fn check_mount_options(env: &TestEnv<'_>, node: &Node, pod: &str) -> Result<()> {
    let uid = objects::read(&env.pods(), pod).await?.uid().context("the pod has no uid")?;
    let mut mounts = volume_mounts(node).await?;
    mounts.retain(|mount| mount.target.split('/').any(|part| part == uid));
    anyhow::ensure!(mounts.len() == 2, "expected the mounts of two Filesystem volumes, found {mounts:?}");
    let chosen = env.driver.class.mount_options.as_deref().unwrap_or_default();
    anyhow::ensure!(!chosen.is_empty(), "the StorageClass has no mount options");
    for Mounted { target, options, .. } in mounts {
        for option in chosen {
            anyhow::ensure!(
                options.contains(option),
                "{target} has the options {options:?}, without {option}"
            );
        }
    }
    Ok(())
}

/// Has a claim request more than the node has, and waits until that is refused. The claim then requests less.
async fn rejected(env: &TestEnv<'_>) -> Result<()> {
    let [name, ..] = FLOW_CLAIMS;
    claims::request_size(env, name, TOO_LARGE).await?;
    let claim = until_one(env.claims(), name, env.timeouts.grow, |claim| {
        let state = claim.and_then(claims::resize_state);
        State::ready_if(state == Some("ControllerResizeInfeasible"), format!("its resize is {state:?}"))
    })
    .await?
    .context("the claim was deleted")?;
    let names_space = |message: &str| message.contains("available");
    until_event(&env.client, &claim, &["VolumeResizeFailed"], env.timeouts.start, names_space).await.map(drop)
}

async fn ask_for_expansions(env: &TestEnv<'_>) -> Result<()> {
    for name in FLOW_CLAIMS {
        claims::request_size(env, name, GROWN).await?;
    }
    Ok(())
}

async fn expansions_begin(env: &TestEnv<'_>) -> Result<()> {
    ask_for_expansions(env).await?;
    until_claims(env, REQUEST_LIMIT, |claim| {
        let state = claims::resize_state(claim);
        let grows = state == Some("ControllerResizeInProgress");
        (!grows).then(|| format!("is not being expanded: its resize is {state:?}"))
    })
    .await
}

/// Waits until the status of each claim has the requested size and no resize is in progress.
async fn grown(env: &TestEnv<'_>) -> Result<()> {
    let asked = Quantity(GROWN.quantity());
    until_claims(env, env.timeouts.grow, |claim| {
        let status = claim.status.clone().unwrap_or_default();
        let capacity = status.capacity.unwrap_or_default().remove("storage").unwrap_or_default();
        if capacity != asked {
            return Some(format!("has not grown: {} asked, it has {}", asked.0, capacity.0));
        }
        let pending = status.allocated_resource_statuses.unwrap_or_default();
        if !pending.is_empty() {
            return Some(format!("has grown, yet its status is still {pending:?}"));
        }
        let conditions = status.conditions.into_iter().flatten().map(|condition| condition.type_);
        let conditions: Vec<String> =
            conditions.filter(|kind| OF_A_RESIZE.contains(&kind.as_str())).collect();
        (!conditions.is_empty()).then(|| format!("has grown, yet keeps the conditions {conditions:?}"))
    })
    .await
}

/// Waits for the events about each claim. The provisioner may have been killed between the status of an expanded claim and the event about
/// its end, so that event is not awaited.
async fn events(env: &TestEnv<'_>) -> Result<()> {
    for name in FLOW_CLAIMS {
        let claim = env.claims().get(name).await?;
        // An event that the provisioner has not written when it is killed is lost. So the begin of an expansion can be missing, or its end.
        const EXPANDED: &[&str] = &["Resizing", "VolumeResizeSuccessful", "FileSystemResizeRequired"];
        for reasons in [&["ProvisioningSucceeded"][..], EXPANDED] {
            until_event(&env.client, &claim, reasons, env.timeouts.start, |_| true).await?;
        }
    }
    Ok(())
}

async fn driver_pods_respond(env: &TestEnv<'_>) -> Result<()> {
    for pod in env.live_driver_pods().await? {
        let (pods, name) = (env.driver_pods(), pod.name_any());
        for container in env.driver.containers() {
            let log = log_tail(&pods, &name, container, 100).await;
            anyhow::ensure!(log.lines().count() > 1, "{container} of {name} logged only {log:?}");
        }
        let page = http_get(&pods, &name, METRICS_PORT, "/metrics").await?;
        anyhow::ensure!(page.trim_end().ends_with("# EOF"), "the metrics of {name} are incomplete: {page}");
    }
    Ok(())
}

/// Waits until each of these containers has ended by SIGKILL and another runs in its place. Until the API
/// reports that, its status of the driver's containers is outdated.
async fn killed_and_back(env: &TestEnv<'_>, killed: &[Container]) -> Result<()> {
    const BY_SIGKILL: i32 = 128 + 9;
    let scope = watcher::Config::default().labels(env.driver.pod_labels());
    until(env.driver_pods(), scope, env.timeouts.start, |pods| {
        let statuses = || pods.values().flat_map(Container::all);
        let back = |killed: &Container| {
            statuses().any(|(_, status)| {
                let ended = status.last_state.as_ref().and_then(|state| state.terminated.as_ref());
                ended.is_some_and(|ended| {
                    killed.is_named(ended.container_id.as_deref()) && ended.exit_code == BY_SIGKILL
                })
            })
        };
        let gone =
            killed.iter().filter(|killed| !back(killed)).map(|killed| format!("{killed:?} has not ended"));
        let idle = statuses().filter(|(container, status)| {
            !status.ready || container.as_ref().is_none_or(|it| killed.contains(it))
        });
        let idle = idle.map(|(_, status)| format!("container {} is not back", status.name));
        let complaints: Vec<String> = gone.chain(idle).collect();
        State::ready_if(complaints.is_empty(), list(&complaints))
    })
    .await
    .map(drop)
}

/// Kills the containers of the driver, and returns them.
async fn kill_driver(
    steps: &mut Steps<'_>,
    env: &TestEnv<'_>,
    title: &str,
    containers: &[&str],
) -> StepResult<Vec<Container>> {
    let Some(node) = env.node else {
        steps.skip(title, FOREIGN_NODE);
        return Ok(Vec::new());
    };
    let killed = async { kill_all(env, node, &env.live_driver_pods().await?, containers).await };
    steps.step(title, killed).await
}

/// Waits until `complaint` returns nothing for any claim of the flow.
async fn until_claims(
    env: &TestEnv<'_>,
    within: Duration,
    complaint: impl Fn(&PersistentVolumeClaim) -> Option<String>,
) -> Result<()> {
    until_none_complains(env.claims(), "claim", &FLOW_CLAIMS, within, complaint).await.map(drop)
}

/// Has the pod mount its read-only volume writable.
async fn mount_flow_writable(env: &TestEnv<'_>) -> Result<()> {
    let sets = env.stateful_sets();
    let mut set = objects::read(&sets, FLOW).await?;
    sets.delete(FLOW, &DeleteParams::background()).await.map_err(api_error).context("delete it")?;
    // The controller may delete the pod first.
    drop(pods::end(env, FLOW_POD).await);
    mount_writable(set.spec.get_or_insert_default().template.spec.get_or_insert_default());
    set = StatefulSet { metadata: named(FLOW), spec: set.spec, status: None };
    objects::create(&sets, &set).await.map(drop)
}

//! The provisioner of loopfs. In the role `node`, one process on each node creates, expands and deletes the volumes of claims. In the
//! role `controller`, one process of the cluster performs the duties that concern no single node.
//!
//! A reconcile has three steps. It reads the state from the caches, a pure `plan` decides, and `apply` does the I/O. The process
//! may crash after any step, and the next process continues from there.

#![forbid(unsafe_code)]

mod api;
mod args;
mod controller;
mod error;
#[cfg(all(test, feature = "apiserver-tests"))]
mod live_tests;
mod logging;
mod loss;
mod metrics;
mod node;
mod objects;
mod restore;
mod store;
mod tasks;
#[cfg(test)]
mod testing;

use std::{
    io::Write,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use anyhow::Context as _;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::Client;
use monitoring::Listeners;
use tokio::{
    runtime::{self, Runtime},
    signal::unix::{SignalKind, signal},
    task::JoinSet,
};
use tokio_util::sync::CancellationToken;

pub use monitoring::HttpAddress;

use crate::{
    api::{client, traffic::ApiTraffic},
    controller::{builtin, lease::Candidate, process::Duties},
    node::{audit, capacity::CapacityConfig, process::Options},
    objects::{claim_labels, identity::Identity},
    store::client::DriverClient,
    tasks::ended_early,
};
pub use crate::{
    args::{
        Args, AuditArgs, CommonArgs, ControllerArgs, NodeArgs, PodArgs, ProvisionerLogFormat, RestoreArgs,
        Role,
    },
    loss::NodeLoss,
};

/// Time after a SIGTERM for operations in progress to finish. A pod has 30 s by default.
const GRACE: Duration = Duration::from_secs(15);

/// Threads that parse events and decide. One thread for each processor, as is the default, would take more memory on a larger machine.
const WORKERS: usize = 2;

/// Runs the provisioner until a signal ends it.
///
/// # Errors
/// When the arguments are invalid, the client of the API server cannot be set up, or a task ended unexpectedly.
pub fn run(args: Args) -> anyhow::Result<()> {
    match args.role {
        Role::RestoreObjects(args) => restore_objects(&args),
        Role::Node(NodeArgs { common, driver_socket, audit, .. }) if audit.audit => {
            let (identity, runtime) = start(&common)?;
            runtime.block_on(list_findings(&identity, &driver_socket, common.kubeconfig))
        }
        Role::Node(args) => {
            let (identity, runtime) = start(&args.common)?;
            runtime.block_on(serve_node(identity, args))
        }
        Role::Controller(args) => {
            let (identity, runtime) = start(&args.common)?;
            runtime.block_on(serve_cluster(identity, args))
        }
    }
}

/// Starts the log and the runtime.
fn start(common: &CommonArgs) -> anyhow::Result<(Identity, Runtime)> {
    logging::init(&common.log_level, common.log_format)?;
    let identity = Identity::new(&common.driver_name, &common.node_name)?;
    let runtime = runtime::Builder::new_multi_thread()
        .worker_threads(WORKERS)
        .enable_all()
        .build()
        .context("start the runtime")?;
    Ok((identity, runtime))
}

fn restore_objects(args: &RestoreArgs) -> anyhow::Result<()> {
    let identity = Identity::new(&args.driver_name, &args.node_name)?;
    let (list, notes) = restore::restore(std::io::stdin().lock(), &identity)?;
    for note in notes {
        eprintln!("loopfs-provisioner: {note}");
    }
    writeln!(std::io::stdout(), "{list:#}").context("write the objects")
}

fn options(pod: PodArgs, common: &CommonArgs, audit: &AuditArgs) -> Options {
    let PodArgs { pod_namespace, pod_name, pod_uid } = pod;
    let owner = pod_name.zip(pod_uid).map(|(name, uid)| OwnerReference {
        api_version: "v1".to_owned(),
        kind: "Pod".to_owned(),
        name,
        uid,
        ..Default::default()
    });
    Options {
        claim_labels: claim_labels(pod_namespace.as_deref(), common),
        capacity: pod_namespace.map(|namespace| CapacityConfig { namespace, owner }),
        node_loss: common.node_loss,
        audit: Some(audit::AuditSettings {
            interval: Duration::from_secs(audit.audit_interval),
            collection: audit.collect.then_some(audit::Collection {
                after: Duration::from_secs(audit.collect_after),
                at_most_percent: audit.collect_at_most,
            }),
        }),
    }
}

/// Returns where the record of labelled claims is. The namespace of a process without a pod is unknown.
fn claim_labels(namespace: Option<&str>, common: &CommonArgs) -> Option<claim_labels::LabelRecordSource> {
    let (namespace, name) = namespace.zip(common.claim_labels.as_deref().filter(|name| !name.is_empty()))?;
    Some(claim_labels::LabelRecordSource { namespace: namespace.to_owned(), name: name.to_owned() })
}

async fn list_findings(
    identity: &Identity,
    driver_socket: &Path,
    kubeconfig: Option<PathBuf>,
) -> anyhow::Result<()> {
    let client = client::connect(kubeconfig, &ApiTraffic::default()).await?;
    let list = audit::report(&client, identity, &DriverClient::new(driver_socket)?).await?;
    std::io::stdout().write_all(list.as_bytes()).context("write the list")
}

async fn serve_node(identity: Identity, args: NodeArgs) -> anyhow::Result<()> {
    let NodeArgs { common, driver_socket, pod, audit } = args;
    let (client, monitoring) = connect(&common).await?;
    tracing::info!(driver = identity.driver(), node = identity.node(), driver_socket = %driver_socket.display(), "starting");
    let options = options(pod, &common, &audit);
    let driver = Arc::new(DriverClient::new(&driver_socket)?);
    let parts = node::process::NodeProcessParts { client, identity, driver, options, monitoring };
    until_signal(node::process::spawn(parts)).await
}

async fn serve_cluster(identity: Identity, args: ControllerArgs) -> anyhow::Result<()> {
    let ControllerArgs {
        common,
        pod_namespace: namespace,
        pod_name: holder,
        builtin_objects,
        node_loss_at_most: at_most_percent,
    } = args;
    let (client, monitoring) = connect(&common).await?;
    tracing::info!(driver = identity.driver(), namespace, pod = holder, "starting");
    let builtin = builtin_objects.map(|config_map| builtin::DeclarationSource {
        namespace: namespace.clone(),
        config_map,
        repair_delay: builtin::REPAIR_DELAY,
    });
    let claim_labels = claim_labels(Some(&namespace), &common);
    let unready_nodes = controller::unready_nodes::Timing::DEFAULT;
    let node_loss = controller::node_loss::NodeLossSettings {
        mode: common.node_loss,
        at_most_percent,
        list_interval: controller::node_loss::LIST_INTERVAL,
    };
    let duties = Duties { builtin, claim_labels, node_loss, unready_nodes };
    let candidate = Candidate { namespace, holder };
    let parts =
        controller::process::ControllerProcessParts { client, identity, candidate, duties, monitoring };
    until_signal(controller::process::spawn(parts)).await
}

async fn connect(common: &CommonArgs) -> anyhow::Result<(Client, Option<(Listeners, ApiTraffic)>)> {
    let traffic = ApiTraffic::default();
    let client = client::connect(common.kubeconfig.clone(), &traffic).await?;
    let listeners = Listeners::bind(common.metrics_address, common.probe_address).await?;
    Ok((client, listeners.map(|listeners| (listeners, traffic))))
}

/// Waits for a signal, and then for the operations in progress.
async fn until_signal((mut tasks, stop): (JoinSet<&'static str>, CancellationToken)) -> anyhow::Result<()> {
    let mut terminate = signal(SignalKind::terminate()).context("await SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("await SIGINT")?;
    tokio::select! {
        ended = tasks.join_next() => return Err(ended_early(ended)),
        _ = terminate.recv() => tracing::info!("SIGTERM: finishing the operations in progress"),
        _ = interrupt.recv() => tracing::info!("SIGINT: finishing the operations in progress"),
    }
    stop.cancel();
    let finish = async { while tasks.join_next().await.is_some() {} };
    if tokio::time::timeout(GRACE, finish).await.is_err() {
        tracing::warn!("not all operations finished in time; the next process continues them");
    }
    Ok(())
}

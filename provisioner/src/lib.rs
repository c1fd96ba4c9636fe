//! The provisioner of loopfs: one process on each node that creates, expands and deletes the volumes of claims.
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
mod process;
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
use loopfs::volume_store::{StoreOptions, VolumeStore};
use monitoring::Listeners;
use tokio::signal::unix::{SignalKind, signal};

pub use monitoring::HttpAddress;

use crate::{
    api::{client, traffic::ApiTraffic},
    controller::builtin,
    node::{audit, capacity::CapacityConfig, project_audit},
    objects::identity::Identity,
    process::{Options, Parts, spawn},
    store::{intents::Intents, storage::Opener},
    tasks::ended_early,
};
pub use crate::{
    args::{Args, AuditArgs, LogFormat, PodArgs},
    loss::NodeLoss,
};

/// Time after a SIGTERM for operations in progress to finish. A pod has 30 s by default.
const GRACE: Duration = Duration::from_secs(15);

/// Runs the provisioner until a signal ends it.
///
/// # Errors
/// When the arguments are invalid, the client of the API server cannot be set up, or a task ended unexpectedly.
pub fn run(args: Args) -> anyhow::Result<()> {
    let Args {
        driver_name,
        node_name,
        data_dir,
        kubeconfig,
        pod,
        builtin_objects,
        node_loss,
        metrics_address,
        probe_address,
        audit,
        log_level,
        log_format,
    } = args;
    logging::init(&log_level, log_format)?;
    // Before the runtime starts its threads, which inherit the filter.
    confinement::confine_thread().context("give up the system calls that mount (seccomp)")?;
    let identity = Identity::new(&driver_name, &node_name)?;
    let runtime =
        tokio::runtime::Builder::new_multi_thread().enable_all().build().context("start the runtime")?;
    if audit.audit {
        return runtime.block_on(list_findings(&identity, &data_dir, kubeconfig));
    }
    let options = options(pod, builtin_objects, node_loss, &audit);
    let listeners = Listeners::bind(metrics_address, probe_address);
    let served = runtime.block_on(serve(identity, data_dir, kubeconfig, options, listeners));
    // A blocking call may still be emptying the trash. It is safe to interrupt, so the process does not wait for it.
    runtime.shutdown_background();
    served
}

fn options(pod: PodArgs, builtin_objects: Option<String>, node_loss: NodeLoss, audit: &AuditArgs) -> Options {
    let PodArgs { pod_namespace, pod_name, pod_uid } = pod;
    let owner = pod_name.zip(pod_uid).map(|(name, uid)| OwnerReference {
        api_version: "v1".to_owned(),
        kind: "Pod".to_owned(),
        name,
        uid,
        ..Default::default()
    });
    let builtin = builtin_objects.zip(pod_namespace.clone());
    Options {
        capacity: pod_namespace.map(|namespace| CapacityConfig { namespace, owner }),
        builtin: builtin.map(|(config_map, namespace)| builtin::Source { namespace, config_map }),
        node_loss,
        audit: Some(audit::Settings {
            interval: Duration::from_secs(audit.audit_interval),
            collection: audit.collect.then_some(audit::Collection {
                after: Duration::from_secs(audit.collect_after),
                at_most_percent: audit.collect_at_most,
            }),
        }),
        project_audit: Some(project_audit::Settings {
            interval: Duration::from_secs(audit.audit_interval),
            all: audit.audit_projects,
            repair: audit.repair_projects,
        }),
    }
}

async fn list_findings(
    identity: &Identity,
    data_dir: &Path,
    kubeconfig: Option<PathBuf>,
) -> anyhow::Result<()> {
    let client = client::connect(kubeconfig, &ApiTraffic::default()).await?;
    let list = audit::report(&client, identity, data_dir).await?;
    std::io::stdout().write_all(list.as_bytes()).context("write the list")
}

async fn serve(
    identity: Identity,
    data_dir: PathBuf,
    kubeconfig: Option<PathBuf>,
    options: Options,
    listeners: impl Future<Output = anyhow::Result<Option<Listeners>>>,
) -> anyhow::Result<()> {
    let traffic = ApiTraffic::default();
    let client = client::connect(kubeconfig, &traffic).await?;
    let monitoring = listeners.await?.map(|listeners| (listeners, traffic));
    tracing::info!(driver = identity.driver(), node = identity.node(), data_dir = %data_dir.display(), "starting");
    let intents = Intents::beside(&data_dir);
    let open: Opener = Arc::new(move || Ok(Arc::new(VolumeStore::open(&data_dir, StoreOptions::default())?)));
    let (mut tasks, stop) = spawn(Parts { client, identity, intents, open, options, monitoring });
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

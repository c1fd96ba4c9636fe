//! The Kubernetes side of loopfs: one process per node that turns claims into volumes, grows and deletes
//! them.
//!
//! A reconcile is three steps. The caches say how things are; a pure `plan` decides; `apply` does the I/O.
//! Each step may be the last before a crash, and the next process goes on from there.

#![forbid(unsafe_code)]

mod absence;
#[cfg(test)]
mod api_server;
mod args;
mod audit;
mod backoff;
mod builtin;
mod capacity;
mod claim_status;
mod claims;
mod classes;
mod connection;
mod context;
mod controller;
mod courtesy;
mod data_source;
mod delete;
mod error;
mod events;
#[cfg(test)]
mod fixtures;
mod gate;
#[cfg(test)]
mod hostile_tests;
mod identity;
mod in_flight;
mod intents;
mod janitor;
mod lean;
#[cfg(all(test, feature = "apiserver-tests"))]
mod live_tests;
mod logging;
mod loss_policy;
mod metrics;
mod node_loss;
mod notices;
mod own_writes;
mod ownership;
mod pages;
mod parameters;
mod persistent_volumes;
mod placement;
mod project_audit;
mod provision;
mod pv;
mod quantity;
mod references;
mod refusal;
mod reschedule;
mod resize;
mod stagger;
mod storage;
mod topology;
#[cfg(test)]
mod volume_model;
mod volumes;
mod writes;

use std::{
    io::Write,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use anyhow::{Context as _, anyhow};
use k8s_openapi::{apimachinery::pkg::apis::meta::v1::OwnerReference, jiff::Timestamp};
use kube::{
    Client, Config,
    config::{KubeConfigOptions, Kubeconfig},
    runtime::reflector,
};
use loopfs::{StoreOptions, VolumeStore};
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::mpsc,
    task::JoinSet,
};
use tokio_util::sync::CancellationToken;

pub use monitoring::HttpAddress;
use monitoring::Listeners;

pub use crate::{
    args::{Args, AuditArgs, LogFormat, PodArgs},
    node_loss::NodeLoss,
};
use crate::{
    capacity::Publishing,
    connection::Timeouts,
    context::{Context, Given},
    events::Events,
    identity::Identity,
    intents::Intents,
    pages::Pages,
    storage::{Opener, Storage},
    writes::ApiWrites,
};

/// What is under way at a SIGTERM gets this long, of the 30 s a pod has by default.
const GRACE: Duration = Duration::from_secs(15);

/// Serves until a signal ends it.
///
/// # Errors
/// When the arguments are of no use, the API server cannot be addressed, or a part of the process ended on
/// its own.
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
    // Before the runtime starts its threads, which inherit it.
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
    // A blocking call that is still emptying the trash is not waited for; it is safe to break off.
    runtime.shutdown_background();
    served
}

/// What a provisioner does besides provisioning.
#[derive(Debug, Clone, Default)]
struct Options {
    /// Where the capacity of this node is published.
    publishing: Option<Publishing>,
    /// Where the objects to keep are declared.
    builtin: Option<builtin::Source>,
    node_loss: NodeLoss,
    /// How volumes and objects are compared.
    audit: Option<audit::Settings>,
    /// How files that are charged to another volume are searched for.
    project_audit: Option<project_audit::Settings>,
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
        publishing: pod_namespace.map(|namespace| Publishing { namespace, owner }),
        builtin: builtin.map(|(config_map, namespace)| builtin::Source { namespace, config_map }),
        node_loss,
        audit: Some(audit::Settings {
            every: Duration::from_secs(audit.audit_interval),
            collection: audit.collect.then_some(audit::Collection {
                after: Duration::from_secs(audit.collect_after),
                at_most_percent: audit.collect_at_most,
            }),
        }),
        project_audit: Some(project_audit::Settings {
            every: Duration::from_secs(audit.audit_interval),
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
    let client = client(kubeconfig, &ApiWrites::default()).await?;
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
    let writes = ApiWrites::default();
    let client = client(kubeconfig, &writes).await?;
    let monitoring = listeners.await?.map(|listeners| (listeners, writes));
    tracing::info!(driver = identity.driver(), node = identity.node(), data_dir = %data_dir.display(), "starting");
    let intents = Intents::beside(&data_dir);
    let open: Opener = Arc::new(move || Ok(Arc::new(VolumeStore::open(&data_dir, StoreOptions::default())?)));
    let (mut tasks, stop) = spawn(Parts { client, identity, intents, open, options, monitoring });
    let mut terminate = signal(SignalKind::terminate()).context("await SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("await SIGINT")?;
    tokio::select! {
        ended = tasks.join_next() => return Err(ended_early(ended)),
        _ = terminate.recv() => tracing::info!("SIGTERM: finishing what is under way"),
        _ = interrupt.recv() => tracing::info!("SIGINT: finishing what is under way"),
    }
    stop.cancel();
    let finish = async { while tasks.join_next().await.is_some() {} };
    if tokio::time::timeout(GRACE, finish).await.is_err() {
        tracing::warn!("not everything was finished in time; the next process goes on from there");
    }
    Ok(())
}

/// What the process is made of.
struct Parts {
    client: Client,
    identity: Identity,
    intents: Intents,
    open: Opener,
    options: Options,
    /// Where to tell of health, and the writes of the client to tell of.
    monitoring: Option<(Listeners, ApiWrites)>,
}

/// Starts every part of the process. The first to end, for whatever reason, ends it.
fn spawn(parts: Parts) -> (JoinSet<&'static str>, CancellationToken) {
    let Parts { client, identity, intents, open, options, monitoring } = parts;
    let (events, notices) = Events::new();
    let (claims, claim_cache) = reflector::store();
    let (volumes, volume_cache) = reflector::store();
    let (classes, class_cache) = reflector::store();
    let ctx = Arc::new(Context::new(Given {
        client: client.clone(),
        identity: identity.clone(),
        events,
        storage: Arc::new(Storage::default()),
        intents,
        claims,
        volumes,
        classes,
        now: Timestamp::now,
    }));
    let (related, claims_of_volumes) = mpsc::unbounded_channel();
    let stop = CancellationToken::new();

    let mut tasks = JoinSet::new();
    tasks.spawn(named(
        "claims",
        claims::run(Arc::clone(&ctx), claim_cache, claims_of_volumes, stop.clone().cancelled_owned()),
    ));
    tasks.spawn(named(
        "volumes",
        persistent_volumes::run(
            Arc::clone(&ctx),
            volume_cache,
            related.clone(),
            stop.clone().cancelled_owned(),
        ),
    ));
    tasks.spawn(named("classes", until(stop.clone(), classes::run(Arc::clone(&ctx), class_cache, related))));
    tasks.spawn(named("storage", until(stop.clone(), keep_storage_open(Arc::clone(&ctx), open))));
    let Options { publishing, builtin, node_loss, audit, project_audit } = options;
    if let Some(settings) = audit {
        let auditing = audit::run(Arc::clone(&ctx), settings);
        tasks.spawn(named("audit", until(stop.clone(), auditing)));
    }
    if let Some(settings) = project_audit {
        let auditing = project_audit::run(Arc::clone(&ctx), settings);
        tasks.spawn(named("project audit", until(stop.clone(), auditing)));
    }
    if let Some(source) = builtin {
        let keeping = builtin::run(Arc::clone(&ctx), source);
        tasks.spawn(named("built-in objects", until(stop.clone(), keeping)));
    }
    if node_loss != NodeLoss::Off {
        let looking = node_loss::run(Arc::clone(&ctx), node_loss);
        tasks.spawn(named("node loss", until(stop.clone(), looking)));
    }
    match publishing {
        Some(publishing) => {
            let (_, cache) = reflector::store();
            let publishing = capacity::run(Arc::clone(&ctx), publishing, cache);
            tasks.spawn(named("capacity", until(stop.clone(), publishing)));
        }
        None => tracing::info!("the capacity of this node is not published: no --pod-namespace is given"),
    }
    if let Some((listeners, writes)) = monitoring {
        let pages = Pages { ctx: Arc::clone(&ctx), writes };
        tasks.spawn(named("monitoring", monitoring::serve(listeners, pages, stop.clone())));
    }
    tasks.spawn(named("janitor", until(stop.clone(), janitor::run(ctx))));
    // Ends after the others, when no sender is left, so that the last words are written too.
    tasks.spawn(named("events", events::publish(client, identity, notices)));
    (tasks, stop)
}

async fn client(kubeconfig: Option<PathBuf>, writes: &ApiWrites) -> anyhow::Result<Client> {
    let client = connection::client(config(kubeconfig).await?, Timeouts::default(), writes);
    client.context("set up the connection to the API server")
}

async fn config(kubeconfig: Option<PathBuf>) -> anyhow::Result<Config> {
    match kubeconfig {
        Some(path) => {
            let read = || async {
                let kubeconfig = Kubeconfig::read_from(&path)?;
                Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await
            };
            read().await.with_context(|| format!("use kubeconfig {}", path.display()))
        }
        None => Config::incluster().context("use the pod's service account (or give --kubeconfig)"),
    }
}

async fn keep_storage_open(ctx: Arc<Context>, open: Opener) {
    let opened = || {
        ctx.chances.improve();
        ctx.trash.notify_one();
        ctx.claims_vanished.notify_one();
    };
    storage::keep_open(&ctx.storage, open, &ctx.events, &ctx.identity, opened).await;
}

async fn until(stop: CancellationToken, task: impl Future<Output = ()>) {
    // Cancelled is as good as done: such a task is at any await between two steps of which each stands alone.
    stop.run_until_cancelled_owned(task).await;
}

async fn named(name: &'static str, task: impl Future<Output = ()>) -> &'static str {
    task.await;
    name
}

fn ended_early(ended: Option<Result<&'static str, tokio::task::JoinError>>) -> anyhow::Error {
    match ended {
        Some(Ok(name)) => anyhow!("the task {name:?} ended on its own"),
        Some(Err(error)) => anyhow!(error).context("a task failed"),
        None => anyhow!("there was no task"),
    }
}

//! The provisioner of loopfs. In the role `node`, one process on each node creates, expands and deletes the volumes of claims. In the
//! role `controller`, one process of the cluster performs the duties that concern no single node.
//!
//! A reconcile has three steps. It reads the state from the caches, a pure `plan` decides, and `apply` does the I/O. The process
//! may crash after any step, and the next process continues from there.

#![forbid(unsafe_code)]

mod api;
mod args;
mod claim_labels;
mod controller;
mod error;
#[cfg(all(test, feature = "apiserver-tests"))]
mod live_tests;
mod loss;
mod node;
mod objects;
mod requests;
mod restore;
mod store;
#[cfg(test)]
mod testing;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::Client;
use service::Listeners;
use tokio_util::sync::CancellationToken;

use crate::api::client;
use crate::api::traffic::ApiTraffic;
pub use crate::args::{Args, AuditArgs, CommonArgs, ControllerArgs, NodeArgs, PodArgs, RestoreArgs, Role};
use crate::claim_labels::labels::LabelRecordSource;
use crate::controller::builtin;
use crate::controller::lease::Candidate;
use crate::controller::process::Duties;
pub use crate::loss::NodeLoss;
use crate::node::audit;
use crate::node::capacity::CapacityConfig;
use crate::node::process::Options;
use crate::objects::identity::Identity;
use crate::store::client::DriverClient;

/// Time after a SIGTERM for operations in progress to finish. A pod has 30 s by default.
const GRACE: Duration = Duration::from_secs(15);

/// Runs the provisioner until a signal ends it.
#[must_use]
pub fn run(args: Args) -> ExitCode {
    match args.role {
        Role::Node(args) => service::run(&args.common.log.clone(), |stop| serve_node(args, stop)),
        Role::Controller(args) => service::run(&args.common.log.clone(), |stop| serve_cluster(args, stop)),
        Role::RestoreObjects(args) => match restore_objects(&args) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("loopfs-provisioner: {error:#}");
                ExitCode::FAILURE
            }
        },
    }
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
        claim_labels: LabelRecordSource::new(pod_namespace.as_deref(), common.claim_labels.as_deref()),
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

async fn list_findings(
    identity: &Identity,
    driver_socket: &Path,
    kubeconfig: Option<PathBuf>,
) -> anyhow::Result<()> {
    let client = client::connect(kubeconfig, &ApiTraffic::default()).await?;
    let list = audit::report(&client, identity, &DriverClient::new(driver_socket)?).await?;
    std::io::stdout().write_all(list.as_bytes()).context("write the list")
}

async fn serve_node(args: NodeArgs, stop: CancellationToken) -> anyhow::Result<()> {
    let NodeArgs { common, driver_socket, pod, audit } = args;
    let identity = Identity::new(&common.driver_name, &common.node_name)?;
    if audit.audit {
        let listing = list_findings(&identity, &driver_socket, common.kubeconfig);
        return stop.run_until_cancelled(listing).await.context("the list was interrupted")?;
    }
    let (client, monitoring) = connect(&common).await?;
    tracing::info!(driver = identity.driver(), node = identity.node(), driver_socket = %driver_socket.display(), "starting");
    let options = options(pod, &common, &audit);
    let driver = Arc::new(DriverClient::new(&driver_socket)?);
    let parts = node::process::NodeProcessParts { client, identity, driver, options, monitoring };
    node::process::spawn(parts, stop).finish(GRACE).await
}

async fn serve_cluster(args: ControllerArgs, stop: CancellationToken) -> anyhow::Result<()> {
    let ControllerArgs {
        common,
        pod_namespace: namespace,
        pod_name: holder,
        builtin_objects,
        node_loss_at_most: at_most_percent,
    } = args;
    let identity = Identity::new(&common.driver_name, &common.node_name)?;
    let (client, monitoring) = connect(&common).await?;
    tracing::info!(driver = identity.driver(), namespace, pod = holder, "starting");
    let builtin = builtin_objects.map(|config_map| builtin::DeclarationSource {
        namespace: namespace.clone(),
        config_map,
        repair_delay: builtin::REPAIR_DELAY,
    });
    let claim_labels = LabelRecordSource::new(Some(&namespace), common.claim_labels.as_deref());
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
    controller::process::spawn(parts, stop).finish(GRACE).await
}

async fn connect(common: &CommonArgs) -> anyhow::Result<(Client, Option<(Listeners, ApiTraffic)>)> {
    let traffic = ApiTraffic::default();
    let client = client::connect(common.kubeconfig.clone(), &traffic).await?;
    let listeners = Listeners::bind(common.health).await?;
    Ok((client, listeners.map(|listeners| (listeners, traffic))))
}

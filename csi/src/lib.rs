//! A CSI driver for the volumes of [`loopfs`]: directories with a quota, and images that are attached as block devices.
//!
//! The driver serves the Identity, Controller and Node services on a unix socket and registers with the kubelet. It has
//! no Kubernetes client and no credentials. It is the component that mounts.
//!
//! # The way of a request
//! 1. **Receive.** This file listens on the sockets. `services` has one file for each service, with its RPCs: `node.rs` for the kubelet,
//!    `controller.rs` for csi-snapshotter and other orchestrators, `volumes.rs` for the provisioner.
//! 2. **Validate.** The RPC parses its message with the pure functions of `request.rs`.
//! 3. **Lock.** `services/rpc.rs` takes the locks of the call's objects (`locks.rs`), and runs the work on a blocking thread.
//! 4. **Work.** The RPC has the work, as a closure that calls [`loopfs::publish::Publisher`] of `storage.rs`. `inventory.rs`,
//!    `snapshots.rs` and `unpublish.rs` have what several RPCs share.
//! 5. **Map the error.** `services/rpc.rs` logs the call, and converts its error to a gRPC code.
//!
//! # Snapshots and clones
//! A snapshot shares its blocks with its source until one of the two is written. So does a volume that is created from
//! a snapshot or from another volume. The source may be in use.
//!
//! **Content.** The snapshot of a device contains the state at one moment between two writes, as after a power loss
//! (crash-consistent). It includes everything that programs have written to the device node by then, but not the data
//! that a file system on the device keeps in memory. The snapshot of a directory contains each file as it was at one
//! moment, but different files at different moments, because they are copied one after another while programs continue.
//! For more consistency, stop the programs, or have them flush and pause.
//!
//! **Cost.** Copying a device takes a time that does not depend on its size, and initially no space. The store
//! nevertheless reserves the whole size, with 1/128 and 1 MiB more for its extents, for the snapshot as for the volume,
//! so that no write to any of them runs out of space. Copying a directory takes time for each file, and space for
//! inodes and directories. Copied data counts in full against the limit of a new volume, even if it is shared. A
//! snapshot is never written, so its limit equals its content.
//!
//! **Interruption.** The driver ends the copy of a directory when the client gives up, or when the driver itself stops. It deletes the
//! copied files, and the next call begins again. A client must therefore wait for as long as a copy takes.
//!
//! **Lifetime.** A snapshot can outlive its volume, and a volume its snapshot. All of them are on one node.

#![forbid(unsafe_code)]

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use tokio::net::UnixListener;
use tokio::sync::watch;
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::Server;

mod args;
mod async_fd;
mod background;
mod blocking;
mod calls;
mod changes;
mod condition_checks;
mod connection;
mod connection_limit;
mod custody;
mod driver;
mod error;
mod foreign_files;
mod health_endpoints;
mod inotify;
mod kubelet_record;
mod locks;
mod mount_watch;
mod request;
mod services;
pub mod socket;
mod storage;
pub mod volume_mounts;

pub use args::Args;
use background::TrashCleanup;
use calls::{Calls, Metered};
use changes::Changes;
use condition_checks::ConditionChecks;
use csi_wire::csi::controller_server::ControllerServer;
use csi_wire::csi::identity_server::IdentityServer;
use csi_wire::csi::node_server::NodeServer;
use csi_wire::volumes::volumes_server::VolumesServer;
pub use driver::DriverName;
use driver::ThisNode;
use foreign_files::{ForeignFileSearch, SearchSettings};
use health_endpoints::DriverHealthEndpoints;
use loopfs::publish::PublishRoot;
use request::RequestReader;
use service::{Listeners, Tasks};
use services::{
    ControllerService, IdentityService, NodeService, Registrar, VolumeOperations, Volumes, VolumesService,
};
use socket::SocketFile;
use storage::{Probe, StorageMonitor};

/// The directories of the kubelet below which volumes are published: the targets of all volumes, and the staging paths
/// of Block volumes.
const PUBLISHED_BELOW: [&str; 2] = ["pods", "plugins"];

/// The number of calls on the control socket that access the disk at the same time. It leaves most threads to the kubelet's calls, however
/// many claims wait.
const CONTROL_THREADS: usize = 64;

/// The maximum number of calls in progress on a connection of the control socket.
const MAX_CONTROL_STREAMS: u32 = 128;

/// The maximum size of a request to a service of the control socket. Annotations, the largest part, have at most 1 KiB.
const MAX_REQUEST_BYTES: usize = 64 << 10;

/// The interval at which the driver checks that a client of the control socket still exists, and the time that the client has to respond.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(30);
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(10);

/// The interval at which the control socket looks for calls in progress after the shutdown was requested.
const DRAIN_INTERVAL: Duration = Duration::from_secs(2);

/// The maximum time that running calls may take to finish after the shutdown was requested. The kubelet kills a pod
/// after 30 seconds.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(25);

/// Runs the driver until `stop`.
///
/// # Errors
/// The driver could not start, or one of its tasks ended before the shutdown.
pub async fn serve(args: Args, stop: CancellationToken) -> anyhow::Result<()> {
    let root = PublishRoot::open(&args.kubelet_dir).context("--kubelet-dir")?;
    root.require_propagation(&PUBLISHED_BELOW)?;
    let parts = Parts::new(&args, root, stop.clone());
    let registrar = args.registration_dir.zip(args.kubelet_csi_socket).map(|(directory, csi_socket)| {
        let registered = watch::Sender::new(false);
        Registrar { driver_name: args.driver_name.clone(), directory, csi_socket, registered }
    });
    registrar.as_ref().map(Registrar::remove_stale_socket).transpose()?;

    let mut tasks = Tasks::new(stop.clone());
    let socket = socket::listen(&args.endpoint, socket::OF_ROOT)?;
    let mut sockets = vec![socket.1.path().clone()];
    tasks.try_spawn("socket of the kubelet", parts.clone().serve_kubelet(socket, stop.clone()));
    if let Some(endpoint) = &args.control_endpoint {
        let socket = socket::listen(endpoint, socket::OF_GROUP)?;
        sockets.push(socket.1.path().clone());
        let custody = custody::path_beside(&args.data_dir);
        tasks.try_spawn("control socket", parts.clone().serve_control(socket, custody, stop.clone()));
    }
    tasks.spawn_until_stop("probe", Arc::clone(&parts.probe).run());
    let condition_checks = Arc::new(ConditionChecks::new(Duration::from_secs(args.check_interval)));
    if args.health.metrics_address.is_some() {
        let checking =
            Arc::clone(&condition_checks).run(parts.operations.clone(), Arc::clone(&parts.monitor));
        tasks.spawn_until_stop("condition checks", checking);
    }
    if let Some(listeners) = Listeners::bind(args.health).await? {
        let endpoints = DriverHealthEndpoints {
            monitor: Arc::clone(&parts.monitor),
            probe: Arc::clone(&parts.probe),
            condition_checks,
            calls: parts.calls.clone(),
            sockets,
            registered: registrar.as_ref().map(|registrar| registrar.registered.subscribe()),
        };
        tasks.spawn("health", service::serve_health(listeners, endpoints, stop.clone()));
    }
    tasks.try_spawn("storage", Arc::clone(&parts.monitor).keep_open(stop.clone()));
    tasks.spawn_until_stop("trash", Arc::clone(&parts.trash_cleanup).run());
    tasks.spawn_until_stop("foreign files", Arc::clone(&parts.foreign_files).run());
    if let Some(registrar) = registrar {
        tasks.try_spawn("registration", register(registrar, parts.monitor, stop));
    }
    tracing::info!(endpoint = %args.endpoint.display(), version = env!("CARGO_PKG_VERSION"), "serving");
    tasks.finish(SHUTDOWN_TIMEOUT).await
}

/// What the tasks and services of the driver share.
#[derive(Clone)]
struct Parts {
    driver_name: DriverName,
    requests: RequestReader,
    monitor: Arc<StorageMonitor>,
    probe: Arc<Probe>,
    trash_cleanup: Arc<TrashCleanup>,
    foreign_files: Arc<ForeignFileSearch>,
    changes: Arc<Changes>,
    operations: VolumeOperations,
    calls: Calls,
}

impl Parts {
    fn new(args: &Args, root: PublishRoot, stop: CancellationToken) -> Self {
        let (driver_name, root) = (args.driver_name.clone(), Arc::new(root));
        let monitor =
            Arc::new(StorageMonitor::new(driver_name.clone(), args.data_dir.clone(), Arc::clone(&root)));
        let (foreground, changes) = (Arc::default(), Arc::<Changes>::default());
        let trash_cleanup =
            Arc::new(TrashCleanup::new(Arc::clone(&monitor), Arc::clone(&foreground), Arc::clone(&changes)));
        let search = SearchSettings {
            interval: Duration::from_secs(args.check_interval),
            all: args.search_projects,
            repair: args.repair_projects,
        };
        let foreign_files = Arc::new(ForeignFileSearch::new(
            search,
            Arc::clone(&monitor),
            Arc::clone(&foreground),
            Arc::clone(&trash_cleanup),
            Arc::clone(&changes),
        ));
        let this_node = ThisNode::new(&driver_name, args.node_name.clone());
        let volumes = Volumes {
            monitor: Arc::clone(&monitor),
            root,
            trash_cleanup: Arc::clone(&trash_cleanup),
            changes: Arc::clone(&changes),
        };
        Self {
            requests: RequestReader::new(&driver_name, this_node, &args.kubelet_dir),
            probe: Arc::new(Probe::new(Arc::clone(&monitor))),
            operations: VolumeOperations::new(volumes, foreground, stop),
            calls: Calls::new(),
            driver_name,
            monitor,
            trash_cleanup,
            foreign_files,
            changes,
        }
    }

    fn identity(&self) -> Metered<IdentityServer<IdentityService>> {
        let (driver_name, probe) = (self.driver_name.clone(), Arc::clone(&self.probe));
        let service = IdentityService { driver_name, probe };
        Metered::new(IdentityServer::new(service).max_decoding_message_size(MAX_REQUEST_BYTES), &self.calls)
    }

    fn controller(&self, operations: VolumeOperations) -> Metered<ControllerServer<ControllerService>> {
        let service = ControllerService::new(self.requests.clone(), operations);
        Metered::new(ControllerServer::new(service).max_decoding_message_size(MAX_REQUEST_BYTES), &self.calls)
    }

    /// Serves CSI to the kubelet.
    async fn serve_kubelet(
        self,
        (listener, _removed_on_drop): (UnixListener, SocketFile),
        stop: CancellationToken,
    ) -> anyhow::Result<()> {
        let (operations, probe) = (self.operations.clone(), Arc::clone(&self.probe));
        let node = NodeService::new(self.requests.clone(), operations, probe);
        let services = Server::builder()
            .add_service(self.identity())
            .add_service(self.controller(self.operations.clone()))
            .add_service(Metered::new(NodeServer::new(node), &self.calls));
        let connections = UnixListenerStream::new(listener);
        services.serve_with_incoming_shutdown(connections, stop.cancelled_owned()).await.context("serve CSI")
    }

    /// Serves the provisioner and csi-snapshotter. They have credentials, so they get no Node service, with which they could mount volumes
    /// into any pod of the node. An attacker who controls one of them cannot use up the descriptors of the process.
    async fn serve_control(
        self,
        (listener, _removed_on_drop): (UnixListener, SocketFile),
        custody: PathBuf,
        stop: CancellationToken,
    ) -> anyhow::Result<()> {
        let operations = self.operations.limited(CONTROL_THREADS);
        let (identity, controller) = (self.identity(), self.controller(operations.clone()));
        let volumes = VolumesService::new(
            operations.clone(),
            self.monitor,
            self.changes,
            self.foreign_files,
            custody,
            stop.clone(),
        );
        let volumes = VolumesServer::new(volumes).max_decoding_message_size(MAX_REQUEST_BYTES);
        let services = Server::builder()
            .max_concurrent_streams(MAX_CONTROL_STREAMS)
            .http2_keepalive_interval(Some(KEEPALIVE_INTERVAL))
            .http2_keepalive_timeout(Some(KEEPALIVE_TIMEOUT))
            .add_service(identity)
            .add_service(controller)
            .add_service(Metered::new(volumes, &self.calls));
        // A client is a user: no other user can close the connection with which the driver checks this socket.
        let connections = connection_limit::limited(UnixListenerStream::new(listener), |connection| {
            connection.peer_cred().ok().map(|peer| peer.uid())
        });
        tokio::select! {
            served = services.serve_with_incoming_shutdown(connections, stop.clone().cancelled_owned()) => {
                served.context("serve the control socket")
            }
            () = drained(&stop, &operations) => Ok(()),
        }
    }
}

/// Waits for `stop`, and then until no call is doing its work. A client can keep its connection, or a call that it has not completely sent,
/// for longer.
async fn drained(stop: &CancellationToken, operations: &VolumeOperations) {
    stop.cancelled().await;
    loop {
        // Clients receive the responses in this time.
        tokio::time::sleep(DRAIN_INTERVAL).await;
        if operations.is_idle() {
            return;
        }
    }
}

/// Keeps the driver registered until `stop`, on a node that has storage, available or not. No pod depends on a node that never had
/// storage. A node whose disk is missing may have pods with volumes, and the kubelet ends them only through a registered driver.
async fn register(
    registrar: Registrar,
    monitor: Arc<StorageMonitor>,
    stop: CancellationToken,
) -> anyhow::Result<()> {
    match stop.run_until_cancelled(monitor.wait_until_present()).await {
        Some(()) => registrar.run(stop).await,
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests;

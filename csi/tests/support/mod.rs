//! The test support: a driver in this process, and a client that calls it like an orchestrator.

#![allow(dead_code, reason = "each test binary uses other parts")]

use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::Parser;
use csi_wire::csi as wire;
use csi_wire::csi::controller_client::ControllerClient;
use csi_wire::csi::identity_client::IdentityClient;
use csi_wire::csi::node_client::NodeClient;
use csi_wire::csi::volume_capability::access_mode::Mode;
use csi_wire::csi::volume_capability::{AccessMode, AccessType, BlockVolume, MountVolume};
use csi_wire::csi::volume_content_source::{SnapshotSource, Type as Source, VolumeSource};
use csi_wire::registration::RegistrationStatus;
use csi_wire::registration::registration_client::RegistrationClient;
use loopfs::volume_store::VolumeKind;
use tokio::runtime::Runtime;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Response, Status};

pub(crate) mod http;

pub(crate) const DRIVER: &str = "csi.loopfs.dev";
pub(crate) const NODE: &str = "node-1";

/// The timeout of waits in tests. It is longer than any operation takes even under emulation, and than the minute after which the
/// driver empties the trash again.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(180);

/// The directories of a driver, as in the DaemonSet.
pub(crate) struct Directories {
    pub(crate) kubelet: PathBuf,
    pub(crate) data: PathBuf,
    pub(crate) endpoint: PathBuf,
    pub(crate) registration: PathBuf,
    /// Further arguments of the driver.
    pub(crate) more: Vec<String>,
}

impl Directories {
    /// Creates the directories in `scratch`, except for the data directory.
    pub(crate) fn create(scratch: &Path, data: &Path) -> Self {
        let [kubelet, registration] = ["kubelet", "registration"].map(|name| scratch.join(name));
        for directory in [&kubelet, &registration] {
            std::fs::create_dir_all(directory).unwrap();
        }
        Self {
            kubelet,
            data: data.to_owned(),
            endpoint: scratch.join("csi.sock"),
            registration,
            more: Vec::new(),
        }
    }

    pub(crate) fn args(&self) -> csi::Args {
        csi::Args::parse_from(self.command_line())
    }

    pub(crate) fn command_line(&self) -> Vec<String> {
        let mut line = vec![
            "loopfs-csi".to_owned(),
            format!("--driver-name={DRIVER}"),
            format!("--node-name={NODE}"),
            format!("--data-dir={}", self.data.display()),
            format!("--kubelet-dir={}", self.kubelet.display()),
            format!("--endpoint=unix://{}", self.endpoint.display()),
            format!("--registration-dir={}", self.registration.display()),
            format!("--kubelet-csi-socket={}", self.endpoint.display()),
        ];
        line.extend(self.more.iter().cloned());
        line
    }

    /// Makes the driver serve metrics, and returns the address.
    pub(crate) fn serve_metrics(&mut self) -> std::net::SocketAddr {
        let address = http::free_address();
        self.more = vec![format!("--metrics-address={address}"), "--check-interval=1".to_owned()];
        address
    }

    /// Makes the driver serve probes on an address of their own, and returns it.
    pub(crate) fn serve_probes(&mut self) -> std::net::SocketAddr {
        let address = http::free_address();
        self.more.push(format!("--probe-address={address}"));
        address
    }

    pub(crate) fn registration_socket(&self) -> PathBuf {
        self.registration.join(format!("{DRIVER}-reg.sock"))
    }

    /// Waits until the driver offers its registration.
    pub(crate) fn wait_for_registration_socket(&self) {
        wait_until("the driver registers", || self.registration_socket().exists());
    }

    /// Registers the driver, as the kubelet does.
    pub(crate) fn register(&self) {
        self.wait_for_registration_socket();
        let status = RegistrationStatus { plugin_registered: true, error: String::new() };
        let address = format!("unix://{}", self.registration_socket().display());
        let registering = async {
            let channel = Endpoint::try_from(address).unwrap().connect().await.unwrap();
            RegistrationClient::new(channel).notify_registration_status(status).await.unwrap();
        };
        Runtime::new().unwrap().block_on(registering);
    }
}

/// A client of a driver. Each call blocks.
pub(crate) struct Client {
    /// Cancelled when the driver has exited, because the HTTP client does not always detect that its peer has exited.
    ended: CancellationToken,
    runtime: Runtime,
    node: NodeClient<Channel>,
    controller: ControllerClient<Channel>,
    identity: IdentityClient<Channel>,
}

macro_rules! calls {
    ($($service:ident . $call:ident ($request:ident) -> $response:ident;)*) => {
        $(pub(crate) fn $call(&self, request: wire::$request) -> Result<wire::$response, Status> {
            self.block_on(async { self.$service.clone().$call(request).await.map(Response::into_inner) })
        })*
    };
}

impl Client {
    fn block_on<T>(&self, call: impl Future<Output = Result<T, Status>>) -> Result<T, Status> {
        self.runtime.block_on(async {
            tokio::select! {
                biased;
                response = tokio::time::timeout(TIMEOUT, call) => response.expect("the call timed out"),
                () = self.ended.cancelled() => Err(Status::from_error("the driver has ended".into())),
            }
        })
    }

    /// Makes the call, and disconnects without a response once `until` has returned.
    pub(crate) fn publish_and_hang_up(
        &self,
        request: wire::NodePublishVolumeRequest,
        until: impl FnOnce() + Send,
    ) {
        let (returned, returns) = tokio::sync::oneshot::channel();
        let mut node = self.node.clone();
        let call = async {
            loop {
                match node.node_publish_volume(request.clone()).await {
                    // Another call has the volume locked.
                    Err(status) if status.code() == Code::Aborted => {}
                    response => return response,
                }
            }
        };
        std::thread::scope(|scope| {
            scope.spawn(move || {
                until();
                returned.send(()).unwrap();
            });
            self.runtime.block_on(async {
                tokio::select! {
                    response = call => panic!("the call returned a response: {response:?}"),
                    returned = returns => returned.unwrap(),
                }
            });
        });
    }

    /// Connects to a socket as soon as it exists.
    pub(crate) fn connect(endpoint: &Path) -> Self {
        Self::connect_until(endpoint, CancellationToken::new())
    }

    /// Connects to a driver that may exit at any moment, which `ended` reports.
    pub(crate) fn connect_until(endpoint: &Path, ended: CancellationToken) -> Self {
        let runtime = Runtime::new().unwrap();
        let address = format!("unix://{}", endpoint.display());
        let channel = runtime.block_on(async {
            let start = Instant::now();
            loop {
                match Endpoint::try_from(address.clone()).unwrap().connect().await {
                    Ok(channel) => break channel,
                    Err(error) => assert!(start.elapsed() < TIMEOUT, "connect to {address}: {error}"),
                }
                // No event announces the socket of a process that is starting.
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        });
        Self {
            ended,
            runtime,
            node: NodeClient::new(channel.clone()),
            controller: ControllerClient::new(channel.clone()),
            identity: IdentityClient::new(channel),
        }
    }

    calls! {
        identity.get_plugin_info(GetPluginInfoRequest) -> GetPluginInfoResponse;
        identity.get_plugin_capabilities(GetPluginCapabilitiesRequest) -> GetPluginCapabilitiesResponse;
        identity.probe(ProbeRequest) -> ProbeResponse;
        controller.create_volume(CreateVolumeRequest) -> CreateVolumeResponse;
        controller.delete_volume(DeleteVolumeRequest) -> DeleteVolumeResponse;
        controller.validate_volume_capabilities(ValidateVolumeCapabilitiesRequest) -> ValidateVolumeCapabilitiesResponse;
        controller.list_volumes(ListVolumesRequest) -> ListVolumesResponse;
        controller.get_capacity(GetCapacityRequest) -> GetCapacityResponse;
        controller.controller_get_capabilities(ControllerGetCapabilitiesRequest) -> ControllerGetCapabilitiesResponse;
        controller.controller_expand_volume(ControllerExpandVolumeRequest) -> ControllerExpandVolumeResponse;
        controller.controller_get_volume(ControllerGetVolumeRequest) -> ControllerGetVolumeResponse;
        controller.controller_get_volume_health(ControllerGetVolumeHealthRequest) -> ControllerGetVolumeHealthResponse;
        controller.controller_list_volume_health(ControllerListVolumeHealthRequest) -> ControllerListVolumeHealthResponse;
        controller.create_snapshot(CreateSnapshotRequest) -> CreateSnapshotResponse;
        controller.delete_snapshot(DeleteSnapshotRequest) -> DeleteSnapshotResponse;
        controller.list_snapshots(ListSnapshotsRequest) -> ListSnapshotsResponse;
        controller.get_snapshot(GetSnapshotRequest) -> GetSnapshotResponse;
        controller.controller_modify_volume(ControllerModifyVolumeRequest) -> ControllerModifyVolumeResponse;
        controller.controller_publish_volume(ControllerPublishVolumeRequest) -> ControllerPublishVolumeResponse;
        controller.controller_unpublish_volume(ControllerUnpublishVolumeRequest) -> ControllerUnpublishVolumeResponse;
        node.node_get_info(NodeGetInfoRequest) -> NodeGetInfoResponse;
        node.node_get_capabilities(NodeGetCapabilitiesRequest) -> NodeGetCapabilitiesResponse;
        node.node_stage_volume(NodeStageVolumeRequest) -> NodeStageVolumeResponse;
        node.node_unstage_volume(NodeUnstageVolumeRequest) -> NodeUnstageVolumeResponse;
        node.node_publish_volume(NodePublishVolumeRequest) -> NodePublishVolumeResponse;
        node.node_unpublish_volume(NodeUnpublishVolumeRequest) -> NodeUnpublishVolumeResponse;
        node.node_get_volume_stats(NodeGetVolumeStatsRequest) -> NodeGetVolumeStatsResponse;
        node.node_get_volume_health(NodeGetVolumeHealthRequest) -> NodeGetVolumeHealthResponse;
        node.node_get_storage_health(NodeGetStorageHealthRequest) -> NodeGetStorageHealthResponse;
        node.node_expand_volume(NodeExpandVolumeRequest) -> NodeExpandVolumeResponse;
    }

    /// Returns the condition of a volume.
    pub(crate) fn condition(&self, volume: &str) -> wire::VolumeCondition {
        self.controller_get_volume(get(volume)).unwrap().status.unwrap().volume_condition.unwrap()
    }

    /// Probes until the driver has opened its storage or failed to, and returns the reason of the failure. The probe of a node
    /// that never had storage does not return it.
    pub(crate) fn wait_for_probe(&self) -> Result<(), Status> {
        wait_for_ok(|| match self.probe(wire::ProbeRequest {}) {
            Ok(wire::ProbeResponse { ready: Some(false) }) => {
                match self.get_capacity(wire::GetCapacityRequest::default()) {
                    Err(status) if status.code() == Code::FailedPrecondition => Ok(Err(status)),
                    response => Err(format!("the driver is not ready, and returns {response:?}")),
                }
            }
            // A thread that is late looks like a disk that hangs.
            Err(status) if status.message().contains("has not ended") => Err(status.to_string()),
            response => Ok(response.map(drop)),
        })
    }

    /// Returns the result of a probe that begins now. Calls during a probe share its result, and the driver probes by itself as well.
    pub(crate) fn probe_now(&self) -> Result<wire::ProbeResponse, Status> {
        drop(self.probe(wire::ProbeRequest {}));
        self.probe(wire::ProbeRequest {})
    }

    pub(crate) fn wait_until_ready(&self) {
        wait_for_ok(|| match self.probe(wire::ProbeRequest {}) {
            Ok(wire::ProbeResponse { ready: Some(true) }) => Ok(()),
            response => Err(format!("the driver still returns {response:?}")),
        });
    }
}

/// A driver that runs in this process. Its only state is in its directories.
pub(crate) struct Driver {
    pub(crate) client: Client,
    stop: CancellationToken,
    runtime: DriverRuntime,
    task: JoinHandle<anyhow::Result<()>>,
}

/// The runtime of a driver. A failed test leaves its threads behind: they may wait for a disk that the test has frozen, and thaws later.
struct DriverRuntime(Option<Runtime>);

impl std::ops::Deref for DriverRuntime {
    type Target = Runtime;

    fn deref(&self) -> &Runtime {
        self.0.as_ref().unwrap()
    }
}

impl Drop for DriverRuntime {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take()
            && std::thread::panicking()
        {
            runtime.shutdown_background();
        }
    }
}

impl Driver {
    pub(crate) fn start(directories: &Directories) -> Self {
        let runtime = DriverRuntime(Some(Runtime::new().unwrap()));
        let stop = CancellationToken::new();
        let task = runtime.spawn(csi::serve(directories.args(), stop.clone()));
        Self { client: Client::connect(&directories.endpoint), stop, runtime, task }
    }

    /// Requests the shutdown, like SIGTERM, without waiting.
    pub(crate) fn begin_to_stop(&self) {
        self.stop.cancel();
    }

    /// Stops the driver, like SIGTERM.
    pub(crate) fn stop(self) {
        // The connection is closed first, because the driver would wait for an idle one.
        drop(self.client);
        self.stop.cancel();
        self.runtime.block_on(self.task).unwrap().unwrap();
    }
}

impl std::ops::Deref for Driver {
    type Target = Client;

    fn deref(&self) -> &Client {
        &self.client
    }
}

/// Repeats an attempt, of whose success no event tells, until it succeeds. Its error says what it observed.
#[track_caller]
pub(crate) fn wait_for_ok<T, E: Display>(mut attempt: impl FnMut() -> Result<T, E>) -> T {
    let start = Instant::now();
    loop {
        match attempt() {
            Ok(result) => return result,
            Err(observed) => assert!(start.elapsed() < TIMEOUT, "waited in vain: {observed}"),
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Waits until a condition holds of which no event tells.
#[track_caller]
pub(crate) fn wait_until(condition: &str, mut holds: impl FnMut() -> bool) {
    wait_for_ok(|| if holds() { Ok(()) } else { Err(format!("not {condition}")) });
}

pub(crate) fn capability(access_type: AccessType, mode: Mode) -> Option<wire::VolumeCapability> {
    Some(wire::VolumeCapability {
        access_type: Some(access_type),
        access_mode: Some(AccessMode { mode: mode as i32 }),
    })
}

pub(crate) fn block() -> Option<wire::VolumeCapability> {
    capability(AccessType::Block(BlockVolume {}), Mode::SingleNodeMultiWriter)
}

pub(crate) fn mount(flags: &[&str]) -> Option<wire::VolumeCapability> {
    let mount_flags = flags.iter().map(|flag| (*flag).to_owned()).collect();
    capability(
        AccessType::Mount(MountVolume { mount_flags, ..MountVolume::default() }),
        Mode::SingleNodeMultiWriter,
    )
}

/// Returns the capability with which a pod uses volumes of this kind.
pub(crate) fn capability_of(kind: VolumeKind) -> Option<wire::VolumeCapability> {
    match kind {
        VolumeKind::Filesystem => mount(&[]),
        VolumeKind::Block => block(),
    }
}

pub(crate) fn topology(node: &str) -> wire::Topology {
    wire::Topology { segments: [(format!("topology.{DRIVER}/node"), node.to_owned())].into() }
}

/// Returns the requirement that a volume or snapshot is on this node.
pub(crate) fn on(node: &str) -> Option<wire::TopologyRequirement> {
    Some(wire::TopologyRequirement { requisite: vec![topology(node)], preferred: Vec::new() })
}

/// Returns a request to publish a volume at a path.
pub(crate) fn publish(
    volume: &str,
    target: &Path,
    volume_capability: Option<wire::VolumeCapability>,
) -> wire::NodePublishVolumeRequest {
    wire::NodePublishVolumeRequest {
        volume_id: volume.to_owned(),
        target_path: target.to_str().unwrap().to_owned(),
        staging_target_path: target.with_file_name("staging").to_str().unwrap().to_owned(),
        volume_capability,
        ..wire::NodePublishVolumeRequest::default()
    }
}

pub(crate) fn publish_read_only(
    volume: &str,
    target: &Path,
    volume_capability: Option<wire::VolumeCapability>,
) -> wire::NodePublishVolumeRequest {
    wire::NodePublishVolumeRequest { readonly: true, ..publish(volume, target, volume_capability) }
}

pub(crate) fn unpublish(volume: &str, target: &Path) -> wire::NodeUnpublishVolumeRequest {
    wire::NodeUnpublishVolumeRequest {
        volume_id: volume.to_owned(),
        target_path: target.to_str().unwrap().to_owned(),
    }
}

pub(crate) fn stage(
    volume: &str,
    staging: &Path,
    volume_capability: Option<wire::VolumeCapability>,
) -> wire::NodeStageVolumeRequest {
    wire::NodeStageVolumeRequest {
        volume_id: volume.to_owned(),
        staging_target_path: staging.to_str().unwrap().to_owned(),
        volume_capability,
        ..wire::NodeStageVolumeRequest::default()
    }
}

pub(crate) fn unstage(volume: &str, staging: &Path) -> wire::NodeUnstageVolumeRequest {
    wire::NodeUnstageVolumeRequest {
        volume_id: volume.to_owned(),
        staging_target_path: staging.to_str().unwrap().to_owned(),
    }
}

pub(crate) fn stats(volume: &str, path: &Path) -> wire::NodeGetVolumeStatsRequest {
    wire::NodeGetVolumeStatsRequest {
        volume_id: volume.to_owned(),
        volume_path: path.to_str().unwrap().to_owned(),
        ..wire::NodeGetVolumeStatsRequest::default()
    }
}

pub(crate) fn expand(
    volume: &str,
    path: &Path,
    required_bytes: i64,
    limit_bytes: i64,
) -> wire::NodeExpandVolumeRequest {
    wire::NodeExpandVolumeRequest {
        volume_id: volume.to_owned(),
        volume_path: path.to_str().unwrap().to_owned(),
        capacity_range: Some(wire::CapacityRange { required_bytes, limit_bytes }),
        ..wire::NodeExpandVolumeRequest::default()
    }
}

/// Returns a request to create a volume of this size; 0 is the default size of the driver.
pub(crate) fn create(
    name: &str,
    required_bytes: i64,
    volume_capability: Option<wire::VolumeCapability>,
) -> wire::CreateVolumeRequest {
    wire::CreateVolumeRequest {
        name: name.to_owned(),
        capacity_range: Some(wire::CapacityRange { required_bytes, limit_bytes: 0 }),
        volume_capabilities: volume_capability.into_iter().collect(),
        ..wire::CreateVolumeRequest::default()
    }
}

pub(crate) fn delete(volume: &str) -> wire::DeleteVolumeRequest {
    wire::DeleteVolumeRequest { volume_id: volume.to_owned(), ..wire::DeleteVolumeRequest::default() }
}

pub(crate) fn get(volume: &str) -> wire::ControllerGetVolumeRequest {
    wire::ControllerGetVolumeRequest { volume_id: volume.to_owned() }
}

pub(crate) fn health(volume: &str) -> wire::ControllerGetVolumeHealthRequest {
    wire::ControllerGetVolumeHealthRequest { volume_id: volume.to_owned(), ..Default::default() }
}

pub(crate) fn health_on_node(volume: &str) -> wire::NodeGetVolumeHealthRequest {
    wire::NodeGetVolumeHealthRequest { volume_id: volume.to_owned(), ..Default::default() }
}

pub(crate) fn list(max_entries: i32, starting_token: &str) -> wire::ListVolumesRequest {
    wire::ListVolumesRequest { max_entries, starting_token: starting_token.to_owned() }
}

pub(crate) fn controller_expand(
    volume: &str,
    required_bytes: i64,
    limit_bytes: i64,
) -> wire::ControllerExpandVolumeRequest {
    wire::ControllerExpandVolumeRequest {
        volume_id: volume.to_owned(),
        capacity_range: Some(wire::CapacityRange { required_bytes, limit_bytes }),
        ..wire::ControllerExpandVolumeRequest::default()
    }
}

pub(crate) fn from_volume(
    name: &str,
    volume: &str,
    required_bytes: i64,
    capability: Option<wire::VolumeCapability>,
) -> wire::CreateVolumeRequest {
    let volume = VolumeSource { volume_id: volume.to_owned() };
    with_source(Source::Volume(volume), create(name, required_bytes, capability))
}

pub(crate) fn from_snapshot(
    name: &str,
    snapshot: &str,
    required_bytes: i64,
    capability: Option<wire::VolumeCapability>,
) -> wire::CreateVolumeRequest {
    let snapshot = SnapshotSource { snapshot_id: snapshot.to_owned() };
    with_source(Source::Snapshot(snapshot), create(name, required_bytes, capability))
}

fn with_source(source: Source, request: wire::CreateVolumeRequest) -> wire::CreateVolumeRequest {
    let volume_content_source = Some(wire::VolumeContentSource { r#type: Some(source) });
    wire::CreateVolumeRequest { volume_content_source, ..request }
}

pub(crate) fn create_snapshot(name: &str, volume: &str) -> wire::CreateSnapshotRequest {
    wire::CreateSnapshotRequest {
        name: name.to_owned(),
        source_volume_id: volume.to_owned(),
        ..wire::CreateSnapshotRequest::default()
    }
}

pub(crate) fn delete_snapshot(snapshot: &str) -> wire::DeleteSnapshotRequest {
    wire::DeleteSnapshotRequest { snapshot_id: snapshot.to_owned(), ..wire::DeleteSnapshotRequest::default() }
}

pub(crate) fn get_snapshot(snapshot: &str) -> wire::GetSnapshotRequest {
    wire::GetSnapshotRequest { snapshot_id: snapshot.to_owned(), ..wire::GetSnapshotRequest::default() }
}

/// Returns a request to list the snapshots of this volume with this id; an empty text matches all.
pub(crate) fn list_snapshots(
    max_entries: i32,
    starting_token: &str,
    volume: &str,
    snapshot: &str,
) -> wire::ListSnapshotsRequest {
    wire::ListSnapshotsRequest {
        max_entries,
        starting_token: starting_token.to_owned(),
        source_volume_id: volume.to_owned(),
        snapshot_id: snapshot.to_owned(),
        ..wire::ListSnapshotsRequest::default()
    }
}

pub(crate) fn validate(
    volume: &str,
    volume_capability: Option<wire::VolumeCapability>,
) -> wire::ValidateVolumeCapabilitiesRequest {
    wire::ValidateVolumeCapabilitiesRequest {
        volume_id: volume.to_owned(),
        volume_capabilities: volume_capability.into_iter().collect(),
        ..wire::ValidateVolumeCapabilitiesRequest::default()
    }
}

/// Fails unless the result is an error with this code whose message contains each of these texts.
#[track_caller]
pub(crate) fn assert_refused<T: std::fmt::Debug>(
    response: Result<T, Status>,
    code: Code,
    expected_texts: &[&str],
) {
    let status = response.expect_err("refused");
    assert_eq!(status.code(), code, "{}", status.message());
    for text in expected_texts {
        assert!(status.message().contains(text), "{:?} does not contain {text:?}", status.message());
    }
}

//! One node of a cluster: a virtual machine, its disks, and its Node object.

use std::fs;
use std::net::SocketAddrV4;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::Node as NodeObject;
use kube::{Api, Client};
use nix::sys::signal::Signal;
use testvm::images::disk;
use testvm::images::kernel::Module;
use testvm::session::Session;
use testvm::vm::{Control, Disk, DiskMode, Forward, Vm, VmSpec, initramfs};
use testvm_guest::control::ExecOutput;
use testvm_guest::spec::Mode;
use tokio::sync::Mutex;

use super::api_error::api_error;
use super::control_plane::ControlPlane;
use super::node_spec::{
    DATA_DISK, DataDisk, IMAGES_DISK, INSPECTION_DIR, INSPECTION_DISK, ROOT_DISK, TOOLS_DISK, node_name,
    node_object, node_spec,
};
use super::node_vm::NodeVm;
use super::objects;
use super::parts::Parts;
use super::waiting::{State, until_one};

/// The kubelet's port inside the machine.
const KUBELET_PORT: u16 = 10_250;
/// The time from power-on to the last service, emulated and on a host that also builds.
const BOOT_DEADLINE: Duration = Duration::from_secs(600);
/// The time from the kubelet's start to a Node object that is Ready.
const JOIN_DEADLINE: Duration = Duration::from_secs(180);
/// For a tool on a busy emulated processor.
const TOOL_TIMEOUT: Duration = Duration::from_secs(60);

/// A node of a cluster. Dropping it cuts its power.
pub struct Node {
    name: String,
    object: Box<NodeObject>,
    client: Client,
    kubelet: Client,
    machine: Machine,
    /// `None` while the power is off. Requests to a node that boots wait until it has booted.
    vm: Mutex<Option<NodeVm>>,
    /// `true` if the programs of the default root file system are in [`INSPECTION_DIR`].
    has_inspection_disk: bool,
}

/// The properties of a node that are the same for each boot.
#[derive(Debug)]
struct Machine {
    spec: VmSpec,
    init: PathBuf,
    modules: Vec<Module>,
    mode: Mode,
}

impl Node {
    pub(super) async fn start(
        session: &Session,
        control_plane: &ControlPlane,
        parts: &Parts,
        index: u8,
        data_disk: DataDisk,
        diagnose: impl AsyncFnOnce(&Node),
    ) -> Result<Node> {
        let name = node_name(index);
        let step = session.progress.step(format!("start {name} ({})", parts.node.hypervisor.accelerator));
        let kubelet = control_plane.kubelet_address(index);
        let object: Box<NodeObject> = serde_json::from_value(node_object(index, &kubelet.ip().to_string()))?;
        let client = control_plane.client().clone();
        objects::create(&Api::all(client.clone()), &*object).await?;
        let machine = machine(control_plane, parts, index, kubelet, data_disk).await?;
        step.note("booting");
        let vm = machine.boot().await?;
        let node = Node {
            name,
            object,
            client,
            kubelet: control_plane.kubelet_client(kubelet).await?,
            machine,
            vm: Mutex::new(Some(vm)),
            has_inspection_disk: parts.node.inspection.is_some(),
        };
        step.note("waiting for the kubelet to report");
        if let Err(error) = joined(&node.client, &node.name).await {
            diagnose(&node).await;
            return Err(error);
        }
        step.done("");
        Ok(node)
    }

    /// Returns the name of the Node object.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns a page of the kubelet, such as `/stats/summary`. The API server does not forward such requests to this
    /// node (`/api/v1/nodes/NAME/proxy`), because the node has a loopback address.
    ///
    /// # Errors
    /// The kubelet cannot be reached, or refuses the request.
    pub async fn kubelet_page(&self, path: &str) -> Result<String> {
        let request = http::Request::get(path).body(Vec::new())?;
        let page = self.kubelet.request_text(request).await.map_err(api_error);
        page.with_context(|| format!("read {path} of the kubelet of {}", self.name))
    }

    /// Returns the path on the node of a program of the default root file system, whether or not the node's own
    /// has it.
    #[must_use]
    pub fn inspection_program(&self, path: &str) -> String {
        if self.has_inspection_disk { format!("{INSPECTION_DIR}{path}") } else { path.to_owned() }
    }

    /// Runs a program that takes less than a minute as root on the node, and returns its output, whatever its exit code.
    ///
    /// # Errors
    /// As [`Node::exec_within`].
    pub async fn exec(&self, argv: &[&str]) -> Result<ExecOutput> {
        self.exec_within(argv, TOOL_TIMEOUT).await
    }

    /// Runs a program as root on the node and returns its output, whatever its exit code.
    ///
    /// # Errors
    /// The program cannot be started, runs longer than `timeout`, or the machine ends first.
    pub async fn exec_within(&self, argv: &[&str], timeout: Duration) -> Result<ExecOutput> {
        self.control().await?.exec(argv, timeout).await
    }

    /// Runs a program that takes less than a minute as root on the node, and returns its output if it succeeds.
    ///
    /// # Errors
    /// As [`Node::exec_within`], or the exit code is not 0.
    pub async fn output(&self, argv: &[&str]) -> Result<String> {
        self.output_within(argv, TOOL_TIMEOUT).await
    }

    /// Runs a program as root on the node and returns its output if it succeeds.
    ///
    /// # Errors
    /// As [`Node::exec_within`], or the exit code is not 0.
    pub async fn output_within(&self, argv: &[&str], timeout: Duration) -> Result<String> {
        self.control().await?.output(argv, timeout).await
    }

    /// Kills the kubelet with SIGKILL. The node starts it again after a second, and pods run on.
    ///
    /// # Errors
    /// The kubelet does not run, or the machine ends first.
    pub async fn kill_kubelet(&self) -> Result<()> {
        self.control().await?.signal_service("kubelet", Signal::SIGKILL).await
    }

    /// Creates the Node object again, after it was deleted. A kubelet that runs takes it as its own, and registers its plugins there when it
    /// is restarted.
    ///
    /// # Errors
    /// The object exists, or the API server refuses it.
    pub async fn register(&self) -> Result<()> {
        objects::create(&Api::all(self.client.clone()), &*self.object).await.map(drop)
    }

    /// Cuts the power, without a flush or a shutdown.
    ///
    /// # Errors
    /// The power is off already, or waiting for the QEMU process fails.
    pub async fn cut_power(&self) -> Result<()> {
        let vm = self.vm.lock().await.take().with_context(|| format!("the power of {} is off", self.name))?;
        vm.power_cut().await
    }

    /// Boots the node again, on the disks that the power cut left, and waits until its services run.
    /// Kubernetes notices it later.
    ///
    /// # Errors
    /// The power is on, or the node does not boot.
    pub async fn boot(&self) -> Result<()> {
        let mut vm = self.vm.lock().await;
        anyhow::ensure!(vm.is_none(), "the power of {} is on", self.name);
        *vm = Some(self.machine.boot().await?);
        Ok(())
    }

    /// Shuts the node down.
    ///
    /// # Errors
    /// The node does not end in time.
    pub async fn stop(self) -> Result<()> {
        match self.vm.into_inner() {
            Some(vm) => vm.power_off().await,
            None => Ok(()),
        }
    }

    async fn control(&self) -> Result<Control> {
        let vm = self.vm.lock().await;
        let vm = vm.as_ref().with_context(|| format!("the power of {} is off", self.name))?;
        Ok(vm.control().clone())
    }
}

impl Machine {
    async fn boot(&self) -> Result<NodeVm> {
        // The specification is written for each boot, because it has the time: the clock of an emulated
        // machine may be wrong.
        initramfs(&self.spec.initramfs, &self.init, &self.modules, &[], self.mode.clone())?;
        let vm = Vm::boot(&self.spec, BOOT_DEADLINE).await?;
        vm.wait_ready(BOOT_DEADLINE).await?;
        Ok(NodeVm::new(vm))
    }
}

async fn joined(client: &Client, name: &str) -> Result<()> {
    until_one::<NodeObject>(Api::all(client.clone()), name, JOIN_DEADLINE, |node| {
        let status = node.and_then(|node| node.status.as_ref());
        let conditions = status.into_iter().flat_map(|status| status.conditions.iter().flatten());
        let ready = conditions.into_iter().find(|condition| condition.type_ == "Ready");
        let message = ready.and_then(|ready| ready.message.clone()).unwrap_or_default();
        State::ready_if(
            ready.is_some_and(|ready| ready.status == "True"),
            format!("it is not Ready: {message}"),
        )
    })
    .await
    .with_context(|| format!("node {name} does not join"))
    .map(drop)
}

async fn machine(
    control_plane: &ControlPlane,
    parts: &Parts,
    index: u8,
    kubelet: SocketAddrV4,
    data_disk: DataDisk,
) -> Result<Machine> {
    let name = node_name(index);
    let dir = control_plane.layout().node_dir(&name);
    fs::create_dir_all(&dir).with_context(|| format!("create {}", dir.display()))?;
    let root = dir.join("root.ext4");
    disk::copy(&parts.node.root, &root).await?;
    let links = parts.node.plan.links.iter().map(|link| format!("symlink {} {}", link.path, link.target));
    disk::edit_ext4(&root, &links.collect::<Vec<_>>()).await?;
    let data = dir.join("data.xfs");
    disk::xfs(&data, control_plane.profile().data_mib()).await?;
    let data_mount = (data_disk == DataDisk::Mounted).then_some(&parts.node.plan.data_mount);
    let inspection = parts.node.inspection.as_deref();
    let spec = node_spec(control_plane, index, &parts.node, data_mount)?;
    let mode = Mode::Node(spec);
    let disk =
        |name: &str, image: &std::path::Path, mode| Disk { name: name.into(), image: image.to_owned(), mode };
    let spec = VmSpec {
        name: name.clone(),
        hypervisor: parts.node.hypervisor.clone(),
        kernel: parts.node.kernel.clone(),
        initramfs: dir.join("initramfs"),
        memory_mib: control_plane.profile().memory_mib(),
        cpus: 2,
        disks: [
            disk(ROOT_DISK, &root, DiskMode::Persistent),
            disk(DATA_DISK, &data, DiskMode::Persistent),
            disk(TOOLS_DISK, parts.tools_disk.as_path(), DiskMode::ReadOnly),
            disk(IMAGES_DISK, &parts.node.images_disk, DiskMode::ReadOnly),
        ]
        .into_iter()
        .chain(inspection.map(|image| disk(INSPECTION_DISK, image, DiskMode::ReadOnly)))
        .collect(),
        network: true,
        forwards: vec![Forward { host: kubelet, guest_port: KUBELET_PORT }],
        logs: control_plane.layout().logs().join(&name),
    };
    Ok(Machine { spec, init: parts.node.plan.init.clone(), modules: parts.node.modules.clone(), mode })
}

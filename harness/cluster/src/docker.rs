//! A virtual machine that runs Docker, with the disks that its user adds.
//!
//! [`DockerMachine`] has the kernel and the root file system, which are the same for each boot. [`Devices`] has the memory,
//! disks, mounts and ports of one boot. One of the disks is [`DOCKER_DISK`], an ext4 for Docker's images and containers.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Result;
use testvm::images::kernel::{Kernel, Module};
use testvm::session::Session;
use testvm::vm::{Control, Disk, DiskMode, Forward, Hypervisor, Vm, VmSpec, choose, initramfs};
use testvm_guest::spec::{Condition, FileSpec, Mode, Mount, NodeSpec, Service, Step};

use super::images::MODULE_SETS;

const ROOT_DISK: &str = "root";
/// The disk of Docker's images and containers.
pub const DOCKER_DISK: &str = "docker";
const DOCKER_SOCKET: &str = "/run/docker.sock";

/// The time from power-on to a Docker that responds, emulated and on a host that also builds.
const BOOT_DEADLINE: Duration = Duration::from_secs(400);
const MODPROBE_TIMEOUT: Duration = Duration::from_secs(120);

/// The parts of the machine that are the same for each boot.
#[derive(Debug)]
pub struct DockerMachine {
    hypervisor: Hypervisor,
    kernel: Kernel,
    modules: Vec<Module>,
    /// The disk of the root file system, whose changes are discarded.
    root: PathBuf,
    /// PID 1.
    init: PathBuf,
}

/// The parts of the machine that differ between boots.
#[derive(Debug)]
pub struct Devices {
    /// The disks, [`DOCKER_DISK`] among them.
    pub disks: Vec<Disk>,
    /// The mounts of the disks other than [`DOCKER_DISK`].
    pub mounts: Vec<Mount>,
    /// The ports that are forwarded to the machine.
    pub forwards: Vec<Forward>,
    /// The memory of the machine, in MiB.
    pub memory_mib: u32,
    /// The directory of the logs.
    pub logs: PathBuf,
}

impl DockerMachine {
    /// Chooses how to run a machine with this kernel. `root` is the disk of its root file system (ext4, with the modules
    /// of the kernel), and `init` the program `guest-init` of `testvm-guest`.
    ///
    /// # Errors
    /// The modules cannot be read, or no hypervisor boots the kernel.
    pub async fn prepare(
        session: &Session,
        kernel: &Kernel,
        root: PathBuf,
        init: PathBuf,
    ) -> Result<DockerMachine> {
        let hypervisor = choose(session, kernel, &init).await?;
        let modules = kernel.modules(&MODULE_SETS).await?;
        Ok(DockerMachine { hypervisor, kernel: kernel.clone(), modules, root, init })
    }

    /// Returns the disk of the root file system.
    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    /// Boots the machine, and waits until Docker responds. The initramfs is written into `directory`.
    ///
    /// # Errors
    /// The machine does not boot, or Docker does not start.
    pub async fn boot(&self, devices: Devices, directory: &Path) -> Result<Vm> {
        let path = directory.join("initramfs");
        let mode = Mode::Node(node_spec(devices.mounts));
        initramfs(&path, &self.init, &self.modules, &[], mode)?;
        let root = Disk { name: ROOT_DISK.into(), image: self.root.clone(), mode: DiskMode::Scratch };
        let spec = VmSpec {
            name: "docker".to_owned(),
            hypervisor: self.hypervisor.clone(),
            kernel: self.kernel.clone(),
            initramfs: path,
            memory_mib: devices.memory_mib,
            cpus: 2,
            disks: std::iter::once(root).chain(devices.disks).collect(),
            network: true,
            forwards: devices.forwards,
            logs: devices.logs,
        };
        let vm = Vm::boot(&spec, BOOT_DEADLINE).await?;
        vm.wait_ready(BOOT_DEADLINE).await?;
        Ok(vm)
    }
}

/// Returns the specification of the machine: its mounts, and Docker.
fn node_spec(mounts: Vec<Mount>) -> NodeSpec {
    let docker = Mount::of_disk(DOCKER_DISK, "/var/lib/docker", "ext4", "noatime");
    NodeSpec {
        hostname: "docker".to_owned(),
        root_disk: ROOT_DISK.to_owned(),
        mounts: std::iter::once(docker).chain(mounts).collect(),
        files: vec![FileSpec {
            path: "/etc/hosts".to_owned(),
            mode: 0o644,
            content: "127.0.0.1 localhost\n".to_owned(),
        }],
        steps: vec![
            // A distribution has the node of the loop driver from its start, by systemd.
            Step::Run {
                name: "modprobe".to_owned(),
                argv: vec!["modprobe".to_owned(), "loop".to_owned()],
                timeout: MODPROBE_TIMEOUT,
            },
            Step::Service(Service {
                name: "dockerd".to_owned(),
                argv: vec!["dockerd".to_owned()],
                env: BTreeMap::new(),
                log_file: None,
                restart: false,
                ready: Condition::UnixSocket(DOCKER_SOCKET.to_owned()),
                ready_within: BOOT_DEADLINE,
            }),
        ],
    }
}

/// Runs commands of bash on the machine, as root, and returns their output. The first command that fails ends them.
///
/// # Errors
/// A command fails, or they take longer than `timeout`.
pub async fn bash(control: &Control, commands: &str, timeout: Duration) -> Result<String> {
    let script = format!("set -euo pipefail\n{commands}\n");
    let output = control.exec_with_input(["bash", "-s"], &script, timeout).await?;
    anyhow::ensure!(
        output.code == 0,
        "on the machine with Docker: these commands ended with {}:\n{commands}\n{}{}",
        output.code,
        output.stdout,
        output.stderr
    );
    Ok(output.stdout)
}

//! A virtual machine that runs Docker, with the disks that its user adds.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Result;
use testvm::images::kernel::Module;
use testvm::vm::{Control, Disk, DiskMode, Forward, Hypervisor, Vm, VmSpec, initramfs};
use testvm_guest::spec::{
    Command, Condition, FileSpec, Mode, Mount, Network, NodeSpec, Ready, Restart, Service, Source, Step,
};

/// The directory of kind and kubectl.
pub(super) const PROGRAMS: &str = "/opt/kind";
/// The directory of the machine that has the files of [`KindPlan`](super::KindPlan), as a checkout of the project does.
pub const CHECKOUT: &str = "/opt/kind/checkout";
const ROOT_DISK: &str = "root";
/// The disk of Docker's images and containers.
pub(super) const DOCKER_DISK: &str = "docker";
const DOCKER_SOCKET: &str = "/run/docker.sock";

const MEMORY_MIB: u32 = 6144;
/// The time from power-on to a Docker that responds, emulated and on a host that also builds.
const BOOT_DEADLINE: Duration = Duration::from_secs(400);
const MODPROBE_TIMEOUT: Duration = Duration::from_secs(120);

/// The parts of the machine that are the same for each boot.
#[derive(Debug)]
pub(super) struct DockerMachine {
    pub(super) hypervisor: Hypervisor,
    pub(super) kernel: PathBuf,
    pub(super) modules: Vec<Module>,
    /// The disk of the root file system, whose changes are discarded.
    pub(super) root: PathBuf,
    /// PID 1.
    pub(super) init: PathBuf,
}

/// What a boot adds: disks, [`DOCKER_DISK`] among them, their mounts, ports, and the directory of the logs.
pub(super) struct Devices {
    pub(super) disks: Vec<Disk>,
    pub(super) mounts: Vec<Mount>,
    pub(super) forwards: Vec<Forward>,
    pub(super) logs: PathBuf,
}

impl DockerMachine {
    /// Boots the machine, and waits until Docker responds. The initramfs is written into `directory`.
    pub(super) async fn boot(&self, devices: Devices, directory: &Path) -> Result<Vm> {
        let path = directory.join("initramfs");
        let mode = Mode::Node(node_spec(devices.mounts));
        initramfs(&path, &self.init, &self.modules, &[], mode)?;
        let root = Disk { name: ROOT_DISK.into(), image: self.root.clone(), mode: DiskMode::Scratch };
        let spec = VmSpec {
            name: "kind".to_owned(),
            hypervisor: self.hypervisor.clone(),
            kernel: self.kernel.clone(),
            initramfs: path,
            kernel_args: Vec::new(),
            memory_mib: MEMORY_MIB,
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
    let docker = Mount {
        source: Source::Disk(DOCKER_DISK.into()),
        target: "/var/lib/docker".into(),
        fs_type: "ext4".into(),
        options: "noatime".into(),
    };
    NodeSpec {
        hostname: "docker".to_owned(),
        root_disk: ROOT_DISK.to_owned(),
        mounts: std::iter::once(docker).chain(mounts).collect(),
        network: Some(Network::default()),
        files: vec![FileSpec {
            path: "/etc/hosts".to_owned(),
            mode: 0o644,
            content: "127.0.0.1 localhost\n".to_owned(),
        }],
        steps: vec![
            // A distribution has the node of the loop driver from its start, by systemd.
            Step::Run(Command {
                name: "modprobe".to_owned(),
                argv: vec!["modprobe".to_owned(), "loop".to_owned()],
                env: BTreeMap::new(),
                timeout: MODPROBE_TIMEOUT,
            }),
            Step::Service(Service {
                name: "dockerd".to_owned(),
                argv: vec!["dockerd".to_owned()],
                env: BTreeMap::new(),
                restart: Restart::Never,
                ready: Some(Ready {
                    when: Condition::UnixSocket(DOCKER_SOCKET.to_owned()),
                    within: BOOT_DEADLINE,
                }),
            }),
        ],
    }
}

/// Runs commands of bash on the machine.
pub(super) async fn shell(control: &Control, commands: &str, timeout: Duration) -> Result<String> {
    let script = format!(
        "set -euo pipefail\nexport PATH={PROGRAMS}:$PATH\nif [ -d {CHECKOUT} ]; then cd {CHECKOUT}; fi\n{commands}\n"
    );
    let output = control.exec_with_input(["bash", "-s"], &script, timeout).await?;
    anyhow::ensure!(
        output.code == 0,
        "on the machine with kind: these commands ended with {}:\n{commands}\n{}{}",
        output.code,
        output.stdout,
        output.stderr
    );
    Ok(output.stdout)
}

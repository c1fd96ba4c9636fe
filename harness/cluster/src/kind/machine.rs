//! A virtual machine with Docker and kind, while it runs.

use std::fs;
use std::net::SocketAddrV4;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use kube::config::Kubeconfig;
use testvm::cache;
use testvm::images::disk;
use testvm::session::Session;
use testvm::vm::{Disk, DiskMode, Forward};
use testvm_guest::spec::Mount;

use super::parts::{KindParts, MEMORY_MIB};
use crate::docker::{DOCKER_DISK, Devices, bash};
use crate::loopback::LoopbackLease;
use crate::node_vm::NodeVm;

/// The directory of kind and kubectl.
const PROGRAMS: &str = "/opt/kind";
/// The directory of the machine that has the files of [`KindPlan`](super::KindPlan), as a checkout of the project does.
pub const CHECKOUT: &str = "/opt/kind/checkout";
const PAYLOAD_DISK: &str = "payload";
/// The serial number of an empty disk, for commands that format one.
pub const SPARE_DISK: &str = "spare";
const SPARE_DISK_BYTES: u64 = 1 << 30;
/// The port of the machine that is forwarded to the API server.
const API_PORT: u16 = 6443;
/// The address of the machine in QEMU's network.
const ADDRESS: &str = "10.0.2.15";
/// The container of a cluster with one node and kind's default name.
const NODE: &str = "kind-control-plane";
const SHELL_TIMEOUT: Duration = Duration::from_secs(120);

/// The logs of a cluster: the name of each, and the commands that print it on the machine. A log is cut to its last bytes,
/// because it passes from the machine as one message. The node image has no crictl; the kubelet keeps the logs of containers
/// in /var/log/pods.
const LOGS: [(&str, &str); 4] = [
    ("docker", "docker ps --all"),
    ("node", "docker logs kind-control-plane 2>&1 | tail --bytes=2M"),
    ("journal", "docker exec kind-control-plane journalctl --no-pager | tail --bytes=4M"),
    (
        "pods",
        "docker exec kind-control-plane sh -c 'find /var/log/pods -name \"*.log\" -exec tail --lines=500 --verbose {} +' \
    | tail --bytes=8M",
    ),
];
/// The time for one of these logs, on an emulated processor that runs a control plane.
const LOG_TIMEOUT: Duration = Duration::from_secs(300);

/// A running machine with Docker and kind. Dropping it cuts its power.
pub struct KindMachine {
    vm: NodeVm,
    /// The address of the host that is forwarded to the API server.
    api_server: SocketAddrV4,
    _lease: LoopbackLease,
}

impl KindMachine {
    /// Boots the machine. `directory` is emptied first, and gets its disks.
    ///
    /// # Errors
    /// A disk cannot be written, or the machine does not boot.
    pub async fn boot(
        session: &Session,
        parts: &KindParts,
        directory: &Path,
        logs: &Path,
    ) -> Result<KindMachine> {
        for emptied in [directory, logs] {
            cache::empty_dir(emptied)?;
        }
        let step = session.progress.step("boot a machine with Docker and kind");
        let lease = LoopbackLease::take()?;
        let api_server = lease.kubelet(0);
        let payload = directory.join("payload.ext4");
        disk::payload(&payload, &payload_files(session, parts, directory)?).await?;
        let spare = directory.join("spare");
        let created = fs::File::create(&spare).and_then(|file| file.set_len(SPARE_DISK_BYTES));
        created.with_context(|| format!("create {}", spare.display()))?;
        let devices = Devices {
            disks: vec![
                Disk { name: DOCKER_DISK.into(), image: parts.docker_disk.clone(), mode: DiskMode::Scratch },
                Disk { name: PAYLOAD_DISK.into(), image: payload, mode: DiskMode::ReadOnly },
                Disk { name: SPARE_DISK.into(), image: spare, mode: DiskMode::Scratch },
            ],
            mounts: vec![Mount::of_disk(PAYLOAD_DISK, PROGRAMS, "ext4", "ro")],
            forwards: vec![Forward { host: api_server, guest_port: API_PORT }],
            memory_mib: MEMORY_MIB,
            logs: logs.to_owned(),
        };
        let vm = NodeVm::new(parts.machine.boot(devices, directory).await?);
        step.done("");
        Ok(KindMachine { vm, api_server, _lease: lease })
    }

    /// Runs commands of bash in [`CHECKOUT`], as root, with kind and kubectl in the `PATH`, and returns their output. The
    /// first command that fails ends them.
    ///
    /// # Errors
    /// A command fails, or they take longer than `timeout`.
    pub async fn shell(&self, commands: &str, timeout: Duration) -> Result<String> {
        let script = format!("export PATH={PROGRAMS}:$PATH\ncd {CHECKOUT}\n{commands}");
        bash(self.vm.control(), &script, timeout).await
    }

    /// Forwards a port of the host to the API server of the cluster, and returns a kubeconfig for it.
    ///
    /// # Errors
    /// There is no cluster of kind's default name.
    pub async fn kubeconfig(&self) -> Result<Kubeconfig> {
        // Docker publishes the API server's port on the machine's loopback only, which QEMU does not reach.
        let forward = format!(
            "address=$(docker inspect --format '{{{{(index .NetworkSettings.Networks \"kind\").IPAddress}}}}' {NODE})
iptables --table nat --append PREROUTING --protocol tcp --destination {ADDRESS} --dport {API_PORT} \
    --jump DNAT --to-destination $address:{API_PORT}
iptables --insert DOCKER-USER --protocol tcp --destination $address --dport {API_PORT} --jump ACCEPT"
        );
        self.shell(&forward, SHELL_TIMEOUT).await?;
        let text = self.shell("kind get kubeconfig", SHELL_TIMEOUT).await?;
        reached_at(&text, self.api_server)
    }

    /// Writes the logs of the cluster into `directory`: those of Docker and of the node, its journal, and those of the
    /// containers of pods. If a log cannot be read, its file has the reason instead.
    ///
    /// # Errors
    /// A file cannot be written.
    pub async fn store_logs(&self, directory: &Path) -> Result<()> {
        for (name, commands) in LOGS {
            let log = self.shell(commands, LOG_TIMEOUT).await.unwrap_or_else(|error| format!("{error:#}\n"));
            let path = directory.join(format!("{name}.log"));
            fs::write(&path, log).with_context(|| format!("write {}", path.display()))?;
        }
        Ok(())
    }

    /// Shuts the machine down.
    ///
    /// # Errors
    /// The machine does not end in time.
    pub async fn stop(self) -> Result<()> {
        self.vm.power_off().await
    }
}

/// Returns the files of the payload disk: kind, kubectl, and the checkout.
fn payload_files(session: &Session, parts: &KindParts, directory: &Path) -> Result<Vec<(String, PathBuf)>> {
    let reference = directory.join("node-image");
    fs::write(&reference, &parts.node_image.reference)
        .with_context(|| format!("write {}", reference.display()))?;
    let below = CHECKOUT.strip_prefix(PROGRAMS).unwrap_or_default().trim_start_matches('/');
    let checkout = parts.checkout(directory)?;
    Ok([
        ("kind".to_owned(), session.workspace.definitions().join("kind/kind")),
        ("kind-program".to_owned(), parts.node_image.kind.clone()),
        ("kubectl".to_owned(), parts.kubectl.clone()),
        ("node-image".to_owned(), reference),
    ]
    .into_iter()
    .chain(checkout.into_iter().map(|(path, host)| (format!("{below}/{path}"), host)))
    .collect())
}

/// Returns a kubeconfig of kind with another address of the API server. The certificate of the server has `localhost`.
fn reached_at(kubeconfig: &str, address: SocketAddrV4) -> Result<Kubeconfig> {
    let mut config = Kubeconfig::from_yaml(kubeconfig).context("parse the kubeconfig of kind")?;
    for named in &mut config.clusters {
        let cluster = named.cluster.as_mut().with_context(|| format!("cluster {} is empty", named.name))?;
        cluster.server = Some(format!("https://{address}"));
        cluster.tls_server_name = Some("localhost".to_owned());
    }
    Ok(config)
}

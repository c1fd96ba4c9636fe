//! The specification that makes a virtual machine a Kubernetes node: files, mounts, services.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::Result;
use serde_json::{Value, json};
use testvm_guest::spec::{Condition, FileSpec, Mount, NodeSpec, Service, Source, Step};

use super::components::HOST_SEEN_FROM_GUEST;
use super::control_plane::ControlPlane;
use super::images::{NodeParts, PAUSE};
use super::pki::Subject;
use super::plan::{DataMount, NodeService};
use super::variant::{ContainerRuntime, KubeletRoot};
use super::{gvisor, trace};

/// The disk of the root file system.
pub(crate) const ROOT_DISK: &str = "root";
pub(crate) const DATA_DISK: &str = "data";
/// The disk of the Kubernetes programs.
pub(crate) const TOOLS_DISK: &str = "tools";
/// The disk of the container image archives.
pub(crate) const IMAGES_DISK: &str = "images";
/// The disk of the default root file system, for a node whose own lacks programs.
pub(crate) const INSPECTION_DISK: &str = "inspection";

/// What a node does with its data disk when it boots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DataDisk {
    /// The node mounts the file system of the disk as [`NodePlan::data_mount`](super::NodePlan::data_mount) says.
    Mounted,
    /// The node does not mount the disk.
    Unmounted,
}

/// The directory of the Kubernetes programs.
pub const TOOLS_DIR: &str = "/opt/kubernetes";
/// The state that the network plugins keep about running pods. They write it without fsync and cannot parse
/// files that a power cut truncated. Pods from before the cut could then neither be removed nor restarted.
/// The networks themselves do not survive a reboot, so this state is kept in memory.
const CNI_STATE_DIR: &str = "/var/lib/cni";
const IMAGES_DIR: &str = "/opt/images";
/// The directory of the default root file system. It is in the `PATH` of no service.
pub(crate) const INSPECTION_DIR: &str = "/opt/inspection";
pub(crate) const CONTAINERD_SOCKET: &str = "/run/containerd/containerd.sock";
/// The handler of containerd that runs pods with `hostUsers: false`.
pub const USER_NAMESPACES_HANDLER: &str = "crun";
/// The kubelet's directory.
pub const KUBELET_ROOT: &str = "/var/lib/kubelet";
/// The directory of the data disk that is mounted at [`KUBELET_ROOT`] with [`KubeletRoot::DataDisk`].
pub const KUBELET_DIRECTORY: &str = "kubelet";
/// The flags of that mount. Pods run programs in their emptyDirs, so it has no `noexec`.
const KUBELET_ROOT_FLAGS: &str = "nodev,nosuid";
/// The address of the kubelet's health endpoint, inside the node.
const KUBELET_HEALTH: &str = "127.0.0.1:10248";
/// The time from the start of a service to its first response, on an emulated processor shared with builds.
const START_DEADLINE: Duration = Duration::from_secs(180);
const IMPORT_DEADLINE: Duration = Duration::from_secs(180);

/// Returns the name of a node. Its index determines everything else about it.
pub(crate) fn node_name(index: u8) -> String {
    format!("node-{index}")
}

/// Returns the address range of the node's pods. It differs between nodes, although their pods share no network.
fn pod_cidr(index: u8) -> String {
    format!("10.244.{index}.0/24")
}

/// Returns the specification of one node of the cluster of `control_plane`. The node mounts its data disk as
/// `data_mount` says, or not at all.
pub(crate) fn node_spec(
    control_plane: &ControlPlane,
    index: u8,
    parts: &NodeParts,
    data_mount: Option<&DataMount>,
) -> Result<NodeSpec> {
    let node = node_name(index);
    let kubelet_root = parts.variant.kubelet_root;
    let mut steps = vec![trace::step()];
    steps.extend(parts.plan.services.iter().map(|planned| {
        let NodeService { name, argv, socket, user: _ } = planned;
        let env = BTreeMap::from([("NODE_NAME".to_owned(), node.clone())]);
        service(name, argv.clone(), env, None, Condition::UnixSocket(socket.clone()))
    }));
    // Benchmarks have no services that read logs, and must not write more than the measured programs do.
    let service = |name: &str, argv: &[&str], when| {
        let log_file = (!parts.plan.services.is_empty()).then(|| log_file(name));
        service(name, strings(argv), BTreeMap::new(), log_file, when)
    };
    steps.push(service("containerd", &["containerd"], Condition::Succeeds(strings(&["ctr", "version"]))));
    for archive in &parts.archives {
        let path = format!("{IMAGES_DIR}/{archive}");
        steps.push(Step::Run {
            name: "import".into(),
            argv: strings(&["ctr", "--namespace", "k8s.io", "images", "import", &path]),
            timeout: IMPORT_DEADLINE,
        });
    }
    let kubelet = format!("{TOOLS_DIR}/kubelet");
    steps.push(service(
        "kubelet",
        &[
            &kubelet,
            "--config=/etc/kubernetes/kubelet.json",
            "--kubeconfig=/etc/kubernetes/kubelet.kubeconfig",
            &format!("--hostname-override={node}"),
            // Keeps the address in the Node object. It is on the host's loopback and forwarded to this node,
            // so the kubelet cannot detect it.
            "--cloud-provider=external",
            "--v=2",
        ],
        Condition::Tcp(KUBELET_HEALTH.into()),
    ));
    let kube_proxy = format!("{TOOLS_DIR}/kube-proxy");
    steps.push(service(
        "kube-proxy",
        &[&kube_proxy, "--config=/etc/kubernetes/kube-proxy.json"],
        Condition::Tcp("127.0.0.1:10256".into()),
    ));
    let mut mounts = vec![
        Mount::of_disk(TOOLS_DISK, TOOLS_DIR, "ext4", "ro"),
        Mount::of_disk(IMAGES_DISK, IMAGES_DIR, "ext4", "ro"),
        in_memory(CNI_STATE_DIR),
        trace::mount(),
    ];
    mounts.extend(
        parts.inspection.is_some().then(|| Mount::of_disk(INSPECTION_DISK, INSPECTION_DIR, "ext4", "ro")),
    );
    mounts.extend(data_mount.into_iter().flat_map(|data| data_mounts(data, kubelet_root)));
    Ok(NodeSpec {
        files: files(control_plane, index, parts)?,
        hostname: node,
        root_disk: ROOT_DISK.into(),
        mounts,
        steps,
    })
}

/// Returns the Node object, which is created before the kubelet starts. It has the address at which the API
/// server reaches the kubelet. A Node that exists already does not get the taint that a cloud provider would
/// have to remove.
pub(crate) fn node_object(index: u8, address: &str) -> Value {
    let (node, pod_cidr) = (node_name(index), pod_cidr(index));
    json!({
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": node, "labels": {"kubernetes.io/hostname": node}},
        "spec": {"podCIDR": pod_cidr, "podCIDRs": [pod_cidr]},
        "status": {"addresses": [
            {"type": "InternalIP", "address": address},
            {"type": "Hostname", "address": node},
        ]},
    })
}

/// Returns the mounts of the data disk, in their order.
fn data_mounts(data: &DataMount, kubelet_root: KubeletRoot) -> Vec<Mount> {
    let mut mounts = vec![Mount::of_disk(DATA_DISK, &data.mount_point, "xfs", &data.options)];
    if kubelet_root == KubeletRoot::DataDisk {
        let directory = format!("{}/{KUBELET_DIRECTORY}", data.mount_point);
        mounts.push(Mount {
            source: Source::Directory(directory.clone()),
            target: KUBELET_ROOT.into(),
            fs_type: "none".into(),
            options: KUBELET_ROOT_FLAGS.into(),
        });
        // Hides the kubelet's files from containers that have the data directory.
        mounts.push(Mount { options: "ro,size=4k,mode=0000".into(), ..in_memory(&directory) });
    }
    mounts
}

fn files(control_plane: &ControlPlane, index: u8, parts: &NodeParts) -> Result<Vec<FileSpec>> {
    let authority = control_plane.authority();
    let name = node_name(index);
    let address = control_plane.kubelet_address(index).ip().to_string();
    let kubelet_user = format!("system:node:{name}");
    let kubelet = authority.client(Subject { user: &kubelet_user, group: Some("system:nodes") })?;
    let serving = authority.server(&kubelet_user, vec![address, name.clone()])?;
    let proxy = authority.client(Subject { user: "system:kube-proxy", group: None })?;
    let mut files = vec![
        public("/etc/kubernetes/ca.crt", authority.certificate()),
        public("/etc/kubernetes/kubelet.crt", serving.certificate),
        private("/etc/kubernetes/kubelet.key", serving.key),
        private("/etc/kubernetes/kubelet.kubeconfig", control_plane.guest_kubeconfig(&kubelet)?),
        public("/etc/kubernetes/kubelet.json", format!("{:#}\n", kubelet_config(parts.variant.kubelet_root))),
        private("/etc/kubernetes/kube-proxy.kubeconfig", control_plane.guest_kubeconfig(&proxy)?),
        public("/etc/kubernetes/kube-proxy.json", format!("{:#}\n", kube_proxy_config(&name))),
        public(
            "/etc/containerd/config.toml",
            containerd_config(parts.variant.runtime, gvisor::is_among(&parts.plan.tools)),
        ),
        public(gvisor::OPTIONS_FILE, gvisor::options(TOOLS_DIR)),
        public("/etc/cni/net.d/10-bridge.conflist", format!("{:#}\n", cni_config(&pod_cidr(index)))),
        // The kubelet reports the machine id, so nodes that share one image need different ids.
        public("/etc/machine-id", format!("{:032x}\n", u32::from(index) + 1)),
        // There is no name server. With an empty file, no pod waits for one.
        public("/etc/resolv.conf", String::new()),
        public(
            "/etc/hosts",
            format!("127.0.0.1 localhost\n10.0.2.15 {name}\n{HOST_SEEN_FROM_GUEST} control-plane\n"),
        ),
    ];
    for service in &parts.plan.services {
        let caller = authority.client(Subject { user: &service.user, group: None })?;
        let path = NodeService::kubeconfig(&service.name);
        files.push(private(&path, control_plane.guest_kubeconfig(&caller)?));
    }
    Ok(files)
}

fn kubelet_config(root: KubeletRoot) -> Value {
    json!({
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {
            "anonymous": {"enabled": false},
            "webhook": {"enabled": true},
            "x509": {"clientCAFile": "/etc/kubernetes/ca.crt"},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": "/etc/kubernetes/kubelet.crt",
        "tlsPrivateKeyFile": "/etc/kubernetes/kubelet.key",
        "containerRuntimeEndpoint": format!("unix://{CONTAINERD_SOCKET}"),
        "cgroupDriver": "cgroupfs",
        "failSwapOn": false,
        "resolvConf": "/etc/resolv.conf",
        // No server listens there, but without an address the kubelet logs a warning for every pod.
        "clusterDNS": ["10.96.0.10"],
        "clusterDomain": "cluster.local",
        // The images are imported, not pulled. An image that the kubelet deletes cannot be pulled again.
        "imageGCHighThresholdPercent": 100,
        "imageMinimumGCAge": "24h",
        // The disk is an overlay that grows on the host, so its free space means nothing.
        "evictionHard": {"memory.available": "50Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        "healthzBindAddress": "127.0.0.1",
        "healthzPort": 10248,
        // The root disk has no project quotas.
        "featureGates": {"LocalStorageCapacityIsolationFSQuotaMonitoring": root == KubeletRoot::DataDisk},
    })
}

fn kube_proxy_config(node: &str) -> Value {
    json!({
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "hostnameOverride": node,
        "clientConnection": {"kubeconfig": "/etc/kubernetes/kube-proxy.kubeconfig"},
        "mode": "iptables",
        "clusterCIDR": "10.244.0.0/16",
        "healthzBindAddress": "127.0.0.1:10256",
        "metricsBindAddress": "127.0.0.1:10249",
        // Keep the kernel's defaults: those of kube-proxy are for production traffic.
        "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
    })
}

/// Returns the configuration of containerd. `runtime` runs pods; crun runs those whose
/// RuntimeClass names [`USER_NAMESPACES_HANDLER`], and on a node that has gVisor, gVisor runs those that name
/// [`GVISOR_HANDLER`](gvisor::GVISOR_HANDLER).
fn containerd_config(runtime: ContainerRuntime, has_gvisor: bool) -> String {
    let default = match runtime {
        ContainerRuntime::Runc => "runc",
        ContainerRuntime::Crun => USER_NAMESPACES_HANDLER,
    };
    format!(
        r#"version = 4
[plugins."io.containerd.server.v1.grpc"]
  address = "{CONTAINERD_SOCKET}"
[plugins."io.containerd.cri.v1.images"]
  snapshotter = "overlayfs"
  [plugins."io.containerd.cri.v1.images".pinned_images]
    sandbox = "{PAUSE}"
[plugins."io.containerd.cri.v1.runtime"]
  [plugins."io.containerd.cri.v1.runtime".cni]
    bin_dirs = ["/usr/lib/cni"]
    conf_dir = "/etc/cni/net.d"
  [plugins."io.containerd.cri.v1.runtime".containerd]
    default_runtime_name = "{default}"
    [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
        SystemdCgroup = false
    [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.{USER_NAMESPACES_HANDLER}]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.{USER_NAMESPACES_HANDLER}.options]
        BinaryName = "/usr/bin/crun"
        SystemdCgroup = false
{gvisor}"#,
        gvisor = if has_gvisor { gvisor::handler(TOOLS_DIR) } else { String::new() },
    )
}

fn cni_config(pod_cidr: &str) -> Value {
    json!({
        "cniVersion": "1.0.0",
        "name": "pods",
        "plugins": [
            {
                "type": "bridge",
                "bridge": "cni0",
                "isGateway": true,
                "ipMasq": true,
                "hairpinMode": true,
                "ipam": {
                    "type": "host-local",
                    "ranges": [[{"subnet": pod_cidr}]],
                    "routes": [{"dst": "0.0.0.0/0"}],
                },
            },
            {"type": "portmap", "capabilities": {"portMappings": true}},
        ],
    })
}

fn in_memory(target: &str) -> Mount {
    Mount::without_disk("tmpfs", target, "mode=0755")
}

/// Returns the path of the log of a service on a node that has [services of the caller](super::NodePlan::services). When it
/// is full, it is renamed and created again.
#[must_use]
pub fn log_file(service: &str) -> String {
    format!("/var/log/{service}.log")
}

fn service(
    name: &str,
    argv: Vec<String>,
    env: BTreeMap<String, String>,
    log_file: Option<String>,
    ready: Condition,
) -> Step {
    let ready_within = START_DEADLINE;
    Step::Service(Service { name: name.into(), argv, env, log_file, restart: true, ready, ready_within })
}

fn strings(words: &[&str]) -> Vec<String> {
    words.iter().map(|word| (*word).to_owned()).collect()
}

fn public(path: &str, content: String) -> FileSpec {
    FileSpec { path: path.into(), mode: 0o644, content }
}

fn private(path: &str, content: String) -> FileSpec {
    FileSpec { path: path.into(), mode: 0o600, content }
}

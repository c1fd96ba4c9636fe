//! The contents of the nodes on which loopfs is tested: container images, programs, and the data directory.

use std::path::PathBuf;

use anyhow::Result;
use release::{DRIVER, driver_files};
use testvm::images::shell;
use testvm::session::Session;
use testvm_cluster::conformance::Suite;
use testvm_cluster::{
    ClusterProfile, ContainerImage, ContainerRuntime, DataMount, KubernetesMinor, Link, NodePlan,
    NodeService, NodeVariant, Parts, TOOLS_DIR, log_file, snapshotter,
};

use crate::builds::{self, DriverPrograms, GuestPrograms};
use crate::node_options::{Losetup, NodeOptions};

/// The image of the test pods.
pub(crate) const VOLUME_CHECK: &str = "docker.io/library/volume-check:dev";
/// An image with a shell, for interactive use; csi/examples uses it.
pub(crate) const SHELL: &str = "docker.io/library/shell:dev";

/// The name of the tool of loopfs in [`TOOLS_DIR`].
pub(crate) const LOOPFS_TOOL: &str = "loopfs";
/// The path of the link to it: the first directory of the `PATH` in which the kubelet looks for losetup.
pub(crate) const LOSETUP_LINK: &str = "/usr/local/sbin/losetup";

/// The name of node-debug in [`TOOLS_DIR`], and that of its user at the API server, as in its manifests.
const NODE_DEBUG: &str = "node-debug";
/// The name of the client of node-debug in [`TOOLS_DIR`].
pub(crate) const DBG: &str = "dbg";
/// The programs of the node whose logs node-debug reads, besides that of the kernel.
const LOGGED: [&str; 3] = ["containerd", "kubelet", "kube-proxy"];
/// The service account of `dbg kubectl`, as in the manifests of node-debug.
const DBG_ACCOUNT: &str = "kube-system/node-debug-viewer";
/// The name of the driver, as in the manifests.
const DRIVER_NAME: &str = "csi.loopfs.dev";

/// The mount point of the driver's file system, as in the manifests.
pub(crate) const DATA_DIR: &str = "/var/lib/loopfs/data";
/// The directory of that file system that is mounted at the kubelet's directory, in a variant of the nodes.
pub(crate) const KUBELET_DATA_DIR: &str = "/var/lib/loopfs/data/kubelet";
/// The mount options of the driver's file system: quotas are enforced, and no device, setuid bit or program
/// on it is honoured.
pub(crate) const DATA_OPTIONS: &str = "prjquota,nodev,nosuid,noexec";

/// The programs and images that only some runs need on the nodes.
#[derive(Debug, Default)]
pub(crate) struct Additions {
    /// The name of each program in [`TOOLS_DIR`], and its path on the host.
    pub(crate) tools: Vec<(String, PathBuf)>,
    pub(crate) images: Vec<ContainerImage>,
}

/// Builds the programs and disks of clusters, with the driver's image and the additions on every node.
///
/// # Errors
/// A part cannot be fetched or built, or the options contradict each other.
pub(crate) async fn parts(
    session: &Session,
    kubernetes: KubernetesMinor,
    options: &NodeOptions,
    profile: ClusterProfile,
    Additions { tools, images }: Additions,
) -> Result<Parts> {
    options.check()?;
    let plan = async {
        let mut plan = plan(session, options, profile, &tools).await?;
        plan.images.extend(images);
        Ok(plan)
    };
    Parts::build(session, &options.variant(), plan, kubernetes).await
}

/// Builds the programs and disks of a cluster for the end-to-end tests of Kubernetes. Its nodes have the images of the pods of
/// `suite`, snapshot-controller and csi-snapshotter, too.
///
/// # Errors
/// A part cannot be fetched or built.
pub(crate) async fn conformance_parts(
    session: &Session,
    kubernetes: KubernetesMinor,
    suite: &Suite,
    profile: ClusterProfile,
) -> Result<Parts> {
    let options = NodeOptions::default();
    let plan = async {
        let mut plan = plan(session, &options, profile, &[]).await?;
        plan.archives = suite.image_archives(session, &plan.pause).await?;
        plan.images.extend(snapshotter::images(session).await?);
        Ok(plan)
    };
    // The specs run some two thousand commands in pods.
    let variant = NodeVariant { runtime: ContainerRuntime::Crun, ..options.variant() };
    Parts::build(session, &variant, plan, kubernetes).await
}

/// Builds the programs and images of the nodes. Nodes for measurements have no node-debug, whose log files would be measured.
///
/// # Errors
/// A program cannot be fetched or built.
async fn plan(
    session: &Session,
    options: &NodeOptions,
    profile: ClusterProfile,
    tools: &[(String, PathBuf)],
) -> Result<NodePlan> {
    let (guest, driver, busybox) = tokio::try_join!(
        builds::guest_programs(session),
        builds::driver_programs(session, profile.into()),
        shell::busybox(session)
    )?;
    let mut tools = tools.to_vec();
    let mut links = Vec::new();
    if options.losetup() == Losetup::DropIn {
        links.push(Link { path: LOSETUP_LINK.to_owned(), target: format!("{TOOLS_DIR}/{LOOPFS_TOOL}") });
    }
    tools.push((LOOPFS_TOOL.to_owned(), driver.tool.clone()));
    let mut services = Vec::new();
    if profile != ClusterProfile::Benchmark {
        tools.extend([
            (NODE_DEBUG.to_owned(), driver.node_debug.clone()),
            (DBG.to_owned(), driver.dbg.clone()),
        ]);
        services.push(node_debug());
    }
    let (init, pause) = (guest.init.clone(), guest.pause.clone());
    let images = images(guest, driver, busybox);
    let data_mount = DataMount { mount_point: DATA_DIR.to_owned(), options: DATA_OPTIONS.to_owned() };
    Ok(NodePlan { init, pause, images, archives: Vec::new(), data_mount, tools, services, links })
}

/// Returns the images that test pods and the manifests name.
pub(crate) fn images(guest: GuestPrograms, driver: DriverPrograms, busybox: PathBuf) -> Vec<ContainerImage> {
    vec![
        ContainerImage {
            archive: "volume-check.tar",
            reference: VOLUME_CHECK,
            // With the tool, a pod can change project ids, as the owner of a directory can.
            files: vec![("/volume-check", guest.volume_check), ("/loopfs", driver.tool.clone())],
        },
        // The documents run `df` in pods without a shell, as any image of a distribution allows.
        ContainerImage {
            archive: "shell.tar",
            reference: SHELL,
            files: vec![("/bin/sh", busybox.clone()), ("/bin/df", busybox)],
        },
        driver_image(driver),
    ]
}

/// Returns the image of the driver, as the manifests name it.
pub(crate) fn driver_image(driver: DriverPrograms) -> ContainerImage {
    ContainerImage {
        archive: "loopfs.tar",
        reference: DRIVER,
        files: driver_files(driver.csi, driver.provisioner, driver.tool),
    }
}

/// Returns the service node-debug with all that it can serve.
fn node_debug() -> NodeService {
    let logs = LOGGED.into_iter().flat_map(|name| {
        let path = log_file(name);
        // PID 1 renames a large file.
        [format!("--log={name}={path}"), format!("--log={name}.1={path}.1")]
    });
    let argv = [
        format!("{TOOLS_DIR}/{NODE_DEBUG}"),
        "--log=kernel=kmsg".to_owned(),
        format!("--driver-name={DRIVER_NAME}"),
        format!("--data-dir={DATA_DIR}"),
        format!("--kubeconfig={}", NodeService::kubeconfig(NODE_DEBUG)),
        format!("--kubeconfig-service-account={DBG_ACCOUNT}"),
    ];
    NodeService {
        name: NODE_DEBUG.to_owned(),
        argv: argv.into_iter().chain(logs).collect(),
        socket: "/run/node-debug/node-debug.sock".to_owned(),
        user: NODE_DEBUG.to_owned(),
    }
}

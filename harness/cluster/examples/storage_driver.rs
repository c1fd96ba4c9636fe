//! Tests a storage driver on a cluster: it installs the driver, writes to a volume from a pod, kills the driver, cuts the power
//! of the node, and checks that nothing is left after the volume was deleted.
//!
//! The author of a driver brings a static program, the manifests that users apply, and the names in both. Here, they are those
//! of an imaginary driver: a DaemonSet whose pods have the label `app=example-driver` and run the image [`DRIVER_IMAGE`], and
//! the StorageClass [`CLASS`]. Its volumes are below [`DATA_DIR`].
//!
//! ```console
//! $ cargo run --package testvm-cluster --example storage_driver -- GUEST_INIT PAUSE DRIVER MANIFESTS
//! ```
//!
//! `GUEST_INIT` and `PAUSE` are the static programs of `testvm-guest`, `DRIVER` is that of the driver, and `MANIFESTS` a
//! directory.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod};
use kube::Api;
use kube::runtime::watcher;
use testvm::images::shell;
use testvm::report::Report;
use testvm::session::{Project, Session, Workspace};
use testvm_cluster::containers::{self, Container};
use testvm_cluster::exec::exec_ok;
use testvm_cluster::leak_check::Entries;
use testvm_cluster::manifests::Manifests;
use testvm_cluster::objects;
use testvm_cluster::waiting::{State, until_one};
use testvm_cluster::workload::{self, Held, PodProgram, VolumeMode};
use testvm_cluster::{
    Cluster, ClusterProfile, ClusterSpec, ContainerImage, DataMount, Durability, KubernetesSource, NodePlan,
    NodeVariant, Parts,
};

const PROJECT: Project = Project { name: "driver-example", command: "cargo run --example storage_driver --" };

/// The names in the manifests of the driver.
const DRIVER_IMAGE: &str = "docker.io/library/example-driver:dev";
const DRIVER_NAMESPACE: &str = "example-driver";
const DRIVER_LABELS: &str = "app=example-driver";
const DRIVER_CONTAINER: &str = "driver";
const CLASS: &str = "example";
/// The mount point of the data disk, where the driver has its volumes.
const DATA_DIR: &str = "/var/lib/example-driver";

/// The image of the test pod.
const SHELL: &str = "docker.io/library/shell:dev";
const NAMESPACE: &str = "test";
const CLAIM: &str = "data";
const POD: &str = "writer";
const TEXT: &str = "written before the power cut";
const TIMEOUT: Duration = Duration::from_secs(300);

/// The paths that the author brings.
struct Inputs {
    init: PathBuf,
    pause: PathBuf,
    driver: PathBuf,
    manifests: PathBuf,
}

#[tokio::main]
async fn main() -> Result<ExitCode> {
    let arguments: Vec<PathBuf> = std::env::args_os().skip(1).map(PathBuf::from).collect();
    let [init, pause, driver, manifests] = <[PathBuf; 4]>::try_from(arguments)
        .map_err(|_given| anyhow::anyhow!("usage: storage_driver GUEST_INIT PAUSE DRIVER MANIFESTS"))?;
    let inputs = Inputs { init, pause, driver, manifests };
    // The definitions pin the kernels, Kubernetes, etcd, containerd and the packages of the nodes.
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).context("find the workspace")?;
    let session = Session::new(PROJECT, Workspace::new(root.to_owned(), root.join("vm-images")))?;

    let cluster = start(&session, &inputs).await?;
    let mut report = Report::new();
    let test = test(&cluster, &inputs.manifests);
    report.run("driver", "volumes survive kills and power cuts", test).await;
    // The logs of all components are complete only after an orderly stop.
    cluster.stop().await?;
    session.progress.finish();
    println!("{}\n{}", report.table(), report.summary());
    Ok(if report.succeeded() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Starts a cluster whose node has the image of the driver, an image with a shell, and an empty XFS at [`DATA_DIR`].
async fn start(session: &Session, inputs: &Inputs) -> Result<Cluster> {
    let plan = async {
        let driver = ContainerImage {
            archive: "driver.tar",
            reference: DRIVER_IMAGE,
            files: vec![("/driver", inputs.driver.clone())],
        };
        let shell = ContainerImage {
            archive: "shell.tar",
            reference: SHELL,
            files: vec![("/bin/sh", shell::busybox(session).await?)],
        };
        Ok(NodePlan {
            init: inputs.init.clone(),
            pause: inputs.pause.clone(),
            images: vec![driver, shell],
            archives: Vec::new(),
            data_mount: DataMount { mount_point: DATA_DIR.to_owned(), options: "prjquota".to_owned() },
            tools: Vec::new(),
            services: Vec::new(),
            links: Vec::new(),
        })
    };
    let parts = Parts::build(session, &NodeVariant::default(), plan, &KubernetesSource::default()).await?;
    let dir = session.workspace.target().join(PROJECT.name);
    let spec = ClusterSpec {
        logs: dir.join("logs"),
        dir,
        durability: Durability::Unsafe,
        profile: ClusterProfile::Default,
    };
    Cluster::start(session, spec, parts).await
}

/// Runs the test on a cluster.
async fn test(cluster: &Cluster, manifests: &Path) -> Result<()> {
    let client = cluster.client();
    let node = cluster.nodes().first().context("the cluster has no node")?;
    let pods: Api<Pod> = Api::namespaced(client.clone(), NAMESPACE);
    let claims: Api<PersistentVolumeClaim> = Api::namespaced(client.clone(), NAMESPACE);
    let driver_pods: Api<Pod> = Api::namespaced(client.clone(), DRIVER_NAMESPACE);

    Manifests::read(manifests)?.apply(client).await?;
    until_driver_runs(&driver_pods, &[]).await?;
    let before = Entries::of_file_system(node, DATA_DIR).await?;

    workload::create_namespace(client, NAMESPACE).await?;
    let claim = workload::claim(CLAIM, CLASS, "64Mi", VolumeMode::Filesystem, "ReadWriteOnce")?;
    objects::create(&claims, &claim).await?;
    let command = &["/bin/sh", "-c", "trap exit TERM; while :; do sleep 1; done"];
    let program = PodProgram { container: "shell", image: SHELL, command };
    let held = Held { claim: CLAIM, path: "/vol", mode: VolumeMode::Filesystem, read_only: false };
    objects::create(&pods, &workload::pod(POD, program, &[held])?).await?;

    // The driver is killed while it provides the volume, and the volume becomes ready nevertheless.
    let killed = containers::kill_in(node, &driver_pods, DRIVER_LABELS, DRIVER_CONTAINER).await?;
    workload::until_pod_runs(&pods, POD, TIMEOUT).await?;
    until_driver_runs(&driver_pods, &[killed]).await?;
    let write = format!("echo -n '{TEXT}' > /vol/text && sync");
    exec_ok(&pods, POD, &["/bin/sh", "-c", &write]).await?;

    // The disks have only what the programs on the node had flushed. Kubernetes starts the pod again.
    let restarts_before = restarts(&pods.get(POD).await?);
    node.cut_power().await?;
    node.boot().await?;
    until_one(pods.clone(), POD, TIMEOUT, |pod| {
        let now = pod.and_then(restarts_if_ready);
        State::ready_if(now.is_some_and(|now| now > restarts_before), "its container was not started again")
    })
    .await?;
    let read = exec_ok(&pods, POD, &["/bin/sh", "-c", "cat /vol/text"]).await?;
    anyhow::ensure!(read == TEXT, "after the power cut, the pod reads {read:?} instead of {TEXT:?}");

    objects::remove(pods, POD, TIMEOUT).await?;
    workload::delete_claim(client, &claims, CLAIM, TIMEOUT).await?;
    Entries::of_file_system(node, DATA_DIR).await?.require_none_added_since(&before)
}

/// Waits until all containers of the driver are ready, and none of them was killed.
async fn until_driver_runs(driver_pods: &Api<Pod>, killed: &[Container]) -> Result<()> {
    let scope = watcher::Config::default().labels(DRIVER_LABELS);
    containers::until_replaced(driver_pods.clone(), scope, killed, TIMEOUT).await
}

/// Returns how often the containers of a pod were started again.
fn restarts(pod: &Pod) -> i32 {
    Container::all(pod).map(|(_, status)| status.restart_count).sum()
}

/// Returns how often the containers of a pod were restarted, or `None` if one of them is not ready.
fn restarts_if_ready(pod: &Pod) -> Option<i32> {
    Container::all(pod).all(|(_, status)| status.ready).then(|| restarts(pod))
}

//! The part second-driver of the lane extended: local-path-provisioner on a cluster of the harness. It shows that the crates of the
//! harness know no driver, and that the checks find what a driver lacks.
//!
//! The checks of the capacity must fail, because local-path enforces no size. If one passes, the part fails.

mod flow;

use anyhow::Result;
use testvm::go_build::{self, GoModule};
use testvm::images::shell;
use testvm::report::Report;
use testvm::session::Session;
use testvm::steps::Steps;
use testvm_cluster::manifests::Manifests;
use testvm_cluster::{
    Cluster, ClusterProfile, ContainerImage, DataMount, KubernetesMinor, NodePlan, NodeVariant, Parts,
};

use self::flow::DATA_DIR;
use super::clusters;
use crate::nodes::{SHELL, VOLUME_CHECK};
use crate::{builds, e2e};

/// The name of the part of the lane, and of its reports.
const LANE: &str = "second-driver";

/// The mount options of its file system.
const DATA_OPTIONS: &str = "nodev,nosuid";

const LOCAL_PATH: GoModule = GoModule::new("local-path", "github.com/rancher/local-path-provisioner");
const PROGRAM: &str = "local-path-provisioner";
/// The image of the provisioner, as in the manifests.
const IMAGE: &str = "docker.io/library/local-path-provisioner:dev";

/// Runs the flow on a cluster of its own.
pub(super) async fn run(session: &Session, kubernetes: KubernetesMinor) -> Result<Report> {
    let manifests = Manifests::read(&session.workspace.definitions().join(LOCAL_PATH.name).join("deploy"))?;
    let cluster = session.until_cancelled(start(session, kubernetes)).await?;
    let mut report = Report::new();
    let tested = flow::run(&mut Steps::begin(session, &mut report, LANE), &cluster, &manifests).await;
    if tested.is_err() || !report.succeeded() {
        let reports = session.workspace.reports(LANE);
        let written = e2e::write_state(session, &cluster, &reports);
        report.run(LANE, "store the state of the cluster", written).await;
    }
    // Also after a failure the cluster is stopped in order, so that the logs are complete.
    report.run(LANE, "stop the node and the control plane", cluster.stop()).await;
    Ok(report)
}

async fn start(session: &Session, kubernetes: KubernetesMinor) -> Result<Cluster> {
    let parts = Parts::build(session, &NodeVariant::default(), plan(session), kubernetes).await?;
    let spec = clusters::spec(session, LANE, ClusterProfile::Default)?;
    Cluster::start(session, spec, parts).await
}

async fn plan(session: &Session) -> Result<NodePlan> {
    let (guest, programs, busybox) = tokio::try_join!(
        builds::guest_programs(session),
        go_build::build(session, &LOCAL_PATH),
        shell::busybox(session)
    )?;
    // The names of the archives are not those of loopfs's images, which users import into other clusters.
    let image =
        |archive, reference, path, host| ContainerImage { archive, reference, files: vec![(path, host)] };
    let images = vec![
        image("second-driver.tar", IMAGE, "/local-path-provisioner", programs.join(PROGRAM)),
        image("second-driver-volume-check.tar", VOLUME_CHECK, "/volume-check", guest.volume_check),
        // The pods that create and delete directories run it.
        image("second-driver-shell.tar", SHELL, "/bin/sh", busybox),
    ];
    Ok(NodePlan {
        init: guest.init,
        pause: guest.pause,
        images,
        archives: Vec::new(),
        data_mount: DataMount { mount_point: DATA_DIR.to_owned(), options: DATA_OPTIONS.to_owned() },
        tools: Vec::new(),
        services: Vec::new(),
        links: Vec::new(),
    })
}

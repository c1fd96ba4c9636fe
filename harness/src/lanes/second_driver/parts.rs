//! The nodes of a cluster that runs local-path-provisioner: its image, and a data disk for its volumes.

use std::path::PathBuf;

use anyhow::Result;
use testvm::go_build::{self, GoModule};
use testvm::images::shell;
use testvm::session::Session;
use testvm_cluster::{ContainerImage, DataMount, KubernetesSource, NodePlan, NodeVariant, Parts};

use crate::builds;
use crate::nodes::{SHELL, VOLUME_CHECK};

/// The name of the part of the lane, and of its reports.
pub(super) const LANE: &str = "second-driver";

/// The directory of the volumes, as in the manifests.
pub(super) const DATA_DIR: &str = "/var/lib/local-path";
/// The mount options of its file system.
const DATA_OPTIONS: &str = "nodev,nosuid";

const LOCAL_PATH: GoModule = GoModule::new("local-path", "github.com/rancher/local-path-provisioner");
const PROGRAM: &str = "local-path-provisioner";
/// The image of the provisioner, as in the manifests.
const IMAGE: &str = "docker.io/library/local-path-provisioner:dev";

/// Builds the programs and disks of the cluster.
///
/// # Errors
/// A part cannot be fetched or built.
pub(super) async fn build(session: &Session, kubernetes: &KubernetesSource) -> Result<Parts> {
    Parts::build(session, &NodeVariant::default(), plan(session), kubernetes).await
}

/// Returns the directory of the manifests in the definitions.
pub(super) fn manifests(session: &Session) -> PathBuf {
    session.workspace.definitions().join(LOCAL_PATH.name).join("deploy")
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

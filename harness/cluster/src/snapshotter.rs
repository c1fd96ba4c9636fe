//! snapshot-controller and csi-snapshotter, with which Kubernetes takes snapshots of volumes. They are not part of a
//! release of Kubernetes: their images have the names of the originals, so that manifests for other clusters fit.

use anyhow::Result;
use testvm::go_build::{self, GoModule, VersionVariable};
use testvm::session::Session;

use super::plan::ContainerImage;

/// The image of snapshot-controller.
pub const SNAPSHOT_CONTROLLER: &str = "registry.k8s.io/sig-storage/snapshot-controller:v8.7.0";
/// The image of csi-snapshotter.
pub const CSI_SNAPSHOTTER: &str = "registry.k8s.io/sig-storage/csi-snapshotter:v8.7.0";
/// The module of both. Its version is the tag of the images.
pub const MODULE: &str = "github.com/kubernetes-csi/external-snapshotter/v8";

const SNAPSHOTTER: GoModule = GoModule {
    version_variables: &[VersionVariable { variable: "main.version", value: |version| version.to_string() }],
    ..GoModule::new("snapshotter", MODULE)
};

/// Builds the images, or takes their programs from the cache. Each image has one program, which its containers run.
///
/// # Errors
/// Go is missing, or the module cannot be fetched or built.
pub async fn images(session: &Session) -> Result<[ContainerImage; 2]> {
    let directory = go_build::build(session, &SNAPSHOTTER).await?;
    let image = |archive, reference, program: &'static str| {
        let files = vec![(program, directory.join(program.trim_start_matches('/')))];
        ContainerImage { archive, reference, files }
    };
    Ok([
        image("snapshot-controller.tar", SNAPSHOT_CONTROLLER, "/snapshot-controller"),
        image("csi-snapshotter.tar", CSI_SNAPSHOTTER, "/csi-snapshotter"),
    ])
}

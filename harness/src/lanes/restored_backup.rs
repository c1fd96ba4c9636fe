//! The part of the apiserver lane in which etcd is restored from a backup while the provisioner of a node keeps running.
//!
//! After that, the resource versions of the cluster are lower than those that the watches of the provisioner resume from. The API server
//! accepts such a watch and delivers nothing on it, not even a bookmark. The documentation of Kubernetes requires that its own components
//! are restarted. A provisioner runs on each node and must find out by itself.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use futures::StreamExt;
use k8s_openapi::api::core::v1::{ConfigMap, PersistentVolumeClaim};
use kube::Api;
use kube::api::{DeleteParams, PostParams};
use serde_json::json;
use testvm::report::Report;
use testvm::session::Session;
use testvm::steps::{StepResult, Steps};
use testvm_cluster::api_error::api_error;
use testvm_cluster::waiting::{State, until_one};
use testvm_cluster::workload::{self, VolumeMode, create_namespace};
use testvm_cluster::{ControlPlane, objects};

use crate::fake_nodes::{self, LiveTests, NODES};
use crate::test_env::claims::{is_bound, with_selected_node};
use crate::test_env::sizes::Size;
use crate::test_env::workload::claim;

/// The word that selects this part with `--only`.
pub(super) const NAME: &str = "backup";

pub(super) const SUITE: &str = "apiserver: restored backup";
const NAMESPACE: &str = "restored-backup";
/// The StorageClass of the manifests.
const CLASS: &str = "loopfs";
const SIZE: Size = Size::mebibytes(1);

/// The claim whose objects the backup has, the one whose objects it lacks, and the one that is created after the restoration.
const KEPT: &str = "in-the-backup";
const LOST: &str = "after-the-backup";
const NEW: &str = "after-the-restoration";

/// The number of writes between the backup and the later claim: more than the cluster makes during the rest of the test. Otherwise the
/// resource versions would reach those of the watches, and the watches would deliver events again.
const WRITES: usize = 3000;
const WRITE_CONCURRENCY: usize = 16;

const BIND_TIMEOUT: Duration = Duration::from_secs(60);
/// The time after which the provisioner gives up a watch that delivers nothing. The default of 150 seconds would make this part wait
/// longer, and would test the same.
const WATCH_SILENCE: Duration = Duration::from_secs(20);
/// The silent watch may be resumed once before the objects are listed again.
const RECOVERY_TIMEOUT: Duration = Duration::from_secs(300);
/// Limits the shutdown of a provisioner that completes operations in progress.
const STOP_GRACE: Duration = Duration::from_secs(20);

/// Runs the part on a control plane with the driver. `logs` is the directory of its logs.
pub(super) async fn run(
    session: &Session,
    tests: &LiveTests,
    control_plane: &ControlPlane,
    logs: &Path,
) -> Result<Report> {
    let log = logs.join("restored-backup.log");
    let silence = WATCH_SILENCE.as_secs().to_string();
    let program = tests.serving(fake_nodes::SERVE).env(fake_nodes::WATCH_SILENCE, silence).log(&log);
    let directory = tempfile::tempdir().context("create a directory for the backup")?;
    let backup = directory.path().join("backup");
    let mut provisioner = program.spawn()?;
    let mut report = Report::new();
    let mut steps = Steps::begin(session, &mut report, SUITE);
    let volumes = tokio::select! {
        volumes = restore(&mut steps, control_plane, &backup) => volumes,
        ended = provisioner.wait() => anyhow::bail!("the provisioner ended with {}; see {}", ended?, log.display()),
    };
    let status = provisioner.stop(STOP_GRACE).await?;
    if let Ok(lost) = volumes {
        let is_kept = async {
            let stored = fake_nodes::stored_volumes(&log)?;
            anyhow::ensure!(status.success(), "the provisioner did not exit cleanly: {status}");
            anyhow::ensure!(stored.contains(&lost), "the node has the volumes {stored:?}, and not {lost}");
            Ok(())
        };
        report.run(SUITE, "the volume whose objects the backup lacks is kept", is_kept).await;
    }
    Ok(report)
}

/// Returns the volume whose objects the backup lacks.
async fn restore(steps: &mut Steps<'_>, control_plane: &ControlPlane, backup: &Path) -> StepResult<String> {
    let prepare = async {
        create_namespace(control_plane.client(), NAMESPACE).await?;
        provision(control_plane, KEPT, BIND_TIMEOUT).await?;
        control_plane.back_up(backup).await
    };
    steps.step("a claim gets its volume, and etcd is backed up", prepare).await?;
    let write = async {
        write_objects(control_plane).await?;
        provision(control_plane, LOST, BIND_TIMEOUT).await
    };
    let lost = steps.step("resource versions grow, and a later claim gets its volume", write).await?;
    steps.step("etcd is restored from the backup", control_plane.restore(backup)).await?;
    let provision = provision(control_plane, NEW, RECOVERY_TIMEOUT);
    steps.step("a new claim gets its volume without a restart of the provisioner", provision).await?;
    let claims = claims(control_plane);
    let delete = workload::delete_claim(control_plane.client(), &claims, KEPT, RECOVERY_TIMEOUT);
    steps.step("a claim of the backup is deleted with its volume", delete).await?;
    Ok(lost)
}

fn claims(control_plane: &ControlPlane) -> Api<PersistentVolumeClaim> {
    Api::namespaced(control_plane.client().clone(), NAMESPACE)
}

/// Creates a claim, waits until it is bound, and returns the name of its volume.
async fn provision(control_plane: &ControlPlane, name: &str, within: Duration) -> Result<String> {
    let claims = claims(control_plane);
    let claim = claim(name, CLASS, SIZE, VolumeMode::Filesystem, "ReadWriteOnce")?;
    objects::create(&claims, &with_selected_node(claim, NODES[0])).await?;
    let bound = until_one(claims.clone(), name, within, |claim| {
        State::ready_if(claim.is_some_and(is_bound), "it is not bound")
    });
    bound.await.with_context(|| format!("claim {name} gets no volume"))?;
    workload::volume_of(&claims, name).await
}

async fn write_objects(control_plane: &ControlPlane) -> Result<()> {
    let config_maps: Api<ConfigMap> = Api::namespaced(control_plane.client().clone(), NAMESPACE);
    let object: ConfigMap = serde_json::from_value(json!({"metadata": {"generateName": "write-"}}))?;
    let (create, delete) = (PostParams::default(), DeleteParams::default());
    let mut writes = futures::stream::iter(0..WRITES / 2)
        .map(|_| async {
            let created = config_maps.create(&create, &object).await?;
            config_maps.delete(&created.metadata.name.unwrap_or_default(), &delete).await.map(drop)
        })
        .buffer_unordered(WRITE_CONCURRENCY);
    while let Some(written) = writes.next().await {
        written.map_err(api_error).context("write a ConfigMap")?;
    }
    Ok(())
}

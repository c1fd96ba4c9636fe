//! `bench deletion`: deletes claims of volumes with many files concurrently, while other volumes are provisioned.
//!
//! The same is measured with volumes in memory and without an emulated processor. There are no files in them, so only the work of the
//! provisioner and the control plane for each object remains.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Result;
use k8s_openapi::api::storage::v1::StorageClass;
use kube::{Api, Client};
use testvm::progress::Step;
use testvm::session::Session;
use testvm_cluster::{Cluster, ClusterProfile, ControlPlane, Node, objects};

use super::args::Args;
use super::batch::{Batch, DeletionTimes};
use super::cluster::{self, CLASS};
use super::measurement::{Environment, Samples, milliseconds};
use super::process::{self, IN_MEMORY, NODE};
use super::threshold::{Requirement, at_most, no_more};
use crate::fake_nodes::{self, LiveTests};
use crate::node_options::NodeOptions;
use crate::nodes::DATA_DIR;

/// Like the StorageClass of the manifests, but with many inodes for little space.
const CLASS_OF_FILES: &str = "files";
/// The minimum: a volume of 1 MiB may have 2,048 inodes, one of which is its directory.
const BYTES_PER_INODE: &str = "512";

const BIND_TIMEOUT: Duration = Duration::from_secs(900);
/// Limits the creation of one volume's files.
const FILL_TIMEOUT: Duration = Duration::from_secs(60);
/// Limits the time until the space of all deleted volumes is free.
const FREE_TIMEOUT: Duration = Duration::from_secs(3600);
/// Nothing outside the node is notified of changes in the trash.
const POLL_INTERVAL: Duration = Duration::from_millis(500);

/// The cluster and the node that are measured.
#[derive(Clone, Copy)]
struct Setup<'a> {
    client: &'a Client,
    node: &'a str,
    /// The node that has the files. `None` if the volumes are in memory.
    disk: Option<&'a Node>,
    volumes: u64,
    files_each: u64,
    /// Volumes provisioned one after the other while the cluster is idle.
    idle: u64,
}

pub(super) async fn run(session: &Session, args: &Args) -> Result<Vec<Environment>> {
    let (volumes, files_each, idle) = args.size((500, 2000, 200), (50, 500, 30));
    let measure = async |client: &Client, node: &str, disk: Option<&Node>| {
        let what = if disk.is_some() { "volumes with files" } else { "volumes in memory" };
        let step = session.progress.step(format!("delete {what} while others are provisioned"));
        let samples = Setup { client, node, disk, volumes, files_each, idle }.measure(&step).await?;
        step.done("");
        Ok(samples)
    };
    let options = NodeOptions::default();
    let on_disk =
        async |cluster: &Cluster, node: &Node| measure(cluster.client(), node.name(), Some(node)).await;
    let on_disk = cluster::measured(session, args, "deletion", options, &[], on_disk).await?;
    let program = fake_nodes::build_live_tests(session, ClusterProfile::Benchmark).await?;
    let logs = session.workspace.reports("bench").join("deletion-in-memory");
    let in_memory = async |control_plane: &ControlPlane, kubeconfigs: &Path| {
        let tests = LiveTests::new(program, control_plane, kubeconfigs);
        let mut provisioner = process::start_provisioner(&tests, &logs)?;
        let samples = provisioner.during(measure(control_plane.client(), NODE, None)).await?;
        provisioner.stop(process::STOP_GRACE).await?;
        Ok(samples)
    };
    let in_memory = Box::pin(process::beside_control_plane(session, &logs, IN_MEMORY, in_memory)).await?;
    Ok(vec![on_disk, in_memory])
}

pub(super) fn requirements() -> Vec<Requirement> {
    let slowest = "p99 time to provision a volume during bulk deletion: at most twice the p99 when idle";
    let objects = "time until the PersistentVolumes of all deleted claims are deleted: at most a minute";
    let space = "time until the PersistentVolumes are deleted: at most a fifth of the time until the space of their files is free";
    let control_plane = "time until the PersistentVolumes are deleted, without an emulated processor: at most 1.5 times the time \
                         until the control plane has deleted the claims";
    vec![
        at_most(slowest, "provision_beside_deletion", 2.0, "provision_idle").of_p99(),
        no_more(objects, "objects_gone", 60.0),
        at_most(space, "objects_gone", 0.2, "space_freed"),
        at_most(control_plane, "objects_gone", 1.5, "claims_gone").at_the_least_count(),
    ]
}

impl Setup<'_> {
    async fn measure(self, step: &Step) -> Result<Samples> {
        create_class(self.client).await?;
        step.note(format!("provision {} volumes", self.volumes));
        let doomed = self.batch("doomed", self.volumes);
        doomed.create_and_bind(BIND_TIMEOUT).await?;
        if let Some(disk) = self.disk {
            fill(disk, self.files_each, step).await?;
        }
        let files = self.disk.map_or(0, |_| self.volumes * self.files_each);

        let mut samples = Samples::default();
        let idle = self.batch("idle", 0);
        for number in 0..self.idle {
            step.note(format!("volume {} of {} while the cluster is idle", number + 1, self.idle));
            samples.add("provision_idle", files, "ms", milliseconds(idle.provision_one(number).await?));
        }

        let started = Instant::now();
        let deleting = async {
            let deletions = doomed.delete().await?;
            let objects_deleted = started.elapsed();
            if let Some(disk) = self.disk {
                until_trash_is_empty(disk, started + FREE_TIMEOUT, step).await?;
            }
            Ok::<_, anyhow::Error>((deletions, objects_deleted, started.elapsed()))
        };
        let beside = self.batch("beside", 0);
        let mut provisioned = Vec::new();
        let provisioning = async {
            for number in 0.. {
                let took = beside.provision_one(number).await?;
                provisioned.push((started.elapsed(), milliseconds(took)));
            }
            Ok::<(), anyhow::Error>(())
        };
        let (deletions, objects_deleted, freed) = tokio::select! {
            deleted = deleting => deleted?,
            ended = provisioning => {
                ended?;
                anyhow::bail!("provisioning ended while other volumes were being deleted");
            }
        };
        let freed = self.disk.map(|_| freed.as_secs_f64());
        add_deletion(&mut samples, files, &provisioned, objects_deleted, &deletions, freed);
        Ok(samples)
    }

    fn batch(&self, name: &str, claims: u64) -> Batch {
        Batch::new(self.client, name, CLASS_OF_FILES, self.node, claims)
    }
}

/// Adds the times around one deletion: of the volumes that were provisioned in the meantime, by the time at which each was ready; of the
/// deleted objects; and the seconds until the space is free. Volumes in memory have no space.
fn add_deletion(
    samples: &mut Samples,
    files: u64,
    provisioned: &[(Duration, f64)],
    objects_deleted: Duration,
    deletions: &[DeletionTimes],
    freed: Option<f64>,
) {
    samples.extend("provision_beside_deletion", files, "ms", provisioned.iter().map(|(_, took)| *took));
    for (at, took) in provisioned {
        let is_early = *at <= objects_deleted;
        let row = if is_early { "provision_while_objects_go" } else { "provision_while_space_is_freed" };
        samples.add(row, files, "ms", *took);
    }
    let last = |end: fn(&DeletionTimes) -> Duration| deletions.iter().map(end).max();
    let seconds = |last: Option<Duration>| last.map(|last| last.as_secs_f64());
    samples.extend("claims_gone", files, "s", seconds(last(|deletion| deletion.claim)));
    samples.extend("objects_gone", files, "s", seconds(last(|deletion| deletion.volume)));
    let after_claims = deletions.iter().map(|deletion| milliseconds(deletion.volume_after_claim()));
    samples.extend("object_gone_after_claim", files, "ms", after_claims);
    samples.extend("space_freed", files, "s", freed);
}

async fn create_class(client: &Client) -> Result<()> {
    let classes: Api<StorageClass> = Api::all(client.clone());
    let mut class = StorageClass { metadata: Default::default(), ..objects::read(&classes, CLASS).await? };
    class.metadata.name = Some(CLASS_OF_FILES.to_owned());
    class.parameters.get_or_insert_default().insert("bytesPerInode".to_owned(), BYTES_PER_INODE.to_owned());
    objects::create(&classes, &class).await.map(drop)
}

/// Creates files in every volume of the node.
async fn fill(node: &Node, files: u64, step: &Step) -> Result<()> {
    let volumes = format!("{DATA_DIR}/volumes");
    let listed = node.output(&["ls", &volumes]).await?;
    let directories: Vec<String> =
        listed.split_whitespace().map(|name| format!("{volumes}/{name}")).collect();
    cluster::fill(node, &directories, files, FILL_TIMEOUT, |done| {
        step.note(format!("{files} files in {done} of {} volumes", directories.len()));
    })
    .await
}

async fn until_trash_is_empty(node: &Node, deadline: Instant, step: &Step) -> Result<()> {
    let trash = format!("{DATA_DIR}/trash");
    loop {
        let listed = node.output(&["ls", "-A", &trash]).await?;
        let left = listed.split_whitespace().count();
        if left == 0 {
            return Ok(());
        }
        step.note(format!("{left} deleted volumes still occupy space"));
        anyhow::ensure!(
            Instant::now() < deadline,
            "{left} deleted volumes still occupy space after {FREE_TIMEOUT:?}"
        );
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_phase_is_a_row() {
        let seconds = Duration::from_secs;
        let deletions = [(1, 2), (4, 5)]
            .map(|(claim, volume)| DeletionTimes { claim: seconds(claim), volume: seconds(volume) });
        let provisioned = [(seconds(1), 20.0), (seconds(5), 20.0), (seconds(6), 15.0)];
        let rows = |provisioned: &[(Duration, f64)], freed| {
            let mut samples = Samples::default();
            add_deletion(&mut samples, 7, provisioned, seconds(5), &deletions, freed);
            samples.0.into_iter().map(|row| (row.median(), row.samples.len(), row.name)).collect::<Vec<_>>()
        };
        let expected = [
            (20.0, 3, "provision_beside_deletion"),
            (20.0, 2, "provision_while_objects_go"),
            (15.0, 1, "provision_while_space_is_freed"),
            (4.0, 1, "claims_gone"),
            (5.0, 1, "objects_gone"),
            (1000.0, 2, "object_gone_after_claim"),
            (60.0, 1, "space_freed"),
        ];
        let expected = expected.map(|(median, runs, name)| (median, runs, name.to_owned()));
        assert_eq!(rows(&provisioned, Some(60.0)), expected);
        // Volumes in memory have no space to free.
        assert_eq!(rows(&provisioned[..2], None).len(), 5);
    }
}

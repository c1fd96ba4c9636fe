//! `bench deletion`: deletes claims of volumes with many files concurrently, while other volumes are provisioned.
//!
//! The same is measured with volumes in memory and without an emulated processor. There are no files in them, so only the work of the
//! provisioner and the control plane for each object remains.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use k8s_openapi::api::storage::v1::StorageClass;
use kube::api::PostParams;
use kube::{Api, Client};
use testvm::progress::Step;
use testvm::session::Session;
use testvm_cluster::api_error::api_error;
use testvm_cluster::{Cluster, Node};

use super::batch::{Batch, DeletionTimes};
use super::cluster::{self, CLASS, SharedCluster};
use super::in_memory;
use super::measurement::{Measurements, Row, milliseconds};
use super::outcome::{Args, Outcome};
use super::threshold::{self, Threshold};
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
const LIST_TIMEOUT: Duration = Duration::from_secs(60);

/// The size of a run.
#[derive(Clone, Copy, Debug)]
struct Scale {
    volumes: u64,
    files_each: u64,
    /// Volumes provisioned one after the other while the cluster is idle.
    idle: u64,
}

const FULL: Scale = Scale { volumes: 500, files_each: 2000, idle: 200 };
const QUICK: Scale = Scale { volumes: 50, files_each: 500, idle: 30 };

/// The times measured around one deletion of all volumes.
#[derive(Debug, Default)]
struct Samples {
    /// Milliseconds to provision a volume before the deletion.
    idle: Vec<f64>,
    /// Milliseconds to provision a volume until the PersistentVolumes of the deleted claims are deleted.
    during_deletion: Vec<f64>,
    /// Milliseconds to provision a volume after that, until the space of the deleted volumes is free.
    during_freeing: Vec<f64>,
    deletions: Vec<DeletionTimes>,
    /// Seconds from the request to delete the claims until their space is free. `None` if the volumes are in memory.
    freed: Option<f64>,
}

/// The cluster and the node that are measured.
#[derive(Clone, Copy)]
struct Setup<'a> {
    client: &'a Client,
    node: &'a str,
    /// The node that has the files. `None` if the volumes are in memory.
    disk: Option<&'a Node>,
    scale: Scale,
}

pub(super) async fn run(session: &Session, args: &Args, shared: &mut SharedCluster) -> Result<Outcome> {
    let scale = if args.quick { QUICK } else { FULL };
    let measure = async |setup: Setup<'_>| {
        let what = if setup.disk.is_some() { "volumes with files" } else { "volumes in memory" };
        let step = session.progress.step(format!("delete {what} while others are provisioned"));
        let samples = setup.measure(&step).await?;
        step.done("");
        Ok(samples.rows(setup.scale.files()))
    };
    let on_disk = shared.measured(session, args, "deletion", &[], async |cluster: &Cluster, node: &Node| {
        measure(Setup { client: cluster.client(), node: node.name(), disk: Some(node), scale }).await
    });
    let on_disk = session.until_cancelled(on_disk).await?;
    let without_files = Scale { files_each: 0, ..scale };
    let in_memory = in_memory::measured(session, "deletion-in-memory", async |client, node| {
        measure(Setup { client, node, disk: None, scale: without_files }).await
    });
    let in_memory = session.until_cancelled(in_memory).await?;
    Ok(Outcome::new(vec![on_disk, in_memory], |all| thresholds(all, scale.files()), &[]))
}

impl Setup<'_> {
    async fn measure(self, step: &Step) -> Result<Samples> {
        create_class(self.client).await?;
        step.note(format!("provision {} volumes", self.scale.volumes));
        let doomed = self.batch("doomed", self.scale.volumes);
        doomed.create_and_bind(BIND_TIMEOUT).await?;
        if let Some(disk) = self.disk {
            fill(disk, self.scale.files_each, step).await?;
        }

        let mut samples = Samples::default();
        let idle = self.batch("idle", 0);
        for number in 0..self.scale.idle {
            step.note(format!("volume {} of {} while the cluster is idle", number + 1, self.scale.idle));
            samples.idle.push(milliseconds(idle.provision_one(number).await?));
        }

        let started = Instant::now();
        let deleting = async {
            samples.deletions = doomed.delete().await?;
            let objects_deleted = started.elapsed();
            if let Some(disk) = self.disk {
                until_trash_is_empty(disk, started + FREE_TIMEOUT, step).await?;
                samples.freed = Some(started.elapsed().as_secs_f64());
            }
            Ok::<_, anyhow::Error>(objects_deleted)
        };
        let beside = self.batch("beside", 0);
        let mut provisioned = Vec::new();
        let provisioning = async {
            for number in 0.. {
                let took = beside.provision_one(number).await?;
                provisioned.push((started.elapsed(), took));
            }
            Ok::<(), anyhow::Error>(())
        };
        let objects_deleted = tokio::select! {
            deleted = deleting => deleted?,
            ended = provisioning => {
                ended?;
                anyhow::bail!("provisioning ended while other volumes were being deleted");
            }
        };
        for (at, took) in provisioned {
            let phase = if at <= objects_deleted {
                &mut samples.during_deletion
            } else {
                &mut samples.during_freeing
            };
            phase.push(milliseconds(took));
        }
        Ok(samples)
    }

    fn batch(&self, name: &str, claim_count: u64) -> Batch {
        Batch {
            client: self.client.clone(),
            name: name.to_owned(),
            class: CLASS_OF_FILES.to_owned(),
            node: self.node.to_owned(),
            claim_count,
        }
    }
}

async fn create_class(client: &Client) -> Result<()> {
    let classes: Api<StorageClass> = Api::all(client.clone());
    let model =
        classes.get(CLASS).await.map_err(api_error).with_context(|| format!("read storage class {CLASS}"))?;
    let mut class = StorageClass { metadata: Default::default(), ..model };
    class.metadata.name = Some(CLASS_OF_FILES.to_owned());
    class.parameters.get_or_insert_default().insert("bytesPerInode".to_owned(), BYTES_PER_INODE.to_owned());
    let created = classes.create(&PostParams::default(), &class).await;
    created.map_err(api_error).with_context(|| format!("create storage class {CLASS_OF_FILES}")).map(drop)
}

/// Creates files in every volume of the node.
async fn fill(node: &Node, files: u64, step: &Step) -> Result<()> {
    let volumes = format!("{DATA_DIR}/volumes");
    let listed = node.output(&["ls", &volumes], LIST_TIMEOUT).await?;
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
        let listed = node.output(&["ls", "-A", &trash], LIST_TIMEOUT).await?;
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

impl Scale {
    fn files(self) -> u64 {
        self.volumes * self.files_each
    }
}

impl Samples {
    fn rows(self, files: u64) -> Vec<Row> {
        let beside = [self.during_deletion.as_slice(), &self.during_freeing].concat();
        let last = |end: fn(&DeletionTimes) -> Duration| {
            let last = self.deletions.iter().map(end).max();
            last.map(|last| last.as_secs_f64())
        };
        let after_claims = self.deletions.iter().map(|deletion| milliseconds(deletion.volume_after_claim()));
        let rows = [
            Row::of("provision_idle", files, "ms", self.idle),
            Row::of("provision_beside_deletion", files, "ms", beside),
            Row::of("provision_while_objects_go", files, "ms", self.during_deletion),
            Row::of("provision_while_space_is_freed", files, "ms", self.during_freeing),
            Row::of("claims_gone", files, "s", last(|deletion| deletion.claim)),
            Row::of("objects_gone", files, "s", last(|deletion| deletion.volume)),
            Row::of("object_gone_after_claim", files, "ms", after_claims),
            Row::of("space_freed", files, "s", self.freed),
        ];
        rows.into_iter().flatten().collect()
    }
}

fn thresholds(all: &Measurements, files: u64) -> Vec<Threshold> {
    let slowest = "p99 time to provision a volume during bulk deletion: at most twice the p99 when idle";
    let objects = "time until the PersistentVolumes of all deleted claims are deleted: at most a minute";
    let space = "time until the PersistentVolumes are deleted: at most a fifth of the time until the space of their files is free";
    let control_plane = "time until the PersistentVolumes are deleted, without an emulated processor: at most 1.5 times the time \
                         until the control plane has deleted the claims";
    vec![
        threshold::p99_at_most(
            all,
            slowest,
            ("provision_beside_deletion", files),
            2.0,
            ("provision_idle", files),
        ),
        threshold::no_more(all, objects, ("objects_gone", files), 60.0),
        threshold::at_most(all, space, ("objects_gone", files), 0.2, ("space_freed", files)),
        threshold::at_most(all, control_plane, ("objects_gone", 0), 1.5, ("claims_gone", 0)),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_phase_is_a_row_and_without_files_there_is_no_space_to_free() {
        let seconds = Duration::from_secs;
        let deletions = [(1, 2), (4, 5)]
            .map(|(claim, volume)| DeletionTimes { claim: seconds(claim), volume: seconds(volume) });
        let samples = |freed: Option<f64>| Samples {
            idle: vec![10.0],
            during_deletion: vec![20.0, 20.0],
            during_freeing: freed.map(|_| 15.0).into_iter().collect(),
            deletions: deletions.to_vec(),
            freed,
        };
        let (on_disk, in_memory) = (samples(Some(60.0)).rows(QUICK.files()), samples(None).rows(0));
        let rows: Vec<(&str, f64, u64)> =
            on_disk.iter().map(|row| (row.name.as_str(), row.median, row.runs)).collect();
        let expected = [
            ("provision_idle", 10.0, 1),
            ("provision_beside_deletion", 20.0, 3),
            ("provision_while_objects_go", 20.0, 2),
            ("provision_while_space_is_freed", 15.0, 1),
            ("claims_gone", 4.0, 1),
            ("objects_gone", 5.0, 1),
            ("object_gone_after_claim", 1000.0, 2),
            ("space_freed", 60.0, 1),
        ];
        assert_eq!(rows, expected);
        let missing = |row: &&Row| in_memory.iter().all(|other| other.name != row.name);
        let missing: Vec<&str> = on_disk.iter().filter(missing).map(|row| row.name.as_str()).collect();
        assert_eq!(missing, ["provision_while_space_is_freed", "space_freed"]);
        let all = Measurements::of([on_disk, in_memory].concat());
        assert!(thresholds(&all, QUICK.files()).iter().all(|threshold| threshold.is_met == Some(true)));
    }
}

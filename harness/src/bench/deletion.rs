//! `bench deletion`: claims of volumes with many files go at once, while others are made.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use futures::{StreamExt, TryStreamExt};
use k8s_openapi::api::storage::v1::StorageClass;
use kube::api::PostParams;
use kube::{Api, Client};

use super::batch::Batch;
use super::claim::{self, Claim};
use super::cluster::{self, CLASS};
use super::measurement::{Measurements, Row, milliseconds};
use super::{Args, Outcome};
use crate::cluster::api_error::told;
use crate::cluster::{Cluster, DATA_DIR, Node};
use crate::progress::Step;
use crate::session::Session;

/// As the class of the manifests, with room for many files in little space.
const CLASS_OF_FILES: &str = "files";
/// The least there is: a volume of 1 MiB may have 2,048 of them, one of which is its directory.
const BYTES_PER_INODE: &str = "512";

const BIND_TIME: Duration = Duration::from_secs(900);
/// As many as the node has processors.
const FILLERS: usize = 2;
/// For the files of a volume.
const FILL_TIME: Duration = Duration::from_secs(60);
/// Until what was deleted takes no room any more.
const FREE_TIME: Duration = Duration::from_secs(3600);
/// Of the trash nobody tells outside the node.
const GLANCE: Duration = Duration::from_millis(500);
const GLANCE_TIME: Duration = Duration::from_secs(60);

/// How much is measured.
#[derive(Clone, Copy, Debug)]
struct Extent {
    volumes: u64,
    files_each: u64,
    /// Volumes made, one after the other, while nothing else is done.
    idle: u64,
}

const FULL: Extent = Extent { volumes: 500, files_each: 2000, idle: 200 };
const QUICK: Extent = Extent { volumes: 50, files_each: 500, idle: 30 };

/// What one deletion of all volumes took.
#[derive(Debug, Default)]
struct Samples {
    /// How long a volume took to be made, in milliseconds: before,
    idle: Vec<f64>,
    /// while the objects of those that were deleted went,
    going: Vec<f64>,
    /// and after that, while their space was being freed.
    freeing: Vec<f64>,
    /// From the request to delete the claims, in seconds.
    gone: f64,
    freed: f64,
}

pub(super) async fn run(session: &Session, args: &Args) -> Result<Outcome> {
    let extent = if args.quick { QUICK } else { FULL };
    let measure = async |cluster: &Cluster, node: &Node| {
        let step = session.progress.step("delete volumes with files while others are made");
        let samples = measure(cluster.client(), node, extent, &step).await?;
        step.done("");
        Ok(samples.rows(extent))
    };
    let measured = cluster::measured(session, args, "deletion", &[], measure);
    let part = session.until_cancelled(measured).await?;
    let measurements = Measurements { parts: vec![part] };
    Ok(Outcome {
        name: "deletion",
        claims: claims(&measurements, extent.files()),
        plots: Vec::new(),
        measurements,
    })
}

async fn measure(client: &Client, node: &Node, extent: Extent, step: &Step) -> Result<Samples> {
    make_class(client).await?;
    let batch = |name: &str, claims| Batch {
        client: client.clone(),
        name: name.to_owned(),
        class: CLASS_OF_FILES.to_owned(),
        node: node.name().to_owned(),
        claims,
    };
    step.note(format!("make {} volumes", extent.volumes));
    let doomed = batch("doomed", extent.volumes);
    doomed.bind(BIND_TIME).await?;
    fill(node, extent.files_each, step).await?;

    let mut samples = Samples::default();
    let idle = batch("idle", 0);
    for number in 0..extent.idle {
        step.note(format!("volume {} of {} while nothing else is done", number + 1, extent.idle));
        samples.idle.push(milliseconds(idle.provision(number).await?));
    }

    let began = Instant::now();
    let deleting = async {
        doomed.remove().await?;
        let gone = began.elapsed();
        until_trash_is_empty(node, began + FREE_TIME, step).await?;
        Ok::<_, anyhow::Error>((gone, began.elapsed()))
    };
    let beside = batch("beside", 0);
    let mut made = Vec::new();
    let making = async {
        for number in 0.. {
            let took = beside.provision(number).await?;
            made.push((began.elapsed(), took));
        }
        Ok::<(), anyhow::Error>(())
    };
    let (gone, freed) = tokio::select! {
        deleted = deleting => deleted?,
        ended = making => {
            ended?;
            anyhow::bail!("volumes are no longer made while others go");
        }
    };
    for (at, took) in made {
        let phase = if at <= gone { &mut samples.going } else { &mut samples.freeing };
        phase.push(milliseconds(took));
    }
    samples.gone = gone.as_secs_f64();
    samples.freed = freed.as_secs_f64();
    Ok(samples)
}

async fn make_class(client: &Client) -> Result<()> {
    let classes: Api<StorageClass> = Api::all(client.clone());
    let model =
        classes.get(CLASS).await.map_err(told).with_context(|| format!("read storage class {CLASS}"))?;
    let mut class = StorageClass { metadata: Default::default(), ..model };
    class.metadata.name = Some(CLASS_OF_FILES.to_owned());
    class.parameters.get_or_insert_default().insert("bytesPerInode".to_owned(), BYTES_PER_INODE.to_owned());
    let made = classes.create(&PostParams::default(), &class).await;
    made.map_err(told).with_context(|| format!("create storage class {CLASS_OF_FILES}")).map(drop)
}

/// Puts files into every volume of the node.
async fn fill(node: &Node, files: u64, step: &Step) -> Result<()> {
    let volumes = format!("{DATA_DIR}/volumes");
    let listed = node.output(&["ls", &volumes], GLANCE_TIME).await?;
    let directories: Vec<String> =
        listed.split_whitespace().map(|name| format!("{volumes}/{name}")).collect();
    let (all, files) = (directories.len(), files.to_string());
    let filled = futures::stream::iter(&directories).map(async |directory| {
        let script = "cd \"$1\" && touch $(seq \"$2\")";
        let filled = node.output(&["sh", "-c", script, "sh", directory, &files], FILL_TIME).await;
        filled.with_context(|| format!("fill {directory}"))
    });
    let mut filled = filled.buffer_unordered(FILLERS);
    let mut done = 0;
    while filled.try_next().await?.is_some() {
        done += 1;
        step.note(format!("{files} files in {done} of {all} volumes"));
    }
    Ok(())
}

async fn until_trash_is_empty(node: &Node, deadline: Instant, step: &Step) -> Result<()> {
    let trash = format!("{DATA_DIR}/trash");
    loop {
        let listed = node.output(&["ls", "-A", &trash], GLANCE_TIME).await?;
        let left = listed.split_whitespace().count();
        if left == 0 {
            return Ok(());
        }
        step.note(format!("{left} volumes take room still"));
        anyhow::ensure!(Instant::now() < deadline, "{left} volumes take room after {FREE_TIME:?}");
        tokio::time::sleep(GLANCE).await;
    }
}

impl Extent {
    fn files(self) -> u64 {
        self.volumes * self.files_each
    }
}

impl Samples {
    fn rows(self, extent: Extent) -> Vec<Row> {
        let n = extent.files();
        let beside = [self.going.as_slice(), &self.freeing].concat();
        let rows = [
            Row::of("provision_idle", n, "ms", self.idle),
            Row::of("provision_beside_deletion", n, "ms", beside),
            Row::of("provision_while_objects_go", n, "ms", self.going),
            Row::of("provision_while_space_is_freed", n, "ms", self.freeing),
            Row::of("objects_gone", n, "s", vec![self.gone]),
            Row::of("space_freed", n, "s", vec![self.freed]),
        ];
        rows.into_iter().flatten().collect()
    }
}

fn claims(all: &Measurements, files: u64) -> Vec<Claim> {
    let slowest = "the slowest hundredth of volumes made while others go takes at most twice as long as else";
    let objects = "their PersistentVolumes are gone within a minute";
    let space =
        "nobody waits for their files: PersistentVolumes are gone in a fifth of the time until space is free";
    vec![
        claim::p99_at_most(
            all,
            slowest,
            ("provision_beside_deletion", files),
            2.0,
            ("provision_idle", files),
        ),
        claim::no_more(all, objects, ("objects_gone", files), 60.0),
        claim::at_most(all, space, ("objects_gone", files), 0.2, ("space_freed", files)),
    ]
}

#[cfg(test)]
mod tests {
    use super::super::measurement::{Machine, Part};
    use super::*;

    #[test]
    fn volumes_made_beside_others_that_go_are_one_row_and_each_phase_another() {
        let samples = Samples {
            idle: vec![10.0],
            going: vec![20.0, 20.0],
            freeing: vec![15.0],
            gone: 2.0,
            freed: 60.0,
        };
        let rows = samples.rows(QUICK);
        let runs: Vec<(&str, u64)> = rows.iter().map(|row| (row.name.as_str(), row.runs)).collect();
        assert_eq!(
            runs,
            [
                ("provision_idle", 1),
                ("provision_beside_deletion", 3),
                ("provision_while_objects_go", 2),
                ("provision_while_space_is_freed", 1),
                ("objects_gone", 1),
                ("space_freed", 1),
            ]
        );
        let machine =
            Machine { cpu: String::new(), cpus: 1, kernel: String::new(), file_system: String::new() };
        let all = Measurements { parts: vec![Part { place: String::new(), machine, rows }] };
        assert!(claims(&all, QUICK.files()).iter().all(|claim| claim.holds == Some(true)));
    }
}

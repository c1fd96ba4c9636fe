//! The measuring of emptyDirs with many files by the kubelet, which repeats it about once a minute.
//!
//! The directory of each kubelet is on the data disk. A kubelet walks over the files of an emptyDir if the pod has no user
//! namespace, and reads the project quota if it has one. For that, the stock kubelet runs `xfs_quota`.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};
use testvm::progress::Step;
use testvm::session::Session;
use testvm_cluster::{KUBELET_ROOT, Node};
use tokio::time::sleep;

use super::super::args::Args;
use super::super::cluster::{self, NAMESPACE};
use super::super::measurement::{Environment, Samples};
use super::super::metrics;
use super::super::threshold::{Requirement, at_most};
use super::variant::Variant;
use crate::test_env::environment::TestEnv;
use crate::test_env::pods;
use crate::test_env::runtime_classes::{self, OWN_USERS, with_user_namespace};
use crate::test_env::workload::holder_of;

const STATS: &str = "kubelet_stats_ms";
const STATS_BY_QUOTA: &str = "kubelet_stats_ms_by_quota";

const DIRECTORIES_PER_POD: u64 = 10;
/// The kubelet assigns a project only to an emptyDir with a size limit.
const SIZE_LIMIT: &str = "64Mi";
/// Limits the creation of one emptyDir's files.
const FILL_TIMEOUT: Duration = Duration::from_secs(120);
/// Nothing announces that the kubelet has measured a volume.
const POLL_INTERVAL: Duration = Duration::from_secs(2);
const MEASURE_TIMEOUT: Duration = Duration::from_secs(1800);

const HISTOGRAM: &str = "kubelet_volume_metric_collection_duration_seconds";
/// The upper bound, in seconds, of the histogram's bucket for directories with few files, such as those of logs. The kubelet
/// walks over them more often than over emptyDirs. A walk over 10,000 files takes longer.
const SHORT: f64 = 0.01;

/// Files in each emptyDir.
const FILES: u64 = 10_000;
/// The number of times that each emptyDir is measured, on average.
const ROUNDS: u64 = 2;

/// The way in which the kubelet measures an emptyDir, as a label of its histogram.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Source {
    Walk,
    Quota,
}

/// A series of the kubelet's histogram.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Durations {
    seconds: f64,
    count: f64,
    /// The number of walks that took at most [`SHORT`]. The kubelet knows the quotas of no other directories than emptyDirs.
    short: f64,
}

/// Measures the kubelets on a cluster each, one after the other.
pub(super) async fn run(session: &Session, args: &Args) -> Result<Vec<Environment>> {
    let pods = args.size(10, 1);
    let mut parts = Vec::new();
    for variant in [Variant::Stock, Variant::Patched] {
        let name = format!("node-stats-{variant}");
        let options = variant.options().with_kubelet_on_data_disk();
        let measured = cluster::measured(session, args, &name, options, &[], async |cluster, node| {
            let env = TestEnv::in_namespace(session, cluster, NAMESPACE)?;
            runtime_classes::create(&env, OWN_USERS, OWN_USERS).await?;
            let mut samples = Samples::default();
            for (source, row) in sources(variant) {
                let title = format!("{variant}: emptyDirs are measured by a {}", source.noun());
                let step = session.progress.step(title);
                let milliseconds = measure(&env, node, source, pods, &step).await?;
                samples.add(variant.row(row), FILES, "ms", milliseconds);
                step.done("");
            }
            Ok(samples)
        });
        let mut part = measured.await.with_context(|| name.clone())?;
        part.place = format!("{}, {variant}, kubelet on the data disk", part.place);
        parts.push(part);
    }
    Ok(parts)
}

pub(super) fn requirements() -> Vec<Requirement> {
    let text =
        "measuring an emptyDir with {n} files by a quota in the patched kubelet: at most the time of a walk";
    vec![at_most(text, &Variant::Patched.row(STATS), 1.0, &Variant::Stock.row(STATS))]
}

/// Returns the ways that are measured, with their rows. The walk is last, because it takes the processors' time.
fn sources(variant: Variant) -> Vec<(Source, &'static str)> {
    match variant {
        Variant::Patched => vec![(Source::Quota, STATS)],
        Variant::Stock | Variant::DropIn => vec![(Source::Quota, STATS_BY_QUOTA), (Source::Walk, STATS)],
    }
}

/// Creates pods with emptyDirs and files in them, and returns the milliseconds that the kubelet takes to measure one of them.
async fn measure(env: &TestEnv<'_>, node: &Node, source: Source, pods: u64, step: &Step) -> Result<f64> {
    let names: Vec<String> = (0..pods).map(|number| format!("{}-{number}", source.noun())).collect();
    for name in &names {
        step.note(format!("start pod {name}"));
        pods::create(env, &pod(name, source)?).await?;
    }
    let directories = pods * DIRECTORIES_PER_POD;
    fill(node, source, directories, step).await?;
    step.note(format!("the kubelet measures {directories} emptyDirs"));
    let deadline = Instant::now() + MEASURE_TIMEOUT;
    until_reported(node, &names, directories, deadline).await?;
    let before = Durations::read(node, source).await?;
    loop {
        let since = Durations::read(node, source).await?.since(&before)?;
        let measured = since.measured();
        if measured >= (ROUNDS * directories) as f64 {
            return Ok(since.milliseconds());
        }
        anyhow::ensure!(Instant::now() < deadline, "the kubelet has measured only {measured} emptyDirs");
        sleep(POLL_INTERVAL).await;
    }
}

/// Returns a pod that has [`DIRECTORIES_PER_POD`] emptyDirs and no other volume.
fn pod(name: &str, source: Source) -> Result<Pod> {
    let mut pod = holder_of(name, &[])?;
    let spec = pod.spec.get_or_insert_default();
    spec.automount_service_account_token = Some(false);
    let directory = |number| json!({"name": volume(source, number), "emptyDir": {"sizeLimit": SIZE_LIMIT}});
    let volumes: Vec<Value> = (0..DIRECTORIES_PER_POD).map(directory).collect();
    spec.volumes =
        Some(serde_json::from_value(json!(volumes)).context("an emptyDir is not what its type says")?);
    // The kubelet leaves out volumes that no container mounts.
    let mount = |number| json!({"name": volume(source, number), "mountPath": format!("/{number}")});
    let mounts: Vec<Value> = (0..DIRECTORIES_PER_POD).map(mount).collect();
    for container in &mut spec.containers {
        container.volume_mounts =
            Some(serde_json::from_value(json!(mounts)).context("a mount is not what its type says")?);
    }
    Ok(match source {
        Source::Walk => pod,
        Source::Quota => with_user_namespace(pod),
    })
}

fn volume(source: Source, number: u64) -> String {
    format!("{}-{number}", source.noun())
}

/// Creates the files in the emptyDirs of all pods of one kind, from the node.
async fn fill(node: &Node, source: Source, count: u64, step: &Step) -> Result<()> {
    let list = format!("ls -d {KUBELET_ROOT}/pods/*/volumes/kubernetes.io~empty-dir/{}-*", source.noun());
    let listed = node.output(&["sh", "-c", &list]).await?;
    let directories: Vec<String> = listed.lines().map(str::to_owned).collect();
    anyhow::ensure!(
        directories.len() as u64 == count,
        "the node has {} emptyDirs instead of {count}",
        directories.len()
    );
    cluster::fill(node, &directories, FILES, FILL_TIMEOUT, |done| {
        step.note(format!("{FILES} files in {done} of {count} emptyDirs"));
    })
    .await
}

/// Waits until the kubelet reports the files of all emptyDirs of the pods.
async fn until_reported(node: &Node, pods: &[String], all: u64, deadline: Instant) -> Result<()> {
    loop {
        let summary: Value = serde_json::from_str(&node.kubelet_page("/stats/summary").await?)
            .context("parse the kubelet's statistics")?;
        let reported = inodes(&summary, pods).into_values().filter(|inodes| *inodes >= FILES).count();
        if reported as u64 == all {
            return Ok(());
        }
        anyhow::ensure!(
            Instant::now() < deadline,
            "the kubelet reports the files of {reported} of {all} emptyDirs"
        );
        sleep(POLL_INTERVAL).await;
    }
}

/// Returns the inodes of each volume of the pods, by the names of pod and volume, as the kubelet reports them.
fn inodes(summary: &Value, pods: &[String]) -> BTreeMap<(String, String), u64> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let mut inodes = BTreeMap::new();
    for pod in summary["pods"].as_array().into_iter().flatten() {
        let name = text(&pod["podRef"]["name"]);
        if pod["podRef"]["namespace"] != NAMESPACE || !pods.contains(&name) {
            continue;
        }
        for volume in pod["volume"].as_array().into_iter().flatten() {
            let used = volume["inodesUsed"].as_u64().unwrap_or_default();
            inodes.insert((name.clone(), text(&volume["name"])), used);
        }
    }
    inodes
}

impl Source {
    fn noun(self) -> &'static str {
        match self {
            Source::Walk => "walk",
            Source::Quota => "quota",
        }
    }

    fn label(self) -> &'static str {
        match self {
            Source::Walk => "du",
            Source::Quota => "fsquota",
        }
    }
}

impl Durations {
    async fn read(node: &Node, source: Source) -> Result<Durations> {
        Durations::parse(&node.kubelet_page("/metrics").await?, source)
    }

    fn parse(page: &str, source: Source) -> Result<Durations> {
        let find = |figure: &str, bucket: Option<&str>| {
            let mut series = metrics::series(page, format!("{HISTOGRAM}_{figure}"));
            let of_source = series.find(|(labels, _)| {
                labels.get("metric_source") == Some(source.label()) && labels.get("le") == bucket
            });
            of_source.map(|(_, value)| value)
        };
        // A kubelet that has not measured anything yet has no series.
        let [seconds, count] = ["sum", "count"].map(|figure| find(figure, None).unwrap_or_default());
        let short = match source {
            Source::Walk if count > 0.0 => find("bucket", Some(&SHORT.to_string()))
                .with_context(|| format!("{HISTOGRAM} has no bucket of {SHORT} s"))?,
            Source::Walk | Source::Quota => 0.0,
        };
        let durations = Durations { seconds, count, short };
        let is_number = !(durations.seconds + durations.count + short).is_nan();
        anyhow::ensure!(is_number, "a value of {HISTOGRAM} is no number");
        Ok(durations)
    }

    fn since(&self, before: &Durations) -> Result<Durations> {
        let is_older = self.count < before.count || self.short < before.short;
        anyhow::ensure!(!is_older, "the kubelet was restarted");
        Ok(Durations {
            seconds: self.seconds - before.seconds,
            count: self.count - before.count,
            short: self.short - before.short,
        })
    }

    /// Returns how many emptyDirs with files were measured.
    fn measured(&self) -> f64 {
        self.count - self.short
    }

    /// Returns the mean time for one emptyDir with files. For walks it is a lower bound, because each of the many short walks counts
    /// with [`SHORT`].
    fn milliseconds(&self) -> f64 {
        (self.seconds - self.short * SHORT) / self.measured() * 1e3
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: &str = r#"# TYPE kubelet_volume_metric_collection_duration_seconds histogram
kubelet_volume_metric_collection_duration_seconds_bucket{metric_source="du",le="0.01"} 30
kubelet_volume_metric_collection_duration_seconds_bucket{metric_source="du",le="0.1"} 31
kubelet_volume_metric_collection_duration_seconds_sum{metric_source="du"} 10.3
kubelet_volume_metric_collection_duration_seconds_count{metric_source="du"} 50
kubelet_volume_metric_collection_duration_seconds_bucket{metric_source="fsquota",le="0.01"} 4
kubelet_volume_metric_collection_duration_seconds_sum{metric_source="fsquota"} 0.02
kubelet_volume_metric_collection_duration_seconds_count{metric_source="fsquota"} 4
kubelet_volume_metric_collection_duration_seconds_sum{metric_source="statfs"} 99
"#;

    #[test]
    fn walk_time_excludes_small_directories() {
        let times = |source| {
            let durations = Durations::parse(PAGE, source).unwrap();
            (durations.measured(), durations.milliseconds().round())
        };
        assert_eq!((times(Source::Walk), times(Source::Quota)), ((20.0, 500.0), (4.0, 5.0)));
        assert_eq!(Durations::parse("", Source::Walk).unwrap(), Durations::default());
        assert!(Durations::parse(&PAGE.replace("} 10.3", "} much"), Source::Walk).is_err());
        let other_buckets = PAGE.replace("0.01", "0.02");
        assert!(Durations::parse(&other_buckets, Source::Walk).is_err());
        assert!(Durations::parse(&other_buckets, Source::Quota).is_ok());
    }

    /// After a restart the counters are lower than those measured before.
    #[test]
    fn counters_of_restarted_kubelet_are_refused() {
        let before = Durations::parse(PAGE, Source::Walk).unwrap();
        assert_eq!(before.since(&before).unwrap(), Durations::default());
        assert!(Durations::default().since(&before).is_err());
    }

    /// Only the selected pods in the namespace of the benchmarks count.
    #[test]
    fn only_volumes_of_benchmarks_are_read() {
        let pod = |namespace: &str, name: &str, inodes: u64| {
            json!({
                "podRef": {"namespace": namespace, "name": name},
                "volume": [{"name": "walk-0", "inodesUsed": inodes}, {"name": "walk-1"}],
            })
        };
        let summary = json!({"pods": [
            pod(NAMESPACE, "walk-0", 10), pod(NAMESPACE, "quota-0", 20), pod("default", "walk-0", 30),
            {"podRef": {"namespace": NAMESPACE, "name": "without"}},
        ]});
        let key = |volume: &str| ("walk-0".to_owned(), volume.to_owned());
        let expected = BTreeMap::from([(key("walk-0"), 10), (key("walk-1"), 0)]);
        assert_eq!(inodes(&summary, &["walk-0".to_owned()]), expected);
    }

    /// Each of its emptyDirs has a size limit.
    #[test]
    fn pod_with_quotas_has_user_namespace() {
        let spec = |source| pod("pod", source).unwrap().spec.unwrap();
        assert_eq!((spec(Source::Walk).host_users, spec(Source::Quota).host_users), (None, Some(false)));
        let volumes = spec(Source::Quota).volumes.unwrap();
        assert_eq!(volumes.len() as u64, DIRECTORIES_PER_POD);
        let limit = |volume: &k8s_openapi::api::core::v1::Volume| volume.empty_dir.clone()?.size_limit;
        assert!(volumes.iter().all(|volume| limit(volume).is_some_and(|limit| limit.0 == SIZE_LIMIT)));
    }

    #[test]
    fn container_mounts_each_emptydir() {
        let spec = pod("pod", Source::Walk).unwrap().spec.unwrap();
        let volumes: Vec<String> = spec.volumes.unwrap().into_iter().map(|volume| volume.name).collect();
        let mounts = spec.containers.into_iter().flat_map(|container| container.volume_mounts.unwrap());
        assert_eq!(mounts.map(|mount| mount.name).collect::<Vec<_>>(), volumes);
    }
}

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

use super::super::cluster::{self, NAMESPACE};
use super::super::measurement::{Environment, Measurements, Row};
use super::super::outcome::Args;
use super::super::threshold::{self, Threshold};
use super::variant::Variant;
use crate::test_env::environment::TestEnv;
use crate::test_env::pods;
use crate::test_env::user_namespaces::{create_runtime_class, with_user_namespace};
use crate::test_env::workload::holder_of;

const STATS: &str = "kubelet_stats_ms";
const STATS_BY_QUOTA: &str = "kubelet_stats_ms_by_quota";

const DIRECTORIES_PER_POD: u64 = 10;
/// The kubelet assigns a project only to an emptyDir with a size limit.
const SIZE_LIMIT: &str = "64Mi";
/// Limits the creation of one emptyDir's files.
const FILL_TIMEOUT: Duration = Duration::from_secs(120);
const LIST_TIMEOUT: Duration = Duration::from_secs(60);
/// Nothing announces that the kubelet has measured a volume.
const POLL_INTERVAL: Duration = Duration::from_secs(2);
const MEASURE_TIMEOUT: Duration = Duration::from_secs(1800);

const HISTOGRAM: &str = "kubelet_volume_metric_collection_duration_seconds";
/// The upper bound, in seconds, of the histogram's bucket for directories with few files, such as those of logs. The kubelet
/// walks over them more often than over emptyDirs. A walk over 10,000 files takes longer.
const SHORT: f64 = 0.01;

/// The size of a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Scale {
    /// Pods with [`DIRECTORIES_PER_POD`] emptyDirs each.
    pods: u64,
    /// Files in each emptyDir.
    files: u64,
    /// The number of times that each emptyDir is measured, on average.
    rounds: u64,
}

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
    count: u64,
    /// The number of those that took at most [`SHORT`].
    short: u64,
    /// A lower bound of the seconds of all others: each took longer than the lower edge of its bucket.
    long_seconds: f64,
}

impl Scale {
    pub(super) fn of(args: &Args) -> Scale {
        Scale { pods: if args.quick { 1 } else { 10 }, files: 10_000, rounds: 2 }
    }

    fn directories(self) -> u64 {
        self.pods * DIRECTORIES_PER_POD
    }
}

/// Measures the kubelets on a cluster each, one after the other.
pub(super) async fn run(session: &Session, args: &Args, scale: Scale) -> Result<Vec<Environment>> {
    let mut parts = Vec::new();
    for variant in [Variant::Stock, Variant::Patched] {
        let name = format!("node-stats-{variant}");
        let options = variant.options().with_kubelet_on_data_disk();
        let measured = cluster::measured(session, args, &name, options, &[], async |cluster, node| {
            let env = TestEnv::in_namespace(session, cluster, NAMESPACE)?;
            create_runtime_class(&env).await?;
            let mut rows = Vec::new();
            for (source, row) in sources(variant) {
                let title = format!("{variant}: emptyDirs are measured by a {}", source.noun());
                let step = session.progress.step(title);
                let milliseconds = measure(&env, node, source, scale, &step).await?;
                rows.extend(Row::of(&variant.row(row), scale.files, "ms", [milliseconds]));
                step.done("");
            }
            Ok(rows)
        });
        let mut part = session.until_cancelled(measured).await.with_context(|| name.clone())?;
        part.place = format!("{}, {variant}, kubelet on the data disk", part.place);
        parts.push(part);
    }
    Ok(parts)
}

/// Returns the ways that are measured, with their rows. The walk is last, because it takes the processors' time.
fn sources(variant: Variant) -> Vec<(Source, &'static str)> {
    match variant {
        Variant::Patched => vec![(Source::Quota, STATS)],
        Variant::Stock | Variant::DropIn => vec![(Source::Quota, STATS_BY_QUOTA), (Source::Walk, STATS)],
    }
}

/// Creates pods with emptyDirs and files in them, and returns the milliseconds that the kubelet takes to measure one of them.
async fn measure(env: &TestEnv<'_>, node: &Node, source: Source, scale: Scale, step: &Step) -> Result<f64> {
    let names: Vec<String> = (0..scale.pods).map(|number| format!("{}-{number}", source.noun())).collect();
    for name in &names {
        step.note(format!("start pod {name}"));
        pods::create(env, &pod(name, source)?).await?;
    }
    fill(node, source, scale, step).await?;
    step.note(format!("the kubelet measures {} emptyDirs", scale.directories()));
    let deadline = Instant::now() + MEASURE_TIMEOUT;
    until_reported(node, &names, scale, deadline).await?;
    let before = Durations::read(node, source).await?;
    loop {
        let since = Durations::read(node, source).await?.since(&before)?;
        let measured = since.measured(source);
        if measured >= scale.rounds * scale.directories() {
            return Ok(since.milliseconds(source));
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
async fn fill(node: &Node, source: Source, scale: Scale, step: &Step) -> Result<()> {
    let list = format!("ls -d {KUBELET_ROOT}/pods/*/volumes/kubernetes.io~empty-dir/{}-*", source.noun());
    let listed = node.output(&["sh", "-c", &list], LIST_TIMEOUT).await?;
    let directories: Vec<String> = listed.lines().map(str::to_owned).collect();
    anyhow::ensure!(
        directories.len() as u64 == scale.directories(),
        "the node has {} emptyDirs instead of {}",
        directories.len(),
        scale.directories()
    );
    cluster::fill(node, &directories, scale.files, FILL_TIMEOUT, |done| {
        step.note(format!("{} files in {done} of {} emptyDirs", scale.files, directories.len()));
    })
    .await
}

/// Waits until the kubelet reports the files of all emptyDirs of the pods.
async fn until_reported(node: &Node, pods: &[String], scale: Scale, deadline: Instant) -> Result<()> {
    loop {
        let summary: Value = serde_json::from_str(&node.kubelet_page("/stats/summary").await?)
            .context("parse the kubelet's statistics")?;
        let reported = inodes(&summary, pods).into_values().filter(|inodes| *inodes >= scale.files).count();
        if reported as u64 == scale.directories() {
            return Ok(());
        }
        let all = scale.directories();
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
        let label = format!("metric_source=\"{}\"", source.label());
        // The buckets are cumulative, and in ascending order.
        let (mut edge, mut below) = (0.0, 0);
        let mut durations = Durations::default();
        for line in page.lines() {
            let Some((series, value)) = line.strip_prefix(HISTOGRAM).and_then(|rest| rest.split_once("} "))
            else {
                continue;
            };
            let Some((figure, labels)) = series.split_once('{') else { continue };
            let has = |label: &str| labels.split(',').any(|of_series| of_series == label);
            if !has(&label) {
                continue;
            }
            let count = || value.parse::<u64>().with_context(|| format!("read {line}"));
            match figure {
                "_sum" => durations.seconds = value.parse().with_context(|| format!("read {line}"))?,
                "_count" => durations.count = count()?,
                "_bucket" => {
                    let (upper, up_to) =
                        (upper_edge(labels).with_context(|| format!("read {line}"))?, count()?);
                    if upper <= SHORT {
                        durations.short = up_to;
                    } else {
                        durations.long_seconds += edge * up_to.saturating_sub(below) as f64;
                    }
                    (edge, below) = (upper, up_to);
                }
                _ => {}
            }
        }
        Ok(durations)
    }

    fn since(&self, before: &Durations) -> Result<Durations> {
        let restarted = "the kubelet was restarted";
        Ok(Durations {
            seconds: self.seconds - before.seconds,
            count: self.count.checked_sub(before.count).context(restarted)?,
            short: self.short.checked_sub(before.short).context(restarted)?,
            long_seconds: self.long_seconds - before.long_seconds,
        })
    }

    /// Returns how many emptyDirs with files were measured. The kubelet knows the quotas of no other directories.
    fn measured(&self, source: Source) -> u64 {
        match source {
            Source::Walk => self.count.saturating_sub(self.short),
            Source::Quota => self.count,
        }
    }

    /// Returns the mean time for one emptyDir with files. For walks it is a lower bound, because the histogram does not
    /// separate them from the many short ones.
    fn milliseconds(&self, source: Source) -> f64 {
        let seconds = match source {
            Source::Walk => self.long_seconds,
            Source::Quota => self.seconds,
        };
        seconds / self.measured(source) as f64 * 1e3
    }
}

/// Returns the upper edge, in seconds, of the bucket with these labels.
fn upper_edge(labels: &str) -> Option<f64> {
    labels.split(',').find_map(|label| label.strip_prefix("le=\"")?.strip_suffix('"')?.parse().ok())
}

pub(super) fn thresholds(all: &Measurements, scale: Scale) -> Vec<Threshold> {
    let n = scale.files;
    let text = format!(
        "measuring an emptyDir with {n} files by a quota in the patched kubelet: at most the time of a walk"
    );
    let (quota, walk) = (Variant::Patched.row(STATS), Variant::Stock.row(STATS));
    vec![threshold::at_most(all, &text, (&quota, n), 1.0, (&walk, n))]
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: &str = r#"# TYPE kubelet_volume_metric_collection_duration_seconds histogram
kubelet_volume_metric_collection_duration_seconds_bucket{metric_source="du",le="0.01"} 30
kubelet_volume_metric_collection_duration_seconds_bucket{metric_source="du",le="0.1"} 31
kubelet_volume_metric_collection_duration_seconds_bucket{metric_source="du",le="+Inf"} 50
kubelet_volume_metric_collection_duration_seconds_sum{metric_source="du"} 10.3
kubelet_volume_metric_collection_duration_seconds_count{metric_source="du"} 50
kubelet_volume_metric_collection_duration_seconds_bucket{metric_source="fsquota",le="0.01"} 4
kubelet_volume_metric_collection_duration_seconds_sum{metric_source="fsquota"} 0.02
kubelet_volume_metric_collection_duration_seconds_count{metric_source="fsquota"} 4
kubelet_volume_metric_collection_duration_seconds_sum{metric_source="statfs"} 99
"#;

    #[test]
    fn the_time_of_a_walk_is_without_directories_of_few_files() {
        let walks = Durations::parse(PAGE, Source::Walk).unwrap();
        assert_eq!(
            walks,
            Durations { seconds: 10.3, count: 50, short: 30, long_seconds: walks.long_seconds }
        );
        assert_eq!(walks.measured(Source::Walk), 20);
        // One walk took more than 0.01 s, and 19 more than 0.1 s.
        assert!((walks.milliseconds(Source::Walk) - 95.5).abs() < 1e-6);
        let quotas = Durations::parse(PAGE, Source::Quota).unwrap();
        assert_eq!(quotas.measured(Source::Quota), 4);
        assert!((quotas.milliseconds(Source::Quota) - 5.0).abs() < 1e-6);
        assert_eq!(Durations::parse("", Source::Walk).unwrap(), Durations::default());
        assert!(Durations::parse(&PAGE.replace("} 10.3", "} much"), Source::Walk).is_err());
    }

    #[test]
    fn measurements_before_a_restart_of_the_kubelet_are_not_subtracted() {
        let before = Durations::parse(PAGE, Source::Walk).unwrap();
        assert_eq!(before.since(&before).unwrap(), Durations::default());
        assert!(Durations::default().since(&before).is_err());
    }

    #[test]
    fn only_volumes_of_the_pods_in_the_namespace_of_benchmarks_are_read() {
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

    #[test]
    fn a_pod_whose_emptydirs_have_quotas_has_a_user_namespace_and_size_limits() {
        let spec = |source| pod("pod", source).unwrap().spec.unwrap();
        assert_eq!((spec(Source::Walk).host_users, spec(Source::Quota).host_users), (None, Some(false)));
        let volumes = spec(Source::Quota).volumes.unwrap();
        assert_eq!(volumes.len() as u64, DIRECTORIES_PER_POD);
        let limit = |volume: &k8s_openapi::api::core::v1::Volume| volume.empty_dir.clone()?.size_limit;
        assert!(volumes.iter().all(|volume| limit(volume).is_some_and(|limit| limit.0 == SIZE_LIMIT)));
    }

    #[test]
    fn a_container_mounts_each_emptydir_of_its_pod() {
        let spec = pod("pod", Source::Walk).unwrap().spec.unwrap();
        let volumes: Vec<String> = spec.volumes.unwrap().into_iter().map(|volume| volume.name).collect();
        let mounts = spec.containers.into_iter().flat_map(|container| container.volume_mounts.unwrap());
        assert_eq!(mounts.map(|mount| mount.name).collect::<Vec<_>>(), volumes);
    }

    #[test]
    fn the_threshold_compares_the_quota_with_the_walk() {
        let scale = Scale { pods: 1, files: 10, rounds: 1 };
        let row = |variant: Variant, value| Row::of(&variant.row(STATS), 10, "ms", [value]).unwrap();
        let met = |patched| {
            let all = Measurements::of(vec![row(Variant::Stock, 2.0), row(Variant::Patched, patched)]);
            thresholds(&all, scale)[0].is_met
        };
        assert_eq!((met(2.0), met(2.1)), (Some(true), Some(false)));
    }
}

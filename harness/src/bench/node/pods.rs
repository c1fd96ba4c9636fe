//! The start of pods with a block volume on a node that has many block volumes.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use futures::future::try_join_all;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::api::PostParams;
use testvm::progress::Step;
use testvm::session::Session;
use testvm_cluster::Node;
use testvm_cluster::api_error::api_error;
use testvm_cluster::started_programs::started_programs;
use testvm_cluster::waiting::{State, until_none_complains, until_one};

use super::super::cluster::{self, NAMESPACE};
use super::super::measurement::{Environment, Measurements, Row};
use super::super::outcome::Args;
use super::super::threshold::{self, Threshold};
use super::variant::Variant;
use crate::test_env::claims;
use crate::test_env::environment::TestEnv;
use crate::test_env::sizes::Size;
use crate::test_env::users::{self, User, is_ready};
use crate::test_env::volume_work::{by_kubelet_for_volumes, loop_devices};
use crate::test_env::workload::{Held, VolumeMode, claim, holder_of};

const POD_START: &str = "pod_start_seconds";
const POD_START_WITHOUT_VOLUME: &str = "pod_start_seconds_without_volume";
const LOOP_DEVICES: &str = "loop_devices_per_volume";
const PROCESSES: &str = "processes_per_publish";

const SIZE: Size = Size::mebibytes(1);
/// The number of block volumes of each pod that uses volumes in the meantime.
const VOLUMES_PER_POD: u64 = 100;
/// The timeout of the start of one such pod, on an emulated processor.
const FILL_TIMEOUT: Duration = Duration::from_secs(900);
/// The timeout of the start of a measured pod.
const START_TIMEOUT: Duration = Duration::from_secs(300);

/// The size of a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Scale {
    /// The block volumes that pods use before the measured ones start.
    volumes: u64,
    /// The measured pods with a block volume, and as many without one.
    pods: usize,
}

/// The measurements of one kind of nodes.
#[derive(Debug, Default)]
struct Samples {
    /// Seconds from the creation of a pod with a block volume until it is ready. Its claim was bound before.
    with_volume: Vec<f64>,
    without_volume: Vec<f64>,
    /// Loop devices of all volumes.
    loop_devices: usize,
    /// Programs that the kubelet started for volumes while the measured pods started.
    processes: usize,
}

impl Scale {
    pub(super) fn of(args: &Args) -> Scale {
        let (volumes, pods) = if args.quick { (20, 3) } else { (500, 10) };
        Scale { volumes: args.volumes.unwrap_or(volumes), pods }
    }

    /// Returns the pods that use volumes in the meantime.
    fn users(self) -> Vec<User> {
        let claims: Vec<_> =
            (0..self.volumes).map(|number| (format!("used-{number}"), VolumeMode::Block)).collect();
        let pods = claims.chunks(VOLUMES_PER_POD as usize).enumerate();
        pods.map(|(pod, claims)| User { name: format!("user-{pod}"), claims: claims.to_vec() }).collect()
    }
}

/// Measures each kind of nodes on a cluster of its own, one after the other.
pub(super) async fn run(session: &Session, args: &Args, scale: Scale) -> Result<Vec<Environment>> {
    let mut parts = Vec::new();
    for variant in Variant::ALL {
        let name = format!("node-{variant}");
        let measured =
            cluster::measured(session, args, &name, variant.options(), &[], async |cluster, node| {
                let mut env = TestEnv::in_namespace(session, cluster, NAMESPACE)?;
                env.timeouts.start = FILL_TIMEOUT;
                let samples = measure(session, &env, node, variant, scale).await?;
                Ok(samples.rows(variant, scale))
            });
        let mut part = session.until_cancelled(measured).await.with_context(|| name.clone())?;
        part.place = format!("{}, {variant}", part.place);
        parts.push(part);
    }
    Ok(parts)
}

async fn measure(
    session: &Session,
    env: &TestEnv<'_>,
    node: &Node,
    variant: Variant,
    scale: Scale,
) -> Result<Samples> {
    let step = session.progress.step(format!("{variant}: start pods with {} block volumes", scale.volumes));
    let devices_before = loop_devices(node).await?;
    let users = scale.users();
    for (number, user) in users.iter().enumerate() {
        step.note(format!("pod {} of {}", number + 1, users.len()));
        users::start(env, std::slice::from_ref(user), SIZE).await?;
    }
    let measured: Vec<String> = (0..scale.pods).map(|number| format!("measured-{number}")).collect();
    bind(env, node, &measured).await?;
    step.done("");

    let step =
        session.progress.step(format!("{variant}: start {} pods, one after the other", 2 * scale.pods));
    let programs_before = started_programs(node).await?;
    let mut samples = one_after_the_other(env, &measured, &step).await?;
    let programs = started_programs(node).await?;
    let count = |programs| by_kubelet_for_volumes(programs).count();
    samples.processes = count(&programs) - count(&programs_before);
    samples.loop_devices = (&loop_devices(node).await? - &devices_before).len();
    step.done("");
    Ok(samples)
}

/// Creates block claims and waits until they are bound, so that the provisioner has no part in the start of their pods.
async fn bind(env: &TestEnv<'_>, node: &Node, names: &[String]) -> Result<()> {
    try_join_all(names.iter().map(async |name| {
        let claim = claim(name, &env.driver.class_name(), SIZE, VolumeMode::Block, "ReadWriteOnce")?;
        claims::create(env, &claims::with_selected_node(claim, node.name())).await
    }))
    .await?;
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    until_none_complains(env.claims(), "claim", &names, START_TIMEOUT, |claim| {
        (!claims::is_bound(claim)).then(|| "is not bound".to_owned())
    })
    .await
    .map(drop)
}

/// Starts a pod for each claim, and before each one a pod without a volume, so that other load on the machine affects both
/// kinds alike. All of them keep running.
async fn one_after_the_other(env: &TestEnv<'_>, claims: &[String], step: &Step) -> Result<Samples> {
    let mut samples = Samples::default();
    for (number, claim) in claims.iter().enumerate() {
        step.note(format!("pod {} of {} of each kind", number + 1, claims.len()));
        samples.without_volume.push(start(env, &pod(&format!("without-{number}"), None)?).await?);
        samples.with_volume.push(start(env, &pod(claim, Some(claim))?).await?);
    }
    Ok(samples)
}

/// Returns a pod that has no other volume than the claim. A token of the API server would be another one.
fn pod(name: &str, claim: Option<&str>) -> Result<Pod> {
    let held = claim.map(|claim| Held { claim, path: "/vol", mode: VolumeMode::Block, read_only: false });
    let mut pod = holder_of(name, held.as_slice())?;
    pod.spec.get_or_insert_default().automount_service_account_token = Some(false);
    Ok(pod)
}

/// Creates a pod, and returns the seconds until it is ready.
async fn start(env: &TestEnv<'_>, pod: &Pod) -> Result<f64> {
    let name = pod.name_any();
    let begun = Instant::now();
    let created = env.pods().create(&PostParams::default(), pod).await;
    created.map_err(api_error).with_context(|| format!("create pod {name}"))?;
    until_one(env.pods(), &name, START_TIMEOUT, |pod| {
        State::ready_if(pod.is_some_and(is_ready), "it is not ready")
    })
    .await
    .with_context(|| format!("start pod {name}"))?;
    Ok(begun.elapsed().as_secs_f64())
}

impl Samples {
    fn rows(&self, variant: Variant, scale: Scale) -> Vec<Row> {
        let published = self.with_volume.len() as f64;
        let volumes = scale.volumes as f64 + published;
        let row = |name: &str, unit: &str, values: &[f64]| {
            Row::of(&variant.row(name), scale.volumes, unit, values.iter().copied())
        };
        let rows = [
            row(POD_START, "s", &self.with_volume),
            row(POD_START_WITHOUT_VOLUME, "s", &self.without_volume),
            row(LOOP_DEVICES, "devices", &[self.loop_devices as f64 / volumes]),
            row(PROCESSES, "processes", &[self.processes as f64 / published]),
        ];
        rows.into_iter().flatten().collect()
    }
}

pub(super) fn thresholds(all: &Measurements, scale: Scale) -> Vec<Threshold> {
    let n = scale.volumes;
    let [stock, patched] = [Variant::Stock, Variant::Patched];
    let text = format!(
        "a pod with a block volume on a node with {n} others: ready twice as fast with the patched kubelet"
    );
    let (fast, slow) = (patched.row(POD_START), stock.row(POD_START));
    let starts = threshold::faster(all, &text, (&fast, n), 2.0, (&slow, n)).with_cause(
        "most of a pod's start does not depend on its volume: compare pod_start_seconds_without_volume",
    );
    let text = "loop devices of a block volume with the patched kubelet: 1";
    let (one, two) = (patched.row(LOOP_DEVICES), stock.row(LOOP_DEVICES));
    let devices = threshold::no_more(all, text, (&one, n), 1.0);
    let text = "loop devices of a block volume with the stock kubelet: twice as many";
    let more_devices = threshold::at_least(all, text, (&two, n), 2.0, (&one, n));
    let text = "programs that the patched kubelet starts to publish a block volume: none";
    let processes = threshold::no_more(all, text, (&patched.row(PROCESSES), n), 0.0);
    vec![starts, devices, more_devices, processes]
}

#[cfg(test)]
mod tests {
    use super::*;

    const SCALE: Scale = Scale { volumes: 250, pods: 2 };

    fn samples(start: f64, loop_devices: usize, processes: usize) -> Samples {
        Samples { with_volume: vec![start; 2], without_volume: vec![1.0; 2], loop_devices, processes }
    }

    fn verdicts(stock: &Samples, patched: &Samples) -> Vec<Option<bool>> {
        let rows = [stock.rows(Variant::Stock, SCALE), patched.rows(Variant::Patched, SCALE)].concat();
        let thresholds = thresholds(&Measurements::of(rows), SCALE);
        thresholds.into_iter().map(|threshold| threshold.is_met).collect()
    }

    #[test]
    fn thresholds_are_met_up_to_their_bounds() {
        let stock = samples(4.0, 504, 4);
        assert_eq!(verdicts(&stock, &samples(2.0, 252, 0)), [Some(true); 4]);
        assert_eq!(verdicts(&stock, &samples(2.1, 253, 1)), [Some(false); 4]);
    }

    #[test]
    fn figures_are_those_of_one_volume_and_one_publish() {
        let rows = samples(4.0, 504, 6).rows(Variant::DropIn, SCALE);
        let rows: Vec<_> = rows.iter().map(|row| (row.name.as_str(), row.n, row.median)).collect();
        let expected = [
            ("pod_start_seconds_drop_in", 250, 4.0),
            ("pod_start_seconds_without_volume_drop_in", 250, 1.0),
            ("loop_devices_per_volume_drop_in", 250, 2.0),
            ("processes_per_publish_drop_in", 250, 3.0),
        ];
        assert_eq!(rows, expected);
    }

    #[test]
    fn the_volumes_are_divided_among_pods_and_each_has_a_name_of_its_own() {
        let users = SCALE.users();
        let sizes: Vec<usize> = users.iter().map(|user| user.claims.len()).collect();
        assert_eq!(sizes, [100, 100, 50]);
        let names: std::collections::BTreeSet<_> =
            users.iter().flat_map(|user| &user.claims).map(|(claim, _)| claim).collect();
        assert_eq!(names.len(), 250);
    }

    #[test]
    fn a_measured_pod_has_no_volume_besides_its_claim() {
        let volumes = |claim| {
            let spec = pod("pod", claim).unwrap().spec.unwrap();
            assert_eq!(spec.automount_service_account_token, Some(false));
            spec.volumes.unwrap_or_default().len()
        };
        assert_eq!((volumes(None), volumes(Some("claim"))), (0, 1));
    }
}

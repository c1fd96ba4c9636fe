//! The start of pods with a block volume on a node that has many block volumes.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use futures::future::try_join_all;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use testvm::session::Session;
use testvm_cluster::started_programs::started_programs;
use testvm_cluster::waiting::{State, until_none_complains, until_one};
use testvm_cluster::{Node, objects};

use super::super::args::Args;
use super::super::cluster::{self, NAMESPACE};
use super::super::measurement::{Environment, Samples};
use super::super::threshold::{Requirement, at_least, no_more};
use super::variant::Variant;
use crate::test_env::claims;
use crate::test_env::environment::{RunTimeouts, TestEnv, Timeouts};
use crate::test_env::sizes::Size;
use crate::test_env::users::{self, User, is_ready};
use crate::test_env::volume_work::{by_kubelet_for_volumes, loop_devices};
use crate::test_env::workload::{Held, VolumeMode, holder_of};

const POD_START: &str = "pod_start_seconds";
const POD_START_WITHOUT_VOLUME: &str = "pod_start_seconds_without_volume";
const LOOP_DEVICES: &str = "loop_devices_per_volume";
const PROCESSES: &str = "processes_per_publish";

const SIZE: Size = Size::mebibytes(1);
/// The number of block volumes of each pod that uses volumes in the meantime.
const VOLUMES_PER_POD: usize = 100;
/// The timeout of the start of one such pod, on an emulated processor.
const FILL_TIMEOUT: Duration = Duration::from_secs(900);
/// The timeout of the start of a measured pod.
const START_TIMEOUT: Duration = Duration::from_secs(300);

/// Measures each kind of nodes on a cluster of its own, one after the other.
pub(super) async fn run(session: &Session, args: &Args) -> Result<Vec<Environment>> {
    let (volumes, pods) = args.size((500, 10), (20, 3));
    let volumes = args.volumes.unwrap_or(volumes);
    let mut parts = Vec::new();
    for variant in Variant::ALL {
        let name = format!("node-{variant}");
        let measured =
            cluster::measured(session, args, &name, variant.options(), &[], async |cluster, node| {
                let mut env = TestEnv::in_namespace(session, cluster, NAMESPACE)?;
                env.timeouts = RunTimeouts::new(Timeouts { start: FILL_TIMEOUT, ..Timeouts::FULL });
                measure(session, &env, node, variant, volumes, pods).await
            });
        let mut part = measured.await.with_context(|| name.clone())?;
        part.place = format!("{}, {variant}", part.place);
        parts.push(part);
    }
    Ok(parts)
}

pub(super) fn requirements() -> Vec<Requirement> {
    let [stock, patched] = [Variant::Stock, Variant::Patched];
    vec![
        at_least(
            "a pod with a block volume on a node with {n} others: ready twice as fast with the patched kubelet",
            &stock.row(POD_START),
            2.0,
            &patched.row(POD_START),
        )
        .with_cause(
            "most of a pod's start does not depend on its volume: compare pod_start_seconds_without_volume",
        ),
        no_more("loop devices of a block volume with the patched kubelet: 1", &patched.row(LOOP_DEVICES), 1.0),
        at_least(
            "loop devices of a block volume with the stock kubelet: twice as many",
            &stock.row(LOOP_DEVICES),
            2.0,
            &patched.row(LOOP_DEVICES),
        ),
        no_more(
            "programs that the patched kubelet starts to publish a block volume: none",
            &patched.row(PROCESSES),
            0.0,
        ),
    ]
}

/// Starts pods that use `volumes` block volumes, and then measures the start of `pods` with a block volume and of as many without one.
async fn measure(
    session: &Session,
    env: &TestEnv<'_>,
    node: &Node,
    variant: Variant,
    volumes: u64,
    pods: usize,
) -> Result<Samples> {
    let step = session.progress.step(format!("{variant}: start pods with {volumes} block volumes"));
    let devices_before = loop_devices(node).await?;
    let users = users(volumes);
    for (number, user) in users.iter().enumerate() {
        step.note(format!("pod {} of {}", number + 1, users.len()));
        users::start(env, std::slice::from_ref(user), SIZE).await?;
    }
    let measured: Vec<String> = (0..pods).map(|number| format!("measured-{number}")).collect();
    bind(env, node, &measured).await?;
    step.done("");

    let step = session.progress.step(format!("{variant}: start {} pods, one after the other", 2 * pods));
    let mut samples = Samples::default();
    let programs_before = started_programs(node).await?;
    // A pod with a volume follows one without a volume, so that other load on the machine affects both kinds alike. All of them
    // keep running.
    for (number, claim) in measured.iter().enumerate() {
        step.note(format!("pod {} of {pods} of each kind", number + 1));
        let without = start(env, &pod(&format!("without-{number}"), None)?).await?;
        let with = start(env, &pod(claim, Some(claim))?).await?;
        samples.add(variant.row(POD_START), volumes, "s", with);
        samples.add(variant.row(POD_START_WITHOUT_VOLUME), volumes, "s", without);
    }
    let programs = started_programs(node).await?;
    let count = |programs| by_kubelet_for_volumes(programs).count();
    let processes = count(&programs) - count(&programs_before);
    let devices = (&loop_devices(node).await? - &devices_before).len();
    let all = volumes + pods as u64;
    samples.add(variant.row(LOOP_DEVICES), volumes, "devices", devices as f64 / all as f64);
    samples.add(variant.row(PROCESSES), volumes, "processes", processes as f64 / pods as f64);
    step.done("");
    Ok(samples)
}

/// Returns pods that use this many block volumes.
fn users(volumes: u64) -> Vec<User> {
    let claims: Vec<_> = (0..volumes).map(|number| (format!("used-{number}"), VolumeMode::Block)).collect();
    let pods = claims.chunks(VOLUMES_PER_POD).enumerate();
    pods.map(|(pod, claims)| User { name: format!("user-{pod}"), claims: claims.to_vec() }).collect()
}

/// Creates block claims and waits until they are bound, so that the provisioner has no part in the start of their pods.
async fn bind(env: &TestEnv<'_>, node: &Node, names: &[String]) -> Result<()> {
    let create =
        async |name: &String| claims::request_on(env, node.name(), name, SIZE, VolumeMode::Block).await;
    try_join_all(names.iter().map(create)).await?;
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    until_none_complains(env.claims(), "claim", &names, START_TIMEOUT, |claim| {
        (!claims::is_bound(claim)).then(|| "is not bound".to_owned())
    })
    .await
    .map(drop)
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
    objects::create(&env.pods(), pod).await?;
    until_one(env.pods(), &name, START_TIMEOUT, |pod| {
        State::ready_if(pod.is_some_and(is_ready), "it is not ready")
    })
    .await
    .with_context(|| format!("start pod {name}"))?;
    Ok(begun.elapsed().as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_volumes_are_divided_among_pods() {
        let users = users(250);
        let sizes: Vec<usize> = users.iter().map(|user| user.claims.len()).collect();
        assert_eq!(sizes, [100, 100, 50]);
        let names: std::collections::BTreeSet<_> =
            users.iter().flat_map(|user| &user.claims).map(|(claim, _)| claim).collect();
        assert_eq!(names.len(), 250);
    }

    #[test]
    fn a_pod_has_only_its_claim() {
        let volumes = |claim| {
            let spec = pod("pod", claim).unwrap().spec.unwrap();
            assert_eq!(spec.automount_service_account_token, Some(false));
            spec.volumes.unwrap_or_default().len()
        };
        assert_eq!((volumes(None), volumes(Some("claim"))), (0, 1));
    }
}

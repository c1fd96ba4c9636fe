//! The measurements of `bench growth` and their thresholds.

use std::time::Duration;

use anyhow::Result;
use testvm::progress::Step;
use testvm::session::Session;
use testvm_cluster::{Cluster, Node};

use super::super::cluster::{NAMESPACE, SharedCluster};
use super::super::measurement::{Environment, Measurements, Row, milliseconds};
use super::super::outcome::{Args, Outcome};
use super::super::threshold::{self, Threshold};
use super::kubelet;
use super::resizes::Provisioner;
use super::watched::{GROW_TIMEOUT, GROWN, SIZE, Watched};
use crate::test_env::claims;
use crate::test_env::environment::TestEnv;
use crate::test_env::users::{self, User};
use crate::test_env::workload::VolumeMode;

/// The time to create and mount all volumes. The kubelet waits up to two minutes before it retries a failed
/// mount.
const START_TIMEOUT: Duration = Duration::from_secs(600);
/// The expansion of one claim, in milliseconds.
#[derive(Clone, Copy, Debug)]
struct Sample {
    visible: f64,
    /// The time from the provisioner's start of the resize until it recorded its end. The pod need not wait
    /// for most of that.
    resize: f64,
}

#[derive(Debug, Default)]
struct Samples {
    filesystem: Vec<Sample>,
    block: Vec<Sample>,
    /// Milliseconds until a pod saw the new size of a block volume, if only the kubelet could notice the
    /// expansion.
    kubelet: Vec<f64>,
}

pub(in crate::bench) async fn run(
    session: &Session,
    args: &Args,
    shared: &mut SharedCluster,
) -> Result<Outcome> {
    let runs = if args.quick { 5 } else { 20 };
    let part = session.until_cancelled(prepare_and_run(session, args, shared, runs)).await?;
    Ok(Outcome::new(vec![part], |all| thresholds(all, volumes(runs)), &[]))
}

/// Returns the number of the pod's volumes, half of each kind.
fn volumes(runs: usize) -> u64 {
    2 * runs as u64
}

async fn prepare_and_run(
    session: &Session,
    args: &Args,
    shared: &mut SharedCluster,
    runs: usize,
) -> Result<Environment> {
    let measure = async |cluster: &Cluster, node: &Node| {
        let mut env = TestEnv::in_namespace(session, cluster, NAMESPACE)?;
        env.timeouts.start = START_TIMEOUT;
        measure(session, &env, node, runs).await
    };
    Box::pin(shared.measured(session, args, "growth", &[], measure)).await
}

async fn measure(session: &Session, env: &TestEnv<'_>, node: &Node, runs: usize) -> Result<Vec<Row>> {
    let step = session.progress.step(format!("start pods with volumes: {} and a few", volumes(runs)));
    let user = user(runs);
    let alone = kubelet::users();
    let (started, started_alone) =
        (users::start(env, std::slice::from_ref(&user), SIZE), users::start(env, &alone, SIZE));
    tokio::try_join!(started, started_alone)?;
    step.done("");

    let step = session.progress.step(format!("expand {} volumes, one after the other", volumes(runs)));
    let mut samples = one_after_the_other(env, &user, &step).await?;
    step.done("");

    let step = session.progress.step("expand volumes that only the kubelet checks");
    samples.kubelet = kubelet::samples(env, node, &alone).await?;
    step.done("");
    Ok(samples.rows(volumes(runs)))
}

/// Returns the pod. Its volumes alternate between the kinds, so that other load on the machine affects both
/// alike.
fn user(runs: usize) -> User {
    let both = |run: usize| {
        [(format!("filesystem-{run}"), VolumeMode::Filesystem), (format!("block-{run}"), VolumeMode::Block)]
    };
    User { name: "growing".to_owned(), claims: (0..runs).flat_map(both).collect() }
}

async fn one_after_the_other(env: &TestEnv<'_>, user: &User, step: &Step) -> Result<Samples> {
    let provisioner = Provisioner::of(env).await?;
    let mut resizes = provisioner.resizes().await?;
    let mut samples = Samples::default();
    for ((claim, mode), volume) in user.claims.iter().zip(user.volumes()) {
        step.note(claim.clone());
        let watched = Watched::start(env, &user.name, claim, &volume).await?;
        let visible = watched.grow(GROW_TIMEOUT).await?;
        // The pod sees the new size before the claim's status has it. Only after that has the provisioner
        // finished.
        claims::has(env, claim, GROWN).await?;
        let since = provisioner.one_more(&resizes).await?;
        let sample = Sample { visible: milliseconds(visible), resize: since.milliseconds_since(&resizes) };
        resizes = since;
        match mode {
            VolumeMode::Filesystem => samples.filesystem.push(sample),
            VolumeMode::Block => samples.block.push(sample),
        }
    }
    Ok(samples)
}

impl Samples {
    fn rows(&self, volumes: u64) -> Vec<Row> {
        let mut rows = Vec::new();
        for (kind, samples) in [("filesystem", &self.filesystem), ("block", &self.block)] {
            let mut row = |name: &str, figure: fn(&Sample) -> f64| {
                let values = samples.iter().map(figure);
                rows.extend(Row::of(&format!("{kind}_{name}"), volumes, "ms", values));
            };
            row("patch_to_visible", |sample| sample.visible);
            row("resize", |sample| sample.resize);
        }
        rows.extend(Row::of("kubelet_sync", kubelet::VOLUMES, "ms", self.kubelet.clone()));
        rows
    }
}

fn thresholds(all: &Measurements, volumes: u64) -> Vec<Threshold> {
    let mut thresholds = Vec::new();
    for (kind, what) in [("filesystem", "a mounted volume"), ("block", "a block volume")] {
        let visible = format!("{kind}_patch_to_visible");
        let text = format!(
            "time until the pod sees the new size of {what}: at most 200 ms, because the driver takes no longer"
        );
        thresholds.push(threshold::no_more(all, &text, (&visible, volumes), 200.0));
        let text = format!(
            "time until the pod sees the new size of {what}: at most a tenth of the wait for the kubelet"
        );
        thresholds.push(threshold::faster(
            all,
            &text,
            (&visible, volumes),
            10.0,
            ("kubelet_sync", kubelet::VOLUMES),
        ));
    }
    thresholds
}

#[cfg(test)]
mod tests {
    use super::*;

    fn verdicts(sample: Sample, kubelet: &[f64]) -> Vec<Option<bool>> {
        let samples = Samples { filesystem: vec![sample], block: vec![sample], kubelet: kubelet.to_vec() };
        thresholds(&Measurements::of(samples.rows(2)), 2)
            .into_iter()
            .map(|threshold| threshold.is_met)
            .collect()
    }

    #[test]
    fn thresholds_are_met_up_to_their_bounds() {
        assert_eq!(verdicts(Sample { visible: 200.0, resize: 300.0 }, &[2000.0]), [Some(true); 4]);
        assert_eq!(verdicts(Sample { visible: 200.1, resize: 300.0 }, &[2000.0]), [Some(false); 4]);
    }

    #[test]
    fn without_kubelet_samples_their_thresholds_are_undecided() {
        let sample = Sample { visible: 200.0, resize: 300.0 };
        assert_eq!(verdicts(sample, &[]), [Some(true), None, Some(true), None]);
    }

    #[test]
    fn the_kinds_of_volumes_alternate_in_one_pod() {
        let user = user(3);
        assert_eq!(user.claims.len() as u64, volumes(3));
        let kinds = user.claims.iter().map(|(_, mode)| *mode).collect::<Vec<_>>();
        assert_eq!(kinds, [VolumeMode::Filesystem, VolumeMode::Block].repeat(3));
    }
}

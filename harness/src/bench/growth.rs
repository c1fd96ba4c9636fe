//! `bench growth`: the time from the request to expand a claim until the pod sees the new size, and until the
//! claim's status has it.
//!
//! A program in the pod reads the size of its volume every millisecond and reports the new one. This
//! machine's clock measures from just before the patch is sent until the program's line arrives through
//! kubelet and API server. The result is therefore an upper bound.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, ResourceExt};
use testvm::progress::Step;
use testvm::session::Session;
use testvm_cluster::exec::{ExecStream, http_get};
use testvm_cluster::{Cluster, Node};
use tokio::time::sleep;

use super::args::Args;
use super::cluster::{self, NAMESPACE};
use super::measurement::{Environment, Samples, milliseconds};
use super::metrics;
use super::threshold::{Requirement, no_more};
use crate::node_options::NodeOptions;
use crate::test_env::claims;
use crate::test_env::environment::TestEnv;
use crate::test_env::sizes::Size;
use crate::test_env::users::{self, User};
use crate::test_env::workload::VolumeMode;

const SIZE: Size = Size::mebibytes(1);
const GROWN: Size = Size::mebibytes(4);

/// The timeout of an expansion. It includes an expansion that the kubelet completes, so that the measurement shows it.
const GROW_TIMEOUT: Duration = Duration::from_secs(300);
/// The timeout from the start of the program to its first line, on an emulated processor.
const PROGRAM_TIMEOUT: Duration = Duration::from_secs(60);

/// The port of the provisioner's metrics, as in the manifests.
const PORT: u16 = 9810;
const DURATION: &str = "loopfs_provisioner_operation_duration_seconds";
/// The poll interval: the metrics page is recomputed at most once a second, and nothing announces it.
const POLL_INTERVAL: Duration = Duration::from_millis(200);
/// The timeout from the expansion of a claim until the metrics have it.
const METRICS_TIMEOUT: Duration = Duration::from_secs(60);

pub(super) async fn run(session: &Session, args: &Args) -> Result<Environment> {
    let runs = args.size(20, 5);
    let measure = async |cluster: &Cluster, _: &Node| {
        let env = TestEnv::in_namespace(session, cluster, NAMESPACE)?;
        measure(session, &env, runs).await
    };
    cluster::measured(session, args, "growth", NodeOptions::default(), &[], measure).await
}

pub(super) fn requirements() -> Vec<Requirement> {
    let of_kind = |(kind, what)| {
        let text = format!(
            "time until the pod sees the new size of {what}: at most 200 ms, because the driver takes no longer"
        );
        no_more(&text, &format!("{kind}_patch_to_visible"), 200.0)
    };
    [("filesystem", "a mounted volume"), ("block", "a block volume")].into_iter().map(of_kind).collect()
}

async fn measure(session: &Session, env: &TestEnv<'_>, runs: usize) -> Result<Samples> {
    let user = user(runs);
    let volumes = user.claims.len();
    let step = session.progress.step(format!("start a pod with {volumes} volumes"));
    users::start(env, std::slice::from_ref(&user), SIZE).await?;
    step.done("");

    let step = session.progress.step(format!("expand {volumes} volumes, one after the other"));
    let mut samples = Samples::default();
    one_after_the_other(env, &user, &step, &mut samples).await?;
    step.done("");
    Ok(samples)
}

/// Returns the pod. Its volumes alternate between the kinds, so that other load on the machine affects both
/// alike.
fn user(runs: usize) -> User {
    let both = |run: usize| {
        [(format!("filesystem-{run}"), VolumeMode::Filesystem), (format!("block-{run}"), VolumeMode::Block)]
    };
    User { name: "growing".to_owned(), claims: (0..runs).flat_map(both).collect() }
}

/// Expands the claims. Besides the time until the pod sees the new size, the time from the provisioner's start of the resize until it
/// recorded its end is measured. The pod need not wait for most of that.
async fn one_after_the_other(
    env: &TestEnv<'_>,
    user: &User,
    step: &Step,
    samples: &mut Samples,
) -> Result<()> {
    let drivers = env.live_driver_pods().await?;
    let [driver] = drivers.as_slice() else {
        anyhow::bail!("the driver has {} pods on the only node", drivers.len())
    };
    let (pods, driver) = (env.driver_pods(), driver.name_any());
    let n = user.claims.len() as u64;
    let mut resizes = Resizes::read(&pods, &driver).await?;
    for ((claim, mode), volume) in user.claims.iter().zip(user.volumes()) {
        step.note(claim.clone());
        let visible = Watched::start(env, &user.name, claim, &volume).await?.grow().await?;
        // The pod sees the new size before the claim's status has it. Only after that has the provisioner finished.
        claims::until_expanded(env, claim, GROWN).await?;
        let after = resizes.one_more(&pods, &driver).await?;
        let kind = mode.as_str().to_lowercase();
        samples.add(format!("{kind}_patch_to_visible"), n, "ms", visible);
        samples.add(format!("{kind}_resize"), n, "ms", (after.seconds - resizes.seconds) * 1e3);
        resizes = after;
    }
    Ok(())
}

/// A volume in a pod, and a program there that reports its expansion.
struct Watched<'a> {
    env: &'a TestEnv<'a>,
    claim: &'a str,
    program: ExecStream,
}

impl<'a> Watched<'a> {
    /// Starts the program for the volume of a claim in a pod. On return, the program watches the volume.
    async fn start(env: &'a TestEnv<'a>, pod: &str, claim: &'a str, volume: &str) -> Result<Watched<'a>> {
        let mut program =
            ExecStream::start(&env.pods(), pod, &["/volume-check", "watch-size", volume]).await?;
        let line = program.line(PROGRAM_TIMEOUT).await?;
        expect(&line, SIZE).with_context(|| format!("volume {volume} before its expansion"))?;
        Ok(Watched { env, claim, program })
    }

    /// Requests the expansion, and returns the milliseconds until the pod saw it.
    async fn grow(mut self) -> Result<f64> {
        let begun = Instant::now();
        let seen = async {
            let line = self.program.line(GROW_TIMEOUT).await?;
            Ok((line, begun.elapsed()))
        };
        let ((), (line, took)) = tokio::try_join!(claims::request_size(self.env, self.claim, GROWN), seen)?;
        expect(&line, GROWN).with_context(|| format!("expansion of claim {}", self.claim))?;
        Ok(milliseconds(took))
    }
}

fn expect(line: &str, size: Size) -> Result<()> {
    let requested = size.bytes();
    anyhow::ensure!(
        line.parse() == Ok(requested),
        "{requested} bytes are requested, but the pod sees {line}"
    );
    Ok(())
}

/// The attempts to resize since the provisioner was started, by its metrics. If claims are expanded one after the other, the
/// differences of the totals are the single resizes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Resizes {
    succeeded: f64,
    failed: f64,
    /// The time of all attempts, including those that found the claim changed and were repeated.
    seconds: f64,
}

impl Resizes {
    async fn read(pods: &Api<Pod>, pod: &str) -> Result<Resizes> {
        Resizes::parse(&http_get(pods, pod, PORT, "/metrics").await?)
    }

    fn parse(page: &str) -> Result<Resizes> {
        // The last line of a complete page.
        anyhow::ensure!(
            page.trim_end().ends_with("# EOF"),
            "the page of the provisioner's metrics is incomplete: {page}"
        );
        let sum = |figure: &str, result: Option<&str>| {
            let series = metrics::series(page, format!("{DURATION}_{figure}"));
            let resizes = series.filter(|(labels, _)| {
                labels.get("operation") == Some("resize")
                    && (result.is_none() || labels.get("result") == result)
            });
            resizes.map(|(_, value)| value).sum::<f64>() + 0.0
        };
        let (succeeded, failed) = (sum("count", Some("success")), sum("count", Some("failure")));
        let seconds = sum("sum", None);
        anyhow::ensure!(!seconds.is_nan(), "{DURATION} has a value that is no number: {page}");
        Ok(Resizes { succeeded, failed, seconds })
    }

    /// Waits until one more resize has succeeded.
    async fn one_more(&self, pods: &Api<Pod>, pod: &str) -> Result<Resizes> {
        let deadline = Instant::now() + METRICS_TIMEOUT;
        loop {
            let now = Resizes::read(pods, pod).await?;
            if now.is_one_more(self)? {
                return Ok(now);
            }
            anyhow::ensure!(Instant::now() < deadline, "the provisioner's metrics show no further resize");
            sleep(POLL_INTERVAL).await;
        }
    }

    /// Returns `true` if one more resize has succeeded. An attempt that failed is an error, because no measurement includes the pause
    /// before the retry.
    fn is_one_more(&self, before: &Resizes) -> Result<bool> {
        anyhow::ensure!(self.failed == before.failed, "a resize failed: see the provisioner's log");
        let more = self.succeeded - before.succeeded;
        anyhow::ensure!(
            (0.0..=1.0).contains(&more),
            "the provisioner's metrics show {more} resizes since the last claim grew"
        );
        Ok(more == 1.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: &str = r#"HTTP/1.0 200 OK
content-type: application/openmetrics-text; version=1.0.0; charset=utf-8

# TYPE loopfs_provisioner_operation_duration_seconds histogram
loopfs_provisioner_operation_duration_seconds_sum{operation="provision",result="success"} 7.5
loopfs_provisioner_operation_duration_seconds_count{operation="provision",result="success"} 43
loopfs_provisioner_operation_duration_seconds_sum{operation="resize",result="success"} 0.5
loopfs_provisioner_operation_duration_seconds_count{operation="resize",result="success"} 4
loopfs_provisioner_operation_duration_seconds_bucket{le="0.002",operation="resize",result="success"} 1
loopfs_provisioner_operation_duration_seconds_sum{operation="resize",result="conflict"} 0.25
loopfs_provisioner_operation_duration_seconds_count{operation="resize",result="conflict"} 1
loopfs_provisioner_operation_duration_seconds_sum{operation="resize",result="failure"} 0.125
loopfs_provisioner_operation_duration_seconds_count{operation="resize",result="failure"} 2
# EOF
"#;

    #[test]
    fn only_attempts_to_resize_are_summed() {
        assert_eq!(Resizes::parse(PAGE).unwrap(), Resizes { succeeded: 4.0, failed: 2.0, seconds: 0.875 });
        assert_eq!(Resizes::parse("HTTP/1.0 200 OK\r\n\r\n# EOF\n").unwrap(), Resizes::default());
        assert!(Resizes::parse("HTTP/1.0 404 Not Found\r\n\r\n").is_err());
    }

    /// After a restart of the provisioner, the counter is lower than the one before.
    #[test]
    fn a_sample_is_one_more_success() {
        let resizes = |succeeded, failed| Resizes { succeeded, failed, seconds: 0.875 };
        let before = resizes(4.0, 2.0);
        assert!(!before.is_one_more(&before).unwrap());
        assert!(resizes(5.0, 2.0).is_one_more(&before).unwrap());
        for other in [resizes(6.0, 2.0), resizes(5.0, 3.0), resizes(0.0, 2.0), resizes(f64::NAN, 2.0)] {
            assert!(other.is_one_more(&before).is_err(), "{other:?}");
        }
    }

    #[test]
    fn another_size_is_an_error() {
        assert!(expect("4194304", GROWN).is_ok());
        assert!(expect("4194303", GROWN).unwrap_err().to_string().contains("4194303"));
        assert!(expect("", SIZE).is_err());
    }
}

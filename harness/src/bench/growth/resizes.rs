//! The provisioner's metrics of resizes. If claims are expanded one after the other, the differences of the
//! totals are the single resizes.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, ResourceExt};
use testvm_cluster::exec::http_get;
use tokio::time::sleep;

use crate::test_env::environment::TestEnv;

/// The port of the provisioner's metrics, as in the manifests.
const PORT: u16 = 9810;
const DURATION: &str = "loopfs_provisioner_operation_duration_seconds";

/// The poll interval: the metrics page is recomputed at most once a second, and nothing announces it.
const POLL_INTERVAL: Duration = Duration::from_millis(200);
/// The timeout from the expansion of a claim until the metrics have it.
const METRICS_TIMEOUT: Duration = Duration::from_secs(60);

/// The provisioner of the only node.
pub(super) struct Provisioner {
    pods: Api<Pod>,
    pod: String,
}

/// The attempts to resize since the provisioner was started.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Resizes {
    succeeded: u64,
    failed: u64,
    /// The time of all attempts, including those that found the claim changed and were repeated.
    seconds: f64,
}

impl Provisioner {
    pub(super) async fn of(env: &TestEnv<'_>) -> Result<Provisioner> {
        let pods = env.live_driver_pods().await?;
        let [pod] = pods.as_slice() else {
            anyhow::bail!("the driver has {} pods on the only node", pods.len())
        };
        Ok(Provisioner { pods: env.driver_pods(), pod: pod.name_any() })
    }

    pub(super) async fn resizes(&self) -> Result<Resizes> {
        parse(&http_get(&self.pods, &self.pod, PORT, "/metrics").await?)
    }

    /// Waits until one more resize has succeeded.
    pub(super) async fn one_more(&self, before: &Resizes) -> Result<Resizes> {
        let deadline = Instant::now() + METRICS_TIMEOUT;
        loop {
            let now = self.resizes().await?;
            if now.is_one_more(before)? {
                return Ok(now);
            }
            anyhow::ensure!(Instant::now() < deadline, "the provisioner's metrics show no further resize");
            sleep(POLL_INTERVAL).await;
        }
    }
}

impl Resizes {
    pub(super) fn milliseconds_since(&self, before: &Resizes) -> f64 {
        (self.seconds - before.seconds) * 1e3
    }

    /// Returns `true` if one more resize succeeded. An attempt that failed is an error, because no
    /// measurement includes the pause before the retry.
    fn is_one_more(&self, before: &Resizes) -> Result<bool> {
        anyhow::ensure!(self.failed == before.failed, "a resize failed: see the provisioner's log");
        let more = self.succeeded.checked_sub(before.succeeded).context("the provisioner was restarted")?;
        anyhow::ensure!(more <= 1, "{more} resizes since the last claim grew");
        Ok(more == 1)
    }
}

fn parse(page: &str) -> Result<Resizes> {
    // The last line of a complete page.
    anyhow::ensure!(
        page.trim_end().ends_with("# EOF"),
        "the page of the provisioner's metrics is incomplete: {page}"
    );
    let mut resizes = Resizes::default();
    for line in page.lines() {
        let Some((series, value)) = line.strip_prefix(DURATION).and_then(|rest| rest.split_once("} ")) else {
            continue;
        };
        let Some((figure, labels)) = series.split_once('{') else { continue };
        let has = |label: &str| labels.split(',').any(|of_series| of_series == label);
        let count = || value.parse::<u64>().with_context(|| format!("read {line}"));
        match figure {
            _ if !has(r#"operation="resize""#) => {}
            "_sum" => resizes.seconds += value.parse::<f64>().with_context(|| format!("read {line}"))?,
            "_count" if has(r#"result="success""#) => resizes.succeeded += count()?,
            "_count" if has(r#"result="failure""#) => resizes.failed += count()?,
            _ => {}
        }
    }
    Ok(resizes)
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

    fn resizes(succeeded: u64, failed: u64, seconds: f64) -> Resizes {
        Resizes { succeeded, failed, seconds }
    }

    #[test]
    fn only_attempts_to_resize_are_summed() {
        assert_eq!(parse(PAGE).unwrap(), resizes(4, 2, 0.875));
    }

    #[test]
    fn no_resize_yet_is_accepted_and_other_pages_are_rejected() {
        assert_eq!(parse("HTTP/1.0 200 OK\r\n\r\n# EOF\n").unwrap(), Resizes::default());
        assert!(parse("HTTP/1.0 404 Not Found\r\n\r\n").is_err());
        assert!(parse(&PAGE.replace("} 0.5", "} half")).is_err());
    }

    #[test]
    fn only_one_more_successful_resize_is_a_sample() {
        let before = resizes(4, 2, 0.5);
        assert!(!before.is_one_more(&before).unwrap());
        let after = resizes(5, 2, 0.75);
        assert!(after.is_one_more(&before).unwrap());
        assert_eq!(after.milliseconds_since(&before).to_bits(), 250.0f64.to_bits());
        for other in [resizes(6, 2, 1.0), resizes(5, 3, 1.0), resizes(0, 2, 0.0)] {
            assert!(other.is_one_more(&before).is_err(), "{other:?}");
        }
    }
}

//! The processor time of the measured processes.

use std::time::Duration;

use anyhow::{Context, Result};
use kube::Client;
use testvm_cluster::api_error::api_error;

use super::metrics_page;

/// The unit of times in `/proc/PID/stat`: a hundredth of a second on every architecture that this project runs on (proc(5),
/// `USER_HZ`).
const TICK: Duration = Duration::from_millis(10);

/// The positions of `utime` and `stime` after the name of the program (proc(5)).
const USER_TIME: usize = 11;
const SYSTEM_TIME: usize = 12;

const OF_API_SERVER: &str = "process_cpu_seconds_total";

/// Returns the processor time that a process has used since its start.
pub(super) fn of_process(id: i32) -> Result<Duration> {
    let path = format!("/proc/{id}/stat");
    let stat = std::fs::read_to_string(&path).with_context(|| format!("read {path}"))?;
    ticks(&stat).map(|ticks| TICK * ticks).with_context(|| format!("{path} has no processor times: {stat}"))
}

/// Returns the metrics of the API server, in the text format of Prometheus.
pub(super) async fn api_server_metrics(client: &Client) -> Result<String> {
    let request = http::Request::get("/metrics").body(Vec::new()).context("create a request")?;
    client.request_text(request).await.map_err(api_error).context("read the API server's metrics")
}

/// Returns the processor time that the API server has used since its start, by its metrics.
pub(super) fn of_api_server(metrics: &str) -> Result<Duration> {
    let seconds = metrics_page::value(metrics, OF_API_SERVER);
    seconds
        .map(Duration::from_secs_f64)
        .with_context(|| format!("the API server has no metric {OF_API_SERVER}"))
}

/// Returns the sum of both times. The name of the program is in parentheses and may contain any character.
fn ticks(stat: &str) -> Option<u32> {
    let (_, fields) = stat.rsplit_once(')')?;
    let fields: Vec<&str> = fields.split_whitespace().collect();
    let ticks = |position: usize| fields.get(position)?.parse::<u32>().ok();
    Some(ticks(USER_TIME)? + ticks(SYSTEM_TIME)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_processor_time_is_that_of_the_program_and_of_the_kernel() {
        let stat = "7 (a) b) S 1 7 7 0 -1 4194304 100 0 0 0 250 50 9 9 20 0 1 0 5 0 0";
        assert_eq!(ticks(stat), Some(300));
        assert_eq!(ticks("7 (a) S 1 7"), None);
    }

    #[test]
    fn a_running_process_has_a_processor_time() {
        let id = std::process::id().try_into().unwrap();
        assert!(of_process(id).is_ok());
    }
}

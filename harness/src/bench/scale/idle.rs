//! The observation of a process while nothing happens.

use std::time::{Duration, Instant};

use anyhow::Result;

use super::proxied_process::ProxiedProcess;

/// A process whose requests to the API server are counted.
pub(super) trait Observed {
    fn process(&self) -> &ProxiedProcess;

    /// Returns the number of requests that the process has sent to the API server since its start, with its watches.
    async fn requests(&self) -> Result<f64>;
}

/// The requests and the received bytes of a process while nothing happens.
#[derive(Clone, Copy, Debug)]
pub(super) struct Idle {
    pub(super) requests_per_minute: f64,
    bytes_per_second: f64,
}

impl Idle {
    /// Observes the idle process for `time`.
    pub(super) async fn observe(observed: &impl Observed, time: Duration) -> Result<Idle> {
        let process = observed.process();
        let (requests, received, since) = (observed.requests().await?, process.received(), Instant::now());
        tokio::time::sleep(time).await;
        let elapsed = since.elapsed().as_secs_f64();
        Ok(Idle {
            requests_per_minute: (observed.requests().await? - requests) * 60.0 / elapsed,
            bytes_per_second: (process.received() - received) as f64 / elapsed,
        })
    }

    /// Returns the bytes of `received` that remain without those that an idle process receives in this time: bookmarks of its watches
    /// and responses to periodic requests.
    pub(super) fn without(&self, received: u64, time: Duration) -> f64 {
        (received as f64 - self.bytes_per_second * time.as_secs_f64()).max(0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_of_an_idle_process_are_subtracted() {
        let idle = Idle { requests_per_minute: 0.0, bytes_per_second: 10.0 };
        assert_eq!(idle.without(100, Duration::from_secs(3)), 70.0);
        assert_eq!(idle.without(20, Duration::from_secs(3)), 0.0, "fewer bytes than while nothing happened");
    }
}

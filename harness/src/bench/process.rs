//! Processes of this machine that are measured, beside a control plane whose nodes are objects only. Neither an emulated processor nor
//! a disk affects their measurements.

use std::path::Path;
use std::process::ExitStatus;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use tempfile::TempDir;
use testvm::process::Process;
use testvm::session::Session;
use testvm_cluster::{ClusterProfile, ControlPlane, KubernetesMinor};

use super::cluster::NAMESPACE;
use super::counting_proxy::CountingProxy;
use super::measurement::{Environment, Machine, Samples};
use crate::fake_nodes::{self, LiveTests, NODES};
use crate::test_env::workload::create_namespace;

/// The node of the processes.
pub(super) const NODE: &str = NODES[0];
/// The description of the measurements of processes whose volumes are in memory.
pub(super) const IN_MEMORY: &str = "this machine, volumes in memory";

/// Limits the shutdown of a provisioner. It completes operations in progress, and writes the events of hundreds of claims that its rate
/// limit has held back.
pub(super) const STOP_GRACE: Duration = Duration::from_secs(120);
/// The timeout of the start: the process receives all objects that it watches.
const START_TIMEOUT: Duration = Duration::from_secs(900);
const POLL_INTERVAL: Duration = Duration::from_millis(200);
/// The unit of times in `/proc/PID/stat`: a hundredth of a second on every architecture that this project runs on (proc(5),
/// `USER_HZ`).
const TICK: Duration = Duration::from_millis(10);

/// A running process. Dropping it kills the process.
pub(super) struct MeasuredProcess {
    pub(super) process: Process,
    /// The CSI controller of a sidecar, or the driver of a provisioner. Nothing of it is measured.
    pub(super) controller: Option<Process>,
    /// Counts what the process receives from the API server.
    pub(super) proxy: Option<CountingProxy>,
    /// Removed after the process, which has its files there.
    pub(super) _directory: Option<TempDir>,
}

impl MeasuredProcess {
    pub(super) fn id(&self) -> i32 {
        self.process.id()
    }

    /// Returns the bytes that it has received from the API server since its start.
    pub(super) fn received(&self) -> u64 {
        self.proxy.as_ref().map_or(0, CountingProxy::received)
    }

    /// Returns the bytes of a field such as [`CURRENT`](super::memory::CURRENT).
    pub(super) fn memory(&self, field: &str) -> Result<f64> {
        read(self.id(), "status", |status| kib_in(status, field)).map(|kib| (kib * 1024) as f64)
    }

    /// Runs `measuring`. Returns an error if the process or its CSI controller ends before it.
    pub(super) async fn during<T>(&mut self, measuring: impl Future<Output = Result<T>>) -> Result<T> {
        let controller = async {
            match &mut self.controller {
                Some(controller) => controller.wait().await,
                None => std::future::pending().await,
            }
        };
        let ended = tokio::select! {
            measured = measuring => return measured,
            ended = self.process.wait() => ended?,
            ended = controller => ended?,
        };
        anyhow::bail!("{} ended with {ended} while it was measured", self.process.name())
    }

    /// Polls until `pending` returns `None`. It returns the reason as long as the process has not started.
    pub(super) async fn poll(&self, pending: impl AsyncFn() -> Option<String>) -> Result<()> {
        let (started, name) = (Instant::now(), self.process.name());
        while let Some(reason) = pending().await {
            self.ensure_running()?;
            anyhow::ensure!(
                started.elapsed() < START_TIMEOUT,
                "{name} has not started after {START_TIMEOUT:?}: {reason}"
            );
            tokio::time::sleep(POLL_INTERVAL).await;
        }
        Ok(())
    }

    /// Waits until it has received nothing for `quiet_time`, and returns the bytes that it has received from the API server since its
    /// start.
    pub(super) async fn until_idle(&self, quiet_time: Duration) -> Result<u64> {
        let proxy = self.proxy.as_ref().context("the process has no proxy")?;
        let received = proxy.until_quiet(quiet_time, START_TIMEOUT).await?;
        self.ensure_running().map(|()| received)
    }

    fn ensure_running(&self) -> Result<()> {
        let ended = self.process.try_wait();
        ended.map_or(Ok(()), |status| anyhow::bail!("{} ended with {status}", self.process.name()))
    }

    /// Stops the process, and kills it after `grace`. Returns an error if its exit is not clean.
    pub(super) async fn stop(self, grace: Duration) -> Result<()> {
        let name = self.process.name().to_owned();
        let status = self.stop_in_any_way(grace).await?;
        anyhow::ensure!(status.success(), "{name} did not exit cleanly: {status}");
        Ok(())
    }

    /// Stops a process whose exit need not be clean.
    pub(super) async fn stop_in_any_way(self, grace: Duration) -> Result<ExitStatus> {
        let status = self.process.stop(grace).await?;
        if let Some(controller) = self.controller {
            controller.stop(grace).await?;
        }
        Ok(status)
    }
}

/// Returns the processor time that a process has used since its start.
pub(super) fn processor_time(id: i32) -> Result<Duration> {
    read(id, "stat", ticks_in).map(|ticks| TICK * ticks)
}

fn read<T>(id: i32, file: &str, parse: impl FnOnce(&str) -> Option<T>) -> Result<T> {
    let path = format!("/proc/{id}/{file}");
    let text = std::fs::read_to_string(&path).with_context(|| format!("read {path}"))?;
    parse(&text).with_context(|| format!("parse {path}: {text}"))
}

/// Returns the value of a line such as `VmRSS:     1234 kB`.
fn kib_in(status: &str, field: &str) -> Option<u64> {
    status.lines().find_map(|line| line.strip_prefix(field))?.trim().strip_suffix(" kB")?.parse().ok()
}

/// Returns the sum of `utime` and `stime`, the fields 14 and 15 (proc(5)). The name of the program is in parentheses and may contain any
/// character.
fn ticks_in(stat: &str) -> Option<u32> {
    let (_, fields) = stat.rsplit_once(')')?;
    let times: Vec<u32> =
        fields.split_whitespace().skip(11).take(2).map(|time| time.parse().ok()).collect::<Option<_>>()?;
    (times.len() == 2).then(|| times.iter().sum())
}

/// Starts the provisioner of [`NODE`], whose volumes are in memory. Its log is in `logs`.
pub(super) fn start_provisioner(tests: &LiveTests, logs: &Path) -> Result<MeasuredProcess> {
    let program = tests.serving(fake_nodes::SERVE).log(logs.join("provisioner.log"));
    Ok(MeasuredProcess { process: program.spawn()?, controller: None, proxy: None, _directory: None })
}

/// Starts a control plane with the benchmark profile, the driver's objects, the fake nodes [`NODES`] and an empty [`NAMESPACE`], with the
/// logs in the directory `logs`. Runs `measure` with the directory of the kubeconfigs, and stops the control plane.
pub(super) async fn beside_control_plane(
    session: &Session,
    logs: &Path,
    place: &str,
    measure: impl AsyncFnOnce(&ControlPlane, &Path) -> Result<Samples>,
) -> Result<Environment> {
    let kubernetes = KubernetesMinor::default();
    let (nodes, profile) = (NODES.map(str::to_owned), ClusterProfile::Benchmark);
    let measure = async |control_plane: &ControlPlane, kubeconfigs: &Path| {
        create_namespace(control_plane.client(), NAMESPACE).await?;
        measure(control_plane, kubeconfigs).await
    };
    let samples = fake_nodes::with_driver(session, &nodes, profile, kubernetes, logs, measure).await?;
    environment(place, kubernetes, samples)
}

/// Returns rows that were measured on this machine, with its description. None of its file systems affects the measurements.
pub(super) fn environment(place: &str, kubernetes: KubernetesMinor, samples: Samples) -> Result<Environment> {
    let read = |path: &str| std::fs::read_to_string(path).with_context(|| format!("read {path}"));
    let (cpuinfo, kernel) = (read(Machine::CPUINFO)?, read(Machine::KERNEL)?);
    let machine = Machine::of(&cpuinfo, &kernel, "none", Some(kubernetes.name()));
    Ok(Environment { place: place.to_owned(), machine, rows: samples.0 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processor_time_includes_system_time() {
        let stat = "7 (a) b) S 1 7 7 0 -1 4194304 100 0 0 0 250 50 9 9 20 0 1 0 5 0 0";
        assert_eq!(ticks_in(stat), Some(300));
        assert_eq!(ticks_in("7 (a) S 1 7"), None);
    }

    #[test]
    fn process_has_memory_and_processor_time() {
        let id = std::process::id().try_into().unwrap();
        let rss = read(id, "status", |status| kib_in(status, super::super::memory::CURRENT));
        assert!(rss.unwrap() > 0 && processor_time(id).is_ok());
    }
}

//! Processes of this machine that are measured, beside a control plane whose nodes are objects only. Neither an emulated processor nor
//! a disk affects their measurements.

use std::path::Path;
use std::process::ExitStatus;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use kube::Client;
use tempfile::TempDir;
use testvm::process::Process;
use testvm::session::Session;
use testvm_cluster::{ClusterProfile, ControlPlane, KubernetesSource};

use super::cluster::NAMESPACE;
use super::counting_proxy::CountingProxy;
use super::measurement::{Environment, Machine, Samples};
use crate::fake_nodes::{self, LiveTests, NODES};
use crate::test_env::workload::create_namespace;

/// The node of the processes.
pub(super) const NODE: &str = NODES[0];

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
    process: Process,
    /// The CSI controller of a sidecar, or the driver of a provisioner. Nothing of it is measured.
    controller: Option<Process>,
    /// Counts what the process receives from the API server.
    proxy: Option<CountingProxy>,
    /// Removed after the process, which has its files there.
    _directory: Option<TempDir>,
}

impl MeasuredProcess {
    pub(super) fn new(process: Process) -> MeasuredProcess {
        MeasuredProcess { process, controller: None, proxy: None, _directory: None }
    }

    /// Adds the CSI controller that the process calls.
    #[must_use]
    pub(super) fn beside(self, controller: Process) -> MeasuredProcess {
        MeasuredProcess { controller: Some(controller), ..self }
    }

    /// Adds the directory of its files, and the proxy through which the process connects to the API server.
    #[must_use]
    pub(super) fn behind(self, proxy: Option<CountingProxy>, directory: TempDir) -> MeasuredProcess {
        MeasuredProcess { proxy, _directory: Some(directory), ..self }
    }

    pub(super) fn id(&self) -> i32 {
        self.process.id()
    }

    /// Returns the bytes that it has received from the API server since its start.
    pub(super) fn received(&self) -> u64 {
        self.proxy.as_ref().map_or(0, CountingProxy::received)
    }

    /// Returns its resident memory in bytes.
    pub(super) fn rss(&self) -> Result<u64> {
        read(self.id(), "status", |status| kib_in(status, "VmRSS:"))
    }

    /// Returns its largest resident memory in bytes since its start.
    pub(super) fn peak_rss(&self) -> Result<u64> {
        read(self.id(), "status", |status| kib_in(status, "VmHWM:"))
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

/// Returns the bytes of a line such as `VmRSS:     1234 kB`.
fn kib_in(status: &str, field: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix(field))?;
    let kib: u64 = line.trim().strip_suffix(" kB")?.parse().ok()?;
    Some(kib * 1024)
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
    Ok(MeasuredProcess::new(program.spawn()?))
}

/// Starts a control plane with the benchmark profile, and a provisioner of a fake node with an empty
/// [`NAMESPACE`]. Runs `measure` there with the node's name, and stops both.
pub(super) async fn measured_in_memory(
    session: &Session,
    bench: &str,
    measure: impl AsyncFnOnce(&Client, &str) -> Result<Samples>,
) -> Result<Environment> {
    beside_control_plane(session, bench, async |tests, control_plane, logs| {
        let mut provisioner = start_provisioner(tests, logs)?;
        let samples = provisioner.during(measure(control_plane.client(), NODE)).await?;
        provisioner.stop(STOP_GRACE).await?;
        Ok(samples)
    })
    .await
}

/// Starts a control plane with the benchmark profile and fake nodes, with an empty [`NAMESPACE`]. Runs `measure` there with the
/// programs of the live tests and the directory of the logs, and stops the control plane.
pub(super) async fn beside_control_plane(
    session: &Session,
    bench: &str,
    measure: impl AsyncFnOnce(&LiveTests, &ControlPlane, &Path) -> Result<Samples>,
) -> Result<Environment> {
    let logs = session.workspace.reports("bench").join(bench);
    let kubernetes = KubernetesSource::default();
    let profile = ClusterProfile::Benchmark;
    let program = fake_nodes::build_live_tests(session, profile).await?;
    let measure = async |tests: &LiveTests, control_plane: &ControlPlane| {
        create_namespace(control_plane.client(), NAMESPACE).await?;
        measure(tests, control_plane, &logs).await
    };
    let samples = fake_nodes::with_live_tests(session, &program, profile, &kubernetes, &logs, measure);
    environment("this machine, volumes in memory", &kubernetes, samples.await?)
}

/// Returns rows that were measured on this machine, with its description. None of its file systems affects the measurements.
pub(super) fn environment(
    place: &str,
    kubernetes: &KubernetesSource,
    samples: Samples,
) -> Result<Environment> {
    let read = |path: &str| std::fs::read_to_string(path).with_context(|| format!("read {path}"));
    let (cpuinfo, kernel) = (read(Machine::CPUINFO)?, read(Machine::KERNEL)?);
    let machine = Machine::of(&cpuinfo, &kernel, "none", Some(kubernetes.minor.name()));
    Ok(Environment { place: place.to_owned(), machine, rows: samples.rows() })
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
    fn resident_memory_is_in_bytes() {
        assert_eq!(kib_in("Name:\tx\nVmRSS:\t    1234 kB\nVmData:\t 1 kB\n", "VmRSS:"), Some(1234 * 1024));
        assert_eq!(kib_in("Name:\tx\n", "VmRSS:"), None);
    }

    #[test]
    fn process_has_memory_and_processor_time() {
        let id = std::process::id().try_into().unwrap();
        let rss = read(id, "status", |status| kib_in(status, "VmRSS:"));
        assert!(rss.unwrap() > 0 && processor_time(id).is_ok());
    }
}

//! Runs programs in containers, reads their logs and forwards ports through the API server, as `kubectl` does.

use std::time::Duration;

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::{AttachParams, AttachedProcess, LogParams};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader, Lines, ReadHalf, SimplexStream};
use tokio::time::timeout;

use super::node_vm::unless_node_ends;

/// Limits a program from the request to its end. One that fills a volume takes a minute on an emulated node whose host compiles.
const EXEC_DEADLINE: Duration = Duration::from_secs(240);

/// The result of a program that ran in a container.
#[derive(Debug)]
pub struct ExecOutput {
    /// `true` if the exit code was 0.
    pub succeeded: bool,
    /// The standard output.
    pub stdout: String,
    /// The standard error.
    pub stderr: String,
}

/// Runs a program in a pod with one container, and waits for its end.
pub async fn exec(pods: &Api<Pod>, pod: &str, argv: &[&str]) -> Result<ExecOutput> {
    exec_with(pods, pod, &AttachParams::default(), "", argv).await
}

/// Runs a program in one of a pod's containers, and waits for its end.
pub async fn exec_in(pods: &Api<Pod>, pod: &str, container: &str, argv: &[&str]) -> Result<ExecOutput> {
    exec_with(pods, pod, &AttachParams::default().container(container), "", argv).await
}

/// Runs a program in one of a pod's containers with an input, and waits for its end.
pub async fn exec_with_input(
    pods: &Api<Pod>,
    pod: &str,
    container: &str,
    input: &str,
    argv: &[&str],
) -> Result<ExecOutput> {
    exec_with(pods, pod, &AttachParams::default().container(container).stdin(true), input, argv).await
}

async fn exec_with(
    pods: &Api<Pod>,
    pod: &str,
    params: &AttachParams,
    input: &str,
    argv: &[&str],
) -> Result<ExecOutput> {
    let what = || format!("exec {} in pod {pod}", argv.join(" "));
    let run = async {
        let mut process = pods.exec(pod, argv.iter().copied(), params).await?;
        let (mut stdout, mut stderr) = (String::new(), String::new());
        let mut out = process.stdout().context("no standard output")?;
        let mut err = process.stderr().context("no standard error")?;
        let status = process.take_status().context("no status")?;
        if let Some(mut stdin) = process.stdin() {
            stdin.write_all(input.as_bytes()).await?;
            stdin.shutdown().await?;
        }
        tokio::try_join!(out.read_to_string(&mut stdout), err.read_to_string(&mut stderr))?;
        let status = status.await.context("the connection ended before the program did")?;
        anyhow::Ok(ExecOutput { succeeded: status.status.as_deref() == Some("Success"), stdout, stderr })
    };
    limited(EXEC_DEADLINE, run).await.with_context(what)
}

/// Runs `work` until `within` has passed or a machine of a node ends.
async fn limited<T>(within: Duration, work: impl Future<Output = Result<T>>) -> Result<T> {
    unless_node_ends(async { timeout(within, work).await? }).await
}

/// Runs a program like [`exec`]. Returns its standard output, or an error if it fails.
pub async fn exec_ok(pods: &Api<Pod>, pod: &str, argv: &[&str]) -> Result<String> {
    let said = exec(pods, pod, argv).await?;
    anyhow::ensure!(
        said.succeeded,
        "exec {} in pod {pod} failed: {}{}",
        argv.join(" "),
        said.stdout,
        said.stderr
    );
    Ok(said.stdout)
}

/// A running program in a container whose output is read line by line.
pub struct ExecStream {
    what: String,
    process: AttachedProcess,
    lines: Lines<BufReader<ReadHalf<SimplexStream>>>,
}

impl ExecStream {
    /// Starts a program in a pod with one container.
    pub async fn start(pods: &Api<Pod>, pod: &str, argv: &[&str]) -> Result<ExecStream> {
        let what = format!("exec {} in pod {pod}", argv.join(" "));
        let start = async {
            let mut process = pods.exec(pod, argv.iter().copied(), &AttachParams::default()).await?;
            let stdout = process.stdout().context("no standard output")?;
            anyhow::Ok((process, BufReader::new(stdout).lines()))
        };
        let (process, lines) = limited(EXEC_DEADLINE, start).await.with_context(|| what.clone())?;
        Ok(ExecStream { what, process, lines })
    }

    /// Returns the next line of its output. It is an error if the program ends before that.
    pub async fn line(&mut self, within: Duration) -> Result<String> {
        let next = async { Ok(self.lines.next_line().await?) };
        let line = limited(within, next).await;
        match line.with_context(|| format!("{}: no output within {within:?}", self.what))? {
            Some(line) => Ok(line),
            None => {
                let mut complaint = String::new();
                let mut stderr = self.process.stderr().context("no standard error")?;
                timeout(EXEC_DEADLINE, stderr.read_to_string(&mut complaint)).await??;
                anyhow::bail!("{} has ended: {complaint}", self.what)
            }
        }
    }
}

/// Requests a page from a pod's port by port forwarding, and returns the whole response.
pub async fn http_get(pods: &Api<Pod>, pod: &str, port: u16, page: &str) -> Result<String> {
    let what = || format!("port-forward to {port} of pod {pod}");
    let talk = async {
        let mut forwarder = pods.portforward(pod, &[port]).await?;
        let mut stream = forwarder.take_stream(port).context("no stream")?;
        stream.write_all(format!("GET {page} HTTP/1.0\r\n\r\n").as_bytes()).await?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await?;
        anyhow::Ok(answer)
    };
    limited(EXEC_DEADLINE, talk).await.with_context(what)
}

/// Returns the end of a container's log, or that of its previous instance if it was just restarted.
pub async fn log_tail(pods: &Api<Pod>, pod: &str, container: &str, lines: i64) -> String {
    match tail(pods, pod, container, lines, false).await {
        Ok(text) if !text.trim().is_empty() => text,
        current => match (tail(pods, pod, container, lines, true).await, current) {
            (Ok(text), _) => text,
            (Err(_), Ok(_)) => "(nothing was logged)".into(),
            (Err(_), Err(error)) => format!("(its log cannot be read: {error})"),
        },
    }
}

/// Returns the end of the log of a container's previous instance.
pub async fn previous_log_tail(pods: &Api<Pod>, pod: &str, container: &str, lines: i64) -> String {
    match tail(pods, pod, container, lines, true).await {
        Ok(text) => text,
        Err(error) => format!("(its log cannot be read: {error})"),
    }
}

async fn tail(
    pods: &Api<Pod>,
    pod: &str,
    container: &str,
    lines: i64,
    previous: bool,
) -> kube::Result<String> {
    let container = Some(container.into());
    let params = LogParams { container, tail_lines: Some(lines), previous, ..LogParams::default() };
    pods.logs(pod, &params).await
}

//! Talking to containers through the API server, as `kubectl exec`, `logs` and `port-forward` do.

use std::time::Duration;

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::{AttachParams, LogParams};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::timeout;

/// From the request to the end of a program that only looks something up.
const EXEC_DEADLINE: Duration = Duration::from_secs(60);

/// What a program run in a container left.
#[derive(Debug)]
pub(super) struct Said {
    pub(super) succeeded: bool,
    pub(super) stdout: String,
    pub(super) stderr: String,
}

/// Runs a program in a pod of one container to its end.
pub(super) async fn exec(pods: &Api<Pod>, pod: &str, argv: &[&str]) -> Result<Said> {
    exec_with(pods, pod, &AttachParams::default(), argv).await
}

/// Runs a program in one of a pod's containers to its end.
pub(super) async fn exec_in(pods: &Api<Pod>, pod: &str, container: &str, argv: &[&str]) -> Result<Said> {
    exec_with(pods, pod, &AttachParams::default().container(container), argv).await
}

async fn exec_with(pods: &Api<Pod>, pod: &str, params: &AttachParams, argv: &[&str]) -> Result<Said> {
    let what = || format!("exec {} in pod {pod}", argv.join(" "));
    let run = async {
        let mut process = pods.exec(pod, argv.iter().copied(), params).await?;
        let (mut stdout, mut stderr) = (String::new(), String::new());
        let mut out = process.stdout().context("no standard output")?;
        let mut err = process.stderr().context("no standard error")?;
        let status = process.take_status().context("no status")?;
        tokio::try_join!(out.read_to_string(&mut stdout), err.read_to_string(&mut stderr))?;
        let status = status.await.context("the connection ended before the program did")?;
        anyhow::Ok(Said { succeeded: status.status.as_deref() == Some("Success"), stdout, stderr })
    };
    timeout(EXEC_DEADLINE, run).await.with_context(what)?.with_context(what)
}

/// [`exec`] of a program that must succeed; answers what it printed.
pub(super) async fn exec_ok(pods: &Api<Pod>, pod: &str, argv: &[&str]) -> Result<String> {
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

/// Sends an HTTP request to a pod's port by port forwarding, and answers all that comes back.
pub(super) async fn http_get(pods: &Api<Pod>, pod: &str, port: u16) -> Result<String> {
    let what = || format!("port-forward to {port} of pod {pod}");
    let talk = async {
        let mut forwarder = pods.portforward(pod, &[port]).await?;
        let mut stream = forwarder.take_stream(port).context("no stream")?;
        stream.write_all(b"GET / HTTP/1.0\r\n\r\n").await?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await?;
        anyhow::Ok(answer)
    };
    timeout(EXEC_DEADLINE, talk).await.with_context(what)?.with_context(what)
}

/// The end of a container's log; of the container before it, if it has just been started again.
pub(super) async fn last_words(pods: &Api<Pod>, pod: &str, container: &str, lines: i64) -> String {
    let mut params =
        LogParams { container: Some(container.into()), tail_lines: Some(lines), ..LogParams::default() };
    match pods.logs(pod, &params).await {
        Ok(text) if !text.trim().is_empty() => text,
        current => {
            params.previous = true;
            match (pods.logs(pod, &params).await, current) {
                (Ok(text), _) => text,
                (Err(_), Ok(_)) => "(nothing was logged)".into(),
                (Err(_), Err(error)) => format!("(its log cannot be read: {error})"),
            }
        }
    }
}

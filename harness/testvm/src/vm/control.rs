//! The host's side of the control port: concurrent requests to a running node.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result};
use testvm_guest::control::{Action, ExecOutput, Request, Response};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::{oneshot, watch};

use super::phase::Phase;

/// The additional time that the guest has to kill a program that exceeds its timeout, and to report that.
const ANSWER_MARGIN: Duration = Duration::from_secs(30);
/// The time from the end of the control port to the cause of the machine's end.
const CAUSE_TIMEOUT: Duration = Duration::from_secs(10);
/// The cause of an end that is no failure.
const SWITCHED_OFF: &str = "its power was switched off";

/// A client for requests to a node. Clones share the port, and requests run concurrently.
#[derive(Clone, Debug)]
pub struct Control(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    next_id: AtomicU64,
    writer: tokio::sync::Mutex<OwnedWriteHalf>,
    waiting: Mutex<HashMap<u64, oneshot::Sender<Response>>>,
    phase: watch::Receiver<Phase>,
}

impl Control {
    pub(super) fn new(
        stream: UnixStream,
        phase: watch::Receiver<Phase>,
    ) -> (Control, impl Future<Output = ()> + Send + use<>) {
        let (reader, writer) = stream.into_split();
        let shared = Arc::new(Shared {
            next_id: AtomicU64::new(1),
            writer: tokio::sync::Mutex::new(writer),
            waiting: Mutex::default(),
            phase,
        });
        (Control(Arc::clone(&shared)), receive(shared, reader))
    }

    /// Runs a program as root in the node until it ends, and returns its output, whatever its exit code.
    ///
    /// # Errors
    /// The program cannot be started, runs longer than `timeout`, or the machine ends first.
    pub async fn exec<S: AsRef<str>>(
        &self,
        argv: impl IntoIterator<Item = S>,
        timeout: Duration,
    ) -> Result<ExecOutput> {
        self.exec_with_input(argv, "", timeout).await
    }

    /// Runs a program like [`Control::exec`], with `input` as its standard input.
    pub async fn exec_with_input<S: AsRef<str>>(
        &self,
        argv: impl IntoIterator<Item = S>,
        input: &str,
        timeout: Duration,
    ) -> Result<ExecOutput> {
        let argv: Vec<String> = argv.into_iter().map(|arg| arg.as_ref().to_owned()).collect();
        let what = argv.join(" ");
        let action = Action::Exec { argv, input: input.to_owned(), timeout };
        let output = self.ask(action, timeout).await.with_context(|| format!("in the node: {what}"))?;
        output.with_context(|| format!("in the node: {what}: no output came back"))
    }

    /// Runs a program and returns its output if its exit code is 0.
    ///
    /// # Errors
    /// As [`Control::exec`], or the exit code is not 0; the error has the program's standard error.
    pub async fn output<S: AsRef<str>>(
        &self,
        argv: impl IntoIterator<Item = S> + Clone,
        timeout: Duration,
    ) -> Result<String> {
        let output = self.exec(argv.clone(), timeout).await?;
        let what = || argv.into_iter().map(|arg| arg.as_ref().to_owned()).collect::<Vec<_>>().join(" ");
        anyhow::ensure!(
            output.code == 0,
            "in the node: {} ended with {}: {}",
            what(),
            output.code,
            output.stderr.trim()
        );
        Ok(output.stdout)
    }

    /// Sends a signal to a service, by its name in the specification.
    ///
    /// # Errors
    /// The service does not run, or the machine ends first.
    pub async fn signal_service(&self, name: &str, signal: nix::sys::signal::Signal) -> Result<()> {
        let action = Action::SignalService { name: name.to_owned(), signal: signal as i32 };
        self.ask(action, Duration::ZERO).await.map(drop)
    }

    pub(super) async fn power_off(&self) -> Result<()> {
        self.ask(Action::PowerOff, Duration::ZERO).await.map(drop)
    }

    async fn ask(&self, action: Action, runs_for: Duration) -> Result<Option<ExecOutput>> {
        let id = self.0.next_id.fetch_add(1, Ordering::Relaxed);
        let (sender, response) = oneshot::channel();
        self.0.waiting().insert(id, sender);
        let mut line = serde_json::to_vec(&Request { id, action })?;
        line.push(b'\n');
        self.0.writer.lock().await.write_all(&line).await.context("write to the control port")?;
        let response = tokio::time::timeout(runs_for + ANSWER_MARGIN, response).await;
        self.0.waiting().remove(&id);
        let Ok(response) = response.context("the node does not answer")? else {
            anyhow::bail!("the machine ended: {}", self.cause().await)
        };
        response.result.map_err(anyhow::Error::msg)
    }

    /// Returns why the machine ended. The control port closes before the cause is known.
    async fn cause(&self) -> String {
        let mut phase = self.0.phase.clone();
        let ended = phase.wait_for(|phase| matches!(phase, Phase::Ended(_)));
        match tokio::time::timeout(CAUSE_TIMEOUT, ended).await.as_ref().map(|ended| ended.as_deref()) {
            Ok(Ok(Phase::Ended(ending))) => ending.failure().unwrap_or(SWITCHED_OFF).to_owned(),
            _ => SWITCHED_OFF.to_owned(),
        }
    }
}

impl Shared {
    fn waiting(&self) -> MutexGuard<'_, HashMap<u64, oneshot::Sender<Response>>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Passes responses to their callers until the machine ends. Callers that still wait then get an error.
async fn receive(shared: Arc<Shared>, reader: OwnedReadHalf) {
    let mut lines = BufReader::new(reader).lines();
    while let Ok(Some(line)) = lines.next_line().await {
        let Ok(response) = serde_json::from_str::<Response>(&line) else { continue };
        if let Some(waiting) = shared.waiting().remove(&response.id) {
            // The caller may have timed out.
            drop(waiting.send(response));
        }
    }
    shared.waiting().clear();
}

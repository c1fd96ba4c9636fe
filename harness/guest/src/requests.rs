//! The guest's side of the control port.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::Duration;

use anyhow::{Context, Result};
use nix::sys::signal::Signal;

use super::children::{Children, Output, command};
use super::control::{Action, ExecOutput, Request, Response};
use super::report::End;
use super::services::{Services, StopReason};

/// The retry interval: a port reads as empty while the host is not connected, and the host may connect again.
const RETRY_INTERVAL: Duration = Duration::from_millis(200);

#[derive(Clone)]
struct Server {
    children: Children,
    services: Services,
    end: mpsc::Sender<StopReason>,
    port: Arc<Mutex<File>>,
}

/// Serves requests in a thread, and runs each in a thread of its own, until the machine ends.
pub(super) fn serve(
    port: File,
    children: Children,
    services: Services,
    end: mpsc::Sender<StopReason>,
) -> Result<()> {
    let writer = port.try_clone().context("duplicate the control port")?;
    let server = Server { children, services, end, port: Arc::new(Mutex::new(writer)) };
    std::thread::spawn(move || {
        let mut reader = BufReader::new(port);
        let mut line = String::new();
        loop {
            match reader.read_line(&mut line) {
                Ok(count) if count > 0 && line.ends_with('\n') => {
                    server.accept(&line);
                    line.clear();
                }
                Ok(_) => std::thread::sleep(RETRY_INTERVAL),
                Err(error) => {
                    eprintln!("guest-init: read the control port: {error}");
                    std::thread::sleep(RETRY_INTERVAL);
                }
            }
        }
    });
    Ok(())
}

impl Server {
    fn accept(&self, line: &str) {
        let request: Request = match serde_json::from_str(line) {
            Ok(request) => request,
            // Without an id, the response could not be matched to a request.
            Err(error) => return eprintln!("guest-init: request {line:?}: {error}"),
        };
        let server = self.clone();
        std::thread::spawn(move || {
            let result = server.perform(request.action).map_err(|error| format!("{error:#}"));
            server.respond(&Response { id: request.id, result });
        });
    }

    fn perform(&self, action: Action) -> Result<Option<ExecOutput>> {
        match action {
            Action::Exec { argv, input, timeout } => {
                let command = command(&argv)?;
                let (end, stdout, stderr) = self
                    .children
                    .run("exec", command, &input, Output::Capture, timeout)
                    .with_context(|| format!("run {}", argv.join(" ")))?;
                let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
                Ok(Some(ExecOutput {
                    code: exit_code(&end).with_context(|| format!("{}: {end:?}", argv.join(" ")))?,
                    stdout: text(stdout),
                    stderr: text(stderr),
                }))
            }
            Action::SignalService { name, signal } => {
                let signal = Signal::try_from(signal).with_context(|| format!("no signal is {signal}"))?;
                self.services.signal(&name, signal)?;
                Ok(None)
            }
            Action::PowerOff => {
                self.end.send(Ok(())).context("the machine is ending already")?;
                Ok(None)
            }
        }
    }

    fn respond(&self, response: &Response) {
        let Ok(mut line) = serde_json::to_vec(response) else { return };
        line.push(b'\n');
        let mut port = self.port.lock().unwrap_or_else(PoisonError::into_inner);
        if let Err(error) = port.write_all(&line) {
            eprintln!("guest-init: respond: {error}");
        }
    }
}

/// Returns the exit code as a shell reports it.
fn exit_code(end: &End) -> Option<i32> {
    match end {
        End::Exited(code) => Some(*code),
        End::Signalled(name) => name.parse::<Signal>().ok().map(|signal| 128 + signal as i32),
        End::TimedOut | End::NotStarted(_) => None,
    }
}

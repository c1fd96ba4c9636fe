//! The services of a node: started in order, watched, and restarted if the specification requires it.

use std::collections::HashMap;
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::children::{Children, Output, command};
use super::log_file::LogFile;
use super::report::{End, Message};
use super::reporter::Reporter;
use super::spec::{Condition, Service};

/// The delay before a restart, so that a service that ends immediately does not fill the log.
const RESTART_DELAY: Duration = Duration::from_secs(1);
/// The poll interval: no event announces that a socket or health endpoint is ready.
const READY_POLL: Duration = Duration::from_millis(100);

/// Why the machine ends: the host requested it, or something failed.
pub(super) type StopReason = Result<(), String>;

#[derive(Clone, Debug)]
pub(super) struct Services(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    children: Children,
    reporter: Reporter,
    end: mpsc::Sender<StopReason>,
    stopping: AtomicBool,
    running: Mutex<HashMap<String, Pid>>,
    changed: Condvar,
}

impl Services {
    pub(super) fn new(children: Children, reporter: Reporter, end: mpsc::Sender<StopReason>) -> Services {
        Services(Arc::new(Shared {
            children,
            reporter,
            end,
            stopping: AtomicBool::new(false),
            running: Mutex::default(),
            changed: Condvar::new(),
        }))
    }

    /// Starts a service and waits until it is ready.
    pub(super) fn start(&self, service: &Service) -> Result<()> {
        let (first_start, started) = mpsc::channel();
        std::thread::spawn({
            let (shared, service) = (Arc::clone(&self.0), service.clone());
            move || shared.supervise(&service, &first_start)
        });
        started.recv().with_context(|| format!("start the service {}", service.name))??;
        let deadline = Instant::now() + service.ready_within;
        while !holds(&service.ready, &self.0.children) {
            anyhow::ensure!(
                Instant::now() < deadline,
                "the service {} was not ready within {:?}: {:?}",
                service.name,
                service.ready_within,
                service.ready
            );
            std::thread::sleep(READY_POLL);
        }
        Ok(())
    }

    pub(super) fn signal(&self, name: &str, signal: Signal) -> Result<()> {
        let running = self.0.running();
        let pid = running.get(name).with_context(|| format!("no service called {name} is running"))?;
        kill(*pid, signal).with_context(|| format!("send {signal} to {name}"))
    }

    /// Sends SIGTERM to all services, and returns the names of those that still run after `timeout`.
    pub(super) fn end(&self, timeout: Duration) -> Vec<String> {
        self.stop();
        for pid in self.0.running().values() {
            // ESRCH: the service has just ended.
            kill(*pid, Signal::SIGTERM).ok();
        }
        self.wait_ended(timeout);
        self.0.running().keys().cloned().collect()
    }

    /// Disables restarts.
    pub(super) fn stop(&self) {
        self.0.stopping.store(true, Ordering::SeqCst);
    }

    /// Waits until all services have ended or `timeout` has passed.
    pub(super) fn wait_ended(&self, timeout: Duration) {
        let running = self.0.running();
        // The result does not matter: the caller kills the remaining processes.
        drop(self.0.changed.wait_timeout_while(running, timeout, |running| !running.is_empty()));
    }
}

impl Shared {
    fn running(&self) -> MutexGuard<'_, HashMap<String, Pid>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn supervise(&self, service: &Service, first_start: &mpsc::Sender<Result<()>>) {
        loop {
            let end = match self.run_once(service, first_start) {
                Ok(end) => end,
                Err(error) => {
                    // The caller that waits for the first start gets the error; a later failure fails the node below.
                    let why = format!("{error:#}");
                    drop(first_start.send(Err(error)));
                    End::NotStarted(why)
                }
            };
            if self.stopping.load(Ordering::SeqCst) {
                return;
            }
            let restarted = service.restart;
            self.reporter.send(&Message::ServiceEnded {
                name: service.name.clone(),
                how: format!("{end:?}"),
                restarted,
            });
            if !restarted {
                let why = format!("the service {} ended: {end:?}", service.name);
                return drop(self.end.send(Err(why)));
            }
            std::thread::sleep(RESTART_DELAY);
        }
    }

    fn run_once(&self, service: &Service, started: &mpsc::Sender<Result<()>>) -> Result<End> {
        let mut command = command(&service.argv)?;
        command.envs(&service.env);
        command.stdin(std::process::Stdio::null());
        let log_file = service.log_file.as_deref().map(LogFile::open).transpose()?;
        let child = self
            .children
            .spawn(&service.name, command, Output::Log(self.reporter.clone(), log_file))
            .with_context(|| format!("run {}", service.argv.join(" ")))?;
        self.running().insert(service.name.clone(), child.pid());
        // A caller waits for the first start only.
        drop(started.send(Ok(())));
        let end = child.wait();
        self.running().remove(&service.name);
        self.changed.notify_all();
        drop(child.output());
        Ok(end)
    }
}

fn holds(condition: &Condition, children: &Children) -> bool {
    match condition {
        Condition::UnixSocket(path) => UnixStream::connect(path).is_ok(),
        Condition::Tcp(address) => TcpStream::connect(address).is_ok(),
        Condition::Succeeds(argv) => {
            let Ok(command) = command(argv) else { return false };
            let run = children.run("readiness", command, "", Output::Capture, Duration::from_secs(30));
            matches!(run, Ok((End::Exited(0), ..)))
        }
    }
}

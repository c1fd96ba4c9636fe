//! A worker: a process that calls the library. It runs each call in a thread of its own, and can be killed at any moment.

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use loopfs::loop_device::{Access, Detach, LoopControl, LoopDevice, PoolOptions};
use nix::fcntl::{FcntlArg, OFlag, fcntl};

use super::calls::{Attachment, Call, Handle, Reply};
use super::{FILES, RANGE, file_path};
use crate::environment::this_test_again;

/// The variable with the directory of the files.
pub(super) const WORKER: &str = "LOOPFS_TEST_LOOP_WORKER";
/// Begins each line of a worker, to tell it from those of libtest.
const MARK: &str = "@";
/// The line before each call.
const BEGUN: &str = "begun";
/// Longer than any call takes.
const TIMEOUT: Duration = Duration::from_secs(60);

/// The test's side of a worker.
pub(super) struct Worker {
    child: Child,
    input: Option<ChildStdin>,
    lines: Receiver<String>,
    sent: usize,
}

impl Worker {
    /// Starts a worker, and waits until its pool has been filled.
    pub(super) fn start(directory: &Path) -> Self {
        let mut child = this_test_again(WORKER, directory).stdin(Stdio::piped()).spawn().unwrap();
        let (sender, lines) = channel();
        let mut output = BufReader::new(child.stdout.take().unwrap());
        std::thread::spawn(move || {
            let mut line = String::new();
            while output.read_line(&mut line).is_ok() {
                // The last line of a killed process may be incomplete.
                let Some(complete) = line.strip_suffix('\n') else { break };
                if let Some(text) = complete.strip_prefix(MARK) {
                    // The receiver is dropped with the worker.
                    sender.send(text.to_owned()).ok();
                }
                line.clear();
            }
        });
        let input = child.stdin.take();
        let worker = Self { child, input, lines, sent: 0 };
        assert_eq!(worker.line().as_deref(), Some("ready"), "a worker did not start");
        worker
    }

    /// Starts a call. Returns the number that its reply has.
    pub(super) fn send(&mut self, call: &Call) -> usize {
        let line = serde_json::to_string(&(self.sent, call)).unwrap();
        writeln!(self.input.as_ref().unwrap(), "{line}").unwrap();
        self.sent += 1;
        self.sent - 1
    }

    /// Waits until a call of this round has begun, so that a kill hits a call in progress.
    pub(super) fn until_begun(&self) {
        assert_eq!(self.line().as_deref(), Some(BEGUN));
    }

    /// Waits for the next reply of any call. Returns `None` if the worker has ended.
    pub(super) fn receive(&self) -> Option<(usize, Reply)> {
        let reply = std::iter::from_fn(|| self.line()).find(|line| line != BEGUN)?;
        Some(serde_json::from_str(&reply).unwrap())
    }

    fn line(&self) -> Option<String> {
        match self.lines.recv_timeout(TIMEOUT) {
            Ok(line) => Some(line),
            Err(RecvTimeoutError::Disconnected) => None,
            Err(RecvTimeoutError::Timeout) => panic!("a worker did not reply within {TIMEOUT:?}"),
        }
    }

    /// Kills the process, and waits until the kernel has closed its descriptors.
    pub(super) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // A process that has ended already is no error.
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

/// The process of a worker. It ends when its input is closed.
pub(super) fn run(directory: &Path) {
    let hook = std::panic::take_hook();
    // Otherwise the test would wait for the reply of a thread that has panicked.
    std::panic::set_hook(Box::new(move |info| {
        hook(info);
        std::process::abort();
    }));
    let process = Process::new(directory);
    // libtest has printed the name of the test without a line feed.
    println!("\n{MARK}ready");
    std::thread::scope(|scope| {
        for line in std::io::stdin().lines() {
            let (number, call): (usize, Call) = serde_json::from_str(&line.unwrap()).unwrap();
            let process = &process;
            scope.spawn(move || {
                println!("{MARK}{BEGUN}");
                let reply = process.perform(&call).unwrap_or_else(Reply::from);
                println!("{MARK}{}", serde_json::to_string(&(number, reply)).unwrap());
            });
        }
    });
}

struct Process {
    control: LoopControl,
    directory: PathBuf,
    devices: Mutex<HashMap<Handle, LoopDevice>>,
}

impl Process {
    fn new(directory: &Path) -> Self {
        let control = LoopControl::with_pool(PoolOptions { range: RANGE, keep_idle: RANGE.len() }).unwrap();
        Self { control, directory: directory.to_owned(), devices: Mutex::default() }
    }

    /// Opens a file for reading. Each call has an open file description of its own, as two processes have.
    fn open(&self, file: usize) -> File {
        File::open(file_path(&self.directory, file)).unwrap()
    }

    fn devices(&self) -> MutexGuard<'_, HashMap<Handle, LoopDevice>> {
        self.devices.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn perform(&self, call: &Call) -> loopfs::Result<Reply> {
        match *call {
            Call::Attach { file, request, keep } => {
                self.keep(self.control.attach(self.open(file), &request.options())?, keep)
            }
            Call::EnsureAttached { file, request, keep } => {
                self.keep(self.control.ensure_attached(self.open(file), &request.options())?, keep)
            }
            Call::Find { file } => {
                let found = self.control.find(self.open(file))?;
                found.iter().map(Attachment::of).collect::<Result<_, _>>().map(Reply::Devices)
            }
            Call::List => {
                let bound = self.control.list()?.devices;
                Ok(Reply::Devices(bound.iter().map(Attachment::of_status).collect()))
            }
            Call::DetachAll { file } => self.control.detach_all(self.open(file)).map(of_detach),
            Call::Detach { handle, tells_pool } => {
                let device = self.take(handle);
                let detached = if tells_pool { self.control.detach(device) } else { device.detach() };
                Ok(of_detach(detached?))
            }
            Call::CancelDetach { handle } => self.with(handle, |device| device.cancel_detach()),
            Call::RefreshCapacity { handle, file } => {
                let device = self.take(handle);
                let size = device.refresh_capacity(self.open(file));
                self.devices().insert(handle, device);
                size.map(|size| Reply::Size(size.0))
            }
            Call::Status { handle } => {
                let device = self.take(handle);
                self.keep(device, Some(handle))
            }
            Call::Close { handle } => {
                drop(self.take(handle));
                Ok(Reply::Done)
            }
            Call::RemoveIdle { keep } => Ok(Reply::Removed(self.control.remove_idle(keep))),
            Call::UseUpRange => self.use_up_range(),
        }
    }

    fn take(&self, handle: Handle) -> LoopDevice {
        self.devices().remove(&handle).unwrap()
    }

    fn with(
        &self,
        handle: Handle,
        work: impl FnOnce(&LoopDevice) -> loopfs::Result<()>,
    ) -> loopfs::Result<Reply> {
        let device = self.take(handle);
        let result = work(&device);
        self.devices().insert(handle, device);
        result.map(|()| Reply::Done)
    }

    fn keep(&self, device: LoopDevice, handle: Option<Handle>) -> loopfs::Result<Reply> {
        let attachment = Attachment::of(&device)?;
        let flags = OFlag::from_bits_truncate(fcntl(&device, FcntlArg::F_GETFL).unwrap());
        let writable = flags & OFlag::O_ACCMODE == OFlag::O_RDWR;
        if let Some(handle) = handle {
            self.devices().insert(handle, device);
        }
        Ok(Reply::Device { attachment, writable })
    }

    fn use_up_range(&self) -> loopfs::Result<Reply> {
        let mut devices = Vec::new();
        let error = loop {
            let options = loopfs::loop_device::AttachOptions::new(Access::ReadWrite);
            let file = FILES + devices.len();
            assert!(devices.len() <= RANGE.len(), "more devices than the range has indices");
            match self.control.attach(self.open(file), &options) {
                Ok(device) => devices.push(device),
                Err(error) => break error,
            }
        };
        let indices = devices.iter().map(LoopDevice::index).collect();
        for (number, device) in devices.into_iter().enumerate() {
            // Half of them without the pool, which must find these again.
            let detached = if number % 2 == 0 { self.control.detach(device) } else { device.detach() };
            assert_eq!(detached?, Detach::Detached);
        }
        if error.kind() == loopfs::ErrorKind::NoSpace { Ok(Reply::UsedUp(indices)) } else { Err(error) }
    }
}

fn of_detach(detach: Detach) -> Reply {
    match detach {
        Detach::Detached => Reply::Detached,
        Detach::Deferred(_) => Reply::Deferred,
    }
}

/// Collects the replies of some calls, fewer if the worker ends.
pub(super) fn replies(worker: &Worker, count: usize) -> HashMap<usize, Reply> {
    let start = Instant::now();
    let mut replies = HashMap::new();
    while replies.len() < count {
        assert!(start.elapsed() < TIMEOUT, "a worker takes too long");
        let Some((number, reply)) = worker.receive() else { break };
        replies.insert(number, reply);
    }
    replies
}

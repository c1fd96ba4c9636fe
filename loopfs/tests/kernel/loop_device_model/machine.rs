//! The machine under test: its files, workers and users of devices, and what the reference model knows of them.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

use loopfs::loop_device::{LoopControl, PoolOptions};

use super::calls::{Attachment, Call, Handle, Mapping};
use super::event::{Event, User};
use super::invariants::ensure;
use super::outside::{self, Hold};
use super::plan::{OutsideAct, Step};
use super::reference::{FileFacts, State};
use super::worker::{self, Worker};
use super::{FILES, FORMATTED, PRIVATE, RANGE, WORKERS, file_path, invariants, observed};
use crate::disk::mkfs;
use crate::environment::{directory, holds_in_time};

/// The size of a file at first, larger than the size limits of the plan. An XFS has at least 300 MiB.
const SIZE: u64 = 1 << 20;
const FORMATTED_SIZE: u64 = 300 << 20;
const EXPANSION: u64 = 4096;
/// The devices that the other program has at most.
const MAX_FOREIGN: usize = 4;
/// The lines that a failure prints.
const HISTORY: usize = 60;

pub(super) struct Machine {
    /// First, so that it is dropped before the files.
    holds: BTreeMap<User, Hold>,
    workers: Vec<Option<Worker>>,
    state: State,
    /// The number of the next handle or user.
    next: u64,
    history: Vec<String>,
    mount_point: tempfile::TempDir,
    directory: tempfile::TempDir,
}

impl Machine {
    pub(super) fn new() -> Self {
        let directory = directory();
        // Each index of the range can be bound to a file of its own.
        for file in 0..FILES + RANGE.len() + 1 {
            let size = if file == FORMATTED { FORMATTED_SIZE } else { SIZE };
            File::create_new(file_path(directory.path(), file)).unwrap().set_len(size).unwrap();
        }
        mkfs(&[], &file_path(directory.path(), FORMATTED));
        let facts = |file: usize| {
            let metadata = std::fs::metadata(file_path(directory.path(), file)).unwrap();
            FileFacts { inode: metadata.ino(), size: metadata.len(), has_been_read_only: false }
        };
        Self {
            holds: BTreeMap::new(),
            workers: (0..WORKERS).map(|_| None).collect(),
            state: State { devices: Vec::new(), files: (0..FILES).map(facts).collect() },
            next: 0,
            history: Vec::new(),
            mount_point: crate::environment::scratch(),
            directory,
        }
    }

    fn path(&self) -> &Path {
        self.directory.path()
    }

    /// Performs a step, and checks it.
    pub(super) fn perform(&mut self, step: Step) -> Result<(), String> {
        match step {
            Step::Round { calls, outside, kill } => {
                let mut used = BTreeSet::new();
                let mut resolved = Vec::new();
                for (worker, planned) in calls {
                    // A handle is used by one call at a time.
                    let is_possible = |call: &Call| call.handle().is_none_or(|handle| used.insert(handle));
                    let call = self.resolved(worker, planned).filter(is_possible);
                    resolved.extend(call.map(|call| (worker, call)));
                }
                self.round(resolved, outside, kill)
            }
            Step::Use { nth, mount } => {
                self.hold(nth, mount);
                Ok(())
            }
            Step::Expand { file } => {
                let size = &mut self.state.files[file].size;
                *size += EXPANSION;
                let expanded =
                    File::options().write(true).open(file_path(self.directory.path(), file)).unwrap();
                expanded.set_len(*size).unwrap();
                self.history.push(format!("file {file} has {size} bytes"));
                Ok(())
            }
        }
    }

    /// Returns a planned call with handles that exist now.
    fn resolved(&mut self, worker: usize, mut call: Call) -> Option<Call> {
        match &mut call {
            Call::Attach { keep: Some(handle), .. } | Call::EnsureAttached { keep: Some(handle), .. } => {
                *handle = self.new_handle(worker);
            }
            Call::RefreshCapacity { handle, file } => {
                (*handle, *file) = self.existing_handle(worker, handle.number)?;
            }
            Call::Detach { handle, .. }
            | Call::CancelDetach { handle }
            | Call::Status { handle }
            | Call::Close { handle } => *handle = self.existing_handle(worker, handle.number)?.0,
            _ => {}
        }
        Some(call)
    }

    /// Returns one of the handles of a worker, and the file of its device.
    fn existing_handle(&self, worker: usize, nth: u64) -> Option<(Handle, usize)> {
        let devices = self.state.devices.iter();
        let users = devices.flat_map(|device| device.users.iter().map(|user| (user, device.file)));
        let of_worker = users.filter_map(|(user, file)| match user {
            User::Handle(handle) if handle.worker == worker => Some((*handle, file)),
            _ => None,
        });
        let all: Vec<_> = of_worker.collect();
        (!all.is_empty()).then(|| all[nth as usize % all.len()])
    }

    fn new_handle(&mut self, worker: usize) -> Handle {
        self.next += 1;
        Handle { worker, number: self.next }
    }

    /// Runs calls concurrently, and checks what they have done.
    fn round(
        &mut self,
        calls: Vec<(usize, Call)>,
        outside: Option<OutsideAct>,
        kill: Option<(usize, Duration)>,
    ) -> Result<(), String> {
        let mut sent: Vec<Vec<(usize, Call)>> = vec![Vec::new(); WORKERS];
        for (worker, _) in &calls {
            self.workers[*worker].get_or_insert_with(|| Worker::start(self.directory.path()));
        }
        let outside = outside.filter(|act| self.is_possible(act, &calls));
        for (worker, call) in calls {
            let number = self.workers[worker].as_mut().unwrap().send(&call);
            sent[worker].push((number, call));
        }
        let mut events = Vec::new();
        let mut killed = None;
        if let Some((number, delay)) = kill
            && let Some(mut process) = self.workers[number].take()
        {
            if !sent[number].is_empty() {
                process.until_begun();
            }
            // A moment in a call that is in progress.
            std::thread::sleep(delay);
            process.kill();
            events.push(Event::Died { worker: number });
            killed = Some((number, process));
        }
        events.extend(outside.and_then(|act| self.act(act)));
        for (worker, calls) in sent.into_iter().enumerate() {
            let dead = killed.as_ref().filter(|(killed, _)| *killed == worker).map(|(_, process)| process);
            let Some(process) = dead.or(self.workers[worker].as_ref()) else { continue };
            let mut replies = worker::replies(process, calls.len());
            for (number, call) in calls {
                events.push(match replies.remove(&number) {
                    Some(reply) => Event::Replied { worker, call, reply },
                    None if dead.is_some() => Event::Interrupted { worker, call },
                    None => return Err(format!("a worker died during {call:?}")),
                });
            }
        }
        self.check(&events)
    }

    fn check(&mut self, events: &[Event]) -> Result<(), String> {
        if events.is_empty() {
            return Ok(());
        }
        self.history.push(events.iter().map(|event| format!("{event:?}")).collect::<Vec<_>>().join("\n    "));
        let observed = observed::attachments(self.path());
        invariants::check(&self.state, events, &observed)?;
        match self.state.after(&events.iter().collect::<Vec<_>>(), &observed) {
            Some(state) => {
                self.state = state;
                Ok(())
            }
            None => Err(format!(
                "no order of the calls leads from the devices before to those that the kernel reports\nbefore: {:#?}\nnow: {observed:#?}",
                self.state
            )),
        }
    }

    /// Returns `true` if another program can act beside these calls, and the test knows which device it affects.
    fn is_possible(&self, act: &OutsideAct, calls: &[(usize, Call)]) -> bool {
        match act {
            OutsideAct::Bind { .. } => self.foreign().len() < MAX_FOREIGN,
            // If another call detached the device first, its index could be bound again.
            OutsideAct::Unbind { nth, .. } => {
                let foreign = self.foreign();
                let detaches = |call: &Call, file: usize| match call {
                    Call::DetachAll { file: other } => *other == file,
                    call => call.handle().is_some(),
                };
                !foreign.is_empty() && {
                    let (_, file) = foreign[nth % foreign.len()];
                    !calls.iter().any(|(_, call)| detaches(call, file))
                }
            }
            OutsideAct::Leave { .. } => !self.holds.is_empty(),
        }
    }

    /// Returns the indices and files of the devices of the other program that are not to be detached yet.
    fn foreign(&self) -> Vec<(u32, usize)> {
        let foreign =
            self.state.devices.iter().filter(|device| device.foreign && !device.attachment.auto_clear);
        foreign.map(|device| (device.attachment.index, device.file)).collect()
    }

    fn act(&mut self, act: OutsideAct) -> Option<Event> {
        match act {
            OutsideAct::Bind { file, read_only, index, losetup } => {
                let path = file_path(self.path(), file);
                let index = outside::bind(&path, read_only, index, losetup)?;
                let inode = self.state.files[file].inode;
                let found = observed::attachment(index, self.path()).filter(|found| found.inode == inode);
                // A concurrent call may have detached it already.
                let gone = Attachment {
                    index,
                    sequence: 0,
                    inode,
                    mapping: Mapping { read_only, offset: 0, limit: 0, block_size: 512 },
                    size: self.state.files[file].size,
                    direct_io: false,
                    auto_clear: false,
                    discard: true,
                };
                let attachment = Attachment { auto_clear: false, ..found.unwrap_or(gone) };
                Some(Event::Bound { file, attachment })
            }
            OutsideAct::Unbind { nth, losetup } => {
                let foreign = self.foreign();
                let (index, _) = foreign[nth % foreign.len()];
                outside::unbind(index, losetup);
                Some(Event::Unbound { index })
            }
            OutsideAct::Leave { nth } => {
                let user = *self.holds.keys().nth(nth % self.holds.len())?;
                drop(self.holds.remove(&user));
                Some(Event::Left { user })
            }
        }
    }

    /// Another program opens or mounts a device.
    fn hold(&mut self, nth: usize, mount: bool) {
        let Self { state, holds, next, .. } = self;
        let mounted = holds.keys().any(|user| matches!(user, User::Mount(_)));
        if state.devices.is_empty() || (mount && mounted) {
            return;
        }
        let at = nth % state.devices.len();
        let device = &mut state.devices[at];
        let index = device.attachment.index;
        *next += 1;
        let (user, hold) = if mount {
            let hold = Hold::mount(index, !device.is_writable(), self.mount_point.path().to_owned());
            (User::Mount(*next), hold)
        } else {
            (User::Descriptor(*next), Some(Hold::open(index)))
        };
        if let Some(hold) = hold {
            self.history.push(format!("{user:?} of {index}"));
            device.users.insert(user);
            holds.insert(user, hold);
        }
    }

    /// Detaches everything. Then no device may be bound, and no index of the range may remain.
    pub(super) fn finish(&mut self) -> Result<(), String> {
        for worker in 0..WORKERS {
            while let Some(call) = self.resolved(worker, Call::Close { handle: Handle::planned(0) }) {
                self.round(vec![(worker, call)], None, None)?;
            }
        }
        let own = self.state.devices.iter().filter(|device| !device.foreign);
        let detached: BTreeSet<u32> = own.map(|device| device.attachment.index).collect();
        for file in 0..PRIVATE {
            self.round(vec![(0, Call::DetachAll { file })], None, None)?;
        }
        while !self.foreign().is_empty() {
            self.round(Vec::new(), Some(OutsideAct::Unbind { nth: 0, losetup: false }), None)?;
        }
        // Last, so that they defer some of the detaches.
        while !self.holds.is_empty() {
            self.round(Vec::new(), Some(OutsideAct::Leave { nth: 0 }), None)?;
        }
        let bound = observed::attachments(self.path());
        ensure(bound.is_empty(), || format!("devices are still bound: {bound:?}"))?;
        self.round(vec![(0, Call::RemoveIdle { keep: 0 })], None, None)?;
        // A slow removal goes on in the background.
        let left = || observed::existing_in_range().intersection(&detached).copied().collect::<Vec<_>>();
        ensure(holds_in_time(|| left().is_empty()), || {
            format!("the pool did not remove {:?}, which it had detached", left())
        })?;
        self.workers.clear();
        let control = LoopControl::with_pool(PoolOptions { range: RANGE, keep_idle: 0 }).unwrap();
        control.remove_idle(0);
        let left = observed::existing_in_range;
        ensure(holds_in_time(|| left().is_empty()), || {
            format!("a new pool did not remove the idle indices {:?}", left())
        })
    }

    pub(super) fn print_history(&self) {
        for line in &self.history[self.history.len().saturating_sub(HISTORY)..] {
            println!("{line}");
        }
    }
}

impl Drop for Machine {
    /// Detaches what a failed test has left, so that other tests do not find it.
    fn drop(&mut self) {
        self.holds.clear();
        self.workers.clear();
        for attachment in observed::attachments(self.path()) {
            outside::unbind(attachment.index, false);
        }
    }
}

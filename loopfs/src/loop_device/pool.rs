//! The pool of idle devices: it chooses the index to bind next.
//!
//! Indices come from a private range, far above those that `LOOP_CTL_GET_FREE` returns to other programs, which avoids both its
//! walk over all devices and its races. Adding a device takes about 0.5 ms, and removing one about 45 ms, because the removal
//! waits for RCU grace periods. Idle devices are therefore kept for the next attachment, and surplus ones are removed in the
//! background, many concurrently.
//!
//! A container keeps the node of the device with which it was started, and its processes may unbind the device, and pass a descriptor of
//! it to any other process. If the index were then bound to another file, they could read and write that file. So an idle device is
//! used only with the evidence that no process has it open, and that no process has bound it since:
//!
//! - This process has detached it while its node was mounted nowhere, on a kernel that unbinds a device only at its last close, and it
//!   has the sequence number of then.
//! - Otherwise the device is removed first, which the kernel refuses while it is open, and its index is added again.
//!
//! An index that this process adds is left out while its node is mounted anywhere: containers can open that node.
//!
//! `docs/decisions/0001-loop-index-range.md` gives the reasons.

use std::collections::{BTreeMap, BTreeSet, HashSet, VecDeque};
use std::num::NonZeroU64;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use nix::errno::Errno;

use super::device::{BEYOND_ALL_INDICES, node_name};
use super::discard::Discard;
use super::mounted::{self, mounted_numbers};
use super::query::Call;
use crate::deadline::Deadline;
use crate::error::{Context, Error, ErrorKind, Result};
use crate::mount::MountCache;
use crate::sys::loop_dev;
use crate::units::DeviceNumber;

/// Concurrent removals, which wait for grace periods.
const REMOVERS: usize = 64;

/// How long to wait for the next removal. One that takes longer waits for a process that changes the device.
const REMOVAL_TIMEOUT: Duration = Duration::from_secs(2);

/// How long to wait for another process that adds or removes devices. The kernel sends no event when it has removed one.
const CHANGE_PAUSE: Duration = Duration::from_millis(10);

/// Devices with a deferred detach that one call checks for their last close.
const CLOSING_LOOKS: usize = 8;

/// Options of the idle-device pool of a [`LoopControl`](super::LoopControl).
#[derive(Clone, Debug)]
pub struct PoolOptions {
    /// Indices to use. Processes that share a range do not disturb each other.
    pub range: Range<u32>,
    /// Number of idle devices to keep. Each uses about 136 KiB of kernel memory.
    pub keep_idle: usize,
}

impl Default for PoolOptions {
    /// Indices 65536 to 131071, of which 64 idle devices are kept. If the parameter `max_part` of the loop module is 8 or more,
    /// devices use so many minor numbers that there are fewer indices; the range is then the upper half of them. The parameter is
    /// known once the module is loaded, which opening `/dev/loop-control` does.
    fn default() -> Self {
        let end = loop_dev::index_limit().min(0x2_0000);
        Self { range: end / 2..end, keep_idle: 64 }
    }
}

#[derive(Debug)]
pub(super) struct Pool {
    options: PoolOptions,
    numbers: LoopDeviceNumbers,
    mounts: Mutex<MountCache>,
    /// Locked while idle devices are removed. A concurrent call would find them neither idle nor free.
    removals: Mutex<()>,
    state: Mutex<PoolState>,
}

/// The numbers of loop devices.
#[derive(Clone, Copy, Debug)]
pub(super) struct LoopDeviceNumbers {
    /// How many minor numbers a device takes.
    minors: u32,
}

/// An index to bind, and how to check that no process has the device open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Acquired {
    pub(super) index: u32,
    /// The sequence number that the device still has if no process has bound it since it was idle. `None`: the index was added just
    /// now, and its node must not be mounted.
    pub(super) sequence: Option<NonZeroU64>,
}

/// The result of removing the idle devices of a range that is used up.
enum Recreation {
    Added(Acquired),
    /// Another process is adding or removing devices, which may leave one that is idle.
    OthersChange,
    AllUsed,
}

#[derive(Debug, Default)]
struct PoolState {
    /// Idle devices that no process has open, each with its sequence number. The lowest index is bound next, so that surplus ones are the
    /// highest.
    idle: BTreeMap<u32, NonZeroU64>,
    /// Idle devices that a process may have open. They are removed before their index is used.
    unproven: BTreeSet<u32>,
    /// Devices with a deferred detach: idle after their last close.
    closing: VecDeque<u32>,
    /// Devices whose node was mounted when the mount table was last read. Only for the choice of an index.
    mounted: HashSet<u32>,
    /// Devices whose discards were disabled. Newer kernels keep that until the device is removed.
    without_discards: BTreeSet<u32>,
    next: u32,
    /// Number of devices to add before the next scan of the range.
    adds_until_scan: usize,
}

impl Pool {
    /// Creates a pool. Its first scan finds the devices of the range that earlier processes left idle.
    pub(super) fn new(options: PoolOptions) -> Result<Self> {
        let limit = loop_dev::index_limit();
        if options.range.end > limit {
            let cause = format!("the loop module's parameter max_part leaves indices 0 to {}", limit - 1);
            let range = format!("indices {} to {}", options.range.start, options.range.end - 1);
            return Err(Error::new(ErrorKind::InvalidInput, "use", range, cause)
                .with_remedy("choose a range among them"));
        }
        if options.range.is_empty() {
            let range = format!("indices {} to {}", options.range.start, options.range.end);
            let detail = "the end of PoolOptions::range is not one of its indices, so there are none";
            return Err(Error::new(ErrorKind::InvalidInput, "use", range, detail));
        }
        let state = PoolState { next: options.range.start, ..PoolState::default() };
        let mounts = Mutex::new(MountCache::below("/".into()));
        let numbers = LoopDeviceNumbers { minors: BEYOND_ALL_INDICES / limit };
        Ok(Self { options, numbers, mounts, removals: Mutex::default(), state: Mutex::new(state) })
    }

    /// Returns the numbers of the devices. They are not known before the loop module is loaded, and constant while its control device is
    /// open.
    pub(super) fn numbers(&self) -> LoopDeviceNumbers {
        self.numbers
    }

    pub(super) fn number_of(&self, index: u32) -> DeviceNumber {
        self.numbers.of(index)
    }

    /// Returns an index that was idle when last seen. The kernel decides: another program may have bound it since. The caller opens the
    /// device and then calls [`is_unused`](Self::is_unused). A device without discards is not reused for an attachment with discards:
    /// removing it and adding it again takes a hundred times as long as adding another one.
    ///
    /// # Errors
    /// [`ErrorKind::NoSpace`]: a program has bound or opened each device of the range, or its node is mounted. At the deadline another
    /// process may also be adding or removing one.
    pub(super) fn acquire(
        &self,
        control: &Arc<OwnedFd>,
        discard: Discard,
        deadline: Deadline,
    ) -> Result<Acquired> {
        loop {
            if let Some(found) = self.search(control, discard)? {
                return Ok(found);
            }
            // Better a slow attachment than none.
            match self.recreate(control)? {
                Recreation::Added(added) => return Ok(added),
                Recreation::OthersChange if !deadline.left().is_zero() => {
                    std::thread::sleep(CHANGE_PAUSE.min(deadline.left()));
                }
                Recreation::OthersChange | Recreation::AllUsed => {
                    let Range { start, end } = self.options.range;
                    let detail = format!("all indices from {start} to {} are in use", end - 1);
                    return Err(Error::new(ErrorKind::NoSpace, "add", "a loop device", detail));
                }
            }
        }
    }

    /// Returns an idle index, or adds one of the range.
    fn search(&self, control: &Arc<OwnedFd>, discard: Discard) -> Result<Option<Acquired>> {
        for _ in self.options.range.clone() {
            if let Some(idle) = self.lock().pop_idle(discard) {
                return Ok(Some(idle));
            }
            self.examine_closing();
            if self.is_scan_due() {
                self.scan()?;
                if self.has_surplus() {
                    // The removal in the background may be late. There are as many devices as were added since the last scan.
                    self.remove_some(control, REMOVERS);
                }
            }
            let Some(candidate) = self.next() else { continue };
            match self.add(control, candidate) {
                Ok(added) => return Ok(Some(added)),
                // The device exists already, added by this or another process, and may have become idle without notice.
                Err(Errno::EEXIST) if is_unbound(candidate) => {
                    let mut state = self.lock();
                    if !state.idle.contains_key(&candidate) {
                        state.unproven.insert(candidate);
                    }
                }
                Err(Errno::EEXIST) => {}
                Err(errno) => return Err(Error::sys("add", node_name(candidate), errno)),
            }
        }
        Ok(None)
    }

    /// Removes the idle devices of the range, and adds one of them again.
    fn recreate(&self, control: &Arc<OwnedFd>) -> Result<Recreation> {
        let _removals = self.lock_removals();
        if let Some((index, sequence)) = self.lock().idle.pop_first() {
            return Ok(Recreation::Added(Acquired { index, sequence: Some(sequence) }));
        }
        // A concurrent call has removed all idle devices, and needed one.
        if let Some(added) = self.add_any(control)? {
            return Ok(Recreation::Added(added));
        }
        self.scan()?;
        let unproven = std::mem::take(&mut self.lock().unproven);
        let removals = self.remove(control, unproven.into_iter().collect());
        if let Some(added) = self.add_any(control)? {
            return Ok(Recreation::Added(added));
        }
        // ENODEV: another process is removing the device. EBUSY: a process has it open; the next scan finds it again. An index with neither
        // a device nor room for one is being changed.
        let is_missing = |index: &u32| !loop_dev::exists(*index);
        let others_change =
            removals.contains(&Err(Errno::ENODEV)) || self.usable_indices().iter().any(is_missing);
        Ok(if others_change { Recreation::OthersChange } else { Recreation::AllUsed })
    }

    /// Adds the first index of the range that has no device.
    fn add_any(&self, control: &Arc<OwnedFd>) -> Result<Option<Acquired>> {
        for index in self.usable_indices() {
            match self.add(control, index) {
                Ok(added) => return Ok(Some(added)),
                Err(Errno::EEXIST) => {}
                Err(errno) => return Err(Error::sys("add", node_name(index), errno)),
            }
        }
        Ok(None)
    }

    /// Returns the indices of the range whose node is not mounted.
    fn usable_indices(&self) -> Vec<u32> {
        let state = self.lock();
        self.options.range.clone().filter(|index| !state.mounted.contains(index)).collect()
    }

    fn add(&self, control: &Arc<OwnedFd>, index: u32) -> std::result::Result<Acquired, Errno> {
        let index = loop_dev::add(control, index)?;
        self.lock().without_discards.remove(&index);
        Ok(Acquired { index, sequence: None })
    }

    /// Checks that no other process can have the device open, or its node. The caller has it open, so no other process removes it,
    /// and this library binds it in no other process. Returns `false` if the index must not be used; it is then not in the pool.
    pub(super) fn is_unused(&self, acquired: Acquired, fd: impl AsFd) -> Result<bool> {
        if let Some(expected) = acquired.sequence {
            let unchanged = loop_dev::disk_sequence(fd) == Ok(expected.get());
            if !unchanged {
                self.lock().unproven.insert(acquired.index);
            }
            return Ok(unchanged);
        }
        // Read after the device was added: a node that another process mounts later is of another attachment.
        let mounted = self.read_mounted()?;
        let unused = !mounted.contains(&acquired.index);
        self.lock().mounted = mounted;
        Ok(unused)
    }

    /// Returns the indices of the devices whose node is mounted, or that of one of their partitions if these have numbers of the loop
    /// driver (`max_part`).
    fn read_mounted(&self) -> Result<HashSet<u32>> {
        let mounted = mounted_numbers(&self.mounts, |index| self.number_of(index))?;
        Ok(mounted.into_iter().map(|number| self.numbers.index(number)).collect())
    }

    /// Looks whether some of the devices with a deferred detach are idle.
    fn examine_closing(&self) {
        let closing: Vec<u32> = {
            let mut state = self.lock();
            let looks = CLOSING_LOOKS.min(state.closing.len());
            state.closing.drain(..looks).collect()
        };
        self.sort_closing(closing);
    }

    /// Adds the devices whose deferred detach is complete to the idle ones. There may be thousands, so other calls do not wait.
    fn collect_closed(&self) {
        let closing = std::mem::take(&mut self.lock().closing);
        self.sort_closing(closing);
    }

    fn sort_closing(&self, closing: impl IntoIterator<Item = u32>) {
        for index in closing {
            if is_unbound(index) {
                self.lock().unproven.insert(index);
            } else if loop_dev::exists(index) {
                // A removed device leaves the list.
                self.lock().closing.push_back(index);
            }
        }
    }

    /// Returns the next index to add, or `None` if its node is mounted. Starts again at the end of the range, because removed
    /// devices can be added again.
    fn next(&self) -> Option<u32> {
        let range = &self.options.range;
        let mut state = self.lock();
        let candidate = state.next;
        state.next = if candidate + 1 < range.end { candidate + 1 } else { range.start };
        state.adds_until_scan = state.adds_until_scan.saturating_sub(1);
        (!state.mounted.contains(&candidate)).then_some(candidate)
    }

    fn is_scan_due(&self) -> bool {
        self.lock().adds_until_scan == 0
    }

    /// Scans all devices of the range for idle ones. Devices become idle without notice if another process, another program or
    /// [`LoopDevice::detach`](super::LoopDevice::detach) detaches them. Without scans, devices would be added until the range is
    /// used up.
    ///
    /// The next scan is due when as many devices were added as exist now, and earlier while there are surplus ones. So each device
    /// is scanned a few times on average, and there are few more devices than twice as many as were ever bound concurrently.
    ///
    /// Opens no device: that would wait for a process that changes it.
    fn scan(&self) -> Result<()> {
        let range = &self.options.range;
        let existing: Vec<u32> = indices()?.into_iter().filter(|index| range.contains(index)).collect();
        let unbound: Vec<u32> = existing.iter().copied().filter(|index| is_unbound(*index)).collect();
        // Read after the devices: each device that was unbound while its node was mounted is then found, unless the node was unmounted.
        let mounted = self.read_mounted()?;
        let unused = unbound.into_iter().filter(|index| !mounted.contains(index));
        let unused: Vec<u32> = unused.collect();
        let mut state = self.lock();
        state.mounted = mounted;
        let PoolState { idle, unproven, closing, .. } = &mut *state;
        unproven.extend(unused.into_iter().filter(|index| !idle.contains_key(index)));
        closing.retain(|index| !unproven.contains(index));
        let has_surplus = state.count_idle() >= self.options.keep_idle + REMOVERS;
        state.adds_until_scan = if has_surplus { REMOVERS } else { existing.len().max(REMOVERS) };
        if let Some(last) = existing.last().filter(|last| **last + 1 < range.end) {
            state.next = state.next.max(last + 1);
        }
        Ok(())
    }

    /// Records whether the discards of an index are enabled.
    pub(super) fn record_discard(&self, index: u32, discard: Discard) {
        let without_discards = &mut self.lock().without_discards;
        match discard {
            Discard::Enabled => without_discards.remove(&index),
            Discard::Disabled => without_discards.insert(index),
        };
    }

    /// Returns an index that is not bound to the pool. `sequence` is that of the idle device, if no process had it open when it was
    /// detached.
    pub(super) fn release(&self, index: u32, sequence: Option<NonZeroU64>) {
        if !self.options.range.contains(&index) {
            return;
        }
        let sequence =
            sequence.filter(|_| self.read_mounted().is_ok_and(|mounted| !mounted.contains(&index)));
        let mut state = self.lock();
        state.closing.retain(|closing| *closing != index);
        match sequence {
            Some(sequence) => {
                state.unproven.remove(&index);
                state.idle.insert(index, sequence);
            }
            None => {
                state.idle.remove(&index);
                state.unproven.insert(index);
            }
        }
    }

    /// Returns an index with a deferred detach to the pool. It is idle after its last close.
    pub(super) fn release_on_close(&self, index: u32) {
        if self.options.range.contains(&index) {
            let mut state = self.lock();
            if !state.closing.contains(&index) {
                state.closing.push_back(index);
            }
        }
    }

    pub(super) fn contains(&self, index: u32) -> bool {
        self.options.range.contains(&index)
    }

    /// Returns the number of idle devices, also of those that earlier processes left.
    pub(super) fn idle(&self) -> usize {
        self.scan_if_due();
        self.lock().count_idle()
    }

    /// Returns `true` if there are enough surplus devices for a round of removals.
    pub(super) fn has_surplus(&self) -> bool {
        self.lock().count_idle() >= self.options.keep_idle + REMOVERS
    }

    pub(super) fn keep_idle(&self) -> usize {
        self.options.keep_idle
    }

    /// Removes idle devices until `keep` are left, also those whose deferred detach is complete. A device that was bound in the
    /// meantime stays: the kernel refuses to remove it (EBUSY).
    pub(super) fn remove_idle(&self, control: &Arc<OwnedFd>, keep: usize) -> usize {
        self.scan_if_due();
        self.collect_closed();
        let count = self.lock().count_idle().saturating_sub(keep);
        self.remove_some(control, count)
    }

    /// Removes `count` idle devices, first those that a process may have open. One that is open is found again by the next scan.
    fn remove_some(&self, control: &Arc<OwnedFd>, count: usize) -> usize {
        let _removals = self.lock_removals();
        let surplus: Vec<u32> = {
            let mut state = self.lock();
            let last = || state.unproven.pop_last().or_else(|| state.idle.pop_last().map(|(index, _)| index));
            std::iter::from_fn(last).take(count).collect()
        };
        self.remove(control, surplus).into_iter().filter(Result::is_ok).count()
    }

    /// Removes devices, many concurrently, and returns the results of those that did not take too long. Does not wait for a device that a
    /// process is changing, nor remove it twice: its thread is left behind. If no thread can be created, it waits for each.
    fn remove(&self, control: &Arc<OwnedFd>, surplus: Vec<u32>) -> Vec<std::result::Result<(), Errno>> {
        let threads = surplus.len().min(REMOVERS);
        let (control, surplus, numbers) = (Arc::clone(control), Arc::new(Mutex::new(surplus)), self.numbers);
        let (sender, results) = channel();
        let pop = move || surplus.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let work = move || {
            while let Some(index) = pop() {
                if let Some(_call) = Call::begin(numbers.of(index), Duration::ZERO) {
                    // The caller may not wait any more.
                    sender.send(loop_dev::remove(&control, index)).ok();
                }
            }
            // Before the sender, for whose end the caller waits: nothing uses the driver when this call returns.
            drop(control);
        };
        let start = |_: &usize| loop_dev::spawn("loop-remove", work.clone()).is_ok();
        match (0..threads).take_while(start).count() {
            // None can be created (EAGAIN), so the removal takes longer.
            0 => work(),
            _ => drop(work),
        }
        std::iter::from_fn(|| results.recv_timeout(REMOVAL_TIMEOUT).ok()).collect()
    }

    /// Without a scan, only the devices that this process has detached are known.
    fn scan_if_due(&self) {
        if self.is_scan_due() {
            self.scan().ok();
        }
    }

    fn lock_removals(&self) -> MutexGuard<'_, ()> {
        self.removals.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock(&self) -> MutexGuard<'_, PoolState> {
        // A panic leaves the state consistent.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl PoolState {
    /// Takes the lowest idle index that suits an attachment.
    fn pop_idle(&mut self, discard: Discard) -> Option<Acquired> {
        let Self { idle, without_discards, .. } = self;
        let suitable = |with: bool| idle.keys().find(|index| without_discards.contains(index) != with);
        let index = match discard {
            Discard::Enabled => suitable(true),
            Discard::Disabled => suitable(false).or_else(|| suitable(true)),
        };
        let index = index.copied()?;
        let sequence = self.idle.remove(&index);
        Some(Acquired { index, sequence })
    }

    fn count_idle(&self) -> usize {
        self.idle.len() + self.unproven.len()
    }
}

impl LoopDeviceNumbers {
    pub(super) fn of(self, index: u32) -> DeviceNumber {
        DeviceNumber { major: mounted::MAJOR, minor: index * self.minors }
    }

    /// Returns the index of the device with this number, or the one whose partition has it.
    pub(super) fn index(self, number: DeviceNumber) -> u32 {
        number.minor / self.minors
    }
}

/// Returns `true` also for a device that the kernel is about to unbind completely; it refuses to bind that one.
fn is_unbound(index: u32) -> bool {
    loop_dev::exists(index) && !loop_dev::is_bound(index)
}

/// Returns the indices of all devices of the kernel, bound or not.
pub(super) fn indices() -> Result<Vec<u32>> {
    loop_dev::indices().context("list", "/sys/block")
}

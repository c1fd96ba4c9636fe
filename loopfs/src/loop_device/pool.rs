//! The pool of idle devices: it chooses the index to bind next.
//!
//! Indices come from a private range, far above those that `LOOP_CTL_GET_FREE` returns to other programs, which avoids both its
//! walk over all devices and its races. Adding a device takes about 0.5 ms, and removing one about 45 ms, because the removal
//! waits for RCU grace periods. Idle devices are therefore kept for the next attachment, and surplus ones are removed in the
//! background, many concurrently.
//!
//! A container keeps the node of the device with which it was started, and its processes may unbind the device. If the index were
//! then bound to another file, they could read and write that file. So an index is left out while its node is mounted anywhere,
//! unless this process detached the device itself: only the caller knows that no process has the node any more.
//!
//! `docs/decisions/0001-loop-index-range.md` gives the reasons.

use std::collections::{BTreeSet, VecDeque};
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::ScopedJoinHandle;

use nix::errno::Errno;
use nix::sys::stat::makedev;

use super::device::{BEYOND_ALL_INDICES, node_name};
use super::discard::Discard;
use crate::error::{Context, Error, ErrorKind, Result};
use crate::sys::loop_abi::DiscardLimit;
use crate::sys::loop_dev;

/// Concurrent removals, which wait for grace periods.
const REMOVERS: usize = 64;

/// Devices with a deferred detach that one call checks for their last close.
const CLOSING_LOOKS: usize = 8;

/// The major number of loop devices (linux/major.h).
const LOOP_MAJOR: u64 = 7;

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
    /// The number of minor numbers that a device takes.
    minors: u32,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// The lowest index is bound next, so that surplus ones are the highest.
    idle: BTreeSet<u32>,
    /// Devices with a deferred detach: idle after their last close.
    closing: VecDeque<u32>,
    /// Devices whose node was mounted at the last scan.
    mounted: BTreeSet<u32>,
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
            let detail = format!(
                "the loop module's parameter max_part leaves indices 0 to {}; choose a range among them",
                limit - 1
            );
            let range = format!("indices {} to {}", options.range.start, options.range.end - 1);
            return Err(Error::new(ErrorKind::InvalidInput, "use", range, detail));
        }
        if options.range.is_empty() {
            let range = format!("indices {} to {}", options.range.start, options.range.end);
            let detail = "the end of PoolOptions::range is not one of its indices, so there are none";
            return Err(Error::new(ErrorKind::InvalidInput, "use", range, detail));
        }
        let next = options.range.start;
        let state = State {
            idle: BTreeSet::new(),
            closing: VecDeque::new(),
            mounted: BTreeSet::new(),
            without_discards: BTreeSet::new(),
            next,
            adds_until_scan: 0,
        };
        Ok(Self { options, minors: BEYOND_ALL_INDICES / limit, state: Mutex::new(state) })
    }

    /// Returns the number of a device. It is not known before the loop module is loaded, and constant while its control device is open.
    pub(super) fn number_of(&self, index: u32) -> u64 {
        makedev(LOOP_MAJOR, u64::from(index) * u64::from(self.minors))
    }

    /// Returns an index that was idle when last seen. The kernel decides: another program may have bound it since. A device without
    /// discards is not reused for an attachment with discards: removing it and adding it again takes a hundred times as long as
    /// adding another one.
    pub(super) fn acquire(&self, control: BorrowedFd<'_>, discard: Discard) -> Result<u32> {
        let range = &self.options.range;
        for _ in range.clone() {
            if let Some(index) = self.known_idle(discard) {
                return Ok(index);
            }
            if self.is_scan_due() {
                self.scan()?;
                if let Some(index) = self.known_idle(discard) {
                    return Ok(index);
                }
            }
            let Some(candidate) = self.next() else { continue };
            match loop_dev::add(control, candidate) {
                Ok(index) => {
                    self.lock().without_discards.remove(&index);
                    return Ok(index);
                }
                // The device exists already, added by this or another process, and may have become idle without notice.
                Err(Errno::EEXIST) if is_unbound(candidate) && !self.lock().idle.contains(&candidate) => {
                    return Ok(candidate);
                }
                Err(Errno::EEXIST) => {}
                Err(errno) => return Err(Error::sys("add", node_name(candidate), errno)),
            }
        }
        // Better a slow attachment than none.
        if let Some(index) = self.lock().idle.pop_first() {
            return Ok(index);
        }
        let detail =
            format!("all indices from {} to {} are in use", range.start, range.end.saturating_sub(1));
        Err(Error::new(ErrorKind::NoSpace, "add", "a loop device", detail))
    }

    fn known_idle(&self, discard: Discard) -> Option<u32> {
        let closing: Vec<u32> = {
            let mut state = self.lock();
            if let Some(index) = state.pop_idle(discard) {
                return Some(index);
            }
            let looks = CLOSING_LOOKS.min(state.closing.len());
            state.closing.drain(..looks).collect()
        };
        let mut found = None;
        for index in closing {
            if found.is_none() && is_unbound(index) && !self.lock().mounted.contains(&index) {
                found = Some(index);
            } else if loop_dev::exists(index) {
                // A removed device leaves the list.
                self.lock().closing.push_back(index);
            }
        }
        found
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
    /// The next scan is due when as many devices were added as exist now. So each device is scanned at most twice on average,
    /// and there are at most twice as many devices as were ever bound concurrently.
    ///
    /// Opens no device: that would wait for a process that changes it.
    fn scan(&self) -> Result<()> {
        let range = &self.options.range;
        let existing: Vec<u32> = indices()?.into_iter().filter(|index| range.contains(index)).collect();
        self.lock().adds_until_scan = existing.len().max(REMOVERS);
        let unbound: Vec<u32> = existing.iter().copied().filter(|index| is_unbound(*index)).collect();
        // Read after the devices: each device that was unbound while its node was mounted is then found, unless the node was unmounted.
        let mounted = loop_dev::mounted().map_err(|errno| {
            let error = Error::sys("read", "/proc/thread-self/mountinfo", errno);
            error.explain("mount /proc; it shows which devices other programs have published")
        })?;
        let idle: BTreeSet<u32> = unbound.into_iter().filter(|index| !mounted.contains(index)).collect();
        let without_discards =
            idle.iter().copied().filter(|index| !takes_discards(*index)).collect::<Vec<_>>();
        let mut state = self.lock();
        state.mounted = mounted;
        state.without_discards.extend(without_discards);
        state.closing.retain(|index| !idle.contains(index));
        state.idle.extend(idle);
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

    /// Returns an index that is not bound to the pool.
    pub(super) fn release(&self, index: u32) {
        if self.options.range.contains(&index) {
            let mut state = self.lock();
            state.closing.retain(|closing| *closing != index);
            state.mounted.remove(&index);
            state.idle.insert(index);
        }
    }

    /// Returns an index with a deferred detach to the pool. It is idle after its last close.
    pub(super) fn release_on_close(&self, index: u32) {
        if self.options.range.contains(&index) {
            let mut state = self.lock();
            state.mounted.remove(&index);
            if !state.closing.contains(&index) {
                state.closing.push_back(index);
            }
        }
    }

    /// Adds the devices whose deferred detach is complete to the idle ones. There may be thousands, so other calls do not wait.
    fn collect_closed(&self) {
        let closing = std::mem::take(&mut self.lock().closing);
        let (closed, open): (Vec<u32>, Vec<u32>) = closing.into_iter().partition(|index| is_unbound(*index));
        self.lock().idle.extend(closed);
        let open: Vec<u32> = open.into_iter().filter(|index| loop_dev::exists(*index)).collect();
        self.lock().closing.extend(open);
    }

    pub(super) fn contains(&self, index: u32) -> bool {
        self.options.range.contains(&index)
    }

    /// Returns the number of idle devices, also of those that earlier processes left.
    pub(super) fn idle(&self) -> usize {
        self.scan_if_due();
        self.lock().idle.len()
    }

    /// Returns `true` if there are enough surplus devices for a round of removals.
    pub(super) fn has_surplus(&self) -> bool {
        self.lock().idle.len() >= self.options.keep_idle + REMOVERS
    }

    pub(super) fn keep_idle(&self) -> usize {
        self.options.keep_idle
    }

    /// Removes idle devices until `keep` are left, also those whose deferred detach is complete. A device that was bound in the
    /// meantime stays: the kernel refuses to remove it (EBUSY).
    pub(super) fn remove_idle(&self, control: BorrowedFd<'_>, keep: usize) -> usize {
        self.scan_if_due();
        self.collect_closed();
        let surplus: Vec<u32> = {
            let mut state = self.lock();
            let count = state.idle.len().saturating_sub(keep);
            std::iter::from_fn(|| state.idle.pop_last()).take(count).collect()
        };
        let share = surplus.len().div_ceil(REMOVERS).max(1);
        let remove =
            |indices: &[u32]| indices.iter().filter(|i| loop_dev::remove(control, **i).is_ok()).count();
        std::thread::scope(|scope| {
            let start = |indices| {
                let worker = std::thread::Builder::new().spawn_scoped(scope, move || remove(indices));
                (worker, indices)
            };
            let workers: Vec<_> = surplus.chunks(share).map(start).collect();
            let finish = |(worker, indices): (std::io::Result<ScopedJoinHandle<'_, usize>>, _)| match worker {
                Ok(worker) => worker.join().unwrap_or_default(),
                // If no thread can be created (EAGAIN), the removal takes longer.
                Err(_) => remove(indices),
            };
            workers.into_iter().map(finish).sum()
        })
    }

    /// Without a scan, only the devices that this process has detached are known.
    fn scan_if_due(&self) {
        if self.is_scan_due() {
            self.scan().ok();
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic leaves the state consistent.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Takes the lowest idle index that suits an attachment.
    fn pop_idle(&mut self, discard: Discard) -> Option<u32> {
        let Self { idle, without_discards, .. } = self;
        let index = match discard {
            Discard::Enabled => idle.difference(without_discards).next(),
            Discard::Disabled => idle.intersection(without_discards).next().or(idle.first()),
        };
        let index = index.copied()?;
        self.idle.remove(&index);
        Some(index)
    }
}

/// Returns `false` if the discards of an idle device were disabled. Returns `true` if that is unknown, as for a device that was never
/// bound.
fn takes_discards(index: u32) -> bool {
    let limit = |limit| loop_dev::discard_limit(index, limit).ok();
    limit(DiscardLimit::Set) != Some(0) || limit(DiscardLimit::Hardware).is_none_or(|most| most == 0)
}

/// Returns `true` also for a device that the kernel is about to unbind completely; it refuses to bind that one.
fn is_unbound(index: u32) -> bool {
    loop_dev::exists(index) && !loop_dev::is_bound(index)
}

/// Returns the indices of all devices of the kernel, bound or not.
pub(super) fn indices() -> Result<Vec<u32>> {
    loop_dev::indices().context("list", "/sys/block")
}

//! The pool of idle devices: it chooses the index to bind next.
//!
//! Indices come from a private range, far above those that `LOOP_CTL_GET_FREE` returns to other programs, which avoids both its
//! walk over all devices and its races. Adding a device takes about 0.5 ms, and removing one about 45 ms, because the removal
//! waits for RCU grace periods. Idle devices are therefore kept for the next attachment, and surplus ones are removed in the
//! background, many concurrently.
//!
//! `docs/decisions/0001-loop-index-range.md` gives the reasons.

use std::collections::{BTreeSet, VecDeque};
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::ScopedJoinHandle;

use nix::errno::Errno;

use super::device::node_name;
use crate::error::{Context, Error, ErrorKind, Result};
use crate::sys::loop_dev;

/// Concurrent removals, which wait for grace periods.
const REMOVERS: usize = 64;

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
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// The lowest index is bound next, so that surplus ones are the highest.
    idle: BTreeSet<u32>,
    /// Devices with a deferred detach: idle after their last close.
    closing: VecDeque<u32>,
    next: u32,
    /// Number of devices to add before the next scan of the range.
    adds_until_scan: usize,
}

impl Pool {
    /// Creates a pool with the devices of the range that earlier processes left idle.
    pub(super) fn recover(options: PoolOptions) -> Result<Self> {
        let limit = loop_dev::index_limit();
        if options.range.end > limit {
            let detail = format!(
                "the loop module's parameter max_part leaves indices 0 to {}; choose a range among them",
                limit - 1
            );
            let range = format!("indices {} to {}", options.range.start, options.range.end - 1);
            return Err(Error::new(ErrorKind::InvalidInput, "use", range, detail));
        }
        let next = options.range.start;
        let state = State { idle: BTreeSet::new(), closing: VecDeque::new(), next, adds_until_scan: 0 };
        let pool = Self { options, state: Mutex::new(state) };
        pool.scan()?;
        Ok(pool)
    }

    /// Returns an index that was idle when last seen. The kernel decides: another program may have bound it since.
    pub(super) fn acquire(&self, control: BorrowedFd<'_>) -> Result<u32> {
        let range = &self.options.range;
        for _ in range.clone() {
            if let Some(index) = self.known_idle() {
                return Ok(index);
            }
            if self.is_scan_due() {
                self.scan()?;
                if let Some(index) = self.known_idle() {
                    return Ok(index);
                }
            }
            let candidate = self.next();
            match loop_dev::add(control, candidate) {
                Ok(index) => return Ok(index),
                // The device exists already, added by this or another process, and may have become idle without notice.
                Err(Errno::EEXIST) if is_unbound(candidate) => return Ok(candidate),
                Err(Errno::EEXIST) => {}
                Err(errno) => return Err(Error::sys("add", node_name(candidate), errno)),
            }
        }
        let detail =
            format!("all indices from {} to {} are in use", range.start, range.end.saturating_sub(1));
        Err(Error::new(ErrorKind::NoSpace, "add", "a loop device", detail))
    }

    fn known_idle(&self) -> Option<u32> {
        let mut state = self.lock();
        if let Some(index) = state.idle.pop_first() {
            return Some(index);
        }
        for _ in 0..CLOSING_LOOKS.min(state.closing.len()) {
            let index = state.closing.pop_front()?;
            if is_unbound(index) {
                return Some(index);
            }
            // A removed device leaves the list.
            if loop_dev::exists(index) {
                state.closing.push_back(index);
            }
        }
        None
    }

    /// Returns the next index to add. Starts again at the end of the range, because removed devices can be added again.
    fn next(&self) -> u32 {
        let range = &self.options.range;
        let mut state = self.lock();
        let candidate = state.next;
        state.next = if candidate + 1 < range.end { candidate + 1 } else { range.start };
        state.adds_until_scan = state.adds_until_scan.saturating_sub(1);
        candidate
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
    fn scan(&self) -> Result<()> {
        let range = &self.options.range;
        let existing: Vec<u32> = indices()?.into_iter().filter(|index| range.contains(index)).collect();
        self.lock().adds_until_scan = existing.len().max(REMOVERS);
        let idle: BTreeSet<u32> = existing.iter().copied().filter(|index| is_unbound(*index)).collect();
        let mut state = self.lock();
        state.closing.retain(|index| !idle.contains(index));
        state.idle.extend(idle);
        if let Some(last) = existing.last().filter(|last| **last + 1 < range.end) {
            state.next = state.next.max(last + 1);
        }
        Ok(())
    }

    /// Returns an index that is not bound to the pool.
    pub(super) fn release(&self, index: u32) {
        if self.options.range.contains(&index) {
            let mut state = self.lock();
            state.closing.retain(|closing| *closing != index);
            state.idle.insert(index);
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

    /// Adds the devices whose deferred detach is complete to the idle ones. There may be thousands, so other calls do not wait.
    fn collect_closed(&self) {
        let closing = std::mem::take(&mut self.lock().closing);
        let (closed, open): (Vec<u32>, Vec<u32>) = closing.into_iter().partition(|index| is_unbound(*index));
        self.lock().idle.extend(closed);
        open.into_iter()
            .filter(|index| loop_dev::exists(*index))
            .for_each(|index| self.release_on_close(index));
    }

    pub(super) fn contains(&self, index: u32) -> bool {
        self.options.range.contains(&index)
    }

    pub(super) fn idle(&self) -> usize {
        self.lock().idle.len()
    }

    /// Returns `true` if there are enough surplus devices for a round of removals.
    pub(super) fn has_surplus(&self) -> bool {
        self.idle() >= self.options.keep_idle + REMOVERS
    }

    pub(super) fn keep_idle(&self) -> usize {
        self.options.keep_idle
    }

    /// Removes idle devices until `keep` are left, also those whose deferred detach is complete. A device that was bound in the
    /// meantime stays: the kernel refuses to remove it (EBUSY).
    pub(super) fn remove_idle(&self, control: BorrowedFd<'_>, keep: usize) -> usize {
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

    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic leaves the state consistent.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn is_unbound(index: u32) -> bool {
    loop_dev::open_device(index, false).and_then(loop_dev::status).err() == Some(Errno::ENXIO)
}

/// Returns the indices of all devices of the kernel, bound or not.
pub(super) fn indices() -> Result<Vec<u32>> {
    loop_dev::indices().context("list", "/sys/block")
}

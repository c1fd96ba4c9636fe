//! Which indices to bind next.
//!
//! Indices come from a range of our own, far above those that `LOOP_CTL_GET_FREE` hands to other
//! programs, so that neither its walk over all devices nor its races are met. Making a device
//! takes about 0.5 ms and removing one about 45 ms (it waits for RCU grace periods), so idle ones
//! are kept for the next attachment and surplus ones are removed in the background, many at once.

use std::collections::{BTreeSet, VecDeque};
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::ScopedJoinHandle;

use nix::errno::Errno;

use super::device::node_name;
use crate::error::{Context, Error, ErrorKind, Result};
use crate::sys::loop_dev;

/// Removals that wait for grace periods at the same time.
const REMOVERS: usize = 64;

/// How many devices are looked at in one call to see whether their last user has closed them.
const CLOSING_LOOKS: usize = 8;

/// Settings of the devices that a [`LoopControl`](super::LoopControl) keeps for itself.
#[derive(Clone, Debug)]
pub struct PoolOptions {
    /// Indices to use. Processes that share a range do not disturb each other.
    pub range: Range<u32>,
    /// Idle devices that are kept. Each holds some 136 KiB of kernel memory.
    pub keep_idle: usize,
}

impl Default for PoolOptions {
    /// 65536 to 131071, 64 idle. Where the parameter `max_part` of the loop module is 8 or more, devices take so many minor numbers
    /// that there are fewer indices: then the upper half of them. The parameter is known once the module is loaded, which
    /// opening `/dev/loop-control` does.
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
    /// The lowest is bound next, so that surplus ones gather at the top.
    idle: BTreeSet<u32>,
    /// Bound until their last close, and idle from then on.
    closing: VecDeque<u32>,
    next: u32,
    /// How many devices may be added before the next look at all that there are.
    adds_until_scan: usize,
}

impl Pool {
    /// Takes over what earlier processes left idle in the range.
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

    /// An index that was idle when last seen. The kernel decides: binding may still find it taken.
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
                // Made by another process, or by this one, and perhaps idle since without its doing.
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
            // One that was removed is forgotten.
            if loop_dev::exists(index) {
                state.closing.push_back(index);
            }
        }
        None
    }

    /// The next index to add: round and round, for what was removed since can be made again.
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

    /// Looks at every device of the range. Many become idle without this pool being told: those that are detached by another
    /// process or by [`LoopDevice::detach`](super::LoopDevice::detach), and those that another program gave back. Without
    /// this, devices would be added until the range is used up.
    ///
    /// The next scan is due when as many were added as there are now: so each is looked at twice at most on average, and
    /// there are at most twice as many as were ever bound at the same time.
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

    /// An index that is not bound (any more).
    pub(super) fn release(&self, index: u32) {
        if self.options.range.contains(&index) {
            self.lock().idle.insert(index);
        }
    }

    /// An index that will not be bound any more once its last user has closed it.
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

    pub(super) fn idle(&self) -> usize {
        self.lock().idle.len()
    }

    /// Whether enough idle devices have gathered for a round of removals to be worth its while.
    pub(super) fn has_surplus(&self) -> bool {
        self.idle() >= self.options.keep_idle + REMOVERS
    }

    pub(super) fn keep_idle(&self) -> usize {
        self.options.keep_idle
    }

    /// Removes idle devices until `keep` are left. One that was bound meanwhile is left alone:
    /// the kernel refuses with EBUSY.
    pub(super) fn remove_idle(&self, control: BorrowedFd<'_>, keep: usize) -> usize {
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
                // Without a thread to be had (EAGAIN) it takes longer.
                Err(_) => remove(indices),
            };
            workers.into_iter().map(finish).sum()
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing is left half done in the state by a panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn is_unbound(index: u32) -> bool {
    loop_dev::open_device(index, false).and_then(loop_dev::status).err() == Some(Errno::ENXIO)
}

/// Every index the kernel has, bound or not.
pub(super) fn indices() -> Result<Vec<u32>> {
    loop_dev::indices().context("list", "/sys/block")
}

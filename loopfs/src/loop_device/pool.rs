//! Which indices to bind next.
//!
//! Indices come from a range of our own, far above those that `LOOP_CTL_GET_FREE` hands to other
//! programs, so that neither its walk over all devices nor its races are met. Making a device
//! takes about 0.5 ms and removing one about 45 ms (it waits for RCU grace periods), so idle ones
//! are kept for the next attachment and surplus ones are removed in the background, many at once.

use std::collections::VecDeque;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::{Mutex, MutexGuard, PoisonError};

use nix::errno::Errno;

use super::node_name;
use crate::error::{Context, Error, ErrorKind, Result};
use crate::sys::loop_dev;

/// Removals that wait for grace periods at the same time.
const REMOVERS: usize = 64;

/// Settings of the devices that a [`LoopControl`](super::LoopControl) keeps for itself.
#[derive(Clone, Debug)]
pub struct PoolOptions {
    /// Indices to use. Processes that share a range do not disturb each other.
    pub range: Range<u32>,
    /// Idle devices that are kept. Each holds some 136 KiB of kernel memory.
    pub keep_idle: usize,
}

impl Default for PoolOptions {
    /// 65536 to 131071 (with `max_part` at most 15 each minor number still fits in 20 bits), 64 idle.
    fn default() -> Self {
        Self { range: 0x1_0000..0x2_0000, keep_idle: 64 }
    }
}

#[derive(Debug)]
pub(super) struct Pool {
    options: PoolOptions,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    idle: VecDeque<u32>,
    /// Detached while somebody had them open; idle as soon as that one closes them.
    closing: Vec<u32>,
    next: u32,
}

impl Pool {
    /// Takes over what earlier processes left idle in the range.
    pub(super) fn recover(options: PoolOptions) -> Result<Self> {
        let mut idle = VecDeque::new();
        let mut next = options.range.start;
        for index in indices()?.into_iter().filter(|index| options.range.contains(index)) {
            if index + 1 < options.range.end {
                next = next.max(index + 1);
            }
            if is_unbound(index) {
                idle.push_back(index);
            }
        }
        Ok(Self { options, state: Mutex::new(State { idle, closing: Vec::new(), next }) })
    }

    /// An index that was idle when last seen. The kernel decides: binding may still find it taken.
    pub(super) fn take(&self, control: BorrowedFd<'_>) -> Result<u32> {
        let range = &self.options.range;
        for _ in range.clone() {
            let candidate = {
                let mut state = self.lock();
                let closed: Vec<u32> = state.closing.extract_if(.., |index| is_unbound(*index)).collect();
                state.idle.extend(closed);
                if let Some(index) = state.idle.pop_front() {
                    return Ok(index);
                }
                let candidate = state.next;
                // Round and round: what was removed since can be made again.
                state.next = if candidate + 1 < range.end { candidate + 1 } else { range.start };
                candidate
            };
            match loop_dev::add(control, candidate) {
                Ok(index) => return Ok(index),
                // Another process of ours made it; it knows what for.
                Err(Errno::EEXIST) => {}
                Err(errno) => return Err(Error::sys("add", node_name(candidate), errno)),
            }
        }
        let detail =
            format!("all indices from {} to {} are in use", range.start, range.end.saturating_sub(1));
        Err(Error::new(ErrorKind::NoSpace, "add", "a loop device", detail))
    }

    /// An index that is not bound (any more).
    pub(super) fn give_back(&self, index: u32) {
        if self.options.range.contains(&index) {
            self.lock().idle.push_back(index);
        }
    }

    /// An index that will not be bound any more once its last user has closed it.
    pub(super) fn give_back_later(&self, index: u32) {
        if self.options.range.contains(&index) {
            self.lock().closing.push(index);
        }
    }

    pub(super) fn contains(&self, index: u32) -> bool {
        self.options.range.contains(&index)
    }

    pub(super) fn idle(&self) -> usize {
        self.lock().idle.len()
    }

    /// Whether enough idle devices have gathered for a round of removals to be worth its while.
    pub(super) fn is_over_full(&self) -> bool {
        self.idle() >= self.options.keep_idle + REMOVERS
    }

    pub(super) fn keep_idle(&self) -> usize {
        self.options.keep_idle
    }

    /// Removes idle devices until `keep` are left. One that was bound meanwhile is left alone:
    /// the kernel refuses with EBUSY.
    pub(super) fn trim(&self, control: BorrowedFd<'_>, keep: usize) -> usize {
        let surplus: Vec<u32> = {
            let mut state = self.lock();
            let count = state.idle.len().saturating_sub(keep);
            state.idle.drain(..count).collect()
        };
        let share = surplus.len().div_ceil(REMOVERS).max(1);
        std::thread::scope(|scope| {
            let remove =
                |indices: &[u32]| indices.iter().filter(|i| loop_dev::remove(control, **i).is_ok()).count();
            let workers: Vec<_> =
                surplus.chunks(share).map(|indices| scope.spawn(move || remove(indices))).collect();
            workers.into_iter().map(|worker| worker.join().unwrap_or_default()).sum()
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

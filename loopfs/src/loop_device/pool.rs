//! Which indices to bind next.
//!
//! Indices come from a range of our own, far above those that `LOOP_CTL_GET_FREE` hands to other
//! programs, so that neither its walk over all devices nor its races are met. Making a device
//! takes about 0.5 ms and removing one about 45 ms (it waits for RCU grace periods), so idle ones
//! are kept for the next attachment and surplus ones are removed in the background, many at once.

use std::collections::VecDeque;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use nix::errno::Errno;
use nix::fcntl::OFlag;

use super::{index_of_name, node_name, open_node};
use crate::error::{Context, Error, ErrorKind, Result};
use crate::sys::loop_dev;

/// With `max_part` at most 15 every minor number of the range still fits in 20 bits.
pub(super) const RANGE: Range<u32> = 0x1_0000..0x1_0000 * 2;

/// Removals that wait for grace periods at the same time.
const REMOVERS: usize = 32;

#[derive(Debug)]
pub(super) struct Pool {
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
    pub(super) fn recover() -> Result<Self> {
        let mut idle = VecDeque::new();
        let mut next = RANGE.start;
        for index in indices()?.into_iter().filter(|index| RANGE.contains(index)) {
            next = next.max(index + 1);
            if is_unbound(index) {
                idle.push_back(index);
            }
        }
        Ok(Self { state: Mutex::new(State { idle, closing: Vec::new(), next }) })
    }

    /// An index that was idle when last seen. The kernel decides: binding may still find it taken.
    pub(super) fn take(&self, control: BorrowedFd<'_>) -> Result<u32> {
        loop {
            let candidate = {
                let mut state = self.lock();
                let closed: Vec<u32> = state.closing.extract_if(.., |index| is_unbound(*index)).collect();
                state.idle.extend(closed);
                if let Some(index) = state.idle.pop_front() {
                    return Ok(index);
                }
                let candidate = state.next;
                state.next += 1;
                candidate
            };
            if !RANGE.contains(&candidate) {
                let detail = format!("all indices from {} to {} are in use", RANGE.start, RANGE.end - 1);
                return Err(Error::new(ErrorKind::NoSpace, "add", "a loop device", detail));
            }
            match loop_dev::add(control, candidate) {
                Ok(index) => return Ok(index),
                // Another process of ours made it; it knows what for.
                Err(Errno::EEXIST) => {}
                Err(errno) => return Err(Error::sys("add", node_name(candidate), errno)),
            }
        }
    }

    /// An index that is not bound (any more).
    pub(super) fn give_back(&self, index: u32) {
        if RANGE.contains(&index) {
            self.lock().idle.push_back(index);
        }
    }

    /// An index that will not be bound any more once its last user has closed it.
    pub(super) fn give_back_later(&self, index: u32) {
        if RANGE.contains(&index) {
            self.lock().closing.push(index);
        }
    }

    pub(super) fn idle(&self) -> usize {
        self.lock().idle.len()
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
            let workers: Vec<_> = surplus
                .chunks(share)
                .map(|indices| {
                    scope.spawn(move || {
                        indices.iter().filter(|i| loop_dev::remove(control, **i).is_ok()).count()
                    })
                })
                .collect();
            workers.into_iter().map(|worker| worker.join().unwrap_or_default()).sum()
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing is left half done in the state by a panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn is_unbound(index: u32) -> bool {
    open_node(index, OFlag::O_RDONLY).and_then(loop_dev::status).err() == Some(Errno::ENXIO)
}

/// Every index the kernel has, bound or not.
pub(super) fn indices() -> Result<Vec<u32>> {
    let entries = std::fs::read_dir("/sys/block").context("list", "/sys/block")?;
    let mut indices = Vec::new();
    for entry in entries {
        let name = entry.context("list", "/sys/block")?.file_name();
        indices.extend(name.to_str().and_then(index_of_name));
    }
    indices.sort_unstable();
    Ok(indices)
}

pub(super) fn in_sysfs(index: u32) -> bool {
    Path::new(&format!("/sys/block/loop{index}")).exists()
}

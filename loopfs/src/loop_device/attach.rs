//! Binding a file to an idle device, and checking that the kernel granted the requested properties.

use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use nix::errno::Errno;
use nix::fcntl::{Flock, OFlag};
use nix::sys::stat::fstat;

use super::binding::{Access, BackingRange, Binding};
use super::detach::{Detach, PendingDetach, request_detach};
use super::device::{CONTROL, LoopDevice, NO_NODE, NOT_ALLOWED, Status, check_node, node_name, read_status};
use super::discard::{self, Discard, DiscardOutcome};
use super::exclusion::Exclusion;
use super::index_lock::{self, Absence};
use super::options::{AttachOptions, BlockSize, DirectIo, IndexPolicy, Lifetime, direct_io_unit};
use super::pool::{Acquired, Pool};
use crate::deadline::Deadline;
use crate::descriptor::reopen;
use crate::error::{Context, Error, ErrorKind, Result};
use crate::flock;
use crate::sys::loop_abi::{self as abi, loop_config};
use crate::sys::{loop_dev, statx};
use crate::units::Bytes;

/// Binds `image`. The caller has locked it, and `absence` is its evidence that the image is not attached with this access.
pub(super) fn attach(
    control: &Arc<OwnedFd>,
    pool: &Pool,
    image: BorrowedFd<'_>,
    locked: &Exclusion,
    options: &AttachOptions,
    absence: Absence,
) -> Result<LoopDevice> {
    options.check()?;
    options.check_file(locked.status(), 0)?;
    let backing = open_backing(image, options)?;
    let config = configuration(&backing, options)?;
    options.check_file(locked.status(), config.block_size)?;
    let size = Bytes(locked.status().st_size as u64);
    let retries = Retries::until(locked.deadline());
    let mut call = AttachCall { control, pool, options, absence, backing, config, size, retries };
    loop {
        match call.try_index()? {
            AttemptOutcome::Attached(device) => return Ok(device),
            AttemptOutcome::Unsuitable => {}
            // The pool returns another index. LOOP_CTL_GET_FREE may return the same one for as long as a program has it open
            // exclusively, and other callers wait for the lock.
            AttemptOutcome::Lost if options.index != IndexPolicy::Pool => call.retries.pause(),
            AttemptOutcome::Lost => {}
        }
    }
}

/// The state of one call of [`attach`].
struct AttachCall<'a> {
    control: &'a Arc<OwnedFd>,
    pool: &'a Pool,
    options: &'a AttachOptions,
    absence: Absence,
    /// The descriptor that the device will keep. It has the index lock.
    backing: OwnedFd,
    config: loop_config,
    /// The size of the file before it is bound.
    size: Bytes,
    retries: Retries,
}

/// The result of an attempt with one index. After each but the first, the file has no index lock and is bound to no device.
enum AttemptOutcome {
    /// The device is bound to the file and has the requested properties.
    Attached(LoopDevice),
    /// The device must not be used for this file, or has to be bound once more with other properties.
    Unsuitable,
    /// Another program has bound the device, or it is being detached or removed.
    Lost,
}

/// An index to try.
struct CandidateIndex {
    index: u32,
    /// Set if the index is from the pool.
    acquired: Option<Acquired>,
    /// Held until the attempt has ended, if the index is from `LOOP_CTL_GET_FREE`.
    _control_lock: Option<Flock<OwnedFd>>,
}

impl AttachCall<'_> {
    /// Binds the file to the next index.
    fn try_index(&mut self) -> Result<AttemptOutcome> {
        let candidate = self.next_candidate()?;
        // Before the device is bound, so that a crash in between leaves no device without an index lock.
        self.take_index_lock(&candidate)?;
        let index = candidate.index;
        let opened = loop_dev::open_existing(index, self.options.access == Access::ReadWrite);
        if let Ok(fd) = &opened
            && !self.may_bind(&candidate, fd)?
        {
            self.clear_index_lock()?;
            return Ok(AttemptOutcome::Unsuitable);
        }
        match opened.and_then(|fd| loop_dev::configure(&fd, &self.config).map(|()| fd)) {
            Ok(fd) => self.accept(fd, index),
            Err(errno) => self.retry_or_fail(&candidate, errno),
        }
    }

    fn next_candidate(&self) -> Result<CandidateIndex> {
        Ok(match self.options.index {
            IndexPolicy::Pool => {
                let acquired =
                    self.pool.acquire(self.control, self.options.discard, self.retries.deadline)?;
                CandidateIndex { index: acquired.index, acquired: Some(acquired), _control_lock: None }
            }
            IndexPolicy::Any => {
                let lock = lock_control(self.retries.left())?;
                let index = loop_dev::get_free(self.control).context("find", "a free loop device")?;
                CandidateIndex { index, acquired: None, _control_lock: Some(lock) }
            }
            IndexPolicy::Exact(index) => {
                CandidateIndex { index: add(self.control, index)?, acquired: None, _control_lock: None }
            }
        })
    }

    /// Returns an index that this call has not bound to the pool.
    fn release(&self, candidate: &CandidateIndex) {
        let sequence = candidate.acquired.and_then(|acquired| acquired.sequence);
        self.pool.release(candidate.index, sequence);
    }

    fn take_index_lock(&self, candidate: &CandidateIndex) -> Result<()> {
        let Self { backing, absence, options: AttachOptions { access, .. }, .. } = self;
        match index_lock::write(backing, *access, candidate.index) {
            // Best effort: without the mark the next search queries every device again.
            Ok(()) if *absence == Absence::Scanned && !index_lock::is_tracked(backing, *access) => {
                index_lock::mark_tracked(backing, *access).ok();
            }
            Err(errno) if *absence == Absence::Tracked || errno == Errno::EAGAIN => {
                self.release(candidate);
                let error = Error::sys("lock", "the backing file", errno);
                return Err(error.explain("another program has it locked, or its file system has no locks"));
            }
            // On a file system without locks each search queries every device.
            Ok(()) | Err(_) => {}
        }
        Ok(())
    }

    /// Clears the index lock before the next attempt: the lock of another index has another offset.
    fn clear_index_lock(&self) -> Result<()> {
        index_lock::clear(&self.backing, self.options.access).context("unlock", "the backing file")
    }

    /// Checks an open device before the file is bound to it. Returns `false` if the next index has to be tried.
    fn may_bind(&mut self, candidate: &CandidateIndex, fd: &OwnedFd) -> Result<bool> {
        let index = candidate.index;
        // Otherwise the file would be bound to another device until its status is read.
        if loop_dev::device_number(fd) != Ok(self.pool.number_of(index).to_raw())
            && let Err(error) = check_node(fd, index)
        {
            self.retries.stale_nodes += 1;
            if self.options.index != IndexPolicy::Pool {
                self.release(candidate);
                return Err(error);
            }
            // The pool has other indices, and must not return this one to the next call: it stays out of the pool until a scan.
            return if self.retries.stale_nodes >= MAX_STALE_NODES { Err(error) } else { Ok(false) };
        }
        candidate.acquired.map_or(Ok(true), |acquired| self.pool.is_unused(acquired, fd))
    }

    /// Checks a device that this call has bound. If it lacks a requested property, detaches it.
    fn accept(&mut self, fd: OwnedFd, index: u32) -> Result<AttemptOutcome> {
        let Self { pool, options, .. } = *self;
        let checked = check(&fd, index, &self.backing, self.size, options)
            .and_then(|binding| Ok((binding, discard::set(&fd, index, options.discard)?)));
        match checked {
            Ok((binding, DiscardOutcome::Done)) => {
                pool.record_discard(index, options.discard);
                if options.lifetime == Lifetime::AutoClear {
                    pool.release_on_close(index);
                }
                Ok(AttemptOutcome::Attached(LoopDevice::new(fd, binding)))
            }
            Ok((binding, DiscardOutcome::StaysDisabled)) => self.recreate(fd, binding),
            Err(error) => {
                let larger = larger_blocks(&self.backing, &self.config, options);
                match larger.zip(read_status(&fd, index).ok()) {
                    Some((block_size, Status { binding, .. })) => {
                        self.retry_with_blocks(fd, binding, block_size)
                    }
                    None => Err(self.undo(&fd, index, error)),
                }
            }
        }
    }

    /// Detaches a device whose discards were disabled for an earlier file, which the kernel has kept, and removes it. A removal takes
    /// 45 ms, once for each such index.
    fn recreate(&self, fd: OwnedFd, binding: Binding) -> Result<AttemptOutcome> {
        let index = binding.index;
        let reason = "its discards are disabled, and it cannot be recreated";
        detach_for_retry(fd, self.config.info.lo_flags, binding, self.retries.left(), reason)?;
        self.clear_index_lock()?;
        if loop_dev::remove(self.control, index).is_err() {
            self.pool.record_discard(index, Discard::Disabled);
            self.pool.release_on_close(index);
        }
        Ok(AttemptOutcome::Unsuitable)
    }

    /// Detaches a device, and has the next attempt use larger blocks.
    fn retry_with_blocks(
        &mut self,
        fd: OwnedFd,
        binding: Binding,
        block_size: u32,
    ) -> Result<AttemptOutcome> {
        let index = binding.index;
        let reason = "the file was cloned during the call, and the device cannot get larger blocks";
        detach_for_retry(fd, self.config.info.lo_flags, binding, self.retries.left(), reason)?;
        self.clear_index_lock()?;
        self.pool.release(index, None);
        self.config.block_size = block_size;
        Ok(AttemptOutcome::Unsuitable)
    }

    /// Detaches a device after `error`, and returns that error. This call made the binding, so clearing it affects no other user. If
    /// that fails too, the device stays bound, and its index lock leads the next call to it.
    fn undo(&self, fd: &OwnedFd, index: u32, error: Error) -> Error {
        let undone = request_detach(fd, index, self.config.info.lo_flags, &node_name(index));
        self.pool.release_on_close(index);
        match undone {
            Err(problem) if problem.errno() != Some(Errno::ENXIO as i32) => {
                let detail = format!("{error}; and then: {problem}");
                error.explain(detail)
            }
            _ => error,
        }
    }

    /// Requests another attempt after the kernel has not opened or bound a device, or returns the error.
    fn retry_or_fail(&mut self, candidate: &CandidateIndex, errno: Errno) -> Result<AttemptOutcome> {
        let index = candidate.index;
        match errno {
            Errno::ENOENT if loop_dev::exists(index) => {
                self.release(candidate);
                Err(Error::new(ErrorKind::NotFound, "attach", node_name(index), NO_NODE))
            }
            // Try the next index, or the requested one again once it is free.
            Errno::EBUSY | Errno::ENXIO | Errno::ENODEV | Errno::ENOENT
                if !self.retries.left().is_zero()
                    && (errno != Errno::EBUSY || !matches!(self.options.index, IndexPolicy::Exact(_))) =>
            {
                self.retries.lost += 1;
                self.clear_index_lock()?;
                Ok(AttemptOutcome::Lost)
            }
            // The device belongs to another program: it is not idle.
            Errno::EBUSY => {
                let lost = self.retries.lost;
                Err(Error::sys("attach", node_name(index), errno).explain(format!(
                    "another program has bound it; {lost} attempts with other devices failed during this call"
                )))
            }
            errno => {
                self.release(candidate);
                let error = Error::sys("attach", node_name(index), errno);
                Err(if errno == Errno::EPERM { error.explain(NOT_ALLOWED) } else { error })
            }
        }
    }
}

/// The number of nodes of other devices after which a call fails. So many probably mean that all nodes in `/dev` are from before a
/// reboot.
const MAX_STALE_NODES: u32 = 8;

/// The time limit for attempts while other programs take the devices.
struct Retries {
    deadline: Deadline,
    pause: Duration,
    lost: u32,
    /// The devices whose node belongs to another device.
    stale_nodes: u32,
}

impl Retries {
    fn until(deadline: Deadline) -> Self {
        Self { deadline, pause: Duration::from_millis(1), lost: 0, stale_nodes: 0 }
    }

    fn left(&self) -> Duration {
        self.deadline.left()
    }

    /// Waits for 1 ms to 50 ms: the kernel sends no event when a device becomes free.
    fn pause(&mut self) {
        std::thread::sleep(self.pause.min(self.left()));
        self.pause = (self.pause * 2).min(Duration::from_millis(50));
    }
}

/// Takes the lock under which programs bind the index that `LOOP_CTL_GET_FREE` returns. It may return the same index to two callers;
/// systemd takes the same lock.
fn lock_control(timeout: Duration) -> Result<Flock<OwnedFd>> {
    let control = loop_dev::open_control().context("open", CONTROL)?;
    flock::exclusive(control, timeout, "find a free loop device, which locks the file")
}

/// Detaches a device that this call has bound, and waits until the kernel has detached it. While a process has it open it stays bound,
/// and a second device of the file would corrupt it.
fn detach_for_retry(fd: OwnedFd, flags: u32, binding: Binding, limit: Duration, reason: &str) -> Result<()> {
    let name = node_name(binding.index);
    request_detach(&fd, binding.index, flags, &name)?;
    drop(fd);
    match PendingDetach::new(vec![binding]).wait(limit)? {
        Detach::Detached => Ok(()),
        Detach::Deferred(_) => {
            let detail = format!("{reason} while another process has it open");
            Err(Error::new(ErrorKind::Busy, "attach", name, detail))
        }
    }
}

/// Returns the block size with which to bind the file again, if a clone has raised the unit of its direct I/O since `config` was
/// made (Linux 6.15). Each attempt has larger blocks than the one before, so the attempts end.
fn larger_blocks(backing: &OwnedFd, config: &loop_config, options: &AttachOptions) -> Option<u32> {
    if options.block_size != BlockSize::MatchDirectIo {
        return None;
    }
    direct_io_unit(backing).ok().filter(|block_size| *block_size > config.block_size)
}

/// Opens the descriptor that the device will keep. With O_DIRECT the kernel checks the alignment immediately.
fn open_backing(image: BorrowedFd<'_>, options: &AttachOptions) -> Result<OwnedFd> {
    let access = match options.access {
        Access::ReadWrite => OFlag::O_RDWR,
        Access::ReadOnly => OFlag::O_RDONLY,
    };
    let buffered = || reopen(image, access).context("open", "the backing file");
    if options.direct_io == DirectIo::Off {
        return buffered();
    }
    match reopen(image, access | OFlag::O_DIRECT) {
        Ok(file) => Ok(file),
        Err(Errno::EINVAL) if options.direct_io == DirectIo::Preferred => buffered(),
        Err(Errno::EINVAL) => Err(Error::new(
            ErrorKind::NotHonoured,
            "attach",
            "the backing file",
            "direct I/O is requested, but the file system of the file has none",
        )),
        Err(errno) => Err(Error::sys("open", "the backing file", errno)),
    }
}

fn configuration(backing: &OwnedFd, options: &AttachOptions) -> Result<loop_config> {
    let block_size = match options.block_size {
        BlockSize::Exact(size) => size,
        BlockSize::KernelDefault => 0,
        BlockSize::MatchDirectIo => direct_io_unit(backing)?,
    };
    let mut config = abi::config(backing.as_raw_fd(), block_size);
    config.info.lo_offset = options.range.offset;
    config.info.lo_sizelimit = options.range.size_limit.map_or(0, |limit| limit.get());
    config.info.lo_file_name = options.file_name();
    for (wanted, flag) in [
        (options.access == Access::ReadOnly, abi::READ_ONLY),
        (options.direct_io != DirectIo::Off, abi::DIRECT_IO),
        (options.lifetime == Lifetime::AutoClear, abi::AUTOCLEAR),
        (options.partition_scan, abi::PARTITION_SCAN),
    ] {
        if wanted {
            config.info.lo_flags |= flag;
        }
    }
    Ok(config)
}

/// Creates a device unless it exists.
fn add(control: &Arc<OwnedFd>, index: u32) -> Result<u32> {
    match loop_dev::add(control, index) {
        Ok(_) | Err(Errno::EEXIST) => Ok(index),
        Err(errno) => Err(Error::sys("add", node_name(index), errno)),
    }
}

/// Checks that the kernel granted the requested properties. `size_before` is the size of the file before it was bound.
fn check(
    fd: &OwnedFd,
    index: u32,
    backing: &OwnedFd,
    size_before: Bytes,
    options: &AttachOptions,
) -> Result<Binding> {
    let status = read_status(fd, index)?;
    let problem = match options.mismatch(&status) {
        None => wrong_size(&status, size_before, backing, options)?,
        problem => problem,
    };
    match problem {
        Some(problem) => {
            let remedy = if options.direct_io == DirectIo::Required && !status.direct_io {
                blocks_too_small(backing, status.block_size).unwrap_or_default()
            } else {
                String::new()
            };
            let error = Error::new(ErrorKind::NotHonoured, "attach", node_name(index), problem);
            Err(error.with_remedy(remedy))
        }
        None => Ok(status.binding),
    }
}

/// Returns what to do if direct I/O was not granted because of the file: a file that shares blocks with another is written in whole
/// blocks of its file system, and the kernel reports that from Linux 6.15 on.
fn blocks_too_small(backing: &OwnedFd, block_size: u32) -> Option<String> {
    let unit = statx::direct_io_alignment(backing).ok()?;
    (block_size < unit).then(|| {
        format!(
            "direct I/O on this file works in units of {unit} bytes: request blocks of that size, or only prefer direct I/O"
        )
    })
}

/// Checks the size of the device. The kernel silently rounds the size down.
fn wrong_size(
    status: &Status,
    before: Bytes,
    backing: &OwnedFd,
    options: &AttachOptions,
) -> Result<Option<String>> {
    let shown_of = |file: u64| shown_bytes(&options.range, file);
    let shown = shown_of(before.0);
    let least = shown - shown % u64::from(status.block_size.max(1));
    let mut most = shown;
    if status.size.0 > most {
        // The file was expanded in the meantime.
        most = shown_of(fstat(backing).context("fstat", "the backing file")?.st_size as u64);
    }
    // The file was truncated in the meantime.
    Ok((most == 0 || !(least..=most).contains(&status.size.0))
        .then(|| format!("the device has {} bytes instead of {shown}", status.size.0)))
}

/// Returns the size that a device has for a file of this size, in bytes.
pub(super) fn shown_size(status: &Status, file: u64) -> u64 {
    let shown = shown_bytes(&status.binding.range, file);
    // The kernel counts in sectors of 512 bytes.
    shown - shown % 512
}

fn shown_bytes(range: &BackingRange, file: u64) -> u64 {
    let rest = file.saturating_sub(range.offset);
    range.size_limit.map_or(rest, |limit| limit.get().min(rest))
}

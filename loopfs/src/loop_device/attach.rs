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
use super::discard::{self, Discard, Outcome};
use super::exclusion::Exclusion;
use super::index_lock::{self, Absence};
use super::options::{AttachOptions, BlockSize, DirectIo, IndexPolicy, Lifetime, direct_io_unit};
use super::pool::Pool;
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
    let mut config = configuration(&backing, options)?;
    options.check_file(locked.status(), config.block_size)?;
    let size = Bytes(locked.status().st_size as u64);
    let mut retries = Retries::until(locked.deadline());
    loop {
        let mut acquired = None;
        let (index, control_lock) = match options.index {
            IndexPolicy::Pool => (acquired.insert(pool.acquire(control, options.discard)?).index, None),
            IndexPolicy::Any => {
                let lock = lock_control(retries.left())?;
                (loop_dev::get_free(control).context("find", "a free loop device")?, Some(lock))
            }
            IndexPolicy::Exact(index) => (add(control, index)?, None),
        };
        let release = || pool.release(index, acquired.and_then(|acquired| acquired.sequence));
        // Before the device is bound, so that a crash in between leaves no device without an index lock.
        match index_lock::write(&backing, options.access, index) {
            // Best effort: without the mark the next search queries every device again.
            Ok(()) if absence == Absence::Scanned && !index_lock::is_tracked(&backing, options.access) => {
                index_lock::mark_tracked(&backing, options.access).ok();
            }
            Err(errno) if absence == Absence::Tracked || errno == Errno::EAGAIN => {
                release();
                let error = Error::sys("lock", "the backing file", errno);
                return Err(error.explain("another program has it locked, or its file system has no locks"));
            }
            // On a file system without locks each search queries every device.
            Ok(()) | Err(_) => {}
        }
        let opened = loop_dev::open_existing(index, options.access == Access::ReadWrite);
        // Otherwise the file would be bound to another device until its status is read.
        if let Ok(fd) = &opened
            && loop_dev::device_number(fd) != Ok(pool.number_of(index).to_raw())
            && let Err(error) = check_node(fd, index)
        {
            retries.stale_nodes += 1;
            if options.index != IndexPolicy::Pool {
                release();
                return Err(error);
            }
            // The pool has other indices, and must not return this one to the next call: it stays out of the pool until a scan.
            if retries.stale_nodes >= MAX_STALE_NODES {
                return Err(error);
            }
            index_lock::clear(&backing, options.access).context("unlock", "the backing file")?;
            continue;
        }
        if let Ok(fd) = &opened
            && let Some(acquired) = acquired
            && !pool.is_unused(acquired, fd)?
        {
            index_lock::clear(&backing, options.access).context("unlock", "the backing file")?;
            continue;
        }
        match opened.and_then(|fd| loop_dev::configure(&fd, &config).map(|()| fd)) {
            Ok(fd) => {
                let checked = check(&fd, index, &backing, size, options)
                    .and_then(|binding| Ok((binding, discard::set(&fd, index, options.discard)?)));
                let error = match checked {
                    Ok((binding, Outcome::Done)) => {
                        pool.record_discard(index, options.discard);
                        if options.lifetime == Lifetime::AutoClear {
                            pool.release_on_close(index);
                        }
                        return Ok(LoopDevice::new(fd, binding));
                    }
                    Ok((binding, Outcome::StaysDisabled)) => {
                        // Discards were disabled for an earlier file, and the kernel has kept that. A removal takes 45 ms, once for
                        // each such index.
                        let reason = "its discards are disabled, and it cannot be recreated";
                        detach_for_retry(fd, config.info.lo_flags, binding, retries.left(), reason)?;
                        index_lock::clear(&backing, options.access).context("unlock", "the backing file")?;
                        if loop_dev::remove(control, index).is_err() {
                            pool.record_discard(index, Discard::Disabled);
                            pool.release_on_close(index);
                        }
                        continue;
                    }
                    Err(error) => {
                        match larger_blocks(&backing, &config, options).zip(read_status(&fd, index).ok()) {
                            Some((block_size, Status { binding, .. })) => {
                                let reason = "the file was cloned during the call, and the device cannot get larger blocks";
                                detach_for_retry(fd, config.info.lo_flags, binding, retries.left(), reason)?;
                                index_lock::clear(&backing, options.access)
                                    .context("unlock", "the backing file")?;
                                pool.release(index, None);
                                config.block_size = block_size;
                                continue;
                            }
                            None => error,
                        }
                    }
                };
                // This call made the binding, so clearing it affects no other user. If that fails too, the device stays bound, and
                // its index lock leads the next call to it.
                let undone = request_detach(&fd, index, config.info.lo_flags, &node_name(index));
                pool.release_on_close(index);
                return Err(match undone {
                    Err(problem) if problem.errno() != Some(Errno::ENXIO as i32) => {
                        let detail = format!("{error}; and then: {problem}");
                        error.explain(detail)
                    }
                    _ => error,
                });
            }
            Err(Errno::ENOENT) if loop_dev::exists(index) => {
                release();
                return Err(Error::new(ErrorKind::NotFound, "attach", node_name(index), NO_NODE));
            }
            // Another program has bound it, or it is being detached or removed: try the next index, or the requested one again once it
            // is free.
            Err(errno @ (Errno::EBUSY | Errno::ENXIO | Errno::ENODEV | Errno::ENOENT))
                if !retries.left().is_zero()
                    && (errno != Errno::EBUSY || !matches!(options.index, IndexPolicy::Exact(_))) =>
            {
                retries.lost += 1;
                // The lock of the next index has another offset.
                index_lock::clear(&backing, options.access).context("unlock", "the backing file")?;
                // The pool returns another index. LOOP_CTL_GET_FREE may return the same one for as long as a program has it open
                // exclusively, and other callers wait for the lock.
                if options.index != IndexPolicy::Pool {
                    drop(control_lock);
                    retries.pause();
                }
            }
            Err(errno) => {
                let error = Error::sys("attach", node_name(index), errno);
                if errno == Errno::EBUSY {
                    // The device belongs to another program: it is not idle.
                    let lost = retries.lost;
                    return Err(error.explain(format!(
                        "another program has bound it; {lost} attempts with other devices failed during this call"
                    )));
                }
                release();
                return Err(if errno == Errno::EPERM { error.explain(NOT_ALLOWED) } else { error });
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

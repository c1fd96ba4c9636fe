//! Index locks: byte-range locks that show which loop device a file is attached to.
//!
//! The descriptor that a device keeps of its file holds a lock (`F_OFD_SETLK`, fcntl(2)) on one byte far past the end of the
//! file. The offset of that byte encodes the index of the device. Every process sees the lock, so finding the device of a file
//! takes constant time instead of a walk over all devices. The lock is taken before the device is bound, so no crash leaves a
//! device without a lock. The kernel drops the lock with the last reference to the descriptor, so no lock remains without a
//! device: not after a crash, a deferred detach or a reboot. Nothing is written to disk, which matters because
//! `LOOP_CONFIGURE` flushes the file.
//!
//! The index of a lock is checked before each use: that device must be bound to the file.
//!
//! Devices that other programs bound have no such lock. A writable one is detected nevertheless: it has the file open for writing,
//! and the kernel refuses a lease (`F_SETLEASE`, fcntl(2)) on such a file. If a lease gives no result, and for read-only
//! devices, an extended attribute marks a tracked file: all its attachments by this library have a lock, and it had no other
//! device when the mark was set. Without the mark (`trusted.*` can only be written with `CAP_SYS_ADMIN`) a search walks over
//! all devices.
//!
//! `docs/decisions/0002-index-locks.md` gives the reasons.

use std::ffi::CStr;
use std::os::fd::{AsFd, BorrowedFd};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};

use super::binding::Access;
use crate::sys::file_lease::is_open_for_writing;
use crate::sys::file_lock::lock_of;
use crate::sys::loop_dev;

const READ_WRITE: &CStr = c"trusted.loopfs.device";
const READ_ONLY: &CStr = c"trusted.loopfs.device-ro";
const TRACKED: &[u8] = b"none";

/// Beyond the end of any file, and of the ranges that other programs lock.
const FIRST_OFFSET: i64 = 1 << 62;
/// More offsets than there are indices.
const OFFSETS: i64 = 1 << 21;

/// The device of a file, as far as the locks of the file show it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum IndexLock {
    /// Another program has locked the whole file, or its file system has no locks, so nothing is known.
    Unreadable,
    /// This library has attached the file to no device.
    NoLock,
    /// The index of the device that the file is attached to, or is about to be attached to.
    Index(u32),
}

/// Reads the index lock of a file. The caller checks that the device is bound to the file.
pub(super) fn read(file: impl AsFd, access: Access) -> IndexLock {
    let first = first_offset(access);
    // Requests a lock that conflicts with the index lock at any offset.
    let mut found = lock_of(libc::F_WRLCK, first, OFFSETS);
    match fcntl(&file, FcntlArg::F_OFD_GETLK(&mut found)) {
        Ok(_) if i32::from(found.l_type) == libc::F_UNLCK => IndexLock::NoLock,
        // A lock of another length belongs to another program, which has locked the whole file.
        Ok(_) if found.l_len == 1 => {
            u32::try_from(found.l_start - first).map_or(IndexLock::Unreadable, IndexLock::Index)
        }
        _ => IndexLock::Unreadable,
    }
}

/// The evidence that a file has no device with an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Absence {
    /// No process or device has the file open for writing, so there is no writable device of any program.
    NoWriter,
    /// The file is tracked, and this library has bound no device to it. Another program may have bound one since.
    Tracked,
    /// Every device was queried for its file, and none is bound to this one.
    Scanned,
}

/// Returns `true` if a process, or a writable device of any program, may have the file open for writing. Returns `None` if the
/// kernel does not show that, and for read-only access, because readers are not counted. `file` must be open for reading
/// only; otherwise it counts as a writer itself. No other thread may have its open file description.
pub(super) fn writer(file: impl AsFd, access: Access) -> Option<bool> {
    match access {
        Access::ReadWrite => is_open_for_writing(file).ok(),
        Access::ReadOnly => None,
    }
}

/// Takes the lock of `index`. `backing` is the descriptor that the device will keep.
///
/// # Errors
/// EAGAIN: another program has locked the whole file.
pub(super) fn write(backing: impl AsFd, access: Access, index: u32) -> Result<(), Errno> {
    // A read lock is enough to be visible, and every descriptor may hold one.
    let lock = lock_of(libc::F_RDLCK, first_offset(access) + i64::from(index), 1);
    fcntl(backing, FcntlArg::F_OFD_SETLK(&lock)).map(drop)
}

/// Releases the lock that [`write`] took.
pub(super) fn clear(backing: impl AsFd, access: Access) -> Result<(), Errno> {
    let all = lock_of(libc::F_UNLCK, first_offset(access), OFFSETS);
    fcntl(backing, FcntlArg::F_OFD_SETLK(&all)).map(drop)
}

/// Marks a file as tracked: each device of this access holds an index lock.
pub(super) fn mark_tracked(file: impl AsFd, access: Access) -> Result<(), Errno> {
    crate::sys::xattr::set(file, attribute(access), TRACKED)
}

/// Marks a new file as tracked, for both kinds of access. The file cannot have a device yet.
pub(crate) fn mark_new_file_tracked(file: impl AsFd) -> Result<(), Errno> {
    [Access::ReadWrite, Access::ReadOnly].into_iter().try_for_each(|access| mark_tracked(&file, access))
}

/// Returns `true` if the file is marked as tracked for this access.
pub(super) fn is_tracked(file: impl AsFd, access: Access) -> bool {
    crate::sys::xattr::get(file, attribute(access)).is_ok_and(|value| value.as_deref() == Some(TRACKED))
}

fn attribute(access: Access) -> &'static CStr {
    match access {
        Access::ReadWrite => READ_WRITE,
        Access::ReadOnly => READ_ONLY,
    }
}

fn first_offset(access: Access) -> i64 {
    match access {
        Access::ReadWrite => FIRST_OFFSET,
        Access::ReadOnly => FIRST_OFFSET + OFFSETS,
    }
}

/// Returns the index of the device that `image` is attached to, by this library in any process. Returns `None` also if the
/// device has a deferred detach. The caller holds flock(2) of the image. Opens no device, so their nodes need not exist.
pub(crate) fn attached_index(image: BorrowedFd<'_>) -> Option<u32> {
    [Access::ReadWrite, Access::ReadOnly].into_iter().find_map(|access| match read(image, access) {
        IndexLock::Index(index) => loop_dev::stays_bound(index).then_some(index),
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_released_lock_can_be_reacquired() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let [backing, other] = [(); 2].map(|()| file.reopen().unwrap());
        write(&backing, Access::ReadWrite, 7).unwrap();
        clear(&backing, Access::ReadWrite).unwrap();
        assert!(!matches!(read(&other, Access::ReadWrite), IndexLock::Index(_)));
        let last = (1 << 20) - 1;
        write(&backing, Access::ReadWrite, last).unwrap();
        assert_eq!(read(&other, Access::ReadWrite), IndexLock::Index(last));
        assert!(!matches!(read(&other, Access::ReadOnly), IndexLock::Index(_)));
    }

    #[test]
    fn a_whole_file_lock_is_unreadable() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let [theirs, ours] = [(); 2].map(|()| file.reopen().unwrap());
        fcntl(&theirs, FcntlArg::F_OFD_SETLK(&lock_of(libc::F_WRLCK, 0, 0))).unwrap();
        assert_eq!(read(&ours, Access::ReadWrite), IndexLock::Unreadable);
        assert_eq!(write(&ours, Access::ReadWrite, 7), Err(Errno::EAGAIN));
    }
}

//! Which device a file is attached to, kept by the kernel for as long as it is.
//!
//! The descriptor that a device keeps of its file holds a lock (`F_OFD_SETLK`, fcntl(2)) on one byte far past the end,
//! whose place says the index. Every process sees the lock, so the search for a file's device is constant instead of a
//! walk over all devices. It is taken before the device is bound, so no crash leaves a device without it, and the
//! kernel drops it with the last reference to the descriptor, so none is left without a device: not by a crash, not by
//! a deferred detach, not by a reboot. Nothing is written to disk, which matters because `LOOP_CONFIGURE` flushes the file.
//!
//! The place is never believed: the device it names must be bound to the file.
//!
//! Devices bound by other programs have no such lock. A writable one is noticed all the same, because it has the file open
//! for writing, and a lease (`F_SETLEASE`, fcntl(2)) is refused while anything has. Where a lease cannot tell, and for
//! read-only devices, an extended attribute records that the file had no device when its attachments began to be
//! recorded; without it (`trusted.*` can only be written with `CAP_SYS_ADMIN`) a search walks over all devices.

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

/// Beyond the end of any file, and of what other programs lock.
const FIRST_OFFSET: i64 = 1 << 62;
/// More than there are indices.
const OFFSETS: i64 = 1 << 21;

/// What the locks of a file say about its device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum IndexLock {
    /// Nothing: another program has locked the file from end to end, or its file system has no locks.
    Unreadable,
    /// This library has attached it to no device.
    NoLock,
    /// The index it is attached to, or is about to be.
    Index(u32),
}

pub(super) fn read(file: impl AsFd, access: Access) -> IndexLock {
    let first = first_offset(access);
    // Asks who is in the way of a lock on all places.
    let mut found = lock_of(libc::F_WRLCK, first, OFFSETS);
    match fcntl(&file, FcntlArg::F_OFD_GETLK(&mut found)) {
        Ok(_) if i32::from(found.l_type) == libc::F_UNLCK => IndexLock::NoLock,
        // Else another program has locked the file from end to end.
        Ok(_) if found.l_len == 1 => {
            u32::try_from(found.l_start - first).map_or(IndexLock::Unreadable, IndexLock::Index)
        }
        _ => IndexLock::Unreadable,
    }
}

/// How it is known that a file has no device of an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Absence {
    /// Nothing has the file open for writing, so no writable device has, whichever program bound it.
    NoWriter,
    /// This library has bound none, and its attachments are recorded. Another program may have bound one since.
    Tracked,
    /// Every device was asked.
    Scanned,
}

/// Whether anything may have the file open for writing, as a writable device has, whichever program bound it. None where that is not
/// known, and of read-only devices: who only reads a file is not counted. `file` is open for reading only, or it counts
/// as a writer itself.
pub(super) fn writer(file: impl AsFd, access: Access) -> Option<bool> {
    match access {
        Access::ReadWrite => is_open_for_writing(file).ok(),
        Access::ReadOnly => None,
    }
}

/// Takes the place of `index`. `backing` is the descriptor that the device will keep. EAGAIN: another program
/// has locked the file from end to end.
pub(super) fn write(backing: impl AsFd, access: Access, index: u32) -> Result<(), Errno> {
    // A lock for reading is enough to be seen, and every descriptor may have it.
    let place = lock_of(libc::F_RDLCK, first_offset(access) + i64::from(index), 1);
    fcntl(backing, FcntlArg::F_OFD_SETLK(&place)).map(drop)
}

/// Takes back what [`write`] took.
pub(super) fn clear(backing: impl AsFd, access: Access) -> Result<(), Errno> {
    let places = lock_of(libc::F_UNLCK, first_offset(access), OFFSETS);
    fcntl(backing, FcntlArg::F_OFD_SETLK(&places)).map(drop)
}

/// Says that there is no device of this access that was not recorded.
pub(super) fn mark_tracked(file: impl AsFd, access: Access) -> Result<(), Errno> {
    crate::sys::xattr::set(file, attribute(access), TRACKED)
}

/// As [`mark_tracked`], for a file that was made a moment ago.
pub(crate) fn mark_new_file_tracked(file: impl AsFd) -> Result<(), Errno> {
    [Access::ReadWrite, Access::ReadOnly].into_iter().try_for_each(|access| mark_tracked(&file, access))
}

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

/// The device that keeps `image`, an open file that the caller holds flock(2) of: bound by this library, in whichever
/// process, and not about to go. No device is opened, so nodes need not be there.
pub(crate) fn attached_index(image: BorrowedFd<'_>) -> Option<u32> {
    [Access::ReadWrite, Access::ReadOnly].into_iter().find_map(|access| match read(image, access) {
        IndexLock::Index(index) => loop_dev::stays_bound(index).then_some(index),
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    /// As many descriptors of one file as asked, each opened anew.
    fn opened<const N: usize>() -> [File; N] {
        let file = tempfile::NamedTempFile::new().expect("a file");
        std::array::from_fn(|_| file.reopen().expect("the file again"))
    }

    #[test]
    fn a_place_is_seen_by_others_until_the_last_copy_of_its_descriptor_is_closed() {
        let [backing, other] = opened();
        write(&backing, Access::ReadWrite, 1_048_575).unwrap();
        assert_eq!(read(&other, Access::ReadWrite), IndexLock::Index(1_048_575));
        assert!(!matches!(read(&other, Access::ReadOnly), IndexLock::Index(_)), "the other access has none");
        let kept_by_the_device = backing.try_clone().unwrap();
        drop(backing);
        assert_eq!(read(&other, Access::ReadWrite), IndexLock::Index(1_048_575));
        drop(kept_by_the_device);
        assert!(!matches!(read(&other, Access::ReadWrite), IndexLock::Index(_)));
    }

    #[test]
    fn a_writable_and_a_read_only_device_of_a_file_do_not_hide_each_other() {
        let [writable, read_only, other] = opened();
        write(&writable, Access::ReadWrite, 7).unwrap();
        write(&read_only, Access::ReadOnly, 0).unwrap();
        assert_eq!(read(&other, Access::ReadWrite), IndexLock::Index(7));
        assert_eq!(read(&other, Access::ReadOnly), IndexLock::Index(0));
    }

    #[test]
    fn a_place_taken_back_is_free_for_another_try() {
        let [backing, other] = opened();
        write(&backing, Access::ReadWrite, 7).unwrap();
        clear(&backing, Access::ReadWrite).unwrap();
        assert!(!matches!(read(&other, Access::ReadWrite), IndexLock::Index(_)));
        write(&backing, Access::ReadWrite, 3).unwrap();
        assert_eq!(read(&other, Access::ReadWrite), IndexLock::Index(3));
    }

    #[test]
    fn a_lock_of_another_program_on_the_whole_file_is_no_place() {
        let [theirs, ours, other] = opened();
        let whole = lock_of(libc::F_WRLCK, 0, 0);
        fcntl(&theirs, FcntlArg::F_OFD_SETLK(&whole)).unwrap();
        assert_eq!(read(&other, Access::ReadWrite), IndexLock::Unreadable);
        assert_eq!(write(&ours, Access::ReadWrite, 7), Err(Errno::EAGAIN));
    }
}

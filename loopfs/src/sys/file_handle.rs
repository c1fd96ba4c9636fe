//! `name_to_handle_at(2)` and `open_by_handle_at(2)` (Linux 2.6.39): they identify and open an inode independently of
//! its names.

use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

use nix::errno::Errno;

use super::result::Result;

/// `MAX_HANDLE_SZ` of linux/exportfs.h.
const MAX_HANDLE_SIZE: usize = 128;
/// The bytes of a handle in [`FileHandle::store`]. A handle of XFS has 12 of them, and one of btrfs 20.
pub(crate) const STORED_HANDLE: usize = 40;

pub(crate) type Stored = [u8; STORED_HANDLE];

/// The identity of an inode among all inodes that the file system ever had: its number and its generation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FileHandle {
    kind: i32,
    bytes: Box<[u8]>,
}

impl FileHandle {
    /// Returns the bytes from which [`stored`](Self::stored) restores the handle, or `None` if it is too long for them.
    pub(crate) fn store(&self) -> Option<Stored> {
        let mut stored = [0; STORED_HANDLE];
        let (kind, rest) = stored.split_at_mut(4);
        kind.copy_from_slice(&self.kind.to_ne_bytes());
        let (length, rest) = rest.split_first_mut()?;
        *length = self.bytes.len() as u8;
        rest.get_mut(..self.bytes.len())?.copy_from_slice(&self.bytes);
        Some(stored)
    }

    /// Returns `None` for zeros: no handle is empty.
    pub(crate) fn stored(stored: &Stored) -> Option<Self> {
        let (kind, rest) = stored.split_first_chunk()?;
        let (length, rest) = rest.split_first()?;
        let bytes = rest.get(..usize::from(*length)).filter(|bytes| !bytes.is_empty())?;
        Some(Self { kind: i32::from_ne_bytes(*kind), bytes: bytes.into() })
    }
}

/// `struct file_handle` with the largest number of bytes that any file system uses.
#[repr(C)]
struct Raw {
    handle_bytes: u32,
    handle_type: i32,
    handle: [u8; MAX_HANDLE_SIZE],
}

/// `name_to_handle_at(file, "", AT_EMPTY_PATH)`. It also accepts an `O_PATH` descriptor. Returns EOPNOTSUPP if the file
/// system has no handles.
pub(crate) fn of(file: impl AsFd) -> Result<FileHandle> {
    let fd = file.as_fd().as_raw_fd();
    let mut raw = Raw { handle_bytes: MAX_HANDLE_SIZE as u32, handle_type: 0, handle: [0; MAX_HANDLE_SIZE] };
    let mut mount: libc::c_int = 0;
    // SAFETY: name_to_handle_at reads the empty path. It writes an int, and a `struct file_handle` of at most
    // `handle_bytes` bytes.
    let result = unsafe {
        libc::syscall(
            libc::SYS_name_to_handle_at,
            fd,
            c"".as_ptr(),
            &raw mut raw,
            &raw mut mount,
            libc::AT_EMPTY_PATH,
        )
    };
    Errno::result(result)?;
    Ok(FileHandle { kind: raw.handle_type, bytes: raw.handle[..raw.handle_bytes as usize].into() })
}

/// `open_by_handle_at` with `O_PATH`. `mount` is any descriptor of the file system except an `O_PATH` one, and selects the
/// mount. Returns ESTALE if the inode was deleted, and EPERM without `CAP_DAC_READ_SEARCH`.
pub(crate) fn open(mount: impl AsFd, handle: &FileHandle) -> Result<OwnedFd> {
    let mount = mount.as_fd().as_raw_fd();
    let mut raw = Raw {
        handle_bytes: handle.bytes.len() as u32,
        handle_type: handle.kind,
        handle: [0; MAX_HANDLE_SIZE],
    };
    raw.handle[..handle.bytes.len()].copy_from_slice(&handle.bytes);
    let flags = libc::O_PATH | libc::O_NOFOLLOW | libc::O_CLOEXEC;
    // SAFETY: open_by_handle_at reads a `struct file_handle` of `handle_bytes` bytes.
    let fd = unsafe { libc::syscall(libc::SYS_open_by_handle_at, mount, &raw const raw, flags) };
    let fd = Errno::result(fd)?;
    // SAFETY: open_by_handle_at returned a new descriptor, which has no other owner.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layout_matches_fcntl_h() {
        assert_eq!(std::mem::offset_of!(Raw, handle), 8);
    }

    #[test]
    fn a_stored_handle_is_restored() {
        let handle = |length: u8| FileHandle { kind: -7, bytes: (1..=length).collect() };
        for length in [1, 12, 35] {
            let stored = handle(length).store().unwrap();
            assert_eq!(FileHandle::stored(&stored), Some(handle(length)));
        }
        assert_eq!(handle(36).store(), None);
        assert_eq!(FileHandle::stored(&[0; STORED_HANDLE]), None);
    }

    #[test]
    fn only_hard_links_share_a_handle() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        let file = std::fs::File::create(&path).unwrap();
        std::fs::hard_link(&path, directory.path().join("link")).unwrap();
        let handle = of(&file).unwrap();
        assert_eq!(of(std::fs::File::open(directory.path().join("link")).unwrap()).unwrap(), handle);
        let other = std::fs::File::create(directory.path().join("other")).unwrap();
        assert_ne!(of(&other).unwrap(), handle);
    }
}

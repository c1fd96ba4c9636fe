//! `file_getattr(2)` and `file_setattr(2)` (Linux 6.17, linux/fs.h). They read and write the same attributes as
//! `FS_IOC_FSGETXATTR` and `FS_IOC_FSSETXATTR`, but also work on inodes that cannot be opened.

use std::ffi::CStr;
use std::os::fd::{AsFd, AsRawFd};

pub(crate) use linux_raw_sys::general::file_attr;
use linux_raw_sys::general::{__NR_file_getattr, __NR_file_setattr};
use nix::errno::Errno;

use super::result::Result;

/// Returns `true` if the kernel has the calls. It also returns `false` on EPERM, because a system call filter (seccomp(2))
/// that does not know the calls may return EPERM instead of ENOSYS.
pub(crate) fn exists() -> bool {
    !matches!(call(__NR_file_getattr, -1, c"", &mut empty()), Err(Errno::ENOSYS | Errno::EPERM))
}

/// `file_getattr(directory, path)`, following symbolic links. Returns EOPNOTSUPP if the file system does not store
/// these attributes for this type of inode.
pub(crate) fn get(directory: impl AsFd, path: &CStr) -> Result<file_attr> {
    let mut attributes = empty();
    call(__NR_file_getattr, directory.as_fd().as_raw_fd(), path, &mut attributes).map(|()| attributes)
}

/// `file_setattr(directory, path)`, following symbolic links. The kernel ignores the read-only flags
/// (`FS_XFLAG_HASATTR`, `FS_XFLAG_PREALLOC`), so a caller can write back the attributes that it has read.
pub(crate) fn set(directory: impl AsFd, path: &CStr, attributes: &file_attr) -> Result<()> {
    call(__NR_file_setattr, directory.as_fd().as_raw_fd(), path, &mut { *attributes })
}

/// Makes one of the two calls, which have the same arguments.
fn call(number: u32, directory: i32, path: &CStr, attributes: &mut file_attr) -> Result<()> {
    // SAFETY: the calls read a NUL-terminated path. One writes and the other reads one `struct file_attr` of the given size.
    let result = unsafe {
        libc::syscall(
            number.into(),
            directory,
            path.as_ptr(),
            &raw mut *attributes,
            size_of::<file_attr>(),
            0,
        )
    };
    Errno::result(result).map(drop)
}

fn empty() -> file_attr {
    file_attr { fa_xflags: 0, fa_extsize: 0, fa_nextents: 0, fa_projid: 0, fa_cowextsize: 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_layout_is_the_first_version() {
        assert_eq!(size_of::<file_attr>(), linux_raw_sys::general::FILE_ATTR_SIZE_VER0 as usize);
    }
}

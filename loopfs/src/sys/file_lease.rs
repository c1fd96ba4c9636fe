//! Leases of files (F_SETLEASE, fcntl(2)). The kernel grants a lease only if no other open file description conflicts with it,
//! including those of loop devices. Taking and releasing a lease therefore checks in one step whether the file is open elsewhere.

use std::os::fd::{AsFd, AsRawFd};

use linux_raw_sys::general::F_SETSIG;
use nix::errno::Errno;

use super::result::Result;

/// Returns `true` if any open file description may write to the file. `file` must be open for reading only; a writable
/// `file` counts itself.
///
/// # Errors
/// EACCES: the process is neither the file's owner nor has `CAP_LEASE`. EINVAL: the file system has no leases, or
/// `fs.leases-enable` is 0.
pub(crate) fn is_open_for_writing(file: impl AsFd) -> Result<bool> {
    conflicts(file, libc::F_RDLCK)
}

/// Returns `true` if the file has an open file description besides that of `file`. `O_PATH` descriptions do not count.
///
/// # Errors
/// As [`is_open_for_writing`].
pub(crate) fn is_open_elsewhere(file: impl AsFd) -> Result<bool> {
    conflicts(file, libc::F_WRLCK)
}

fn conflicts(file: impl AsFd, kind: i32) -> Result<bool> {
    let file = file.as_fd();
    // A process that opens the file in the meantime breaks the lease and waits until this process releases it. The kernel then
    // sends this process a signal. The default signal, SIGIO, would end the process. SIGURG is ignored by default.
    control(file, F_SETSIG as i32, libc::SIGURG)?;
    match control(file, libc::F_SETLEASE, kind) {
        Ok(()) => {}
        Err(Errno::EAGAIN) => return Ok(true),
        Err(errno) => return Err(errno),
    }
    // EAGAIN: another thread has released the lease of this open file description.
    control(file, libc::F_SETLEASE, libc::F_UNLCK).ok();
    Ok(false)
}

fn control(file: impl AsFd, command: i32, argument: i32) -> Result<()> {
    let fd = file.as_fd().as_raw_fd();
    // SAFETY: F_SETSIG and F_SETLEASE take an integer and no pointer.
    Errno::result(unsafe { libc::fcntl(fd, command, argument) }).map(drop)
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    #[test]
    fn open_writable_descriptors_are_noticed() {
        let path = tempfile::NamedTempFile::new().unwrap().into_temp_path();
        let reader = File::open(&path).unwrap();
        assert_eq!(is_open_for_writing(&reader), Ok(false));
        assert_eq!(is_open_for_writing(&reader), Ok(false), "the lease was not released");
        let writer = File::options().write(true).open(&path).unwrap();
        assert_eq!(is_open_for_writing(&reader), Ok(true));
        assert_eq!(is_open_for_writing(&writer), Ok(true), "the writable descriptor does not count itself");
        drop(writer);
        assert_eq!(is_open_for_writing(&reader), Ok(false));
    }

    #[test]
    fn other_open_file_descriptions_are_noticed() {
        let path = tempfile::NamedTempFile::new().unwrap().into_temp_path();
        let file = File::options().read(true).write(true).open(&path).unwrap();
        let duplicate = file.try_clone().unwrap();
        assert_eq!(
            is_open_elsewhere(&file),
            Ok(false),
            "a duplicate has an open file description of its own"
        );
        let reader = File::open(&path).unwrap();
        assert_eq!(is_open_elsewhere(&file), Ok(true));
        drop((reader, duplicate));
        assert_eq!(is_open_elsewhere(&file), Ok(false));
    }
}

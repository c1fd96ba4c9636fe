//! `getdents64(2)`. It returns a position after each name, so a caller can close a directory in the middle of its list
//! and continue there later.

use std::ffi::CString;
use std::os::fd::AsFd;

use rustix::fs::RawDir;

use super::result::{Result, errno};

/// A name of a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DirectoryEntry {
    pub(crate) name: CString,
    /// The position of the next entry, for lseek(2) on any descriptor of the directory.
    pub(crate) next: i64,
}

/// Reads the next names, as many as fit into 32 KiB, including `.` and `..`. Returns an empty list at the end, and ENOENT
/// if the directory was removed.
pub(crate) fn read(directory: impl AsFd) -> Result<Vec<DirectoryEntry>> {
    let mut buffer = Vec::with_capacity(32 << 10);
    let mut list = RawDir::new(directory, buffer.spare_capacity_mut());
    let mut entries = Vec::new();
    while let Some(entry) = list.next() {
        let entry = entry.map_err(errno)?;
        // rustix returns the signed position of the kernel as an unsigned number.
        entries.push(DirectoryEntry {
            name: entry.file_name().to_owned(),
            next: entry.next_entry_cookie() as i64,
        });
        // Another step would make the next system call.
        if list.is_buffer_empty() {
            break;
        }
    }
    Ok(entries)
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use nix::errno::Errno;

    use super::*;

    /// At the end of an existing directory, the call returns an empty batch instead.
    #[test]
    fn listing_a_removed_directory_fails() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("directory");
        std::fs::create_dir(&path).unwrap();
        let directory = File::open(&path).unwrap();
        assert_eq!(read(&directory).unwrap().len(), 2);
        assert_eq!(read(&directory), Ok(Vec::new()));
        std::fs::remove_dir(&path).unwrap();
        assert_eq!(read(&directory), Err(Errno::ENOENT));
    }

    #[test]
    fn a_saved_position_continues_the_list() {
        let directory = tempfile::tempdir().unwrap();
        for name in 0..2000 {
            File::create(directory.path().join(format!("{name:0>40}"))).unwrap();
        }
        let first = read(File::open(directory.path()).unwrap()).unwrap();
        assert!(first.len() < 2000, "all names fit into 32 KiB");
        let again = File::open(directory.path()).unwrap();
        nix::unistd::lseek(&again, first.last().unwrap().next, nix::unistd::Whence::SeekSet).unwrap();
        let mut names: Vec<CString> = first.into_iter().map(|entry| entry.name).collect();
        loop {
            let more = read(&again).unwrap();
            if more.is_empty() {
                break;
            }
            names.extend(more.into_iter().map(|entry| entry.name));
        }
        names.sort();
        names.dedup();
        assert_eq!(names.len(), 2002, "a name is missing or listed twice; . and .. count");
    }
}

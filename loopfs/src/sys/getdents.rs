//! `getdents64(2)`. It returns a position after each name, so a caller can close a directory in the middle of its list
//! and continue there later.

use std::ffi::{CStr, CString};
use std::mem::offset_of;
use std::os::fd::{AsFd, AsRawFd};

use linux_raw_sys::general::linux_dirent64;
use nix::errno::Errno;

use super::result::Result;

/// A name of a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) name: CString,
    /// The position of the next entry, for lseek(2) on any descriptor of the directory.
    pub(crate) next: i64,
}

/// Reads the next names, as many as fit into 32 KiB, including `.` and `..`. Returns an empty list at the end, and ENOENT
/// if the directory was removed.
pub(crate) fn read(directory: impl AsFd) -> Result<Vec<Entry>> {
    let fd = directory.as_fd().as_raw_fd();
    let mut buffer = vec![0u8; 32 << 10];
    // SAFETY: getdents64 writes at most the given length.
    let length = unsafe { libc::syscall(libc::SYS_getdents64, fd, buffer.as_mut_ptr(), buffer.len()) };
    let length = Errno::result(length)?;
    Ok(parse(&buffer[..length as usize]))
}

/// Parses records of `struct linux_dirent64` up to the first invalid one.
fn parse(mut bytes: &[u8]) -> Vec<Entry> {
    const NAME: usize = offset_of!(linux_dirent64, d_name);
    let mut entries = Vec::new();
    while let Some(record) = record(bytes) {
        let next = i64::from_ne_bytes(field(record, offset_of!(linux_dirent64, d_off)));
        let Ok(name) = CStr::from_bytes_until_nul(&record[NAME..]) else { break };
        entries.push(Entry { name: name.to_owned(), next });
        bytes = &bytes[record.len()..];
    }
    entries
}

fn record(bytes: &[u8]) -> Option<&[u8]> {
    const NAME: usize = offset_of!(linux_dirent64, d_name);
    if bytes.len() <= NAME {
        return None;
    }
    let length = usize::from(u16::from_ne_bytes(field(bytes, offset_of!(linux_dirent64, d_reclen))));
    bytes.get(..length).filter(|record| record.len() > NAME)
}

fn field<const N: usize>(record: &[u8], offset: usize) -> [u8; N] {
    let mut bytes = [0; N];
    bytes.copy_from_slice(&record[offset..offset + N]);
    bytes
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    #[test]
    fn layout_matches_dirent_h() {
        assert_eq!(offset_of!(linux_dirent64, d_off), 8);
        assert_eq!(offset_of!(linux_dirent64, d_reclen), 16);
        assert_eq!(offset_of!(linux_dirent64, d_name), 19);
    }

    fn record_of(name: &[u8], next: i64, length: u16) -> Vec<u8> {
        let mut record = vec![0; usize::from(length)];
        record[8..16].copy_from_slice(&next.to_ne_bytes());
        record[16..18].copy_from_slice(&length.to_ne_bytes());
        record[19..19 + name.len()].copy_from_slice(name);
        record
    }

    #[test]
    fn an_invalid_record_ends_the_list() {
        let entry = |name: &str, next| Entry { name: CString::new(name).unwrap(), next };
        let two = [record_of(b"a", 7, 24), record_of(b"line\nfeed", -1, 32)].concat();
        assert_eq!(parse(&two), [entry("a", 7), entry("line\nfeed", -1)]);
        assert_eq!(parse(&[]), []);
        assert_eq!(parse(&two[..30]), [entry("a", 7)], "truncated");
        assert_eq!(parse(&record_of(b"", 1, 0xff)[..24]), [], "longer than the buffer");
        let mut endless = record_of(b"a", 7, 24);
        endless[16..18].copy_from_slice(&0u16.to_ne_bytes());
        assert_eq!(parse(&endless), [], "length 0");
        let mut unterminated = record_of(b"a", 7, 24);
        unterminated[19..].fill(b'x');
        assert_eq!(parse(&unterminated), []);
    }

    #[test]
    fn another_descriptor_continues_the_list_at_a_saved_position() {
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

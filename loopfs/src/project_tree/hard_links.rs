//! Files of a clone that get additional hard links.
//!
//! A source file is identified by its handle, which contains the number and the generation of its inode. The number alone
//! could belong to another file by the time the walk meets it again. The file of the clone is also opened by its handle. It
//! therefore needs no temporary name in the tree, and a crash leaves none behind.
//!
//! A tree can have any number of such files, and their owner chooses the order of their names. They are therefore recorded in an
//! unnamed file on the disk instead of memory, at an offset that the number of the source's inode determines.

use std::fs::File;
use std::os::unix::fs::FileExt;

use nix::errno::Errno;
use nix::unistd::{Whence, lseek};

use super::flags::Flags;
use crate::sys::file_handle::{FileHandle, STORED_HANDLE};

/// The bytes of a record: two handles, the names that are missing, and three numbers of the flags. The rest is unused.
const RECORD: usize = 128;
/// Number of records that [`HardLinkRecords::rest`] reads at once.
const BATCH: usize = 512;
const _: () = assert!(2 * STORED_HANDLE + 8 + 3 * 4 <= RECORD && RECORD.is_power_of_two());

/// Files with several hard links, from their first name in the walk to their last.
pub(super) struct HardLinkRecords {
    records: File,
    /// `true` if a file was recorded whose flags are still to be set.
    any_flags: bool,
}

/// A file of the clone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Made {
    source: FileHandle,
    pub(super) handle: FileHandle,
    /// The flags to set once all its hard links exist, because they prevent linking.
    pub(super) flags: Flags,
    /// Number of names of its source that the walk has not met yet.
    missing: u64,
}

impl HardLinkRecords {
    /// `records` is an empty file that no other process has open.
    pub(super) fn new(records: File) -> Self {
        Self { records, any_flags: false }
    }

    /// Records the copy of a file with `names` names, and the flags to set once all of them exist. Returns the copy of an
    /// earlier file with the same inode number. That file was deleted, so its copy gets no more names.
    ///
    /// # Errors
    /// Those of pwrite(2). EOVERFLOW: the file system has longer handles than a record.
    pub(super) fn remember(
        &mut self,
        inode: u64,
        source: FileHandle,
        names: u64,
        handle: FileHandle,
        flags: Flags,
    ) -> Result<Option<Made>, Errno> {
        let replaced = self.read(inode)?;
        self.any_flags |= !flags.are_none();
        let record = Made { source, handle, flags, missing: names.saturating_sub(1) }.to_bytes()?;
        self.records.write_all_at(&record, offset(inode)?).map_err(errno_of)?;
        Ok(replaced)
    }

    /// Returns the copy of a file that has the inode number `inode` and the handle `source`.
    pub(super) fn find(&self, inode: u64, source: &FileHandle) -> Result<Option<Made>, Errno> {
        Ok(self.read(inode)?.filter(|made| made.source == *source))
    }

    /// Records that another name of a file was created. Returns `true` if this was its last name.
    pub(super) fn met(&mut self, inode: u64, mut made: Made) -> Result<bool, Errno> {
        made.missing = made.missing.saturating_sub(1);
        let last = made.missing == 0;
        let record = if last { [0; RECORD] } else { made.to_bytes()? };
        self.records.write_all_at(&record, offset(inode)?).map_err(errno_of)?;
        Ok(last)
    }

    /// Calls `visit` for each file that has flags to set and names that the walk did not meet, because they are outside the tree.
    pub(super) fn rest<E: From<Errno>>(
        &self,
        mut visit: impl FnMut(&Made) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut next = 0;
        let mut batch = vec![0; if self.any_flags { BATCH * RECORD } else { 0 }];
        while !batch.is_empty() {
            match lseek(&self.records, next, Whence::SeekData) {
                // The record that contains this byte began before it, in a hole.
                Ok(data) => next = data & !(RECORD as i64 - 1),
                Err(Errno::ENXIO) => break,
                Err(errno) => return Err(errno.into()),
            }
            let read = self.records.read_at(&mut batch, next as u64).map_err(errno_of)?;
            for record in batch[..read].chunks_exact(RECORD) {
                match Made::from_bytes(record) {
                    Some(made) if !made.flags.are_none() => visit(&made)?,
                    _ => {}
                }
            }
            next += (read - read % RECORD).max(RECORD) as i64;
        }
        Ok(())
    }

    fn read(&self, inode: u64) -> Result<Option<Made>, Errno> {
        let mut record = [0; RECORD];
        match self.records.read_exact_at(&mut record, offset(inode)?) {
            Ok(()) => Ok(Made::from_bytes(&record)),
            Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => Ok(None),
            Err(error) => Err(errno_of(error)),
        }
    }
}

impl Made {
    fn to_bytes(&self) -> Result<[u8; RECORD], Errno> {
        let (extent, cow_extent) = self.flags.hints();
        let parts: [&[u8]; 6] = [
            &self.source.store().ok_or(Errno::EOVERFLOW)?,
            &self.handle.store().ok_or(Errno::EOVERFLOW)?,
            &self.missing.to_ne_bytes(),
            &self.flags.bits().to_ne_bytes(),
            &extent.to_ne_bytes(),
            &cow_extent.to_ne_bytes(),
        ];
        let mut record = [0; RECORD];
        for (byte, value) in record.iter_mut().zip(parts.concat()) {
            *byte = value;
        }
        Ok(record)
    }

    /// Returns `None` for the zeros of a record that was never written or is no longer needed.
    fn from_bytes(record: &[u8]) -> Option<Self> {
        let (source, rest) = record.split_first_chunk::<STORED_HANDLE>()?;
        let (handle, rest) = rest.split_first_chunk::<STORED_HANDLE>()?;
        let (missing, rest) = rest.split_first_chunk()?;
        let (bits, rest) = rest.split_first_chunk()?;
        let (extent, rest) = rest.split_first_chunk()?;
        let (cow_extent, _) = rest.split_first_chunk()?;
        let number = |bytes: &[u8; 4]| u32::from_ne_bytes(*bytes);
        Some(Self {
            source: FileHandle::stored(source)?,
            handle: FileHandle::stored(handle)?,
            flags: Flags::new(u64::from(number(bits)), number(extent), number(cow_extent)),
            missing: u64::from_ne_bytes(*missing),
        })
    }
}

fn offset(inode: u64) -> Result<u64, Errno> {
    inode.checked_mul(RECORD as u64).filter(|offset| i64::try_from(*offset).is_ok()).ok_or(Errno::EOVERFLOW)
}

fn errno_of(error: std::io::Error) -> Errno {
    error.raw_os_error().map_or(Errno::EIO, Errno::from_raw)
}

#[cfg(test)]
mod tests {
    use linux_raw_sys::general::{FS_XFLAG_EXTSIZE, FS_XFLAG_IMMUTABLE};

    use super::*;
    use crate::sys::file_handle;

    /// The record of a file is removed after the walk has met the last link.
    #[test]
    fn a_record_ends_with_its_links() {
        let directory = tempfile::tempdir().unwrap();
        let handle = |name: &str| {
            file_handle::of(std::fs::File::create(directory.path().join(name)).unwrap()).unwrap()
        };
        let (source, copy, other) = (handle("source"), handle("copy"), handle("other"));
        let flags = Flags::new(u64::from(FS_XFLAG_IMMUTABLE | FS_XFLAG_EXTSIZE), 8192, 0);
        let mut links = HardLinkRecords::new(tempfile::tempfile_in(directory.path()).unwrap());
        assert_eq!(links.remember(70_001, source.clone(), 3, copy.clone(), flags), Ok(None));
        let found = links.find(70_001, &source).unwrap().unwrap();
        assert_eq!((&found.handle, found.flags), (&copy, flags));
        assert_eq!((links.find(70_001, &other), links.find(70_000, &source)), (Ok(None), Ok(None)));
        assert_eq!(links.met(70_001, found), Ok(false));
        let found = links.find(70_001, &source).unwrap().unwrap();
        assert_eq!(links.met(70_001, found), Ok(true));
        assert_eq!(links.find(70_001, &source), Ok(None));

        assert_eq!(links.remember(70_001, source.clone(), 2, copy.clone(), flags), Ok(None));
        links.remember(3, other.clone(), 2, source.clone(), Flags::default()).unwrap();
        let replaced = links.remember(70_001, other.clone(), 2, source.clone(), flags).unwrap();
        assert_eq!(replaced.map(|made| made.handle), Some(copy), "the inode number was used again");
        let mut rest = Vec::new();
        links
            .rest::<Errno>(|made| {
                rest.push(made.handle.clone());
                Ok(())
            })
            .unwrap();
        assert_eq!(rest, [source], "the other one has no flags to set");
    }
}

//! The log of all writes to a disk, as QEMU's `blklogwrites` keeps it, and the disks that a power cut could
//! have left.
//!
//! The format is that of Linux's dm-log-writes: a header, then for each write an entry and its data, all in
//! sectors. A disk has a write cache. Every power cut after a flush preserves the writes before the flush.
//! Each write since the flush may survive or be lost. One log therefore stands for very many disks, while
//! killing a machine leaves only one.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use anyhow::{Context, Result};

const MAGIC: u64 = 0x006a_7366_7773_6872;
const VERSION: u64 = 1;
const FLUSH: u64 = 1;
const DISCARD: u64 = 1 << 2;

/// A request to the disk.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Entry {
    Write {
        /// The offset on the disk in bytes.
        offset: u64,
        data: Vec<u8>,
    },
    Flush,
    /// A disk may or may not erase discarded blocks; these disks do not.
    Discard,
}

/// Reads a log up to its end, or to the entry that was incomplete when QEMU was killed.
pub fn read(path: &Path) -> Result<Vec<Entry>> {
    let bytes = std::fs::read(path).with_context(|| format!("read {}", path.display()))?;
    parse(&bytes).with_context(|| format!("{} is no log of writes", path.display()))
}

fn parse(bytes: &[u8]) -> Option<Vec<Entry>> {
    if number(bytes, 0)? != MAGIC || number(bytes, 8)? != VERSION {
        return None;
    }
    let count = number(bytes, 16)?;
    let sector = u64::from(u32::from_le_bytes(bytes.get(24..28)?.try_into().ok()?));
    let mut entries = Vec::new();
    let mut position = sector;
    for _ in 0..count {
        let Some((entry, end)) = entry(bytes, position, sector) else { break };
        entries.push(entry);
        position = end;
    }
    Some(entries)
}

/// Returns the entry at `position` and the position of the next, or `None` if there is no complete entry.
fn entry(bytes: &[u8], position: u64, sector: u64) -> Option<(Entry, u64)> {
    let start = usize::try_from(position).ok()?;
    let (at, sectors, flags) = (number(bytes, start)?, number(bytes, start + 8)?, number(bytes, start + 16)?);
    let data = position.checked_add(sector)?;
    if flags & FLUSH != 0 {
        return Some((Entry::Flush, data));
    }
    if flags & DISCARD != 0 {
        return Some((Entry::Discard, data));
    }
    let length = sectors.checked_mul(sector)?;
    let end = data.checked_add(length)?;
    let content = bytes.get(usize::try_from(data).ok()?..usize::try_from(end).ok()?)?;
    (length > 0).then(|| (Entry::Write { offset: at * sector, data: content.to_vec() }, end))
}

fn number(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.get(at..at.checked_add(8)?)?.try_into().ok()?))
}

/// Returns how many of the first `at` entries survive every power cut after them.
#[must_use]
pub fn flushed(entries: &[Entry], at: usize) -> usize {
    entries[..at].iter().rposition(|entry| *entry == Entry::Flush).map_or(0, |flush| flush + 1)
}

/// Writes the surviving writes of `entries` to `disk`, a copy of the disk's initial content.
pub fn replay(disk: &Path, entries: &[Entry], mut kept: impl FnMut(usize) -> bool) -> Result<()> {
    let file = File::options()
        .write(true)
        .open(disk)
        .with_context(|| format!("open the disk {}", disk.display()))?;
    for (index, entry) in entries.iter().enumerate() {
        if let Entry::Write { offset, data } = entry
            && kept(index)
        {
            file.write_all_at(data, *offset).with_context(|| format!("write {}", disk.display()))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(count: u64) -> Vec<u8> {
        let mut bytes = Vec::new();
        for word in [MAGIC, VERSION, count] {
            bytes.extend(word.to_le_bytes());
        }
        bytes.extend(512u32.to_le_bytes());
        bytes.resize(512, 0);
        bytes
    }

    fn add(bytes: &mut Vec<u8>, sector: u64, flags: u64, data: &[u8]) {
        for word in [sector, data.len() as u64 / 512, flags, 0] {
            bytes.extend(word.to_le_bytes());
        }
        bytes.resize(bytes.len().next_multiple_of(512), 0);
        bytes.extend(data);
    }

    fn log() -> Vec<u8> {
        let mut bytes = header(4);
        add(&mut bytes, 3, 0, &[1; 1024]);
        add(&mut bytes, 0, FLUSH, &[]);
        add(&mut bytes, 4, 0, &[2; 512]);
        add(&mut bytes, 9, 0, &[3; 512]);
        bytes
    }

    fn written(offset: u64, byte: u8, length: usize) -> Entry {
        Entry::Write { offset, data: vec![byte; length] }
    }

    #[test]
    fn a_log_is_read_in_order() {
        let expected = [written(1536, 1, 1024), Entry::Flush, written(2048, 2, 512), written(4608, 3, 512)];
        assert_eq!(parse(&log()).unwrap(), expected);
        assert_eq!(parse(b"something else that is long enough to be a header"), None);
    }

    #[test]
    fn log_ends_before_incomplete_entry() {
        let whole = log();
        assert_eq!(parse(&whole[..whole.len() - 1]).unwrap().len(), 3);
        // Space for an entry was allocated, but the entry is not written yet.
        let mut hole = whole.clone();
        hole[512 * 5..512 * 6].fill(0);
        assert_eq!(parse(&hole).unwrap().len(), 2);
        // The header counts the flushed entries.
        let mut counted = whole;
        counted[16] = 1;
        assert_eq!(parse(&counted).unwrap().len(), 1);
    }

    /// `flushed` counts the entries that every power cut preserves.
    #[test]
    fn replay_writes_only_selected_entries() {
        let entries = parse(&log()).unwrap();
        assert_eq!([0, 1, 2, 3, 4].map(|at| flushed(&entries, at)), [0, 0, 2, 2, 2]);
        let disk = tempfile::NamedTempFile::new().unwrap();
        replay(disk.path(), &entries, |index| index != 2).unwrap();
        let bytes = std::fs::read(disk.path()).unwrap();
        assert_eq!(bytes[1536..2560], [1; 1024]);
        assert_eq!(bytes[4608..], [3; 512]);
    }
}

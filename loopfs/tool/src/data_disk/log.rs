//! The end of the log of an XFS: whether the file system was unmounted, or the kernel has to replay the log.
//!
//! The log is a ring of blocks of 512 bytes (xfs_log_format.h of the kernel). The kernel writes the number of the current
//! pass through the ring, the cycle, at the beginning of each block, and an unmount record as the last one.

use std::io::Result;

const BLOCK: usize = 512;
const HEADER_MAGIC: u32 = 0xfeed_babe;
const VERSION_2: u32 = 2;
/// The size of the log data that one header block describes.
const HEADER_CYCLE_SIZE: u64 = 32 << 10;
const UNMOUNT_FLAG: u8 = 0x20;
/// An unmount record has one block of data, and is padded to the stripe unit of the log, which is at most 256 KiB.
const LONGEST_UNMOUNT_RECORD: u64 = 2 * (256 << 10) / 512;

/// The state of the log of a file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LogState {
    /// The file system was unmounted.
    Clean,
    /// The kernel replays the log at the next mount.
    NeedsRecovery,
    /// The file system is mounted, so its log is being written.
    InUse,
    /// The log is on another device, or is not readable as one.
    Unknown,
}

/// The blocks of a log.
pub(crate) trait LogBlocks {
    /// The number of blocks.
    fn count(&self) -> u64;

    /// Reads one block.
    fn read(&self, index: u64) -> Result<[u8; BLOCK]>;
}

/// Returns the state of an unmounted log. It finds the last record as the kernel does (`xlog_find_tail`): blocks of the
/// current cycle end where those of the previous one begin.
pub(crate) fn state(log: &impl LogBlocks) -> Result<LogState> {
    let count = log.count();
    if count < 2 || cycle(log, 0)? == 0 {
        return Ok(LogState::Unknown);
    }
    let head = head(log, count)?;
    for back in 1..=LONGEST_UNMOUNT_RECORD.min(count) {
        let start = (head + count - back) % count;
        let block = log.read(start)?;
        if word(&block, 0) == HEADER_MAGIC {
            let unmounted = is_unmount_record(log, &block, start, head, count)?;
            return Ok(if unmounted { LogState::Clean } else { LogState::NeedsRecovery });
        }
    }
    Ok(LogState::NeedsRecovery)
}

/// Returns the first block after the last record.
fn head(log: &impl LogBlocks, count: u64) -> Result<u64> {
    let (first, last) = (cycle(log, 0)?, cycle(log, count - 1)?);
    if first == last {
        return Ok(0);
    }
    let (mut current, mut previous) = (0, count - 1);
    while previous - current > 1 {
        let middle = current + (previous - current) / 2;
        if cycle(log, middle)? == last {
            previous = middle;
        } else {
            current = middle;
        }
    }
    Ok(previous)
}

/// Returns `true` if the record ends at the head, and unmounts the file system (`xlog_check_unmount_rec`).
fn is_unmount_record(
    log: &impl LogBlocks,
    header: &[u8; BLOCK],
    start: u64,
    head: u64,
    count: u64,
) -> Result<bool> {
    let (version, length, operations, size) =
        (word(header, 8), word(header, 12), word(header, 40), word(header, 320));
    let headers = match version & VERSION_2 {
        0 => 1,
        _ => u64::from(size).div_ceil(HEADER_CYCLE_SIZE).clamp(1, count),
    };
    let end = start + headers + u64::from(length).div_ceil(BLOCK as u64);
    if end % count != head || operations != 1 {
        return Ok(false);
    }
    let operation = log.read((start + headers) % count)?;
    Ok(operation[9] & UNMOUNT_FLAG != 0)
}

/// Returns the cycle of a block. A header begins with its magic number instead.
fn cycle(log: &impl LogBlocks, index: u64) -> Result<u32> {
    let block = log.read(index)?;
    Ok(match word(&block, 0) {
        HEADER_MAGIC => word(&block, 4),
        cycle => cycle,
    })
}

fn word(block: &[u8; BLOCK], offset: usize) -> u32 {
    let mut bytes = [0; 4];
    bytes.copy_from_slice(&block[offset..offset + 4]);
    u32::from_be_bytes(bytes)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const COUNT: u64 = 4096;

    struct Log(Vec<[u8; BLOCK]>);

    impl LogBlocks for Log {
        fn count(&self) -> u64 {
            self.0.len() as u64
        }

        fn read(&self, index: u64) -> Result<[u8; BLOCK]> {
            Ok(self.0[index as usize])
        }
    }

    impl Log {
        /// A log whose first `head` blocks are of `cycle`, and the others of the one before.
        fn new(cycle: u32, head: u64) -> Self {
            let block = |index| {
                let mut block = [0x5a; BLOCK];
                let cycle = if index < head { cycle } else { cycle - 1 };
                block[..4].copy_from_slice(&cycle.to_be_bytes());
                block
            };
            Self((0..COUNT).map(block).collect())
        }

        /// Writes a record of one operation that ends at `head`.
        fn record(&mut self, cycle: u32, head: u64, blocks: u64, flags: u8) {
            let start = (head + COUNT - blocks) % COUNT;
            let header = &mut self.0[start as usize];
            for (offset, value) in [
                (0, HEADER_MAGIC),
                (4, cycle),
                (8, 2),
                (12, (blocks as u32 - 1) * 512),
                (40, 1),
                (320, 32 << 10),
            ] {
                header[offset..offset + 4].copy_from_slice(&value.to_be_bytes());
            }
            self.0[((start + 1) % COUNT) as usize][9] = flags;
        }
    }

    #[test]
    fn a_final_unmount_record_is_clean() {
        // A record of 64 blocks is one that is padded to a stripe unit of 32 KiB.
        for (head, blocks) in [(2, 2), (1000, 2), (1000, 64), (COUNT - 1, 2), (64, 64)] {
            let mut log = Log::new(7, head);
            log.record(7, head, blocks, UNMOUNT_FLAG);
            assert_eq!(state(&log).unwrap(), LogState::Clean, "head {head}, {blocks} blocks");
        }
    }

    #[test]
    fn a_record_can_end_the_ring() {
        let mut log = Log::new(7, COUNT);
        log.record(7, 0, 2, UNMOUNT_FLAG);
        assert_eq!(state(&log).unwrap(), LogState::Clean);
    }

    #[test]
    fn another_last_record_needs_recovery() {
        let mut log = Log::new(7, 1000);
        log.record(7, 998, 2, UNMOUNT_FLAG);
        assert_eq!(state(&log).unwrap(), LogState::NeedsRecovery, "the unmount record is not the last one");
        log.record(7, 1000, 2, 0);
        assert_eq!(state(&log).unwrap(), LogState::NeedsRecovery, "the last record does not unmount");
        assert_eq!(state(&Log::new(7, 1000)).unwrap(), LogState::NeedsRecovery, "there is no record");
    }

    #[test]
    fn an_empty_log_is_unknown() {
        assert_eq!(state(&Log(vec![[0; BLOCK]; 64])).unwrap(), LogState::Unknown);
        assert_eq!(state(&Log(Vec::new())).unwrap(), LogState::Unknown);
    }

    proptest! {
        /// The log can contain any words where the search expects records.
        #[test]
        fn any_words_end_the_search(words in proptest::collection::vec(any::<[u32; 3]>(), 0..64), magic in 0usize..64) {
            let block = |(index, words): (usize, &[u32; 3])| {
                let mut block = [0xff; BLOCK];
                let first = if index == magic { HEADER_MAGIC } else { words[0] };
                for (offset, word) in [(0, first), (4, words[1]), (12, words[2])] {
                    block[offset..offset + 4].copy_from_slice(&word.to_be_bytes());
                }
                block
            };
            state(&Log(words.iter().enumerate().map(block).collect())).unwrap();
        }
    }
}

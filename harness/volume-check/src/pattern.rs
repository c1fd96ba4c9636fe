//! The data that is written to volumes and verified later.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::ops::Range;

use crate::volume::{Checked, named};

/// A pattern in which each word depends on its offset and on the volume, so that misplaced blocks and blocks
/// of another volume are detected.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pattern {
    seed: u64,
}

impl Pattern {
    /// The pattern for volumes that are checked on their own.
    pub(crate) const COMMON: Pattern = Pattern { seed: 0x6c6f_6f70_6673_2121 };

    /// Returns the pattern of a name, by the hash FNV-1a.
    pub(crate) fn of(name: &str) -> Pattern {
        let hash = |hash: u64, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        Pattern { seed: name.bytes().fold(0xcbf2_9ce4_8422_2325, hash) }
    }

    /// Returns the bytes of a range that begins and ends at a whole word.
    pub(crate) fn bytes(self, range: Range<u64>) -> Vec<u8> {
        let mut bytes = Vec::new();
        for offset in range.step_by(8) {
            bytes.extend_from_slice(&(offset ^ self.seed).to_le_bytes());
        }
        bytes
    }

    /// Checks that a file has the pattern throughout a range.
    pub(crate) fn check(self, file: &mut File, range: Range<u64>) -> Checked {
        let expected = self.bytes(range.clone());
        let mut found = vec![0; expected.len()];
        file.seek(SeekFrom::Start(range.start))?;
        file.read_exact(&mut found).map_err(|e| named("read the pattern back", e))?;
        if found == expected {
            return Ok(());
        }
        let at = expected.iter().zip(&found).take_while(|(a, b)| a == b).count();
        Err(format!("byte {at} of the pattern is not what was written").into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_differ_by_name_and_offset() {
        let (a, b) = (Pattern::of("a").bytes(0..64), Pattern::of("b").bytes(0..64));
        let words = |bytes: &[u8]| bytes.chunks(8).map(<[u8]>::to_vec).collect::<Vec<_>>();
        let mut all = [words(&a), words(&b)].concat();
        all.sort();
        all.dedup();
        assert_eq!(all.len(), 16);
        assert_eq!(Pattern::of("a").bytes(8..16), a[8..16]);
    }
}

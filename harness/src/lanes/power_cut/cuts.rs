//! The moments at which the power is cut: positions in a write log, chosen by the marks that the test's threads wrote into it.

use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;

use anyhow::{Context, Result};
use testvm::images::write_log::{self, Entry};

/// The prefix of each mark. Marks are writes to the disk, so the log has them in order.
const MARK: &str = "loopfs power cut: ";
/// The operations that are cut, as the marks name them, up to the kind of volume.
const OPERATIONS: [&str; 13] = [
    "create Filesystem",
    "create Block",
    "clone Filesystem",
    "clone Block",
    "snapshot",
    "grow Filesystem",
    "grow Block",
    "write Filesystem",
    "write Block",
    "delete Filesystem",
    "delete Block",
    "release",
    "recover",
];

/// A simulated power cut: its position in the write log, and which writes survive.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Cut {
    /// The name of the test case.
    pub(super) name: String,
    /// The index of the first write after the power cut.
    pub(super) at: usize,
    /// The thread and operation in progress or completed last, as in the mark.
    pub(super) mark: String,
    pub(super) surviving: SurvivingWrites,
}

/// The writes that survive a power cut.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum SurvivingWrites {
    /// The writes before the last flush.
    Flushed,
    /// The flushed writes, and a random subset of the others with this seed.
    RandomSubset(u64),
    /// The first so many writes: a disk that reports a flush that it did not do.
    LostFlush(usize),
}

impl Cut {
    /// Returns `true` if the disk loses writes that it reported as durable.
    pub(super) fn forgets_a_flush(&self) -> bool {
        matches!(self.surviving, SurvivingWrites::LostFlush(_))
    }
}

/// Returns the text of a mark, or `None` if the entry is no mark.
fn mark(entry: &Entry) -> Option<&str> {
    let Entry::Write { data, .. } = entry else { return None };
    let text = data.strip_prefix(MARK.as_bytes())?;
    std::str::from_utf8(text.split(|byte| *byte == b'\n').next()?).ok()
}

/// The writes between the mark of an operation's start and the mark of its end.
#[derive(Clone, Debug, Eq, PartialEq)]
struct Span {
    /// `THREAD OPERATION`.
    what: String,
    writes: Range<usize>,
}

impl Span {
    fn is_a(&self, operation: &str) -> bool {
        let rest = self.what.split_once(' ').and_then(|(_, what)| what.strip_prefix(operation));
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(' '))
    }
}

fn spans(entries: &[Entry]) -> Vec<Span> {
    let mut intended: HashMap<String, usize> = HashMap::new();
    let mut spans = Vec::new();
    for (index, mark) in entries.iter().enumerate().filter_map(|(index, entry)| Some((index, mark(entry)?))) {
        if let Some((thread, what)) = mark.split_once(" intent ") {
            intended.insert(format!("{thread} {what}"), index);
        } else if let Some((thread, what)) = mark.split_once(" done ") {
            let what = format!("{thread} {what}");
            if let Some(start) = intended.remove(&what) {
                spans.push(Span { what, writes: start + 1..index });
            }
        }
    }
    spans
}

/// Returns for each operation a cut in its middle and one just after it, and one cut of a disk that loses a flush.
///
/// # Errors
/// The log does not have every operation.
pub(super) fn cuts(entries: &[Entry], seed: u64) -> Result<Vec<Cut>> {
    let spans = spans(entries);
    let mut random = Rng(seed);
    let mut cuts = Vec::new();
    for operation in OPERATIONS {
        let of_it: Vec<&Span> = spans.iter().filter(|span| span.is_a(operation)).collect();
        let with_flush = |span: &&&Span| entries[span.writes.clone()].contains(&Entry::Flush);
        let long: Vec<&Span> = of_it.iter().filter(|span| span.writes.len() > 1).copied().collect();
        let (in_it, after) = (random.choose(&long), random.choose(&of_it));
        let (Some(in_it), Some(after)) = (in_it, after) else {
            anyhow::bail!("of {} operations none was a {operation}", spans.len());
        };
        cuts.push(Cut {
            name: format!("in the middle of {operation}"),
            at: in_it.writes.start + 1 + random.below(in_it.writes.len() - 1),
            mark: in_it.what.clone(),
            surviving: SurvivingWrites::RandomSubset(random.next()),
        });
        cuts.push(Cut {
            name: format!("after {operation}"),
            at: after.writes.end + 1,
            mark: after.what.clone(),
            surviving: SurvivingWrites::Flushed,
        });
        if operation == "create Filesystem" {
            let span = of_it.iter().find(with_flush).context("no creation of a volume flushed the disk")?;
            let cut = Cut {
                name: "a disk that forgets a flush is noticed".to_owned(),
                at: span.writes.end + 1,
                mark: span.what.clone(),
                surviving: SurvivingWrites::LostFlush(write_log::flushed(entries, span.writes.start)),
            };
            cuts.push(cut);
        }
    }
    Ok(cuts)
}

/// Writes the surviving writes of a cut to an image.
pub(super) fn replay(image: &Path, entries: &[Entry], cut: &Cut) -> Result<()> {
    let flushed = write_log::flushed(entries, cut.at);
    let mut random = Rng(if let SurvivingWrites::RandomSubset(seed) = cut.surviving { seed } else { 0 });
    write_log::replay(image, &entries[..cut.at], |index| match cut.surviving {
        // Marks survive: the test's threads printed them before the cut.
        _ if mark(&entries[index]).is_some() => true,
        SurvivingWrites::Flushed => index < flushed,
        SurvivingWrites::RandomSubset(_) => index < flushed || random.below(2) == 0,
        SurvivingWrites::LostFlush(surviving) => index < surviving,
    })
}

/// A random number generator (SplitMix64). Equal seeds make equal choices.
struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit as u64) as usize
    }

    fn choose<'a>(&mut self, from: &[&'a Span]) -> Option<&'a Span> {
        if from.is_empty() { None } else { Some(from[self.below(from.len())]) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn marked(text: &str) -> Entry {
        let mut data = format!("{MARK}{text}\n").into_bytes();
        data.resize(4096, 0);
        Entry::Write { offset: 0, data }
    }

    fn written(byte: u8) -> Entry {
        Entry::Write { offset: 1 << 20, data: vec![byte; 512] }
    }

    /// Returns a log of each operation once, with a write, a flush and a write inside.
    fn log() -> Vec<Entry> {
        let mut entries = vec![written(0), Entry::Flush];
        for operation in OPERATIONS {
            let rest = if ["release", "recover"].contains(&operation) { "" } else { " t0-1" };
            entries.push(marked(&format!("0 intent {operation}{rest}")));
            entries.extend([written(1), Entry::Flush, written(2)]);
            entries.push(marked(&format!("0 done {operation}{rest}")));
        }
        entries.push(marked("1 intent grow Block t1-1 8192"));
        entries
    }

    #[test]
    fn operation_spans_from_intent_to_done() {
        let spans = spans(&log());
        assert_eq!(spans.len(), OPERATIONS.len(), "the last was not done");
        assert_eq!(spans[0], Span { what: "0 create Filesystem t0-1".to_owned(), writes: 3..6 });
        let count = |operation: &str| spans.iter().filter(|span| span.is_a(operation)).count();
        assert_eq!((count("release"), count("create Filesystem"), count("create")), (1, 1, 2));
    }

    /// Equal seeds give equal cuts.
    #[test]
    fn operations_are_cut_midway_and_after() {
        let log = log();
        let all = cuts(&log, 7).unwrap();
        assert_eq!(all, cuts(&log, 7).unwrap());
        assert_eq!(all.len(), 2 * OPERATIONS.len() + 1);
        for span in spans(&log) {
            let at = |what: &str| all.iter().find(|cut| cut.mark == span.what && cut.name.starts_with(what));
            let middle = at("in the middle").unwrap().at;
            assert!(span.writes.start < middle && middle <= span.writes.end, "{middle} {span:?}");
            assert_eq!(at("after").unwrap().at, span.writes.end + 1);
        }
        assert!(cuts(&log[..20], 7).is_err(), "an operation is missing");
    }

    /// The marks in the log survive.
    #[test]
    fn only_unflushed_writes_are_lost() {
        let log = log();
        let cuts = cuts(&log, 7).unwrap();
        let read = |name: &str| {
            let disk = tempfile::NamedTempFile::new().unwrap();
            replay(disk.path(), &log, cuts.iter().find(|cut| cut.name.contains(name)).unwrap()).unwrap();
            std::fs::read(disk.path()).unwrap()
        };
        let after = read("after create Filesystem");
        assert_eq!(after[1 << 20], 1, "the second write was not flushed");
        assert!(after.starts_with(b"loopfs power cut: 0 done create Filesystem t0-1"));
        let lost_flush = read("forgets");
        assert_eq!(lost_flush[1 << 20], 0);
        assert!(lost_flush.starts_with(b"loopfs power cut: 0 done create Filesystem t0-1"));
    }
}

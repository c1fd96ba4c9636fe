//! The lines of one component: a ring buffer that is bounded in bytes and lines.
//!
//! Readers have a position in the buffer and no queue of their own. A reader that is too slow therefore never delays the
//! component: the lines that it has not read are dropped like all others, and it learns how many.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};

use jiff::Timestamp;
use tokio::sync::watch;

use super::level;
use super::line::{Line, RawLine};
use crate::proto::Level;

/// The most bytes that the allocator adds to the text of a line: its header, and the rounding to its smallest size.
const ALLOCATION_BYTES: usize = 32;

/// The bytes that an entry counts in addition to its text. The buffer has at most twice the capacity that it needs (see
/// [`RingEntries::shrink`]). A component that writes only newlines is therefore bounded as well.
const OVERHEAD_BYTES: usize = 2 * size_of::<Line>() + ALLOCATION_BYTES;

/// The most lines that a ring keeps.
pub(crate) const MAX_LINES: usize = 100_000;

/// The position of a line in everything that the component has written.
pub(crate) type Position = u64;

/// The buffer of one component.
#[derive(Debug)]
pub(crate) struct Ring {
    max_bytes: usize,
    entries: Mutex<RingEntries>,
    /// The position after the newest line.
    end: watch::Sender<Position>,
}

#[derive(Debug)]
struct RingEntries {
    lines: VecDeque<Line>,
    /// The position of the oldest line.
    start: Position,
    bytes: usize,
    /// The level of the newest line, which lines without a level continue.
    level: Level,
}

/// What a reader gets at once.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Batch {
    /// Lines that were dropped before the reader could read them.
    pub(crate) dropped: u64,
    pub(crate) lines: Vec<Line>,
    /// The position to continue at.
    pub(crate) next: Position,
}

/// The fill level of a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RingCounts {
    pub(crate) lines: u64,
    pub(crate) bytes: u64,
    pub(crate) dropped: u64,
}

/// The lines that a reader wants.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Selection {
    pub(crate) since: Option<Timestamp>,
    pub(crate) minimum_level: Option<Level>,
}

impl Selection {
    fn includes(&self, line: &Line) -> bool {
        self.since.is_none_or(|since| line.time >= since)
            && (line.lost_lines > 0 || self.minimum_level.is_none_or(|minimum| line.level >= minimum))
    }
}

impl Ring {
    pub(crate) fn new(max_bytes: usize) -> Self {
        let entries = RingEntries { lines: VecDeque::new(), start: 0, bytes: 0, level: Level::Info };
        Self { max_bytes, entries: Mutex::new(entries), end: watch::Sender::new(0) }
    }

    pub(crate) fn max_bytes(&self) -> usize {
        self.max_bytes
    }

    /// Appends a line that arrived at `arrival`. A line that names a time keeps it, unless that is in the future.
    ///
    /// A line without a level, such as one of a stack trace, has the level of the line before.
    pub(crate) fn push(&self, line: RawLine, arrival: Timestamp) {
        let time = level::time_of(&line.text).filter(|time| *time <= arrival).unwrap_or(arrival);
        let level = level::level_of(&line.text);
        self.push_classified(line, time, level);
    }

    /// Appends a line whose time and level the source knows.
    pub(crate) fn push_classified(&self, line: RawLine, time: Timestamp, level: Option<Level>) {
        let RawLine { text, cut_bytes } = line;
        let level = {
            let newest = &mut self.lock().level;
            *newest = level.unwrap_or(*newest);
            *newest
        };
        self.append(Line { time, level, text, cut_bytes, lost_lines: 0 });
    }

    /// Records that the source lost lines before they arrived here.
    pub(crate) fn push_lost(&self, lost_lines: u64, arrival: Timestamp) {
        self.append(Line { time: arrival, level: Level::Warn, text: Vec::new(), cut_bytes: 0, lost_lines });
    }

    fn append(&self, mut line: Line) {
        line.text.shrink_to_fit();
        let cost_of_line = cost(&line.text);
        let mut entries = self.lock();
        // The oldest lines are dropped first, because otherwise a full buffer would double its capacity for the new line.
        while entries.bytes + cost_of_line > self.max_bytes || entries.lines.len() >= MAX_LINES {
            let Some(oldest) = entries.lines.pop_front() else { break };
            entries.bytes -= cost(&oldest.text);
            entries.start += 1;
        }
        if cost_of_line <= self.max_bytes {
            entries.bytes += cost_of_line;
            entries.lines.push_back(line);
        } else {
            // The line alone exceeds the buffer, which is empty now.
            entries.start += 1;
        }
        entries.shrink();
        // Under the lock, so that the position never goes back if two streams write concurrently.
        self.end.send_replace(entries.end());
    }

    pub(crate) fn counts(&self) -> RingCounts {
        let entries = self.lock();
        RingCounts { lines: entries.lines.len() as u64, bytes: entries.bytes as u64, dropped: entries.start }
    }

    /// Returns the position of the first of the newest `lines` lines of the selection, or of the oldest line, and the
    /// position after the newest line.
    pub(crate) fn tail(&self, lines: Option<u64>, selection: Selection) -> (Position, Position) {
        let entries = self.lock();
        (entries.tail(lines, selection), entries.end())
    }

    /// Returns the lines of the selection from `position` on, up to about `max_bytes` and before `end`.
    pub(crate) fn read(
        &self,
        position: Position,
        end: Position,
        selection: Selection,
        max_bytes: usize,
    ) -> Batch {
        let entries = self.lock();
        let start = position.max(entries.start);
        let mut batch = Batch { dropped: start - position, lines: Vec::new(), next: start };
        let skip = usize::try_from(start - entries.start).unwrap_or(usize::MAX);
        let mut bytes = 0;
        for line in entries.lines.iter().skip(skip) {
            if batch.next >= end || bytes >= max_bytes {
                break;
            }
            batch.next += 1;
            if selection.includes(line) {
                bytes += cost(&line.text);
                batch.lines.push(line.clone());
            }
        }
        batch
    }

    /// Returns the position after the newest line, and notifies of its changes.
    pub(crate) fn subscribe(&self) -> watch::Receiver<Position> {
        self.end.subscribe()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, RingEntries> {
        // No operation panics while it holds the lock with the entries inconsistent.
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl RingEntries {
    fn tail(&self, lines: Option<u64>, selection: Selection) -> Position {
        let Some(lines) = lines else { return self.start };
        let mut matching = self.lines.iter().enumerate().rev().filter(|(_, line)| selection.includes(line));
        match lines.checked_sub(1) {
            None => self.end(),
            Some(before) => {
                let before = usize::try_from(before).unwrap_or(usize::MAX);
                matching.nth(before).map_or(self.start, |(index, _)| self.start + index as u64)
            }
        }
    }

    fn end(&self) -> Position {
        self.start + self.lines.len() as u64
    }

    /// Releases capacity that is more than twice what is used. It keeps some for further lines, so that it does not copy the
    /// lines at each call.
    fn shrink(&mut self) {
        let used = self.lines.len();
        if self.lines.capacity() > 2 * used {
            self.lines.shrink_to(used + used / 2);
        }
    }

    /// Returns the bytes of memory that the lines take, at most.
    #[cfg(test)]
    fn memory(&self) -> usize {
        let allocated = |line: &Line| match line.text.capacity() {
            0 => 0,
            capacity => capacity + ALLOCATION_BYTES,
        };
        self.lines.capacity() * size_of::<Line>() + self.lines.iter().map(allocated).sum::<usize>()
    }
}

fn cost(text: &[u8]) -> usize {
    text.len() + OVERHEAD_BYTES
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const ALL: Position = Position::MAX;

    fn push(ring: &Ring, text: &str) {
        let line = RawLine { text: text.as_bytes().to_vec(), cut_bytes: 0 };
        ring.push(line, "2026-01-02T03:04:05Z".parse().unwrap());
    }

    fn texts(batch: &Batch) -> Vec<String> {
        batch.lines.iter().map(|line| String::from_utf8_lossy(&line.text).into_owned()).collect()
    }

    fn selection(minimum_level: Level) -> Selection {
        Selection { since: None, minimum_level: Some(minimum_level) }
    }

    #[test]
    fn oldest_lines_are_dropped_and_counted() {
        let ring = Ring::new(3 * (1 + OVERHEAD_BYTES));
        for text in ["a", "b", "c", "d", "e"] {
            push(&ring, text);
        }
        let batch = ring.read(0, ALL, Selection::default(), usize::MAX);
        assert_eq!(
            (batch.dropped, texts(&batch), batch.next),
            (2, vec!["c".into(), "d".into(), "e".into()], 5)
        );
        assert_eq!(
            ring.counts(),
            RingCounts { lines: 3, bytes: 3 * (1 + OVERHEAD_BYTES as u64), dropped: 2 }
        );
    }

    #[test]
    fn short_lines_stay_within_memory_limit() {
        const MAX_BYTES: usize = 64 << 10;
        for size in [0, 1, 8, 9, 24, 25, 40] {
            let ring = Ring::new(MAX_BYTES);
            for _ in 0..800 {
                push(&ring, &"x".repeat(size));
                let memory = ring.lock().memory();
                assert!(memory <= MAX_BYTES, "lines of {size} bytes take {memory} bytes");
            }
            // It uses what it has.
            assert!(ring.counts().bytes > MAX_BYTES as u64 - 1000);
        }
    }

    #[test]
    fn later_long_lines_stay_within_limit() {
        const MAX_BYTES: usize = 64 << 10;
        let ring = Ring::new(MAX_BYTES);
        for size in [0, 4000] {
            for _ in 0..1000 {
                push(&ring, &"x".repeat(size));
                let memory = ring.lock().memory();
                assert!(memory <= MAX_BYTES, "lines of {size} bytes take {memory} bytes");
            }
        }
    }

    #[test]
    fn full_ring_does_not_reallocate() {
        // A power of two, at which a buffer that holds one more line has twice the capacity.
        const LINES: usize = 64;
        let ring = Ring::new(LINES * (1 + OVERHEAD_BYTES));
        for _ in 0..LINES {
            push(&ring, "x");
        }
        let full = ring.lock().lines.capacity();
        for _ in 0..2 * LINES {
            push(&ring, "x");
            assert_eq!((ring.counts().lines, ring.lock().lines.capacity()), (LINES as u64, full));
        }
    }

    #[test]
    fn empty_lines_count_against_line_limit() {
        let ring = Ring::new(usize::MAX);
        for _ in 0..MAX_LINES + 5 {
            push(&ring, "");
        }
        assert_eq!((ring.counts().lines, ring.counts().dropped), (MAX_LINES as u64, 5));
    }

    #[test]
    fn reader_continues_at_its_position() {
        let ring = Ring::new(usize::MAX);
        ["a", "b", "c"].into_iter().for_each(|text| push(&ring, text));
        let first = ring.read(0, ALL, Selection::default(), 1);
        assert_eq!((texts(&first), first.next), (vec!["a".to_owned()], 1));
        let rest = ring.read(first.next, ALL, Selection::default(), usize::MAX);
        assert_eq!((texts(&rest), rest.dropped), (vec!["b".to_owned(), "c".to_owned()], 0));
        assert!(ring.read(rest.next, ALL, Selection::default(), usize::MAX).lines.is_empty());
    }

    #[test]
    fn tail_counts_only_selected_lines() {
        let ring = Ring::new(usize::MAX);
        ["WARN 1", "INFO 2", "WARN 3", "INFO 4", "WARN 5"].into_iter().for_each(|text| push(&ring, text));
        let (position, _) = ring.tail(Some(2), selection(Level::Warn));
        assert_eq!(
            texts(&ring.read(position, ALL, selection(Level::Warn), usize::MAX)),
            ["WARN 3", "WARN 5"]
        );
        assert_eq!(ring.tail(Some(0), Selection::default()), (5, 5));
        assert_eq!(ring.tail(Some(99), Selection::default()), (0, 5));
        assert_eq!(ring.tail(None, Selection::default()), (0, 5));
    }

    #[test]
    fn line_without_level_continues_previous_one() {
        let ring = Ring::new(usize::MAX);
        ["before", "ERROR x", "  at main", "INFO y", "  of it"]
            .into_iter()
            .for_each(|text| push(&ring, text));
        let batch = ring.read(0, ALL, selection(Level::Error), usize::MAX);
        assert_eq!(texts(&batch), ["ERROR x", "  at main"]);
        assert_eq!(ring.read(0, ALL, Selection::default(), usize::MAX).lines[0].level, Level::Info);
    }

    #[test]
    fn future_time_is_replaced_by_arrival() {
        let ring = Ring::new(usize::MAX);
        ["2999-01-01T00:00:00Z x", "2020-01-01T00:00:00Z y"].into_iter().for_each(|text| push(&ring, text));
        let lines = ring.read(0, ALL, Selection::default(), usize::MAX).lines;
        assert_eq!(lines[0].time, "2026-01-02T03:04:05Z".parse().unwrap());
        assert_eq!(lines[1].time, "2020-01-01T00:00:00Z".parse().unwrap());
        let since = Selection { since: Some("2025-01-01T00:00:00Z".parse().unwrap()), minimum_level: None };
        assert_eq!(ring.read(0, ALL, since, usize::MAX).lines.len(), 1);
    }

    /// The minimum level of the reader does not hide them.
    #[test]
    fn lost_lines_are_always_reported() {
        let ring = Ring::new(usize::MAX);
        push(&ring, "a");
        let first = ring.read(0, ALL, Selection::default(), usize::MAX);
        ring.push_lost(7, Timestamp::UNIX_EPOCH);
        push(&ring, "ERROR b");
        let batch = ring.read(first.next, ALL, selection(Level::Error), usize::MAX);
        assert_eq!(batch.lines.iter().map(|line| line.lost_lines).collect::<Vec<_>>(), [7, 0]);
    }

    proptest! {
        #[test]
        fn ring_keeps_limit_and_counts_drops(
            sizes in proptest::collection::vec(0..200usize, 0..100),
            max_bytes in 0..2000usize,
        ) {
            let ring = Ring::new(max_bytes);
            for size in &sizes {
                push(&ring, &"x".repeat(*size));
                prop_assert!(ring.counts().bytes <= max_bytes as u64);
            }
            let batch = ring.read(0, ALL, Selection::default(), usize::MAX);
            prop_assert_eq!(batch.dropped + batch.lines.len() as u64, sizes.len() as u64);
        }
    }
}

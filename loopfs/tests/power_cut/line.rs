//! The lines that the working threads write: one before each operation and one after its completion.
//!
//! A line has the form `THREAD intent|done OPERATION`, for example `2 intent grow Block t2-7 8388608`. The
//! harness parses the operation's name, up to the kind of volume, to choose where to cut.

use std::fmt;

use loopfs::volume_store::VolumeKind;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Line {
    pub(crate) thread: usize,
    pub(crate) phase: Phase,
    pub(crate) operation: Operation,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    Intent,
    Done,
}

/// One operation of the store. Capacities are in bytes. A written block has a number, which determines its
/// content.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Operation {
    Create {
        kind: VolumeKind,
        volume: String,
        capacity: u64,
    },
    Grow {
        kind: VolumeKind,
        volume: String,
        capacity: u64,
    },
    /// Creates a volume from a volume or a snapshot.
    Clone {
        kind: VolumeKind,
        volume: String,
        capacity: u64,
        source: String,
    },
    /// Writes a block and fsyncs it.
    Write {
        kind: VolumeKind,
        volume: String,
        block: u64,
    },
    Snapshot {
        kind: VolumeKind,
        snapshot: String,
        source: String,
    },
    /// Deletes a volume or a snapshot.
    Delete {
        kind: VolumeKind,
        volume: String,
    },
    /// Empties the trash, which also releases project ids.
    Release,
    /// Recovers the store, which removes what dead processes left incomplete.
    Recover,
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let phase = match self.phase {
            Phase::Intent => "intent",
            Phase::Done => "done",
        };
        write!(f, "{} {phase} ", self.thread)?;
        match &self.operation {
            Operation::Create { kind, volume, capacity } => write!(f, "create {kind} {volume} {capacity}"),
            Operation::Grow { kind, volume, capacity } => write!(f, "grow {kind} {volume} {capacity}"),
            Operation::Clone { kind, volume, capacity, source } => {
                write!(f, "clone {kind} {volume} {capacity} {source}")
            }
            Operation::Snapshot { kind, snapshot, source } => {
                write!(f, "snapshot {kind} {snapshot} {source}")
            }
            Operation::Write { kind, volume, block } => write!(f, "write {kind} {volume} {block}"),
            Operation::Delete { kind, volume } => write!(f, "delete {kind} {volume}"),
            Operation::Release => f.write_str("release"),
            Operation::Recover => f.write_str("recover"),
        }
    }
}

impl Line {
    /// Returns `None` if the text is not a complete line.
    pub(crate) fn parse(text: &str) -> Option<Line> {
        let words: Vec<&str> = text.split(' ').collect();
        let (thread, phase, operation) = match words.as_slice() {
            [thread, "intent", operation @ ..] => (thread, Phase::Intent, operation),
            [thread, "done", operation @ ..] => (thread, Phase::Done, operation),
            _ => return None,
        };
        Some(Line { thread: thread.parse().ok()?, phase, operation: Operation::parse(operation)? })
    }
}

impl Operation {
    fn parse(words: &[&str]) -> Option<Operation> {
        match words {
            ["release"] => return Some(Operation::Release),
            ["recover"] => return Some(Operation::Recover),
            _ => {}
        }
        let [name, kind, volume, rest @ ..] = words else { return None };
        let kind = match *kind {
            "Filesystem" => VolumeKind::Filesystem,
            "Block" => VolumeKind::Block,
            _ => return None,
        };
        let volume = (*volume).to_owned();
        match (*name, rest) {
            ("create", [bytes]) => Some(Operation::Create { kind, volume, capacity: bytes.parse().ok()? }),
            ("grow", [bytes]) => Some(Operation::Grow { kind, volume, capacity: bytes.parse().ok()? }),
            ("clone", [bytes, source]) => {
                let source = (*source).to_owned();
                Some(Operation::Clone { kind, volume, capacity: bytes.parse().ok()?, source })
            }
            ("snapshot", [source]) => {
                Some(Operation::Snapshot { kind, snapshot: volume, source: (*source).to_owned() })
            }
            ("write", [block]) => Some(Operation::Write { kind, volume, block: block.parse().ok()? }),
            ("delete", []) => Some(Operation::Delete { kind, volume }),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::Line;

    #[rstest]
    #[case("0 intent create Filesystem t0-1 1048576")]
    #[case("3 done grow Block t3-2 8388608")]
    #[case("1 intent write Block t1-1 7")]
    #[case("1 intent clone Block t1-2 2097152 t1-1")]
    #[case("1 done clone Filesystem t1-2 2097152 s1-1")]
    #[case("1 intent snapshot Filesystem s1-2 t1-1")]
    #[case("1 done delete Filesystem t1-1")]
    #[case("0 done release")]
    #[case("0 intent recover")]
    fn a_printed_line_parses_back(#[case] text: &str) {
        assert_eq!(Line::parse(text).expect(text).to_string(), text);
    }

    #[rstest]
    #[case("")]
    #[case("0 intent create Filesystem t0-1")]
    #[case("0 perhaps release")]
    #[case("0 done release of what")]
    #[case("0 done snapshot Filesystem s0-2")]
    #[case("0 done grow Tape t0-1 1048576")]
    fn parsing_anything_else_returns_none(#[case] text: &str) {
        assert_eq!(Line::parse(text), None);
    }
}

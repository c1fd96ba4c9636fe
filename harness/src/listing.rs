//! The lines of `cargo harness list`: what can be run, what it needs, and how long it last took here.

use std::fmt::Write as _;
use std::time::Duration;

use testvm::progress::seconds;
use testvm::session::Session;

/// A lane, a part of one, a story or a benchmark.
#[derive(Debug)]
pub(crate) struct Line {
    /// The word for such things. The time of a run is recorded by it and the name.
    pub(crate) kind: &'static str,
    pub(crate) name: String,
    /// What it is, without a full stop.
    pub(crate) about: String,
    /// What it needs, or an empty text.
    pub(crate) needs: &'static str,
    /// The time that it takes on a machine without hardware virtualisation, or an empty text.
    pub(crate) estimate: &'static str,
}

/// The kind of a lane that runs while others do, which takes longer than alone.
pub(crate) const BESIDE_OTHERS: &str = "lane beside others";

/// Records how long a successful run of this took, for later lists.
pub(crate) fn record_time(session: &Session, kind: &str, name: &str, time: Duration) {
    session.progress.record_time(&title(kind, name), time);
}

/// Returns a title, and the lines below it with the times of the last runs on this machine.
pub(crate) fn section(session: &Session, heading: &str, lines: impl IntoIterator<Item = Line>) -> String {
    let mut text = format!("{heading}\n");
    for line in lines {
        _ = write!(text, "  {:<23} {}", line.name, line.about);
        if !line.needs.is_empty() {
            _ = write!(text, "; needs {}", line.needs);
        }
        match session.progress.last_time(&title(line.kind, &line.name)) {
            Some(time) => _ = write!(text, "; took {}", seconds(time)),
            None if line.estimate.is_empty() => {}
            None => _ = write!(text, "; takes {}", line.estimate),
        }
        if line.kind == "lane"
            && let Some(time) = session.progress.last_time(&title(BESIDE_OTHERS, &line.name))
        {
            _ = write!(text, "; took {} beside the other lanes", seconds(time));
        }
        text.push('\n');
    }
    text
}

fn title(kind: &str, name: &str) -> String {
    format!("{kind} {name}")
}

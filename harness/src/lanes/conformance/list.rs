//! The committed list of specs: those that do not run, with the reason, and those of a quick run.

use std::path::Path;

use anyhow::{Context, Result};
use serde::Deserialize;

use crate::lanes::ginkgo::ExpectedSkip;

/// The list of specs.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub(super) struct SpecList {
    /// The specs that skip themselves.
    skipped: Vec<Skipped>,
    /// The specs that the lane does not start.
    pub(super) not_started: Vec<NotStarted>,
    /// The ends of the texts of the specs of a quick run.
    pub(super) quick: Vec<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Skipped {
    /// The whole message of the suite.
    message: String,
    reason: String,
}

/// Specs that the lane does not start.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct NotStarted {
    /// A part of their texts.
    pub(super) text: String,
    pub(super) reason: String,
}

impl SpecList {
    /// Reads the list.
    ///
    /// # Errors
    /// The file cannot be read or parsed, or a reason is empty.
    pub(super) fn read(path: &Path) -> Result<SpecList> {
        let text = std::fs::read_to_string(path).with_context(|| format!("read {}", path.display()))?;
        SpecList::parse(&text).with_context(|| format!("parse {}", path.display()))
    }

    fn parse(text: &str) -> Result<SpecList> {
        let list: SpecList = serde_norway::from_str(text)?;
        let skipped = list.skipped.iter().map(|skip| (&skip.message, &skip.reason));
        let not_started = list.not_started.iter().map(|specs| (&specs.text, &specs.reason));
        for (what, reason) in skipped.chain(not_started) {
            anyhow::ensure!(!what.trim().is_empty(), "an entry has an empty message or text");
            anyhow::ensure!(!reason.trim().is_empty(), "{what:?} has no reason");
        }
        Ok(list)
    }

    /// Returns the skips that the suite may report.
    pub(super) fn expected_skips(&self) -> Vec<ExpectedSkip<'_>> {
        let skips = self.skipped.iter().map(|skip| ExpectedSkip {
            message: &skip.message,
            reason: skip.reason.trim(),
            clean_up_panics: false,
        });
        skips.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_without_a_reason_is_refused() {
        let text = "skipped: [{message: no snapshots, reason: ' '}]\nnotStarted: []\nquick: []\n";
        let error = SpecList::parse(text).unwrap_err().to_string();
        assert!(error.contains("\"no snapshots\" has no reason"), "{error}");
    }

    #[test]
    fn the_committed_list_can_be_read_and_names_each_skip_once() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let list = SpecList::read(&root.join(super::super::DIRECTORY).join(super::super::LIST)).unwrap();
        let mut messages: Vec<&str> = list.expected_skips().iter().map(|skip| skip.message).collect();
        messages.sort_unstable();
        let all = messages.len();
        messages.dedup();
        assert_eq!(messages.len(), all);
        assert!(!list.quick.is_empty());
    }
}

//! The committed list of specs: those that do not run, with the reason, and those of a quick run.

use std::path::Path;

use anyhow::{Context, Result};
use serde::Deserialize;
use testvm_cluster::KubernetesMinor;

use crate::lanes::ginkgo::ExpectedSkip;

/// The list of specs for one release of Kubernetes.
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
    #[serde(default)]
    releases: Releases,
}

/// Specs that the lane does not start.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct NotStarted {
    /// A part of their texts.
    pub(super) text: String,
    pub(super) reason: String,
    #[serde(default)]
    releases: Releases,
}

/// The minor releases in which an entry applies, such as `1.36`. Without any, it applies in all.
#[derive(Debug, Default, Deserialize)]
#[serde(transparent)]
struct Releases(Vec<String>);

impl Releases {
    fn contain(&self, minor: KubernetesMinor) -> bool {
        self.0.is_empty() || self.0.iter().any(|name| name == minor.name())
    }

    /// Checks that each name is that of a release, because an entry with a misspelt one would apply nowhere.
    fn check(&self) -> Result<()> {
        for name in &self.0 {
            anyhow::ensure!(
                KubernetesMinor::named(name).is_some(),
                "\"{name}\" is no minor release of vm-images/kubernetes"
            );
        }
        Ok(())
    }
}

impl SpecList {
    /// Reads the entries for a release.
    ///
    /// # Errors
    /// The file cannot be read or parsed, a reason is empty, or an entry names an unknown release.
    pub(super) fn read(path: &Path, minor: KubernetesMinor) -> Result<SpecList> {
        let text = std::fs::read_to_string(path).with_context(|| format!("read {}", path.display()))?;
        SpecList::parse(&text, minor).with_context(|| format!("parse {}", path.display()))
    }

    pub(super) fn parse(text: &str, minor: KubernetesMinor) -> Result<SpecList> {
        let mut list: SpecList = serde_norway::from_str(text)?;
        let skipped = list.skipped.iter().map(|skip| (&skip.message, &skip.reason));
        let not_started = list.not_started.iter().map(|specs| (&specs.text, &specs.reason));
        for (what, reason) in skipped.chain(not_started) {
            anyhow::ensure!(!what.trim().is_empty(), "an entry has an empty message or text");
            anyhow::ensure!(!reason.trim().is_empty(), "{what:?} has no reason");
        }
        let skipped = list.skipped.iter().map(|skip| &skip.releases);
        let not_started = list.not_started.iter().map(|specs| &specs.releases);
        skipped.chain(not_started).try_for_each(Releases::check)?;
        list.skipped.retain(|skip| skip.releases.contain(minor));
        list.not_started.retain(|specs| specs.releases.contain(minor));
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

    const NEWEST: KubernetesMinor = KubernetesMinor::V1_37;

    #[test]
    fn entry_without_reason_is_refused() {
        let text = "skipped: [{message: no snapshots, reason: ' '}]\nnotStarted: []\nquick: []\n";
        let error = SpecList::parse(text, NEWEST).unwrap_err().to_string();
        assert!(error.contains("\"no snapshots\" has no reason"), "{error}");
    }

    #[test]
    fn entry_applies_in_its_releases_only() {
        let text = "skipped: []\nnotStarted: [{text: a, reason: r}, {text: b, reason: r, releases: ['1.36']}]\nquick: []\n";
        for (minor, expected) in [(KubernetesMinor::V1_36, &["a", "b"][..]), (NEWEST, &["a"])] {
            let list = SpecList::parse(text, minor).unwrap();
            let texts: Vec<&str> = list.not_started.iter().map(|specs| specs.text.as_str()).collect();
            assert_eq!(texts, expected);
        }
    }

    #[test]
    fn an_unknown_release_is_refused() {
        let text = "skipped: [{message: a, reason: r, releases: ['1.3']}]\nnotStarted: []\nquick: []\n";
        let error = SpecList::parse(text, NEWEST).unwrap_err().to_string();
        assert!(error.contains("\"1.3\" is no minor release"), "{error}");
    }

    #[test]
    fn committed_list_has_no_duplicates() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let path = root.join(super::super::DIRECTORY).join(super::super::LIST);
        for minor in KubernetesMinor::ALL {
            let list = SpecList::read(&path, minor).unwrap();
            let mut messages: Vec<&str> = list.expected_skips().iter().map(|skip| skip.message).collect();
            messages.sort_unstable();
            let all = messages.len();
            messages.dedup();
            assert_eq!(messages.len(), all);
            assert!(!list.quick.is_empty());
        }
    }
}

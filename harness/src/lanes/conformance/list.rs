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
    /// The specs that skip themselves, by the whole message of the suite.
    skipped: Vec<Entry>,
    /// The specs that the lane does not start, by a part of their texts.
    pub(super) not_started: Vec<Entry>,
    /// The ends of the texts of the specs of a quick run.
    pub(super) quick: Vec<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Entry {
    #[serde(alias = "message")]
    pub(super) text: String,
    pub(super) reason: String,
    /// The minor releases in which the entry applies, such as `1.36`. Without any, it applies in all.
    #[serde(default)]
    releases: Vec<String>,
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
        for Entry { text, reason, releases } in list.skipped.iter().chain(&list.not_started) {
            anyhow::ensure!(!text.trim().is_empty(), "an entry has an empty message or text");
            anyhow::ensure!(!reason.trim().is_empty(), "{text:?} has no reason");
            // An entry with a misspelt release would apply nowhere.
            let unknown = releases.iter().find(|name| KubernetesMinor::named(name).is_none());
            if let Some(name) = unknown {
                anyhow::bail!("\"{name}\" is no minor release of vm-images/kubernetes");
            }
        }
        let applies = |entry: &Entry| {
            entry.releases.is_empty() || entry.releases.iter().any(|name| name == minor.name())
        };
        list.skipped.retain(applies);
        list.not_started.retain(applies);
        Ok(list)
    }

    /// Returns the skips that the suite may report.
    pub(super) fn expected_skips(&self) -> Vec<ExpectedSkip<'_>> {
        let skips = self.skipped.iter().map(|skip| ExpectedSkip {
            message: &skip.text,
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
    fn entry_without_reason_or_with_unknown_release_is_refused() {
        for (entry, expected) in [
            ("{message: no snapshots, reason: ' '}", "\"no snapshots\" has no reason"),
            (
                "{message: a, reason: r, releases: ['1.3']}",
                "\"1.3\" is no minor release of vm-images/kubernetes",
            ),
        ] {
            let text = format!("skipped: [{entry}]\nnotStarted: []\nquick: []\n");
            assert_eq!(SpecList::parse(&text, NEWEST).unwrap_err().to_string(), expected);
        }
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
    fn committed_list_is_valid() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let path = root.join(super::super::DIRECTORY).join(super::super::LIST);
        for minor in KubernetesMinor::ALL {
            assert!(!SpecList::read(&path, minor).unwrap().quick.is_empty());
        }
    }
}

//! The end-to-end stories, one per file: each `STORY` is the test and its sabotages.

pub(super) mod claim_labels;
pub(super) mod clones;
pub(super) mod driver_restart;
pub(super) mod flow;
pub(super) mod gvisor;
pub(super) mod helm;
pub(super) mod hostile_provisioner;
pub(super) mod hostile_tenant;
pub(super) mod install;
pub(super) mod kubelet_quotas;
pub(super) mod kubelet_root;
pub(super) mod node;
pub(super) mod node_loss;
pub(super) mod orphans;
pub(super) mod outages;
pub(super) mod power_cut;
pub(super) mod read_only_claims;
pub(super) mod removal;
pub(super) mod second_node;
pub(super) mod snapshots;
pub(super) mod user_namespaces;

use super::story::{Broken, Story};
use crate::listing::Line;

/// All stories in the order in which they run.
pub(super) const STORIES: &[Story] = &[
    install::STORY,
    flow::STORY,
    read_only_claims::STORY,
    node::STORY,
    clones::STORY,
    orphans::STORY,
    driver_restart::STORY,
    user_namespaces::STORY,
    hostile_tenant::STORY,
    hostile_provisioner::STORY,
    gvisor::STORY,
    kubelet_root::STORY,
    kubelet_quotas::STORY,
    outages::STORY,
    second_node::STORY,
    node_loss::STORY,
    power_cut::STORY,
    helm::STORY,
    claim_labels::STORY,
    // The last story before the removal: if it fails, csi-snapshotter stays in the driver's pods.
    snapshots::STORY,
    removal::STORY,
];

/// Returns a line about each story.
pub(crate) fn lines() -> impl Iterator<Item = Line> {
    STORIES.iter().map(Story::line)
}

/// Returns the names of all stories.
pub(super) fn names() -> impl Iterator<Item = &'static str> {
    STORIES.iter().map(|story| story.name)
}

/// Returns the sabotages of all stories, each with its story.
pub(super) fn sabotages() -> impl Iterator<Item = Broken> {
    STORIES.iter().flat_map(|story| story.sabotages.iter().map(move |sabotage| (story, sabotage)))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::fs;
    use std::path::Path;

    use super::*;

    #[test]
    fn each_story_has_a_sabotage() {
        let without: Vec<&str> =
            STORIES.iter().filter(|story| story.sabotages.is_empty()).map(|story| story.name).collect();
        assert!(without.is_empty(), "no sabotage shows that these stories can fail: {without:?}");
    }

    #[test]
    fn names_are_unique() {
        assert_eq!(names().collect::<BTreeSet<_>>().len(), STORIES.len());
        let of_sabotages: BTreeSet<&str> = sabotages().map(|(_, sabotage)| sabotage.name).collect();
        assert_eq!(of_sabotages.len(), sabotages().count());
        assert!(sabotages().all(|(_, sabotage)| !sabotage.expected.is_empty()));
    }

    /// Returns the sources of a story without the lines of its sabotages that name a step: a file or a directory, and the files of the
    /// steps that it shares.
    fn sources(story: &str) -> String {
        let stories = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/e2e/stories");
        let name = story.replace('-', "_");
        let mut paths = vec![stories.join(format!("{name}.rs"))];
        if let Ok(entries) = fs::read_dir(stories.join(&name)) {
            paths = entries.map(|entry| entry.unwrap().path()).collect();
        }
        if story == second_node::STORY.name {
            paths.push(stories.join("../parts/node_without_storage.rs"));
        }
        let sources: String = paths.iter().map(|path| fs::read_to_string(path).unwrap()).collect();
        sources.lines().filter(|line| !line.trim_start().starts_with("before:")).collect()
    }

    #[test]
    fn each_sabotage_names_a_step() {
        for (story, sabotage) in sabotages() {
            let step = format!("{}\"", sabotage.before);
            assert!(sources(story.name).contains(&step), "{}: {step}", sabotage.name);
        }
    }
}

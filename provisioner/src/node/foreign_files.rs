//! Reports files of a volume that are charged to another volume. The driver searches for them, and repairs them if the administrator
//! requests that.

use std::collections::BTreeMap;

use csi_wire::volumes::ForeignFiles;
use tokio::sync::Notify;

use crate::api::events::{Reason, truncated};
use crate::node::context::Context;

/// Longest path in an event, in bytes.
const EXAMPLE_MAX: usize = 320;

/// Reports what the driver has found after each notification, until shutdown.
pub(crate) async fn run(ctx: &Context, found: &Notify) {
    loop {
        found.notified().await;
        // An event about a volume is on its PersistentVolume.
        ctx.synced().await;
        match ctx.storage.driver_in_any_state().foreign_files().await {
            Ok(found) => report(&found, ctx),
            Err(error) => {
                tracing::warn!(%error, "could not read which files are charged to another volume; the driver reports them again within ten minutes");
            }
        }
    }
}

/// Records an event for the volume that holds the files, one for the volume that is charged for them, and one for a volume that the driver
/// has repaired.
fn report(found: &[ForeignFiles], ctx: &Context) {
    let mut repaired = BTreeMap::new();
    for files in found {
        let ForeignFiles { volume_id: volume, charged, charged_volume_id: victim, names, .. } = files;
        let kept = truncated(&files.example, EXAMPLE_MAX);
        let rest = if kept.len() < files.example.len() { "..." } else { "" };
        let example = format!("{kept}{rest}");
        let note = format!(
            "{names} files or directories of volume {volume} carry another project id than the volume, for example \
             {example}; their space is charged to {charged}, because their owner changed the id; start the driver \
             with --repair-projects, or run `loopfs quota tag` on the volume's directory, to put them back"
        );
        publish(volume, Reason::FilesInForeignProject, note, ctx);
        if !victim.is_empty() {
            let note = format!(
                "{names} files or directories of volume {volume}, for example {example}, carry the project id of volume \
                 {victim} and use up its limit, because their owner changed the id; start the driver with \
                 --repair-projects, or run `loopfs quota tag` on the directory of volume {volume}, to put them back"
            );
            publish(victim, Reason::ChargedForForeignFiles, note, ctx);
        }
        repaired.extend(files.repaired.map(|count| (volume, count)));
    }
    for (volume, count) in repaired {
        let note = format!(
            "put {count} files or directories of volume {volume} back into the project of the volume \
             (--repair-projects): their space is charged to it again, also beyond its limit"
        );
        publish(volume, Reason::ProjectRepaired, note, ctx);
    }
}

/// Records an event on the PersistentVolume of a volume, or on the node if it has none.
fn publish(volume: &str, reason: Reason, note: String, ctx: &Context) {
    match ctx.volume(volume) {
        Some(object) => ctx.cluster.events.publish(&*object, reason, note),
        None => ctx.cluster.events.publish_on_node(reason, note),
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;
    use serde_json::json;

    use super::*;
    use crate::testing::fixtures;
    use crate::testing::mock_api_server::{Caches, TestContext};

    /// Two findings about files of a volume with a PersistentVolume, of which the second one charges no volume
    /// and has a long path.
    fn found(repaired: Option<u64>) -> [ForeignFiles; 2] {
        let files = ForeignFiles {
            volume_id: fixtures::VOLUME.to_owned(),
            charged: "volume victim".to_owned(),
            charged_volume_id: "victim".to_owned(),
            names: 2,
            example: "\"a\"".to_owned(),
            repaired,
        };
        let example = "é".repeat(4000);
        let other = ForeignFiles { charged_volume_id: String::new(), example, ..files.clone() };
        [files, other]
    }

    #[rstest]
    #[case::only_reported(None, &[])]
    #[case::repaired(Some(4), &["ProjectRepaired"])]
    #[tokio::test]
    async fn both_volumes_get_an_event(#[case] repaired: Option<u64>, #[case] further: &[&str]) {
        let caches = Caches { volumes: vec![fixtures::volume(json!({}))], ..Caches::default() };
        let test_context = TestContext::with(caches, vec![]);
        report(&found(repaired), &test_context.ctx);
        let events = test_context.events().await;
        let (last, first) = (events.last().unwrap(), events.first().unwrap());
        let cut = format!("for example {}...; their space", "é".repeat(EXAMPLE_MAX / 2));
        assert!(events[2].note.contains(&cut), "{}", events[2].note);
        assert!(first.note.contains("for example \"a\"; their space is charged to volume victim"));
        assert!(repaired.is_none() || last.note.contains("put 4 files"), "{}", last.note);
        let reasons: Vec<_> = events.iter().map(|event| event.reason.as_str()).collect();
        let expected = ["FilesInForeignProject", "ChargedForForeignFiles", "FilesInForeignProject"];
        assert_eq!(reasons, [&expected[..], further].concat());
    }
}

//! Finds files of a volume that are charged to another volume, reports them, and repairs them if the administrator requests that.
//!
//! The owner of a file can give it the project id of another tenant's volume. Which trees to walk for such files is decided
//! from evidence that costs a few system calls for each volume: a deleted volume whose project id does not drain, a volume
//! that is full, and what earlier searches recorded. `--audit-projects` walks all trees each time.

use std::{
    collections::BTreeSet,
    sync::Arc,
    time::{Duration, Instant},
};

use loopfs::project_quota::ProjectId;
use loopfs::volume_store::{ChargedTo, ForeignEvidence, ForeignFiles, VolumeId};
use tokio::time::timeout;

use crate::{api::events::Reason, error::Error, node::context::Context, store::volumes::StorageError};

/// After a search of all volumes, evidence causes the next one only after this many times its duration. A tenant causes evidence at will,
/// because a volume that is filled is evidence, and again after it was not full. A twentieth of the time is what it can take.
const REST: u32 = 19;

/// When to search, and what to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ProjectAuditSettings {
    pub(crate) interval: Duration,
    /// Search all volumes each time, and not only when there is evidence.
    pub(crate) all: bool,
    /// Put the files back into the projects of their volumes.
    pub(crate) repair: bool,
}

/// The observations of earlier rounds of this process.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
struct History {
    /// Project ids that did not drain in the last round. One that drains by the next round needs no search.
    undrained: BTreeSet<ProjectId>,
    /// Project ids for which all volumes were searched. Most full volumes are full of their own files, and an open file
    /// that was deleted is found in no tree.
    searched: BTreeSet<ProjectId>,
    /// Until then, evidence causes no search of all volumes.
    rests_until: Option<Instant>,
}

/// Which volumes to search.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Scope {
    Nothing,
    All,
    Only(BTreeSet<VolumeId>),
}

/// Decides which volumes to search, and what to remember for the next round.
fn plan(evidence: ForeignEvidence, history: &History, all: bool, now: Instant) -> (Scope, History) {
    let ForeignEvidence { undrained, full, recorded } = evidence;
    let stuck = undrained.intersection(&history.undrained).copied();
    let suspected: BTreeSet<_> = stuck.chain(full).collect();
    let rests = history.rests_until.is_some_and(|end| now < end);
    let scope = match () {
        () if all || !rests && !suspected.is_subset(&history.searched) => Scope::All,
        () if recorded.is_empty() => Scope::Nothing,
        () => Scope::Only(recorded),
    };
    // A project id that is no longer suspected is searched for again if it becomes suspected again.
    let searched = match scope {
        Scope::All => suspected,
        Scope::Nothing | Scope::Only(_) => suspected.intersection(&history.searched).copied().collect(),
    };
    (scope, History { undrained, searched, rests_until: history.rests_until })
}

/// Searches at intervals, until shutdown.
pub(crate) async fn run(ctx: Arc<Context>, settings: ProjectAuditSettings) {
    ctx.synced().await;
    ctx.storage.tried().await;
    let mut history = History::default();
    loop {
        let started = Instant::now();
        match round(&ctx, settings, &mut history).await {
            Ok(()) => {}
            // An event on the node reports it already.
            Err(Error::Storage(StorageError::Untried | StorageError::Unavailable(_))) => {}
            Err(error) => {
                tracing::warn!(%error, "could not search for files that are charged to another volume; the next audit retries");
            }
        }
        // A store that becomes available again is also searched at the interval.
        let mut storage = ctx.storage.changes();
        while let Some(left) = settings.interval.checked_sub(started.elapsed()).filter(|left| !left.is_zero())
        {
            drop(timeout(left, storage.changed()).await);
        }
    }
}

async fn round(ctx: &Context, settings: ProjectAuditSettings, history: &mut History) -> Result<(), Error> {
    let evidence = ctx.storage.run(|volumes| volumes.foreign_evidence()).await?;
    let began = Instant::now();
    let (scope, next) = plan(evidence, history, settings.all, began);
    let searches_all = scope == Scope::All;
    let found = search(ctx, scope).await;
    if searches_all {
        // A search that failed has taken its time, too.
        history.rests_until = Some(Instant::now() + began.elapsed() * REST);
    }
    let found = found?;
    *history = History { rests_until: history.rests_until, ..next };
    report(&found, ctx);
    if settings.repair && !found.is_empty() {
        repair(&found, ctx).await?;
    }
    Ok(())
}

async fn search(ctx: &Context, scope: Scope) -> Result<Vec<ForeignFiles>, Error> {
    let only = match scope {
        Scope::Nothing => return Ok(Vec::new()),
        Scope::All => None,
        Scope::Only(volumes) => Some(volumes),
    };
    let search = ctx
        .storage
        .run_yielding(move |volumes, yield_now| volumes.find_foreign_files(only.as_ref(), yield_now));
    Ok(search.await?)
}

/// Records an event for the volume that holds the files, and one for the volume that is charged for them.
fn report(found: &[ForeignFiles], ctx: &Context) {
    for files in found {
        let ForeignFiles { volume, charged, names, .. } = files;
        let example = example(files);
        let note = format!(
            "{names} files or directories of volume {volume} carry another project id than the volume, for example \
             {example}; their space is charged to {charged}, because their owner changed the id; start the provisioner \
             with --repair-projects, or run `loopfs quota tag` on the volume's directory, to put them back"
        );
        publish(volume, Reason::FilesInForeignProject, note, ctx);
        if let ChargedTo::Volume(victim) = charged {
            let note = format!(
                "{names} files or directories of volume {volume}, for example {example}, carry the project id of volume \
                 {victim} and use up its limit, because their owner changed the id; start the provisioner with \
                 --repair-projects, or run `loopfs quota tag` on the directory of volume {volume}, to put them back"
            );
            publish(victim, Reason::ChargedForForeignFiles, note, ctx);
        }
    }
}

/// Returns the path as text that fits into an event, whatever bytes it contains.
fn example(files: &ForeignFiles) -> String {
    const LONGEST: usize = 160;
    let mut text = format!("{:?}", files.example);
    if let Some((end, _)) = text.char_indices().nth(LONGEST) {
        text.truncate(end);
        text.push_str("...");
    }
    text
}

/// Records an event on the PersistentVolume of a volume, or on the node if it has none.
fn publish(volume: &VolumeId, reason: Reason, note: String, ctx: &Context) {
    match ctx.volume(volume.as_str()) {
        Some(object) => ctx.cluster.events.publish(&*object, reason, note),
        None => ctx.cluster.events.publish_on_node(reason, note),
    }
}

/// Puts the files back into the projects of their volumes, and searches the volumes again, so that their conditions are current.
async fn repair(found: &[ForeignFiles], ctx: &Context) -> Result<(), Error> {
    let holders: BTreeSet<_> = found.iter().map(|files| files.volume.clone()).collect();
    for volume in &holders {
        let id = volume.clone();
        match ctx.storage.run(move |volumes| volumes.repair_project(&id)).await {
            Ok(changed) => {
                let note = format!(
                    "put {changed} files or directories of volume {volume} back into the project of the volume \
                     (--repair-projects): their space is charged to it again, also beyond its limit"
                );
                publish(volume, Reason::ProjectRepaired, note, ctx);
            }
            Err(error) => {
                tracing::warn!(%volume, %error, "could not put the files of a volume back into its project; the next audit retries");
            }
        }
    }
    let mut involved = holders;
    involved.extend(found.iter().filter_map(|files| match &files.charged {
        ChargedTo::Volume(victim) => Some(victim.clone()),
        _ => None,
    }));
    search(ctx, Scope::Only(involved)).await?;
    // The project ids of deleted volumes can be freed now.
    ctx.trash.notify_one();
    ctx.retry_generation.bump();
    Ok(())
}

#[cfg(test)]
mod tests {
    use loopfs::Bytes;
    use loopfs::volume_store::VolumeKind;
    use rstest::rstest;
    use serde_json::json;

    use super::*;
    use crate::testing::{
        fake_store::FakeStore,
        fixtures,
        mock_api_server::{Caches, TestContext},
    };

    fn projects(ids: &[u32]) -> BTreeSet<ProjectId> {
        ids.iter().map(|id| ProjectId::new(*id).unwrap()).collect()
    }

    fn volumes(ids: &[&str]) -> BTreeSet<VolumeId> {
        ids.iter().map(|id| VolumeId::parse(id).unwrap()).collect()
    }

    #[rstest]
    #[case::nothing(&[], &[], &[], &[], &[], Scope::Nothing)]
    #[case::seen_for_the_first_time(&[7], &[], &[], &[], &[], Scope::Nothing)]
    #[case::did_not_drain(&[7], &[], &[7], &[], &[], Scope::All)]
    #[case::drained(&[], &[], &[7], &[], &[], Scope::Nothing)]
    #[case::searched_already(&[7], &[9], &[7], &[7, 9], &[], Scope::Nothing)]
    #[case::another_one(&[7, 8], &[], &[7, 8], &[7], &[], Scope::All)]
    #[case::full(&[], &[9], &[], &[], &[], Scope::All)]
    #[case::recorded(&[], &[], &[], &[], &["a", "b"], Scope::Only(volumes(&["a", "b"])))]
    #[case::recorded_and_did_not_drain(&[7], &[], &[7], &[], &["a"], Scope::All)]
    fn volumes_are_searched_on_evidence(
        #[case] undrained: &[u32],
        #[case] full: &[u32],
        #[case] before: &[u32],
        #[case] searched: &[u32],
        #[case] recorded: &[&str],
        #[case] expected: Scope,
    ) {
        let (undrained_now, full) = (projects(undrained), projects(full));
        let evidence = ForeignEvidence { undrained: undrained_now, full, recorded: volumes(recorded) };
        let history =
            History { undrained: projects(before), searched: projects(searched), rests_until: None };
        let now = Instant::now();
        assert_eq!(
            plan(evidence.clone(), &history, true, now).0,
            Scope::All,
            "--audit-projects searches all volumes"
        );
        let (scope, next) = plan(evidence.clone(), &history, false, now);
        assert_eq!(scope, expected);
        // The same evidence causes at most one more search.
        let (_, next) = plan(evidence.clone(), &next, false, now);
        assert_ne!(plan(evidence, &next, false, now).0, Scope::All);
    }

    #[test]
    fn volumes_that_become_full_again_wait() {
        let full = || ForeignEvidence { full: projects(&[9]), ..ForeignEvidence::default() };
        let now = Instant::now();
        let end = now + Duration::from_secs(60);
        // The volume was searched, and was not full in the last round.
        let history = History { rests_until: Some(end), ..History::default() };
        let (scope, history) = plan(full(), &history, false, now);
        assert_eq!(scope, Scope::Nothing);
        assert_eq!(plan(full(), &history, true, now).0, Scope::All, "an administrator requests it");
        let (scope, history) = plan(full(), &history, false, end);
        assert_eq!(scope, Scope::All, "the evidence is not lost");
        assert_eq!(plan(full(), &history, false, end).0, Scope::Nothing);
    }

    #[tokio::test]
    async fn the_next_search_waits_for_a_rest() {
        let (test_context, settings) = found();
        let mut history = History::default();
        let began = Instant::now();
        round(&test_context.ctx, settings, &mut history).await.unwrap();
        // The search took no longer than the round.
        let rests_until = history.rests_until.unwrap();
        assert!(began < rests_until && rests_until <= Instant::now() + began.elapsed() * REST);
        test_context.finish().await;
    }

    /// Returns a context whose store finds files of a volume without a PersistentVolume in a volume that has one.
    fn found() -> (TestContext, ProjectAuditSettings) {
        let caches = Caches { volumes: vec![fixtures::volume(json!({}))], ..Caches::default() };
        let test_context = TestContext::new(FakeStore::of_size(Bytes(1 << 30)), caches, vec![]);
        let (holder, victim) =
            (VolumeId::parse(fixtures::VOLUME).unwrap(), VolumeId::parse("victim").unwrap());
        let mut state = test_context.volumes.state();
        for id in [&holder, &victim] {
            state.volumes.insert(id.clone(), (VolumeKind::Filesystem, Bytes(1 << 20)));
        }
        let charged = ChargedTo::Volume(victim);
        state.foreign.push(ForeignFiles { volume: holder, charged, names: 2, example: "a".into() });
        drop(state);
        (test_context, ProjectAuditSettings { interval: Duration::from_secs(600), all: true, repair: false })
    }

    #[tokio::test]
    async fn both_volumes_get_an_event_and_nothing_is_repaired_unless_requested() {
        let (test_context, settings) = found();
        round(&test_context.ctx, settings, &mut History::default()).await.unwrap();
        assert_eq!(test_context.volumes.state().foreign.len(), 1);
        assert_eq!(test_context.finish().await, ["FilesInForeignProject", "ChargedForForeignFiles"]);
    }

    #[tokio::test]
    async fn files_are_repaired_if_requested() {
        let (test_context, settings) = found();
        let settings = ProjectAuditSettings { repair: true, ..settings };
        round(&test_context.ctx, settings, &mut History::default()).await.unwrap();
        assert!(test_context.volumes.state().foreign.is_empty());
        round(&test_context.ctx, settings, &mut History::default()).await.unwrap();
        assert_eq!(
            test_context.finish().await,
            ["FilesInForeignProject", "ChargedForForeignFiles", "ProjectRepaired"]
        );
    }

    #[test]
    fn a_path_of_any_length_and_bytes_fits_into_an_event() {
        let files = ForeignFiles {
            volume: VolumeId::parse("v").unwrap(),
            charged: ChargedTo::Nothing,
            names: 1,
            example: "é\n".repeat(4000).into(),
        };
        let text = example(&files);
        assert!(text.len() < 400 && !text.contains('\n'), "{text}");
    }
}

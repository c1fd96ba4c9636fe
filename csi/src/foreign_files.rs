//! Finds files of a volume that are charged to another volume, and repairs them if the administrator requests that. The provisioner records
//! the findings in events, and the condition of both volumes shows them.
//!
//! The owner of a file can give it the project id of another tenant's volume. Which trees to walk for such files is decided
//! from evidence that costs a few system calls for each volume: a deleted volume whose project id does not drain, a volume
//! that is full, and what earlier searches recorded. `--search-projects` walks all trees, with rests.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use loopfs::project_quota::ProjectId;
use loopfs::volume_store::{ChargedTo, ForeignEvidence, ForeignFiles, VolumeId, VolumeStore};

use crate::background::{BackgroundThrottle, ForegroundCalls, TrashCleanup};
use crate::blocking;
use crate::changes::Changes;
use crate::error::{Error, Result};
use crate::storage::StorageMonitor;

/// After a search of all volumes, the next one begins only after this many times its duration. A tenant causes evidence at will, because a
/// volume that is filled is evidence, and again after it was not full. A twentieth of the time is what searches can take.
const REST: u32 = 19;

/// How often findings that stay the same are reported again, and how long those that were repaired are kept for a provisioner that does not
/// run.
const REPORT_INTERVAL: Duration = Duration::from_secs(600);

/// When to search, and what to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SearchSettings {
    pub(crate) interval: Duration,
    /// Search all volumes after each rest, and not only when there is evidence.
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
    /// Until then, not all volumes are searched.
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
        () if !rests && (all || !suspected.is_subset(&history.searched)) => Scope::All,
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

/// Files of a volume that are charged to another one, and how many of the volume were put back into its project.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FoundFiles {
    pub(crate) files: ForeignFiles,
    pub(crate) repaired: Option<u64>,
}

/// The search, and what it found last.
#[derive(Debug)]
pub(crate) struct ForeignFileSearch {
    settings: SearchSettings,
    monitor: Arc<StorageMonitor>,
    foreground: Arc<ForegroundCalls>,
    trash_cleanup: Arc<TrashCleanup>,
    changes: Arc<Changes>,
    latest: Mutex<Latest>,
}

/// What the latest search found.
#[derive(Debug, Default)]
struct Latest {
    found: Vec<FoundFiles>,
    reported: Option<Instant>,
}

impl Latest {
    /// Replaces the findings, unless the earlier ones were repaired a short time ago. Returns `true` if they are to be reported.
    fn replace(&mut self, found: Vec<FoundFiles>, now: Instant) -> bool {
        let is_recent = self.reported.is_some_and(|reported| now < reported + REPORT_INTERVAL);
        if is_recent && found.is_empty() && self.found.iter().any(|found| found.repaired.is_some()) {
            return false;
        }
        let reports = !found.is_empty() && (found != self.found || !is_recent);
        self.found = found;
        if reports {
            self.reported = Some(now);
        }
        reports
    }
}

impl ForeignFileSearch {
    pub(crate) fn new(
        settings: SearchSettings,
        monitor: Arc<StorageMonitor>,
        foreground: Arc<ForegroundCalls>,
        trash_cleanup: Arc<TrashCleanup>,
        changes: Arc<Changes>,
    ) -> Self {
        Self { settings, monitor, foreground, trash_cleanup, changes, latest: Mutex::default() }
    }

    /// Returns what the last search found.
    pub(crate) fn found(&self) -> Vec<FoundFiles> {
        self.lock().found.clone()
    }

    /// Searches at the interval.
    pub(crate) async fn run(self: Arc<Self>) {
        let mut history = History::default();
        loop {
            self.monitor.wait_until_available().await;
            match self.round(history.clone()).await {
                Ok((next, found)) => {
                    history = next;
                    found.into_iter().for_each(|found| self.replace(found));
                }
                // The call that detected the failure has logged it.
                Err(Error::StorageUnavailable(_) | Error::StorageStarting) => {}
                Err(error) => {
                    tracing::warn!(%error, "could not search for files that are charged to another volume; the next search retries");
                }
            }
            tokio::time::sleep(self.settings.interval).await;
        }
    }

    async fn round(&self, history: History) -> Result<(History, Option<Vec<FoundFiles>>)> {
        let (monitor, settings) = (Arc::clone(&self.monitor), self.settings);
        let mut throttle = BackgroundThrottle::new(Arc::clone(&self.foreground));
        blocking::run(move || {
            let storage = monitor.verified()?;
            Ok(round(storage.store(), settings, &history, &mut || throttle.yield_now())?)
        })
        .await
    }

    fn replace(&self, found: Vec<FoundFiles>) {
        for FoundFiles { files, repaired } in &found {
            let ForeignFiles { volume, charged, names, .. } = files;
            tracing::warn!(%volume, %charged, names, repaired, "files of a volume are charged to another one");
        }
        if found.iter().any(|found| found.repaired.is_some()) {
            // The project ids of deleted volumes can be freed now.
            self.trash_cleanup.request();
            self.changes.freed();
        }
        if self.lock().replace(found, Instant::now()) {
            self.changes.foreign_files();
        }
    }

    fn lock(&self) -> MutexGuard<'_, Latest> {
        // Every critical section is a single step, so a panicked holder leaves it whole.
        self.latest.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Searches once, and repairs what it found if that is requested. Returns no findings if the search of all volumes failed.
fn round(
    store: &VolumeStore,
    settings: SearchSettings,
    history: &History,
    yield_now: &mut dyn FnMut(),
) -> loopfs::Result<(History, Option<Vec<FoundFiles>>)> {
    let began = Instant::now();
    let (scope, mut next) = plan(store.foreign_evidence()?, history, settings.all, began);
    let found = match &scope {
        Scope::Nothing => Ok(Vec::new()),
        Scope::All => store.find_foreign_files(None, &mut *yield_now),
        Scope::Only(volumes) => store.find_foreign_files(Some(volumes), &mut *yield_now),
    };
    if scope == Scope::All {
        next.rests_until = Some(Instant::now() + began.elapsed() * REST);
    }
    let found = match found {
        Ok(found) => found,
        // A search that failed has taken its time, too.
        Err(error) if scope == Scope::All => {
            tracing::warn!(%error, "could not search all volumes for files that are charged to another volume; a later search retries");
            return Ok((History { rests_until: next.rests_until, ..history.clone() }, None));
        }
        Err(error) => return Err(error),
    };
    let repaired = if settings.repair { repair(store, &found, yield_now) } else { BTreeMap::new() };
    let with_repair = |files: ForeignFiles| {
        let repaired = repaired.get(&files.volume).copied();
        FoundFiles { files, repaired }
    };
    Ok((next, Some(found.into_iter().map(with_repair).collect())))
}

/// Puts the files back into the projects of their volumes, and searches the volumes again, so that their conditions are current. Returns
/// how many were put back in each volume.
fn repair(
    store: &VolumeStore,
    found: &[ForeignFiles],
    yield_now: &mut dyn FnMut(),
) -> BTreeMap<VolumeId, u64> {
    let mut repaired = BTreeMap::new();
    let holders: BTreeSet<_> = found.iter().map(|files| files.volume.clone()).collect();
    for volume in &holders {
        match store.repair_project(volume) {
            Ok(changed) => drop(repaired.insert(volume.clone(), changed)),
            Err(error) => {
                tracing::warn!(%volume, %error, "could not put the files of a volume back into its project; the next search retries");
            }
        }
    }
    let victims = found.iter().filter_map(|files| match &files.charged {
        ChargedTo::Volume(victim) => Some(victim.clone()),
        _ => None,
    });
    let involved: BTreeSet<_> = holders.into_iter().chain(victims).collect();
    if !involved.is_empty()
        && let Err(error) = store.find_foreign_files(Some(&involved), yield_now)
    {
        tracing::warn!(%error, "could not search the repaired volumes again; their conditions are current after the next search");
    }
    repaired
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

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
            "--search-projects searches all volumes"
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
        assert_eq!(plan(full(), &history, true, now).0, Scope::Nothing);
        let (scope, history) = plan(full(), &history, false, end);
        assert_eq!(scope, Scope::All, "the evidence is not lost");
        assert_eq!(plan(full(), &history, false, end).0, Scope::Nothing);
    }

    /// The same finding is reported again after ten minutes, and repairs stay in the list for as long.
    #[test]
    fn findings_repeat_and_repairs_expire() {
        let found = |repaired| {
            let charged = ChargedTo::Nothing;
            let volume = VolumeId::parse("a").unwrap();
            let files = ForeignFiles { volume, charged, names: 1, example: "file".into() };
            vec![FoundFiles { files, repaired }]
        };
        let (begun, mut latest) = (Instant::now(), Latest::default());
        let later = |seconds| begun + Duration::from_secs(seconds);
        assert!(!latest.replace(Vec::new(), later(0)));
        assert!(latest.replace(found(None), later(60)));
        assert!(!latest.replace(found(None), later(120)));
        assert!(latest.replace(found(None), later(660)));
        assert!(latest.replace(found(Some(1)), later(720)));
        assert!(!latest.replace(Vec::new(), later(780)));
        assert_eq!(latest.found, found(Some(1)), "a provisioner may not have read it yet");
        assert!(!latest.replace(Vec::new(), later(1320)));
        assert_eq!(latest.found, []);
    }
}

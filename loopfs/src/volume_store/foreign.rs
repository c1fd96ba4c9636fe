//! Files of one volume that are charged to another one.
//!
//! The owner of a file can give it the project id of another volume. The file then uses up the limit of that volume. After
//! that volume is deleted, its project id stays in use and cannot be freed. The kernel does not report where the files of a
//! project are, so finding them requires a walk through the trees of all volumes. [`VolumeStore::foreign_evidence`] takes a
//! constant time per volume and shows when such a walk is worthwhile. The search records its findings on the directories of
//! both volumes, from which the condition of a volume is read.
//!
//! `docs/decisions/0019-foreign-projects.md` gives the reasons.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::fmt;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;

use super::id::{SnapshotId, VolumeId};
use super::on_disk::{ForeignRecord, layout, projects};
use super::source::ContentSource;
use super::store::VolumeStore;
use crate::error::{Context, Result};
use crate::idle_io::IdleIo;
use crate::project_quota::{ProjectId, Usage};
use crate::project_tree::{ForeignInodes, HardLinks, find_foreign, tag_tree};

/// Files of a volume that have another project id than the volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ForeignFiles {
    /// The volume whose directory contains the files.
    pub volume: VolumeId,
    /// The object that is charged for the files instead.
    pub charged: ChargedTo,
    /// Number of names of these files and directories.
    pub names: u64,
    /// The path of one of them, relative to the directory of the volume.
    pub example: PathBuf,
}

/// The object to which a project id belongs.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum ChargedTo {
    /// A volume.
    Volume(VolumeId),
    /// A snapshot.
    Snapshot(SnapshotId),
    /// A deleted volume or snapshot, by its id and a suffix. Its project id cannot be freed while files have it.
    Deleted(String),
    /// No object of the store. The files count against the limit of no volume.
    Nothing,
}

impl fmt::Display for ChargedTo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Volume(id) => write!(f, "volume {id}"),
            Self::Snapshot(id) => write!(f, "snapshot {id}"),
            Self::Deleted(name) => {
                let id = name.rsplit_once('.').map_or(name.as_str(), |(id, _suffix)| id);
                write!(f, "the deleted volume {id}")
            }
            Self::Nothing => f.write_str("no volume"),
        }
    }
}

/// Evidence that files of a volume are charged to another volume.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ForeignEvidence {
    /// Project ids of deleted volumes that still have usage although their directories are empty. The usage comes from files
    /// in other volumes, or from deleted files that are still open.
    pub undrained: BTreeSet<ProjectId>,
    /// Project ids of volumes whose usage of bytes or inodes is at or close to the limit. The usage most likely comes from
    /// their own files, but perhaps from files of other volumes.
    pub full: BTreeSet<ProjectId>,
    /// Volumes for which an earlier search recorded such files.
    pub recorded: BTreeSet<VolumeId>,
}

impl VolumeStore {
    /// Returns evidence that files of a volume are charged to another volume. The call makes a few system calls for each
    /// volume and for each entry of the trash, and walks no tree. Files that are charged to a volume which still exists and
    /// is not full leave no evidence. Only [`find_foreign_files`](Self::find_foreign_files) finds them.
    ///
    /// # Errors
    /// The errors of getdents(2), fgetxattr(2) and quotactl_fd(2).
    pub fn foreign_evidence(&self) -> Result<ForeignEvidence> {
        let mut evidence = ForeignEvidence::default();
        for deleted in projects(&self.layout.trash)? {
            let (_, directory, project) = deleted?;
            let usage = self.filesystem.quota().usage(project)?;
            if usage.is_some_and(|usage| usage.inodes.0 > 1)
                && !layout::has_entries(&directory, "a directory of the trash")?
            {
                evidence.undrained.insert(project);
            }
        }
        for volume in projects(&self.layout.volumes)? {
            let (name, directory, project) = volume?;
            let Ok(id) = VolumeId::parse(&name) else { continue };
            if ForeignRecord::read(&directory)?.is_some() {
                evidence.recorded.insert(id);
            }
            if self.filesystem.quota().usage(project)?.is_some_and(|usage| is_full(&usage)) {
                evidence.full.insert(project);
            }
        }
        Ok(evidence)
    }

    /// Searches the directories of Filesystem volumes for files that have another project id than their volume. It searches
    /// all volumes, or only those in `volumes`. It records the result for [`Volume::stats`](super::Volume::stats), both on the
    /// volumes that contain such files and on the volumes that are charged for them. The time is proportional to the number
    /// of files. The search calls `yield_now` every 1024 names, which may wait. In the meantime, the calling thread has the I/O
    /// class idle (ioprio_set(2)), so that a scheduler of the disk serves all other reads first. If the owner of a volume moves directories in
    /// the meantime, the result for this volume may be incomplete; the record of an earlier search is then kept.
    ///
    /// # Errors
    /// The errors of [`check_tree`](crate::project_tree::check_tree) and fsetxattr(2). If the walk of a volume fails, the call
    /// records nothing.
    pub fn find_foreign_files(
        &self,
        volumes: Option<&BTreeSet<VolumeId>>,
        mut yield_now: impl FnMut(),
    ) -> Result<Vec<ForeignFiles>> {
        let _idle = IdleIo::begin();
        let owners = self.owners()?;
        let known: HashSet<ProjectId> = owners.keys().copied().collect();
        let mut found = Vec::new();
        let mut incomplete = HashSet::new();
        for volume in projects(&self.layout.volumes)? {
            let (name, directory, project) = volume?;
            let Ok(volume) = VolumeId::parse(&name) else { continue };
            if volumes.is_some_and(|volumes| !volumes.contains(&volume)) {
                continue;
            }
            let search = find_foreign(directory.as_fd(), project, &known, &mut yield_now)?;
            if !search.complete {
                incomplete.insert(volume.clone());
            }
            let of = |charged: ChargedTo, ForeignInodes { names, example }: ForeignInodes| ForeignFiles {
                volume: volume.clone(),
                charged,
                names,
                example,
            };
            let owner = |id: &ProjectId| owners.get(id).cloned().unwrap_or(ChargedTo::Nothing);
            found.extend(search.known.into_iter().map(|(id, inodes)| of(owner(&id), inodes)));
            found.extend(search.other.map(|inodes| of(ChargedTo::Nothing, inodes)));
        }
        self.record_foreign_files(volumes, &found, &incomplete)?;
        Ok(found)
    }

    /// Puts all files and directories of a Filesystem volume back into the project of the volume, as
    /// [`tag_tree`](crate::project_tree::tag_tree) does, and returns the number of changed inodes. The volume may exceed its
    /// limit afterwards. Its usage then counts as its reservation, and only once. The conditions of the volumes change with the
    /// next [`find_foreign_files`](Self::find_foreign_files).
    ///
    /// # Errors
    /// The errors of [`tag_tree`](crate::project_tree::tag_tree), above all [`ErrorKind::Busy`](crate::ErrorKind::Busy) if the
    /// owner of the files keeps changing the ids.
    pub fn repair_project(&self, id: &VolumeId) -> Result<u64> {
        let volume = self.volume(id)?;
        let directory = volume.open_dir()?;
        // Volumes are separate bind mounts, and link(2) does not work across mounts. All hard links of a file are therefore in this
        // volume.
        let tagged = tag_tree(directory.as_fd(), volume.attributes()?.project, HardLinks::Tag, |_| {});
        // Usage beyond a limit is part of the total of reservations, and it changes for both volumes.
        self.space_book().invalidate_total();
        tagged.map(|report| report.changed)
    }

    /// Returns the object to which each project id of the store belongs.
    fn owners(&self) -> Result<HashMap<ProjectId, ChargedTo>> {
        let mut owners = HashMap::new();
        let mut add = |parent: &OwnedFd, owner: &dyn Fn(&str) -> Option<ChargedTo>| -> Result<()> {
            for entry in projects(parent)? {
                let (name, _, project) = entry?;
                owners.extend(owner(&name).map(|owner| (project, owner)));
            }
            Ok(())
        };
        add(&self.layout.trash, &|name| Some(ChargedTo::Deleted(name.to_owned())))?;
        add(&self.layout.snapshots, &|name| SnapshotId::parse(name).ok().map(ChargedTo::Snapshot))?;
        add(&self.layout.volumes, &|name| VolumeId::parse(name).ok().map(ChargedTo::Volume))?;
        Ok(owners)
    }

    /// Writes a record for each volume that contains foreign files or is charged for them, and removes outdated records. A
    /// volume that is charged for files of a volume which was not searched keeps its record.
    fn record_foreign_files(
        &self,
        searched: Option<&BTreeSet<VolumeId>>,
        found: &[ForeignFiles],
        incomplete: &HashSet<VolumeId>,
    ) -> Result<()> {
        let unsure = |holder: &str| {
            let unsearched =
                searched.is_some_and(|searched| !searched.iter().any(|id| id.as_str() == holder));
            let exists = VolumeId::parse(holder).is_ok_and(|id| {
                self.layout.stat(ContentSource::Volume(&id)).is_ok_and(|found| found.is_some())
            });
            exists && (unsearched || incomplete.iter().any(|id| id.as_str() == holder))
        };
        for volume in projects(&self.layout.volumes)? {
            let (name, directory, _) = volume?;
            let holds = found.iter().find(|files| files.volume.as_str() == name);
            let is_charged = |files: &&ForeignFiles| matches!(&files.charged, ChargedTo::Volume(id) if id.as_str() == name);
            let record = |files: &ForeignFiles| {
                let other =
                    if holds.is_some() { files.charged.to_string() } else { files.volume.to_string() };
                ForeignRecord::new(holds.is_some(), files.names, other, &files.example)
            };
            let now = holds.or_else(|| found.iter().find(is_charged)).map(record);
            let recorded = ForeignRecord::read(&directory)?;
            let holder = |record: &ForeignRecord| unsure(if record.holds { &name } else { &record.other });
            let keep = now.is_none() && recorded.as_ref().is_none_or(holder);
            if !keep && now != recorded {
                ForeignRecord::write(now.as_ref(), &directory).context("record the files of", name)?;
            }
        }
        Ok(())
    }
}

/// Returns `true` if less than 1/64 of a limit is left.
fn is_full(usage: &Usage) -> bool {
    let used_up = |used: u64, limit: Option<u64>| limit.is_some_and(|limit| used >= limit - limit / 64);
    used_up(usage.bytes.0, usage.limits.bytes.map(|limit| limit.0))
        || used_up(usage.inodes.0, usage.limits.inodes.map(|limit| limit.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deleted_volumes_print_without_suffix() {
        let charged = ChargedTo::Deleted("pvc-1.2.0123456789abcdef".to_owned());
        assert_eq!(charged.to_string(), "the deleted volume pvc-1.2");
    }
}

//! Files of one volume that are charged to another one.
//!
//! The owner of a file can give it the project id of another volume. The file then uses up the limit of that volume, and
//! after the deletion of that volume its id never drains. No counter of the kernel tells where the files of a project lie,
//! so finding them means walking the trees of all volumes. [`VolumeStore::foreign_evidence`] costs a constant time for
//! each volume and shows when that is worthwhile. What a search finds is recorded on the directories of both volumes, where
//! the condition of a volume is read from.
//!
//! `docs/decisions/0019-foreign-projects.md` gives the reasons.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::fmt;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;

use nix::dir::Dir;
use nix::errno::Errno;
use nix::fcntl::OFlag;

use super::id::{SnapshotId, VolumeId};
use super::on_disk::{Attributes, ForeignFinding, ForeignRecord, layout};
use super::source::ContentSource;
use super::store::VolumeStore;
use crate::error::{Context, Error, Result};
use crate::project_quota::{ProjectId, Usage};
use crate::project_tree::{ForeignInodes, HardLinks, TagOptions, find_foreign, tag_tree};

/// Files of a volume that carry another project id than the volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ForeignFiles {
    /// The volume whose directory holds them.
    pub volume: VolumeId,
    /// What is charged for them instead.
    pub charged: ChargedTo,
    /// How many names such files and directories have.
    pub names: u64,
    /// One of them, relative to the directory of the volume.
    pub example: PathBuf,
}

/// What a project id belongs to.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ChargedTo {
    /// A volume.
    Volume(VolumeId),
    /// A snapshot.
    Snapshot(SnapshotId),
    /// A deleted volume or snapshot whose id cannot be freed as long as there are files with it: its id and a suffix.
    Deleted(String),
    /// Nothing in the store: the limit of no volume counts them.
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

/// What suggests that files of a volume are charged to another one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ForeignEvidence {
    /// Project ids of deleted volumes that something is still charged to, although their directories are empty: files in
    /// other volumes, or deleted files that are still open.
    pub undrained: BTreeSet<ProjectId>,
    /// Project ids of volumes that have used up their limit of bytes or inodes, or nearly so: by their own files most
    /// likely, but perhaps by those of others.
    pub full: BTreeSet<ProjectId>,
    /// Volumes for which an earlier search recorded such files.
    pub recorded: BTreeSet<VolumeId>,
}

impl VolumeStore {
    /// Returns what suggests that files of a volume are charged to another one. It costs a few system calls for each
    /// volume and for each entry of the trash; no tree is walked. Files that are charged to a volume which still exists
    /// and is not full leave no evidence: only [`find_foreign_files`](Self::find_foreign_files) finds them.
    ///
    /// # Errors
    /// Those of getdents(2), fgetxattr(2) and quotactl_fd(2).
    pub fn foreign_evidence(&self) -> Result<ForeignEvidence> {
        let mut evidence = ForeignEvidence::default();
        for name in layout::names(&self.layout.trash, "trash")? {
            let Some(directory) = open_if_directory(&self.layout.trash, &name)? else { continue };
            let Some(Attributes { project, .. }) = Attributes::read(&directory)? else { continue };
            let usage = self.filesystem.quota().usage(project)?;
            if usage.is_some_and(|usage| usage.inodes.0 > 1) && is_empty(&directory)? {
                evidence.undrained.insert(project);
            }
        }
        for name in layout::names(&self.layout.volumes, "volumes")? {
            let Some(directory) = open_if_directory(&self.layout.volumes, &name)? else { continue };
            let Ok(id) = VolumeId::parse(&name) else { continue };
            if ForeignRecord::read(&directory)?.is_some() {
                evidence.recorded.insert(id);
            }
            let Some(Attributes { project, .. }) = Attributes::read(&directory)? else { continue };
            if self.filesystem.quota().usage(project)?.is_some_and(|usage| is_full(&usage)) {
                evidence.full.insert(project);
            }
        }
        Ok(evidence)
    }

    /// Searches the directories of Filesystem volumes for files that carry another project id than their volume, and
    /// records the result for [`Volume::stats`](super::Volume::stats) on the volumes that hold such files and on those that are charged for
    /// them. Searches all volumes, or those in `volumes`. It takes as long as there are files; `yield_now` is called every
    /// 1024 names and may wait. The result of a volume whose directories its owner moves in the meantime may be
    /// incomplete; what an earlier search recorded for it is kept then.
    ///
    /// # Errors
    /// Those of [`audit_tree`](crate::project_tree::audit_tree) and fsetxattr(2). Nothing is recorded if the walk of a volume fails.
    pub fn find_foreign_files(
        &self,
        volumes: Option<&BTreeSet<VolumeId>>,
        mut yield_now: impl FnMut(),
    ) -> Result<Vec<ForeignFiles>> {
        let owners = self.owners()?;
        let known: HashSet<ProjectId> = owners.keys().copied().collect();
        let mut found = Vec::new();
        let mut incomplete = HashSet::new();
        for name in layout::names(&self.layout.volumes, "volumes")? {
            let Ok(volume) = VolumeId::parse(&name) else { continue };
            if volumes.is_some_and(|volumes| !volumes.contains(&volume)) {
                continue;
            }
            let Some(directory) = open_if_directory(&self.layout.volumes, &name)? else { continue };
            let Some(Attributes { project, .. }) = Attributes::read(&directory)? else { continue };
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
    /// [`tag_tree`](crate::project_tree::tag_tree) does, and returns how many were changed. The volume may have more than its limit
    /// afterwards; the space counts for it, and not twice. The conditions of the volumes change with the next
    /// [`find_foreign_files`](Self::find_foreign_files).
    ///
    /// # Errors
    /// As [`tag_tree`](crate::project_tree::tag_tree), most of all [`ErrorKind::Busy`](crate::ErrorKind::Busy) if their owner keeps changing the ids.
    pub fn repair_project(&self, id: &VolumeId) -> Result<u64> {
        let volume = self.volume(id)?;
        let directory = volume.open_dir()?;
        // A bind mount lets no name of another volume's file into this one, so all names of a file are in this volume.
        let options = TagOptions { hard_links: HardLinks::Tag, ..TagOptions::default() };
        let tagged = tag_tree(directory.as_fd(), volume.attributes()?.project, &options);
        // What is charged beyond a limit, here or there, is reserved too.
        self.space_book().invalidate_total();
        tagged.map(|report| report.changed)
    }

    /// What each project id of the store belongs to.
    fn owners(&self) -> Result<HashMap<ProjectId, ChargedTo>> {
        let mut owners = HashMap::new();
        let mut add = |parent: &OwnedFd, owner: &dyn Fn(&str) -> Option<ChargedTo>| -> Result<()> {
            for name in layout::names(parent, "volumes, snapshots and trash")? {
                let Some(directory) = open_if_directory(parent, &name)? else { continue };
                if let Some(Attributes { project, .. }) = Attributes::read(&directory)?
                    && let Some(owner) = owner(&name)
                {
                    owners.insert(project, owner);
                }
            }
            Ok(())
        };
        add(&self.layout.trash, &|name| Some(ChargedTo::Deleted(name.to_owned())))?;
        if let Some(snapshots) = &self.layout.snapshots {
            add(snapshots, &|name| SnapshotId::parse(name).ok().map(ChargedTo::Snapshot))?;
        }
        add(&self.layout.volumes, &|name| VolumeId::parse(name).ok().map(ChargedTo::Volume))?;
        Ok(owners)
    }

    /// Writes a record for each volume that holds such files or is charged for them, and removes those that are out of
    /// date. A volume that is charged for files of a volume which was not searched keeps its record.
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
        for name in layout::names(&self.layout.volumes, "volumes")? {
            let Some(directory) = open_if_directory(&self.layout.volumes, &name)? else { continue };
            let holds = found.iter().find(|files| files.volume.as_str() == name);
            let is_charged = |files: &&ForeignFiles| matches!(&files.charged, ChargedTo::Volume(id) if id.as_str() == name);
            let now = match (holds, found.iter().find(is_charged)) {
                (Some(files), _) => Some(ForeignRecord::Holds(ForeignFinding::new(
                    files.names,
                    files.charged.to_string(),
                    &files.example,
                ))),
                (None, Some(files)) => Some(ForeignRecord::Charged(ForeignFinding::new(
                    files.names,
                    files.volume.to_string(),
                    &files.example,
                ))),
                (None, None) => None,
            };
            let recorded = ForeignRecord::read(&directory)?;
            let keep = now.is_none()
                && match &recorded {
                    Some(ForeignRecord::Holds(_)) => unsure(&name),
                    Some(ForeignRecord::Charged(finding)) => unsure(&finding.other),
                    None => true,
                };
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
    used_up(usage.bytes.0, usage.limits.bytes.hard.map(|limit| limit.0))
        || used_up(usage.inodes.0, usage.limits.inodes.hard.map(|limit| limit.0))
}

/// Opens a directory of the store; `None` if it is not a directory, or was removed since it was listed.
fn open_if_directory(parent: &OwnedFd, name: &str) -> Result<Option<OwnedFd>> {
    match layout::open_beneath(parent.as_fd(), name, OFlag::O_RDONLY | OFlag::O_DIRECTORY) {
        Ok(directory) => Ok(Some(directory)),
        Err(Errno::ENOTDIR | Errno::ENOENT) => Ok(None),
        Err(errno) => Err(Error::sys("open", name, errno)),
    }
}

fn is_empty(directory: &OwnedFd) -> Result<bool> {
    const OBJECT: &str = "a directory of the trash";
    let own = layout::open_directory(directory, ".")?;
    let mut entries = Dir::from_fd(own).context("list", OBJECT)?;
    for entry in entries.iter() {
        let entry = entry.context("list", OBJECT)?;
        if !matches!(entry.file_name().to_bytes(), b"." | b"..") {
            return Ok(false);
        }
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::on_disk::MAX_RECORD;
    use super::*;

    fn charged_to() -> impl Strategy<Value = ChargedTo> {
        let id = "[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}";
        prop_oneof![
            id.prop_map(|id| ChargedTo::Volume(VolumeId::parse(&id).unwrap())),
            id.prop_map(|id| ChargedTo::Snapshot(SnapshotId::parse(&id).unwrap())),
            id.prop_map(|id| ChargedTo::Deleted(format!("{id}.0123456789abcdef"))),
            Just(ChargedTo::Nothing),
        ]
    }

    proptest! {
        #[test]
        fn a_record_of_any_path_reads_back_and_fits_into_the_attribute(
            charged in charged_to(),
            names: u64,
            example in "\\PC{0,300}|[\n\t a=]{0,20}",
            holds: bool,
        ) {
            let finding = ForeignFinding::new(names, charged.to_string(), std::path::Path::new(&example));
            let record = if holds { ForeignRecord::Holds(finding) } else { ForeignRecord::Charged(finding) };
            let text = record.print();
            prop_assert!(text.len() <= MAX_RECORD, "{}", text.len());
            prop_assert_eq!(ForeignRecord::parse(&text), Some(record));
        }

        #[test]
        fn any_text_is_a_record_or_none(text in "(holds |charged |names=|other=|example=|[0-9]{0,22}|\\PC){0,8}") {
            ForeignRecord::parse(&text);
        }
    }

    #[test]
    fn a_deleted_volume_is_named_without_its_suffix() {
        let charged = ChargedTo::Deleted("pvc-1.2.0123456789abcdef".to_owned());
        assert_eq!(charged.to_string(), "the deleted volume pvc-1.2");
    }
}

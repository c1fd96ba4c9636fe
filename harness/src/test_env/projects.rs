//! The project ids on the data disk of a node whose kubelet measures volumes by project quotas: the quota records, as the
//! library of loopfs lists them, and the directories that have the ids.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;
use std::time::Duration;

use anyhow::{Context, Result};
use serde::Deserialize;
use testvm_cluster::{KUBELET_ROOT, Node, TOOLS_DIR};

use crate::nodes::{DATA_DIR, LOOPFS_TOOL};

/// The first id that the kubelet tries.
pub(crate) const FIRST_OF_KUBELET: u32 = 1_048_577;
/// The ids of the store, as the tool of loopfs documents them.
const IDS_OF_STORE: RangeInclusive<u32> = 1_275_068_416..=1_291_845_631;
/// The kubelet's list of ids and directories.
const LIST_OF_KUBELET: &str = "/etc/projects";
const TOOL_DEADLINE: Duration = Duration::from_secs(120);

/// Returns `true` for an id that the kubelet allocates and the store does not.
pub(crate) fn is_of_kubelet(id: u32) -> bool {
    id >= FIRST_OF_KUBELET && !IDS_OF_STORE.contains(&id)
}

/// A quota record.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Record {
    pub(crate) bytes: u64,
    pub(crate) inodes: u64,
    /// The hard limit of bytes.
    pub(crate) limit: Option<u64>,
}

/// All projects of the data disk at one moment.
#[derive(Clone, Debug, Default)]
pub(crate) struct Projects {
    records: BTreeMap<u32, Record>,
    /// The directories that have a project id, by their path.
    directories: BTreeMap<String, u32>,
    /// The ids in the kubelet's list, by the path.
    listed: BTreeMap<String, u32>,
}

impl Projects {
    pub(crate) async fn read(node: &Node) -> Result<Projects> {
        // Delayed allocation is charged when it is written, and the frees of deleted files are deferred.
        node.output_within(&["sync", "--file-system", DATA_DIR], TOOL_DEADLINE).await?;
        let records = records(node).await?;
        // A published volume is on the same file system, so `-xdev` does not leave it out.
        let find = format!(
            "find {DATA_DIR} {KUBELET_ROOT} -xdev -ignore_readdir_race -path '*/kubernetes.io~csi/*/mount' -prune -o \
             -type d -exec lsattr -pd {{}} + 2>/dev/null || true"
        );
        let directories = node.output_within(&["sh", "-c", &find], TOOL_DEADLINE).await?;
        let listed = node.output_within(&["cat", LIST_OF_KUBELET], TOOL_DEADLINE).await?;
        Ok(Projects { records, directories: parse_directories(&directories)?, listed: parse_list(&listed)? })
    }

    /// Returns the quota record of an id.
    pub(crate) fn record(&self, id: u32) -> Result<Record> {
        self.records.get(&id).copied().with_context(|| format!("project {id} has no quota record"))
    }

    /// Returns `true` if nothing is charged to the projects of the kubelet.
    pub(crate) fn kubelet_uses_nothing(&self) -> bool {
        self.records_of_kubelet().all(|(_, record)| record.bytes == 0 && record.inodes == 0)
    }

    /// Returns the quota records of the kubelet.
    pub(crate) fn records_of_kubelet(&self) -> impl Iterator<Item = (u32, Record)> {
        self.records.iter().filter(|(id, _)| is_of_kubelet(**id)).map(|(id, record)| (*id, *record))
    }

    /// Returns the id of the emptyDir of a pod, by its inode. The kubelet's list has the same.
    pub(crate) fn of_empty_dir(&self, pod_uid: &str) -> Result<u32> {
        let path = format!("{KUBELET_ROOT}/pods/{pod_uid}/volumes/kubernetes.io~empty-dir/scratch");
        let id = *self.directories.get(&path).with_context(|| format!("{path} has no project"))?;
        let listed = self.listed.get(&path);
        anyhow::ensure!(listed == Some(&id), "{path} has project {id}, and {LIST_OF_KUBELET} has {listed:?}");
        Ok(id)
    }

    /// Returns the number of Filesystem volumes.
    pub(crate) fn volumes(&self) -> usize {
        self.roots("volumes").count()
    }

    /// Checks that volumes have ids of the store, each its own, that all other directories have other ids, and that every
    /// other quota record belongs to a directory or is in the kubelet's list.
    pub(crate) fn check_disjoint(&self) -> Result<()> {
        let mut ours = BTreeSet::new();
        for (path, id) in
            ["volumes", "snapshots", "staging", "trash"].iter().flat_map(|name| self.roots(name))
        {
            anyhow::ensure!(IDS_OF_STORE.contains(&id), "{path} has project {id}, which is not the store's");
            anyhow::ensure!(ours.insert(id), "{path} has project {id}, which another volume has");
        }
        for (path, id) in self.directories.iter().filter(|(path, _)| path.starts_with(KUBELET_ROOT)) {
            anyhow::ensure!(is_of_kubelet(*id), "{path} has project {id}, which is the store's");
        }
        for (path, id) in &self.listed {
            anyhow::ensure!(
                is_of_kubelet(*id),
                "{LIST_OF_KUBELET} has {id} for {path}, which is the store's"
            );
        }
        let known: BTreeSet<u32> = self.directories.values().chain(self.listed.values()).copied().collect();
        // The store frees the id of a deleted volume after its directory.
        let unknown = self.records.keys().find(|id| !known.contains(id) && !IDS_OF_STORE.contains(id));
        anyhow::ensure!(unknown.is_none(), "project {unknown:?} has a quota record and no directory");
        Ok(())
    }

    /// Returns the directories of one directory of the store.
    fn roots(&self, name: &str) -> impl Iterator<Item = (&String, u32)> {
        let parent = format!("{DATA_DIR}/{name}/");
        let is_root = move |path: &str| path.strip_prefix(&parent).is_some_and(|name| !name.contains('/'));
        self.directories.iter().filter(move |(path, _)| is_root(path)).map(|(path, id)| (path, *id))
    }
}

/// Returns the quota records of the projects on the data disk that have a limit or a use.
pub(crate) async fn records(node: &Node) -> Result<BTreeMap<u32, Record>> {
    let tool = format!("{TOOLS_DIR}/{LOOPFS_TOOL}");
    parse_records(&node.output_within(&[&tool, "--json", "quota", "list", DATA_DIR], TOOL_DEADLINE).await?)
}

/// Parses the list of the tool. Where limits are not enforced, it would miss projects.
fn parse_records(text: &str) -> Result<BTreeMap<u32, Record>> {
    #[derive(Deserialize)]
    struct Listing {
        enforced: bool,
        projects: Vec<Project>,
    }
    #[derive(Deserialize)]
    struct Project {
        id: u32,
        bytes: Resource,
        inodes: Resource,
    }
    #[derive(Deserialize)]
    struct Resource {
        used: u64,
        hard: Option<u64>,
    }
    let listing: Listing = serde_json::from_str(text).context("read the list of projects")?;
    anyhow::ensure!(listing.enforced, "limits of projects are not enforced: {text}");
    let record = |project: Project| {
        let Project { id, bytes, inodes } = project;
        (id, Record { bytes: bytes.used, inodes: inodes.used, limit: bytes.hard })
    };
    Ok(listing.projects.into_iter().map(record).collect())
}

/// Parses rows of `lsattr -pd`: `  ID FLAGS PATH`. Id 0 stands for no project.
fn parse_directories(text: &str) -> Result<BTreeMap<String, u32>> {
    let row = |line: &str| {
        let mut words = line.trim_start().splitn(3, ' ');
        let mut word = || words.next().with_context(|| format!("lsattr printed {line:?}"));
        let (id, _flags, path) = (word()?.parse()?, word()?, word()?);
        Ok((path.to_owned(), id))
    };
    let rows = text.lines().map(row).collect::<Result<Vec<_>>>()?;
    Ok(rows.into_iter().filter(|(_, id)| *id != 0).collect())
}

/// Parses rows of projects(5): `ID:PATH`.
fn parse_list(text: &str) -> Result<BTreeMap<String, u32>> {
    let row = |line: &str| {
        let (id, path) = line.split_once(':').with_context(|| format!("{LIST_OF_KUBELET} has {line:?}"))?;
        Ok((path.to_owned(), id.parse()?))
    };
    text.lines().filter(|line| !line.is_empty()).map(row).collect()
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    const OURS: u32 = 1_275_068_416;
    const VOLUME: &str = "/var/lib/loopfs/data/volumes/a";
    const WITHIN: &str = "/var/lib/loopfs/data/volumes/a/b";
    const DELETED: &str = "/var/lib/loopfs/data/trash/b";
    const PODS: &str = "/var/lib/kubelet/pods";

    fn projects(directories: &[(&str, u32)], records: &[u32]) -> Projects {
        Projects {
            records: records.iter().map(|id| (*id, Record { bytes: 1, inodes: 1, limit: None })).collect(),
            directories: directories.iter().map(|(path, id)| ((*path).to_owned(), *id)).collect(),
            listed: BTreeMap::new(),
        }
    }

    /// They are the records of the quotas, the directories and the list of projects.
    #[test]
    fn project_listings_are_parsed() {
        let json = r#"{"enforced": true, "projects": [{"id": 7, "enforced": true,
            "bytes": {"used": 4096, "hard": 8192},
            "inodes": {"used": 2, "hard": null}}]}"#;
        let expected = Record { bytes: 4096, inodes: 2, limit: Some(8192) };
        assert_eq!(parse_records(json).unwrap(), [(7, expected)].into());
        assert!(parse_records(r#"{"enforced": false, "projects": []}"#).is_err());
        let rows = "1048577 ---------------P------ /a b\n    0 ---------------------- /c\n";
        assert_eq!(parse_directories(rows).unwrap(), [("/a b".to_owned(), 1_048_577)].into());
        assert_eq!(parse_list("1048577:/a:b\n").unwrap(), [("/a:b".to_owned(), 1_048_577)].into());
        assert!(parse_directories("lsattr: no\n").is_err() && parse_list("x\n").is_err());
    }

    #[rstest]
    #[case::disjoint(&[(VOLUME, OURS), (PODS, FIRST_OF_KUBELET)], &[OURS], true)]
    #[case::id_of_the_kubelet(&[(VOLUME, FIRST_OF_KUBELET)], &[], false)]
    #[case::two_volumes(&[(VOLUME, OURS), (DELETED, OURS)], &[], false)]
    #[case::id_of_the_store(&[(PODS, OURS)], &[], false)]
    #[case::within_a_volume(&[(VOLUME, OURS), (WITHIN, OURS)], &[OURS], true)]
    #[case::no_directory(&[], &[FIRST_OF_KUBELET], false)]
    fn shared_and_lost_ids_are_found(
        #[case] directories: &[(&str, u32)],
        #[case] records: &[u32],
        #[case] disjoint: bool,
    ) {
        assert_eq!(projects(directories, records).check_disjoint().is_ok(), disjoint);
    }
}

//! `store list` and `store space`: the content and the available space of a volume store. Both commands change nothing.

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::Result;
use clap::{Args, Subcommand};
use jiff::Timestamp;
use loopfs::ErrorKind;
use loopfs::volume_store::{
    Annotations, Condition, SnapshotId, Space, StoreOptions, VolumeId, VolumeStats, VolumeStore,
};
use serde::Serialize;

use crate::output::{Output, Side, Table, counted, object, seconds_since_1970, size_or_none};
use crate::size;

#[derive(Debug, Subcommand)]
pub(crate) enum StoreCommand {
    /// Show the volumes and snapshots of a store
    ///
    /// For each volume, the command prints the claim and the StorageClass that it was created for, if they were noted, and
    /// `healthy`, `pending` (it has no PersistentVolume yet) or its problem. It is safe while a driver is running. It does
    /// not create a store if there is none.
    ///
    /// JSON: {filesystem_uuid, volumes: [{id, kind ("Filesystem" or "Block"), annotations: {claim ("NAMESPACE/NAME"), class,
    /// uid, and others}, pending (true until its PersistentVolume exists), capacity_bytes, used_bytes, available_bytes,
    /// inodes: {total, used, free}, healthy, problem}], snapshots: [{id, source (a volume's id), kind,
    /// capacity_bytes (of the volume at that time), used_bytes, created (seconds since 1970), problem}]}. If a volume or
    /// snapshot cannot be read, only id, healthy and problem are not null.
    #[command(verbatim_doc_comment)]
    List(Store),
    /// Show the available space for new volumes
    ///
    /// AVAILABLE is the space that is neither reserved for volumes and snapshots, used or unused, nor occupied by the
    /// metadata of the file system.
    ///
    /// JSON: {filesystem_uuid, total_bytes, available_bytes}
    #[command(verbatim_doc_comment)]
    Space(Store),
}

#[derive(Args, Debug)]
pub(crate) struct Store {
    /// The mount point of the file system of the store
    #[arg(value_name = "DIR")]
    directory: PathBuf,
}

impl Store {
    fn open(&self) -> Result<VolumeStore> {
        Ok(VolumeStore::open_existing(&self.directory, StoreOptions::default())?)
    }
}

impl StoreCommand {
    pub(crate) fn run(&self) -> Result<Output> {
        match self {
            Self::List(store) => {
                let store = store.open()?;
                let mut ids = store.list()?;
                ids.sort();
                let volumes = ids.iter().filter_map(|id| VolumeRow::read(&store, id)).collect();
                let mut ids = store.snapshots()?;
                ids.sort();
                let snapshots = ids.iter().filter_map(|id| SnapshotRow::read(&store, id)).collect();
                let filesystem_uuid = store.filesystem_uuid().to_string();
                let listing = StoreListing { filesystem_uuid, volumes, snapshots };
                Ok(Output::new(listing.text(), &listing)?)
            }
            Self::Space(store) => {
                let store = store.open()?;
                let (space, uuid) = (store.space()?, store.filesystem_uuid().to_string());
                Ok(Output::new(space_text(&space, &uuid), &space_json(&space, &uuid))?)
            }
        }
    }
}

#[derive(Debug, Serialize)]
struct StoreListing {
    filesystem_uuid: String,
    volumes: Vec<VolumeRow>,
    snapshots: Vec<SnapshotRow>,
}

/// A volume. If it cannot be read, only `id`, `healthy` and `problem` have values.
#[derive(Debug, Default, Serialize)]
struct VolumeRow {
    id: String,
    kind: Option<String>,
    annotations: Option<BTreeMap<String, String>>,
    pending: Option<bool>,
    capacity_bytes: Option<u64>,
    used_bytes: Option<u64>,
    available_bytes: Option<u64>,
    inodes: Option<VolumeInodes>,
    healthy: bool,
    problem: Option<String>,
}

/// A snapshot. If it cannot be read, only `id` and `problem` have values.
#[derive(Debug, Default, Serialize)]
struct SnapshotRow {
    id: String,
    source: Option<String>,
    kind: Option<String>,
    capacity_bytes: Option<u64>,
    used_bytes: Option<u64>,
    created: Option<u64>,
    problem: Option<String>,
}

#[derive(Debug, Serialize)]
struct VolumeInodes {
    total: u64,
    used: u64,
    free: u64,
}

/// Returns the row of an entry, or `None` if the entry was deleted after it was listed. A damaged entry must not hide the others.
fn row<R>(read: loopfs::Result<R>, unreadable: impl FnOnce(String) -> R) -> Option<R> {
    match read {
        Err(error) if error.kind() == ErrorKind::NotFound => None,
        read => Some(read.unwrap_or_else(|error| unreadable(error.to_string()))),
    }
}

impl VolumeRow {
    fn read(store: &VolumeStore, id: &VolumeId) -> Option<Self> {
        let read = store.volume(id).and_then(|volume| {
            let (pending, stats) = (volume.is_pending()?, volume.stats()?);
            Ok(Self::of(id, volume.kind().to_string(), pending, stats, volume.annotations()))
        });
        row(read, |problem| Self::unreadable(id, problem))
    }

    fn of(
        id: &VolumeId,
        kind: String,
        pending: bool,
        stats: VolumeStats,
        annotations: loopfs::Result<Annotations>,
    ) -> Self {
        let abnormal = match stats.condition {
            Condition::Healthy => None,
            Condition::Abnormal { message, .. } => Some(message),
        };
        let unread = annotations.as_ref().err().map(ToString::to_string);
        let problems: Vec<String> = abnormal.into_iter().chain(unread).collect();
        let owned = |(key, value): (&str, &str)| (key.to_owned(), value.to_owned());
        Self {
            id: id.to_string(),
            kind: Some(kind),
            annotations: annotations.ok().map(|annotations| annotations.iter().map(owned).collect()),
            pending: Some(pending),
            capacity_bytes: Some(stats.capacity.0),
            used_bytes: Some(stats.used.0),
            available_bytes: Some(stats.available.0),
            inodes: stats.inodes.map(|inodes| VolumeInodes {
                total: inodes.total.0,
                used: inodes.used.0,
                free: inodes.free.0,
            }),
            healthy: problems.is_empty(),
            problem: (!problems.is_empty()).then(|| problems.join("; ")),
        }
    }

    fn condition(&self) -> String {
        let healthy = if self.pending == Some(true) { "pending" } else { "healthy" };
        self.problem.clone().unwrap_or_else(|| healthy.to_owned())
    }

    fn annotation(&self, key: &str) -> String {
        self.annotations.as_ref().and_then(|annotations| annotations.get(key)).cloned().unwrap_or_default()
    }

    fn unreadable(id: &VolumeId, problem: String) -> Self {
        Self { id: id.to_string(), problem: Some(problem), ..Self::default() }
    }
}

impl SnapshotRow {
    fn read(store: &VolumeStore, id: &SnapshotId) -> Option<Self> {
        let read = store.snapshot(id).and_then(|snapshot| {
            Ok(Self {
                id: id.to_string(),
                source: Some(snapshot.source().to_string()),
                kind: Some(snapshot.kind().to_string()),
                capacity_bytes: Some(snapshot.capacity().0),
                used_bytes: Some(snapshot.used()?.0),
                created: seconds_since_1970(snapshot.created()),
                problem: None,
            })
        });
        row(read, |problem| Self { id: id.to_string(), problem: Some(problem), ..Self::default() })
    }
}

impl StoreListing {
    fn text(&self) -> String {
        let uuid = &self.filesystem_uuid;
        let volumes = counted(self.volumes.len(), "volume");
        match self.snapshots.len() {
            0 => format!("{}{volumes} on file system {uuid}\n", self.table_of_volumes()),
            count => format!(
                "{}\n{}{volumes} and {} on file system {uuid}\n",
                self.table_of_volumes(),
                self.table_of_snapshots(),
                counted(count, "snapshot")
            ),
        }
    }

    fn table_of_snapshots(&self) -> String {
        let mut table = Table::new([
            ("SNAPSHOT", Side::Left),
            ("VOLUME", Side::Left),
            ("KIND", Side::Left),
            ("CAPACITY", Side::Right),
            ("USED", Side::Right),
            ("CREATED", Side::Left),
            ("PROBLEM", Side::Left),
        ]);
        for snapshot in &self.snapshots {
            table.row([
                snapshot.id.clone(),
                snapshot.source.clone().unwrap_or_default(),
                snapshot.kind.clone().unwrap_or_default(),
                size_or_none(snapshot.capacity_bytes),
                size_or_none(snapshot.used_bytes),
                snapshot.created.map(utc).unwrap_or_default(),
                snapshot.problem.clone().unwrap_or_default(),
            ]);
        }
        table.print()
    }

    fn table_of_volumes(&self) -> String {
        let mut table = Table::new([
            ("ID", Side::Left),
            ("CLAIM", Side::Left),
            ("CLASS", Side::Left),
            ("KIND", Side::Left),
            ("CAPACITY", Side::Right),
            ("USED", Side::Right),
            ("AVAILABLE", Side::Right),
            ("INODES", Side::Right),
            ("USED", Side::Right),
            ("CONDITION", Side::Left),
        ]);
        for volume in &self.volumes {
            let inodes = |number: fn(&VolumeInodes) -> u64| {
                volume.inodes.as_ref().map(|inodes| number(inodes).to_string()).unwrap_or_default()
            };
            table.row([
                volume.id.clone(),
                volume.annotation("claim"),
                volume.annotation("class"),
                volume.kind.clone().unwrap_or_default(),
                size_or_none(volume.capacity_bytes),
                size_or_none(volume.used_bytes),
                size_or_none(volume.available_bytes),
                inodes(|inodes| inodes.total),
                inodes(|inodes| inodes.used),
                volume.condition(),
            ]);
        }
        table.print()
    }
}

/// Formats seconds since 1970 as `2026-11-21T14:58:00Z`. The text is empty for a time after the year 9999.
fn utc(seconds: u64) -> String {
    let time = i64::try_from(seconds).ok().and_then(|seconds| Timestamp::from_second(seconds).ok());
    time.map(|time| time.to_string()).unwrap_or_default()
}

fn space_json(space: &Space, uuid: &str) -> impl Serialize {
    object! { filesystem_uuid: uuid, total_bytes: space.total.0, available_bytes: space.available.0 }
}

fn space_text(space: &Space, uuid: &str) -> String {
    let mut table =
        Table::new([("TOTAL", Side::Right), ("AVAILABLE", Side::Right), ("FILE SYSTEM", Side::Left)]);
    table.row([size::show(space.total.0), size::show(space.available.0), uuid.to_owned()]);
    table.print()
}

#[cfg(test)]
mod tests {
    use loopfs::volume_store::{AbnormalReason, InodeStats};
    use loopfs::{Bytes, Inodes};

    use super::*;

    fn directory() -> VolumeStats {
        let mut stats = VolumeStats::new(Bytes(4 << 20), Bytes(8192), Condition::Healthy);
        stats.inodes = Some(InodeStats::new(Inodes(2048), Inodes(3)));
        stats
    }

    fn truncated_image() -> VolumeStats {
        let condition = Condition::abnormal(AbnormalReason::ImageTruncated, "short");
        VolumeStats::new(Bytes(4 << 20), Bytes(8192), condition)
    }

    fn volume(id: &str, kind: &str, stats: VolumeStats, annotations: &[(&str, &str)]) -> VolumeRow {
        let annotations = Annotations::new(annotations.iter().copied());
        VolumeRow::of(&id.parse().unwrap(), kind.to_owned(), false, stats, annotations)
    }

    fn volumes() -> Vec<VolumeRow> {
        vec![
            volume("a", "Filesystem", directory(), &[("claim", "shop/data"), ("class", "fast")]),
            volume("pvc-b", "Block", truncated_image(), &[]),
            VolumeRow::unreadable(&"c".parse().unwrap(), "no limits".to_owned()),
        ]
    }

    #[test]
    fn list_prints_volumes_as_a_table() {
        let listing =
            StoreListing { filesystem_uuid: "u".to_owned(), snapshots: Vec::new(), volumes: volumes() };
        assert_eq!(
            listing.text(),
            "\
ID     CLAIM      CLASS  KIND        CAPACITY  USED  AVAILABLE  INODES  USED  CONDITION
a      shop/data  fast   Filesystem      4MiB  8KiB     4.0MiB    2048     3  healthy
pvc-b  -          -      Block           4MiB  8KiB     4.0MiB       -     -  short
c      -          -      -                  -     -          -       -     -  no limits
3 volumes on file system u
"
        );
    }

    fn snapshots() -> Vec<SnapshotRow> {
        let snapshot = SnapshotRow {
            id: "s".to_owned(),
            source: Some("pvc-b".to_owned()),
            kind: Some("Block".to_owned()),
            capacity_bytes: Some(4 << 20),
            used_bytes: Some(8192),
            created: Some(1_795_273_080),
            problem: None,
        };
        let broken =
            SnapshotRow { id: "t".to_owned(), problem: Some("foreign".to_owned()), ..SnapshotRow::default() };
        vec![snapshot, broken]
    }

    #[test]
    fn list_prints_snapshots_as_a_table() {
        let listing = StoreListing {
            filesystem_uuid: "u".to_owned(),
            snapshots: snapshots(),
            volumes: vec![volume("a", "Filesystem", directory(), &[])],
        };
        assert_eq!(
            listing.text(),
            "\
ID  CLAIM  CLASS  KIND        CAPACITY  USED  AVAILABLE  INODES  USED  CONDITION
a   -      -      Filesystem      4MiB  8KiB     4.0MiB    2048     3  healthy

SNAPSHOT  VOLUME  KIND   CAPACITY  USED  CREATED               PROBLEM
s         pvc-b   Block      4MiB  8KiB  2026-11-21T14:58:00Z  -
t         -       -             -     -  -                     foreign
1 volume and 2 snapshots on file system u
"
        );
    }

    #[test]
    fn json_fields_stay_unchanged() {
        let listing =
            StoreListing { filesystem_uuid: "u".to_owned(), snapshots: snapshots(), volumes: volumes() };
        assert_eq!(
            serde_json::to_string(&listing).unwrap(),
            "{\"filesystem_uuid\":\"u\",\"volumes\":[\
             {\"id\":\"a\",\"kind\":\"Filesystem\",\"annotations\":{\"claim\":\"shop/data\",\"class\":\"fast\"},\
             \"pending\":false,\"capacity_bytes\":4194304,\"used_bytes\":8192,\
             \"available_bytes\":4186112,\"inodes\":{\"total\":2048,\"used\":3,\"free\":2045},\"healthy\":true,\
             \"problem\":null},\
             {\"id\":\"pvc-b\",\"kind\":\"Block\",\"annotations\":{},\"pending\":false,\"capacity_bytes\":4194304,\"used_bytes\":8192,\
             \"available_bytes\":4186112,\"inodes\":null,\"healthy\":false,\"problem\":\"short\"},\
             {\"id\":\"c\",\"kind\":null,\"annotations\":null,\"pending\":null,\"capacity_bytes\":null,\"used_bytes\":null,\
             \"available_bytes\":null,\"inodes\":null,\"healthy\":false,\"problem\":\"no limits\"}],\"snapshots\":[\
             {\"id\":\"s\",\"source\":\"pvc-b\",\"kind\":\"Block\",\"capacity_bytes\":4194304,\"used_bytes\":8192,\
             \"created\":1795273080,\"problem\":null},\
             {\"id\":\"t\",\"source\":null,\"kind\":null,\"capacity_bytes\":null,\"used_bytes\":null,\
             \"created\":null,\"problem\":\"foreign\"}]}"
        );
        let mut space = Space::default();
        (space.total, space.available) = (Bytes(8192), Bytes(4096));
        assert_eq!(
            serde_json::to_string(&space_json(&space, "u")).unwrap(),
            "{\"filesystem_uuid\":\"u\",\"total_bytes\":8192,\"available_bytes\":4096}"
        );
    }
}

//! `store list` and `store space`: what a volume store holds. Nothing is changed.

use std::path::PathBuf;

use anyhow::Result;
use clap::{Args, Subcommand};
use loopfs::{Condition, ErrorKind, StoreOptions, VolumeId, VolumeStats, VolumeStore};
use serde::Serialize;

use crate::output::{Answer, Side, Table, number_or_none, size_or_none};
use crate::size;

#[derive(Debug, Subcommand)]
pub(crate) enum StoreCommand {
    /// Show the volumes of a store
    ///
    /// A volume is `healthy` or what is wrong with it. Safe beside a running driver; no store is made where there is none.
    ///
    /// JSON: {filesystem_uuid, volumes: [{id, kind ("Filesystem" or "Block"), capacity_bytes, used_bytes,
    /// available_bytes, inodes: {total, used, free}, healthy, problem}]}. Of a volume that cannot be read only id,
    /// healthy and problem are not null.
    #[command(verbatim_doc_comment)]
    List(Store),
    /// Show the room that is left for new volumes
    ///
    /// AVAILABLE is what is neither promised to a volume, whether used or not, nor taken by the file system's own
    /// structures.
    ///
    /// JSON: {filesystem_uuid, total_bytes, available_bytes}
    #[command(verbatim_doc_comment)]
    Space(Store),
}

#[derive(Args, Debug)]
pub(crate) struct Store {
    /// Where the file system of the store is mounted
    #[arg(value_name = "DIR")]
    directory: PathBuf,
}

impl Store {
    fn open(&self) -> Result<VolumeStore> {
        Ok(VolumeStore::open_existing(&self.directory, StoreOptions::default())?)
    }
}

impl StoreCommand {
    pub(crate) fn run(&self) -> Result<Answer> {
        match self {
            Self::List(store) => {
                let store = store.open()?;
                let mut ids = store.list()?;
                ids.sort();
                let volumes = ids.iter().filter_map(|id| Volume::read(&store, id)).collect();
                let listing = Listing { filesystem_uuid: store.filesystem_uuid().to_string(), volumes };
                Ok(Answer::new(listing.text(), &listing)?)
            }
            Self::Space(store) => {
                let store = store.open()?;
                let space = store.space()?;
                let room = Room {
                    filesystem_uuid: store.filesystem_uuid().to_string(),
                    total_bytes: space.total.0,
                    available_bytes: space.available.0,
                };
                Ok(Answer::new(room.text(), &room)?)
            }
        }
    }
}

#[derive(Debug, Serialize)]
struct Listing {
    filesystem_uuid: String,
    volumes: Vec<Volume>,
}

/// A volume, as JSON shows it.
#[derive(Debug, Serialize)]
struct Volume {
    id: String,
    kind: Option<String>,
    capacity_bytes: Option<u64>,
    used_bytes: Option<u64>,
    available_bytes: Option<u64>,
    inodes: Option<VolumeInodes>,
    healthy: bool,
    problem: Option<String>,
}

#[derive(Debug, Serialize)]
struct VolumeInodes {
    total: u64,
    used: u64,
    free: u64,
}

#[derive(Debug, Serialize)]
struct Room {
    filesystem_uuid: String,
    total_bytes: u64,
    available_bytes: u64,
}

impl Volume {
    /// None where it was deleted since it was listed.
    fn read(store: &VolumeStore, id: &VolumeId) -> Option<Self> {
        let read = store.volume(id).and_then(|volume| Ok((volume.kind().to_string(), volume.stats()?)));
        match read {
            Ok((kind, stats)) => Some(Self::of(id, kind, stats)),
            Err(error) if error.kind() == ErrorKind::NotFound => None,
            // One that is broken must not hide the others.
            Err(error) => Some(Self::unreadable(id, error.to_string())),
        }
    }

    fn of(id: &VolumeId, kind: String, stats: VolumeStats) -> Self {
        let problem = match stats.condition {
            Condition::Healthy => None,
            Condition::Abnormal(problem) => Some(problem),
        };
        Self {
            id: id.to_string(),
            kind: Some(kind),
            capacity_bytes: Some(stats.capacity.0),
            used_bytes: Some(stats.used.0),
            available_bytes: Some(stats.available.0),
            inodes: stats.inodes.map(|inodes| VolumeInodes {
                total: inodes.total.0,
                used: inodes.used.0,
                free: inodes.free.0,
            }),
            healthy: problem.is_none(),
            problem,
        }
    }

    fn unreadable(id: &VolumeId, problem: String) -> Self {
        Self {
            id: id.to_string(),
            kind: None,
            capacity_bytes: None,
            used_bytes: None,
            available_bytes: None,
            inodes: None,
            healthy: false,
            problem: Some(problem),
        }
    }
}

impl Listing {
    fn text(&self) -> String {
        let mut table = Table::new([
            ("ID", Side::Left),
            ("KIND", Side::Left),
            ("CAPACITY", Side::Right),
            ("USED", Side::Right),
            ("AVAILABLE", Side::Right),
            ("INODES", Side::Right),
            ("USED", Side::Right),
            ("CONDITION", Side::Left),
        ]);
        for volume in &self.volumes {
            let inodes = volume.inodes.as_ref();
            table.row([
                volume.id.clone(),
                volume.kind.clone().unwrap_or_default(),
                size_or_none(volume.capacity_bytes),
                size_or_none(volume.used_bytes),
                size_or_none(volume.available_bytes),
                number_or_none(inodes.map(|inodes| inodes.total)),
                number_or_none(inodes.map(|inodes| inodes.used)),
                volume.problem.clone().unwrap_or_else(|| "healthy".to_owned()),
            ]);
        }
        let volumes = match self.volumes.len() {
            1 => "1 volume".to_owned(),
            count => format!("{count} volumes"),
        };
        format!("{}{volumes} on file system {}\n", table.print(), self.filesystem_uuid)
    }
}

impl Room {
    fn text(&self) -> String {
        let mut table =
            Table::new([("TOTAL", Side::Right), ("AVAILABLE", Side::Right), ("FILE SYSTEM", Side::Left)]);
        table.row([
            size::show(self.total_bytes),
            size::show(self.available_bytes),
            self.filesystem_uuid.clone(),
        ]);
        table.print()
    }
}

#[cfg(test)]
mod tests {
    use loopfs::{Bytes, InodeStats, Inodes};

    use super::*;

    fn directory() -> VolumeStats {
        VolumeStats {
            capacity: Bytes(4 << 20),
            used: Bytes(8192),
            available: Bytes((4 << 20) - 8192),
            inodes: Some(InodeStats { total: Inodes(2048), used: Inodes(3), free: Inodes(2045) }),
            condition: Condition::Healthy,
        }
    }

    fn id(text: &str) -> VolumeId {
        text.parse().unwrap()
    }

    #[test]
    fn volumes_for_people() {
        let image =
            VolumeStats { inodes: None, condition: Condition::Abnormal("short".to_owned()), ..directory() };
        let listing = Listing {
            filesystem_uuid: "u".to_owned(),
            volumes: vec![
                Volume::of(&id("a"), "Filesystem".to_owned(), directory()),
                Volume::of(&id("pvc-b"), "Block".to_owned(), image),
                Volume::unreadable(&id("c"), "no limits".to_owned()),
            ],
        };
        assert_eq!(
            listing.text(),
            "\
ID     KIND        CAPACITY  USED  AVAILABLE  INODES  USED  CONDITION
a      Filesystem      4MiB  8KiB     4.0MiB    2048     3  healthy
pvc-b  Block           4MiB  8KiB     4.0MiB       -     -  short
c      -                  -     -          -       -     -  no limits
3 volumes on file system u
"
        );
    }

    #[test]
    fn a_volume_for_programs() {
        assert_eq!(
            serde_json::to_value(Volume::of(&id("a"), "Filesystem".to_owned(), directory())).unwrap(),
            serde_json::json!({
                "id": "a",
                "kind": "Filesystem",
                "capacity_bytes": 4_194_304,
                "used_bytes": 8192,
                "available_bytes": 4_186_112,
                "inodes": { "total": 2048, "used": 3, "free": 2045 },
                "healthy": true,
                "problem": null,
            })
        );
    }
}

//! The source and the target of a copy.

use std::os::fd::AsFd;
use std::time::SystemTime;

use crate::error::{Context, Error, ErrorKind, Result};
use crate::units::Bytes;
use crate::volume_store::id::{SnapshotId, VolumeId};
use crate::volume_store::on_disk::{Taken, made_from};
use crate::volume_store::source::ContentSource;
use crate::volume_store::spec::{VolumeKind, VolumeSpec};
use crate::volume_store::volume::Volume;

/// The source of a copy.
pub(super) struct Original<'a> {
    pub(super) entry: ContentSource<'a>,
    pub(super) content: Volume,
    /// The least capacity of a clone.
    pub(super) capacity: Bytes,
}

/// The target of a copy.
#[derive(Clone, Copy)]
pub(super) enum CopyTarget<'a> {
    Volume { id: &'a VolumeId, spec: &'a VolumeSpec, capacity: Bytes },
    Snapshot { id: &'a SnapshotId },
}

impl<'a> CopyTarget<'a> {
    pub(super) fn entry(self) -> ContentSource<'a> {
        match self {
            Self::Volume { id, .. } => ContentSource::Volume(id),
            Self::Snapshot { id } => ContentSource::Snapshot(id),
        }
    }

    pub(super) fn operation(self) -> &'static str {
        match self {
            Self::Volume { .. } => "clone",
            Self::Snapshot { .. } => "create",
        }
    }

    pub(super) fn require_kind(self, source: ContentSource<'_>, found: VolumeKind) -> Result<()> {
        match self {
            Self::Volume { spec, .. } if spec.kind != found => {
                let detail =
                    format!("{source} has the content of a {found} volume, not of a {} one", spec.kind);
                Err(Error::new(ErrorKind::InvalidInput, self.operation(), self.entry(), detail))
            }
            _ => Ok(()),
        }
    }

    pub(super) fn require_capacity_for(self, source: ContentSource<'_>, size: Bytes) -> Result<()> {
        match self {
            Self::Volume { capacity, .. } if capacity < size => {
                let detail = format!("{capacity} requested, but {source} has {size}");
                Err(Error::new(ErrorKind::WouldShrink, self.operation(), self.entry(), detail)
                    .with_sizes(capacity, size))
            }
            _ => Ok(()),
        }
    }

    /// Records the source, and what the caller notes, on the copy, which has no name yet.
    pub(super) fn record(self, copy: impl AsFd, source: ContentSource<'_>, capacity: Bytes) -> Result<()> {
        let copy = copy.as_fd();
        made_from::record(copy, source).context("set up", self.entry())?;
        match self {
            Self::Volume { spec, .. } => spec.annotations.write(copy, spec.pending, self.entry()),
            Self::Snapshot { .. } => {
                Taken { created: SystemTime::now(), capacity }.record(copy, self.entry())
            }
        }
    }
}

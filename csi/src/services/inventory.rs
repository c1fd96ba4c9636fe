//! The volumes of this node with their conditions, as the RPCs report them.
//!
//! The specification has two kinds of messages about a condition: the volume condition, which current orchestrators read, and the
//! volume health, which replaces it in version 1.13.

use std::collections::BTreeSet;
use std::fmt;

use csi_wire::csi as wire;
use csi_wire::csi::VolumeHealthErrorType as VolumeError;
use csi_wire::csi::volume_health::VolumeHealthEntry;
use loopfs::publish::{Publications, Publisher};
use loopfs::volume_store::{AbnormalReason, Condition, OwnedContentSource, Volume, VolumeId, VolumeKind};
use loopfs::{Bytes, ErrorKind, FilesystemUuid};

use super::rpc::Volumes;
use super::unavailable;
use crate::error::{Error, Result};
use crate::request::{ListRequest, PageToken};

/// A volume as the RPCs report it.
#[derive(Clone, Debug)]
pub(crate) struct VolumeInfo {
    pub(crate) volume: VolumeId,
    /// `None` if the capacity cannot be determined.
    pub(crate) capacity: Option<Bytes>,
    /// `None` if the storage is unavailable.
    pub(crate) filesystem: Option<FilesystemUuid>,
    /// `true` if the volume is published on this node.
    pub(crate) published: bool,
    pub(crate) condition: Condition,
    /// The volume or snapshot from which this volume was created. It may no longer exist.
    pub(crate) source: Option<OwnedContentSource>,
}

/// A part of the list of volumes or snapshots.
#[derive(Debug)]
pub(crate) struct Page<T> {
    pub(crate) items: Vec<T>,
    /// The token of the next page. Empty if this is the last page.
    pub(crate) next_token: String,
}

impl Volumes {
    /// Returns the volumes that `filter` selects, in the order of their ids.
    pub(crate) fn list(
        &self,
        list: &ListRequest<VolumeId>,
        filter: impl Fn(&VolumeInfo) -> bool,
    ) -> Result<Page<VolumeInfo>> {
        let publisher = self.monitor.verified()?;
        let publications = Publications::read(&publisher)?;
        let mut ids = publisher.store().list()?;
        // Includes volumes whose image was deleted while their device is mounted.
        ids.extend(publications.of_devices());
        ids.sort_unstable();
        ids.dedup();
        page(list, ids, |id| Ok(find(&publisher, id, &publications)?.filter(&filter)))
    }

    /// Returns the abnormal volumes in the order of their ids. While the storage is unavailable, these are the
    /// published volumes.
    pub(crate) fn list_abnormal(&self, list: &ListRequest<VolumeId>) -> Result<Page<VolumeInfo>> {
        match self.list(list, |volume| volume.condition != Condition::Healthy) {
            Err(Error::StorageUnavailable(reason)) => {
                let published = self.published()?;
                if published.is_empty() {
                    // An empty list would mean that all volumes are healthy.
                    return Err(Error::StorageUnavailable(reason));
                }
                page(list, published, |id| Ok(Some(without_storage(id, &reason))))
            }
            listed => listed,
        }
    }

    /// Returns one volume. While the storage is unavailable, only published volumes are known.
    pub(crate) fn get(&self, volume: &VolumeId) -> Result<VolumeInfo> {
        let publisher = match self.monitor.verified() {
            Ok(publisher) => publisher,
            Err(Error::StorageUnavailable(reason)) => {
                return match self.published()?.contains(volume) {
                    true => Ok(without_storage(volume, &reason)),
                    false => Err(Error::StorageUnavailable(reason)),
                };
            }
            Err(error) => return Err(error),
        };
        let found = find(&publisher, volume, &Publications::read(&publisher)?)?;
        found.ok_or_else(|| Error::NoSuchVolume(volume.clone()))
    }

    /// Returns the published volumes, also while the storage is unavailable.
    fn published(&self) -> Result<BTreeSet<VolumeId>> {
        unavailable::published(&self.root.mounts()?, self.monitor.devices())
    }
}

/// Describes a published volume while the storage is unavailable for this reason.
fn without_storage(volume: &VolumeId, reason: &str) -> VolumeInfo {
    VolumeInfo {
        volume: volume.clone(),
        capacity: None,
        filesystem: None,
        published: true,
        condition: unavailable::condition(reason.to_owned()),
        source: None,
    }
}

/// Returns `None` if the volume was deleted. Reports a volume that cannot be opened as abnormal, so that it does
/// not hide other volumes.
fn find(publisher: &Publisher, id: &VolumeId, publications: &Publications<'_>) -> Result<Option<VolumeInfo>> {
    let info = |published, condition| VolumeInfo {
        volume: id.clone(),
        capacity: None,
        filesystem: Some(publisher.store().filesystem_uuid()),
        published,
        condition,
        source: None,
    };
    let describe = |volume: Volume| {
        let (published, condition) = publications.of(&volume)?;
        Ok(VolumeInfo {
            capacity: Some(volume.capacity()),
            source: volume.source()?,
            ..info(published, condition)
        })
    };
    match publisher.store().volume(id).and_then(describe) {
        Ok(found) => Ok(Some(found)),
        Err(error) if error.kind() == ErrorKind::NotFound => {
            Ok(publications.of_deleted(id).map(|condition| info(true, condition)))
        }
        Err(error) => {
            let condition = Condition::abnormal(AbnormalReason::Unreadable, error.to_string());
            Ok(Some(info(false, condition)))
        }
    }
}

/// Returns the requested part of a list. `ids` are in order; those without a description are skipped.
pub(super) fn page<T, Id: Ord + fmt::Display>(
    list: &ListRequest<Id>,
    ids: impl IntoIterator<Item = Id>,
    describe: impl Fn(&Id) -> Result<Option<T>>,
) -> Result<Page<T>> {
    let (mut items, mut last) = (Vec::new(), None);
    for id in ids {
        if list.from.as_ref().is_some_and(|PageToken(listed)| id <= *listed) {
            continue;
        }
        let Some(item) = describe(&id)? else { continue };
        if list.max_entries == Some(items.len()) {
            let next_token = last.map(|id| PageToken(id).to_string()).unwrap_or_default();
            return Ok(Page { items, next_token });
        }
        items.push(item);
        last = Some(id);
    }
    Ok(Page { items, next_token: String::new() })
}

/// Returns an error unless the volume is of the requested kind.
pub(super) fn require_kind(volume: &Volume, requested: VolumeKind) -> Result<()> {
    if volume.kind() == requested {
        return Ok(());
    }
    let requested = match requested {
        VolumeKind::Filesystem => "mount",
        VolumeKind::Block => "block",
    };
    Err(Error::WrongAccessType(format!(
        "{requested} access is requested for {}, which is a {} volume",
        volume.id(),
        volume.kind()
    )))
}

/// Returns the condition of a volume as a message.
pub(super) fn condition(condition: Condition) -> wire::VolumeCondition {
    match condition {
        Condition::Healthy => wire::VolumeCondition { abnormal: false, message: "healthy".to_owned() },
        Condition::Abnormal { reason: _, message } => wire::VolumeCondition { abnormal: true, message },
    }
}

impl From<VolumeInfo> for wire::VolumeHealth {
    fn from(info: VolumeInfo) -> Self {
        let VolumeInfo { volume, condition, .. } = info;
        let entry = |reason, message| VolumeHealthEntry {
            status: error_type(reason).into(),
            reason: reason.to_string(),
            message,
        };
        let health_statuses = match condition {
            Condition::Healthy => Vec::new(),
            Condition::Abnormal { reason, message } => vec![entry(reason, message)],
        };
        Self { volume_id: volume.to_string(), health_statuses }
    }
}

fn error_type(reason: AbnormalReason) -> VolumeError {
    match reason {
        AbnormalReason::ImageTruncated | AbnormalReason::ImageMissing | AbnormalReason::DeviceOfOtherFile => {
            VolumeError::DataLoss
        }
        AbnormalReason::Unreadable | AbnormalReason::StorageFailed => VolumeError::Inaccessible,
        _ => VolumeError::Degraded,
    }
}

//! The volumes of this node with their conditions, as the RPCs report them.
//!
//! The specification has two kinds of messages about a condition: the volume condition, which current orchestrators read, and the
//! volume health, which replaces it in version 1.13.

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

/// A part of the list of volumes.
#[derive(Debug)]
pub(crate) struct Page {
    pub(crate) volumes: Vec<VolumeInfo>,
    /// The token of the next page. `None` if this is the last page.
    pub(crate) next: Option<PageToken<VolumeId>>,
}

impl Volumes {
    /// Returns the volumes that `filter` selects, in the order of their ids.
    pub(crate) fn list(
        &self,
        list: &ListRequest<VolumeId>,
        filter: impl Fn(&VolumeInfo) -> bool,
    ) -> Result<Page> {
        let publisher = self.monitor.verified()?;
        let publications = Publications::read(&publisher)?;
        let mut ids = publisher.store().list()?;
        // Includes volumes whose image was deleted while their device is mounted.
        ids.extend(publications.of_devices());
        ids.sort_unstable();
        ids.dedup();
        page(list, ids, |id| id, |id| Ok(find(&publisher, id, &publications)?.filter(&filter)))
    }

    /// Returns the abnormal volumes in the order of their ids. While the storage is unavailable, these are the
    /// published volumes.
    pub(crate) fn list_abnormal(&self, list: &ListRequest<VolumeId>) -> Result<Page> {
        match self.list(list, |volume| volume.condition != Condition::Healthy) {
            Err(Error::StorageUnavailable(reason)) => {
                let published = self.published(&reason)?;
                if published.is_empty() {
                    // An empty list would mean that all volumes are healthy.
                    return Err(Error::StorageUnavailable(reason));
                }
                page(list, published, |info| &info.volume, |info| Ok(Some(info.clone())))
            }
            listed => listed,
        }
    }

    /// Returns one volume. While the storage is unavailable, only published volumes are known.
    pub(crate) fn get(&self, volume: &VolumeId) -> Result<VolumeInfo> {
        let publisher = match self.monitor.verified() {
            Ok(publisher) => publisher,
            Err(Error::StorageUnavailable(reason)) => {
                let found = self.published(&reason)?.into_iter().find(|info| info.volume == *volume);
                return found.ok_or(Error::StorageUnavailable(reason));
            }
            Err(error) => return Err(error),
        };
        let found = find(&publisher, volume, &Publications::read(&publisher)?)?;
        found.ok_or_else(|| Error::NoSuchVolume(volume.clone()))
    }

    /// Returns the published volumes, in the order of their ids, while the storage is unavailable for this reason.
    fn published(&self, reason: &str) -> Result<Vec<VolumeInfo>> {
        let published = unavailable::published(&self.root.mounts()?, self.monitor.devices())?;
        let info = |volume| VolumeInfo {
            volume,
            capacity: None,
            filesystem: None,
            published: true,
            condition: unavailable::condition(reason.to_owned()),
            source: None,
        };
        Ok(published.into_iter().map(info).collect())
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

/// Returns the requested part of a list. `items` are in the order of their ids; items without a description are
/// skipped.
fn page<T>(
    list: &ListRequest<VolumeId>,
    mut items: Vec<T>,
    id: impl Fn(&T) -> &VolumeId,
    describe: impl Fn(&T) -> Result<Option<VolumeInfo>>,
) -> Result<Page> {
    if let Some(PageToken(last)) = &list.from {
        items.retain(|item| id(item) > last);
    }
    let mut items = items.iter().peekable();
    let (mut volumes, mut last) = (Vec::new(), None);
    while list.max_entries.is_none_or(|max_entries| volumes.len() < max_entries)
        && let Some(item) = items.next()
    {
        volumes.extend(describe(item)?);
        last = Some(id(item).clone());
    }
    Ok(Page { volumes, next: last.filter(|_| items.peek().is_some()).map(PageToken) })
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

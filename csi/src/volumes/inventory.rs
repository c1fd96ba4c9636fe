//! The list of volumes with their conditions, and the capacity for further ones.

use csi_wire::Settings;
use loopfs::publish::{Publications, Publisher};
use loopfs::volume_store::{AbnormalReason, Condition, Volume, VolumeId, VolumeKind};
use loopfs::{Bytes, ErrorKind};

use super::publish::Volumes;
use super::unavailable;
use super::volume::{VolumeInfo, require_kind, whole_units};
use crate::error::{Error, Result};
use crate::request::{ExpectedProperties, ListRequest, PageToken, Validate};
use crate::storage::require_filesystem;

/// A part of the list of volumes.
#[derive(Debug)]
pub(crate) struct Page {
    pub(crate) volumes: Vec<VolumeInfo>,
    /// The token of the next page. `None` if this is the last page.
    pub(crate) next: Option<PageToken<VolumeId>>,
}

/// The result of a capacity query.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Capacity {
    /// Bytes that no volume has reserved.
    pub(crate) available: Bytes,
    /// The capacity of the largest volume that can be created.
    pub(crate) largest: Bytes,
}

impl Capacity {
    /// The capacity for volumes that cannot be on this node.
    pub(crate) const NONE: Self = Self { available: Bytes(0), largest: Bytes(0) };
}

/// The result of a validation: `Ok` if the volume has the expected properties, else the first difference.
pub(crate) type Validation = std::result::Result<(), String>;

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
                let published =
                    unavailable::published(&self.root.mounts()?, self.monitor.devices(), &reason)?;
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
                let published =
                    unavailable::published(&self.root.mounts()?, self.monitor.devices(), &reason)?;
                let found = published.into_iter().find(|info| info.volume == *volume);
                return found.ok_or(Error::StorageUnavailable(reason));
            }
            Err(error) => return Err(error),
        };
        let found = find(&publisher, volume, &Publications::read(&publisher)?)?;
        found.ok_or_else(|| Error::NoSuchVolume(volume.clone()))
    }

    pub(crate) fn validate(&self, validate: &Validate) -> Result<Validation> {
        let publisher = self.monitor.verified()?;
        let volume = publisher.store().volume(&validate.volume)?;
        match &validate.expected {
            Ok(expected) => is_as_expected(&publisher, &volume, expected),
            Err(impossible) => Ok(Err(impossible.to_string())),
        }
    }

    /// Returns the free capacity of this node, and the size of the largest volume with these settings that fits into it.
    pub(crate) fn capacity(&self, settings: &Settings, kind: Option<VolumeKind>) -> Result<Capacity> {
        let space = self.monitor.verified()?.store().space()?;
        let spec = |kind| settings.spec(kind, Bytes(0));
        let largest = match kind {
            Some(kind) => space.largest_volume(&spec(kind)),
            None => space.largest_volume_of_any_kind(&spec(VolumeKind::Filesystem)),
        };
        Ok(Capacity { available: whole_units(space.available), largest })
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

fn is_as_expected(
    publisher: &Publisher,
    volume: &Volume,
    expected: &ExpectedProperties,
) -> Result<Validation> {
    let suits = require_kind(volume, expected.kind)
        .and_then(|()| require_filesystem(publisher, expected.filesystem))
        .map_err(|error| error.to_string());
    if suits.is_err() {
        return Ok(suits);
    }
    let Some(parameters) = &expected.parameters else { return Ok(Ok(())) };
    let difference = volume.settings_differ(&parameters.spec(volume.kind(), volume.capacity()))?;
    Ok(difference.map_or(Ok(()), |difference| Err(format!("parameters: {difference}"))))
}

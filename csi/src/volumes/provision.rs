//! Creating, expanding and deleting volumes.

use loopfs::publish::Publisher;
use loopfs::volume_store::{ContentSource, OwnedContentSource, Volume, VolumeId, VolumeSpec};
use loopfs::{Bytes, ErrorKind, FilesystemUuid};

use super::publish::Volumes;
use super::volume::{UNIT, VolumeInfo, require_kind, whole_units};
use crate::error::{Error, Result};
use crate::request::{CapacityRange, ControllerExpand, Create};
use crate::storage::require_filesystem;

/// The size of a new volume if the request names none.
const DEFAULT_SIZE: Bytes = Bytes::GIB;

/// The volume of a claim that is to be created.
#[derive(Debug)]
pub(crate) struct NewVolume {
    pub(crate) volume: VolumeId,
    pub(crate) spec: VolumeSpec,
    pub(crate) source: Option<OwnedContentSource>,
}

/// The volume of a claim.
#[derive(Debug)]
pub(crate) struct ProvisionedVolume {
    pub(crate) capacity: Bytes,
    pub(crate) filesystem: FilesystemUuid,
    /// The volume existed, was not pending, and holds data.
    pub(crate) held_data: bool,
}

/// A volume after an expansion.
#[derive(Debug)]
pub(crate) struct ExpandedVolume {
    pub(crate) volume: Volume,
    /// Its loop devices have its capacity.
    pub(crate) devices_refreshed: bool,
}

impl Volumes {
    /// Creates a volume, or returns the existing one if it has the requested properties.
    pub(crate) fn create(&self, create: &Create) -> Result<VolumeInfo> {
        let publisher = self.monitor.verified()?;
        let size = match existing(&publisher, &create.volume)? {
            Some(volume) => {
                require_compatible(&volume, create)?;
                volume.capacity()
            }
            None => match &create.source {
                Some(source) => copied_size(create.capacity, self.source_size(&publisher, create, source)?)?,
                None => new_size(create.capacity)?,
            },
        };
        // This call is repeated for an existing volume: the process that created it may have died before the volume was
        // durable.
        let volume = create_volume(&publisher, create, size)?;
        require_compatible(&volume, create)?;
        self.changes.space();
        Ok(VolumeInfo {
            volume: volume.id().clone(),
            capacity: Some(volume.capacity()),
            filesystem: Some(publisher.store().filesystem_uuid()),
            published: false,
            condition: volume.stats()?.condition,
            source: volume.source()?,
        })
    }

    /// Checks that the source exists and is of the requested kind, and flushes its devices. Returns the size of the
    /// source.
    fn source_size(
        &self,
        publisher: &Publisher,
        create: &Create,
        source: &OwnedContentSource,
    ) -> Result<Bytes> {
        let absent = |error: loopfs::Error| match error.kind() {
            ErrorKind::NotFound => Error::SourceNotFound(format!("volume_content_source: {error}")),
            _ => error.into(),
        };
        let (kind, size) = match source.as_ref() {
            ContentSource::Snapshot(id) => {
                let snapshot = publisher.store().snapshot(id).map_err(absent)?;
                (snapshot.kind(), snapshot.capacity())
            }
            ContentSource::Volume(id) => {
                let volume = publisher.store().volume(id).map_err(absent)?;
                publisher.flush(&volume)?;
                (volume.kind(), volume.capacity())
            }
        };
        if kind == create.kind {
            return Ok(size);
        }
        Err(Error::UnsuitableSource(format!(
            "volume_content_source: {source} is a {kind} source, but a {} volume is requested",
            create.kind
        )))
    }

    /// Creates the pending volume of a claim, or returns the existing one whatever its settings are: the class may have been replaced
    /// since then. If `is_wanted` returns `false`, a copy ends.
    pub(crate) fn provision(
        &self,
        new: &NewVolume,
        is_wanted: impl Fn() -> bool,
    ) -> Result<ProvisionedVolume> {
        let publisher = self.monitor.verified()?;
        // The volume of an interrupted attempt is pending: nothing has written to it but the attempt.
        let held_data = match existing(&publisher, &new.volume)? {
            Some(volume) => !volume.is_pending()? && volume.holds_data()?,
            None => false,
        };
        let created = match &new.source {
            None => publisher.store().create(&new.volume, &new.spec),
            Some(source) => {
                if let OwnedContentSource::Volume(id) = source {
                    publisher.flush(&publisher.store().volume(id)?)?;
                }
                publisher.store().clone_from_while(source.as_ref(), &new.volume, &new.spec, is_wanted)
            }
        };
        let volume = created.inspect_err(|_error| {
            // What was copied by then is in the trash.
            if new.source.is_some() {
                self.trash_cleanup.request();
            }
        })?;
        self.changes.space();
        let filesystem = publisher.store().filesystem_uuid();
        Ok(ProvisionedVolume { capacity: volume.capacity(), filesystem, held_data })
    }

    /// Confirms a pending volume. Succeeds if the volume does not exist.
    pub(crate) fn confirm(&self, id: &VolumeId, filesystem: Option<FilesystemUuid>) -> Result<()> {
        let publisher = self.monitor.verified()?;
        require_filesystem(&publisher, filesystem)?;
        match publisher.store().confirm(id) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            confirmed => Ok(confirmed?),
        }
    }

    /// Deletes a volume that is not published. Its space is freed in the background. Returns `false` if the volume does not exist.
    pub(crate) fn delete(&self, id: &VolumeId, filesystem: Option<FilesystemUuid>) -> Result<bool> {
        let publisher = self.monitor.verified()?;
        require_filesystem(&publisher, filesystem)?;
        let existed = publisher.delete(id)?;
        self.trash_cleanup.request();
        self.changes.space();
        Ok(existed)
    }

    /// Expands a volume to the requested size.
    pub(crate) fn controller_expand(&self, expand: &ControllerExpand) -> Result<ExpandedVolume> {
        let publisher = self.monitor.verified()?;
        let volume = publisher.store().volume(&expand.volume)?;
        if let Some(kind) = expand.kind {
            require_kind(&volume, kind)?;
        }
        let CapacityRange { required, limit } = expand.capacity;
        let expanded = match required {
            Some(required) => self.expand(&expand.volume, size_within(required, limit)?, None)?,
            None => ExpandedVolume { devices_refreshed: is_refreshed(&publisher, &volume), volume },
        };
        let capacity = expanded.volume.capacity();
        match limit {
            Some(limit) if capacity > limit => Err(Error::OutOfRange(format!(
                "volume {} has {capacity} already, which is above the limit of {limit}",
                expand.volume
            ))),
            _ => Ok(expanded),
        }
    }

    /// Expands a volume, and refreshes its loop devices.
    pub(crate) fn expand(
        &self,
        id: &VolumeId,
        capacity: Bytes,
        filesystem: Option<FilesystemUuid>,
    ) -> Result<ExpandedVolume> {
        let publisher = self.monitor.verified()?;
        require_filesystem(&publisher, filesystem)?;
        let volume = publisher.store().expand(id, capacity)?;
        self.changes.space();
        Ok(ExpandedVolume { devices_refreshed: is_refreshed(&publisher, &volume), volume })
    }
}

/// Refreshes the loop devices of a volume. A failure leaves that to NodeExpandVolume, which repairs what users have changed.
fn is_refreshed(publisher: &Publisher, volume: &Volume) -> bool {
    match publisher.refresh_size(volume) {
        Ok(size) => size >= volume.capacity(),
        Err(error) => {
            tracing::info!(volume = %volume.id(), %error, "could not refresh the size of the volume's loop devices; NodeExpandVolume retries");
            false
        }
    }
}

fn existing(publisher: &Publisher, volume: &VolumeId) -> Result<Option<Volume>> {
    match publisher.store().volume(volume) {
        Ok(volume) => Ok(Some(volume)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error.into()),
    }
}

fn create_volume(publisher: &Publisher, create: &Create, size: Bytes) -> Result<Volume> {
    if !create.accessible_here {
        return Err(Error::NotOnThisNode(format!(
            "accessibility_requirements: volume {} must be on other nodes, but this driver creates volumes only on its own node",
            create.volume
        )));
    }
    let settings = create.parameters.spec(create.kind, size);
    let spec = VolumeSpec { annotations: create.annotations.clone(), ..settings };
    let created = match &create.source {
        Some(source) => publisher.store().clone_from(source.as_ref(), &create.volume, &spec),
        None => publisher.store().create(&create.volume, &spec),
    };
    created.map_err(|error| match error.kind() {
        ErrorKind::NoSpace => Error::NotOnThisNode(error.to_string()),
        // The settings of the source and of the new volume are incompatible.
        ErrorKind::Unsupported if create.source.is_some() => {
            Error::UnsuitableSource(format!("volume_content_source: {error}"))
        }
        _ => error.into(),
    })
}

/// Returns an error unless the volume, whether new or old, has the requested properties.
fn require_compatible(volume: &Volume, create: &Create) -> Result<()> {
    let CapacityRange { required, limit } = create.capacity;
    let has =
        |what: String| Err(Error::Incompatible(format!("volume {} exists already: {what}", volume.id())));
    if !create.accessible_here {
        return has("it is on this node, but requested on others".to_owned());
    }
    if volume.kind() != create.kind {
        return has(format!("it is a {} volume, but a {} volume is requested", volume.kind(), create.kind));
    }
    let source = volume.source()?;
    if source != create.source {
        let of = |source: &Option<OwnedContentSource>| match source {
            Some(source) => format!("created from {source}"),
            None => "created empty".to_owned(),
        };
        return has(format!("it was {}, but a volume {} is requested", of(&source), of(&create.source)));
    }
    let capacity = volume.capacity();
    if let Some(required) = required.filter(|required| capacity < *required) {
        return has(format!("it has {capacity}, but at least {required} are requested"));
    }
    if let Some(limit) = limit.filter(|limit| capacity > *limit) {
        return has(format!("it has {capacity}, but at most {limit} are requested"));
    }
    match volume.settings_differ(&create.parameters.spec(create.kind, capacity))? {
        Some(difference) => has(format!("its {difference}")),
        None => Ok(()),
    }
}

/// Returns the size of a new empty volume.
fn new_size(capacity: CapacityRange) -> Result<Bytes> {
    let CapacityRange { required, limit } = capacity;
    let default = || limit.map_or(DEFAULT_SIZE, |limit| whole_units(limit).max(UNIT).min(DEFAULT_SIZE));
    size_within(required.unwrap_or_else(default), limit)
}

/// Returns the size of a new volume with the content of a source of this size.
fn copied_size(capacity: CapacityRange, source: Bytes) -> Result<Bytes> {
    let CapacityRange { required, limit } = capacity;
    match limit {
        Some(limit) if limit < source => {
            Err(Error::OutOfRange(format!("the source has {source}, which is above the limit of {limit}")))
        }
        _ => size_within(required.unwrap_or(source).max(source), limit),
    }
}

/// Returns the smallest size of a volume within the limits.
fn size_within(required: Bytes, limit: Option<Bytes>) -> Result<Bytes> {
    let Some(size) = required.round_up() else {
        return Err(Error::OutOfRange(format!("{required} are more than the maximum size of a volume")));
    };
    match limit {
        Some(limit) if size > limit => Err(Error::OutOfRange(format!(
            "the size of a volume is a multiple of {UNIT}, and the smallest one that meets the request is {size}, which is above the \
             limit of {limit}"
        ))),
        _ => Ok(size),
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;
    use tonic::Code;

    use super::*;

    #[rstest]
    #[case::nothing_said(0, 0, Ok(1 << 30))]
    #[case::less_is_allowed(0, 8192, Ok(8192))]
    #[case::an_odd_limit(0, 8191, Ok(4096))]
    #[case::more_is_allowed(0, u64::MAX, Ok(1 << 30))]
    #[case::too_little_is_allowed(0, 4095, Err(Code::OutOfRange))]
    #[case::the_least(1, 0, Ok(4096))]
    #[case::rounded_up(4097, 0, Ok(8192))]
    #[case::exact(8192, 8192, Ok(8192))]
    #[case::rounded_up_within_the_limit(8000, 8192, Ok(8192))]
    #[case::rounded_up_above_the_limit(8000, 8191, Err(Code::OutOfRange))]
    #[case::larger_than_any_file(i64::MAX as u64, 0, Err(Code::OutOfRange))]
    fn new_size_is_the_least_multiple_within_the_limits(
        #[case] required: u64,
        #[case] limit: u64,
        #[case] expected: Result<u64, Code>,
    ) {
        let some = |bytes: u64| (bytes > 0).then_some(Bytes(bytes));
        let capacity = CapacityRange { required: some(required), limit: some(limit) };
        let size = new_size(capacity).map(|size| size.0).map_err(|error| error.code());
        assert_eq!(size, expected);
    }

    #[rstest]
    #[case::nothing_said(0, 0, Ok(8192))]
    #[case::less_would_do(1, 0, Ok(8192))]
    #[case::the_same(8192, 8192, Ok(8192))]
    #[case::more(8193, 0, Ok(12288))]
    #[case::less_is_not_to_be_had(0, 8191, Err(Code::OutOfRange))]
    #[case::nor_asked(4096, 4096, Err(Code::OutOfRange))]
    #[case::room_above(0, 1 << 40, Ok(8192))]
    fn copied_size_is_at_least_that_of_the_source(
        #[case] required: u64,
        #[case] limit: u64,
        #[case] expected: Result<u64, Code>,
    ) {
        let some = |bytes: u64| (bytes > 0).then_some(Bytes(bytes));
        let capacity = CapacityRange { required: some(required), limit: some(limit) };
        let size = copied_size(capacity, Bytes(8192)).map(|size| size.0).map_err(|error| error.code());
        assert_eq!(size, expected);
    }

    #[test]
    fn the_unit_is_that_of_the_store() {
        assert_eq!(Bytes(1).round_up(), Some(UNIT));
        assert_eq!((whole_units(Bytes(4095)), whole_units(Bytes(4097))), (Bytes(0), UNIT));
    }
}

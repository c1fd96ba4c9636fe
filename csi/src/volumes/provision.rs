//! Making, growing and deleting volumes.

use loopfs::{Bytes, ErrorKind, Volume, VolumeId, VolumeKind};

use super::{Described, Volumes, published_at, refuse_published, require_kind};
use crate::error::{Error, Result};
use crate::publish_block::BlockVolume;
use crate::request::{CapacityRange, Create, Grow, Source};
use crate::storage::Storage;

/// Sizes of volumes are multiples of this, which is also the least.
pub(crate) const UNIT: Bytes = Bytes(4096);

/// Size of a volume that nothing is said of.
const DEFAULT_SIZE: Bytes = Bytes::GIB;

impl Volumes {
    /// Makes a volume, or answers the one that is there if it is what is asked.
    pub(crate) fn create(&self, create: &Create) -> Result<Described> {
        let storage = self.gate.verified()?;
        self.janitor.begin();
        let size = match existing(&storage, &create.volume)? {
            Some(volume) => {
                require_as_asked(&volume, create)?;
                volume.capacity()
            }
            None => size_to_make(create.capacity)?,
        };
        // Also of one that is there: whoever made it may have died before it was durable.
        let volume = make(&storage, create, size)?;
        require_as_asked(&volume, create)?;
        self.describe(&storage, &volume, &[])
    }

    /// Deletes a volume that is published nowhere. Its space is freed in the background.
    pub(crate) fn delete(&self, id: &VolumeId) -> Result<()> {
        let storage = self.gate.verified()?;
        if let Some(volume) = existing(&storage, id)? {
            refuse_published(&volume, published_at(&volume, &storage.loops, &self.root.mounts()?)?)?;
            if volume.kind() == VolumeKind::Block {
                // Staged and never unstaged.
                BlockVolume::open(&volume, &storage.loops)?.detach()?;
            }
        }
        storage.store.delete(id)?;
        self.janitor.call();
        Ok(())
    }

    /// Makes the image or the quota as large as is asked; answers the volume as it is then.
    pub(crate) fn grow(&self, grow: &Grow) -> Result<Volume> {
        let storage = self.gate.verified()?;
        let volume = storage.store.volume(&grow.volume)?;
        if let Some(kind) = grow.kind {
            require_kind(&volume, kind)?;
        }
        let CapacityRange { at_least, at_most } = grow.capacity;
        let grown = match at_least {
            Some(at_least) => storage.store.grow(&grow.volume, size_within(at_least, at_most)?)?,
            None => volume,
        };
        match at_most {
            Some(at_most) if grown.capacity() > at_most => Err(Error::OutOfRange(format!(
                "volume {} has {} already, above the limit of {at_most}",
                grown.id(),
                grown.capacity()
            ))),
            _ => Ok(grown),
        }
    }
}

fn existing(storage: &Storage, volume: &VolumeId) -> Result<Option<Volume>> {
    match storage.store.volume(volume) {
        Ok(volume) => Ok(Some(volume)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error.into()),
    }
}

fn make(storage: &Storage, create: &Create, size: Bytes) -> Result<Volume> {
    if !create.accessible_here {
        return Err(Error::NoRoomHere(format!(
            "accessibility_requirements: volume {} shall be on other nodes, and this one makes its own only",
            create.volume
        )));
    }
    if let Some(source) = &create.source {
        return Err(refuse_source(storage, source));
    }
    let spec = create.parameters.spec(create.kind, size);
    storage.store.create(&create.volume, &spec).map_err(|error| match error.kind() {
        ErrorKind::NoSpace => Error::NoRoomHere(error.to_string()),
        _ => error.into(),
    })
}

fn refuse_source(storage: &Storage, source: &Source) -> Error {
    let found = match source {
        Source::Volume(id) => VolumeId::parse(id).is_ok_and(|id| storage.store.volume(&id).is_ok()),
        Source::Snapshot(_) => false,
    };
    let (what, id) = match source {
        Source::Volume(id) => ("volume", id),
        Source::Snapshot(id) => ("snapshot", id),
    };
    let problem = if found { "new volumes of this driver are empty" } else { "there is none" };
    let text = format!("volume_content_source: {what} {id:?}: {problem}");
    if found { Error::UnusableSource(text) } else { Error::NoSource(text) }
}

/// Whether a volume, made now or long ago, is what is asked.
fn require_as_asked(volume: &Volume, create: &Create) -> Result<()> {
    let CapacityRange { at_least, at_most } = create.capacity;
    let has =
        |what: String| Err(Error::Incompatible(format!("there is a volume {} already, {what}", volume.id())));
    if !create.accessible_here {
        return has("on this node, and it is asked for on others".to_owned());
    }
    if volume.kind() != create.kind {
        return has(format!("a {} one, and a {} one is asked", volume.kind(), create.kind));
    }
    let capacity = volume.capacity();
    if let Some(at_least) = at_least.filter(|at_least| capacity < *at_least) {
        return has(format!("of {capacity}, and at least {at_least} are asked"));
    }
    if let Some(at_most) = at_most.filter(|at_most| capacity > *at_most) {
        return has(format!("of {capacity}, and at most {at_most} are asked"));
    }
    match volume.settings_differ(&create.parameters.spec(create.kind, capacity))? {
        Some(difference) => has(format!("and its {difference}")),
        None => Ok(()),
    }
}

/// The size a new volume gets.
fn size_to_make(capacity: CapacityRange) -> Result<Bytes> {
    let CapacityRange { at_least, at_most } = capacity;
    let default = || at_most.map_or(DEFAULT_SIZE, |at_most| whole_units(at_most).max(UNIT).min(DEFAULT_SIZE));
    size_within(at_least.unwrap_or_else(default), at_most)
}

/// The least size of a volume that is no less than one limit and no more than the other.
fn size_within(at_least: Bytes, at_most: Option<Bytes>) -> Result<Bytes> {
    let Some(size) = at_least.round_up() else {
        return Err(Error::OutOfRange(format!("{at_least} are more than any volume can have")));
    };
    match at_most {
        Some(at_most) if size > at_most => Err(Error::OutOfRange(format!(
            "a volume has a multiple of {UNIT}: at least {size} here, above the limit of {at_most}"
        ))),
        _ => Ok(size),
    }
}

/// As much of it as a volume can have.
pub(super) fn whole_units(Bytes(bytes): Bytes) -> Bytes {
    Bytes(bytes - bytes % UNIT.0)
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
    fn sizes(#[case] at_least: u64, #[case] at_most: u64, #[case] expected: Result<u64, Code>) {
        let some = |bytes: u64| (bytes > 0).then_some(Bytes(bytes));
        let capacity = CapacityRange { at_least: some(at_least), at_most: some(at_most) };
        let size = size_to_make(capacity).map(|size| size.0).map_err(|error| error.code());
        assert_eq!(size, expected);
    }

    #[test]
    fn the_unit_is_the_stores() {
        assert_eq!(Bytes(1).round_up(), Some(UNIT));
        assert_eq!((whole_units(Bytes(4095)), whole_units(Bytes(4097))), (Bytes(0), UNIT));
    }
}

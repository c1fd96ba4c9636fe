//! The space that a volume reserves, and the largest volume that fits into a given space: one formula, in both directions.

use std::os::fd::AsFd;

use crate::error::Result;
use crate::units::Bytes;
use crate::volume_store::on_disk::shares;
use crate::volume_store::spec::{Provisioning, VolumeKind, VolumeSpec};

/// Space that the file system must have free beside a new volume: it allocates the blocks of an image piece by piece,
/// and the records of a directory or quota take blocks too.
const HEADROOM: Bytes = Bytes(64 << 10);

/// The unit of capacities.
const UNIT: u64 = 4096;

/// Returns the space that an image may take beyond its size for its extent tree, if the image shares blocks or is thin. A
/// write to a shared block needs a new block, the neighbours that the file system allocates with it, and an entry in an
/// extent tree that grows until no two blocks of the image are adjacent: 16 bytes for 4096, in leaves that may be half
/// empty. Measured on a full file system with an image of 400 MiB that was overwritten in random order: 1 MiB was enough,
/// and 512 KiB was not.
pub(super) fn margin(size: Bytes) -> Bytes {
    Bytes(size.0 / 128).saturating_add(Bytes::MIB)
}

/// Returns `true` if the reservation of an image may include the margin for its extent tree. A count leaves it out if the image
/// shares no blocks any more.
pub(crate) fn reserves_margin(image: impl AsFd, provisioning: Provisioning) -> Result<bool> {
    Ok(provisioning == Provisioning::Thin || shares::may_share(image)?)
}

/// Returns the space that the store reserves for a new, empty volume. A thin image also reserves the margin for its extent
/// tree, because no preallocation has allocated the blocks of that tree.
pub(crate) fn reservation_of(capacity: Bytes, spec: &VolumeSpec) -> Bytes {
    match (spec.kind, spec.image.provisioning) {
        (VolumeKind::Block, Provisioning::Thin) => capacity.saturating_add(margin(capacity)),
        (VolumeKind::Block, Provisioning::Thick) | (VolumeKind::Filesystem, _) => capacity,
    }
}

/// Returns the space that the store reserves beside the reservation of an image to expand it.
pub(crate) fn reservation_to_expand(current: Bytes, capacity: Bytes, has_margin: bool) -> Bytes {
    let more = capacity.saturating_sub(current);
    let more_margin = margin(capacity).saturating_sub(margin(current));
    if has_margin { more.saturating_add(more_margin) } else { more }
}

/// Returns the space that the store reserves for a clone of an image of `size` bytes. The source shares blocks from then on,
/// so its margin is reserved too if it has none yet.
pub(crate) fn reservation_to_clone(capacity: Bytes, size: Bytes, source_has_margin: bool) -> Bytes {
    capacity.saturating_add(margin(capacity)).saturating_add(margin_of_source(size, source_has_margin))
}

/// Returns the space that the store reserves for a snapshot of an image of `size` bytes. Nothing writes to the snapshot, so it
/// needs no margin itself.
pub(crate) fn reservation_to_snapshot(size: Bytes, source_has_margin: bool) -> Bytes {
    size.saturating_add(margin_of_source(size, source_has_margin))
}

fn margin_of_source(size: Bytes, has_margin: bool) -> Bytes {
    if has_margin { Bytes(0) } else { margin(size) }
}

/// Space on the file system of a store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Space {
    /// Size of the file system.
    pub total: Bytes,
    /// Bytes that are neither reserved for a volume, whether used or not, nor taken by the file system's own
    /// structures. [`largest_volume`](Self::largest_volume) returns the capacity of a volume that fits into them.
    pub available: Bytes,
    /// Bytes that are reserved for volumes, whether used or not. Deleted volumes count until their space is free.
    pub reserved: Bytes,
}

impl Space {
    /// Returns the capacity of the largest volume with the settings of `spec` that the store can create now. The capacity
    /// in `spec` does not matter.
    ///
    /// It is less than [`available`](Self::available): a thin image reserves more than its capacity, and the file system
    /// wants a few blocks free while it creates a volume.
    #[must_use]
    pub fn largest_volume(&self, spec: &VolumeSpec) -> Bytes {
        largest_within(self.available.saturating_sub(HEADROOM), spec)
    }

    /// Returns the largest capacity that a volume of either kind can have. For callers that do not know the kind yet;
    /// otherwise as [`largest_volume`](Self::largest_volume).
    #[must_use]
    pub fn largest_volume_of_any_kind(&self, spec: &VolumeSpec) -> Bytes {
        [VolumeKind::Filesystem, VolumeKind::Block]
            .map(|kind| self.largest_volume(&VolumeSpec { kind, ..*spec }))
            .into_iter()
            .fold(self.available, Bytes::min)
    }
}

/// Returns the largest capacity whose reservation fits into `space`: the inverse of [`reservation_of`].
fn largest_within(space: Bytes, spec: &VolumeSpec) -> Bytes {
    let capacity = match (spec.kind, spec.image.provisioning) {
        // `margin` adds 1/128 of the capacity and 1 MiB.
        (VolumeKind::Block, Provisioning::Thin) => {
            let remainder = u128::from(space.saturating_sub(margin(Bytes(0))).0);
            u64::try_from(remainder * 128 / 129).unwrap_or(u64::MAX)
        }
        (VolumeKind::Block, Provisioning::Thick) | (VolumeKind::Filesystem, _) => space.0,
    };
    Bytes(capacity - capacity % UNIT)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn spec() -> impl Strategy<Value = VolumeSpec> {
        let kind = prop_oneof![Just(VolumeKind::Filesystem), Just(VolumeKind::Block)];
        let provisioning = prop_oneof![Just(Provisioning::Thick), Just(Provisioning::Thin)];
        (kind, provisioning).prop_map(|(kind, provisioning)| {
            let mut spec = VolumeSpec::new(kind, Bytes(0));
            spec.image.provisioning = provisioning;
            spec
        })
    }

    proptest! {
        #[test]
        fn the_largest_capacity_fits_and_the_next_one_does_not(
            spec in spec(),
            space in prop_oneof![0..1u64 << 24, 0..1u64 << 62],
        ) {
            let largest = largest_within(Bytes(space), &spec);
            prop_assert_eq!(largest.0 % UNIT, 0);
            prop_assert!(largest == Bytes(0) || reservation_of(largest, &spec) <= Bytes(space));
            prop_assert!(reservation_of(largest.saturating_add(Bytes(UNIT)), &spec) > Bytes(space));
        }

        #[test]
        fn a_volume_of_either_kind_fits_where_the_kind_is_unknown(spec in spec(), available: u64) {
            let space = Space { total: Bytes(u64::MAX), available: Bytes(available), reserved: Bytes(0) };
            let largest = space.largest_volume_of_any_kind(&spec);
            for kind in [VolumeKind::Filesystem, VolumeKind::Block] {
                let spec = VolumeSpec { kind, ..spec };
                prop_assert!(largest <= space.largest_volume(&spec));
                prop_assert!(largest == Bytes(0) || reservation_of(largest, &spec) <= space.available);
            }
        }
    }
}

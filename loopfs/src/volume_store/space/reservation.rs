//! The space that a volume reserves, and the largest volume that fits into a given space: one formula, in both directions.

use std::num::NonZeroU64;
use std::os::fd::AsFd;

use super::inodes::FurtherInodes;
use crate::error::{Error, ErrorKind, Result};
use crate::units::{Bytes, Inodes};
use crate::volume_store::on_disk::shares;
use crate::volume_store::source::ContentSource;
use crate::volume_store::spec::{Provisioning, VolumeKind, VolumeSpec, inodes_for};

/// Space that the file system must have free beside a new volume: it allocates the blocks of an image piece by piece,
/// and the records of a directory or quota take blocks too.
const HEADROOM: Bytes = Bytes(64 << 10);

/// The unit of capacities.
const UNIT: u64 = 4096;

/// What a volume or snapshot reserves, or a part of that.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Reservation {
    pub(crate) bytes: Bytes,
    /// No quota is charged for the space of inodes, so it is reserved beside the bytes.
    pub(crate) inodes: Inodes,
}

impl Reservation {
    /// Returns the reservation of an image, which is one inode.
    fn of_image(bytes: Bytes) -> Self {
        Self { bytes, inodes: Inodes(1) }
    }

    pub(crate) fn saturating_sub(self, other: Self) -> Self {
        Self {
            bytes: self.bytes.saturating_sub(other.bytes),
            inodes: Inodes(self.inodes.0.saturating_sub(other.inodes.0)),
        }
    }
}

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

/// Returns what the store reserves for a new, empty directory.
pub(crate) fn reservation_of_directory(capacity: Bytes, bytes_per_inode: NonZeroU64) -> Reservation {
    Reservation { bytes: capacity, inodes: inodes_for(capacity, bytes_per_inode) }
}

/// Returns what the store reserves for a new, empty image. A thin one also reserves the margin for its extent tree, because no
/// preallocation has allocated the blocks of that tree.
pub(crate) fn reservation_of_image(capacity: Bytes, provisioning: Provisioning) -> Reservation {
    Reservation::of_image(match provisioning {
        Provisioning::Thin => capacity.saturating_add(margin(capacity)),
        Provisioning::Thick => capacity,
    })
}

/// Returns what the store reserves beside the reservation of an image to expand it.
pub(crate) fn reservation_to_expand(current: Bytes, capacity: Bytes, has_margin: bool) -> Reservation {
    let more = capacity.saturating_sub(current);
    let more_margin = margin(capacity).saturating_sub(margin(current));
    let bytes = if has_margin { more.saturating_add(more_margin) } else { more };
    Reservation { bytes, inodes: Inodes(0) }
}

/// Returns what the store reserves for a clone of an image of `size` bytes. The source shares blocks from then on,
/// so its margin is reserved too if it has none yet.
pub(crate) fn reservation_to_clone(capacity: Bytes, size: Bytes, source_has_margin: bool) -> Reservation {
    let clone = capacity.saturating_add(margin(capacity));
    Reservation::of_image(clone.saturating_add(margin_of_source(size, source_has_margin)))
}

/// Returns what the store reserves for a snapshot of an image of `size` bytes. Nothing writes to the snapshot, so it
/// needs no margin itself.
pub(crate) fn reservation_to_snapshot(size: Bytes, source_has_margin: bool) -> Reservation {
    Reservation::of_image(size.saturating_add(margin_of_source(size, source_has_margin)))
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
    /// Bytes that are neither reserved for a volume and its inodes, whether used or not, nor taken by the file system's own
    /// structures. [`largest_volume`](Self::largest_volume) returns the capacity of a volume that fits into them.
    pub available: Bytes,
    /// Bytes that are reserved for volumes, whether used or not, without their inodes. Deleted volumes count until their space
    /// is free.
    pub reserved: Bytes,
    pub(super) inodes: FurtherInodes,
}

impl Space {
    /// Returns the capacity of the largest volume with the settings of `spec` that the store can create now. The capacity
    /// in `spec` does not matter.
    ///
    /// It is less than [`available`](Self::available): a directory reserves its inodes beside its capacity, an image its extent
    /// tree, and the file system wants a few blocks free while it creates a volume.
    #[must_use]
    pub fn largest_volume(&self, spec: &VolumeSpec) -> Bytes {
        let rest = Self { available: self.available.saturating_sub(HEADROOM), ..*self };
        rest.largest_within(spec)
    }

    /// Returns the space that a reservation takes.
    pub(super) fn taken_by(&self, reservation: Reservation) -> Bytes {
        reservation.bytes.saturating_add(self.inodes.reservation(reservation.inodes))
    }

    pub(super) fn has(&self, reservation: Reservation) -> bool {
        self.taken_by(reservation) <= self.available && reservation.inodes <= self.inodes.available
    }

    /// Returns the error for a reservation that does not fit.
    pub(super) fn lack_of(
        &self,
        reservation: Reservation,
        operation: &'static str,
        entry: ContentSource<'_>,
    ) -> Error {
        let Reservation { bytes, inodes } = reservation;
        let error = |cause| Error::new(ErrorKind::NoSpace, operation, entry, cause);
        let taken = self.taken_by(reservation);
        if taken <= self.available {
            let available = self.inodes.available;
            let share = "within the share of the file system that they may take";
            return error(format!("{inodes} requested, {available} available {share}")).with_remedy(
                "choose a larger bytesPerInode or a smaller size, or raise the share with `xfs_growfs -m PERCENT`",
            );
        }
        let beside = match self.inodes.reservation(inodes) {
            Bytes(0) => String::new(),
            space => format!(" and {space} for its {inodes}"),
        };
        let available = format!("{} available of {} that the file system has", self.available, self.total);
        error(format!("{bytes} requested{beside}, {available}")).with_sizes(taken, self.available)
    }

    /// Returns the largest capacity whose reservation fits.
    fn largest_within(&self, spec: &VolumeSpec) -> Bytes {
        // The reservation grows with the capacity, and is never less.
        let (mut fits, mut too_many) = (0, self.available.0 / UNIT + 1);
        while too_many - fits > 1 {
            let units = fits.midpoint(too_many);
            if self.has(reservation_of(Bytes(units * UNIT), spec)) {
                fits = units;
            } else {
                too_many = units;
            }
        }
        Bytes(fits * UNIT)
    }

    /// Returns the largest capacity that a volume of either kind can have. For callers that do not know the kind yet;
    /// otherwise as [`largest_volume`](Self::largest_volume).
    #[must_use]
    pub fn largest_volume_of_any_kind(&self, spec: &VolumeSpec) -> Bytes {
        [VolumeKind::Filesystem, VolumeKind::Block]
            .map(|kind| self.largest_volume(&VolumeSpec { kind, ..spec.clone() }))
            .into_iter()
            .fold(self.available, Bytes::min)
    }
}

fn reservation_of(capacity: Bytes, spec: &VolumeSpec) -> Reservation {
    match spec.kind {
        VolumeKind::Filesystem => reservation_of_directory(capacity, spec.bytes_per_inode),
        VolumeKind::Block => reservation_of_image(capacity, spec.image.provisioning),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::inodes::tests::further_inodes;
    use super::*;
    use crate::volume_store::id::VolumeId;

    fn spec() -> impl Strategy<Value = VolumeSpec> {
        let kind = prop_oneof![Just(VolumeKind::Filesystem), Just(VolumeKind::Block)];
        let provisioning = prop_oneof![Just(Provisioning::Thick), Just(Provisioning::Thin)];
        let bytes_per_inode = prop_oneof![Just(512), Just(16384), Just(1 << 30)];
        (kind, provisioning, bytes_per_inode).prop_map(|(kind, provisioning, bytes_per_inode)| {
            let mut spec = VolumeSpec::new(kind, Bytes(0));
            spec.image.provisioning = provisioning;
            spec.bytes_per_inode = NonZeroU64::new(bytes_per_inode).unwrap();
            spec
        })
    }

    fn space() -> impl Strategy<Value = Space> {
        let available = prop_oneof![0..1u64 << 24, 0..1u64 << 62, Just(u64::MAX)];
        (available, further_inodes()).prop_map(|(available, inodes)| Space {
            total: Bytes(u64::MAX),
            available: Bytes(available),
            reserved: Bytes(0),
            inodes,
        })
    }

    proptest! {
        #[test]
        fn the_largest_capacity_fits_and_the_next_one_does_not(spec in spec(), space in space()) {
            let largest = space.largest_within(&spec);
            prop_assert_eq!(largest.0 % UNIT, 0);
            prop_assert!(largest == Bytes(0) || space.has(reservation_of(largest, &spec)));
            if let Some(next) = largest.0.checked_add(UNIT) {
                prop_assert!(!space.has(reservation_of(Bytes(next), &spec)));
            }
        }

        #[test]
        fn a_lack_of_bytes_has_sizes_and_one_of_inodes_has_a_remedy(spec in spec(), space in space()) {
            let next = space.largest_within(&spec).saturating_add(Bytes(UNIT));
            let id = VolumeId::parse("pvc-1").unwrap();
            let error = space.lack_of(reservation_of(next, &spec), "create", ContentSource::Volume(&id));
            prop_assert_eq!(error.kind(), ErrorKind::NoSpace);
            prop_assert_eq!(error.sizes().is_none(), error.remedy().is_some(), "{}", error);
            if let Some(sizes) = error.sizes() {
                prop_assert!(sizes.requested > sizes.limit && sizes.limit == space.available, "{}", error);
            }
        }

        #[test]
        fn a_volume_of_either_kind_fits_where_the_kind_is_unknown(spec in spec(), space in space()) {
            let largest = space.largest_volume_of_any_kind(&spec);
            for kind in [VolumeKind::Filesystem, VolumeKind::Block] {
                let spec = VolumeSpec { kind, ..spec.clone() };
                prop_assert!(largest <= space.largest_volume(&spec));
                prop_assert!(largest == Bytes(0) || space.has(reservation_of(largest, &spec)));
            }
        }
    }
}

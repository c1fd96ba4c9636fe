//! The space that a volume reserves, and the largest volume that fits into a given space: one formula, in both directions.
//!
//! **Inodes.** No quota is charged for the space that inodes take, so it is reserved beside the bytes. XFS allocates inodes in
//! chunks of 64, and frees a chunk when none of its inodes is in use. An allocation group gets another
//! chunk only while all of its inodes are in use, so it never allocates more inodes than can be in use at once, and one chunk.
//! But the owner of a volume chooses the group. It can create all of its files in one, remove all but one of each chunk, and do
//! the same in the next. So inodes are reserved once for each group, up to the share of the file system that inodes may take
//! (`imaxpct`).
//!
//! Chunks of deleted volumes can remain, because files of other volumes are in them. They are therefore read each time.

use std::os::fd::{AsFd, OwnedFd};

use nix::sys::stat::fstat;

use crate::error::{Context, Error, ErrorKind, Result};
use crate::project_quota::{Limits, Usage};
use crate::sys::xfs::{self, Geometry, GroupGeometry};
use crate::units::{Bytes, Inodes};
use crate::volume_store::on_disk::{DataFilesystem, DirectorySpec, Image, may_share, read_capacity};
use crate::volume_store::source::ContentSource;
use crate::volume_store::spec::{Provisioning, VolumeKind, VolumeSpec};

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
    /// Returns the hard limits of a project, or `None` if one is missing.
    pub(crate) fn of_project(usage: &Usage) -> Option<Self> {
        let (bytes, inodes) = usage.limits.bytes.zip(usage.limits.inodes)?;
        Some(Self { bytes, inodes })
    }

    /// Returns the least limits that hold a usage. A limit of 0 would be no limit.
    pub(crate) fn of_usage(bytes: Bytes, inodes: Inodes) -> Self {
        Self { bytes: bytes.max(Bytes(UNIT)), inodes: inodes.max(Inodes(1)) }
    }

    pub(crate) fn limits(self) -> Limits {
        Limits::hard(self.bytes, self.inodes)
    }

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
    Ok(provisioning == Provisioning::Thin || may_share(image)?)
}

/// Returns what the store reserves for a new, empty directory: at least two inodes, because the directory itself is one.
pub(crate) fn reservation_of_directory(capacity: Bytes, spec: DirectorySpec) -> Reservation {
    Reservation { bytes: capacity, inodes: Inodes((capacity.0 / spec.bytes_per_inode).max(2)) }
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

/// Returns what the store reserves for a copy of an image of `size` bytes: a clone of a capacity, or a snapshot (`None`). Nothing writes to
/// a snapshot, so it needs no margin. The source shares blocks from then on, so its margin is reserved too if it has none yet.
pub(crate) fn reservation_to_copy(size: Bytes, clone: Option<Bytes>, source_has_margin: bool) -> Reservation {
    let copy = clone.map_or(size, |capacity| capacity.saturating_add(margin(capacity)));
    let of_source = if source_has_margin { Bytes(0) } else { margin(size) };
    Reservation::of_image(copy.saturating_add(of_source))
}

/// Returns the reservation that the removal of an image from the trash releases. Returns `None` if it depends on other images: those that
/// it shares blocks with may need less afterwards. Call it before the image is truncated.
pub(crate) fn reservation_to_release(image: &OwnedFd) -> Result<Option<Reservation>> {
    let (Some(recorded), false) = (recorded(image), may_share(image)?) else { return Ok(None) };
    let size = Bytes(fstat(image).context("fstat", "an image in the trash")?.st_size as u64).max(recorded);
    Ok(Some(reservation_of_image(size, provisioning(image))))
}

/// Returns the recorded capacity; `None` if there is none or if it cannot be read.
pub(crate) fn recorded(image: &OwnedFd) -> Option<Bytes> {
    read_capacity(image).ok()
}

/// Returns `Thin` also if the settings cannot be read: better to reserve too much.
pub(super) fn provisioning(image: &OwnedFd) -> Provisioning {
    Image::read(image).map_or(Provisioning::Thin, |image| image.provisioning)
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
    fn taken_by(&self, reservation: Reservation) -> Bytes {
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
        VolumeKind::Filesystem => reservation_of_directory(capacity, spec.directory),
        VolumeKind::Block => reservation_of_image(capacity, spec.image.provisioning),
    }
}

/// Inodes that are reserved in each group: a chunk that has begun, and what the store and other programs create outside of
/// volumes between two counts, such as images that a count has missed because they were being created.
const SPARE: u64 = 512;
/// XFS compares the number of inodes with its limit before it adds what each processor has counted. So inodes may take this part
/// of the limit more, and volumes reserve that much less.
const UNCERTAINTY: u64 = 32;
/// The trees that list the chunks take this part of their size: two records of 16 bytes for 32 KiB, in leaves that may be half
/// empty, and as much again for other trees.
const TREES: u64 = 128;

/// The inodes of the file system.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct FilesystemInodes {
    /// Allocated in each group, whether in use or not.
    groups: Vec<u64>,
    in_use: u64,
    /// Bytes of one.
    size: u64,
    /// The most that the file system allocates; `None` if that is not limited.
    limit: Option<u64>,
}

/// What further inodes reserve.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FurtherInodes {
    groups: u64,
    size: u64,
    /// Inodes of all groups together that can still be reserved space for. Beyond these the file system allocates none.
    without_space: u64,
    /// How many inodes volumes can still reserve.
    pub(super) available: Inodes,
}

impl Default for FurtherInodes {
    /// On a file system that stores inodes nowhere.
    fn default() -> Self {
        Self { groups: 0, size: 0, without_space: 0, available: Inodes(u64::MAX) }
    }
}

impl FilesystemInodes {
    pub(super) fn read(filesystem: &DataFilesystem) -> Result<Self> {
        const OPERATION: &str = "read the XFS geometry of";
        let (root, shown) = (&filesystem.root, filesystem.path.display());
        let geometry = xfs::geometry(root).context(OPERATION, &shown)?;
        let groups: Vec<GroupGeometry> = (0..geometry.agcount)
            .map(|number| xfs::group_geometry(root, number))
            .collect::<std::result::Result<_, _>>()
            .context(OPERATION, &shown)?;
        Ok(Self::new(&geometry, &groups))
    }

    fn new(geometry: &Geometry, groups: &[GroupGeometry]) -> Self {
        let in_use =
            |group: &GroupGeometry| u64::from(group.allocated_inodes.saturating_sub(group.free_inodes));
        Self {
            groups: groups.iter().map(|group| group.allocated_inodes.into()).collect(),
            in_use: groups.iter().map(in_use).sum(),
            size: geometry.inodesize.into(),
            limit: limit(geometry),
        }
    }

    pub(super) fn in_use(&self) -> Inodes {
        Inodes(self.in_use)
    }

    /// Returns the space that is allocated for inodes, whether in use or not.
    pub(super) fn allocated(&self) -> Bytes {
        Bytes(self.groups.iter().sum::<u64>().saturating_mul(self.size))
    }

    /// Returns the most space that is ever allocated for inodes while no more than `inodes` can be in use.
    pub(super) fn reservation(&self, Inodes(inodes): Inodes) -> Bytes {
        with_trees(self.most(inodes), self.size)
    }

    /// Returns what inodes beside `reserved` ones reserve.
    pub(super) fn further(&self, Inodes(reserved): Inodes) -> FurtherInodes {
        let limit = self.limit.map_or(u64::MAX, |limit| limit - limit / UNCERTAINTY);
        FurtherInodes {
            groups: self.groups.len() as u64,
            size: self.size,
            without_space: self.ceiling().saturating_sub(self.most(reserved)),
            available: Inodes(limit.saturating_sub(reserved)),
        }
    }

    /// Returns the most inodes that are ever allocated while no more than `inodes` can be in use.
    fn most(&self, inodes: u64) -> u64 {
        let each = inodes.saturating_add(SPARE);
        let of_groups = self.groups.iter().map(|allocated| each.max(*allocated));
        of_groups.fold(0, u64::saturating_add).min(self.ceiling())
    }

    /// Returns the most inodes that the file system allocates, whatever is in use.
    fn ceiling(&self) -> u64 {
        // It may have allocated more before its limit was lowered.
        let allocated = self.groups.iter().sum();
        self.limit.map_or(u64::MAX, |limit| limit.saturating_add(limit / UNCERTAINTY).max(allocated))
    }
}

impl FurtherInodes {
    /// Returns the space that further inodes reserve. It may be too much by what a group has allocated and does not use.
    pub(super) fn reservation(&self, Inodes(inodes): Inodes) -> Bytes {
        with_trees(inodes.saturating_mul(self.groups).min(self.without_space), self.size)
    }
}

fn with_trees(inodes: u64, size: u64) -> Bytes {
    let bytes = inodes.saturating_mul(size);
    Bytes(bytes.saturating_add(bytes.div_ceil(TREES)))
}

/// As `xfs_ialloc_setup_geometry` of the kernel, but for the last chunk.
fn limit(geometry: &Geometry) -> Option<u64> {
    let blocks = u128::from(geometry.datablocks) * u128::from(geometry.imaxpct) / 100;
    let inodes = blocks * u128::from(geometry.blocksize) / u128::from(geometry.inodesize.max(1));
    (geometry.imaxpct > 0).then(|| u64::try_from(inodes).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::volume_store::id::VolumeId;

    /// A file system of 4 groups and 1 GiB, with inodes of 512 bytes.
    fn geometry() -> Geometry {
        let (blocksize, datablocks) = (4096, 1 << 18);
        Geometry { blocksize, datablocks, agcount: 4, inodesize: 512, imaxpct: 25, ..Geometry::default() }
    }

    const LIMIT: u64 = (1 << 30) / 4 / 512;

    fn filesystem(geometry: &Geometry, allocated: &[u32]) -> FilesystemInodes {
        let group = |allocated: &u32| GroupGeometry {
            allocated_inodes: *allocated,
            free_inodes: allocated / 4,
            ..GroupGeometry::default()
        };
        FilesystemInodes::new(geometry, &allocated.iter().map(group).collect::<Vec<_>>())
    }

    #[test]
    fn inodes_are_reserved_in_each_group() {
        let inodes = filesystem(&geometry(), &[64, 0, 0, 0]);
        assert_eq!((inodes.in_use(), inodes.allocated()), (Inodes(48), Bytes(64 * 512)));
        let one_is_full = filesystem(&geometry(), &[8192, 64, 0, 0]);
        for (inodes, most) in [(inodes, 4 * (1000 + 512)), (one_is_full, 8192 + 3 * (1000 + 512))] {
            let bytes = most * 512;
            assert_eq!(inodes.reservation(Inodes(1000)), Bytes(bytes + bytes / 128));
        }
    }

    #[test]
    fn inodes_never_exceed_their_share() {
        let inodes = filesystem(&geometry(), &[64, 0, 0, 0]);
        let share = (LIMIT + LIMIT / 32) * 512;
        for count in [LIMIT / 2, LIMIT, u64::MAX] {
            assert_eq!(inodes.reservation(Inodes(count)), Bytes(share + share / 128), "{count}");
            assert_eq!(inodes.further(Inodes(count)).reservation(Inodes(1)), Bytes(0), "{count}");
        }
        assert_eq!(inodes.further(Inodes(1000)).available, Inodes(LIMIT - LIMIT / 32 - 1000));
        assert_eq!(inodes.further(Inodes(LIMIT)).available, Inodes(0));
    }

    #[test]
    fn a_lowered_share_keeps_allocated_inodes() {
        let inodes = filesystem(&Geometry { imaxpct: 1, ..geometry() }, &[32768, 0, 0, 0]);
        assert_eq!(inodes.reservation(Inodes(40000)), with_trees(32768, 512));
    }

    #[test]
    fn without_a_share_inodes_are_unlimited() {
        let inodes = filesystem(&Geometry { imaxpct: 0, ..geometry() }, &[0; 4]);
        let further = inodes.further(Inodes(0));
        assert_eq!(further.available, Inodes(u64::MAX));
        assert_eq!(further.reservation(Inodes(1 << 40)), with_trees(1 << 42, 512));
        assert_eq!(inodes.reservation(Inodes(u64::MAX)), Bytes(u64::MAX));
    }

    fn any_filesystem() -> impl Strategy<Value = FilesystemInodes> {
        let groups = proptest::collection::vec(prop_oneof![0..100_000u32, any::<u32>()], 1..40);
        let shape = (0..=100u32, 0..1u64 << 52, prop_oneof![Just(256u32), Just(512), Just(2048)]);
        (groups, shape).prop_map(|(groups, (imaxpct, datablocks, inodesize))| {
            filesystem(&Geometry { imaxpct, datablocks, inodesize, ..geometry() }, &groups)
        })
    }

    fn further_inodes() -> impl Strategy<Value = FurtherInodes> {
        let reserved = prop_oneof![0..1u64 << 20, any::<u64>()];
        (any_filesystem(), reserved).prop_map(|(inodes, reserved)| inodes.further(Inodes(reserved)))
    }

    proptest! {
        #[test]
        fn further_inodes_reserve_enough(
            inodes in any_filesystem(),
            reserved in prop_oneof![0..1u64 << 20, any::<u64>()],
            more in prop_oneof![0..1u64 << 20, any::<u64>()],
        ) {
            let further = inodes.further(Inodes(reserved)).reservation(Inodes(more));
            let (before, after) = (
                inodes.reservation(Inodes(reserved)),
                inodes.reservation(Inodes(reserved.saturating_add(more))),
            );
            prop_assert!(after <= before.saturating_add(further), "{before:?} {after:?} {further:?}");
        }

        /// Groups get chunks only while all their inodes are in use.
        #[test]
        fn allocations_within_a_reservation_keep_it(
            inodes in any_filesystem(),
            reserved in 0..1u64 << 33,
            filled in proptest::collection::vec(0..=100u64, 40),
        ) {
            let mut later = inodes.clone();
            for (allocated, percent) in later.groups.iter_mut().zip(filled) {
                let most = (reserved + SPARE).max(*allocated);
                *allocated += (most - *allocated) * percent / 100;
            }
            prop_assume!(later.groups.iter().sum::<u64>() <= inodes.ceiling());
            prop_assert_eq!(later.reservation(Inodes(reserved)), inodes.reservation(Inodes(reserved)));
            prop_assert!(later.allocated() <= inodes.reservation(Inodes(reserved)));
        }
    }

    fn spec() -> impl Strategy<Value = VolumeSpec> {
        let kind = prop_oneof![Just(VolumeKind::Filesystem), Just(VolumeKind::Block)];
        let provisioning = prop_oneof![Just(Provisioning::Thick), Just(Provisioning::Thin)];
        let bytes_per_inode = prop_oneof![Just("512"), Just("16384"), Just("1073741824")];
        (kind, provisioning, bytes_per_inode).prop_map(|(kind, provisioning, bytes_per_inode)| {
            let mut spec = VolumeSpec::new(kind, Bytes(0));
            spec.image.provisioning = provisioning;
            spec.set("bytesPerInode", bytes_per_inode).unwrap();
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
        fn the_largest_capacity_just_fits(spec in spec(), space in space()) {
            let largest = space.largest_within(&spec);
            prop_assert_eq!(largest.0 % UNIT, 0);
            prop_assert!(largest == Bytes(0) || space.has(reservation_of(largest, &spec)));
            if let Some(next) = largest.0.checked_add(UNIT) {
                prop_assert!(!space.has(reservation_of(Bytes(next), &spec)));
            }
        }

        /// An error about too few bytes has the sizes, and an error about too few inodes has a remedy.
        #[test]
        fn errors_have_sizes_or_a_remedy(spec in spec(), space in space()) {
            let next = space.largest_within(&spec).saturating_add(Bytes(UNIT));
            let id = VolumeId::parse("pvc-1").unwrap();
            let error = space.lack_of(reservation_of(next, &spec), "create", ContentSource::Volume(&id));
            prop_assert_eq!(error.kind(), ErrorKind::NoSpace);
            prop_assert_eq!(error.sizes().is_none(), error.remedy().is_some(), "{}", error);
            if let Some(sizes) = error.sizes() {
                prop_assert!(sizes.requested > sizes.limit && sizes.limit == space.available, "{}", error);
            }
        }

        /// The caller does not know yet whether the volume will be a directory or an image.
        #[test]
        fn any_kind_fits_the_largest_size(spec in spec(), space in space()) {
            let largest = space.largest_volume_of_any_kind(&spec);
            for kind in [VolumeKind::Filesystem, VolumeKind::Block] {
                let spec = VolumeSpec { kind, ..spec.clone() };
                prop_assert!(largest <= space.largest_volume(&spec));
                prop_assert!(largest == Bytes(0) || space.has(reservation_of(largest, &spec)));
            }
        }
    }
}

//! The space that inodes take, which no quota is charged for.
//!
//! XFS allocates inodes in chunks of 64, and frees a chunk when none of its inodes is in use. An allocation group gets another
//! chunk only while all of its inodes are in use, so it never allocates more inodes than can be in use at once, and one chunk.
//! But the owner of a volume chooses the group. It can create all of its files in one, remove all but one of each chunk, and do
//! the same in the next. So inodes are reserved once for each group, up to the share of the file system that inodes may take
//! (`imaxpct`).
//!
//! Chunks of deleted volumes can remain, because files of other volumes are in them. They are therefore read each time.

use crate::error::{Context, Result};
use crate::sys::xfs::{self, Geometry, GroupGeometry};
use crate::units::{Bytes, Inodes};
use crate::volume_store::on_disk::DataFilesystem;

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
pub(super) mod tests {
    use proptest::prelude::*;

    use super::*;

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
        let bytes = 4 * (1000 + 512) * 512;
        assert_eq!(inodes.reservation(Inodes(1000)), Bytes(bytes + bytes / 128));
    }

    #[test]
    fn free_inodes_of_a_group_count_once() {
        let inodes = filesystem(&geometry(), &[8192, 64, 0, 0]);
        let bytes = (8192 + 3 * (1000 + 512)) * 512;
        assert_eq!(inodes.reservation(Inodes(1000)), Bytes(bytes + bytes / 128));
    }

    #[test]
    fn inodes_never_take_more_than_their_share() {
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
    fn a_lowered_share_keeps_what_is_allocated() {
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

    pub(in super::super) fn further_inodes() -> impl Strategy<Value = FurtherInodes> {
        let reserved = prop_oneof![0..1u64 << 20, any::<u64>()];
        (any_filesystem(), reserved).prop_map(|(inodes, reserved)| inodes.further(Inodes(reserved)))
    }

    proptest! {
        #[test]
        fn further_inodes_reserve_no_less_than_they_add(
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
}

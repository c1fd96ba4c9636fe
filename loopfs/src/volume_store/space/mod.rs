//! The space that is reserved for volumes, and the space that is free beside it.
//!
//! The limit of a directory is a reservation although nothing is allocated for it, so free blocks alone would let the
//! store overcommit. The same holds for a thin image, and for a clone: its blocks belong to the source until one of the two
//! is written, and then the file system must have other blocks. The inodes of a directory are not charged to its limit of
//! bytes, so their space is reserved beside it (`reservation.rs`).
//!
//! **The life of a reservation.** Space is free, then pending, then reserved, then deferred, then free again. Each
//! reservation is on disk, in the object that it is for, and no process has to remember it:
//!
//! | state | where it is recorded | begins | ends |
//! |---|---|---|---|
//! | pending, for an image that a live process creates or expands ([`PendingReservation`]) | `record.rs`: a lock on the record's file | before the first block is allocated | when the image has its name or its new size, or when the operation has failed |
//! | reserved, for an image | its recorded capacity, and the margin for its extent tree | when it gets its name, or is expanded | when its name is removed from the trash: after no process and no loop device has it open, and after its blocks are free |
//! | reserved, for a directory | the hard limits in the quota record of its project id | when the limits are set | when the limits are removed |
//! | deferred release, of a directory | the same limits | when the directory is removed from the trash | when nothing is charged to the project id any more |
//!
//! **The total** of all reservations is in one record (`record.rs`), which only the methods of [`SpaceBook`] change, under its lock and
//! in the same critical section as the reservation. The call that removes a limit or a name also releases its reservation, and a call
//! that finds it already removed releases nothing.
//!
//! **The total is an upper bound.** A method raises it before a reservation begins and lowers it after one has ended, so a
//! crash leaves it too high. Before such a section the method marks the total as inexact. The next call that returns the
//! space counts it again, and so does each call that would fail for lack of space.
//!
//! `docs/decisions/0017-reservations.md` gives the reasons.

mod book;
mod count;
mod record;
mod reservation;

pub(crate) use book::{PendingReservation, SpaceBook};
pub(crate) use count::shares_blocks;
pub use reservation::Space;
pub(crate) use reservation::{
    Reservation, recorded, reservation_of_directory, reservation_of_image, reservation_to_copy,
    reservation_to_expand, reservation_to_release, reserves_margin,
};

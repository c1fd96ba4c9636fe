//! What is reserved for volumes and what is free beside it: the one place that changes the total.
//!
//! A directory's limit is a reservation although nothing is allocated for it, so free blocks alone
//! would let the store overcommit. So it is with a thin image, and with a clone: its blocks are the source's until one of
//! the two is written, and then there must be others.
//!
//! **Where a reservation is.** Each one is on disk, in the object that it is for, and no process has to remember it:
//!
//! | reservation | begins | ends |
//! |---|---|---|
//! | of a directory: the hard limit in the quota record of its project id | when the limit is set | when the limit is removed, which is after the directory is gone and nothing is charged to the id |
//! | of an image: the capacity that is recorded on it, and what its extent tree may take | when it gets its name, or is grown | when its name is removed from the trash, which is after no process or loop device has it open, and after its blocks are free |
//! | pending: for an image that a live process creates or grows ([`PendingReservation`]) | before the first block is allocated | when the image has its name or size, or has neither |
//!
//! **The total** of all of them is kept in the account (`ledger`). It changes only with the account locked, and in the same
//! section as the reservation: the call that removes a limit or a name releases what that reserved, and a call that
//! finds it removed releases nothing. So any number of processes can empty, recover and grow concurrently, and none
//! releases a reservation twice.
//!
//! **The total is an upper bound.** It is raised before a reservation begins and lowered after one has ended, so a crash
//! leaves it too high. Before such a section it is marked as inexact, so what the crash left is counted again by the
//! next call that asks for the space, and by each call that would be refused. A count is inexact itself while images are
//! pending, for it finds their blocks too, and before the file system has freed the blocks of what was deleted.

mod book;
mod count;
mod image_space;
mod overhead;
mod pending;
mod record;
mod release;
mod reservation;
mod shared_blocks;

pub(crate) use book::{PendingReservation, SpaceBook};
pub(crate) use image_space::{Released, recorded};
pub(crate) use reservation::{
    reservation_of, reservation_to_clone, reservation_to_expand, reservation_to_snapshot, reserves_margin,
};

pub use reservation::Space;

//! A file system full of volumes.
//!
//! Every operation can be repeated. A crash at any point leaves either the state before or the state after, and
//! [`VolumeStore::recover`] removes incomplete volumes.
//!
//! # The states of a volume
//!
//! ```text
//!          create, clone        rename or link      confirm, publish    delete        empty_trash
//! (absent) -------------> staged -------------> pending -------> volume -------> trash -----------> gone
//!                                                                                  |                 ^
//!                                                 the directory is still open, or  |                 | last
//!                                                 files are still charged to it    +---> draining ---+ close
//! ```
//!
//! A volume whose specification does not say [`pending`](VolumeSpec::pending) skips that state. A pending volume can be deleted too.
//!
//! | state | on disk | after a crash |
//! |---|---|---|
//! | staged, a directory | `staging/ID.SUFFIX`, locked by its creator | recovery removes it, or moves it to the trash if it has content |
//! | staged, an image | a file without a name, and a pending reservation | the kernel frees the file, and the next call counts the total again |
//! | pending | `volumes/ID` with the attribute `trusted.loopfs.pending` | stays, and its creator confirms or deletes it |
//! | volume | `volumes/ID` | stays |
//! | trash | `trash/ID.SUFFIX` | stays, and the next call of [`VolumeStore::empty_trash`] in any process continues |
//! | draining | the limits of the project id, and a link `trash/draining:NUMBER` | the next emptying of the trash frees the id, or recovery |
//!
//! A snapshot has the same states, in `snapshots`, and is never pending.
//!
//! # Locks
//!
//! A call takes locks in the order of this table, from top to bottom, and may leave out any of them. Locks that are *tried* have no place
//! in the order, because no call waits for them: a staged directory is locked while the reservation record is locked, and its creator
//! locks the store and the record again while it holds that lock. A wait for a file lock ends after [`StoreOptions::lock_timeout`], if
//! the table has no other limit, with [`ErrorKind::Busy`](crate::ErrorKind::Busy). The kernel drops file locks when their process
//! dies, unless a child process or a device has the same open file description.
//!
//! The threads that use one [`VolumeStore`] wait for each other before the reservation record, and before the project ids. Only one of them
//! at a time tries the file lock, because flock(2) has no timeout and is tried at intervals.
//!
//! The module `publish` first locks the volume and then the target, in its own process and without a limit, before any of these.
//!
//! | lock | what it is | protects | taken after, before | who waits | after a crash |
//! |---|---|---|---|---|---|
//! | opening | flock of `staging` | initialising the store, its UUID and the recorded overhead | first; nothing is locked inside | [`VolumeStore::open`] | the next call completes the initialisation |
//! | turn | flock of `.loopfs`, shared or exclusive | exclusive callers from a stream of shared ones | only while waiting for the store | every change waits while an exclusive caller waits for the store | nothing |
//! | store | flock of `.loopfs/lock`, shared or exclusive | project ids of directories without a name, from recovery | after the turn, before all below | shared: create, expand, copy, delete, and the removal of a volume directory from the trash; exclusive: [`VolumeStore::recover`] and the retry of deferred releases. A copy of a directory releases it while it copies files | what [`VolumeStore::recover`] removes |
//! | publication records | flock of `.loopfs/users` | the records, and a volume from publishing while it is deleted | after the store (deletion only), before the mount cache and the lock of an image, which is tried | publishing, unpublishing and deleting. Held until the entry is in the trash | a record without a mount, until [`VolumeStore::sync_publications`] |
//! | image | flock of the image, through its own open file description | its size and its shared blocks, and from two devices | store: after the store, before the reservation record. Loop devices: after the set of files, with no lock of the store | expand and copy; attach until [`deadline`](crate::loop_device::AttachOptions::deadline), 10 s unless set; `detach_all` up to 60 s. Deletion tries it | post-EOF blocks, which recovery frees, or a capacity that the next expansion records |
//! | reservation record | flock of `.loopfs/promised` | the total of all reservations, with the change of the limit or the name that it is for. Also the test whether a deleted image is open, from counts, which open images | after store and image, before project ids | each change of a reservation, and [`VolumeStore::space`]. Held while a count reads all volumes, and not while a call waits for deferred frees, except after a failure to create a project | a total that is marked as inexact, and is counted again |
//! | pending reservation | `F_OFD_SETLK` on a range of `.loopfs/promised` | the reservation of an image that its process creates or expands | tried while the record is locked, in another slot if that is taken; released while the record is locked | no call | the locked ranges no longer add up to the record, so the next call counts the total |
//! | project ids | flock of `.loopfs/project-ids` | the choice of a free id until a directory is assigned to it, and the removal of limits | after the reservation record; recovery takes it without that | each allocation and release of an id | limits without a directory, which recovery removes |
//! | staged directory | flock of the directory in `staging` | a copy in progress from recovery | tried, by its creator while the record is locked and by recovery under the exclusive lock of the store; held until it has its name | no call | recovery removes the directory |
//! | trash entry | none: names are unique, and the process that removes a name has removed the entry. An image is tested with a write lease (`F_SETLEASE`) while the record is locked | | | a process that opens the image during the test waits for a moment | the entry stays |
//! | `mounts`, [`ProjectIds`](crate::project_quota::ProjectIds) and pending volumes | mutexes of this process | the mount cache; reusable and draining ids; the list of pending volumes | last; nothing is locked inside. The list of pending volumes is not locked while volumes are read | for a moment | nothing; a panic leaves them consistent |
//!
//! The locks of loop devices. None of these calls locks the store, the reservation record or the project ids:
//!
//! | lock | what it is | protects | taken after, before | who waits | after a crash |
//! |---|---|---|---|---|---|
//! | set of files | a mutex with a condition variable of this process | one call of this process for each file: flock does not exclude threads that pass the same locked descriptor | before the image | attach, `detach_all`, until their deadline | nothing |
//! | image | as above | one device of each access for each file | after the set of files | as above. Held while devices are queried, up to 10 s for one that does not respond | a device without checked properties, which `ensure_attached` compares |
//! | `/dev/loop-control` | flock, which systemd takes too | the index that `LOOP_CTL_GET_FREE` returned | after the image, only for [`IndexPolicy::Any`](crate::loop_device::IndexPolicy::Any) | until the deadline | nothing |
//! | index lock | `F_OFD_SETLK` on one byte of the image; the offset encodes the index | the link from the file to its device | tried after the image and, before the device is bound, after `/dev/loop-control` | no call | stays with the device, and ends without one |
//! | lease of an image | `F_SETLEASE`, read | a second writable device | tried after the image, and released immediately | a process that opens the image for writing, for a moment | nothing |
//! | removals of the pool | a mutex of this process | idle devices that are being removed from a call that needs one of them | after the image, before the pool state | an attachment that finds neither an idle nor a free index, and removals of surplus devices, until the last removal has ended or takes 2 s longer than the one before | nothing: the next scan finds what is idle |
//! | pool state, pool mounts | two mutexes of this process, never both | idle indices; the mount cache | last | for a moment, or for a read of the mount table | nothing: the next scan finds idle devices |
//! | calls of devices | a mutex with a condition variable of this process | one thread for each device that may not respond | last; held by the thread that queries or removes the device | other queries of the device: 1 s, 200 ms or 10 s; a removal does not wait | nothing |

mod clone;
mod condition;
mod create;
mod expand;
mod foreign;
mod id;
mod in_use;
mod on_disk;
mod pending;
mod recover;
mod settings;
mod snapshot;
mod source;
mod space;
mod spec;
mod staging;
mod store;
mod trash;
mod volume;

pub use condition::{AbnormalReason, Condition};
pub use foreign::{ChargedTo, ForeignEvidence, ForeignFiles};
pub use id::{SnapshotId, VolumeId};
pub use on_disk::{Annotations, DirectorySpec, Image};
pub use recover::Recovered;
pub use settings::{Setting, SettingError};
pub use snapshot::Snapshot;
pub use source::{ContentSource, OwnedContentSource};
pub use space::Space;
pub use spec::{
    ImageSpec, LogicalBlockSize, Provisioning, StoreCounts, StoreOptions, VolumeKind, VolumeSpec,
};
pub use store::VolumeStore;
pub use volume::{InodeStats, Volume, VolumeStats};

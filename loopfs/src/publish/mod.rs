//! Publishes volumes below a directory: binds the directory of a Filesystem volume, or the node of the loop device of a Block volume, to
//! a path that another program uses.
//!
//! A bind mount shows neither the store nor a loop device that it is used. [`Publisher`] therefore records and holds what it publishes, and
//! looks at the mounts before it detaches, reuses or deletes anything: the programs that use what it publishes may do anything to it. After a crash, [`Publisher::open`] finds what is published.
//!
//! ```no_run
//! use std::path::Path;
//! use std::sync::Arc;
//!
//! use loopfs::Bytes;
//! use loopfs::loop_device::{Access, LoopControl};
//! use loopfs::publish::{PublishMode, PublishOptions, PublishRoot, Publisher};
//! use loopfs::volume_store::{StoreOptions, VolumeId, VolumeKind, VolumeSpec, VolumeStore};
//!
//! # fn main() -> loopfs::Result<()> {
//! let store = VolumeStore::open(Path::new("/var/lib/volumes"), StoreOptions::default())?;
//! let root = Arc::new(PublishRoot::open(Path::new("/run/tenants"))?);
//! let loops = LoopControl::open()?;
//! let publisher = Publisher::open(store, loops, root, PublishOptions::default())?;
//!
//! let id = VolumeId::parse("database")?;
//! publisher.store().create(&id, &VolumeSpec::new(VolumeKind::Block, Bytes::GIB))?;
//! publisher.publish(&id, Path::new("alice/disk"), PublishMode::Device(Access::ReadWrite))?;
//! // ...
//! let _deferred = publisher.unpublish(&id, Path::new("alice/disk"))?;
//! publisher.delete(&id)?;
//! # Ok(())
//! # }
//! ```

mod block;
mod cleanup;
mod devices;
mod directory;
mod growth;
mod mounted;
mod publications;
mod publisher;
mod queries;
mod stale;
mod target;

pub use cleanup::Cleanup;
pub use devices::{Owner, PublishOptions, PublishedDevices};
pub use publications::Publications;
pub use publisher::{PublishMode, Publisher};
pub use target::{ClearedTarget, PublishRoot, Target};

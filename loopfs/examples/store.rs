//! Creates a directory volume and an image volume, expands them and deletes them.
//!
//! The argument is the mount point of a dedicated XFS, mounted with `prjquota`.
//!
//! ```console
//! # cargo run -p loopfs --example store -- /mnt/xfs
//! ```

use std::error::Error;
use std::path::PathBuf;

use loopfs::Bytes;
use loopfs::volume_store::{StoreOptions, VolumeId, VolumeKind, VolumeSpec, VolumeStore};

fn main() -> Result<(), Box<dyn Error>> {
    let mount_point = PathBuf::from(std::env::args_os().nth(1).ok_or("give the mount point of an XFS")?);
    let store = VolumeStore::open(&mount_point, StoreOptions::default())?;
    println!("file system {}; after the last crash: {:?}", store.filesystem_uuid(), store.recover()?);

    for kind in [VolumeKind::Filesystem, VolumeKind::Block] {
        let id = VolumeId::parse(&format!("example-{kind}"))?;
        let volume = store.create(&id, &VolumeSpec::new(kind, Bytes::MIB))?;
        println!("{id}: {}", volume.capacity());
        println!("{id}: {}", store.expand(&id, Bytes(4 << 20))?.capacity());
        println!("{id}: {:?}", store.stats(&id)?);
        drop(volume);
        store.delete(&id)?;
    }
    println!("{:?}", store.space()?);
    println!("{} volumes removed", store.empty_trash()?);
    Ok(())
}

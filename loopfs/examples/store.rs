//! Creates, publishes, expands, snapshots and deletes the volumes of a store.
//!
//! A service would keep the publisher, which holds the devices that it has published.
//!
//! Needs Linux 5.14, `CAP_SYS_ADMIN`, and an XFS of its own, mounted with `prjquota` and with reflink for snapshots.
//!
//! ```console
//! # cargo run -p loopfs --example store -- /mnt/xfs create data 1048576
//! # cargo run -p loopfs --example store -- /mnt/xfs publish data /srv/data
//! # cargo run -p loopfs --example store -- /mnt/xfs expand data 4194304
//! ```

use std::error::Error;
use std::ffi::OsString;
use std::path::Path;
use std::sync::Arc;

use loopfs::Bytes;
use loopfs::loop_device::{Access, LoopControl};
use loopfs::mount::MountFlags;
use loopfs::publish::{Cleanup, PublishMode, PublishOptions, PublishRoot, Publisher};
use loopfs::volume_store::{SnapshotId, StoreOptions, VolumeId, VolumeKind, VolumeSpec, VolumeStore};

const USAGE: &str = "usage: store MOUNT_POINT create VOLUME BYTES | create-block VOLUME BYTES | publish VOLUME TARGET | expand VOLUME BYTES \
                     | snapshot VOLUME SNAPSHOT | unpublish VOLUME TARGET | delete VOLUME \
                     | delete-snapshot SNAPSHOT | empty-trash";

fn publish(publisher: &Publisher, id: &VolumeId, target: &Path) -> loopfs::Result<()> {
    let mode = match publisher.store().volume(id)?.kind() {
        VolumeKind::Filesystem => {
            PublishMode::Directory(MountFlags { nosuid: true, nodev: true, ..MountFlags::default() })
        }
        VolumeKind::Block => PublishMode::Device(Access::ReadWrite),
    };
    publisher.publish(id, target, mode)
}

fn run() -> Result<(), Box<dyn Error>> {
    let args = std::env::args_os().skip(1).map(OsString::into_string).collect::<Result<Vec<_>, _>>();
    let args = args.map_err(|argument| format!("{} is not UTF-8", argument.display()))?;
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let [mount_point, command, arguments @ ..] = args.as_slice() else { return Err(USAGE.into()) };
    let open = || VolumeStore::open(Path::new(mount_point), StoreOptions::default());
    let publisher = |target: &Path| {
        let root = Arc::new(PublishRoot::open(target.parent().unwrap_or(target))?);
        Publisher::open(open()?, LoopControl::open()?, root, PublishOptions::default())
    };
    let number = |text: &str| text.parse::<u64>().map(Bytes).map_err(|error| format!("{text}: {error}"));
    match (*command, arguments) {
        (create @ ("create" | "create-block"), [volume, bytes]) => {
            let kind = if create == "create" { VolumeKind::Filesystem } else { VolumeKind::Block };
            let spec = VolumeSpec::new(kind, number(bytes)?);
            println!("{}", open()?.create(&VolumeId::parse(volume)?, &spec)?.capacity());
        }
        ("publish", [volume, target]) => {
            let target = std::path::absolute(target)?;
            publish(&publisher(&target)?, &VolumeId::parse(volume)?, &target)?;
        }
        ("expand", [volume, bytes]) => {
            let expanded = open()?.expand(&VolumeId::parse(volume)?, number(bytes)?)?;
            // A service calls Publisher::expand, which does both.
            if expanded.kind() == VolumeKind::Block {
                let image = expanded.open_image(Access::ReadOnly)?;
                for device in LoopControl::open()?.find(&image)? {
                    device.refresh_capacity(&image)?;
                }
            }
            println!("{}", expanded.capacity());
        }
        ("snapshot", [volume, snapshot]) => {
            let (volume, snapshot) = (VolumeId::parse(volume)?, SnapshotId::parse(snapshot)?);
            println!("{}", open()?.create_snapshot(&volume, &snapshot)?.used()?);
        }
        ("unpublish", [volume, target]) => {
            let target = std::path::absolute(target)?;
            let id = VolumeId::parse(volume)?;
            if publisher(&target)?.unpublish(&id, &target)? == Cleanup::DetachDeferred {
                return Err("a process has the device open; repeat the call when it has ended".into());
            }
        }
        ("delete", [volume]) => println!("{}", open()?.delete(&VolumeId::parse(volume)?)?),
        ("delete-snapshot", [snapshot]) => {
            println!("{}", open()?.delete_snapshot(&SnapshotId::parse(snapshot)?)?);
        }
        // A deletion only renames. This frees the space, for example in the background.
        ("empty-trash", []) => println!("{}", open()?.empty_trash()?),
        _ => return Err(USAGE.into()),
    }
    Ok(())
}

fn main() {
    if let Err(error) = run() {
        eprintln!("store: {error}");
        std::process::exit(1);
    }
}

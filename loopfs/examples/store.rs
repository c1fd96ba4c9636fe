//! Creates, publishes, expands, snapshots and deletes the volumes of a store.
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
use std::process::ExitCode;

use loopfs::Bytes;
use loopfs::mount::{MountFlags, bind_mount, table, unmount};
use loopfs::volume_store::{SnapshotId, StoreOptions, VolumeId, VolumeKind, VolumeSpec, VolumeStore};

const USAGE: &str = "usage: store MOUNT_POINT create VOLUME BYTES | publish VOLUME DIRECTORY | expand VOLUME BYTES \
                     | snapshot VOLUME SNAPSHOT | unpublish VOLUME DIRECTORY | delete VOLUME \
                     | delete-snapshot SNAPSHOT | empty-trash";

fn publish(store: &VolumeStore, id: &VolumeId, target: &Path) -> Result<(), Box<dyn Error>> {
    let directory = store.volume(id)?.open_dir()?;
    // The record is written before the mount, so that no other process deletes the volume in between.
    store.record_publication(id, target)?;
    let mounted =
        bind_mount(directory, target, MountFlags { nosuid: true, nodev: true, ..MountFlags::default() });
    // If the mount failed, this removes the record.
    store.sync_publication(id, &table::read()?)?;
    Ok(mounted?)
}

fn run() -> Result<(), Box<dyn Error>> {
    let args = std::env::args_os().skip(1).map(OsString::into_string).collect::<Result<Vec<_>, _>>();
    let args = args.map_err(|argument| format!("{} is not UTF-8", argument.display()))?;
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let [mount_point, command, arguments @ ..] = args.as_slice() else { return Err(USAGE.into()) };
    let open = || VolumeStore::open(Path::new(mount_point), StoreOptions::default());
    let number = |text: &str| text.parse::<u64>().map(Bytes).map_err(|error| format!("{text}: {error}"));
    match (*command, arguments) {
        ("create", [volume, bytes]) => {
            let spec = VolumeSpec::new(VolumeKind::Filesystem, number(bytes)?);
            println!("{}", open()?.create(&VolumeId::parse(volume)?, &spec)?.capacity());
        }
        ("publish", [volume, target]) => publish(&open()?, &VolumeId::parse(volume)?, Path::new(target))?,
        ("expand", [volume, bytes]) => {
            println!("{}", open()?.expand(&VolumeId::parse(volume)?, number(bytes)?)?.capacity());
        }
        ("snapshot", [volume, snapshot]) => {
            let (volume, snapshot) = (VolumeId::parse(volume)?, SnapshotId::parse(snapshot)?);
            println!("{}", open()?.create_snapshot(&volume, &snapshot)?.used()?);
        }
        ("unpublish", [volume, target]) => {
            unmount(Path::new(target))?;
            open()?.sync_publication(&VolumeId::parse(volume)?, &table::read()?)?;
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

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("store: {error}");
            ExitCode::FAILURE
        }
    }
}

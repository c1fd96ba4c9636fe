//! The end of a case: once all volumes are deleted, nothing is left.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::path::Path;

use loopfs::loop_device::{Access, LoopControl, LoopDevice};
use loopfs::mount::table::Mount;
use loopfs::volume_store::{Space, VolumeKind, VolumeStore};

use super::invariants::{entries, quotas};
use crate::environment::{MIB, quota, wait_for_deferred_frees, xfs};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// For blocks of quota records and directories.
const TOLERANCE: u64 = MIB;
const EMPTY: [&str; 5] = ["volumes", "snapshots", "trash", "staging", ".loopfs/users"];
const FIXED: [&str; 5] = ["format", "lock", "project-ids", "promised", "users"];

/// Deletes all volumes, while no other process uses the store, and checks that nothing of them is left.
pub(super) fn check(store: &VolumeStore, control: &LoopControl, before: Space) -> Result<()> {
    delete_all(store, control)?;
    for directory in EMPTY {
        let left = entries(directory)?;
        if !left.is_empty() {
            return Err(format!("invariant: {directory} is empty: {left:?}").into());
        }
    }
    let names =
        entries(".loopfs")?.into_iter().filter_map(|path| Some(path.file_name()?.to_str()?.to_owned()));
    let (names, fixed): (BTreeSet<String>, _) = (names.collect(), FIXED.map(str::to_owned).into());
    if names != fixed {
        return Err(format!("invariant: .loopfs has the files {fixed:?}: {names:?}").into());
    }
    wait_for_deferred_frees();
    let quotas = quotas()?;
    if !quotas.is_empty() {
        return Err(format!("invariant: no project has usage or limits: {:?}", quotas.values()).into());
    }
    let devices = control.list()?.devices;
    if !devices.is_empty() {
        return Err(format!("invariant: no loop device is attached: {devices:?}").into());
    }
    let space = store.space()?;
    let lost = before.available.0.saturating_sub(space.available.0);
    if space.reserved.0 != 0 || lost > TOLERANCE {
        return Err(
            format!("invariant: all space is free again: {space:?}, and {before:?} at the start").into()
        );
    }
    Ok(())
}

fn delete_all(store: &VolumeStore, control: &LoopControl) -> Result<()> {
    store.sync_publications(Path::new("/"), || Ok(Vec::<Mount>::new()))?;
    for id in store.list()? {
        let volume = store.volume(&id)?;
        if volume.kind() == VolumeKind::Block {
            control.detach_all(volume.open_image(Access::ReadOnly)?)?;
        }
        drop(volume);
        store.delete(&id)?;
    }
    for id in store.snapshots()? {
        store.delete_snapshot(&id)?;
    }
    detach_all(control)?;
    store.empty_trash()?;
    store.recover()?;
    Ok(())
}

/// Detaches the devices of deleted images too, which a killed process may have attached.
fn detach_all(control: &LoopControl) -> Result<()> {
    for device in control.list()?.devices {
        control.detach(LoopDevice::open_binding(&device.binding)?)?;
    }
    Ok(())
}

/// Removes what a failed case has left, without the functions of the store.
pub(super) fn remove_everything() {
    detach_all(&LoopControl::open().expect("loop control")).expect("detach the devices");
    for directory in EMPTY {
        for entry in entries(directory).expect("the entries of the store") {
            remove(&entry).expect("remove an entry of the store");
        }
    }
    wait_for_deferred_frees();
    let root = File::open(xfs()).expect("the file system");
    for usage in quotas().expect("the quotas").values() {
        quota(&root).clear_limits(usage.id).expect("remove the limits");
    }
}

fn remove(entry: &Path) -> std::io::Result<()> {
    if entry.is_dir() { fs::remove_dir_all(entry) } else { fs::remove_file(entry) }
}

//! What holds at each quiet point, read from the file system without the functions of the store.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use loopfs::project_quota::{Usage, project_of};
use loopfs::test_support;
use loopfs::volume_store::{Space, StoreOptions};
use nix::errno::Errno;
use nix::unistd::Pid;

use super::model::State;
use super::observed::path;
use super::operation::{Entry, Form};
use crate::environment::{MIB, quota, xfs};

/// For blocks of extent trees.
const TOLERANCE: u64 = 64 << 10;
/// The directories of the store whose entries may have a project.
const DIRECTORIES: [&str; 4] = ["volumes", "snapshots", "trash", "staging"];

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// Checks the invariants. `abandoned` says whether a process was killed since the last recovery.
pub(super) fn check(state: &State, space: Space, abandoned: bool) -> Result<()> {
    let quotas = quotas()?;
    projects(state, &quotas)?;
    reservations(space, &quotas)?;
    if !abandoned && let Some(entry) = entries("staging")?.first() {
        return Err(format!("staging is empty while all processes live and are idle: {entry:?}").into());
    }
    Ok(())
}

/// An image that a process has open keeps its name, because it keeps its blocks: without one, nothing reserves them. At a quiet
/// point the processes have only the volumes open that they hold.
pub(super) fn open_images_have_names(processes: impl Iterator<Item = Pid>) -> Result<()> {
    let device = fs::metadata(xfs())?.dev();
    for process in processes {
        for descriptor in fs::read_dir(format!("/proc/{process}/fd"))? {
            let descriptor = descriptor?.path();
            let Ok(opened) = fs::metadata(&descriptor) else { continue };
            if opened.is_file() && opened.dev() == device && opened.nlink() == 0 {
                let target = fs::read_link(&descriptor)?;
                return Err(format!("an image that a process has open keeps its name: {target:?}").into());
            }
        }
    }
    Ok(())
}

/// Returns each project of the store's range that has usage or limits.
pub(super) fn quotas() -> Result<BTreeMap<u32, Usage>> {
    let root = File::open(xfs())?;
    let usages = quota(&root).ids(StoreOptions::default().project_ids);
    Ok(usages.map(|usage| usage.map(|usage| (usage.id.get(), usage))).collect::<loopfs::Result<_>>()?)
}

pub(super) fn entries(directory: &str) -> Result<Vec<PathBuf>> {
    Ok(fs::read_dir(xfs().join(directory))?.map(|entry| Ok(entry?.path())).collect::<std::io::Result<_>>()?)
}

/// Each directory has a project of its own with a limit, and the limit of a volume is its capacity.
fn projects(state: &State, quotas: &BTreeMap<u32, Usage>) -> Result<()> {
    for usage in quotas.values() {
        if usage.limits.bytes.is_none() {
            return Err(format!("a project with usage has a limit: {usage:?}").into());
        }
    }
    let mut of_entries = BTreeSet::new();
    for directory in DIRECTORIES {
        for entry in entries(directory)?.into_iter().filter(|entry| entry.is_dir()) {
            let project = project_of(File::open(&entry)?)?;
            let is_entry = matches!(directory, "volumes" | "snapshots");
            if project == 0 && !is_entry {
                continue;
            }
            if !quotas.contains_key(&project) {
                return Err(format!(
                    "each directory has a project of the range with a limit: {entry:?}, {project}"
                )
                .into());
            }
            // Directories in the trash may be parts of the same volume.
            let unique = if is_entry { of_entries.insert(project) } else { !of_entries.contains(&project) };
            if !unique {
                return Err(format!("each entry has a project of its own: {entry:?}, {project}").into());
            }
        }
    }
    for (number, volume) in state.volumes.iter().filter(|(_, volume)| volume.form == Form::Directory) {
        let usage = &quotas[&project_of(File::open(path(Entry::Volume(*number)))?)?];
        let limits = [usage.limits.bytes.map(|bytes| bytes.0), usage.limits.inodes.map(|inodes| inodes.0)];
        if limits != [Some(volume.capacity), Some(volume.capacity / 16384)] {
            return Err(
                format!("the limits of v{number} are its capacity {}: {limits:?}", volume.capacity).into()
            );
        }
    }
    Ok(())
}

/// The reserved bytes are those of the limits and the images.
fn reservations(space: Space, quotas: &BTreeMap<u32, Usage>) -> Result<()> {
    let (mut least, mut most) = (0, 0);
    for usage in quotas.values() {
        let limit = usage.limits.bytes.unwrap_or_default().0;
        least += limit;
        most += limit.max(usage.bytes.0);
    }
    for directory in ["volumes", "snapshots", "trash"] {
        for image in entries(directory)?.iter().filter(|entry| entry.is_file()) {
            let of_image = reserved_for(image)?;
            least += of_image.0;
            most += of_image.1;
        }
    }
    let reserved = space.reserved.0;
    if !(least.saturating_sub(TOLERANCE)..=most + TOLERANCE).contains(&reserved) {
        return Err(
            format!("the reserved bytes are those of the volumes, {least} to {most}: {reserved}").into()
        );
    }
    if reserved > space.total.0 {
        return Err(format!("the store does not overcommit: {space:?}").into());
    }
    Ok(())
}

/// Returns the least and the greatest number of bytes that an image reserves. An image that may share blocks and shares none keeps the
/// margin for its extent tree until the next count.
fn reserved_for(image: &Path) -> Result<(u64, u64)> {
    let status = fs::metadata(image)?;
    let capacity: u64 = attribute(image, "trusted.loopfs.capacity")?.map_or(Ok(0), |text| text.parse())?;
    let (size, allocated) = (status.len().max(capacity), status.blocks() * 512);
    if attribute(image, "trusted.loopfs.snapshot")?.is_some() {
        return Ok((size, size.max(allocated)));
    }
    let margin = size / 128 + MIB;
    let shares = test_support::extents(File::open(image)?)?.1 > 0;
    let may_share = attribute(image, "trusted.loopfs.shares")?.is_some();
    let thin = is_thin(image)?;
    let needed = |has_margin| if has_margin { margin } else { 0 };
    Ok((size + needed(thin || shares), size.max(allocated) + needed(thin || may_share)))
}

pub(super) fn is_thin(image: &Path) -> Result<bool> {
    let settings = attribute(image, "trusted.loopfs.image")?.ok_or("an image without settings")?;
    Ok(settings.contains("provisioning=thin"))
}

fn attribute(file: &Path, name: &str) -> Result<Option<String>> {
    let mut text = vec![0; 256];
    match rustix::fs::getxattr(file, name, &mut text[..]) {
        Ok(length) => {
            text.truncate(length);
            Ok(Some(String::from_utf8(text)?))
        }
        Err(errno) if errno.raw_os_error() == Errno::ENODATA as i32 => Ok(None),
        Err(errno) => Err(errno.into()),
    }
}

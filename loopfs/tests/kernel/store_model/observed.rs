//! The state of the store, as another process finds it at a quiet point.

use std::fs::{self, File};
use std::io::ErrorKind;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use loopfs::loop_device::{Access, LoopControl};
use loopfs::volume_store::{
    OwnedContentSource, Provisioning, SnapshotId, Volume as Opened, VolumeId, VolumeKind, VolumeStore,
};

use super::model::{Snapshot, State, Volume};
use super::operation::{Entry, Form};
use super::worker::{snapshot_id, volume_id};
use crate::environment::xfs;

const BLOCK: usize = 4096;
/// The content of an entry that holds neither a number nor nothing.
const MIXED: u64 = u64::MAX;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

pub(super) fn observe(store: &VolumeStore, control: &LoopControl) -> Result<State> {
    let mut state = State::default();
    for id in store.list()? {
        state.volumes.insert(number(id.as_str(), "v")?, volume(store, control, &id)?);
    }
    for id in store.snapshots()? {
        state.snapshots.insert(number(id.as_str(), "s")?, snapshot(store, &id)?);
    }
    Ok(state)
}

fn number(id: &str, prefix: &str) -> Result<u8> {
    let number = id.strip_prefix(prefix).ok_or_else(|| format!("nothing created {id}"))?;
    Ok(number.parse()?)
}

fn volume(store: &VolumeStore, control: &LoopControl, id: &VolumeId) -> Result<Volume> {
    let opened = store.volume(id)?;
    let source = opened.source()?.map(|source| match source {
        OwnedContentSource::Volume(id) => number(id.as_str(), "v").map(Entry::Volume),
        OwnedContentSource::Snapshot(id) => number(id.as_str(), "s").map(Entry::Snapshot),
    });
    let in_use = match opened.kind() {
        VolumeKind::Filesystem => fs::symlink_metadata(xfs().join(".loopfs/users").join(id.as_str())).is_ok(),
        VolumeKind::Block => !control.find(opened.open_image(Access::ReadOnly)?)?.is_empty(),
    };
    Ok(Volume {
        form: form(&opened)?,
        capacity: opened.capacity().0,
        source: source.transpose()?,
        content: content(&path(Entry::Volume(number(id.as_str(), "v")?)))?,
        in_use,
        incarnation: 0,
    })
}

fn snapshot(store: &VolumeStore, id: &SnapshotId) -> Result<Snapshot> {
    let opened = store.snapshot(id)?;
    let path = path(Entry::Snapshot(number(id.as_str(), "s")?));
    let form = match opened.kind() {
        VolumeKind::Filesystem => Form::Directory,
        VolumeKind::Block if super::invariants::is_thin(&path)? => Form::ThinImage,
        VolumeKind::Block => Form::ThickImage,
    };
    let source = number(opened.source().as_str(), "v")?;
    Ok(Snapshot { form, capacity: opened.capacity().0, source, content: content(&path)?, incarnation: 0 })
}

fn form(opened: &Opened) -> Result<Form> {
    Ok(match opened.image()?.map(|image| image.provisioning) {
        None => Form::Directory,
        Some(Provisioning::Thick) => Form::ThickImage,
        Some(Provisioning::Thin) => Form::ThinImage,
    })
}

pub(super) fn path(entry: Entry) -> PathBuf {
    match entry {
        Entry::Volume(number) => xfs().join("volumes").join(volume_id(number).as_str()),
        Entry::Snapshot(number) => xfs().join("snapshots").join(snapshot_id(number).as_str()),
    }
}

/// Returns the file in which the content of an entry is.
fn content_file(entry: &Path) -> PathBuf {
    if entry.is_dir() { entry.join("content") } else { entry.to_owned() }
}

fn content(entry: &Path) -> Result<u64> {
    let file = match File::open(content_file(entry)) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(0),
        file => file?,
    };
    let mut block = [0; BLOCK];
    file.read_exact_at(&mut block, 0)?;
    let (numbers, _) = block.as_chunks();
    let first = numbers[0];
    Ok(if numbers.iter().all(|number| *number == first) { u64::from_ne_bytes(first) } else { MIXED })
}

/// Writes a number to a volume.
pub(super) fn write(volume: u8, number: u64) -> Result<()> {
    let file = File::options()
        .write(true)
        .create(true)
        .truncate(false)
        .open(content_file(&path(Entry::Volume(volume))))?;
    Ok(file.write_all_at(&number.to_ne_bytes().repeat(BLOCK / 8), 0)?)
}

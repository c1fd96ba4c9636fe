//! A process that performs operations: it reads one from each line of its standard input, and prints the outcome.

use std::collections::HashMap;
use std::io::BufRead;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use loopfs::loop_device::{Access, AttachOptions, BlockSize, LoopControl};
use loopfs::mount::{MountFlags, bind_mount, table, unmount};
use loopfs::volume_store::{
    ContentSource, SnapshotId, StoreOptions, Volume, VolumeId, VolumeKind, VolumeStore,
};
use loopfs::{Bytes, Error};
use nix::sys::stat::fstat;

use super::operation::{Entry, Operation, Outcome, VOLUMES};
use super::system_calls;
use crate::environment::{id, path_from, xfs};
use crate::failure::Failure;

/// Set in a process that performs operations.
pub(super) const ROLE: &str = "LOOPFS_TEST_STORE_WORKER";
/// Precedes the thread id in the first line that the process prints.
pub(super) const READY: &str = "ready: ";
/// The first line that the process reads, once it is traced.
pub(super) const TRACED: &str = "traced";
/// Precedes each outcome.
pub(super) const OUTCOME: &str = "outcome: ";

pub(super) fn volume_id(number: u8) -> VolumeId {
    id(&Entry::Volume(number).to_string())
}

pub(super) fn snapshot_id(number: u8) -> SnapshotId {
    SnapshotId::parse(&Entry::Snapshot(number).to_string()).expect("a snapshot id")
}

/// Performs operations until the standard input ends.
pub(super) fn serve() {
    let mut worker = Worker {
        store: open_store(),
        control: LoopControl::open().expect("loop control"),
        targets: path_from("LOOPFS_TEST_SCRATCH").join("store-model"),
        held: HashMap::new(),
    };
    println!("{READY}{}", nix::unistd::gettid());
    let mut lines = std::io::stdin().lock().lines();
    let traced = lines.next().expect("a line").expect("a line");
    assert_eq!(traced, TRACED);
    system_calls::stop_before_them();
    for line in lines {
        let operation = serde_json::from_str(&line.expect("a line")).expect("an operation");
        let (outcome, message) = match worker.perform(operation) {
            Ok(outcome) => (outcome, String::new()),
            Err(Failed(failure, message)) => (Outcome::Failed(failure), message),
        };
        println!("{OUTCOME}{}", serde_json::to_string(&(outcome, message)).expect("an outcome as text"));
    }
}

/// An operation that failed.
struct Failed(Failure, String);

impl From<Error> for Failed {
    fn from(error: Error) -> Self {
        Self(error.kind().into(), error.to_string())
    }
}

type Result<T> = std::result::Result<T, Failed>;

fn open_store() -> VolumeStore {
    VolumeStore::open(&xfs(), StoreOptions::default()).expect("the store")
}

struct Worker {
    store: VolumeStore,
    control: LoopControl,
    /// The directory in which the volumes are mounted.
    targets: PathBuf,
    held: HashMap<u8, Volume>,
}

impl Worker {
    fn perform(&mut self, operation: Operation) -> Result<Outcome> {
        let capacity = |Bytes(capacity)| Ok(Outcome::Capacity(capacity));
        let done = |result: loopfs::Result<()>| result.map(|()| Outcome::Done).map_err(Failed::from);
        match operation {
            Operation::Create { volume, form, capacity: size } => {
                capacity(self.store.create(&volume_id(volume), &form.spec(size))?.capacity())
            }
            Operation::Clone { source, volume, form, capacity: size } => {
                let (target, spec) = (volume_id(volume), form.spec(size));
                let made = match source {
                    Entry::Volume(source) => {
                        self.store.clone_from(ContentSource::Volume(&volume_id(source)), &target, &spec)
                    }
                    Entry::Snapshot(source) => {
                        self.store.clone_from(ContentSource::Snapshot(&snapshot_id(source)), &target, &spec)
                    }
                };
                capacity(made?.capacity())
            }
            Operation::Snapshot { source, snapshot } => {
                capacity(self.store.create_snapshot(&volume_id(source), &snapshot_id(snapshot))?.capacity())
            }
            Operation::Expand { volume, capacity: size } => {
                capacity(self.store.expand(&volume_id(volume), Bytes(size))?.capacity())
            }
            Operation::Delete { volume } => Ok(Outcome::Deleted(self.store.delete(&volume_id(volume))?)),
            Operation::DeleteSnapshot { snapshot } => {
                Ok(Outcome::Deleted(self.store.delete_snapshot(&snapshot_id(snapshot))?))
            }
            Operation::EmptyTrash => done(self.store.empty_trash().map(drop)),
            Operation::Recover => done(self.store.recover().map(drop)),
            Operation::CountSpace => done(self.store.space().map(drop)),
            Operation::Publish { volume } => self.publish(&volume_id(volume)),
            Operation::Unpublish { volume } => self.unpublish(&volume_id(volume)),
            Operation::SyncPublications => done(self.store.sync_publications(Path::new("/"), table::read)),
            Operation::Attach { volume } => self.attach(&volume_id(volume)),
            Operation::Detach { volume } => self.detach(&volume_id(volume)),
            Operation::Hold { volume } => {
                let opened = self.store.volume(&volume_id(volume))?;
                self.held.insert(volume, opened);
                Ok(Outcome::Done)
            }
            Operation::LetGo => {
                self.held.clear();
                Ok(Outcome::Done)
            }
            Operation::Restart => {
                self.held.clear();
                for volume in 0..VOLUMES {
                    unmount(&self.targets.join(volume_id(volume).as_str()))?;
                }
                self.store = open_store();
                Ok(Outcome::Done)
            }
        }
    }

    fn publish(&self, id: &VolumeId) -> Result<Outcome> {
        let target = self.targets.join(id.as_str());
        if self.store.volume(id)?.kind() != VolumeKind::Filesystem {
            return Err(Failed(Failure::InvalidInput, "only directories are mounted".to_owned()));
        }
        self.store.record_publication(id, Path::new("/"), &target)?;
        let mounted = self.mount(id, &target);
        if mounted.is_err() {
            self.store.sync_publication(id, Path::new("/"), &table::read()?)?;
        }
        mounted.map(|()| Outcome::Done)
    }

    fn mount(&self, id: &VolumeId, target: &Path) -> Result<()> {
        let directory = self.store.volume(id)?.open_dir()?;
        if table::at(&table::read()?, target).is_some() {
            return Ok(());
        }
        std::fs::create_dir_all(target).expect("a mount point");
        Ok(bind_mount(directory, target, MountFlags::default())?)
    }

    fn unpublish(&self, id: &VolumeId) -> Result<Outcome> {
        unmount(&self.targets.join(id.as_str()))?;
        self.store.sync_publication(id, Path::new("/"), &table::read()?)?;
        Ok(Outcome::Done)
    }

    /// Attaches the image, unless the volume is deleted in the meantime.
    fn attach(&self, id: &VolumeId) -> Result<Outcome> {
        let image = self.store.volume(id)?.open_image(Access::ReadOnly)?;
        // From Linux 6.15 on, an image that shares blocks takes direct I/O only in blocks of 4096 bytes. Another process may clone it
        // during the call.
        let options = AttachOptions::new(Access::ReadWrite).block_size(BlockSize::MatchDirectIo);
        drop(self.control.ensure_attached(&image, &options)?);
        let inode = |file: &OwnedFd| fstat(file).expect("the status of an image").st_ino;
        let current = self.store.volume(id).and_then(|volume| volume.open_image(Access::ReadOnly));
        if current.is_ok_and(|current| inode(&current) == inode(&image)) {
            return Ok(Outcome::Done);
        }
        self.control.detach_all(&image)?;
        Err(Failed(Failure::NotFound, "the volume was deleted in the meantime".to_owned()))
    }

    fn detach(&self, id: &VolumeId) -> Result<Outcome> {
        let image = self.store.volume(id)?.open_image(Access::ReadOnly)?;
        self.control.detach_all(image)?;
        Ok(Outcome::Done)
    }
}

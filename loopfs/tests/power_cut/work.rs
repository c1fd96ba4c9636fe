//! Threads that create, copy, expand, write and delete volumes, and write a line before and after each
//! operation.

use std::fs::File;
use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::thread;

use loopfs::loop_device::Access;
use loopfs::project_quota::{Limits, ProjectId, ProjectQuota, assign_project, project_of};
use loopfs::volume_store::{
    Annotations, ContentSource, SnapshotId, StoreOptions, VolumeId, VolumeKind, VolumeSpec, VolumeStore,
};
use loopfs::{Bytes, Inodes};
use nix::fcntl::{FallocateFlags, fallocate};

use crate::journal::Journal;
use crate::line::{Line, Operation, Phase};

const MIB: u64 = 1 << 20;
/// The number of threads, large enough that an operation is in progress at any moment.
const THREADS: usize = 4;
/// The maximum number of volumes of a thread. All volumes together are far from filling the disk.
const MAX_VOLUMES: usize = 5;

#[test]
fn until_the_power_is_cut() {
    let seed = std::env::var("LOOPFS_TEST_SEED").expect("LOOPFS_TEST_SEED is not set");
    let seed: u64 = seed.parse().expect("a number in LOOPFS_TEST_SEED");
    let root = crate::xfs();
    let store = crate::store();
    let journal = Journal::create(&root).expect("the journal");
    thread::scope(|scope| {
        for thread in 0..THREADS {
            let mut worker = Worker {
                thread,
                store: &store,
                root: &root,
                journal: &journal,
                random: Random(seed.wrapping_mul(THREADS as u64).wrapping_add(thread as u64)),
                volumes: Vec::new(),
                made: 0,
            };
            scope.spawn(move || worker.run());
        }
    });
    panic!("the journal is full, and the power was not cut");
}

struct Worker<'a> {
    thread: usize,
    store: &'a VolumeStore,
    root: &'a Path,
    journal: &'a Journal,
    random: Random,
    volumes: Vec<Known>,
    made: u64,
}

/// A volume or a snapshot of this thread.
#[derive(Clone, Debug)]
struct Known {
    id: String,
    kind: VolumeKind,
    capacity: u64,
    blocks: u64,
    snapshot: bool,
}

impl Worker<'_> {
    fn run(&mut self) {
        loop {
            let operation = self.choose();
            if !self.write_line(Phase::Intent, &operation) {
                return;
            }
            self.perform(&operation).unwrap_or_else(|error| panic!("{operation:?}: {error}"));
            if !self.write_line(Phase::Done, &operation) {
                return;
            }
        }
    }

    fn write_line(&self, phase: Phase, operation: &Operation) -> bool {
        let line = Line { thread: self.thread, phase, operation: operation.clone() };
        self.journal.write_line(&line).expect("a line")
    }

    fn choose(&mut self) -> Operation {
        if self.volumes.len() < 2 {
            return self.create();
        }
        let chosen = self.random.below(self.volumes.len() as u64) as usize;
        let Known { id, kind, capacity, blocks, snapshot } = self.volumes[chosen].clone();
        let room = self.volumes.len() < MAX_VOLUMES;
        match self.random.below(100) {
            0..20 if room => self.create(),
            // A snapshot can only be copied and deleted.
            0..85 if snapshot => {
                if room {
                    self.copy(kind, capacity, id)
                } else {
                    Operation::Delete { kind, volume: id }
                }
            }
            20..30 if room => {
                self.made += 1;
                let snapshot = format!("s{}-{}", self.thread, self.made);
                Operation::Snapshot { kind, snapshot, source: id }
            }
            0..50 => {
                let capacity = capacity + MIB * (1 + self.random.below(4));
                Operation::Grow { kind, volume: id, capacity }
            }
            50..60 if room => self.copy(kind, capacity, id),
            50..70 => Operation::Write { kind, volume: id, block: blocks },
            70..75 => Operation::Release,
            80..90 if self.thread == 0 => Operation::Recover,
            _ => Operation::Delete { kind, volume: id },
        }
    }

    fn create(&mut self) -> Operation {
        let kind = if self.random.below(2) == 0 { VolumeKind::Filesystem } else { VolumeKind::Block };
        self.made += 1;
        let volume = format!("t{}-{}", self.thread, self.made);
        Operation::Create { kind, volume, capacity: MIB * (1 + self.random.below(4)) }
    }

    fn copy(&mut self, kind: VolumeKind, capacity: u64, source: String) -> Operation {
        self.made += 1;
        let volume = format!("t{}-{}", self.thread, self.made);
        Operation::Clone { kind, volume, capacity: capacity + MIB * self.random.below(2), source }
    }

    fn perform(&mut self, operation: &Operation) -> Result<(), Box<dyn std::error::Error>> {
        match operation {
            Operation::Create { kind, volume, capacity } => {
                let id = VolumeId::parse(volume)?;
                self.store.create(&id, &VolumeSpec { pending: true, ..spec(volume, *kind, *capacity)? })?;
                self.store.confirm(&id)?;
                let (id, kind, capacity) = (volume.clone(), *kind, *capacity);
                self.volumes.push(Known { id, kind, capacity, blocks: 0, snapshot: false });
            }
            Operation::Grow { kind, volume, capacity } => {
                if *kind == VolumeKind::Filesystem && self.repeats() {
                    self.limit(volume, *capacity)?;
                }
                self.store.expand(&VolumeId::parse(volume)?, Bytes(*capacity))?;
                self.known(volume).capacity = *capacity;
            }
            Operation::Clone { kind, volume, capacity, source } => {
                let original = self.known(source).clone();
                let spec = spec(volume, *kind, *capacity)?;
                let id = VolumeId::parse(volume)?;
                if original.snapshot {
                    let source = SnapshotId::parse(source)?;
                    self.store.clone_from(ContentSource::Snapshot(&source), &id, &spec)?;
                } else {
                    let source = VolumeId::parse(source)?;
                    self.store.clone_from(ContentSource::Volume(&source), &id, &spec)?;
                }
                let (id, capacity) = (volume.clone(), *capacity);
                self.volumes.push(Known { id, capacity, snapshot: false, ..original });
            }
            Operation::Snapshot { snapshot, source, .. } => {
                self.store.create_snapshot(&VolumeId::parse(source)?, &SnapshotId::parse(snapshot)?)?;
                let original = self.known(source).clone();
                self.volumes.push(Known { id: snapshot.clone(), snapshot: true, ..original });
            }
            Operation::Write { kind, volume, block } => {
                match kind {
                    VolumeKind::Filesystem => write_file(&self.root.join("volumes").join(volume), *block)?,
                    VolumeKind::Block => {
                        let volume = self.store.volume(&VolumeId::parse(volume)?)?;
                        let image = File::from(volume.open_image(Access::ReadWrite)?);
                        image.write_all_at(&content(*block), offset(*block))?;
                        image.sync_all()?;
                    }
                }
                self.known(volume).blocks += 1;
            }
            Operation::Delete { volume, .. } => {
                let repeats = self.repeats();
                let snapshot = self.known(volume).snapshot;
                if repeats {
                    let parent = if snapshot { "snapshots" } else { "volumes" };
                    let (from, to) = (format!("{parent}/{volume}"), format!("trash/{volume}.0"));
                    std::fs::rename(self.root.join(from), self.root.join(to))?;
                }
                let deleted = if snapshot {
                    self.store.delete_snapshot(&SnapshotId::parse(volume)?)?
                } else {
                    self.store.delete(&VolumeId::parse(volume)?)?
                };
                if deleted == repeats {
                    return Err("the volume to delete does not exist, or still exists".into());
                }
                self.volumes.retain(|known| known.id != *volume);
            }
            Operation::Release => drop(self.store.empty_trash()?),
            Operation::Recover => {
                self.leave_incomplete()?;
                self.store.recover()?;
            }
        }
        Ok(())
    }

    /// Returns `true` to simulate that a process died before its changes were durable. The repeated call then
    /// finds everything done, and must not return before it is durable.
    fn repeats(&mut self) -> bool {
        self.random.below(3) == 0
    }

    /// Sets the limit of a volume like a process that expanded the volume and died.
    fn limit(&self, volume: &str, capacity: u64) -> Result<(), Box<dyn std::error::Error>> {
        let directory = File::open(self.root.join("volumes").join(volume))?;
        let project = ProjectId::new(project_of(&directory)?).ok_or("a volume without a project id")?;
        ProjectQuota::of(directory.as_fd()).set_limits(project, limits(capacity))?;
        Ok(())
    }

    /// Leaves incomplete objects, like processes that died while they created a volume and expanded an image.
    fn leave_incomplete(&mut self) -> Result<(), Box<dyn std::error::Error>> {
        self.made += 1;
        let staged = self.root.join("staging").join(format!("t{}-{}.0", self.thread, self.made));
        std::fs::create_dir(&staged)?;
        let directory = File::open(staged)?;
        // The store uses ids that recovery has freed next, and those after them. So each one is far from all others.
        let last = StoreOptions::default().project_ids.end().get();
        let project = ProjectId::new(last - u32::try_from(self.made)? * 10_000).ok_or("no project id")?;
        ProjectQuota::of(directory.as_fd()).set_limits(project, limits(MIB))?;
        assign_project(&directory, project)?;
        let image = |known: &&Known| known.kind == VolumeKind::Block && !known.snapshot;
        if let Some(image) = self.volumes.iter().find(image) {
            let file = File::options().write(true).open(self.root.join("volumes").join(&image.id))?;
            let (start, more) = (i64::try_from(image.capacity)?, i64::try_from(MIB)?);
            fallocate(file, FallocateFlags::FALLOC_FL_KEEP_SIZE, start, more)?;
        }
        Ok(())
    }

    fn known(&mut self, id: &str) -> &mut Known {
        self.volumes.iter_mut().find(|known| known.id == id).expect("a volume of this thread")
    }
}

/// Returns the specification of a volume that is annotated with its id.
fn spec(volume: &str, kind: VolumeKind, capacity: u64) -> loopfs::Result<VolumeSpec> {
    let annotations = Annotations::new([("claim", volume)])?;
    Ok(VolumeSpec { annotations, ..VolumeSpec::new(kind, Bytes(capacity)) })
}

fn limits(capacity: u64) -> Limits {
    Limits::hard(Bytes(capacity), Inodes(capacity / 16384))
}

fn write_file(volume: &Path, block: u64) -> std::io::Result<()> {
    let mut file = File::create_new(volume.join(block.to_string()))?;
    file.write_all(&content(block))?;
    file.sync_all()?;
    File::open(volume)?.sync_all()
}

/// Returns the content that block `block` of a volume has after it was written.
pub(crate) fn content(block: u64) -> [u8; 4096] {
    let mut content = [0; 4096];
    content.chunks_exact_mut(8).for_each(|word| word.copy_from_slice(&(block + 1).to_le_bytes()));
    content
}

/// Returns the position of the block in an image.
pub(crate) fn offset(block: u64) -> u64 {
    block * 4096
}

/// A random generator (SplitMix64). Equal seeds produce equal sequences.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % limit
    }
}

//! Tests of the space that inodes take: no quota is charged for it, and no volume takes it from another one.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{ErrorKind as IoErrorKind, Write};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::PathBuf;

use loopfs::loop_device::{Access, AttachOptions, Detach, LoopControl};
use loopfs::mount::unmount;
use loopfs::volume_store::{StoreOptions, VolumeId, VolumeKind, VolumeSpec, VolumeStore};
use loopfs::{Bytes, ErrorKind};
use nix::sys::statvfs::statvfs;

use crate::disk::{Disk, MIN_SIZE};
use crate::environment::{Leaks, MIB, assert_close, directory_with, id, project, quota, scratch};
use crate::fixtures::assert_fails;

/// What a full volume may lack: a block for the extents of the file that fills it.
const UNUSED: u64 = 64 << 10;

/// A store on a disk of its own, which the test may fill.
struct Fixture {
    leaks: Leaks,
    store: VolumeStore,
    data: PathBuf,
    disk: Disk,
    _parent: tempfile::TempDir,
}

impl Fixture {
    fn new() -> Self {
        let leaks = Leaks::watch();
        let (disk, parent) = (Disk::formatted(MIN_SIZE), scratch());
        let data = parent.path().join("data");
        fs::create_dir(&data).unwrap();
        disk.mount(&data);
        let store = VolumeStore::open(&data, StoreOptions::default()).unwrap();
        Self { leaks, store, data, disk, _parent: parent }
    }

    fn create(&self, name: &str, spec: &VolumeSpec) -> VolumeId {
        let id = id(name);
        self.store.create(&id, spec).unwrap();
        id
    }

    fn directory(&self, id: &VolumeId) -> PathBuf {
        self.data.join("volumes").join(id.as_str())
    }

    /// Creates a thick image of the advertised maximum.
    fn create_largest(&self, name: &str) -> VolumeId {
        let spec = VolumeSpec::new(VolumeKind::Block, Bytes(0));
        let capacity = self.store.space().unwrap().largest_volume(&spec);
        self.create(name, &VolumeSpec { capacity, ..spec })
    }

    /// Creates empty files in a directory until the volume may have no more, or until there are `most`. Returns their number.
    fn create_files(&self, id: &VolumeId, directory: &str, most: u64) -> u64 {
        let directory = self.directory(id).join(directory);
        (0..most)
            .take_while(|number| match File::create(directory.join(number.to_string())) {
                Ok(_file) => true,
                Err(error) if is_full(&error) => false,
                Err(error) => panic!("{error}"),
            })
            .count() as u64
    }

    /// Writes to a new file until the volume is full. Fails if the volume does not reach its capacity.
    #[track_caller]
    fn fill(&self, id: &VolumeId) {
        let mut file = File::create(self.directory(id).join("content")).unwrap();
        for block in [vec![1; MIB as usize], vec![1; 4096]] {
            while match file.write_all(&block) {
                Ok(()) => true,
                Err(error) if is_full(&error) => false,
                Err(error) => panic!("{error}"),
            } {}
        }
        file.sync_all().unwrap();
        let stats = self.store.stats(id).unwrap();
        let unused = stats.capacity.saturating_sub(stats.used);
        assert!(unused <= Bytes(UNUSED), "{id} lacks {unused} of {}", stats.capacity);
    }

    fn free(&self) -> u64 {
        let status = statvfs(&self.data).unwrap();
        status.blocks_available() * status.fragment_size()
    }

    fn end(self) {
        let Self { leaks, store, data, disk, .. } = self;
        drop(store);
        assert!(unmount(&data).unwrap());
        drop(disk);
        drop(leaks);
    }
}

fn is_full(error: &std::io::Error) -> bool {
    matches!(error.kind(), IoErrorKind::StorageFull | IoErrorKind::QuotaExceeded)
}

#[test]
fn files_in_every_group_stay_reserved() {
    // The rest of an inode number is its number in a group of 75 MiB: of a block, and of one of its 8 inodes.
    const GROUP_BITS: u32 = 15 + 3;
    let fixture = Fixture::new();
    let many = fixture.create("many", &directory_with(Bytes(MIB), 512));
    let other = fixture.create("other", &directory_with(Bytes(32 * MIB), 1 << 18));
    // XFS puts directories into all groups in turn, and files into the group of their directory.
    let mut groups = BTreeMap::new();
    for number in 0..16 {
        let directory = number.to_string();
        let path = fixture.directory(&many).join(&directory);
        fs::create_dir(&path).unwrap();
        groups.insert(fs::metadata(path).unwrap().ino() >> GROUP_BITS, directory);
    }
    assert_eq!(groups.len(), 4);
    let directories: Vec<String> = groups.into_values().collect();
    let (before, available) = (fixture.free(), fixture.store.space().unwrap().available.0);
    for directory in &directories {
        let files = fixture.create_files(&many, directory, u64::MAX);
        // One file of each chunk of 64 keeps the chunk.
        for number in (0..files).filter(|number| number % 64 != 0) {
            fs::remove_file(fixture.directory(&many).join(directory).join(number.to_string())).unwrap();
        }
        // Until XFS has freed the deleted files, they count against the limit.
        let data = File::open(&fixture.data).unwrap();
        quota(&data).finish_inactivation(project(1)).unwrap();
    }
    // The volume has taken its 2048 inodes of 512 bytes in each group.
    let taken = before - fixture.free() - fixture.store.stats(&many).unwrap().used.0;
    assert!(taken > 3 * MIB, "{taken} bytes are taken for inodes");
    // All of that was reserved.
    assert_close(fixture.store.space().unwrap().available.0, available);
    fixture.create_largest("rest");
    fixture.fill(&other);
    fixture.fill(&many);
    fixture.end();
}

/// After the small volumes have filled the store, every byte of the thin device can still be written.
#[test]
fn small_volumes_leave_thin_space_available() {
    const THIN: u64 = 32 * MIB;
    let fixture = Fixture::new();
    let mut spec = VolumeSpec::new(VolumeKind::Block, Bytes(THIN));
    spec.set("provisioning", "thin").unwrap();
    let thin = fixture.create("thin", &spec);
    // Leaves space for few small ones.
    fixture.create("thick", &VolumeSpec::new(VolumeKind::Block, Bytes(128 * MIB)));
    let small = directory_with(Bytes(MIB), 4096);
    let mut volumes = Vec::new();
    loop {
        let id = id(&format!("small-{}", volumes.len()));
        match fixture.store.create(&id, &small) {
            Ok(_volume) => volumes.push(id),
            Err(error) if error.kind() == ErrorKind::NoSpace => break,
            Err(error) => panic!("{error}"),
        }
    }
    // Their inodes of 512 bytes take more than the margin of the thin device.
    let inodes = volumes.len() as u64 * (small.capacity.0 / small.directory.bytes_per_inode.get()) * 512;
    assert!(inodes > 2 * (THIN / 128 + MIB), "{inodes} bytes of inodes in {} volumes", volumes.len());
    for id in &volumes {
        fixture.create_files(id, "", small.capacity.0 / small.directory.bytes_per_inode.get() - 2);
        fixture.fill(id);
    }

    let control = LoopControl::open().unwrap();
    let volume = fixture.store.volume(&thin).unwrap();
    let image = File::from(volume.open_image(Access::ReadWrite).unwrap());
    let device = control.attach(&image, &AttachOptions::new(Access::ReadWrite)).unwrap();
    let written = File::options().write(true).open(device.path()).unwrap();
    for offset in (0..THIN).step_by(MIB as usize) {
        written.write_all_at(&vec![offset.to_le_bytes()[2] + 1; MIB as usize], offset).unwrap();
    }
    written.sync_all().unwrap();
    drop((written, device));
    assert_eq!(control.detach_all(&image).unwrap(), Detach::Detached);
    for offset in (0..THIN).step_by(MIB as usize) {
        let mut content = vec![0; MIB as usize];
        image.read_exact_at(&mut content, offset).unwrap();
        assert!(content.iter().all(|byte| *byte == offset.to_le_bytes()[2] + 1), "at {offset}");
    }
    drop((image, volume));
    fixture.end();
}

#[test]
fn more_inodes_than_fit_are_refused() {
    let fixture = Fixture::new();
    // Inodes may take a quarter of the disk.
    let spec = directory_with(Bytes(MIN_SIZE / 4), 512);
    let error = assert_fails(fixture.store.create(&id("many"), &spec), ErrorKind::NoSpace);
    assert!(error.to_string().contains("larger bytesPerInode"), "{error}");
    let largest = fixture.store.space().unwrap().largest_volume(&spec);
    assert!((MIN_SIZE / 8..MIN_SIZE / 4).contains(&largest.0), "{largest}");
    fixture.create("most", &VolumeSpec { capacity: largest, ..spec });
    let error = fixture.store.expand(&id("most"), Bytes(largest.0 + MIB)).unwrap_err();
    assert!(error.to_string().contains("larger bytesPerInode"), "{error}");
    fixture.end();
}

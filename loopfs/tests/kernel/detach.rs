//! A detach keeps what programs wrote to a device, also if they did not call fsync(2).

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use loopfs::Bytes;
use loopfs::loop_device::{
    Access, AttachOptions, Detach, DirectIo, IndexPolicy, Lifetime, LoopControl, LoopDevice, unmanaged,
};
use loopfs::volume_store::{VolumeKind, VolumeSpec};
use nix::fcntl::{FallocateFlags, fallocate};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use rstest::rstest;

use crate::disk::mkfs;
use crate::environment::{MIB, TIMEOUT, clone_image, id, image, number_from, path_from, scratch, wait_until};
use crate::fixtures::{TestImage, TestStore};

const BLOCK: usize = 4096;

/// Returns the number of rounds, in each of which the moments of the calls differ.
fn rounds() -> u32 {
    number_from("LOOPFS_TEST_STEPS").map_or(10, |steps| steps as u32)
}

/// A call that detaches the device of an image.
type Call = fn(&LoopControl, &File, LoopDevice);

fn detach(control: &LoopControl, _image: &File, device: LoopDevice) {
    drop(control.detach(device).unwrap());
}

fn detach_all(control: &LoopControl, image: &File, device: LoopDevice) {
    drop(device);
    drop(control.detach_all(image).unwrap());
}

fn device_detach(_control: &LoopControl, _image: &File, device: LoopDevice) {
    drop(device.detach().unwrap());
}

fn unmanaged_detach(_control: &LoopControl, _image: &File, device: LoopDevice) {
    let other = unmanaged::Device::open_index(device.index(), Access::ReadOnly).unwrap();
    drop(device);
    other.detach().unwrap();
}

fn losetup_detach(_control: &LoopControl, _image: &File, device: LoopDevice) {
    losetup(&["--detach", device.path().to_str().unwrap()]);
}

fn losetup_detach_all(_control: &LoopControl, _image: &File, _device: LoopDevice) {
    losetup(&["--detach-all"]);
}

/// Runs the losetup drop-in.
fn losetup(arguments: &[&str]) {
    let status =
        Command::new(path_from("LOOPFS_TEST_TOOL")).arg0("losetup").args(arguments).status().unwrap();
    assert!(status.success(), "{arguments:?}: {status}");
}

/// Returns the content of a block in a round.
fn block(round: u32, number: u64) -> [u8; BLOCK] {
    let mut block = [0; BLOCK];
    let content = ((u64::from(round) << 32) | (number + 1)).to_le_bytes();
    block.chunks_exact_mut(content.len()).for_each(|part| part.copy_from_slice(&content));
    block
}

#[track_caller]
fn assert_blocks(image: &File, round: u32, blocks: impl IntoIterator<Item = u64>) {
    let lost: Vec<u64> = blocks
        .into_iter()
        .filter(|number| {
            let mut found = [0; BLOCK];
            image.read_exact_at(&mut found, number * BLOCK as u64).unwrap();
            found != block(round, *number)
        })
        .collect();
    assert!(lost.is_empty(), "round {round}: {} blocks were lost, the first is {}", lost.len(), lost[0]);
}

/// Writes blocks to an open device through its page cache, and no further.
fn write_blocks(device: &File, round: u32, blocks: impl IntoIterator<Item = u64>) -> std::io::Result<()> {
    blocks
        .into_iter()
        .try_for_each(|number| device.write_all_at(&block(round, number), number * BLOCK as u64))
}

fn open_to_write(path: &Path) -> std::io::Result<File> {
    File::options().write(true).open(path)
}

/// Waits until the file has no device.
fn until_detached(control: &LoopControl, image: &File) {
    wait_until(|| control.find(image).unwrap().is_empty());
}

/// Spins for up to `limit`. The moments differ from round to round and are the same in each run, apart from the scheduler.
fn spin(round: u32, limit: Duration) {
    let share = u64::from(round).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 48;
    let start = Instant::now();
    while start.elapsed() < limit * share as u32 / 0xFFFF {
        std::hint::spin_loop();
    }
}

/// A program writes and ends. Its close is not the last one, because the library has the device open.
#[rstest]
fn unsynced_writes_survive_a_detach(
    #[values(detach, detach_all, device_detach, unmanaged_detach, losetup_detach, losetup_detach_all)]
    call: Call,
    #[values(DirectIo::Required, DirectIo::Off)] direct_io: DirectIo,
) {
    let TestImage { control, image, .. } = &TestImage::new(MIB);
    let options = AttachOptions::new(Access::ReadWrite).direct_io(direct_io);
    for round in 0..2 {
        let device = control.ensure_attached(image, &options).unwrap();
        write_blocks(&open_to_write(&device.path()).unwrap(), round, 0..256).unwrap();
        call(control, image, device);
        until_detached(control, image);
        assert_blocks(image, round, 0..256);
    }
}

/// The program has the device open when the detach begins, and closes it before, during or after that.
#[rstest]
fn writers_may_close_at_any_moment(
    #[values(detach, detach_all, device_detach, unmanaged_detach, losetup_detach)] call: Call,
    #[values(DirectIo::Required, DirectIo::Off)] direct_io: DirectIo,
) {
    let TestImage { control, image, .. } = &TestImage::new(MIB);
    let options = AttachOptions::new(Access::ReadWrite).direct_io(direct_io);
    for round in 0..rounds() {
        let device = control.ensure_attached(image, &options).unwrap();
        let writer = open_to_write(&device.path()).unwrap();
        let start = Barrier::new(2);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                start.wait();
                write_blocks(&writer, round, 0..64).unwrap();
                spin(round, Duration::from_micros(500));
                drop(writer);
            });
            start.wait();
            spin(round + 1, Duration::from_millis(1));
            call(control, image, device);
        });
        until_detached(control, image);
        assert_blocks(image, round, 0..64);
    }
}

/// The program opens the device, writes a block and closes it, again and again, until the device is detached.
#[rstest]
fn acknowledged_writes_beside_a_detach_survive(
    #[values(detach, detach_all, device_detach, unmanaged_detach)] call: Call,
) {
    let TestImage { control, image, .. } = &TestImage::new(16 * MIB);
    for round in 0..rounds() {
        let device = control.ensure_attached(image, &AttachOptions::new(Access::ReadWrite)).unwrap();
        let (path, start) = (device.path(), Barrier::new(2));
        let acknowledged = std::thread::scope(|scope| {
            let writer = scope.spawn(|| {
                start.wait();
                let write = |number: &u64| write_blocks(&open_to_write(&path)?, round, [*number]);
                (0..4096).take_while(|number| write(number).is_ok()).count() as u64
            });
            start.wait();
            spin(round, Duration::from_millis(2));
            call(control, image, device);
            writer.join().unwrap()
        });
        until_detached(control, image);
        assert_blocks(image, round, 0..acknowledged);
    }
}

#[test]
fn the_last_close_writes_back() {
    let TestImage { control, image, .. } = &TestImage::new(MIB);
    let device = control.ensure_attached(image, &AttachOptions::new(Access::ReadWrite)).unwrap();
    let writer = open_to_write(&device.path()).unwrap();
    let Detach::Deferred(pending) = control.detach(device).unwrap() else { panic!("the device is open") };
    write_blocks(&writer, 1, 0..256).unwrap();
    drop(writer);
    assert_eq!(pending.wait(TIMEOUT).unwrap(), Detach::Detached);
    assert_blocks(image, 1, 0..256);
}

#[test]
fn a_cancelled_detach_keeps_unsynced_writes() {
    let TestImage { control, image, .. } = &TestImage::new(MIB);
    let device = control.ensure_attached(image, &AttachOptions::new(Access::ReadWrite)).unwrap();
    let writer = open_to_write(&device.path()).unwrap();
    let Detach::Deferred(pending) = control.detach(device).unwrap() else { panic!("the device is open") };
    write_blocks(&writer, 1, 0..128).unwrap();
    let kept = pending.cancel().unwrap().pop().unwrap();
    write_blocks(&writer, 1, 128..256).unwrap();
    drop(writer);
    assert_eq!(control.detach(kept).unwrap(), Detach::Detached);
    assert_blocks(image, 1, 0..256);
}

#[test]
fn an_autoclear_device_keeps_unsynced_writes() {
    let TestImage { control, image, .. } = &TestImage::new(MIB);
    let options = AttachOptions::new(Access::ReadWrite).lifetime(Lifetime::AutoClear);
    let device = control.attach(image, &options).unwrap();
    assert!(device.status().unwrap().auto_clear);
    write_blocks(&open_to_write(&device.path()).unwrap(), 1, 0..256).unwrap();
    drop(device);
    assert!(control.find(image).unwrap().is_empty());
    assert_blocks(image, 1, 0..256);
}

#[test]
fn a_read_only_device_changes_nothing() {
    let TestImage { control, image, .. } = &TestImage::new(MIB);
    write_blocks(image, 1, 0..256).unwrap();
    let device = control.ensure_attached(image, &AttachOptions::new(Access::ReadOnly)).unwrap();
    let mut content = vec![0; MIB as usize];
    File::open(device.path()).unwrap().read_exact_at(&mut content, 0).unwrap();
    assert_eq!(control.detach(device).unwrap(), Detach::Detached);
    assert_blocks(image, 1, 0..256);
}

/// Detaches a mount when it is dropped, also after a failed test.
struct Mounted(tempfile::TempDir);

impl Mounted {
    fn new(device: &Path, file_system: &str) -> Self {
        let target = scratch();
        mount(Some(device), target.path(), Some(file_system), MsFlags::empty(), None::<&str>).unwrap();
        Self(target)
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        umount2(self.0.path(), MntFlags::MNT_DETACH).ok();
    }
}

/// An open file keeps the file system in use after its lazy unmount, and the file system keeps the device open.
#[test]
fn a_lazily_unmounted_ext4_is_complete() {
    let TestImage { control, directory, image, .. } = &TestImage::new(32 * MIB);
    let mut mkfs = Command::new(path_from("LOOPFS_TEST_MKFS_EXT4"));
    assert!(mkfs.args(["-q", "-t", "ext4"]).arg(directory.path().join("image")).status().unwrap().success());
    for round in 0..(rounds() / 5).max(1) {
        let device = control.ensure_attached(image, &AttachOptions::new(Access::ReadWrite)).unwrap();
        let mounted = Mounted::new(&device.path(), "ext4");
        let file = File::create(mounted.0.path().join("file")).unwrap();
        write_blocks(&file, round, 0..256).unwrap();
        umount2(mounted.0.path(), MntFlags::MNT_DETACH).unwrap();
        let Detach::Deferred(pending) = control.detach(device).unwrap() else { panic!("it is in use") };
        write_blocks(&file, round, 256..512).unwrap();
        drop(file);
        assert_eq!(pending.wait(TIMEOUT).unwrap(), Detach::Detached);

        let device = control.ensure_attached(image, &AttachOptions::new(Access::ReadWrite)).unwrap();
        let mounted = Mounted::new(&device.path(), "ext4");
        assert_blocks(&File::open(mounted.0.path().join("file")).unwrap(), round, 0..512);
        drop(mounted);
        assert_eq!(control.detach(device).unwrap(), Detach::Detached);
    }
}

/// The device of which vm-images/kernels/kernel-log.toml allows messages about lost writes.
const FAILING: u32 = 41_000;

/// A thin image on a full file system.
struct FullDisk {
    thin: File,
    filler: File,
    mounted: Mounted,
    _device: LoopDevice,
    _directory: tempfile::TempDir,
}

impl FullDisk {
    fn new(control: &LoopControl) -> Self {
        let directory = scratch();
        let disk = image(directory.path(), "disk", 320 * MIB);
        mkfs(&[], &directory.path().join("disk"));
        let options = AttachOptions::new(Access::ReadWrite)
            .direct_io(DirectIo::Preferred)
            .lifetime(Lifetime::AutoClear);
        let device = control.attach(&disk, &options).unwrap();
        let mounted = Mounted::new(&device.path(), "xfs");
        let thin = image(mounted.0.path(), "thin", 8 * MIB);
        let filler = File::create(mounted.0.path().join("filler")).unwrap();
        Self { thin, filler, mounted, _device: device, _directory: directory }
    }
}

#[track_caller]
fn assert_not_written(error: &loopfs::Error, node: &Path) {
    assert_eq!(error.errno(), Some(libc::EIO), "{error}");
    let text = error.to_string();
    assert!(text.contains(node.to_str().unwrap()) && text.contains("stays attached"), "{text}");
}

/// The error names the device and has it. It stays attached, so the data can be written again, and the call repeated.
#[test]
fn a_failed_write_fails_the_detach() {
    let control = LoopControl::open().unwrap();
    let disk = FullDisk::new(&control);
    fill(&disk.filler);
    let options = AttachOptions::new(Access::ReadWrite).index(IndexPolicy::Exact(FAILING));
    for call in [
        |control: &LoopControl, _: &File, device: LoopDevice| {
            control.detach(device).map(drop).map_err(loopfs::Error::from)
        },
        |control: &LoopControl, thin: &File, device: LoopDevice| {
            drop(device);
            control.detach_all(thin).map(drop)
        },
        |_: &LoopControl, _: &File, device: LoopDevice| {
            device.detach().map(drop).map_err(loopfs::Error::from)
        },
    ] {
        let device = control.ensure_attached(&disk.thin, &options).unwrap();
        let (path, binding) = (device.path(), device.binding().clone());
        write_blocks(&open_to_write(&path).unwrap(), 1, 0..2048).unwrap();
        assert_not_written(&call(&control, &disk.thin, device).unwrap_err(), &path);
        let status = LoopDevice::open_binding(&binding).unwrap().status().unwrap();
        assert!(!status.auto_clear, "the detach is pending");
    }
    let device = control.ensure_attached(&disk.thin, &options).unwrap();
    let (path, binding) = (device.path(), device.binding().clone());
    write_blocks(&open_to_write(&path).unwrap(), 1, 0..2048).unwrap();
    let (device, error) = control.detach(device).unwrap_err().into_parts();
    assert_not_written(&error, &path);
    assert_eq!(device.status().unwrap().binding, binding);
    disk.filler.set_len(0).unwrap();
    write_blocks(&open_to_write(&path).unwrap(), 2, 0..2048).unwrap();
    assert_eq!(control.detach(device).unwrap(), Detach::Detached);
    assert_blocks(&disk.thin, 2, 0..2048);
}

/// Each partition has a page cache of its own.
#[test]
fn a_failed_partition_write_is_reported() {
    let control = LoopControl::open().unwrap();
    let disk = FullDisk::new(&control);
    // An MBR with one partition of type Linux from sector 2048 to the end, little-endian.
    let mut mbr = [0; 512];
    mbr[446 + 4] = 0x83;
    mbr[446 + 8..446 + 12].copy_from_slice(&2048u32.to_le_bytes());
    mbr[446 + 12..446 + 16].copy_from_slice(&(7 * MIB as u32 / 512).to_le_bytes());
    mbr[510..].copy_from_slice(&[0x55, 0xAA]);
    disk.thin.write_all_at(&mbr, 0).unwrap();
    disk.thin.sync_all().unwrap();
    fill(&disk.filler);
    if let Err(error) = unmanaged::add(FAILING) {
        assert_eq!(error.errno(), Some(libc::EEXIST), "{error}");
    }
    let device = unmanaged::Device::open_index(FAILING, Access::ReadWrite).unwrap();
    let setup = unmanaged::Setup { partition_scan: true, direct_io: true, ..Default::default() };
    device
        .set_up(
            File::options().read(true).write(true).open(disk.mounted.0.path().join("thin")).unwrap(),
            &setup,
        )
        .unwrap();
    let partition = Path::new("/dev").join(format!("loop{FAILING}p1"));
    write_blocks(&open_to_write(&partition).unwrap(), 1, 0..1024).unwrap();
    assert_not_written(&device.detach().unwrap_err(), &partition);
    device.detach().unwrap();
    drop(device);
    until_detached(&control, &disk.thin);
}

/// Allocates all free blocks of a file system.
fn fill(file: &File) {
    let (mut size, mut step) = (0i64, 64 << 20);
    while step >= BLOCK as i64 {
        match fallocate(file, FallocateFlags::empty(), size, step) {
            Ok(()) => size += step,
            Err(_) => step /= 2,
        }
    }
}

#[test]
fn a_refreshed_capacity_keeps_unsynced_writes() {
    const REFRESHES: u32 = 30;
    let TestImage { control, image, .. } = &TestImage::new(MIB);
    let device = control.ensure_attached(image, &AttachOptions::new(Access::ReadWrite)).unwrap();
    let writer = open_to_write(&device.path()).unwrap();
    for round in 0..REFRESHES {
        let blocks = u64::from(round + 1) * 16;
        write_blocks(&writer, round, 0..blocks.min(256)).unwrap();
        image.set_len(MIB + blocks * BLOCK as u64).unwrap();
        device.refresh_capacity(image).unwrap();
        // The last block of the new size, while earlier ones are not written back.
        let last = 256 + blocks - 1;
        write_blocks(&writer, round, [last]).unwrap();
        if round % 10 == 9 {
            writer.sync_all().unwrap();
            assert_blocks(image, round, (0..blocks.min(256)).chain([last]));
        }
    }
    drop(writer);
    assert_eq!(control.detach(device).unwrap(), Detach::Detached);
    let blocks = u64::from(REFRESHES) * 16;
    assert_blocks(image, REFRESHES - 1, (0..256).chain([256 + blocks - 1]));
}

/// A copy has what reached the image. The page cache of the device is above the image.
#[test]
fn a_copy_has_what_was_synced() {
    let store = TestStore::open();
    let control = LoopControl::open().unwrap();
    let volume = store.create(&id("source"), &VolumeSpec::new(VolumeKind::Block, Bytes(MIB))).unwrap();
    let image = volume.open_image(Access::ReadOnly).unwrap();
    let device = control.ensure_attached(&image, &AttachOptions::new(Access::ReadWrite)).unwrap();
    let writer = open_to_write(&device.path()).unwrap();
    write_blocks(&writer, 1, 0..128).unwrap();
    writer.sync_all().unwrap();
    write_blocks(&writer, 2, 128..256).unwrap();
    clone_image(&store, &id("source"), &id("copy"), Bytes(MIB)).unwrap();
    let copy = File::from(store.volume(&id("copy")).unwrap().open_image(Access::ReadOnly).unwrap());
    assert_blocks(&copy, 1, 0..128);
    drop(writer);
    assert_eq!(control.detach(device).unwrap(), Detach::Detached);
    assert_blocks(&File::from(image), 2, 128..256);
}

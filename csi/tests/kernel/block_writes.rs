//! The image of an unpublished Block volume has everything that programs wrote to it, also if they did not call fsync(2).

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use loopfs::Bytes;
use loopfs::loop_device::Access;
use loopfs::volume_store::{VolumeKind, VolumeSpec};
use tonic::Code;

use crate::fixture::{Fixture, id, repeated, until_detached};
use crate::support::*;

const ROUNDS: u64 = 28;
const BLOCK: usize = 4096;
/// More blocks than a program writes during a call.
const BLOCKS: u64 = 4096;
const SIZE: u64 = BLOCKS * BLOCK as u64;

fn fixture() -> Fixture {
    let fixture = Fixture::new();
    fixture.store.create(&id("v"), &VolumeSpec::new(VolumeKind::Block, Bytes(SIZE))).unwrap();
    fixture
}

/// The node of the volume's only device. A container has a node of its own, so a program in it can have the device open while the
/// kubelet unpublishes the volume.
fn device(fixture: &Fixture) -> PathBuf {
    PathBuf::from(format!("/dev/loop{}", fixture.devices("v")[0].binding.index))
}

fn content(round: u64, number: u64) -> [u8; BLOCK] {
    let mut content = [0; BLOCK];
    let part = ((round << 32) | (number + 1)).to_le_bytes();
    content.chunks_exact_mut(part.len()).for_each(|chunk| chunk.copy_from_slice(&part));
    content
}

/// Writes a block to an open device, and no further than to its page cache.
fn write_block(device: &File, round: u64, number: u64) -> std::io::Result<()> {
    device.write_all_at(&content(round, number), number * BLOCK as u64)
}

fn open(device: &Path) -> std::io::Result<File> {
    File::options().write(true).open(device)
}

/// Runs `call` beside a program that opens the device, writes a block and closes the device, again and again until that fails. Returns
/// the number of blocks that it has written. So most calls open the device before a close of the program and detach it after that.
fn beside_a_writer(fixture: &Fixture, round: u64, call: impl FnOnce()) -> u64 {
    let path = device(fixture);
    std::thread::scope(|scope| {
        let write =
            |number: &u64| open(&path).and_then(|device| write_block(&device, round, *number)).is_ok();
        let writer = scope.spawn(move || (0..BLOCKS).take_while(write).count() as u64);
        std::thread::sleep(Duration::from_millis(round % 7));
        call();
        writer.join().unwrap()
    })
}

#[track_caller]
fn assert_written(file: &File, round: u64, blocks: u64) {
    let is_lost = |number: &u64| {
        let mut found = [0; BLOCK];
        file.read_exact_at(&mut found, number * BLOCK as u64).unwrap();
        found != content(round, *number)
    };
    let lost = (0..blocks).filter(is_lost).count();
    assert_eq!(lost, 0, "of {blocks} blocks of round {round}, some were lost");
}

#[test]
fn unpublishing_and_unstaging_keep_unsynced_writes() {
    let fixture = fixture();
    let (staging, target) = (fixture.target("staging"), fixture.target("target"));
    for round in 0..ROUNDS {
        // Most rounds are for staging: the driver does not hold a staged device open, and a faulty detach of that loses writes in few rounds.
        let is_published = round % 16 == 3;
        repeated(|| match is_published {
            true => fixture.node().node_publish_volume(publish("v", &target, block())).map(drop),
            false => fixture.node().node_stage_volume(stage("v", &staging, block())).map(drop),
        })
        .unwrap();
        let written = beside_a_writer(&fixture, round, || {
            repeated(|| match is_published {
                true => fixture.node().node_unpublish_volume(unpublish("v", &target)).map(drop),
                false => fixture.node().node_unstage_volume(unstage("v", &staging)).map(drop),
            })
            .unwrap();
        });
        until_detached();
        assert_written(&File::from(fixture.image("v")), round, written);
    }
    fixture.finish();
}

/// Staging has attached a writable device, which the read-only publication replaces.
#[test]
fn a_replaced_access_keeps_unsynced_writes() {
    let fixture = fixture();
    let (staging, target) = (fixture.target("staging"), fixture.target("target"));
    for round in 0..ROUNDS {
        repeated(|| fixture.node().node_stage_volume(stage("v", &staging, block()))).unwrap();
        let written = beside_a_writer(&fixture, round, || {
            // The driver waits two seconds for the last close, and an orchestrator repeats the call.
            while let Err(status) =
                fixture.node().node_publish_volume(publish_read_only("v", &target, block()))
            {
                assert_eq!(status.code(), Code::Aborted, "{status}");
            }
        });
        assert_eq!(fixture.devices("v")[0].binding.access, Access::ReadOnly);
        assert_written(&File::open(device(&fixture)).unwrap(), round, written);
        fixture.node().node_unpublish_volume(unpublish("v", &target)).unwrap();
        fixture.node().node_unstage_volume(unstage("v", &staging)).unwrap();
    }
    fixture.finish();
}

/// An administrator can rescue the data of a deleted image as long as a process has it open.
#[test]
fn a_stale_device_keeps_unsynced_writes() {
    let fixture = fixture();
    let target = fixture.target("target");
    fixture.node().node_publish_volume(publish("v", &target, block())).unwrap();
    let image = File::from(fixture.image("v"));
    let device = device(&fixture);
    let other = File::open(&device).unwrap();
    write_block(&open(&device).unwrap(), 1, 0).unwrap();
    fixture.delete_in_use("v");
    fixture.node().node_unpublish_volume(unpublish("v", &target)).unwrap();
    drop(other);
    assert_written(&image, 1, 1);
    drop(image);
    fixture.finish();
}

/// The pod has the device open, so the close of the program that wrote did not write the page cache of the device.
#[test]
fn copies_have_unsynced_writes() {
    let fixture = fixture();
    let target = fixture.target("target");
    fixture.node().node_publish_volume(publish("v", &target, block())).unwrap();
    let device = device(&fixture);
    let holder = File::open(&device).unwrap();
    write_block(&open(&device).unwrap(), 1, 0).unwrap();
    fixture.node().create_snapshot(create_snapshot("s", "v")).unwrap();
    fixture.node().create_volume(from_snapshot("restored", "s", SIZE as i64, block())).unwrap();
    assert_written(&File::from(fixture.image("restored")), 1, 1);
    write_block(&open(&device).unwrap(), 2, 0).unwrap();
    fixture.node().create_volume(from_volume("copy", "v", SIZE as i64, block())).unwrap();
    assert_written(&File::from(fixture.image("copy")), 2, 1);
    drop(holder);
    fixture.node().node_unpublish_volume(unpublish("v", &target)).unwrap();
    fixture.finish();
}

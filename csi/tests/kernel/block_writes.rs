//! The image of an unpublished Block volume has everything that programs wrote to it, also if they did not call fsync(2).

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use loopfs::loop_device::Access;
use loopfs::volume_store::VolumeKind;
use tonic::Code;

use crate::fixture::{Fixture, MIB};
use crate::support::*;

const ROUNDS: u64 = 30;
const BLOCK: usize = 4096;
const BLOCKS: u64 = MIB / BLOCK as u64;

/// The node of the volume's only device. A container has a node of its own, so a program in it can have the device open while the
/// kubelet unpublishes the volume.
fn device(fixture: &Fixture) -> PathBuf {
    PathBuf::from(format!("/dev/loop{}", fixture.devices("v")[0].binding.index))
}

/// Writes each block of an open device, and no further than to its page cache.
fn write_blocks(device: &File, round: u64) {
    for number in 0..BLOCKS {
        device.write_all_at(&[(round + number) as u8; BLOCK], number * BLOCK as u64).unwrap();
    }
}

/// Runs `call` while a program writes each block of the volume, which ends before, during or after the call.
fn beside_a_writer(fixture: &Fixture, round: u64, call: impl FnOnce()) {
    let writer = File::options().write(true).open(device(fixture)).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            write_blocks(&writer, round);
            std::thread::sleep(Duration::from_millis(round % 10));
        });
        std::thread::sleep(Duration::from_millis(round % 7));
        call();
    });
}

#[track_caller]
fn assert_written(file: &File, round: u64) {
    let mut content = vec![0; MIB as usize];
    file.read_exact_at(&mut content, 0).unwrap();
    let lost =
        content.chunks(BLOCK).zip(0..).filter(|(block, number)| **block != [(round + number) as u8; BLOCK]);
    assert_eq!(lost.count(), 0, "blocks were lost in round {round}");
}

/// Waits for the last close of the volume's device.
fn until_detached(fixture: &Fixture) {
    let start = Instant::now();
    while !fixture.devices("v").is_empty() {
        assert!(start.elapsed() < TIMEOUT, "the device is still attached");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn unpublishing_keeps_unsynced_writes() {
    let fixture = Fixture::with_volume(VolumeKind::Block);
    let target = fixture.target("target");
    for round in 0..ROUNDS {
        fixture.node().node_publish_volume(publish("v", &target, block())).unwrap();
        beside_a_writer(&fixture, round, || {
            fixture.node().node_unpublish_volume(unpublish("v", &target)).unwrap();
        });
        until_detached(&fixture);
        assert_written(&File::from(fixture.image("v")), round);
    }
    fixture.finish();
}

#[test]
fn unstaging_keeps_unsynced_writes() {
    let fixture = Fixture::with_volume(VolumeKind::Block);
    let staging = fixture.target("staging");
    for round in 0..ROUNDS {
        fixture.node().node_stage_volume(stage("v", &staging, block())).unwrap();
        beside_a_writer(&fixture, round, || {
            fixture.node().node_unstage_volume(unstage("v", &staging)).unwrap();
        });
        until_detached(&fixture);
        assert_written(&File::from(fixture.image("v")), round);
    }
    fixture.finish();
}

/// Staging has attached a writable device, which the read-only publication replaces.
#[test]
fn a_replaced_access_keeps_unsynced_writes() {
    let fixture = Fixture::with_volume(VolumeKind::Block);
    let (staging, target) = (fixture.target("staging"), fixture.target("target"));
    for round in 0..ROUNDS {
        fixture.node().node_stage_volume(stage("v", &staging, block())).unwrap();
        beside_a_writer(&fixture, round, || {
            // The driver waits two seconds for the last close, and an orchestrator repeats the call.
            while let Err(status) =
                fixture.node().node_publish_volume(publish_read_only("v", &target, block()))
            {
                assert_eq!(status.code(), Code::Aborted, "{status}");
            }
        });
        assert_eq!(fixture.devices("v")[0].binding.access, Access::ReadOnly);
        assert_written(&File::open(device(&fixture)).unwrap(), round);
        fixture.node().node_unpublish_volume(unpublish("v", &target)).unwrap();
        fixture.node().node_unstage_volume(unstage("v", &staging)).unwrap();
    }
    fixture.finish();
}

/// An administrator can rescue the data of a deleted image as long as a process has it open.
#[test]
fn a_stale_device_keeps_unsynced_writes() {
    let fixture = Fixture::with_volume(VolumeKind::Block);
    let target = fixture.target("target");
    fixture.node().node_publish_volume(publish("v", &target, block())).unwrap();
    let image = File::from(fixture.image("v"));
    let device = device(&fixture);
    let writer = File::options().write(true).open(&device).unwrap();
    let other = File::open(&device).unwrap();
    write_blocks(&writer, 1);
    drop(writer);
    fixture.delete_in_use("v");
    fixture.node().node_unpublish_volume(unpublish("v", &target)).unwrap();
    drop(other);
    assert_written(&image, 1);
    drop(image);
    fixture.finish();
}

/// The pod has the device open, so the close of the program that wrote did not write the page cache of the device.
#[test]
fn copies_have_unsynced_writes() {
    let fixture = Fixture::with_volume(VolumeKind::Block);
    let target = fixture.target("target");
    fixture.node().node_publish_volume(publish("v", &target, block())).unwrap();
    let device = device(&fixture);
    let open = File::open(&device).unwrap();
    write_blocks(&File::options().write(true).open(&device).unwrap(), 1);
    fixture.node().create_snapshot(create_snapshot("s", "v")).unwrap();
    fixture.node().create_volume(from_snapshot("restored", "s", MIB as i64, block())).unwrap();
    assert_written(&File::from(fixture.image("restored")), 1);
    write_blocks(&File::options().write(true).open(&device).unwrap(), 2);
    fixture.node().create_volume(from_volume("copy", "v", MIB as i64, block())).unwrap();
    assert_written(&File::from(fixture.image("copy")), 2);
    drop(open);
    fixture.node().node_unpublish_volume(unpublish("v", &target)).unwrap();
    fixture.finish();
}

//! Tests of a restarted driver, which serves the volumes of the previous one.

use std::collections::BTreeSet;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::mpsc;

use loopfs::Bytes;
use loopfs::volume_store::VolumeKind;
use nix::sys::signal::Signal;

use crate::driver_process::Process;
use crate::fixture::{Fixture, MIB, id, read_from, size_of_mount, write_to};
use crate::support::*;

/// The earlier driver was killed while volumes were published.
#[test]
fn new_driver_serves_existing_volumes() {
    let fixture = Fixture::without_driver();
    fixture.volume("f", VolumeKind::Filesystem);
    fixture.volume("b", VolumeKind::Block);
    let (mounted, device, staging) =
        (fixture.target("mounted"), fixture.target("device"), fixture.target("staging"));
    let directories = &fixture.directories;
    let take_over = || Process::start_ready(directories);

    let (process, node) = take_over();
    node.node_stage_volume(stage("b", &staging, block())).unwrap();
    node.node_publish_volume(publish("f", &mounted, mount(&[]))).unwrap();
    node.node_publish_volume(publish("b", &device, block())).unwrap();
    write_to(&device, b"kept").unwrap();
    process.kill(node);
    assert!(
        directories.endpoint.exists() && directories.registration_socket().exists(),
        "the killed driver has removed its sockets"
    );
    assert_eq!((fixture.mounts_at(&mounted), fixture.mounts_at(&device)), (1, 1));

    let (process, node) = take_over();
    node.node_publish_volume(publish("f", &mounted, mount(&[]))).unwrap();
    node.node_publish_volume(publish("b", &device, block())).unwrap();
    assert_eq!(
        (fixture.mounts_at(&mounted), fixture.mounts_at(&device), fixture.devices("b").len()),
        (1, 1, 1)
    );
    for volume in ["f", "b"] {
        fixture.store.expand(&id(volume), Bytes(4 * MIB)).unwrap();
    }
    process.kill(node);

    let (process, node) = take_over();
    let four = i64::try_from(4 * MIB).unwrap();
    assert_eq!(node.node_expand_volume(expand("f", &mounted, four, 0)).unwrap().capacity_bytes, four);
    assert_eq!(node.node_expand_volume(expand("b", &device, four, 0)).unwrap().capacity_bytes, four);
    assert_eq!(size_of_mount(&mounted).0, 4 * MIB);
    assert_eq!(read_from(&device, 4), b"kept");
    node.node_unpublish_volume(unpublish("f", &mounted)).unwrap();
    process.kill(node);

    let (process, node) = take_over();
    node.node_unpublish_volume(unpublish("f", &mounted)).unwrap();
    node.node_unpublish_volume(unpublish("b", &device)).unwrap();
    node.node_unstage_volume(unstage("b", &staging)).unwrap();
    assert_eq!(fixture.devices("b"), []);
    process.stop(node);
    assert!(!directories.endpoint.exists() && !directories.registration_socket().exists());
    fixture.finish();
}

/// The state of a volume according to the responses that its client received.
enum Known {
    Created(String),
    /// The volume may exist or not.
    Deleting(String),
    Deleted(String),
}

/// Creates volumes of both kinds and deletes every third one, until the driver does not respond any more.
fn create_and_delete(node: &Client, round: usize, sender: &mpsc::Sender<Known>) -> Result<(), tonic::Status> {
    for turn in 0.. {
        let name = format!("v-{round}-{turn}");
        let capability = if turn % 2 == 0 { mount(&[]) } else { block() };
        node.create_volume(create(&name, 1 << 20, capability))?;
        sender.send(Known::Created(name.clone())).unwrap();
        if turn % 3 == 0 {
            sender.send(Known::Deleting(name.clone())).unwrap();
            node.delete_volume(delete(&name))?;
            sender.send(Known::Deleted(name)).unwrap();
        }
    }
    Ok(())
}

#[test]
fn killed_driver_leaves_no_partial_volume() {
    let fixture = Fixture::without_driver();
    let (mut there, mut absent) = (BTreeSet::new(), BTreeSet::new());
    for round in 0..8 {
        let process = Process::start(&fixture.directories);
        let node = process.connect();
        node.wait_until_ready();
        let (sender, receiver) = mpsc::channel();
        std::thread::scope(|scope| {
            scope.spawn(|| create_and_delete(&node, round, &{ sender }).unwrap_err());
            // The next call is in progress then, a little further in each round.
            let mut results: Vec<Known> = receiver.iter().take(2 + round).collect();
            process.signal(Signal::SIGKILL);
            assert_eq!(results.len(), 2 + round, "a call was refused before");
            results.extend(receiver.iter());
            for known in results {
                match known {
                    Known::Created(name) => drop(there.insert(id(&name))),
                    Known::Deleting(name) => drop(there.remove(&id(&name))),
                    Known::Deleted(name) => drop(absent.insert(id(&name))),
                }
            }
        });
        let found = BTreeSet::from_iter(fixture.store.list().unwrap());
        assert!(found.is_superset(&there), "{there:?} were created, {found:?} are left");
        assert!(found.is_disjoint(&absent), "{absent:?} were deleted, {found:?} are left");
        for volume in &found {
            assert_eq!(fixture.store.volume(volume).unwrap().capacity(), Bytes(MIB));
        }
    }
    fixture.store.recover().unwrap();
    fixture.finish();
}

/// Takes snapshots of both kinds of volume and creates volumes from them, until the driver does not respond any more.
fn copy(node: &Client, round: usize, sender: &mpsc::Sender<String>) -> Result<(), tonic::Status> {
    for turn in 0.. {
        let (source, capability) = if turn % 2 == 0 { ("f", mount(&[])) } else { ("b", block()) };
        let name = format!("{source}-{round}-{turn}");
        node.create_snapshot(create_snapshot(&name, source))?;
        sender.send(name.clone()).unwrap();
        node.create_volume(from_snapshot(&name, &name, 0, capability))?;
        sender.send(name).unwrap();
    }
    Ok(())
}

#[test]
fn killed_driver_leaves_no_partial_copy() {
    let fixture = Fixture::without_driver();
    fixture.volume("f", VolumeKind::Filesystem);
    fixture.volume("b", VolumeKind::Block);
    let content = vec![7; 64 << 10];
    let directory = fixture.store.volume(&id("f")).unwrap().open_dir().unwrap();
    let inside = |directory: &std::os::fd::OwnedFd, n: usize| {
        std::path::PathBuf::from(format!("/proc/self/fd/{}/file-{n}", directory.as_raw_fd()))
    };
    for n in 0..8 {
        std::fs::write(inside(&directory, n), &content).unwrap();
    }
    let image = |volume: &loopfs::volume_store::Volume, access| {
        std::fs::File::from(volume.open_image(access).unwrap())
    };
    let source = image(&fixture.store.volume(&id("b")).unwrap(), loopfs::loop_device::Access::ReadWrite);
    source.write_all_at(&content, 4096).unwrap();
    drop((directory, source));
    let mut known = Vec::new();
    for round in 0..6 {
        let process = Process::start(&fixture.directories);
        let node = process.connect();
        node.wait_until_ready();
        let (sender, receiver) = mpsc::channel();
        std::thread::scope(|scope| {
            scope.spawn(|| copy(&node, round, &{ sender }).unwrap_err());
            known.extend(receiver.iter().take(1 + round));
            process.signal(Signal::SIGKILL);
            known.extend(receiver.iter());
        });
    }
    let snapshots = fixture.store.snapshots().unwrap();
    for name in &known {
        assert!(snapshots.iter().any(|snapshot| snapshot.as_str() == name), "{name} is lost");
    }
    // An interrupted copy is complete or absent, and a repeated call creates it.
    let process = Process::start(&fixture.directories);
    let node = process.connect();
    node.wait_until_ready();
    for snapshot in &snapshots {
        let capability = if snapshot.as_str().starts_with('f') { mount(&[]) } else { block() };
        node.create_volume(from_snapshot(snapshot.as_str(), snapshot.as_str(), 0, capability)).unwrap();
        let volume = fixture.store.volume(&id(snapshot.as_str())).unwrap();
        match volume.kind() {
            VolumeKind::Filesystem => {
                let directory = volume.open_dir().unwrap();
                for n in 0..8 {
                    assert!(std::fs::read(inside(&directory, n)).unwrap() == content, "{snapshot}");
                }
            }
            VolumeKind::Block => {
                let mut found = vec![0; content.len()];
                image(&volume, loopfs::loop_device::Access::ReadOnly)
                    .read_exact_at(&mut found, 4096)
                    .unwrap();
                assert!(found == content, "{snapshot}");
            }
        }
    }
    process.stop(node);
    fixture.store.recover().unwrap();
    fixture.finish();
}

#[test]
fn repeated_calls_complete_interrupted_ones() {
    let mut fixture = Fixture::new();
    fixture.volume("b", VolumeKind::Block);
    let (target, staging) = (fixture.target("target"), fixture.target("staging"));

    // State: the device is attached and the file created, but not yet mounted.
    fixture.node().node_stage_volume(stage("b", &staging, block())).unwrap();
    std::fs::write(&target, "").unwrap();
    fixture.restart_driver();
    fixture.node().node_publish_volume(publish("b", &target, block())).unwrap();
    assert_eq!((fixture.mounts_at(&target), fixture.devices("b").len()), (1, 1));

    // State: the target is unmounted, but the file not yet removed.
    assert!(loopfs::mount::unmount(&target).unwrap());
    fixture.restart_driver();
    fixture.node().node_unpublish_volume(unpublish("b", &target)).unwrap();
    assert!(!target.exists());
    assert_eq!(fixture.devices("b"), []);

    // State: the file is removed, but the device not yet detached.
    fixture.node().node_stage_volume(stage("b", &staging, block())).unwrap();
    fixture.restart_driver();
    fixture.node().node_unpublish_volume(unpublish("b", &target)).unwrap();
    assert_eq!(fixture.devices("b"), []);
    fixture.finish();
}

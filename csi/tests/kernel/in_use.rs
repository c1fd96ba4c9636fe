//! A published volume is not deleted, even by the provisioner, which does not see the mounts of this driver.

use loopfs::ErrorKind;
use loopfs::volume_store::VolumeKind;
use nix::sys::signal::Signal;

use crate::driver_process::Process;
use crate::scene::{Scene, id};
use crate::support::*;

/// Returns the reason why a volume cannot be deleted.
fn refusal(scene: &Scene, volume: &str) -> String {
    let error = scene.store.delete(&id(volume)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
    error.to_string()
}

#[test]
fn a_published_directory_cannot_be_deleted_until_it_is_unpublished() {
    let mut scene = Scene::new();
    scene.volume("v", VolumeKind::Filesystem);
    let (first, second) = (scene.target("first"), scene.target("second"));
    for target in [&first, &second] {
        scene.node().node_publish_volume(publish("v", target, mount(&[]))).unwrap();
    }
    assert!(refusal(&scene, "v").contains(second.to_str().unwrap()));
    scene.restart_driver();
    refusal(&scene, "v");
    scene.node().node_unpublish_volume(unpublish("v", &second)).unwrap();
    assert!(refusal(&scene, "v").contains(first.to_str().unwrap()));
    scene.node().node_unpublish_volume(unpublish("v", &first)).unwrap();
    assert!(scene.store.delete(&id("v")).unwrap());
    scene.finish();
}

#[test]
fn a_staged_device_cannot_be_deleted_until_it_is_unstaged() {
    let scene = Scene::new();
    scene.volume("v", VolumeKind::Block);
    let (staging, target) = (scene.target("staging"), scene.target("target"));
    scene.node().node_stage_volume(stage("v", &staging, block())).unwrap();
    assert!(refusal(&scene, "v").contains("/dev/loop"));
    scene.node().node_publish_volume(publish("v", &target, block())).unwrap();
    assert!(refusal(&scene, "v").contains("/dev/loop"));
    scene.node().node_unpublish_volume(unpublish("v", &target)).unwrap();
    scene.node().node_unstage_volume(unstage("v", &staging)).unwrap();
    assert!(scene.store.delete(&id("v")).unwrap());
    scene.finish();
}

#[test]
fn a_killed_driver_leaves_no_undeletable_volume() {
    let scene = Scene::without_driver();
    scene.volume("published", VolumeKind::Filesystem);
    scene.volume("not", VolumeKind::Filesystem);
    let target = scene.target("target");
    let directories = &scene.directories;
    let take_over = || {
        let process = Process::start(directories);
        let client = Client::connect(&directories.endpoint);
        client.wait_until_ready();
        (process, client)
    };
    let (process, node) = take_over();
    node.node_publish_volume(publish("published", &target, mount(&[]))).unwrap();
    process.signal(Signal::SIGKILL);
    drop(node);
    refusal(&scene, "published");
    // As after a driver that was killed between the record and the mount.
    scene.store.record_publication(&id("not"), &scene.target("never")).unwrap();

    let (process, node) = take_over();
    assert!(refusal(&scene, "published").contains(target.to_str().unwrap()));
    assert!(scene.store.delete(&id("not")).unwrap());
    node.node_unpublish_volume(unpublish("published", &target)).unwrap();
    assert!(scene.store.delete(&id("published")).unwrap());
    drop(node);
    assert!(process.signal(Signal::SIGTERM).success());
    scene.finish();
}

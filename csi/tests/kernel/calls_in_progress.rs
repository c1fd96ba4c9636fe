//! Tests of calls in progress. A lock on the image of a volume blocks every call that attaches or detaches
//! it.

use std::os::fd::OwnedFd;

use loopfs::volume_store::VolumeKind;
use nix::fcntl::{Flock, FlockArg};
use tonic::{Code, Status};

use crate::fixture::{Fixture, is_block_device, repeated_while};
use crate::support::*;

pub(crate) fn lock_image(fixture: &Fixture, volume: &str) -> Flock<OwnedFd> {
    let image = fixture.image(volume);
    Flock::lock(image, FlockArg::LockExclusive).unwrap()
}

/// Waits until a call is in progress for the volume. The expansion of a volume that is not published is not blocked by the
/// lock on the image, and gets ABORTED while another call has the volume locked. (The expansion locks the volume for a
/// moment itself, so the other call may have to be repeated.)
pub(crate) fn wait_until_busy(node: &Client, volume: &str, target: &std::path::Path) {
    wait_until("a call is in progress", || {
        let refused = node.node_expand_volume(expand(volume, target, 0, 0)).err();
        refused.is_some_and(|status| status.code() == Code::Aborted)
    });
}

/// Repeats a call while another call has the volume locked.
pub(crate) fn until_free<T>(call: impl Fn() -> Result<T, Status>) -> Result<T, Status> {
    repeated_while(|status| status.code() == Code::Aborted, call)
}

#[test]
fn call_locks_only_its_own_volume() {
    let fixture = Fixture::with_volume(VolumeKind::Block);
    fixture.volume("other", VolumeKind::Block);
    let (target, others) = (fixture.target("target"), fixture.target("others"));
    let lock = lock_image(&fixture, "v");
    let slow = Client::connect(&fixture.directories.endpoint);
    let request = publish("v", &target, block());
    std::thread::scope(|scope| {
        let response = scope.spawn(|| until_free(|| slow.node_publish_volume(request.clone())));
        wait_until_busy(fixture.node(), "v", &target);
        let staging = fixture.target("staging");
        for refused in [
            fixture.node().node_publish_volume(request.clone()).map(drop),
            fixture.node().node_unpublish_volume(unpublish("v", &target)).map(drop),
            fixture.node().node_stage_volume(stage("v", &staging, block())).map(drop),
            fixture.node().node_unstage_volume(unstage("v", &staging)).map(drop),
        ] {
            assert_refused(refused, Code::Aborted, &["in progress", "retry"]);
        }
        fixture.node().node_publish_volume(publish("other", &others, block())).unwrap();
        fixture.node().node_unpublish_volume(unpublish("other", &others)).unwrap();
        drop(lock);
        response.join().unwrap().unwrap();
    });
    drop(slow);
    assert!(is_block_device(&target));
    fixture.node().node_unpublish_volume(unpublish("v", &target)).unwrap();
    fixture.finish();
}

#[test]
fn call_of_disconnected_client_keeps_lock() {
    let fixture = Fixture::with_volume(VolumeKind::Block);
    let target = fixture.target("target");
    let lock = lock_image(&fixture, "v");
    let impatient = Client::connect(&fixture.directories.endpoint);
    impatient.publish_and_hang_up(publish("v", &target, block()), || {
        wait_until_busy(fixture.node(), "v", &target)
    });
    drop(impatient);
    let refused = fixture.node().node_unpublish_volume(unpublish("v", &target));
    assert_refused(refused, Code::Aborted, &["in progress"]);
    drop(lock);

    until_free(|| fixture.node().node_unpublish_volume(unpublish("v", &target))).unwrap();
    assert_eq!(fixture.devices("v"), []);
    fixture.finish();
}

#[test]
fn stopping_driver_finishes_calls_in_progress() {
    let fixture = Fixture::without_driver();
    fixture.volume("v", VolumeKind::Block);
    let target = fixture.target("target");
    let driver = Driver::start(&fixture.directories);
    driver.wait_until_ready();
    let lock = lock_image(&fixture, "v");
    let slow = Client::connect(&fixture.directories.endpoint);
    let response = std::thread::spawn({
        let request = publish("v", &target, block());
        move || until_free(|| slow.node_publish_volume(request.clone()))
    });
    wait_until_busy(&driver, "v", &target);
    driver.begin_to_stop();
    drop(lock);
    response.join().unwrap().unwrap();
    driver.stop();
    assert!(is_block_device(&target));

    let driver = Driver::start(&fixture.directories);
    driver.wait_until_ready();
    driver.node_unpublish_volume(unpublish("v", &target)).unwrap();
    driver.stop();
    fixture.finish();
}

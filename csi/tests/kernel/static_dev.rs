//! Tests of Block volumes with a `/dev` that is a copy from before the loop devices were created, as in a node of kind: a
//! tmpfs in which the kernel creates no nodes.

use std::path::Path;

use csi::volume_mounts::mount_points;
use loopfs::volume_store::VolumeKind;
use nix::mount::{MntFlags, MsFlags, mount as mount_filesystem, umount2};
use nix::sys::stat::{Mode, SFlag, makedev, mknod};
use tonic::Code;

use crate::fixture::{Fixture, id, read_from, write_to};
use crate::support::*;

/// A tmpfs that covers `/dev` and has no node of a loop device. Dropping it uncovers `/dev`.
struct StaticDev;

impl StaticDev {
    fn cover() -> Self {
        let nothing = None::<&str>;
        mount_filesystem(Some("none"), "/dev", Some("tmpfs"), MsFlags::MS_NOSUID, nothing).unwrap();
        let covered = Self;
        for (name, minor) in [("null", 3), ("zero", 5), ("urandom", 9)] {
            let all = Mode::from_bits_truncate(0o666);
            mknod(&Path::new("/dev").join(name), SFlag::S_IFCHR, all, makedev(1, minor)).unwrap();
        }
        covered
    }
}

impl Drop for StaticDev {
    fn drop(&mut self) {
        umount2("/dev", MntFlags::MNT_DETACH).unwrap();
    }
}

/// The node of the device is in the `/dev` of an earlier container.
#[test]
fn restarted_driver_recognises_published_device() {
    let first = StaticDev::cover();
    let mut fixture = Fixture::with_volume(VolumeKind::Block);
    let (staging, target, other) =
        (fixture.target("staging"), fixture.target("target"), fixture.target("other"));
    fixture.node().node_stage_volume(stage("v", &staging, block())).unwrap();
    fixture.node().node_publish_volume(publish("v", &target, block())).unwrap();
    write_to(&target, b"kept").unwrap();
    // As at the start of another container of the driver.
    drop(first);
    let second = StaticDev::cover();
    fixture.restart_driver();

    let read_only = fixture.node().node_publish_volume(publish_read_only("v", &other, block()));
    assert_refused(read_only, Code::FailedPrecondition, &["published for writing", "target"]);
    let unstaged = fixture.node().node_unstage_volume(unstage("v", &staging));
    assert_refused(unstaged, Code::FailedPrecondition, &["still published", "target"]);
    let deleted = fixture.node().delete_volume(delete("v"));
    assert_refused(deleted, Code::FailedPrecondition, &["still published", "target"]);
    assert_eq!(fixture.devices("v").len(), 1, "a pod may have the device");
    let data = &fixture.directories.data;
    assert_eq!(mount_points(data, &id("v")).unwrap(), Some(vec![target.clone()]));

    assert_eq!(read_from(&target, 4), b"kept");
    fixture.node().node_unpublish_volume(unpublish("v", &target)).unwrap();
    assert_eq!(fixture.devices("v"), []);
    fixture.node().node_publish_volume(publish("v", &target, block())).unwrap();
    assert_eq!(read_from(&target, 4), b"kept");
    fixture.node().node_unpublish_volume(unpublish("v", &target)).unwrap();
    fixture.node().node_unstage_volume(unstage("v", &staging)).unwrap();
    fixture.finish();
    drop(second);
}

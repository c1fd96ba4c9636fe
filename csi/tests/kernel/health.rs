//! Tests of the conditions that the driver reports for its node and for damaged volumes.

use std::fs::{self, File};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use csi_wire::csi as wire;
use loopfs::mount::{MountFlags, bind_mount};
use loopfs::project_quota::{ProjectId, assign_project, project_of};
use loopfs::volume_store::VolumeKind;
use nix::mount::MsFlags;
use rustix::fs::{IFlags, ioctl_getflags, ioctl_setflags};
use tonic::Code;

use crate::fixture::{Fixture, MIB, read_from, write_to};
use crate::support::*;

#[test]
fn read_only_file_system_is_reported() {
    let (fixture, disk, driver) = Fixture::on_scratch_disk();
    driver.create_volume(create("v", 1 << 20, mount(&[]))).unwrap();

    disk.remount(MsFlags::MS_RDONLY);
    let expected_texts = [disk.data.to_str().unwrap(), "read-only", "remount"];
    for _ in 0..2 {
        assert_refused(driver.probe_now(), Code::FailedPrecondition, &expected_texts);
    }
    let refused = driver.create_volume(create("w", 1 << 20, mount(&[])));
    assert_refused(refused, Code::FailedPrecondition, &expected_texts[1..]);
    let storage = driver.node_get_storage_health(Default::default()).unwrap().backend_health;
    assert!(storage[0].message.contains("read-only"), "{}", storage[0].message);

    disk.remount(MsFlags::empty());
    driver.wait_until_ready();
    assert_eq!(driver.list_volumes(list(0, "")).unwrap().entries.len(), 1);
    driver.delete_volume(delete("v")).unwrap();
    driver.stop();
    drop(disk);
    fixture.finish();
}

/// The probe reports that `/dev/loop-control` has no driver.
#[test]
fn filesystem_volumes_work_without_loop_driver() {
    const CONTROL: &str = "/dev/loop-control";
    let fixture = Fixture::with_volume(VolumeKind::Filesystem);
    let nothing = fixture.scratch().join("nothing");
    fs::write(&nothing, "").unwrap();
    bind_mount(File::open(&nothing).unwrap().as_fd(), Path::new(CONTROL), MountFlags::default()).unwrap();
    let probed = fixture.node().probe(Default::default());
    let target = fixture.target("target");
    let published = fixture.node().node_publish_volume(publish("v", &target, mount(&[])));
    assert!(loopfs::mount::unmount(Path::new(CONTROL)).unwrap());
    assert_refused(
        probed,
        Code::FailedPrecondition,
        &[CONTROL, "load the loop module (modprobe loop)", "host's /dev"],
    );
    published.unwrap();
    fixture.node().wait_until_ready();
    fixture.node().node_unpublish_volume(unpublish("v", &target)).unwrap();
    fixture.finish();
}

/// Returns the condition of a volume from every call that reports it. `None` if the call does not know the volume.
fn conditions(fixture: &Fixture, volume: &str, target: &Path) -> [Option<wire::VolumeCondition>; 3] {
    let node = fixture.node();
    let stats =
        node.node_get_volume_stats(stats(volume, target)).ok().and_then(|response| response.volume_condition);
    let got = node.controller_get_volume(get(volume)).ok();
    let got = got.and_then(|response| response.status.unwrap().volume_condition);
    let listed = node.list_volumes(list(0, "")).unwrap().entries.into_iter();
    let mut listed = listed.filter(|entry| entry.volume.as_ref().unwrap().volume_id == volume);
    [stats, got, listed.next().and_then(|entry| entry.status.unwrap().volume_condition)]
}

#[track_caller]
fn assert_abnormal(fixture: &Fixture, volume: &str, target: &Path, reason: &str, expected_texts: &[&str]) {
    for condition in conditions(fixture, volume, target) {
        let condition = condition.expect("the volume is known");
        assert!(condition.abnormal, "{condition:?}");
        for text in expected_texts {
            assert!(condition.message.contains(text), "{:?} does not contain {text:?}", condition.message);
        }
    }
    let request = wire::ControllerListVolumeHealthRequest::default();
    let ill = fixture.node().controller_list_volume_health(request).unwrap().entries;
    let of = |entry: &wire::VolumeHealth| (entry.volume_id.clone(), entry.health_statuses[0].reason.clone());
    assert_eq!(ill.iter().map(of).collect::<Vec<_>>(), [(volume.to_owned(), reason.to_owned())]);
    let health = fixture.node().node_get_volume_health(health_on_node(volume)).unwrap();
    let health = health.volume_health.unwrap();
    assert_eq!(of(&health), (volume.to_owned(), reason.to_owned()));
}

#[track_caller]
fn assert_healthy(fixture: &Fixture, volume: &str, target: &Path) {
    for condition in conditions(fixture, volume, target) {
        let condition = condition.expect("the volume is known");
        assert!(!condition.abnormal, "{}", condition.message);
    }
}

fn entry(fixture: &Fixture, volume: &str) -> PathBuf {
    fixture.directories.data.join("volumes").join(volume)
}

#[test]
fn directory_outside_its_project_is_abnormal() {
    let fixture = Fixture::with_volume(VolumeKind::Filesystem);
    let target = fixture.target("target");
    fixture.node().node_publish_volume(publish("v", &target, mount(&[]))).unwrap();
    assert_healthy(&fixture, "v", &target);
    let directory = File::open(&target).unwrap();
    let own = ProjectId::new(project_of(&directory).unwrap()).unwrap();

    assign_project(&directory, ProjectId::new(77).unwrap()).unwrap();
    assert_abnormal(&fixture, "v", &target, "ProjectChanged", &["77", "loopfs quota tag"]);
    assign_project(&directory, own).unwrap();
    assert_healthy(&fixture, "v", &target);

    let flags = ioctl_getflags(&directory).unwrap();
    ioctl_setflags(&directory, flags - IFlags::PROJECT_INHERIT).unwrap();
    assert_abnormal(&fixture, "v", &target, "ProjectNotInherited", &["do not inherit"]);
    ioctl_setflags(&directory, flags).unwrap();
    assert_healthy(&fixture, "v", &target);
    drop(directory);
    fixture.node().node_unpublish_volume(unpublish("v", &target)).unwrap();
    fixture.finish();
}

/// It cannot be expanded or published for writing, but its remaining part can be read.
#[test]
fn truncated_image_is_abnormal() {
    let fixture = Fixture::new();
    let four = i64::try_from(4 * MIB).unwrap();
    fixture.volume("v", VolumeKind::Block);
    fixture.node().controller_expand_volume(controller_expand("v", four, 0)).unwrap();
    let (target, second) = (fixture.target("target"), fixture.target("second"));
    fixture.node().node_publish_volume(publish("v", &target, block())).unwrap();
    assert_healthy(&fixture, "v", &target);
    let image = File::options().write(true).open(entry(&fixture, "v")).unwrap();
    image.set_len(MIB).unwrap();

    assert_abnormal(&fixture, "v", &target, "ImageTruncated", &["(1 MiB) of ", "(4 MiB) are left", "backup"]);
    let volume = fixture.node().controller_get_volume(get("v")).unwrap().volume.unwrap();
    assert_eq!(volume.capacity_bytes, four, "a truncated image does not make a smaller volume");
    let refused = fixture.node().controller_expand_volume(controller_expand("v", 2 * four, 0));
    assert_refused(refused, Code::FailedPrecondition, &["cut off"]);
    let refused = fixture.node().node_publish_volume(publish("v", &second, block()));
    assert_refused(refused, Code::FailedPrecondition, &["cut off"]);
    // The remaining part of the image can be copied.
    fixture.node().node_unpublish_volume(unpublish("v", &target)).unwrap();
    let read_only = publish_read_only("v", &second, block());
    fixture.node().node_publish_volume(read_only).unwrap();
    fixture.node().node_unpublish_volume(unpublish("v", &second)).unwrap();
    drop(image);
    assert_eq!(fixture.devices("v"), []);
    fixture.finish();
}

#[test]
fn deleted_image_in_use_is_abnormal() {
    let fixture = Fixture::with_volume(VolumeKind::Block);
    let (target, second) = (fixture.target("target"), fixture.target("second"));
    for target in [&target, &second] {
        fixture.node().node_publish_volume(publish("v", target, block())).unwrap();
    }
    write_to(&target, b"kept").unwrap();
    fixture.delete_in_use("v");
    fixture.store.empty_trash().unwrap();

    assert_abnormal(&fixture, "v", &target, "ImageMissing", &["the image was removed", "copy the content"]);
    assert_eq!(read_from(&target, 4), b"kept");
    fixture.node().node_unpublish_volume(unpublish("v", &target)).unwrap();
    assert_eq!(read_from(&second, 4), b"kept");
    for _ in 0..2 {
        fixture.node().node_unpublish_volume(unpublish("v", &second)).unwrap();
    }
    assert_eq!(conditions(&fixture, "v", &second), [None, None, None]);
    fixture.finish();
}

#[test]
fn replaced_image_in_use_is_abnormal() {
    let fixture = Fixture::with_volume(VolumeKind::Block);
    let target = fixture.target("target");
    fixture.node().node_publish_volume(publish("v", &target, block())).unwrap();
    write_to(&target, b"old").unwrap();
    // A restore from a backup may write a new image beside the old one and rename it.
    fixture.volume("restored", VolumeKind::Block);
    fs::rename(entry(&fixture, "restored"), entry(&fixture, "v")).unwrap();

    assert_abnormal(&fixture, "v", &target, "DeviceOfOtherFile", &["replaced", "unpublish and publish"]);
    fixture.node().node_unpublish_volume(unpublish("v", &target)).unwrap();
    fixture.node().node_publish_volume(publish("v", &target, block())).unwrap();
    assert_healthy(&fixture, "v", &target);
    assert_eq!(read_from(&target, 3), [0; 3]);
    fixture.node().node_unpublish_volume(unpublish("v", &target)).unwrap();
    fixture.finish();
}

#[test]
fn unstaging_detaches_device_of_deleted_volume() {
    let mut fixture = Fixture::with_volume(VolumeKind::Block);
    let staging = fixture.target("staging");
    fixture.node().node_stage_volume(stage("v", &staging, block())).unwrap();
    fixture.delete_in_use("v");
    fixture.restart_driver();
    fixture.node().node_unstage_volume(unstage("v", &staging)).unwrap();
    fixture.finish();
}

//! Tests of Filesystem volumes.

use std::fs::{self, File};
use std::os::fd::AsFd;

use csi_wire::csi as wire;
use csi_wire::csi::volume_usage::Unit;
use loopfs::Bytes;
use loopfs::mount::MountFlags;
use loopfs::volume_store::VolumeKind;
use nix::sys::statvfs::FsFlags;
use tonic::Code;

use crate::fixture::{Fixture, MIB, flags_of_mount, id, size_of_mount};
use crate::support::*;

/// The file system below the mounts is mounted nosuid,nodev,noexec in all cases.
#[test]
fn mount_has_only_requested_flags() {
    let fixture = Fixture::with_volume(VolumeKind::Filesystem);
    let target = fixture.target("target");
    let hardened = FsFlags::ST_NOSUID | FsFlags::ST_NODEV | FsFlags::ST_NOEXEC;
    let cases: [(&[&str], FsFlags); 5] = [
        (&[], FsFlags::empty()),
        (&["rw", "suid", "dev", "exec"], FsFlags::empty()),
        (&["nosuid", "nodev", "noexec"], hardened),
        (&["ro"], FsFlags::ST_RDONLY),
        (&["noatime"], FsFlags::ST_NOATIME),
    ];
    for (flags, expected) in cases {
        fixture.node().node_publish_volume(publish("v", &target, mount(flags))).unwrap();
        assert_eq!(flags_of_mount(&target), expected, "{flags:?}");
        fixture.node().node_unpublish_volume(unpublish("v", &target)).unwrap();
    }
    fixture.finish();
}

#[test]
fn read_only_and_writable_publications_coexist() {
    let fixture = Fixture::with_volume(VolumeKind::Filesystem);
    let (writer, reader) = (fixture.target("writer"), fixture.target("reader"));
    let read_only = publish_read_only("v", &reader, mount(&[]));
    fixture.node().node_publish_volume(publish("v", &writer, mount(&[]))).unwrap();
    for _ in 0..2 {
        fixture.node().node_publish_volume(read_only.clone()).unwrap();
    }
    fs::write(writer.join("file"), "seen").unwrap();
    assert_eq!(fs::read_to_string(reader.join("file")).unwrap(), "seen");
    let error = fs::write(reader.join("file"), "lost").unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::ReadOnlyFilesystem);

    for target in [&writer, &reader] {
        fixture.node().node_unpublish_volume(unpublish("v", target)).unwrap();
    }
    fixture.finish();
}

#[test]
fn volume_expands_while_in_use() {
    let fixture = Fixture::with_volume(VolumeKind::Filesystem);
    let target = fixture.target("target");
    fixture.node().node_publish_volume(publish("v", &target, mount(&[]))).unwrap();
    let open = File::create(target.join("file")).unwrap();

    let four = i64::try_from(4 * MIB).unwrap();
    let early = fixture.node().node_expand_volume(expand("v", &target, four, 0));
    assert_refused(early, Code::Aborted, &["1 MiB", "4 MiB"]);
    fixture.store.expand(&id("v"), Bytes(4 * MIB)).unwrap();
    for (required, limit) in [(four, 0), (0, 0), (0, four), (1, four)] {
        let size = fixture.node().node_expand_volume(expand("v", &target, required, limit)).unwrap();
        assert_eq!(size.capacity_bytes, four);
    }
    let limited = fixture.node().node_expand_volume(expand("v", &target, 0, four - 1));
    assert_refused(limited, Code::OutOfRange, &["limit"]);
    assert_eq!(size_of_mount(&target), (4 * MIB, 4 * MIB / 16384));

    drop(open);
    fixture.node().node_unpublish_volume(unpublish("v", &target)).unwrap();
    fixture.finish();
}

#[test]
fn stats_describe_only_the_volume() {
    let fixture = Fixture::with_volume(VolumeKind::Filesystem);
    let target = fixture.target("target");
    fixture.node().node_publish_volume(publish("v", &target, mount(&[]))).unwrap();
    let file = File::create(target.join("file")).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, &[1; 8192], 0).unwrap();
    file.sync_all().unwrap();
    let response = fixture.node().node_get_volume_stats(stats("v", &target)).unwrap();
    let usage: Vec<_> =
        response.usage.iter().map(|usage| (usage.unit(), usage.total, usage.used, usage.available)).collect();
    let total = i64::try_from(MIB).unwrap();
    assert_eq!(usage, [(Unit::Bytes, total, 8192, total - 8192), (Unit::Inodes, 64, 2, 62)]);
    assert!(!response.volume_condition.unwrap().abnormal);

    for elsewhere in [fixture.target("elsewhere"), fixture.directories.kubelet.clone(), "relative".into()] {
        assert_refused(
            fixture.node().node_get_volume_stats(stats("v", &elsewhere)),
            Code::NotFound,
            &["not published"],
        );
    }
    drop(file);
    fixture.node().node_unpublish_volume(unpublish("v", &target)).unwrap();
    fixture.finish();
}

#[test]
fn busy_overmounted_target_is_eventually_unpublished() {
    let fixture = Fixture::with_volume(VolumeKind::Filesystem);
    let target = fixture.target("target");
    fixture.node().node_publish_volume(publish("v", &target, mount(&[]))).unwrap();
    // A driver that did not check the target would leave this state.
    let directory = fixture.store.volume(&id("v")).unwrap().open_dir().unwrap();
    loopfs::mount::bind_mount(directory.as_fd(), &target, MountFlags::default()).unwrap();
    drop(directory);
    let open = File::create(target.join("file")).unwrap();
    assert_refused(fixture.node().node_unpublish_volume(unpublish("v", &target)), Code::Aborted, &["in use"]);
    assert!(target.exists());
    drop(open);
    fixture.node().node_unpublish_volume(unpublish("v", &target)).unwrap();
    assert!(!target.exists());
    fixture.finish();
}

#[test]
fn deleted_volume_can_only_be_unpublished() {
    let fixture = Fixture::new();
    let target = fixture.target("target");
    let node = fixture.node();
    assert_refused(
        node.node_publish_volume(publish("absent", &target, mount(&[]))),
        Code::NotFound,
        &["absent"],
    );
    assert_refused(node.node_stage_volume(stage("absent", &target, mount(&[]))), Code::NotFound, &["absent"]);
    assert_refused(node.node_get_volume_stats(stats("absent", &target)), Code::NotFound, &["absent"]);
    assert_refused(node.node_expand_volume(expand("absent", &target, 0, 0)), Code::NotFound, &["absent"]);
    assert!(!target.exists());

    fixture.volume("v", VolumeKind::Filesystem);
    node.node_publish_volume(publish("v", &target, mount(&[]))).unwrap();
    fixture.delete_in_use("v");
    for _ in 0..2 {
        node.node_unpublish_volume(unpublish("v", &target)).unwrap();
        node.node_unstage_volume(unstage("v", &fixture.target("staging"))).unwrap();
    }
    assert!(!target.exists());
    fixture.finish();
}

#[test]
fn other_filesystem_or_kind_is_refused() {
    let fixture = Fixture::with_volume(VolumeKind::Filesystem);
    let target = fixture.target("target");
    let on = |uuid: &str| {
        let volume_context = [(format!("{DRIVER}/filesystem-uuid"), uuid.to_owned())].into();
        wire::NodePublishVolumeRequest { volume_context, ..publish("v", &target, mount(&[])) }
    };
    let foreign = "00000000-1111-4222-8333-444444444444";
    let here = fixture.store.filesystem_uuid().to_string();
    assert_refused(
        fixture.node().node_publish_volume(on(foreign)),
        Code::FailedPrecondition,
        &[foreign, &here],
    );
    let as_block = publish("v", &target, block());
    assert_refused(
        fixture.node().node_publish_volume(as_block),
        Code::InvalidArgument,
        &["block", "Filesystem"],
    );
    let as_block = stage("v", &fixture.target("staging"), block());
    assert_refused(
        fixture.node().node_stage_volume(as_block),
        Code::InvalidArgument,
        &["block", "Filesystem"],
    );
    assert!(!target.exists());
    fixture.node().node_publish_volume(on(&here)).unwrap();
    fixture.node().node_unpublish_volume(unpublish("v", &target)).unwrap();
    fixture.finish();
}

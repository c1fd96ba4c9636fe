//! Tests of what the kernel reports about volumes and quotas, which node-debug evaluates as conditions.

use std::fs;

use csi::volume_mounts::{mount_points, require_project_quotas};
use loopfs::volume_store::VolumeKind;
use nix::sys::stat::{Mode, SFlag, mknod};
use rstest::rstest;

use crate::fixture::{Fixture, bind_mount_node, device_number, id, path_from};
use crate::scratch_disk::ScratchDisk;
use crate::support::*;

#[rstest]
#[case::directory(VolumeKind::Filesystem)]
#[case::image(VolumeKind::Block)]
fn publications_are_listed_as_mount_points(#[case] kind: VolumeKind) {
    let fixture = Fixture::with_volume(kind);
    let capability = || if kind == VolumeKind::Block { block() } else { mount(&[]) };
    fixture.volume("other", kind);
    let data = &fixture.directories.data;
    let targets = ["one", "two"].map(|name| fixture.target(name));
    let published = |volume| mount_points(data, &id(volume)).unwrap();
    assert_eq!((published("v"), published("absent")), (Some(Vec::new()), None));
    fixture.node().node_publish_volume(publish("v", &targets[0], capability())).unwrap();
    assert_eq!(published("v").unwrap(), targets[..1]);
    fixture.node().node_publish_volume(publish("v", &targets[1], capability())).unwrap();
    assert_eq!(published("v").unwrap(), targets);
    assert_eq!(published("other"), Some(Vec::new()));
    for target in &targets {
        fixture.node().node_unpublish_volume(unpublish("v", target)).unwrap();
    }
    assert_eq!(published("v"), Some(Vec::new()));
    fixture.finish();
}

/// A pod mounts a file and a device node with the name of the volume's loop device.
#[test]
fn decoy_mounts_are_no_publications() {
    let fixture = Fixture::with_volume(VolumeKind::Block);
    let target = fixture.target("target");
    fixture.node().node_publish_volume(publish("v", &target, block())).unwrap();
    let name = format!("loop{}", fixture.devices("v")[0].binding.index);
    // Files of an emptyDir in memory, which the kubelet mounts as subPaths.
    let sub_paths = ["file", "node"].map(|decoy| {
        let (volume, sub_path) = (fixture.target(decoy), fixture.target(&format!("{decoy}-sub-path")));
        fs::create_dir(&volume).unwrap();
        let source = volume.join(&name);
        match decoy {
            "file" => fs::write(&source, "").unwrap(),
            _ => mknod(&source, SFlag::S_IFBLK, Mode::S_IRWXU, device_number(&target)).unwrap(),
        }
        fs::write(&sub_path, "").unwrap();
        bind_mount_node(&source, &sub_path);
        sub_path
    });
    let published = mount_points(&fixture.directories.data, &id("v")).unwrap();
    assert_eq!(published, Some(vec![target.clone()]));
    for sub_path in sub_paths {
        assert!(loopfs::mount::unmount(&sub_path).unwrap());
    }
    fixture.node().node_unpublish_volume(unpublish("v", &target)).unwrap();
    fixture.finish();
}

/// A directory that is not a mount point is refused too.
#[test]
fn mount_without_project_quotas_is_refused() {
    require_project_quotas(&path_from("LOOPFS_TEST_XFS")).unwrap();
    let scratch = tempfile::tempdir_in(path_from("LOOPFS_TEST_XFS")).unwrap();
    for (path, reason) in [
        (path_from("LOOPFS_TEST_XFS_NOQUOTA"), "prjquota"),
        (scratch.path().to_owned(), "nothing is mounted at"),
    ] {
        let error = format!("{:#}", require_project_quotas(&path).unwrap_err());
        assert!(error.contains(reason) && error.contains(&path.display().to_string()), "{error}");
    }
    // The same disk as before, with quotas.
    let disk = ScratchDisk::mount_at(path_from("LOOPFS_TEST_SCRATCH").join("with-quotas"));
    require_project_quotas(&disk.data).unwrap();
    let mount_point = disk.data.clone();
    drop(disk);
    std::fs::remove_dir(mount_point).unwrap();
}

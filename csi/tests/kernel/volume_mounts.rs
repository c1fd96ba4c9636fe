//! Tests of what the kernel reports about volumes and quotas, which node-debug evaluates as conditions.

use csi::volume_mounts::{mount_points, require_project_quotas};
use loopfs::volume_store::VolumeKind;
use rstest::rstest;

use crate::fixture::{Fixture, id, path_from};
use crate::scratch_disk::ScratchDisk;
use crate::support::*;

#[rstest]
#[case::directory(VolumeKind::Filesystem)]
#[case::image(VolumeKind::Block)]
fn publications_are_listed_as_mount_points(#[case] kind: VolumeKind) {
    let fixture = Fixture::with_volume(kind);
    fixture.volume("other", kind);
    let data = &fixture.directories.data;
    let targets = ["one", "two"].map(|name| fixture.target(name));
    let published = |volume| mount_points(data, &id(volume)).unwrap();
    assert_eq!((published("v"), published("absent")), (Some(Vec::new()), None));
    fixture.node().node_publish_volume(publish("v", &targets[0], capability_of(kind))).unwrap();
    assert_eq!(published("v").unwrap(), targets[..1]);
    fixture.node().node_publish_volume(publish("v", &targets[1], capability_of(kind))).unwrap();
    assert_eq!(published("v").unwrap(), targets);
    assert_eq!(published("other"), Some(Vec::new()));
    for target in &targets {
        fixture.node().node_unpublish_volume(unpublish("v", target)).unwrap();
    }
    assert_eq!(published("v"), Some(Vec::new()));
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

//! Checks that no volume, device or mount remains. In this lane it checks the tests before it; in the sanity lane, the
//! driver that another test suite used.

use std::fs::{self, File};
use std::os::fd::AsFd;
use std::path::Path;
use std::time::{Duration, Instant};

use loopfs::loop_device::LoopControl;
use loopfs::mount::table as mountinfo;
use loopfs::project_quota::{ProjectId, ProjectQuota};
use loopfs::volume_store::VolumeKind;

use crate::fixture::{Fixture, path_from};
use crate::support::*;

/// A driver may still be removing deleted volumes in the background.
#[test]
fn nothing() {
    let data = path_from("LOOPFS_TEST_XFS");
    let start = Instant::now();
    loop {
        let left = left_behind(&data);
        if left.is_empty() {
            return;
        }
        assert!(start.elapsed() < TIMEOUT, "left behind:\n{}", left.join("\n"));
        std::thread::sleep(Duration::from_millis(100));
    }
}

#[test]
fn each_remaining_object_is_named() {
    let fixture = Fixture::new();
    let data = fixture.directories.data.clone();
    for (name, kind, capability) in
        [("directory", VolumeKind::Filesystem, mount(&[])), ("image", VolumeKind::Block, block())]
    {
        fixture.volume(name, kind);
        fixture.node().node_publish_volume(publish(name, &fixture.target(name), capability)).unwrap();
    }
    let left = left_behind(&data).join("\n");
    let devices = fixture.target("image").display().to_string();
    let mounts = fixture.target("directory").display().to_string();
    for named in ["the loop device", "the project", "volumes/directory", "volumes/image", &devices, &mounts] {
        assert!(left.contains(named), "{named} is not among\n{left}");
    }
    for name in ["directory", "image"] {
        fixture.node().node_unpublish_volume(unpublish(name, &fixture.target(name))).unwrap();
    }
    fixture.finish();
}

fn left_behind(data: &Path) -> Vec<String> {
    let mut left = Vec::new();
    let devices = LoopControl::open().unwrap().list().unwrap().devices;
    left.extend(devices.iter().map(|device| format!("the loop device {:?}", device.binding)));

    // The mount of a volume exposes a part of a file system: a directory, or the node of a device.
    let mounts = mountinfo::read().unwrap();
    let parts = mounts.iter().filter(|mount| mount.root != Path::new("/"));
    left.extend(parts.map(|mount| format!("a mount on {}", mount.mount_point.display())));

    let root = File::open(data).unwrap();
    let quota = ProjectQuota::of(root.as_fd());
    quota.finish_inactivation(ProjectId::new(1).unwrap()).unwrap();
    let ids = ProjectId::new(1).unwrap()..=ProjectId::new(u32::MAX - 1).unwrap();
    left.extend(quota.ids(ids).map(|usage| format!("the project {:?}", usage.unwrap())));

    left.extend(stored(data));
    left.extend(open_files(data));
    left
}

/// Returns the entries of the store: volumes, and incomplete and deleted ones.
fn stored(data: &Path) -> Vec<String> {
    let mut found = Vec::new();
    for directory in fs::read_dir(data).unwrap().map(Result::unwrap) {
        // The records of the store itself are permanent.
        if directory.file_type().unwrap().is_dir() && directory.file_name() != ".loopfs" {
            let entries = fs::read_dir(directory.path()).unwrap().map(Result::unwrap);
            found.extend(entries.map(|entry| format!("the entry {}", entry.path().display())));
        }
    }
    found
}

/// Returns the volumes and devices that other processes have open.
fn open_files(data: &Path) -> Vec<String> {
    let mut found = Vec::new();
    let own = std::process::id().to_string();
    for process in fs::read_dir("/proc").unwrap().flatten() {
        // A process may exit while it is examined.
        let Ok(files) = fs::read_dir(process.path().join("fd")) else { continue };
        if process.file_name() == *own {
            continue;
        }
        for file in files.flatten() {
            let Ok(path) = fs::read_link(file.path()) else { continue };
            // The target is `DIRECTORY/VOLUME`, or the name of a deleted volume. A driver has the directories
            // themselves open.
            let below = path.strip_prefix(data).is_ok_and(|below| below.components().count() > 1);
            let volume = below && !path.starts_with(data.join(".loopfs"));
            let name = path.to_string_lossy();
            if volume || (name.starts_with("/dev/loop") && name != "/dev/loop-control") {
                let who = process.file_name();
                found.push(format!("{}, open in process {}", path.display(), who.display()));
            }
        }
    }
    found
}

//! Tests in which the data disk is frozen, shut down or unmounted while volumes are published.

use std::fs::File;
use std::path::Path;

use loopfs::volume_store::{StoreOptions, VolumeStore};
use nix::fcntl::{Flock, FlockArg};
use nix::mount::{MntFlags, umount2};
use rstest::rstest;
use tonic::Code;

use crate::calls_in_progress::until_free;
use crate::fixture::{Fixture, id};
use crate::scratch_disk::ScratchDisk;
use crate::support::*;

/// The kinds of failure of a data disk.
#[derive(Clone, Copy)]
enum Kind {
    Frozen,
    ShutDown,
    Unmounted,
}

/// A failure of the data disk. Dropping it repairs the disk.
enum Failure<'a> {
    Frozen(File),
    ShutDown(&'a ScratchDisk),
    Unmounted(&'a ScratchDisk),
}

impl<'a> Failure<'a> {
    fn begin(kind: Kind, disk: &'a ScratchDisk) -> Self {
        match kind {
            Kind::Frozen => {
                let root = File::open(&disk.data).unwrap();
                loopfs::fault_injection::freeze(&root).unwrap();
                Self::Frozen(root)
            }
            Kind::ShutDown => {
                loopfs::fault_injection::shut_down_xfs(File::open(&disk.data).unwrap()).unwrap();
                Self::ShutDown(disk)
            }
            Kind::Unmounted => {
                umount2(&disk.data, MntFlags::MNT_DETACH).unwrap();
                Self::Unmounted(disk)
            }
        }
    }
}

impl Drop for Failure<'_> {
    fn drop(&mut self) {
        match self {
            Self::Frozen(root) => loopfs::fault_injection::thaw(root).unwrap(),
            Self::ShutDown(disk) => disk.restore(),
            Self::Unmounted(disk) => disk.mount(),
        }
    }
}

/// Publishes a Filesystem volume, and a Block volume. The second one is a Filesystem volume, too, if the file system is to be shut down: a
/// loop device would keep it in use. Returns their names.
fn publish_volumes(driver: &Driver, fixture: &Fixture, kind: Kind) -> Vec<&'static str> {
    let other = if matches!(kind, Kind::ShutDown) { ("second", mount(&[])) } else { ("image", block()) };
    let volumes = [("first", mount(&[])), other];
    for (volume, capability) in &volumes {
        driver.create_volume(create(volume, 1 << 20, capability.clone())).unwrap();
        driver.node_publish_volume(publish(volume, &fixture.target(volume), capability.clone())).unwrap();
    }
    volumes.into_iter().map(|(volume, _)| volume).collect()
}

#[track_caller]
fn assert_storage_failed(driver: &Driver, volume: &str, target: &Path, expected_text: &str) {
    let stats = driver.node_get_volume_stats(stats(volume, target)).unwrap();
    let condition = stats.volume_condition.unwrap();
    assert!(condition.abnormal && condition.message.contains(expected_text), "{condition:?}");
    // The kubelet ignores a response without usage.
    assert!(stats.usage.iter().all(|usage| usage.total > 0) && !stats.usage.is_empty(), "{:?}", stats.usage);

    let condition = driver.condition(volume);
    assert!(condition.abnormal && condition.message.contains(expected_text), "{condition:?}");

    let on_node = driver.node_get_volume_health(health_on_node(volume)).unwrap().volume_health.unwrap();
    let by_controller = driver.controller_get_volume_health(health(volume)).unwrap().volume_health.unwrap();
    let listed = driver.controller_list_volume_health(Default::default()).unwrap().entries;
    let listed = listed.into_iter().find(|health| health.volume_id == volume).unwrap();
    for health in [on_node, by_controller, listed] {
        let [status] = health.health_statuses.try_into().unwrap();
        assert_eq!(status.reason, "StorageFailed");
        assert!(status.message.contains(expected_text), "{}", status.message);
    }

    let [storage] =
        driver.node_get_storage_health(Default::default()).unwrap().backend_health.try_into().unwrap();
    assert!(storage.message.contains(expected_text), "{}", storage.message);
}

/// The health and the condition of each volume report the failure.
#[rstest]
#[case::frozen(Kind::Frozen, &["has not ended"])]
#[case::shut_down(Kind::ShutDown, &["shut down", "kernel log", "mount it again"])]
#[case::unmounted(Kind::Unmounted, &["nothing is mounted there"])]
fn volumes_can_be_unpublished_after_failure(#[case] kind: Kind, #[case] expected_texts: &[&str]) {
    let (fixture, disk, driver) = Fixture::on_scratch_disk();
    let volumes = publish_volumes(&driver, &fixture, kind);

    let failure = Failure::begin(kind, &disk);
    let named = [&[disk.data.to_str().unwrap()], expected_texts].concat();
    assert_refused(driver.probe_now(), Code::FailedPrecondition, &named);
    let refused = driver.create_volume(create("new", 1 << 20, mount(&[])));
    assert_refused(refused, Code::FailedPrecondition, expected_texts);
    for volume in &volumes {
        assert_storage_failed(&driver, volume, &fixture.target(volume), expected_texts[0]);
    }
    // Each call is made twice, because an orchestrator repeats a call whose response was lost.
    for volume in volumes.iter().chain(&volumes) {
        let target = fixture.target(volume);
        driver.node_unpublish_volume(unpublish(volume, &target)).unwrap();
        assert!(!target.exists());
        let unstaged = driver.node_unstage_volume(unstage(volume, &fixture.target("staging")));
        match *volume {
            "image" => {
                assert_refused(unstaged, Code::FailedPrecondition, &["of volume image", "with the disk"])
            }
            _directory => drop(unstaged.unwrap()),
        }
        let elsewhere = driver.node_get_volume_stats(stats(volume, &target));
        assert_refused(elsewhere, Code::NotFound, &["not published"]);
    }

    drop(failure);
    driver.wait_until_ready();
    // Without another call for the volumes, the driver detaches their devices and removes their records.
    for volume in volumes {
        delete_when_free(&driver, volume);
    }
    driver.stop();
    drop(disk);
    fixture.finish();
}

/// Deletes a volume. Waits for the cleanup that unpublish calls have left to the background.
fn delete_when_free(driver: &Driver, volume: &str) {
    wait_for_ok(|| {
        driver.delete_volume(delete(volume)).inspect_err(|refused| {
            assert!(matches!(refused.code(), Code::Aborted | Code::FailedPrecondition), "{refused}");
        })
    });
}

/// The pods of the earlier driver can end.
#[rstest]
#[case::frozen(Kind::Frozen)]
#[case::shut_down(Kind::ShutDown)]
#[case::unmounted(Kind::Unmounted)]
fn driver_without_disk_unpublishes_volumes(#[case] kind: Kind) {
    let (fixture, disk, driver) = Fixture::on_scratch_disk();
    let volumes = publish_volumes(&driver, &fixture, kind);
    driver.stop();
    let failure = Failure::begin(kind, &disk);

    let driver = Driver::start(&fixture.directories);
    fixture.directories.wait_for_registration_socket();
    for volume in &volumes {
        driver.node_unpublish_volume(unpublish(volume, &fixture.target(volume))).unwrap();
        assert!(!fixture.target(volume).exists());
        if *volume != "image" {
            driver.node_unstage_volume(unstage(volume, &fixture.target("staging"))).unwrap();
        }
    }
    drop(failure);
    driver.wait_until_ready();
    for volume in volumes {
        delete_when_free(&driver, volume);
    }
    driver.stop();
    drop(disk);
    fixture.finish();
}

/// The driver has not yet detected the failure of the disk.
#[rstest]
#[case::frozen(Kind::Frozen)]
#[case::shut_down(Kind::ShutDown)]
#[case::unmounted(Kind::Unmounted)]
fn unpublishing_succeeds_before_failure_is_detected(#[case] kind: Kind) {
    let (fixture, disk, driver) = Fixture::on_scratch_disk();
    let volumes = publish_volumes(&driver, &fixture, kind);
    let failure = Failure::begin(kind, &disk);
    for volume in &volumes {
        driver.node_unpublish_volume(unpublish(volume, &fixture.target(volume))).unwrap();
        assert!(!fixture.target(volume).exists());
    }
    // From now on the driver has detected the failure, and has no file of the failed disk open.
    assert_refused(driver.probe_now(), Code::FailedPrecondition, &[]);
    drop(failure);
    driver.wait_until_ready();
    for volume in volumes {
        unstage_when_free(&driver, &fixture, volume);
        driver.delete_volume(delete(volume)).unwrap();
    }
    driver.stop();
    drop(disk);
    fixture.finish();
}

/// Unstages a volume. Waits for the cleanup that the unpublish call may have left to the background.
fn unstage_when_free(driver: &Driver, fixture: &Fixture, volume: &str) {
    until_free(|| driver.node_unstage_volume(unstage(volume, &fixture.target("staging")))).unwrap();
}

/// A frozen disk blocks the process that holds the lock.
#[test]
fn unpublishing_ignores_locks_of_blocked_processes() {
    let (fixture, disk, driver) = Fixture::on_scratch_disk();
    let volumes = publish_volumes(&driver, &fixture, Kind::Frozen);
    driver.create_volume(create("new", 1 << 20, mount(&[]))).unwrap();
    let store = VolumeStore::open(&disk.data, StoreOptions::default()).unwrap();
    std::thread::scope(|scope| {
        let failure = Failure::begin(Kind::Frozen, &disk);
        // The lock on publication records is held by a process that waits for the disk.
        scope.spawn(|| store.record_publication(&id("new"), Path::new("/"), Path::new("/pods/new")).unwrap());
        let users = disk.data.join(".loopfs/users");
        let lock = || Flock::lock(File::open(&users).unwrap(), FlockArg::LockExclusiveNonblock);
        wait_until("the records are locked", || lock().is_err());
        for volume in &volumes {
            driver.node_unpublish_volume(unpublish(volume, &fixture.target(volume))).unwrap();
            assert!(!fixture.target(volume).exists());
        }
        drop(failure);
    });
    store.sync_publication(&id("new"), Path::new("/"), &[] as &[loopfs::mount::table::Mount]).unwrap();
    drop(store);
    driver.wait_until_ready();
    for volume in volumes.into_iter().chain(["new"]) {
        unstage_when_free(&driver, &fixture, volume);
        driver.delete_volume(delete(volume)).unwrap();
    }
    driver.stop();
    drop(disk);
    fixture.finish();
}

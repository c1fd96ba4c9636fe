//! Tests that the driver does not start where its mounts would not reach the kubelet. The driver runs in a mount namespace of its
//! own, as in a container or in a systemd service.

use std::fs::{self, File};
use std::path::Path;

use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use nix::sys::signal::Signal;
use rstest::rstest;

use crate::driver_process::Process;
use crate::fixture::Fixture;

/// Changes the propagation of a mount.
fn propagate(path: &Path, how: MsFlags) {
    mount(None::<&str>, path, None::<&str>, how, None::<&str>).unwrap();
}

/// Returns a node on which the file system of the kubelet's directory is shared, as on every node with systemd.
fn node() -> Fixture {
    let fixture = Fixture::without_driver();
    propagate(&fixture.directories.kubelet, MsFlags::MS_SHARED);
    fixture
}

/// Starts a driver in a mount namespace that `change` has changed.
fn start_apart(fixture: &Fixture, log: &Path, change: fn(&Path)) -> Process {
    let directories = &fixture.directories;
    let log = File::create(log).unwrap();
    let start = || {
        unshare(CloneFlags::CLONE_NEWNS).unwrap();
        change(&directories.kubelet);
        Process::start_logging_to(directories, log)
    };
    std::thread::scope(|scope| scope.spawn(start).join().unwrap())
}

/// Mounts a directory of the node, as a container engine does.
fn bind_mount_pods(kubelet: &Path) {
    let pods = kubelet.join("pods");
    fs::create_dir(&pods).unwrap();
    propagate(kubelet, MsFlags::MS_PRIVATE);
    mount(Some(&pods), &pods, None::<&str>, MsFlags::MS_BIND, None::<&str>).unwrap();
    propagate(&pods, MsFlags::MS_PRIVATE);
}

/// Mounts `pods` of a node as shared with the node, in a file system of the kubelet's directory that is private.
fn share_only_pods(kubelet: &Path) {
    let [pods, aside] = [kubelet.join("pods"), kubelet.with_file_name("aside")];
    fs::create_dir(&pods).unwrap();
    fs::create_dir(&aside).unwrap();
    let bind = |from: &Path, to: &Path| {
        mount(Some(from), to, None::<&str>, MsFlags::MS_BIND, None::<&str>).unwrap();
    };
    // A bind mount is in the peer group of its source. Directly at `pods` it would appear on the node, too.
    bind(&pods, &aside);
    propagate(kubelet, MsFlags::MS_PRIVATE);
    bind(&aside, &pods);
    assert!(loopfs::mount::unmount(&aside).unwrap());
    fs::remove_dir(&aside).unwrap();
}

/// The unit tests of `Isolation` have the other reasons.
#[rstest]
#[case::private_directory(bind_mount_pods, "pods: ")]
#[case::private_file_system_beside_a_shared_directory(share_only_pods, "kubelet: ")]
fn a_driver_with_isolated_mounts_does_not_start(#[case] change: fn(&Path), #[case] mount_point: &str) {
    let fixture = node();
    let log = fixture.scratch().join("log");
    let ended = start_apart(&fixture, &log, change).wait();
    assert!(!ended.success());
    let log = fs::read_to_string(log).unwrap();
    assert!(log.contains(mount_point) && log.contains("is private"), "{log}");
    assert!(log.contains("Bidirectional") && !log.contains("serving"), "{log}");
    fixture.finish();
}

#[test]
fn a_driver_with_shared_mounts_starts() {
    let fixture = node();
    let process = start_apart(&fixture, &fixture.scratch().join("log"), |_| {});
    process.connect().wait_until_ready();
    assert!(process.signal(Signal::SIGTERM).success());
    fixture.finish();
}

/// It runs in the mount namespace of the node, so it needs no propagation.
#[test]
fn driver_starts_without_shared_mounts() {
    let fixture = Fixture::without_driver();
    let pods = fixture.directories.kubelet.join("pods");
    fs::create_dir(&pods).unwrap();
    mount(Some(&pods), &pods, None::<&str>, MsFlags::MS_BIND, None::<&str>).unwrap();
    propagate(&pods, MsFlags::MS_PRIVATE);
    let process = Process::start(&fixture.directories);
    process.connect().wait_until_ready();
    assert!(process.signal(Signal::SIGTERM).success());
    assert!(loopfs::mount::unmount(&pods).unwrap());
    fixture.finish();
}

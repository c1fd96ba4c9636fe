//! Tests that the driver does not start where its mounts would not reach the kubelet.

use std::fs::{self, File};

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::signal::Signal;

use crate::driver_process::Process;
use crate::fixture::Fixture;

#[test]
fn a_driver_in_whose_container_mounts_are_private_does_not_start() {
    let fixture = Fixture::without_driver();
    // As a container engine mounts a directory of the node.
    let pods = fixture.directories.kubelet.join("pods");
    fs::create_dir(&pods).unwrap();
    mount(Some(&pods), &pods, None::<&str>, MsFlags::MS_BIND, None::<&str>).unwrap();
    let propagate = |how| mount(None::<&str>, &pods, None::<&str>, how, None::<&str>).unwrap();

    propagate(MsFlags::MS_PRIVATE);
    let log = fixture.scratch().join("log");
    let ended = Process::start_logging_to(&fixture.directories, File::create(&log).unwrap()).wait();
    assert!(!ended.success());
    let log = fs::read_to_string(log).unwrap();
    assert!(log.contains(pods.to_str().unwrap()) && log.contains("Bidirectional"), "{log}");
    assert!(!fixture.directories.endpoint.exists(), "nothing must be served");

    propagate(MsFlags::MS_SHARED);
    let process = Process::start(&fixture.directories);
    process.connect().wait_until_ready();
    assert!(process.signal(Signal::SIGTERM).success());

    umount2(&pods, MntFlags::MNT_DETACH).unwrap();
    fixture.finish();
}

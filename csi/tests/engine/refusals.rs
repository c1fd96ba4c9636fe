//! Tests of containers without a device, permission or mount that the driver needs. README.md has a table of the messages.

use rstest::rstest;
use tonic::Code;

use crate::container::{ABSENT_KUBELET, Machine, Propagation, Rights, SERVING, path_from};

/// The README, with the table of the messages.
const README: &str = include_str!("../../README.md");

/// Fails unless the message of the driver contains the text of the README for `missing`.
fn assert_documented(missing: &str, message: &str) {
    let row = README.lines().find(|line| line.starts_with(&format!("| {missing} |")));
    let row = row.unwrap_or_else(|| panic!("README.md has no row for {missing:?}"));
    let documented = row.split('`').nth(1).unwrap();
    assert!(message.contains(documented), "{documented:?} is not in {message}");
    println!("without {missing}: {}", message.trim_end());
}

fn machine() -> Machine {
    Machine::new(&path_from("LOOPFS_TEST_XFS"))
}

/// It lacks mount propagation or the directory of the kubelet, so it could never publish a volume.
#[rstest]
#[case("mount propagation", machine().with_propagation(Propagation::Private), "/kubelet: ")]
#[case("the kubelet's directory", machine().without_kubelet_directory(), ABSENT_KUBELET)]
fn driver_that_can_never_serve_exits(#[case] missing: &str, #[case] machine: Machine, #[case] object: &str) {
    let (code, log) = machine.run_to_end();
    assert_eq!(code, 1, "{log}");
    assert_documented(missing, &log);
    assert!(log.contains(object), "{object} is not in {log}");
    // The socket is no evidence, because a driver that has served removes it at its end.
    assert!(!log.contains(SERVING), "{log}");
}

/// Its probe reports the missing requirement, and its liveness check succeeds.
#[rstest]
#[case("the loop control device", machine().with_rights(Rights::NoNodes).with_own_dev())]
#[case("permission for loop devices", machine().with_rights(Rights::NoNodes))]
#[case("permission for loop devices", machine().with_rights(Rights::NoLoopDevices).with_own_dev())]
#[case("the data file system", machine().with_data_on_tmpfs())]
#[case("project quotas", Machine::new(&path_from("LOOPFS_TEST_XFS_NOQUOTA")))]
fn driver_waits_for_missing_requirements(#[case] missing: &str, #[case] machine: Machine) {
    let driver = machine.start();
    let status = driver.client.wait_for_probe().unwrap_err();
    assert_eq!(status.code(), Code::FailedPrecondition, "{status}");
    assert_documented(missing, status.message());
    // A restart could not help.
    machine.wait_until_alive();
    // Pods with volumes of an earlier driver end only through a registered one.
    machine.directories.wait_for_registration_socket();
    assert_eq!(driver.stop().0, 0);
}

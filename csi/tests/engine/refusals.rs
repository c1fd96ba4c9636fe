//! Tests of containers in which something is missing that the driver needs. README.md lists what it says.

use rstest::rstest;
use tonic::Code;

use crate::container::{Machine, Propagation, Rights, path_from};

/// The README, with the table of what the driver says.
const README: &str = include_str!("../../README.md");

/// Fails unless `said` has the words of the README for what is missing.
fn assert_documented(missing: &str, said: &str) {
    let row = README.lines().find(|line| line.starts_with(&format!("| {missing} |")));
    let row = row.unwrap_or_else(|| panic!("README.md has no row for {missing:?}"));
    let words = row.split('`').nth(1).unwrap();
    assert!(said.contains(words), "the driver does not say {words:?} but {said}");
    println!("without {missing}: {}", said.trim_end());
}

fn machine() -> Machine {
    Machine::new(&path_from("LOOPFS_TEST_XFS"))
}

#[rstest]
#[case("mount propagation", machine().with_propagation(Propagation::Private))]
#[case("the kubelet's directory", machine().without_kubelet_directory())]
fn a_driver_that_could_never_serve_a_volume_ends(#[case] missing: &str, #[case] machine: Machine) {
    let (code, log) = machine.run_to_end();
    assert_eq!(code, 1, "{log}");
    assert_documented(missing, &log);
    assert!(!machine.directories.endpoint.exists(), "nothing must be served");
}

#[rstest]
#[case("the loop control device", machine().with_rights(Rights::NoDevice).without_devices())]
#[case("permission for loop devices", machine().with_rights(Rights::NoDevice))]
#[case("the data file system", machine().with_data_on_tmpfs())]
#[case("project quotas", Machine::new(&path_from("LOOPFS_TEST_XFS_NOQUOTA")))]
fn a_driver_whose_storage_may_still_come_waits_and_names_what_is_missing(
    #[case] missing: &str,
    #[case] machine: Machine,
) {
    let driver = machine.start();
    let status = driver.client.wait_for_probe().unwrap_err();
    assert_eq!(status.code(), Code::FailedPrecondition, "{status}");
    assert_documented(missing, status.message());
    assert_eq!(machine.page("/healthz").0, 200, "a restart could not help");
    assert!(!machine.directories.registration_socket().exists(), "the driver must not register");
    assert_eq!(driver.stop().0, 0);
}

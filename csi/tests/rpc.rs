//! Tests of the driver on a socket, without its file system. They run on any machine. Tests that need the file system
//! are in `kernel`.

mod support;

use std::fs;
use std::os::unix::fs::{FileTypeExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use csi_wire::csi as wire;
use rstest::rstest;
use support::*;
use tempfile::TempDir;
use tonic::Code;

struct Fixture {
    driver: Driver,
    directories: Directories,
    scratch: TempDir,
}

/// Returns a driver whose data directory is a plain directory, as on a node whose disk is not mounted.
fn fixture() -> Fixture {
    let scratch = tempfile::tempdir().unwrap();
    let data = scratch.path().join("data");
    fs::create_dir(&data).unwrap();
    let directories = Directories::create(scratch.path(), &data);
    let driver = Driver::start(&directories);
    Fixture { driver, directories, scratch }
}

impl Fixture {
    fn target(&self, name: &str) -> PathBuf {
        self.directories.kubelet.join(name)
    }

    fn stop(self) {
        self.driver.stop();
        assert!(!self.directories.endpoint.exists() && !self.directories.registration_socket().exists());
        assert_eq!(
            fs::read_dir(&self.directories.data).unwrap().count(),
            0,
            "something was written below the mount point"
        );
        assert!(!self.scratch.path().join("data.filesystem-uuid").exists());
    }
}

#[test]
fn driver_reports_name_and_capabilities() {
    use wire::controller_service_capability::{Type as Controller, rpc as controller};
    use wire::node_service_capability::{Type, rpc};
    use wire::plugin_capability::{Type as Plugin, service, volume_expansion};

    let fixture = fixture();
    let info = fixture.driver.get_plugin_info(wire::GetPluginInfoRequest {}).unwrap();
    assert_eq!((info.name.as_str(), info.vendor_version.as_str()), (DRIVER, env!("CARGO_PKG_VERSION")));

    let capabilities =
        fixture.driver.get_plugin_capabilities(wire::GetPluginCapabilitiesRequest {}).unwrap().capabilities;
    let kinds: Vec<_> = capabilities
        .into_iter()
        .map(|capability| match capability.r#type.unwrap() {
            Plugin::Service(found) => found.r#type().as_str_name(),
            Plugin::VolumeExpansion(found) => found.r#type().as_str_name(),
        })
        .collect();
    assert_eq!(
        kinds,
        [
            service::Type::ControllerService.as_str_name(),
            service::Type::VolumeAccessibilityConstraints.as_str_name(),
            service::Type::SnapshotAccessibilityConstraints.as_str_name(),
            volume_expansion::Type::Online.as_str_name(),
        ]
    );

    let capabilities =
        fixture.driver.node_get_capabilities(wire::NodeGetCapabilitiesRequest {}).unwrap().capabilities;
    let kinds: Vec<_> = capabilities
        .into_iter()
        .map(|capability| match capability.r#type.unwrap() {
            Type::Rpc(found) => found.r#type(),
        })
        .collect();
    assert_eq!(
        kinds,
        [
            rpc::Type::StageUnstageVolume,
            rpc::Type::GetVolumeStats,
            rpc::Type::ExpandVolume,
            rpc::Type::VolumeCondition,
            rpc::Type::SingleNodeMultiWriter,
            rpc::Type::GetVolumeHealth,
            rpc::Type::GetStorageHealth,
        ]
    );

    let capabilities = fixture
        .driver
        .controller_get_capabilities(wire::ControllerGetCapabilitiesRequest {})
        .unwrap()
        .capabilities;
    let kinds: Vec<_> = capabilities
        .into_iter()
        .map(|capability| match capability.r#type.unwrap() {
            Controller::Rpc(found) => found.r#type(),
        })
        .collect();
    assert_eq!(
        kinds,
        [
            controller::Type::CreateDeleteVolume,
            controller::Type::CloneVolume,
            controller::Type::CreateDeleteSnapshot,
            controller::Type::ListSnapshots,
            controller::Type::GetSnapshot,
            controller::Type::ListVolumes,
            controller::Type::ListVolumesPublishedNodes,
            controller::Type::GetCapacity,
            controller::Type::ExpandVolume,
            controller::Type::GetVolume,
            controller::Type::VolumeCondition,
            controller::Type::GetVolumeHealth,
            controller::Type::ListVolumeHealth,
            controller::Type::SingleNodeMultiWriter,
        ]
    );

    let info = fixture.driver.node_get_info(wire::NodeGetInfoRequest {}).unwrap();
    assert_eq!(info.node_id, NODE);
    let topology = info.accessible_topology.unwrap().segments;
    assert_eq!(
        topology.into_iter().collect::<Vec<_>>(),
        [(format!("topology.{DRIVER}/node"), NODE.to_owned())]
    );
    fixture.stop();
}

/// Calls that need the file system report that it is missing.
#[test]
fn driver_without_filesystem_does_not_register() {
    let fixture = fixture();
    let data = fixture.directories.data.to_str().unwrap().to_owned();
    let why = [data.as_str(), "nothing is mounted there", "prjquota"];
    assert_refused(fixture.driver.wait_for_probe(), Code::FailedPrecondition, &why);

    let target = fixture.target("target");
    let node = &fixture.driver;
    assert_refused(node.node_stage_volume(stage("v", &target, block())), Code::FailedPrecondition, &why);
    // The volume has no device on this node.
    node.node_unstage_volume(unstage("v", &target)).unwrap();
    assert_refused(
        node.node_publish_volume(publish("v", &target, mount(&[]))),
        Code::FailedPrecondition,
        &why,
    );
    // The mount table is sufficient without the file system.
    assert_refused(node.node_get_volume_stats(stats("v", &target)), Code::NotFound, &["not published"]);
    assert_refused(node.node_expand_volume(expand("v", &target, 1, 0)), Code::FailedPrecondition, &why);
    assert_refused(node.create_volume(create("v", 1, block())), Code::FailedPrecondition, &why);
    assert_refused(node.delete_volume(delete("v")), Code::FailedPrecondition, &why);
    assert_refused(node.validate_volume_capabilities(validate("v", block())), Code::FailedPrecondition, &why);
    assert_refused(node.list_volumes(list(0, "")), Code::FailedPrecondition, &why);
    assert_refused(node.create_snapshot(create_snapshot("s", "v")), Code::FailedPrecondition, &why);
    assert_refused(node.delete_snapshot(delete_snapshot("s")), Code::FailedPrecondition, &why);
    assert_refused(node.list_snapshots(list_snapshots(0, "", "", "")), Code::FailedPrecondition, &why);
    assert_refused(node.get_snapshot(get_snapshot("s")), Code::FailedPrecondition, &why);
    assert_refused(node.get_capacity(Default::default()), Code::FailedPrecondition, &why);
    assert_refused(
        node.controller_expand_volume(controller_expand("v", 1, 0)),
        Code::FailedPrecondition,
        &why,
    );
    assert_refused(node.controller_get_volume(get("v")), Code::FailedPrecondition, &why);
    assert_refused(node.controller_list_volume_health(Default::default()), Code::FailedPrecondition, &why);
    let storage = node.node_get_storage_health(Default::default()).unwrap().backend_health;
    assert_eq!(storage.len(), 1);
    assert_eq!(storage[0].status(), wire::StorageHealthErrorType::StorageUnreachable);
    assert!(why.iter().all(|text| storage[0].message.contains(text)), "{}", storage[0].message);
    assert!(!target.exists());
    assert!(!fixture.directories.registration_socket().exists());
    fixture.stop();
}

#[test]
fn unpublishing_succeeds_without_the_filesystem() {
    let fixture = fixture();
    let target = fixture.target("target");
    fs::create_dir(&target).unwrap();
    for _ in 0..2 {
        fixture.driver.node_unpublish_volume(unpublish("v", &target)).unwrap();
        assert!(!target.exists());
    }
    fixture.driver.node_unpublish_volume(unpublish("v", &fixture.target("absent/target"))).unwrap();
    fixture.stop();
}

#[test]
fn empty_requests_are_refused() {
    let fixture = fixture();
    let node = &fixture.driver;
    let volume = ["volume_id"];
    assert_refused(node.node_stage_volume(Default::default()), Code::InvalidArgument, &volume);
    assert_refused(node.node_unstage_volume(Default::default()), Code::InvalidArgument, &volume);
    assert_refused(node.node_publish_volume(Default::default()), Code::InvalidArgument, &volume);
    assert_refused(node.node_unpublish_volume(Default::default()), Code::InvalidArgument, &volume);
    assert_refused(node.node_get_volume_stats(Default::default()), Code::InvalidArgument, &volume);
    assert_refused(node.node_expand_volume(Default::default()), Code::InvalidArgument, &volume);
    assert_refused(node.create_volume(Default::default()), Code::InvalidArgument, &["name"]);
    assert_refused(node.delete_volume(Default::default()), Code::InvalidArgument, &volume);
    assert_refused(node.validate_volume_capabilities(Default::default()), Code::InvalidArgument, &volume);
    assert_refused(node.create_snapshot(Default::default()), Code::InvalidArgument, &["name"]);
    assert_refused(node.delete_snapshot(Default::default()), Code::InvalidArgument, &["snapshot_id"]);
    assert_refused(node.get_snapshot(Default::default()), Code::InvalidArgument, &["snapshot_id"]);
    assert_refused(node.controller_expand_volume(Default::default()), Code::InvalidArgument, &volume);
    assert_refused(node.controller_get_volume(Default::default()), Code::InvalidArgument, &volume);
    assert_refused(node.controller_get_volume_health(Default::default()), Code::InvalidArgument, &volume);
    assert_refused(node.node_get_volume_health(Default::default()), Code::InvalidArgument, &volume);
    fixture.stop();
}

#[test]
fn request_without_required_field_is_refused() {
    let fixture = fixture();
    let (node, target, none) = (&fixture.driver, fixture.target("target"), Path::new(""));
    let invalid = Code::InvalidArgument;
    assert_refused(node.node_stage_volume(stage("v", none, block())), invalid, &["staging_target_path"]);
    assert_refused(node.node_stage_volume(stage("v", &target, None)), invalid, &["volume_capability"]);
    assert_refused(node.node_unstage_volume(unstage("v", none)), invalid, &["staging_target_path"]);
    assert_refused(node.node_publish_volume(publish("v", none, block())), invalid, &["target_path"]);
    assert_refused(node.node_publish_volume(publish("v", &target, None)), invalid, &["volume_capability"]);
    assert_refused(node.node_unpublish_volume(unpublish("v", none)), invalid, &["target_path"]);
    assert_refused(node.node_get_volume_stats(stats("v", none)), invalid, &["volume_path"]);
    assert_refused(node.node_expand_volume(expand("v", none, 0, 0)), invalid, &["volume_path"]);
    assert_refused(node.create_volume(create("", 1, block())), invalid, &["name"]);
    assert_refused(node.create_volume(create("v", 1, None)), invalid, &["volume_capabilities"]);
    assert_refused(node.validate_volume_capabilities(validate("v", None)), invalid, &["volume_capabilities"]);
    assert_refused(node.controller_expand_volume(controller_expand("v", 0, 0)), invalid, &["capacity_range"]);
    assert_refused(node.create_snapshot(create_snapshot("", "v")), invalid, &["name"]);
    assert_refused(node.create_snapshot(create_snapshot("s", "")), invalid, &["source_volume_id"]);
    for request in [from_volume("v", "", 1, block()), from_snapshot("v", "", 1, block())] {
        assert_refused(node.create_volume(request), invalid, &["volume_content_source"]);
    }
    fixture.stop();
}

#[rstest]
#[case::outside("/etc/target")]
#[case::relative("target")]
#[case::leads_out("{kubelet}/../target")]
#[case::the_directory_itself("{kubelet}")]
#[case::newline("{kubelet}/a\nb")]
#[case::nul("{kubelet}/a\0b")]
#[case::long("{kubelet}/{long}")]
fn paths_outside_kubelet_directory_are_refused(#[case] path: &str) {
    let fixture = fixture();
    let kubelet = fixture.directories.kubelet.to_str().unwrap();
    let path = PathBuf::from(path.replace("{kubelet}", kubelet).replace("{long}", &"n/".repeat(4096)));
    let node = &fixture.driver;
    assert_refused(
        node.node_publish_volume(publish("v", &path, block())),
        Code::InvalidArgument,
        &["target_path"],
    );
    assert_refused(
        node.node_unpublish_volume(unpublish("v", &path)),
        Code::InvalidArgument,
        &["target_path"],
    );
    fixture.stop();
}

#[rstest]
#[case::leads_out("../v")]
#[case::path("a/b")]
#[case::hidden(".v")]
#[case::nul("a\0b")]
#[case::newline("a\nb")]
#[case::long(&"v".repeat(4096))]
fn malformed_volume_ids_are_refused(#[case] volume: &str) {
    let fixture = fixture();
    let target = fixture.target("target");
    let node = &fixture.driver;
    assert_refused(
        node.node_publish_volume(publish(volume, &target, block())),
        Code::InvalidArgument,
        &["volume_id"],
    );
    assert_refused(
        node.node_unpublish_volume(unpublish(volume, &target)),
        Code::InvalidArgument,
        &["volume_id"],
    );
    assert_refused(node.node_unstage_volume(unstage(volume, &target)), Code::InvalidArgument, &["volume_id"]);
    assert_refused(node.controller_get_volume(get(volume)), Code::InvalidArgument, &["volume_id"]);
    assert_refused(
        node.controller_expand_volume(controller_expand(volume, 1, 0)),
        Code::InvalidArgument,
        &["volume_id"],
    );
    // No such volume can exist, so it counts as deleted.
    node.delete_volume(delete(volume)).unwrap();
    fixture.stop();
}

#[test]
fn unpublishing_keeps_foreign_files() {
    let fixture = fixture();
    let outside = fixture.scratch.path().join("outside");
    fs::create_dir(&outside).unwrap();
    fs::write(outside.join("file"), "precious").unwrap();

    let link_on_the_way = fixture.target("way");
    symlink(&outside, &link_on_the_way).unwrap();
    let response = fixture.driver.node_unpublish_volume(unpublish("v", &link_on_the_way.join("file")));
    assert_refused(response, Code::FailedPrecondition, &["symbolic link"]);

    let full = fixture.target("full");
    fs::create_dir(&full).unwrap();
    fs::write(full.join("file"), "precious").unwrap();
    assert_refused(
        fixture.driver.node_unpublish_volume(unpublish("v", &full)),
        Code::FailedPrecondition,
        &["full"],
    );

    // The link itself is removed, and its target remains.
    let link = fixture.target("link");
    symlink(&outside, &link).unwrap();
    fixture.driver.node_unpublish_volume(unpublish("v", &link)).unwrap();
    assert!(!link.is_symlink());
    assert_eq!(fs::read_to_string(outside.join("file")).unwrap(), "precious");
    assert_eq!(fs::read_to_string(full.join("file")).unwrap(), "precious");
    fixture.stop();
}

#[rstest]
#[case::negative(-1, 0, Code::InvalidArgument)]
#[case::negative_limit(0, i64::MIN, Code::InvalidArgument)]
#[case::crossed(2, 1, Code::InvalidArgument)]
fn impossible_sizes_are_refused(#[case] required_bytes: i64, #[case] limit_bytes: i64, #[case] code: Code) {
    let fixture = fixture();
    let capacity_range = Some(wire::CapacityRange { required_bytes, limit_bytes });
    let request = wire::CreateVolumeRequest { capacity_range, ..create("v", 0, block()) };
    assert_refused(fixture.driver.create_volume(request), code, &["capacity_range"]);
    let request = controller_expand("v", required_bytes, limit_bytes);
    assert_refused(fixture.driver.controller_expand_volume(request), code, &["capacity_range"]);
    fixture.stop();
}

#[test]
fn list_continues_only_from_returned_token() {
    let fixture = fixture();
    assert_refused(fixture.driver.list_volumes(list(0, "invalid-token")), Code::Aborted, &["starting_token"]);
    assert_refused(fixture.driver.list_volumes(list(-1, "")), Code::InvalidArgument, &["max_entries"]);
    let snapshots =
        |max_entries, token| fixture.driver.list_snapshots(list_snapshots(max_entries, token, "", ""));
    assert_refused(snapshots(0, "invalid-token"), Code::Aborted, &["starting_token"]);
    assert_refused(snapshots(-1, ""), Code::InvalidArgument, &["max_entries"]);
    fixture.stop();
}

#[test]
fn missing_filesystem_fails_readiness_not_liveness() {
    let scratch = tempfile::tempdir().unwrap();
    let data = scratch.path().join("data");
    fs::create_dir(&data).unwrap();
    // This record exists if a file system was mounted at the data directory before.
    fs::write(scratch.path().join("data.filesystem-uuid"), "").unwrap();
    let mut directories = Directories::create(scratch.path(), &data);
    let address = directories.serve_metrics();
    let probes = directories.serve_probes();
    let driver = Driver::start(&directories);
    driver.wait_for_probe().unwrap_err();
    // The wait may have ended with another call.
    driver.probe(wire::ProbeRequest {}).unwrap_err();
    for address in [probes, address] {
        assert_eq!(http::get(address, "/healthz"), (200, "ok\n".to_owned()));
        let (status, why) = http::get(address, "/readyz");
        assert_eq!(status, 503);
        assert!(why.contains("nothing is mounted there") && why.contains("prjquota"), "{why}");
    }
    assert_eq!(http::get(probes, "/metrics").0, 404);
    let (status, metrics) = http::get(address, "/metrics");
    assert_eq!(status, 200);
    let refused = r#"loopfs_csi_rpcs_total{method="Probe",code="FailedPrecondition"}"#;
    for line in [refused, "loopfs_csi_storage_open 0\n", "loopfs_csi_ready 0\n"] {
        assert!(metrics.contains(line), "{line} is not in {metrics}");
    }
    assert!(!metrics.contains("loopfs_csi_store"), "unknown values must be omitted: {metrics}");
    assert_eq!(http::get(address, "/").0, 404);
    assert_eq!(
        http::request(address, "POST /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n").0,
        405
    );
    // Once the last result is too old.
    let wait_for = |page: &str, expected: String| {
        let start = Instant::now();
        loop {
            match http::get(probes, page) {
                (503, why) if why.contains(&expected) => break,
                response => assert!(start.elapsed() < TIMEOUT, "still {response:?}"),
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    };
    let endpoint = directories.endpoint.display();
    let second = Driver::start(&Directories::create(scratch.path(), &data));
    // The kubelet calls the second driver. If it restarted the first one for that, they would end each other in turn.
    wait_for("/readyz", format!("another process replaced {endpoint}"));
    assert_eq!(http::get(probes, "/healthz").0, 200);
    second.stop();
    assert!(!directories.endpoint.exists());
    // The kubelet cannot call a driver whose socket was removed.
    wait_for("/healthz", format!("the driver does not respond on {endpoint}"));
    driver.stop();
}

/// Nothing was ever mounted at its data directory, so it counts as ready.
#[test]
fn node_without_storage_is_not_registered() {
    let scratch = tempfile::tempdir().unwrap();
    let mut directories = Directories::create(scratch.path(), &scratch.path().join("data"));
    let address = directories.serve_metrics();
    let driver = Driver::start(&directories);
    assert_refused(driver.wait_for_probe(), Code::FailedPrecondition, &["make it the mount point"]);
    // A sidecar waits, and would end after an error.
    assert_eq!(driver.probe(Default::default()).unwrap(), wire::ProbeResponse { ready: Some(false) });
    assert_eq!(http::get(address, "/readyz"), (200, "ok\n".to_owned()));
    let (_, metrics) = http::get(address, "/metrics");
    assert!(metrics.contains("loopfs_csi_storage_open 0\n"), "{metrics}");
    assert!(metrics.contains("loopfs_csi_ready 1\n"), "{metrics}");
    assert!(!directories.registration_socket().exists());
    driver.stop();
}

/// The kubelet ends a pod with a volume only through a registered driver.
#[test]
fn driver_with_missing_disk_still_registers() {
    let scratch = tempfile::tempdir().unwrap();
    let directories = Directories::create(scratch.path(), &scratch.path().join("data"));
    fs::write(scratch.path().join("data.filesystem-uuid"), "").unwrap();
    let driver = Driver::start(&directories);
    assert_refused(driver.wait_for_probe(), Code::FailedPrecondition, &["make it the mount point"]);
    directories.wait_for_registration_socket();
    let target = directories.kubelet.join("target");
    fs::create_dir(&target).unwrap();
    driver.node_unpublish_volume(unpublish("v", &target)).unwrap();
    driver.node_unstage_volume(unstage("v", &directories.kubelet.join("staging"))).unwrap();
    assert!(!target.exists());
    driver.stop();
}

/// Only root can connect to the new socket.
#[test]
fn stale_sockets_are_replaced() {
    let scratch = tempfile::tempdir().unwrap();
    let directories = Directories::create(scratch.path(), &scratch.path().join("data"));
    for stale in [&directories.endpoint, &directories.registration_socket()] {
        drop(std::os::unix::net::UnixListener::bind(stale).unwrap());
    }
    let driver = Driver::start(&directories);
    assert!(!directories.registration_socket().exists());
    let socket = fs::symlink_metadata(&directories.endpoint).unwrap();
    assert!(socket.file_type().is_socket());
    assert_eq!(socket.permissions().mode() & 0o777, 0o600);
    driver.stop();
    assert!(!directories.endpoint.exists());
}

#[test]
fn a_missing_directory_prevents_the_start() {
    let scratch = tempfile::tempdir().unwrap();
    let directories = Directories::create(scratch.path(), scratch.path());
    fs::remove_dir(&directories.kubelet).unwrap();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let error = runtime
        .block_on(csi::serve(directories.args(), tokio_util::sync::CancellationToken::new()))
        .unwrap_err();
    assert!(format!("{error:#}").contains("--kubelet-dir"), "{error:#}");
}
